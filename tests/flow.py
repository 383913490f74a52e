"""Running the Snakefile in tests: real Snakemake, and either stand-in or real stages.

Snakemake takes a second to import, so one server process imports it and forks for each call.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""For child processes: this checkout first, and what this process was given besides."""
STAND_IN = ROOT / "tests" / "stub_draftmill.py"
STAGE_SERVER = ROOT / "tests" / "stage_server.py"

SERVER = """
import json, os, sys
import snakemake.cli, snakemake.workflow, snakemake.dag, pulp, smart_open, data.layout, data.shaping, pynvml
snakemake.cli.get_argument_parser()
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if not child:
        os.setpgrp()  # Snakemake ends its whole process group on a signal
        out = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1); os.dup2(out, 2)
        os.chdir(call["folder"])
        os.environ.update(call["environment"])
        sys.executable = call["python"]
        sys.argv = ["snakemake", *call["arguments"]]
        exec(call["prelude"])
        snakemake.cli.main()
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]), flush=True)
"""


@dataclass(frozen=True)
class Result:
    """How a call ended; `seconds` of processor time, that of its stages not counted."""

    code: int
    output: str
    seconds: float

    @property
    def planned(self) -> dict[str, int]:
        """Jobs of each rule that this call ran or would run, without `all`."""
        table = self.output.partition("Job stats:")[2].partition("total")[0]
        found = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
        return {rule: count for rule, count in found.items() if rule != "all"}


class Snakemake:
    """The server: Snakemake imported once."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {"PYTHONPATH": PYTHONPATH}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(
        self, folder: Path, python: Path, arguments: list[str], environment: Mapping[str, str], prelude: str
    ) -> Result:
        """Run Snakemake in `folder`, after the Python text `prelude`; `python` is where it looks for `draftmill`."""
        output = folder / ".snakemake-output"
        call = {
            "prelude": prelude,
            "folder": str(folder),
            "python": str(python),
            "output": str(output),
            "arguments": ["--snakefile", str(ROOT / "Snakefile"), *arguments],
            "environment": dict(environment),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        code, seconds = json.loads(self.process.stdout.readline())
        return Result(code, output.read_text(), seconds)

    def close(self) -> None:
        self.process.communicate()


@contextmanager
def snakemake_server() -> Iterator[Snakemake]:
    server = Snakemake()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def stage_server(folder: Path) -> Iterator[Path]:
    """Real stages, started quickly: the socket to ask."""
    path = folder / "stages"
    command = [sys.executable, str(ROOT / "tests" / "stage_server.py"), str(path)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield path
    finally:
        process.kill()
        process.communicate()


@dataclass
class Flow:
    """A run file in a folder of its own, and the stages beside it: stand-ins, or the real ones behind `stages`."""

    folder: Path
    server: Snakemake
    body: dict[str, Any]
    stages: Path | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = self.folder / "bin" / "draftmill"
        command.parent.mkdir()
        script = f"{STAND_IN} {self.record}" if self.stages is None else f"{STAGE_SERVER} {self.stages}"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {script} "$@"\n')
        command.chmod(0o755)
        rows = self.folder / "rows.jsonl"
        if not rows.exists():
            rows.write_text('{"prompt": "a", "response": "b"}\n')
        self.save()

    @property
    def record(self) -> Path:
        return self.folder / "record"

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.body["name"]

    def save(self) -> None:
        (self.folder / "run.yaml").write_text(json.dumps(self.body))

    def set(self, path: str, value: Any) -> None:
        """Change one setting, named with dots, and write the run file."""
        *sections, last = path.split(".")
        node = self.body
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
        self.save()

    def __call__(self, *arguments: str, prelude: str = "", **environment: str) -> Result:
        options = ["--configfile", "run.yaml", *arguments]
        if not {"--cores", "--jobs"} & set(arguments):
            options = ["--cores", "2", *options]
        return self.server(self.folder, self.folder / "bin" / "python", options, environment, prelude)

    def results(self) -> dict[str, dict[str, Any]]:
        """What Snakemake's own report shows of this run, by path."""
        made = self("--report", "out.html")
        assert made.code == 0, made.output
        text = (self.folder / "out.html").read_text().partition('<script id="results">')[2]
        return json.loads(text.partition("var results = ")[2].partition(";\n    </script>")[0])

    def calls(self) -> list[list[str]]:
        """What the stages were called with so far."""
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


def run_body(**changes: Any) -> dict[str, Any]:
    """A run file's content, small and valid, with sections replaced."""
    body: dict[str, Any] = {
        "name": "x",
        "target": {"model": "tiny:0"},
        "data": {"train": [{"path": "rows.jsonl"}], "responses": "regenerate"},
        "extract": {"parts": 2},
        "drafters": {"base": {}, "wide": {}},
        "eval": {"benchmarks": {"held": {"path": "rows.jsonl"}}},
    }
    return body | changes

"""A stand-in for the `draftmill` command that writes manifests and nothing else: for tests of the Snakefile.

    stub_draftmill.py RECORD COMMAND RUN.yaml [--part P] [--drafter NAME] ...

Each call appends its arguments to the file RECORD (with `$STUB_STAMP` at its end, and when it began and ended).
`$STUB_FAIL` names commands that fail and leave the state of interrupted work, `$STUB_SLEEP` gives the seconds that each
call takes, `$STUB_CHANGED` the number of a part whose content changes. Run files must be JSON here. The standard
library only: calls stay cheap.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(record: Path, command: str, run_file: str, *options: str) -> int:
    body = json.loads(Path(run_file).read_text())
    folder = Path(body.get("root", "runs")) / body["name"]
    given = dict(zip(options[::2], options[1::2], strict=False))
    started = time.time()
    stamp = "STUB_STAMP" in os.environ
    if not stamp:
        _note(record, [command, *options])
    time.sleep(float(os.environ.get("STUB_SLEEP", 0)))
    if stamp:
        _note(record, [command, *options, started, time.time()])
    part = f"part-{int(given.get('--part', 0)):04d}.json"
    states = {
        "prepare": "prompts/state.json",
        "regenerate": f"tokens/.{part[:-5]}.state.json",
        "extract": f"cache/{part[:-5]}/state.json",
    }
    if command in os.environ.get("STUB_FAIL", "").split(","):
        print(f"error: {command} was told to fail", file=sys.stderr)
        if command in states:
            (folder / states[command]).parent.mkdir(parents=True, exist_ok=True)
            (folder / states[command]).write_text('{"status": "running"}')
        return 1
    drafter = given.get("--drafter", "")
    parts = [f"part-{number:04d}.json" for number in range(body["extract"]["parts"])]
    keep = body["data"].get("responses", "keep") == "keep"
    outputs = {
        "prepare": [f"prompts/{name}" for name in parts]
        + ([f"tokens/{name}" for name in parts] if keep else [])
        + ["prompts/accounting.json"],
        "regenerate": [f"tokens/{part}"],
        "extract": [f"cache/{part}"],
        "train": [f"drafters/{drafter}/train.json"],
        "eval": [f"eval/{drafter}/manifest.json"],
        "export": [f"export/{drafter}/draftmill.json"],
        "report": [
            "report/report.html",
            "report/pictures/curves.svg",
            f"report/pictures/slots-{min(body['drafters'])}.svg",
        ],
    }.get(command, [])
    for output in outputs:
        path = folder / output
        path.parent.mkdir(parents=True, exist_ok=True)
        changed = path.stem == f"part-{int(os.environ.get('STUB_CHANGED', -1)):04d}"
        path.write_text(json.dumps({"by": command, "at": time.time() if changed else 0}))
    return 0


def _note(record: Path, call: list) -> None:
    with record.open("a") as file:
        file.write(json.dumps(call) + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

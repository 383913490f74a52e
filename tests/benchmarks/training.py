"""Training from a cache on this machine's disk, in the stage's own process: when it steps, and what it waits for.

    python -m tests.benchmarks.training --folder /large/disk [--limit 170] [--json FILE]    # 7.3 GB, one GPU
    python -m tests.benchmarks.training --shape tiny --steps 20                             # checks itself on a CPU

Writes an fp8 cache of random rows and a random head, then runs `draftmill train` for two drafters of the same settings.
The first finds no compiled kernels, and none of the cache's files in memory; the second finds the kernels that the
first left under the run's root, and the pages that it read. No row comes twice within `--steps` steps.

Each is killed (-9) at its last step, because a training that ends, or is asked to, writes a checkpoint, of 13 GB at
this shape: writing one is not measured. The host waits for the device at each line of metrics.jsonl, so there is one in
5 steps. Prints a row as soon as it is there, and one table:

- in memory: share of the cache's bytes in the page cache as the process starts, by mincore;
- first step s: from the process's start to the end of step 1, which is the first line's time less 4 median steps;
- compiled s: what the stage itself says of its compiling and capturing (a CPU compiles nothing);
- ms a step: median over lines after the first 5 steps; waiting, mean and most: `wait_share` of the same lines, the
  share of time in which the device (on a CPU the host) had nothing to do for want of a batch;
- GB read: what the process had from disk until it was killed, its libraries too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data.anchors import eligible
from data.codec import make_codec
from data.layout import Layout, part_name
from data.part import part_body, publish_part, shared_codec
from data.settings import Run, load_run
from data.shard import ShardRow, ShardWriter
from pipeline.head import TargetHead, publish_head
from tests.benchmarks.step import SHAPES, Shape, drafter_config, train_settings

LOG_EVERY = 5
AHEAD = 12
"""Steps whose rows are there beyond the last: readers are ahead of the step, and the kill is behind it."""
TARGET = {"model": "random"}


def write_run(folder: Path, shape: Shape) -> Path:
    """The run file; its training never comes to an end or a checkpoint."""
    never = 1_000_000
    watching = {"log_every": LOG_EVERY, "checkpoint_every": never, "validate_every": never, "loggers": ()}
    train = train_settings(shape, graphs="auto", **{"epochs": 100, **watching})
    body = {
        "name": "training",
        "root": str(folder / "runs"),
        "target": {"model": "none"},
        "data": {"train": [{"path": "none"}], "validation": 0.0},
        "extract": {"parts": 1, "layers": list(drafter_config(shape).target_layer_ids), "codec": "fp8"},
        "train": train.model_dump(mode="json", exclude_unset=True),
        "drafters": {name: {"mask_token": shape.vocab - 1} for name in ("first", "second")},
    }
    path = folder / "training.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def model_record(shape: Shape) -> dict[str, Any]:
    """What extraction records of a target, for drafters to follow."""
    config = drafter_config(shape)
    return {
        "num_hidden_layers": config.num_target_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "mask": {"candidates": [], "reserved": {}, "special": {}},
    }


def write_head(layout: Layout, shape: Shape) -> None:
    """A tied head [V, H] in bf16, its rows from a pool: random numbers are slower to make than to write."""
    pool = torch.randn(min(shape.vocab, 4096), shape.width).bfloat16()
    rows = pool[torch.randint(len(pool), (shape.vocab,))]
    identity = {"target": TARGET, "dtype": "torch.bfloat16", "rope_scaling": None}
    publish_head(layout, identity, lambda: TargetHead(rows, rows))


def write_cache(run: Run, shape: Shape, steps: int) -> None:
    """One part with rows for `steps` steps, states copied from random places of a pool, shards of the usual size."""
    layout, random = Layout.of(run), np.random.default_rng(0)
    layers, length = list(run.extract.layers), shape.rows[0] - 1
    supervised = np.arange(length) >= shape.prompt
    states = int(eligible(supervised)[-1])
    sample = torch.randn(2 * length, len(layers), shape.width).bfloat16()
    codec = shared_codec(layout, "benchmark", lambda: make_codec(run.extract.codec, len(layers), shape.width, sample))
    pool = {name: array.numpy() for name, array in codec.encode(sample).items()}
    body = part_body(run, codec, layers, shape.vocab, TARGET, {}, {}, model=model_record(shape))
    listed = [
        ShardRow(f"row-{i}", random.integers(0, shape.vocab - 1, length, np.int32), supervised, False, states)
        for i in range(len(shape.rows) * steps)
    ]
    size = max(1, run.extract.shard_bytes // (states * codec.bytes_per_state()))
    records = []
    for shard, first in enumerate(range(0, len(listed), size)):
        rows = listed[first : first + size]
        path = layout.cache / part_name(0) / f"shard-{shard:05d}.zarr"
        with ShardWriter(path, codec, rows, body["fingerprint"], run.extract.compressor) as writer:
            for i in range(len(rows)):
                at = int(random.integers(0, len(sample) - states))
                writer.put(i, {name: array[at : at + states] for name, array in pool.items()})
            records.append(writer.finish())
    publish_part(layout, 0, body, records)


def files(folder: Path) -> Iterator[Path]:
    """Files with something in them."""
    return (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def drop(folder: Path) -> None:
    """Ask the kernel to forget the pages of every file."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(folder: Path) -> float:
    """Share of the files' pages that are in the page cache."""
    libc, held, pages = ctypes.CDLL(None), 0, 0
    for path in files(folder):
        body = np.memmap(path, np.uint8, "r")
        found = np.zeros(-(-len(body) // mmap.PAGESIZE), np.uint8)
        addresses = (ctypes.c_void_p(body.ctypes.data), ctypes.c_size_t(len(body)), ctypes.c_void_p(found.ctypes.data))
        if libc.mincore(*addresses):
            raise OSError(f"{path}: mincore failed")
        held, pages = held + int((found & 1).sum()), pages + len(found)
    return held / pages


def start(path: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    """`draftmill train` of one drafter, as leader of its own process group; it finds no kernels but the run's."""
    own = {
        name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-m", "stages.cli", "train", str(path), "--drafter", name]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=own, stdout=file, stderr=file, start_new_session=True)


def whole_lines(metrics: Path) -> list[dict[str, Any]]:
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def watch(process: subprocess.Popen[bytes], metrics: Path, steps: int, end: float) -> float | None:
    """Wait for the line of step `steps`, the moment `end` or the process's own end; when the first line was there."""
    first = None
    while process.poll() is None and time.perf_counter() < end:
        lines = whole_lines(metrics)
        if lines and first is None:
            first = time.perf_counter()
        if lines and lines[-1]["step"] >= steps:
            break
        time.sleep(0.01)
    return first


def gigabytes_read(pid: int) -> float:
    """GB that a process, with all its threads, had from disk."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["read_bytes"]) / 1e9


def measure(path: Path, name: str, steps: int, end: float) -> dict[str, Any]:
    """Train drafter `name` for `steps` steps, or until `end` (`time.perf_counter`); its row of the table."""
    layout, log = Layout.of(load_run(path)), path.with_name(f"{name}.log")
    row: dict[str, Any] = {"who": name, "in_memory": in_memory(layout.cache)}
    begun = time.perf_counter()
    process = start(path, name, log)
    try:
        seen = watch(process, layout.metrics(name), steps, end)
        ended = process.poll()
        row["read_gb"] = None if ended is not None else gigabytes_read(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines, told = whole_lines(layout.metrics(name)), log.read_text()
    compiled = re.search(r"compiled and captured in ([\d.]+) s", told)
    row["compiled_s"] = float(compiled[1]) if compiled else None
    if ended is not None:
        return {**row, "failed": f"ended with {ended}: {' '.join(told.split())[-300:]}"}
    if seen is None or len(lines) < 2:
        return {**row, "failed": f"no second line in {time.perf_counter() - begun:.0f} s: --limit is too low"}
    return row | summary(lines, seen - begun)


def summary(lines: list[dict[str, Any]], first_line: float) -> dict[str, Any]:
    """Of the lines after the first, which came `first_line` seconds after the process's start."""
    seconds = statistics.median(line["seconds_per_step"] for line in lines[1:])
    waits = [line["wait_share"] for line in lines[1:]]
    return {
        "steps": lines[-1]["step"],
        "first_s": first_line - (lines[0]["step"] - 1) * seconds,
        "ms": 1e3 * seconds,
        "waiting": statistics.mean(waits),
        "waiting_most": max(waits),
        "lines": [[line["step"], 1e3 * line["seconds_per_step"], line["wait_share"]] for line in lines],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| training | in memory | first step s | compiled s | ms a step | waiting, mean | most | GB read | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        compiled = "-" if row["compiled_s"] is None else f"{row['compiled_s']:.1f}"
        begins = f"| {row['who']} | {row['in_memory']:.0%} |"
        if "failed" in row:
            lines.append(f"{begins} {row['failed']} | {compiled} | - | - | - | - | - |")
            continue
        lines.append(
            f"{begins} {row['first_s']:.1f} | {compiled} | {row['ms']:.2f} | {row['waiting']:.1%} | "
            f"{row['waiting_most']:.1%} | {row['read_gb']:.2f} | {row['steps']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="where to write; deleted afterwards")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no training goes on")
    parser.add_argument("--json", help="write the rows here too")
    arguments = parser.parse_args()
    begun, shape, rows = time.perf_counter(), SHAPES[arguments.shape], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = write_run(Path(folder), shape)
        run = load_run(path)
        cache = Layout.of(run).cache
        write_head(Layout.of(run), shape)
        write_cache(run, shape, arguments.steps + AHEAD)
        written = sum(file.stat().st_size for file in files(cache)) / 1e9
        print(f"{written:.2f} GB made and written in {time.perf_counter() - begun:.1f} s", flush=True)
        drop(cache)
        for name in run.drafters:
            rows.append(measure(path, name, arguments.steps, begun + arguments.limit))
            print(rows[-1], flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

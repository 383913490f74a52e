"""Reading the cache: random rows of about 1,000 tokens, warm, from one thread; and opening 100,000 rows.

    python -m tests.benchmarks.reading --folder /dev/shm          # 48 rows of 5 x 4096, fp8: about 1 GB
    python -m tests.benchmarks.reading --codec bf16 --rows 24 --threads 2

Prints GB/s of encoded states copied into buffers made once, and checked: memory-mapped, through Zarr, and through Zarr
with zstd (bytes after decompression; `ratio` is what zstd saved on these Gaussian states; real ones differ).
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from data.cache import Cache
from data.codec import make_codec
from data.layout import Layout, part_name
from data.part import part_body, publish_part, shared_codec
from data.settings import Run
from data.shard import ShardRow, ShardWriter


def make_run(root: Path, codec: str, compressor: str, parts: int = 1) -> Run:
    return Run.model_validate(
        {
            "name": f"{codec}-{compressor}",
            "root": str(root),
            "target": {"model": "tiny:0"},
            "data": {"train": [{"path": "none"}]},
            "extract": {"parts": parts, "codec": codec, "compressor": compressor},
        }
    )


def write(run: Run, rows: int, layers: int, width: int) -> float:
    """A cache of `rows` rows of 800 to 1,200 states in two shards; seconds that writing took."""
    layout, random = Layout.of(run), np.random.default_rng(0)
    sample = torch.randn(2048, layers, width).bfloat16()
    codec = shared_codec(layout, "benchmark", lambda: make_codec(run.extract.codec, layers, width, sample))
    body = part_body(run, codec, range(layers), 1000, {}, {}, {})
    pool = {name: array.numpy() for name, array in codec.encode(sample).items()}
    records, taken = [], 0.0
    for shard in range(2):
        lengths = random.integers(800, 1200, rows // 2)
        listed = [
            ShardRow(f"{shard}-{i}", np.zeros(n, np.int32), np.ones(n, bool), False, int(n))
            for i, n in enumerate(lengths)
        ]
        start = time.perf_counter()
        path = layout.cache / part_name(0) / f"shard-{shard:05d}.zarr"
        with ShardWriter(path, codec, listed, body["fingerprint"], run.extract.compressor) as writer:
            for i, row in enumerate(listed):
                at = int(random.integers(0, 2048 - row.states))
                writer.put(i, {name: array[at : at + row.states] for name, array in pool.items()})
            records.append(writer.finish())
        taken += time.perf_counter() - start
    publish_part(layout, 0, body, records)
    return taken


def read(cache: Cache, reads: int, threads: int) -> float:
    """GB/s over `reads` rows in random order, after one pass that warms up."""
    order = np.random.default_rng(1).integers(0, len(cache), reads)
    pools = [
        {name: np.zeros((1200, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}
        for _ in range(threads)
    ]
    for row in range(len(cache)):
        cache.read_states(row, pools[0], 0)
    with ThreadPoolExecutor(threads) as executor:
        start = time.perf_counter()
        slices = [order[i::threads] for i in range(threads)]
        states = sum(
            executor.map(
                lambda job: sum(cache.read_states(int(row), job[1], 0) for row in job[0]),
                zip(slices, pools, strict=True),
            )
        )
    return states * cache.codec.bytes_per_state() / (time.perf_counter() - start) / 1e9


def opening(root: Path, rows: int = 100_000, rows_a_shard: int = 25) -> float:
    """Seconds to open a cache of many rows, its shards not read."""
    run = make_run(root / "many", "fp8", "none", parts=8)
    layout = Layout.of(run)
    codec = shared_codec(layout, "benchmark", lambda: make_codec("fp8", 5, 4096))
    files = [{"path": f"array-{i}/c/0/0/0", "bytes": 1 << 20, "crc32c": i} for i in range(19)]
    for part in range(8):
        body = part_body(run, codec, range(5), 1000, {}, {}, {})
        shards = rows // 8 // rows_a_shard
        table = {"row_id": "", "length": 1000, "states": 1000, "teacher": 0, "eligible": 100, "validation": False}
        table |= {"state_crc32c": 0, "teacher_crc32c": 0}
        records = [
            {
                "name": f"shard-{shard:05d}.zarr",
                "fingerprint": body["fingerprint"],
                "files": files,
                "counts": {"rows": rows_a_shard, "tokens": 1, "states": 1, "teacher": 0, "bytes": 1},
                "rows": {name: [value] * rows_a_shard for name, value in table.items()}
                | {"row_id": [f"row-{part}-{shard}-{i}" for i in range(rows_a_shard)]},
            }
            for shard in range(shards)
        ]
        publish_part(layout, part, body, records)
    start = time.perf_counter()
    assert len(Cache.open(run)) == rows
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; deleted afterwards")
    parser.add_argument("--codec", default="fp8")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    zarrs = "installed" if importlib.util.find_spec("zarrs") else "not installed"
    print(f"codec {arguments.codec}, {arguments.threads} threads, zarrs {zarrs}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        for compressor, mapped in (("none", True), ("none", False), ("zstd", False)):
            run = make_run(Path(root), arguments.codec, compressor)
            if mapped or compressor == "zstd":
                taken = write(run, arguments.rows, arguments.layers, arguments.width)
            cache = Cache.open(run, mapped)
            size = int(cache.rows.states.sum()) * cache.codec.bytes_per_state()
            print(
                f"{'memory-mapped' if mapped else 'Zarr':14} {compressor:5} read "
                f"{read(cache, arguments.reads, arguments.threads):5.2f} GB/s, written {size / taken / 1e9:5.2f} GB/s, "
                f"ratio {size / cache.bytes:.2f}",
                flush=True,
            )
        print(f"100,000 rows in 4,000 shards open in {opening(Path(root)):.2f} s")
    print(f"largest resident set {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()

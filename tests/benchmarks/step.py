"""Time of one training step: forward, backward, clip, fp32-master optimizer, on random rows.

    python -m tests.benchmarks.step --shape 8b [--fp8] [--modes whole,compile,eager] [--against specforge]
    python -m tests.benchmarks.step --shape 8b --deterministic          # what bit-for-bit resume costs, in rows beside
    torchrun --nproc-per-node 2 -m tests.benchmarks.step --shape 8b     # data-parallel, a batch a rank

Prints one table: milliseconds a step on the device (median of `--steps`), that time as a part of SpecForge's,
milliseconds that the host is busy, TFLOP/s of the matrix products that training needs, peak memory, seconds to the
first step. Needs a CUDA device; `--shape tiny` runs on a CPU. What of SpecForge fails has the reason in its row.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.settings import Train
from pipeline.batches import fill
from pipeline.drafter import DrafterConfig
from pipeline.graphs import Step
from pipeline.metrics import step_flops
from tests.synthetic import MemoryCache, make_step


@dataclass(frozen=True)
class Shape:
    """Sizes of FIGURES' two shapes, and a tiny one that checks the benchmark itself."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    anchors: int
    rows: tuple[int, ...]
    prompt: int = 200


SHAPES = {
    "8b": Shape(4096, 32, 8, 128, 12288, 151936, 4096, 512, (2048, 2048)),
    "small": Shape(576, 9, 3, 64, 1536, 49152, 2048, 256, (512, 512, 512, 512)),
    "tiny": Shape(64, 4, 2, 16, 128, 512, 256, 32, (128, 128), 8),
}


def drafter_config(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_layers=5,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=16,
        mask_token_id=shape.vocab - 1,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        vocab_size=shape.vocab,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        layer_types=("full_attention",) * 5,
        sliding_window=None,
    )


def train_settings(shape: Shape, **changes: Any) -> Train:
    per_row = shape.anchors // len(shape.rows)
    sizes = {"context_tokens": shape.context, "anchor_slots": shape.anchors, "anchors_per_row": per_row}
    return Train(**{**sizes, "batches_per_step": 1, "epochs": 1, "graphs": "whole", **changes})


def build(
    shape: Shape, mode: str, fp8: bool, device: str, codec: str = "bf16", deterministic: bool = False
) -> tuple[Step, float]:
    """A step with one batch in its inputs, warmed up and captured; and the seconds that took."""
    rows = [length - 1 for length in shape.rows]
    cache = MemoryCache(codec, 5, shape.width, shape.vocab, rows, prompt=shape.prompt)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    train = train_settings(shape, deterministic=deterministic)
    step, plan = make_step(cache, drafter_config(shape), train, mode=mode, device=device, dtype=dtype,
                           dense=device != "cuda", fp8=fp8)  # fmt: skip
    views = step.shape.host_views(np.zeros(step.shape.offsets()[1], np.uint8))
    fill(cache, step.shape, plan.step(0)[0], views)
    step.inputs_from(views)
    begun = time.perf_counter()
    step.prepare(1, score=False)
    synchronise(device)
    return step, time.perf_counter() - begun


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], None], steps: int, device: str) -> dict[str, float]:
    """Medians over `steps` steps: `ms` between ends of steps on the device, `host_ms` until the host is free."""
    for _ in range(3):
        run()
    synchronise(device)
    host, walls = [], []
    for _ in range(steps):
        begun = time.perf_counter()
        run()
        host.append(time.perf_counter() - begun)
        synchronise(device)
        walls.append(time.perf_counter() - begun)
    return {"ms": 1e3 * statistics.median(walls), "host_ms": 1e3 * statistics.median(host)}


def memory_before(device: str) -> int:
    """Bytes that what ran before still holds, after the peak is forgotten."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory_peak(device: str, before: int) -> float:
    """GiB at the peak, beyond `before`."""
    return (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0


def ours(name: str, mode: str, fp8: bool, steps: int, device: str, deterministic: bool = False) -> dict[str, Any]:
    if deterministic:
        torch._dynamo.reset()  # nothing that it compares says so: it would take the kernels of the rows before
    before = memory_before(device)
    step, first = build(SHAPES[name], mode, fp8, device, deterministic=deterministic)

    def run() -> None:
        step.micro(True, True)
        step.update()

    result = measure(run, steps, device)
    flops = step_flops(step.drafter.config, step.shape, 1)
    ranks = f", {step.world} ranks" if step.world > 1 else ""
    who = f"draftmill {mode}{' fp8' if fp8 else ''}{' deterministic' if deterministic else ''}{ranks}"
    loss = float(step.take_sums()["loss"])
    return {"who": who, "shape": name, **result, "tflops": flops / result["ms"] / 1e9,
            "gib": memory_peak(device, before), "first_s": first, "loss": loss}  # fmt: skip


def theirs(name: str, steps: int, device: str, like: dict[str, Any]) -> list[dict[str, Any]]:
    """SpecForge's rows, for a step with the matrix products of the row `like`."""
    from tests.benchmarks.specforge import contenders

    rows = []
    for who, make in contenders(SHAPES[name], drafter_config(SHAPES[name]), device).items():
        torch._dynamo.reset()
        before, row = memory_before(device), {"who": who, "shape": name}
        try:
            begun = time.perf_counter()
            run = make()
            run()
            synchronise(device)
            row["first_s"] = time.perf_counter() - begun
            row |= measure(run, steps, device)
            row |= {"gib": memory_peak(device, before), "tflops": like["tflops"] * like["ms"] / row["ms"]}
        except Exception as error:  # ours is measured by now, and its table must come out
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        run = None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. `of SpecForge` divides by the first of SpecForge's rows that was measured."""
    lines = [
        "| who | shape | ms a step | of SpecForge | host ms | TFLOP/s | peak GiB | first step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = next((row["ms"] for row in rows if row["who"].startswith("specforge") and "ms" in row), None)
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['who']} | {row['shape']} | {row['failed']} | - | - | - | - | - |")
            continue
        ratio = "-" if base is None else f"{row['ms'] / base:.3f}"
        lines.append(
            f"| {row['who']} | {row['shape']} | {row['ms']:.2f} | {ratio} | {row['host_ms']:.2f} | "
            f"{row['tflops']:.0f} | {row['gib']:.1f} | {row['first_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--modes", help="comma-separated: whole (default on a GPU), compile, eager (default elsewhere)")
    parser.add_argument("--fp8", action="store_true", help="float8 products too")
    parser.add_argument("--deterministic", action="store_true", help="rows with train.deterministic too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--against", choices=["specforge"])
    parser.add_argument("--json", help="write the rows here too")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    modes = (arguments.modes or ("whole" if device == "cuda" else "eager")).split(",")
    narrow = (False, True) if arguments.fp8 else (False,)
    fixed = (False, True) if arguments.deterministic else (False,)
    for deterministic, mode, fp8 in itertools.product(fixed, modes, narrow):
        rows.append(ours(arguments.shape, mode, fp8, arguments.steps, device, deterministic))
        if int(os.environ.get("RANK", "0")) == 0:
            print(rows[-1], flush=True)
    if arguments.against:
        rows += theirs(arguments.shape, arguments.steps, device, rows[0])
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) > 0:
        return
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()

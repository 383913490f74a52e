"""Extraction end to end, tokens to published shards, of a target made from a configuration with random weights.

    python tests/benchmarks/extract.py                                  # Qwen3-8B shape on a GPU
    python tests/benchmarks/extract.py --shape smollm2 --root /dev/shm  # SmolLM2-135M shape, cache in memory
    python tests/benchmarks/extract.py --shape tiny --rows 64           # a CPU, seconds

Prints one table. `disk` is what this machine's disk takes (write and fdatasync of 4 GiB) beside what extraction wrote.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data.layout import Layout
from data.manifest import file_record, publish, read_manifest
from data.settings import Run
from data.shaping import cache_settings
from data.tokens import TokenRow, row_hash, write_tokens
from pipeline.encoder import Teacher, compilations
from pipeline.target import Target, rope_turn, tap_layers
from stages.extract import Machine, Part

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
}


class RandomPart(Part):
    """A part whose target is not on disk."""

    target: Target

    def _shape(self) -> dict[str, Any]:
        self.turn = rope_turn(self.target.config)
        self.layer_ids = tap_layers(self.run.extract.layers, self.target.layers)
        self.width = self.target.width
        extras = self.run.extract.extras
        self.teacher = Teacher("last_hidden" in extras, self.run.extract.top_k if "top_k" in extras else 0)
        return {
            "settings": cache_settings(self.run),
            "layer_ids": list(self.layer_ids),
            "target": {"source": "random", "weights": "random"},
            "inputs": {"tokens": self.tokens["fingerprint"]},
        }

    def _model(self, target: Target) -> dict[str, Any]:
        return {}

    def _check_rows(self) -> None:
        pass

    def _on_policy(self) -> dict[str, Any]:
        return {}


class RandomMachine(Machine):
    """A machine whose target is not on disk. Its head, which is no part of the states, is not written."""

    def share_head(self, layout: Layout, target: Mapping[str, Any], device: str) -> None:
        pass


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    body = dict(SHAPES[shape])
    config = AutoConfig.for_model(body.pop("model_type"), **body)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, None, device)


def write_rows(run: Run, rows: int, vocab: int, shortest: int, longest: int) -> int:
    """Rows of a uniform length, the first quarter of each unsupervised; returns their tokens."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(rows):
        length = int(rng.integers(shortest, longest + 1))
        ids = rng.integers(0, vocab, length).astype(np.int32)
        made.append(TokenRow(f"row-{number}", ids, np.arange(length) >= length // 4, True, False, "random"))
    made.sort(key=lambda row: row_hash(row.row_id))
    path = Layout.of(run).tokens(0)
    write_tokens(path.with_suffix(".parquet"), made)
    tokens = sum(len(row.token_ids) for row in made)
    counts = {"rows": rows, "tokens": tokens}
    files = [file_record(path.with_suffix(".parquet"), path.parent)]
    publish(path, "tokens", {"fingerprint": "random", "counts": counts, "files": files})
    return tokens


def disk_speed(folder: Path, size: int = 4 << 30) -> float:
    """Bytes a second that one sequential writer gets, fdatasync included."""
    block = os.urandom(64 << 20)
    path = folder / "speed"
    started = time.monotonic()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fdatasync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return size / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--lengths", type=int, nargs=2, default=(200, 2048), metavar=("MIN", "MAX"))
    parser.add_argument("--codecs", nargs="+", default=["fp8"])
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--extras", nargs="*", default=[])
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    parser.add_argument("--root", help="Folder for the cache; the system's temporary folder when omitted.")
    parser.add_argument("--eager", action="store_true", help="Do not compile.")
    parser.add_argument("--disk", action="store_true", help="Measure the disk first.")
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    target = random_target(options.shape, device, torch.bfloat16 if device != "cpu" else torch.float32)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0) if device != 'cpu' else 'CPU'}, {options}")
    lines = []
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        if options.disk:
            print(f"disk {disk_speed(Path(folder)) / 1e9:.2f} GB/s (4 GiB, fdatasync)")
        for codec in options.codecs:
            lines.append(measure(options, Path(folder), codec, target))
            shutil.rmtree(Path(folder) / "bench")
    print(
        "| shape | codec | tokens | tokens/s end to end | waiting for disk | padding | shapes | compilations: warm-up, "
        "after | bytes a token | GB/s | host GiB | device GiB | warm-up s |\n" + "|---" * 13 + "|"
    )
    print("\n".join(lines))


def measure(options: argparse.Namespace, root: Path, codec: str, target: Target) -> str:
    """One row of the table."""
    extract = {"parts": 1, "codec": codec, "tokens_per_batch": options.tokens_per_batch, "extras": options.extras}
    extract |= {"compressor": options.compressor, "compile": not options.eager}
    sections = {"target": {"model": "random"}, "data": {"train": [{"path": "x"}], "max_length": options.lengths[1]}}
    run = Run.model_validate({"name": "bench", "root": str(root), "extract": extract, **sections})
    tokens = write_rows(run, options.rows, target.vocab, *options.lengths)
    with ExitStack() as stack:
        machine = RandomMachine(run, stack)
        machine._target = target
        work = SimpleNamespace(device=str(target.device), check_stop=lambda: None)
        part = RandomPart(run, 0, machine, work, force=True)
        part.target = target
        started = time.monotonic()
        part._body(part._shape())
        extraction = machine.extraction(part.layer_ids, part.codec, part.teacher)
        warm, warmed = time.monotonic() - started, compilations()
        started = time.monotonic()
        part.make()
        seconds = time.monotonic() - started
    manifest = read_manifest(Layout.of(run).cache_part(0), "cache")
    size = manifest["counts"]["bytes"]
    ran = extraction.tokens
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    on_device = torch.cuda.max_memory_allocated() / 2**30 if target.device.type == "cuda" else 0.0
    return (
        f"| {options.shape} | {codec} | {tokens:,} | {ran / seconds:,.0f} | "
        f"{100 * extraction.waited / seconds:.1f} % | "
        f"{100 * (extraction.padded_tokens / ran - 1):.1f} % | {len(extraction.shapes)} | {warmed}, "
        f"{compilations() - warmed} | {size / tokens:,.0f} | {size / seconds / 1e9:.2f} | {peak:.1f} | "
        f"{on_device:.1f} | {warm:.0f} |"
    )


if __name__ == "__main__":
    main()

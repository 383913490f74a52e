"""Time of decoding: one-token pass, drafted step, and throughput with many rows in flight.

    python -m tests.benchmarks.decode                      # SmolLM2's shape, random weights, bf16, on cuda:0
    python -m tests.benchmarks.decode --shape tiny --device cpu --prompts 8

Prints one table: milliseconds a step (median of `--steps`, wait for the device included), with CUDA graphs and
eagerly, by rows in flight; then tokens a second over `--prompts` prompts of GSM8K's length with 256 new tokens, and
what capturing cost. Random weights: acceptance is what chance gives, times are a real target's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.decode import Engine, Prompt
from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.sampling import Sampling
from pipeline.target import Target

SHAPES = {
    "smollm2": (30, 576, 9, 3, 64, 1536, 49152),
    "tiny": (4, 64, 4, 2, 16, 128, 512),
}
"""Layers, width, heads, key/value heads, head width, MLP, vocabulary."""
BLOCK = 16


def make_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    layers, width, heads, groups, head, mlp, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(config).to(device, dtype), None, device)


def make_drafter(target: Target) -> Drafter:
    config = DrafterConfig(
        hidden_size=target.width,
        intermediate_size=target.config.intermediate_size,
        num_layers=5,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_key_value_heads,
        head_dim=target.config.head_dim,
        block_size=BLOCK,
        mask_token_id=target.vocab - 1,
        target_layer_ids=tuple(sorted({round(1 + j * (target.layers - 4) / 4) for j in range(5)})),
        num_target_layers=target.layers,
        vocab_size=target.vocab,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        layer_types=("full_attention",) * 5,
        sliding_window=None,
    )
    drafter = Drafter(config)
    initialise(drafter, 0)
    return drafter.to(target.device, target.dtype).eval().requires_grad_(False)


def make_prompts(count: int, vocabulary: int) -> list[Prompt]:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.normal(115, 40, count), 40, 300).astype(int)
    return [Prompt(f"p{i}", generator.integers(3, vocabulary - 8, n).tolist()) for i, n in enumerate(lengths)]


def make_engine(target: Target, drafter: Drafter | None, rows: int, graphs: bool) -> Engine:
    settings = {"max_length": 640, "sampling": Sampling(), "stop_ids": ()}
    return Engine(target, drafter, batch_size=rows, graphs=graphs, **settings)


def step_time(engine: Engine, prompts: list[Prompt], steps: int) -> float:
    """Median milliseconds of a step with all rows active, timed inside an ordinary run."""
    times: list[float] = []
    advance = engine._advance

    def timed() -> None:
        started = time.perf_counter()
        advance()
        if engine.rows.ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)

    engine._advance = timed  # type: ignore[method-assign]
    list(engine.generate(prompts, steps + 8))
    engine._advance = advance  # type: ignore[method-assign]
    return 1000 * statistics.median(times[4:])


def step_table(target: Target, drafter: Drafter, sizes: list[int], steps: int, graphs: bool) -> None:
    print(f"{'step':<22}{'rows':>6}{'graphed ms':>12}{'eager ms':>10}{'capture s':>11}")
    for name, made in (("one token", None), (f"block of {BLOCK}", drafter)):
        for rows in sizes:
            prompts = make_prompts(rows, target.vocab)
            eager = step_time(make_engine(target, made, rows, False), prompts, min(steps, 20))
            if not graphs:
                print(f"{name:<22}{rows:>6}{'-':>12}{eager:>10.2f}{'-':>11}")
                continue
            engine = make_engine(target, made, rows, True)
            list(engine.generate(prompts, steps + 8))  # captures
            graphed = step_time(engine, prompts, steps)
            print(f"{name:<22}{rows:>6}{graphed:>12.2f}{eager:>10.2f}{engine.graphs.seconds:>11.1f}", flush=True)


def throughput(target: Target, rows: int, count: int, new: int, graphs: bool) -> None:
    engine = make_engine(target, None, rows, graphs)
    prompts = make_prompts(count, target.vocab)
    started = time.perf_counter()
    tokens = sum(len(answer.ids) for answer in engine.generate(prompts, new))
    seconds = time.perf_counter() - started - engine.graphs.seconds
    print(
        f"{count} prompts x {new} tokens, {rows} rows in flight: {seconds:.1f} s, {tokens / seconds:.0f} tokens/s, "
        f"{1000 * seconds / engine.counts.steps:.2f} ms a step; 7473 prompts would take {7473 / count * seconds:.0f} s"
    )


def agreement(target: Target, drafter: Drafter, graphs: bool) -> None:
    """Graphed and eager, drafted and plain: how many of 16 answers are the same."""
    prompts = make_prompts(16, target.vocab)
    plain = {a.id: a.ids for a in make_engine(target, None, 8, False).generate(prompts, 64)}
    for name, made, graphed in (("plain, graphed", None, graphs), ("drafted, graphed", drafter, graphs)):
        answers = {a.id: a.ids for a in make_engine(target, made, 8, graphed).generate(prompts, 64)}
        print(f"{name}: {sum(answers[p.id] == plain[p.id] for p in prompts)} of 16 answers equal plain eager ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", default="1,32,512", help="rows in flight for the step times")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--in-flight", type=int, default=512)
    options = parser.parse_args()
    graphs = options.device != "cpu"
    target = make_target(options.shape, options.device, torch.bfloat16 if graphs else torch.float32)
    drafter = make_drafter(target)
    sizes = [int(rows) for rows in options.rows.split(",")]
    agreement(target, drafter, graphs)
    step_table(target, drafter, sizes if graphs else sizes[:2], options.steps, graphs)
    throughput(target, min(options.in_flight, options.prompts), options.prompts, 256 if graphs else 16, graphs)
    if graphs:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    with torch.no_grad():
        main()

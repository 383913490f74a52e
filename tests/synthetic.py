"""Rows, states and heads made from a seed, without a target: for tests of training and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.anchors import eligible, mix
from data.codec import make_codec
from data.settings import Train
from pipeline.batches import BatchShape, Plan
from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.graphs import Step
from pipeline.head import TargetHead
from pipeline.loss import LossRule
from pipeline.optimizer import Optimizer


class MemoryCache:
    """The part of `data.cache.Cache` that batches need, in memory.

    `lengths`: tokens a row; the first `prompt` tokens of each are unsupervised.
    """

    def __init__(self, codec_name: str, layers: int, width: int, vocab: int, lengths: Sequence[int], prompt: int = 4,
                 seed: int = 0, states: np.ndarray | None = None) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.width, self.vocab_size, self.layer_ids = width, vocab, tuple(range(layers))
        self._tokens = [
            (rng.integers(0, vocab - 1, n).astype(np.int32), np.arange(n) >= min(prompt, n - 2)) for n in lengths
        ]
        counts = np.array([max(eligible(mask), default=0) for _, mask in self._tokens], np.int32)
        sample = torch.from_numpy(rng.standard_normal((256, layers, width)).astype(np.float32))
        self.codec = make_codec(codec_name, layers, width, sample)
        self._states = []
        for count in counts.tolist():
            values = torch.from_numpy(rng.standard_normal((count, layers, width), np.float32)).bfloat16().float()
            self._states.append({name: array.numpy() for name, array in self.codec.encode(values).items()})
        rows = len(lengths)
        self.rows = SimpleNamespace(
            states=counts,
            length=np.array(lengths, np.int32),
            eligible=np.array([len(eligible(mask)) for _, mask in self._tokens], np.int32),
            shard=np.arange(rows, dtype=np.int32) // 4,
            row_hash=mix(np.arange(rows, dtype=np.uint64)),
            validation=np.zeros(rows, bool),
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self._tokens[row]

    def row_id(self, row: int) -> str:
        return f"row-{row}"

    def read_states(self, row: int, out: Mapping[str, np.ndarray], at: int) -> int:
        count = int(self.rows.states[row])
        for name, view in out.items():
            view[at : at + count] = self._states[row][name][:count]
        return count


def config(**changes: Any) -> DrafterConfig:
    """A small drafter over 3 taps of a 6-layer target of width 32 and 61 tokens."""
    base = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 4,
        "mask_token_id": 60,
        "target_layer_ids": (0, 2, 4),
        "num_target_layers": 6,
        "vocab_size": 61,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ("full_attention",) * changes.get("num_layers", 2),
        "sliding_window": None,
    }
    return DrafterConfig(**{**base, **changes})


def head(vocab: int, width: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TargetHead:
    embedding = torch.randn(vocab, width, generator=torch.Generator().manual_seed(seed))
    embedding = embedding.to(device, dtype)
    return TargetHead(embedding, embedding)


def make_step(cache: MemoryCache, drafter_config: DrafterConfig, train: Train, *, mode: str = "eager",
              device: str = "cpu", dtype: torch.dtype = torch.float32, dense: bool = True, fp8: bool = False,
              total: int = 100, seed: int = 0) -> tuple[Step, Plan]:  # fmt: skip
    """A step over `cache`, and the plan that fills it."""
    rule = LossRule.of(train.loss, drafter_config.block_size)
    plan = Plan(cache, np.arange(len(cache)), train, drafter_config.block_size, rule.plan_weights())
    drafter = Drafter(drafter_config)
    initialise(drafter, seed)
    drafter.to(device)
    sliding = {kind == "sliding_attention" for kind in drafter_config.layer_types}
    tables = device == "cuda" and not dense
    shape = BatchShape(
        context=plan.context,
        blocks=plan.blocks,
        block_size=drafter_config.block_size,
        states={name: (spec.shape, spec.dtype) for name, spec in cache.codec.arrays().items()},
        windows=tuple(drafter_config.sliding_window if s else None for s in sorted(sliding)),
        tables=tables,
    )
    optimizer = Optimizer(drafter.named_parameters(), train, total)
    ends = head(drafter_config.vocab_size, drafter_config.hidden_size, 1, device, dtype)
    codec = cache.codec.to(device)
    options = {"mode": mode, "dtype": dtype, "dense": dense, "fp8": fp8, "noise": train.state_noise}
    options["deterministic"] = train.deterministic
    step = Step(drafter, ends, codec, None, shape, rule, optimizer, **options)
    return step, plan

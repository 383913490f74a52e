"""What a run will take before it runs: bytes, memory, hours. Formulas and stated assumptions; nothing is measured.

H width, I MLP width, L drafter layers, K taps, V vocabulary, S context positions and Q = A x B queries a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from data.codec import CODECS
from data.settings import Drafter, Run, Train
from pipeline.extraction import SLOTS
from pipeline.target import find_stack, tap_layers

GPU_FLOPS = 5.0e14
"""Useful FLOP/s of one GPU: what an H200 gets in bf16 extraction and training (577 and 540 TFLOP/s measured)."""
GPU_BANDWIDTH = 2.4e12
"""Bytes a second that decoding gets of one GPU's memory: half of an H200's."""
CPU_FLOPS = 1.5e11
"""Useful FLOP/s of two CPU cores in float32 (SmolLM2-135M: 626 tokens/s)."""
CPU_DECODE_SHARE = 0.25
"""Share of that which batched decoding on a CPU gets (139 tokens/s)."""
ANSWER_SHARE = 0.7
"""Assumed length of answers that are not written yet, of `data.regenerate.max_new_tokens`."""
SAVED = 3 * 4
"""Bytes a drafter parameter in a checkpoint: float32 master and two moments."""


@dataclass(frozen=True)
class Amounts:
    """Rows, and over all rows: tokens, states that are stored, anchors an epoch takes, supervised tokens.

    `from_tokens` says that they were counted, else they are estimated; `longest` row in tokens; `most_states` of one
    row. Of the rows that are not held out: `trained_states`, and `most_anchors` of one row.
    """

    rows: int
    tokens: int
    states: int
    anchors: int
    supervised: int
    longest: int
    from_tokens: bool
    trained_states: int
    most_states: int = 0
    most_anchors: int = 0


@dataclass(frozen=True)
class Model:
    """The target's sizes; parameters without the embedding, in all its layers and in those up to the last tap."""

    config: Any
    taps: tuple[int, ...]
    parameters: int
    layer_parameters: int
    tapped_parameters: int
    tied: bool

    @classmethod
    def of(cls, run: Run, config: Any) -> Model:
        """Counted on the meta device, without weights; of a mixture of experts all experts count."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=run.target.trust_remote_code)
        stack, name = find_stack(model, config.num_hidden_layers)
        layers = [_count(layer) for layer in stack.get_submodule(name)]
        taps = tap_layers(run.extract.layers, config.num_hidden_layers)
        tied = bool(config.tie_word_embeddings)
        depth = len(layers) if run.extract.extras else taps[-1] + 1
        total = _count(model) - (config.vocab_size * config.hidden_size if tied and _separate(model) else 0)
        return cls(config, taps, total, sum(layers), sum(layers[:depth]), tied)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _separate(model: nn.Module) -> bool:
    return model.get_input_embeddings().weight is not model.get_output_embeddings().weight


def cache_bytes(amounts: Amounts, model: Model, codec: str, run: Run) -> int:
    """Stored bytes of the whole cache, uncompressed, extras included."""
    state = CODECS[codec](len(model.taps), model.config.hidden_size).bytes_per_state()
    teacher = 2 * model.config.hidden_size * ("last_hidden" in run.extract.extras)
    teacher += 6 * run.extract.top_k * ("top_k" in run.extract.extras)
    return amounts.states * state + amounts.supervised * teacher + amounts.tokens * 6


def head_bytes(model: Model, run: Run) -> int:
    one = model.config.vocab_size * model.config.hidden_size * _itemsize(run)
    return one if model.tied else 2 * one


def drafter_parameters(model: Model, drafter: Drafter) -> int:
    """The 11 x L + 3 tensors of a drafter."""
    config = model.config
    width = config.hidden_size
    taps = len(model.taps) if drafter.taps == "auto" else len(drafter.taps)
    heads = drafter.heads or config.num_attention_heads
    dim = drafter.head_dim or getattr(config, "head_dim", None) or width // config.num_attention_heads
    groups = drafter.kv_heads or getattr(config, "num_key_value_heads", None) or heads
    mlp = drafter.intermediate_size or config.intermediate_size
    layer = width * dim * (2 * heads + 2 * groups) + 3 * width * mlp + 2 * width + 2 * dim
    return taps * width * width + 2 * width + drafter.layers * layer


def batches_per_epoch(amounts: Amounts, train: Train) -> tuple[float, float, float]:
    """Batches of one epoch, and how full S and A are on average (rows packed without waste)."""
    states, anchors = amounts.trained_states / train.context_tokens, amounts.anchors / train.anchor_slots
    count = max(states, anchors, 1.0)
    return count, states / count, anchors / count


def train_flops(model: Model, drafter: Drafter, train: Train) -> float:
    """Of one batch, forward and backward: all queries through the layers, the context through fc, k and v, the head."""
    queries = train.anchor_slots * drafter.block_size
    width, vocab = model.config.hidden_size, model.config.vocab_size
    taps = len(model.taps) if drafter.taps == "auto" else len(drafter.taps)
    own = drafter_parameters(model, drafter) - taps * width * width
    return (
        6.0 * (own * queries + (taps * width * width + own // 8) * train.context_tokens) + 4.0 * vocab * width * queries
    )


def extract_memory(model: Model, run: Run) -> tuple[int, int]:
    """Device bytes of extraction, and pinned host bytes of its ring."""
    config, tokens = model.config, max(run.extract.tokens_per_batch, run.data.max_length)
    weights = model.parameters * _itemsize(run)
    wide = 3 * config.intermediate_size + 8 * config.hidden_size + 3 * len(model.taps) * config.hidden_size
    state = CODECS[run.extract.codec](len(model.taps), config.hidden_size).bytes_per_state()
    return weights + tokens * wide * 2, SLOTS * tokens * (state + 24)


def train_memory(model: Model, drafter: Drafter, train: Train) -> int:
    """Device bytes of training: masters, gradients, moments, bf16 copies, the head, activations of one batch."""
    width = model.config.hidden_size
    queries = train.anchor_slots * drafter.block_size
    mlp = drafter.intermediate_size or model.config.intermediate_size
    state = drafter_parameters(model, drafter) * (4 + 4 + 8 + 2)
    head = model.config.vocab_size * width * 2 * (1 if model.tied else 2)
    activations = drafter.layers * (queries + train.context_tokens // 4) * (14 * width + 4 * mlp) * 2
    return state + head + activations + queries // 8 * model.config.vocab_size * 6


def hours(amounts: Amounts, model: Model, run: Run, gpu: bool) -> dict[str, float]:
    """Of every long stage on one device, from the assumptions above."""
    flops = GPU_FLOPS if gpu else CPU_FLOPS
    found = {}
    if run.data.responses == "regenerate":
        batch = run.data.regenerate.batch_size
        batch = (64 if gpu else 16) if batch == "auto" else batch
        weights = model.parameters * _itemsize(run)
        speed = batch * GPU_BANDWIDTH / weights if gpu else CPU_DECODE_SHARE * flops / (2 * model.parameters)
        found["regenerate"] = amounts.supervised / speed / 3600
    found["extract"] = 2 * model.tapped_parameters * amounts.tokens / flops / 3600
    for name, drafter in run.drafters.items():
        train = run.train_of(name)
        batches = train.epochs * batches_per_epoch(amounts, train)[0]
        if train.max_steps is not None:
            batches = min(batches, train.max_steps * train.batches_per_step)
        found[f"train {name}"] = batches * train_flops(model, drafter, train) / flops / 3600 / drafter.gpus
    return found


def _itemsize(run: Run) -> int:
    return 4 if run.target.dtype == "float32" else 2

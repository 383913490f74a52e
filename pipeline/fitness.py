"""Whether a run's drafters fit its target: judged without a cache, since making one takes hours."""

from __future__ import annotations

import functools
from typing import Any

import torch

from data.errors import BadInput
from data.settings import Run
from pipeline.drafter import Drafter, DrafterConfig, Linear
from pipeline.interchange import open_checkpoint
from pipeline.products import require_float8_sides
from pipeline.recipe import Design, Known, Occurrences, design
from pipeline.target import load_config, load_tokenizer, model_record, rope_scaling, tap_layers

SHAPING = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "target_layer_ids",
)
"""What of a configuration shapes a drafter's tensors, and what they read."""


def known_target(run: Run, config: Any = None, tokenizer: Any = None) -> Known:
    """What drafters take from the run's target, from its configuration and tokenizer alone (its own unless given).

    Raises BadInput when it has no such layers as the run taps.
    """
    config = config or load_config(run)
    layers = tap_layers(run.extract.layers, config.num_hidden_layers)
    record = model_record(run, config, tokenizer or load_tokenizer(run), config.vocab_size)
    return Known(layers, config.hidden_size, config.vocab_size, record, rope_scaling(config))


def require_drafter(
    run: Run, name: str, known: Known, occurrences: Occurrences = lambda tokens: dict.fromkeys(tokens, 0)
) -> Design:
    """What drafter `name` will be. `occurrences` of ids in rows, where there are rows yet.

    Raises BadInput when training would refuse it: for its settings, its float8 products or what it starts from.
    """
    made, train = design(run, name, known, occurrences), run.train_of(name)
    try:
        if train.fp8:
            _require_float8(made.config)
        if train.warm_start is not None:
            _require_start(train.warm_start, made.config)
    except BadInput as error:
        raise BadInput(f"drafters.{name}: {error}") from None
    return made


def _require_float8(config: DrafterConfig) -> None:
    with torch.device("meta"):
        matrices = {
            name: module.weight for name, module in Drafter(config).named_modules() if isinstance(module, Linear)
        }
        matrices["lm_head"] = torch.empty(config.vocab_size, config.hidden_size)
    for name, weight in matrices.items():
        require_float8_sides(name, weight)


def _require_start(source: str, config: DrafterConfig) -> None:
    theirs = _start(source, config.num_target_layers)
    for field in SHAPING:
        if (has := getattr(theirs, field)) != (wanted := getattr(config, field)):
            raise BadInput(f"train.warm_start: {source} has {field} {has}, this drafter {wanted}: change one of them")


@functools.cache
def _start(source: str, num_target_layers: int) -> DrafterConfig:
    """Read once a process: parts ask one after the other."""
    try:
        return open_checkpoint(source, num_target_layers).config
    except BadInput as error:
        raise BadInput(f"train.warm_start: {error}") from None

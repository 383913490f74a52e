"""What a drafter will be: its configuration, from settings and what is known of the target.

One rule for everybody who asks: training, which knows the target by its cache, and those who judge a run before there
is one (`pipeline/fitness.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data import rope, settings
from data.cache import Cache
from data.errors import BadInput
from data.manifest import read_manifest
from pipeline.drafter import DrafterConfig
from pipeline.mask_token import choose_mask

Occurrences = Callable[[Sequence[int]], Mapping[int, int]]
"""Tells how often token ids occur in the rows."""


@dataclass(frozen=True)
class Known:
    """What drafters take from a target: `layer_ids` that are kept of it, its width, its embedding's rows, sizes and
    mask tokens (`model_record` of `pipeline/target.py`), and how it scales RoPE (None: not at all; empty: untold)."""

    layer_ids: tuple[int, ...]
    width: int
    vocab_size: int
    model: Mapping[str, Any]
    rope_scaling: Mapping[str, Any] | None

    @classmethod
    def of_cache(cls, cache: Cache) -> Known:
        """From a cache's manifests. That of the head tells how RoPE is scaled, not those of parts: a cache of an
        earlier version stays what it is."""
        scaling = read_manifest(cache.layout.head.with_suffix(".json"), "head").get("rope_scaling", {})
        return cls(cache.layer_ids, cache.width, cache.vocab_size, cache.manifest["model"], scaling)


@dataclass(frozen=True)
class Design:
    """A drafter's configuration, why it has its mask token, and what became of the target's RoPE scaling (empty where
    there is nothing to say)."""

    config: DrafterConfig
    mask_reason: str
    rope_reason: str


def design(run: settings.Run, name: str, known: Known, occurrences: Occurrences) -> Design:
    """What drafter `name` will be; sizes and RoPE that are null follow the target.

    Raises BadInput when its settings contradict the target, or no mask token can be had.
    """
    try:
        return _design(run.drafter(name), known, occurrences)
    except BadInput as error:
        raise BadInput(f"drafters.{name}: {error}") from None


def design_for(run: settings.Run, name: str, cache: Cache) -> Design:
    """What drafter `name` is, trained from `cache`.

    Raises BadInput like `design`, and when its taps are not in the cache.
    """
    own = run.drafter(name)
    if own.taps != "auto":
        cache.tap_indices(own.taps, f"drafter `{name}`")
    rows = (cache.tokens(row)[0] for row in range(len(cache)))
    return design(run, name, Known.of_cache(cache), occurrences(rows, cache.vocab_size))


def _design(own: settings.Drafter, known: Known, occurrences: Occurrences) -> Design:
    model = known.model
    taps = known.layer_ids if own.taps == "auto" else own.taps
    if not set(taps) <= set(known.layer_ids):
        raise BadInput(f"taps {list(taps)} are not all in extract.layers {list(known.layer_ids)}: change one of them")
    mask, mask_reason = choose_mask(own.mask_token, model["mask"], known.vocab_size, occurrences)
    scaling, rope_reason = _rope_scaling(own, known.rope_scaling)
    config = DrafterConfig(
        hidden_size=known.width,
        intermediate_size=own.intermediate_size or model["intermediate_size"],
        num_layers=own.layers,
        num_heads=own.heads or model["num_attention_heads"],
        num_kv_heads=own.kv_heads or model["num_key_value_heads"],
        head_dim=own.head_dim or model["head_dim"],
        block_size=own.block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(taps),
        num_target_layers=model["num_hidden_layers"],
        vocab_size=known.vocab_size,
        max_position_embeddings=model["max_position_embeddings"],
        rms_norm_eps=model["rms_norm_eps"],
        rope_theta=own.rope_theta or model["rope_theta"],
        rope_scaling=scaling,
        layer_types=_layer_types(own),
        sliding_window=own.sliding_window,
    )
    return Design(config, mask_reason, rope_reason)


def _rope_scaling(own: settings.Drafter, theirs: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The drafter's RoPE scaling, and in words what became of the target's."""
    if own.rope_scaling is not None:
        return (None if own.rope_scaling["rope_type"] == "default" else own.rope_scaling), ""
    if theirs is None:
        return None, ""
    if not theirs:
        return None, "RoPE is not scaled: the cache, of an earlier version, does not tell whether the target's is"
    if problem := rope.problem(theirs):
        return None, f"RoPE is not scaled: the target's scaling is of no form that a drafter can have ({problem})"
    return dict(theirs), f"RoPE is scaled as the target's: {theirs['rope_type']}, factor {theirs['factor']:g}"


def _layer_types(own: settings.Drafter) -> tuple[str, ...]:
    if own.sliding_window is None:
        return ("full_attention",) * own.layers
    full = own.full_layers or 0
    return ("sliding_attention",) * (own.layers - full) + ("full_attention",) * full


def occurrences(rows: Iterable[np.ndarray], vocab_size: int) -> Occurrences:
    """A count of token ids over `rows` [T] of ids below `vocab_size`, made when it is first asked for."""

    @functools.cache
    def counts() -> np.ndarray:
        found = np.zeros(vocab_size, np.int64)
        for ids in rows:
            np.add.at(found, ids, 1)
        return found

    return lambda tokens: {token: int(counts()[token]) if token < vocab_size else 0 for token in tokens}

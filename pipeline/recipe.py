"""From settings and a cache to what training needs: the drafter's configuration, taps, mask token, target head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data import settings
from data.cache import Cache
from pipeline.drafter import DrafterConfig
from pipeline.mask_token import choose_mask


def drafter_config(run: settings.Run, name: str, cache: Cache) -> tuple[DrafterConfig, str]:
    """The configuration of drafter `name` and the reason for its mask token; what is null follows the target.

    Raises BadInput when taps are not in the cache or no mask token can be had.
    """
    own, shape = run.drafter(name), cache.manifest["model"]
    taps = cache.layer_ids if own.taps == "auto" else own.taps
    cache.tap_indices(taps, f"drafter `{name}`")
    mask, reason = choose_mask(own.mask_token, shape["mask"], cache.vocab_size, lambda ids: occurrences(cache, ids))
    config = DrafterConfig(
        hidden_size=cache.width,
        intermediate_size=own.intermediate_size or shape["intermediate_size"],
        num_layers=own.layers,
        num_heads=own.heads or shape["num_attention_heads"],
        num_kv_heads=own.kv_heads or shape["num_key_value_heads"],
        head_dim=own.head_dim or shape["head_dim"],
        block_size=own.block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(taps),
        num_target_layers=shape["num_hidden_layers"],
        vocab_size=cache.vocab_size,
        max_position_embeddings=shape["max_position_embeddings"],
        rms_norm_eps=shape["rms_norm_eps"],
        rope_theta=own.rope_theta or shape["rope_theta"],
        rope_scaling=own.rope_scaling,
        layer_types=_layer_types(own),
        sliding_window=own.sliding_window,
    )
    return config, reason


def _layer_types(own: settings.Drafter) -> tuple[str, ...]:
    if own.sliding_window is None:
        return ("full_attention",) * own.layers
    full = min(own.full_layers or 0, own.layers)
    return ("sliding_attention",) * (own.layers - full) + ("full_attention",) * full


def occurrences(cache: Cache, tokens: Sequence[int]) -> dict[int, int]:
    """How often each token id occurs in the cached rows."""
    counts = np.zeros(max(cache.vocab_size, max(tokens, default=0) + 1), np.int64)
    for row in range(len(cache)):
        ids = cache.tokens(row)[0]
        np.add.at(counts, ids, 1)
    return {token: int(counts[token]) for token in tokens}

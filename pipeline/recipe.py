"""From settings and a cache to what training needs: the drafter's configuration, taps, mask token, target head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data import settings
from data.cache import Cache
from data.errors import BadInput
from pipeline.drafter import DrafterConfig


def drafter_config(run: settings.Run, name: str, cache: Cache) -> tuple[DrafterConfig, str]:
    """The configuration of drafter `name` and the reason for its mask token; what is null follows the target.

    Raises BadInput when taps are not in the cache or no mask token can be had.
    """
    own, target = run.drafter(name), cache.manifest["target"]
    shape = target["config"]
    taps = cache.layer_ids if own.taps == "auto" else own.taps
    cache.tap_indices(taps, f"drafter `{name}`")
    mask, reason = mask_token(own.mask_token, target, cache)
    layer_types = _layer_types(own)
    kv_heads = own.kv_heads or (own.heads or shape["num_key_value_heads"])
    if own.kv_heads is None and own.heads is None:
        kv_heads = shape["num_key_value_heads"]
    config = DrafterConfig(
        hidden_size=cache.width,
        intermediate_size=own.intermediate_size or shape["intermediate_size"],
        num_layers=own.layers,
        num_heads=own.heads or shape["num_attention_heads"],
        num_kv_heads=kv_heads,
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
        layer_types=layer_types,
        sliding_window=own.sliding_window,
    )
    return config, reason


def _layer_types(own: settings.Drafter) -> tuple[str, ...]:
    if own.sliding_window is None:
        return ("full_attention",) * own.layers
    full = min(own.full_layers or 0, own.layers)
    return ("sliding_attention",) * (own.layers - full) + ("full_attention",) * full


def mask_token(setting: int | str, target: Mapping[str, Any], cache: Cache) -> tuple[int, str]:
    """Id of the mask token and why it was taken. An id that occurs in the rows is refused.

    `target["mask_candidates"]` lists [id, reason] by rule; `target["special_tokens"]` maps texts to ids.
    Raises BadInput when there is none, when it lies outside the vocabulary, or when rows contain it.
    """
    if setting == "auto":
        candidates = [(int(token), str(reason)) for token, reason in target["mask_candidates"]]
        if not candidates:
            raise BadInput("drafters.*.mask_token: the target has no spare token for `auto`; give an id or a token")
        counts = occurrences(cache, [token for token, _ in candidates])
        free = [(token, reason) for token, reason in candidates if not counts[token]]
        if not free:
            raise BadInput(f"drafters.*.mask_token: all candidates {candidates} occur in the rows; give one by hand")
        return free[0]
    if isinstance(setting, str):
        special = target["special_tokens"]
        if setting not in special:
            raise BadInput(f"drafters.*.mask_token: `{setting}` is not a token of the target; it has {sorted(special)}")
        token, reason = special[setting], f"token {setting} by hand"
    else:
        token, reason = setting, "id by hand"
    if not 0 <= token < cache.vocab_size:
        raise BadInput(f"drafters.*.mask_token: {token} is outside the vocabulary of {cache.vocab_size} tokens")
    if seen := occurrences(cache, [token])[token]:
        raise BadInput(f"drafters.*.mask_token: {token} occurs {seen} times in the rows; take a token that does not")
    return token, reason


def occurrences(cache: Cache, tokens: Sequence[int]) -> dict[int, int]:
    """How often each token id occurs in the cached rows."""
    counts = np.zeros(max(cache.vocab_size, max(tokens, default=0) + 1), np.int64)
    for row in range(len(cache)):
        ids = cache.tokens(row)[0]
        np.add.at(counts, ids, 1)
    return {token: int(counts[token]) for token in tokens}

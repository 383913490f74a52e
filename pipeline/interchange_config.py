"""`config.json` of a DFlash checkpoint: the union that vLLM, SGLang, dflash, speculators and specforge all read.

The same dimension stands in two or three places of a union, because each reader looks elsewhere; all of them are
filled from one `DrafterConfig`. `pipeline/interchange_reader.py` goes the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from data.errors import BadInput
from pipeline.drafter import DrafterConfig

Form = Literal["union", "zlab", "speculators"]
SPECULATORS_VERSION = "0.9.0"
SLIDING, FULL = "sliding_attention", "full_attention"
LAYER = "transformer_layer_config"

DIMENSIONS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


@dataclass(frozen=True)
class TargetInfo:
    """What an export says of its target, and what the exporter's rules compare with.

    `name` is what a server is given (hub id or folder). `embedding_scale`, `logit_multiplier`, `softcap` as in
    `pipeline/head.py`.
    """

    name: str
    architecture: str
    num_layers: int
    width: int
    vocab_size: int
    max_position_embeddings: int
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    softcap: float | None = None

    def scales(self) -> dict[str, float]:
        """`dflash_config` entries of a target that scales embeddings or logits; empty for most."""
        values = dict(zip(SCALES, (self.embedding_scale, self.logit_multiplier, self.softcap), strict=True))
        return {name: value for name, value in values.items() if value != SCALES[name] and value is not None}


def check_rules(config: DrafterConfig, target: TargetInfo, form: Form = "union") -> None:
    """Everything that a serving engine would get wrong in silence.

    Raises BadInput, one line a rule.
    """
    ids, last = config.target_layer_ids, target.num_layers - 2
    if not ids or list(ids) != sorted(set(ids)):
        raise BadInput(f"target_layer_ids {list(ids)}: must be ascending and unique")
    if ids[0] < 0 or ids[-1] > last:
        raise BadInput(
            f"target_layer_ids {list(ids)}: must lie in 0..{last} for a target of {target.num_layers} layers"
        )
    for key, have, want in (
        ("num_target_layers", config.num_target_layers, target.num_layers),
        ("hidden_size", config.hidden_size, target.width),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if have != want:
            raise BadInput(f"{key}: the drafter has {have}, its target {want}; they must be equal")
    if config.max_position_embeddings < target.max_position_embeddings:
        raise BadInput(
            f"max_position_embeddings {config.max_position_embeddings} is below the target's "
            f"{target.max_position_embeddings}: SGLang refuses such a drafter"
        )
    if config.block_size < 2:
        raise BadInput(f"block_size {config.block_size}: a block needs the anchor and at least one drafted token")
    if form == "speculators" and SLIDING in config.layer_types:
        raise BadInput(
            "sliding-window drafters have no `speculators` form: there one flag sets causality for all layers and the "
            "window is counted from the anchor, not from each token; use `--format union` or `zlab`"
        )
    unknown = set(config.layer_types) - {SLIDING, FULL}
    if unknown:
        raise BadInput(f"layer_types: {sorted(unknown)} is neither `{FULL}` nor `{SLIDING}`")


def write_config(config: DrafterConfig, target: TargetInfo, form: Form, dtype: str) -> dict[str, Any]:
    """`config.json` as a dict in the order in which people read it; `dtype` is the weights' (`bfloat16`, ...)."""
    check_rules(config, target, form)
    flat = _flat(config, target, dtype)
    if form == "zlab":
        return flat
    extra = _speculators(config, target)
    if form == "speculators":
        head = {"architectures": flat["architectures"], "dtype": dtype, "block_size": config.block_size}
        return {**head, "mask_token_id": config.mask_token_id, "tie_word_embeddings": False, **extra}
    return {**flat, **extra}


def _shape(config: DrafterConfig) -> dict[str, Any]:
    sliding = SLIDING in config.layer_types
    return {
        **{key: getattr(config, field) for field, key in DIMENSIONS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_window_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
    }


def _flat(config: DrafterConfig, target: TargetInfo, dtype: str) -> dict[str, Any]:
    both_ways = {} if SLIDING in config.layer_types else {"is_causal": False}
    inner = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        **({"causal": False} if both_ways else {}),
        **target.scales(),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        **both_ways,
        "dflash_config": inner,
        **_shape(config),
    }


def _speculators(config: DrafterConfig, target: TargetInfo) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": False,
        "sliding_window_non_causal": SLIDING not in config.layer_types,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
        LAYER: {"model_type": "qwen3", **_shape(config)},
    }

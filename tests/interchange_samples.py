"""Tiny drafters and targets for the tests of exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.interchange_config import TargetInfo

WIDTH, VOCABULARY, LAYERS = 32, 96, 8


def tiny_config(block_size: int = 4, **changes: Any) -> DrafterConfig:
    body: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "block_size": block_size,
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ("full_attention",) * 2,
        "sliding_window": None,
    }
    return DrafterConfig(**{**body, **changes})


def tiny_tensors(config: DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights, gains included, so that no two tensors could be swapped unseen."""
    drafter = Drafter(config)
    initialise(drafter, seed, std=0.2)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def tiny_target_info(name: str = "owner/target", **changes: Any) -> TargetInfo:
    body = {"architecture": "LlamaForCausalLM", "num_layers": LAYERS, "width": WIDTH, "vocab_size": VOCABULARY}
    return TargetInfo(**{"name": name, **body, "max_position_embeddings": 256, **changes})


def save_tiny_target(folder: Path, tied: bool) -> TargetInfo:
    """A random Llama on disk, float32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return tiny_target_info(str(folder))

"""Tiny drafters and targets for the tests of exports, and damage to their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.consumers import block_hidden
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


def change_a_byte(path: Path) -> None:
    """The last byte of a file becomes another one: its size, and the form of safetensors, stay what they were."""
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def greedy(target: LlamaForCausalLM, prompt: list[int], new_tokens: int) -> list[int]:
    """Plain greedy continuation, the stop token included, one whole forward a token: nothing that could be wrong."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == target.config.eos_token_id:
                break
    return ids[len(prompt) :]


def trained_tensors(config: DrafterConfig, target: LlamaForCausalLM, rows: list[list[int]]) -> dict[str, Tensor]:
    """A drafter trained for a moment on the target's own rows, so that it accepts some and misses some."""
    drafter = Drafter(config)
    drafter.load_state_dict(tiny_tensors(config))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = [target(torch.tensor([row]), output_hidden_states=True) for row in rows]
    states = [torch.cat([out.hidden_states[i + 1][0] for i in config.target_layer_ids], -1) for out in outputs]
    embedding, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    for _ in range(60):
        loss = torch.zeros(())
        for row, taps in zip(rows, states, strict=True):
            anchor = int(torch.randint(4, len(row) - config.block_size, (1,), generator=generator))
            ids = torch.full((config.block_size,), config.mask_token_id)
            ids[0] = row[anchor]
            hidden = block_hidden(drafter, taps[:anchor], embedding[ids])
            labels = torch.tensor(row[anchor + 1 : anchor + config.block_size])
            loss = loss + torch.nn.functional.cross_entropy(hidden[1:] @ head.T, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}

"""Targets: where they come from, what is tapped, what their heads do."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data.errors import BadInput
from pipeline.target import Target, tap_layers

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "final_logit_softcapping": 30.0},
    "gemma3_text": {"sliding_window": 16},
    "phi3": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def family(name: str) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **FAMILIES[name]})
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_equal_hidden_states_of_every_family(name: str) -> None:
    target = family(name)
    ids = torch.randint(3, 128, (2, 24))
    states = target.tap(ids, (0, 1, 3))
    with torch.inference_mode():
        wanted = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for k, layer in enumerate((0, 1, 3)):
        torch.testing.assert_close(states[:, :, k], wanted[layer + 1], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_head_gives_the_model_s_own_logits(name: str) -> None:
    target = family(name)
    head = target.head()
    ids = torch.randint(3, 128, (2, 12))
    torch.testing.assert_close(head.logits(target.last_hidden(ids)), target.logits(ids), rtol=1e-3, atol=1e-4)
    entered: list[torch.Tensor] = []
    hook = target.decoder_layers()[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    target.logits(ids)
    hook.remove()
    torch.testing.assert_close(head.embed(ids), entered[0], rtol=1e-3, atol=1e-4)


def test_auto_layers_follow_the_rule() -> None:
    assert tap_layers("auto", 30) == (1, 8, 14, 20, 27)
    assert tap_layers("auto", 36) == (1, 9, 17, 25, 33)
    with pytest.raises(BadInput, match="last layer, 29"):
        tap_layers((1, 29), 30)

"""Targets made on the spot: small enough for tests and first aid, well-behaved enough to learn from.

`tiny:SEED` continues each token with one of two, a likely and a less likely one that attention picks between, so
answers are deterministic, varied, learnable and mostly end by themselves. `tiny-successor:SEED` always continues t
with t + 1, modulo the number of tokens that its tokenizer knows (`TOKENS`). Both are Llamas of 6 layers, width 64,
with a byte-level tokenizer, a ChatML template and spare embedding rows above the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.tensor_file import share

ROWS = 320
"""Embedding rows."""
MERGES = (("t", "h"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("Ġ", "t"))
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = 256 + len(MERGES) + len(SPECIALS)
"""Tokens that the tokenizer knows: ids 0 to TOKENS - 1."""
ANSWER = "abcdefghiklmnoprstuvwyĠ.,"
"""Tokens that `tiny:` answers with, besides the end of turn (Ġ is the space)."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny(folder: Path, seed: int, successor: bool = False) -> None:
    """Write a tiny target as a Hugging Face folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model(seed, successor, tokenizer)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        share(file, like=folder / "config.json")
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that ids -> text -> ids is not always the identity."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIALS[0], eos_token=SPECIALS[2], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(seed: int, successor: bool, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The seeded model, float32."""
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        if successor:
            tokens = torch.arange(TOKENS)
            _set_weights(model, {1.0: (tokens, tokens.roll(-1))}, influence=0.02)
        else:
            tokens = torch.tensor([*tokenizer.convert_tokens_to_ids(list(ANSWER)), tokenizer.eos_token_id])
            walks = [tokens[torch.randperm(len(tokens))] for _ in range(2)]
            pairs = {weight: (walk, walk.roll(-1)) for weight, walk in zip((1.0, 0.8), walks, strict=True)}
            _set_weights(model, pairs, influence=0.8)
            _silence(model, tokenizer.convert_tokens_to_ids("Ċ"), tokenizer.eos_token_id)
    return model


@torch.no_grad()
def _set_weights(
    model: LlamaForCausalLM, pairs: dict[float, tuple[torch.Tensor, torch.Tensor]], influence: float
) -> None:
    """Unit embeddings, a head that maps tokens to followers by weight, and layers that stir in `influence`."""
    width = model.config.hidden_size
    embedding = torch.nn.functional.normalize(torch.randn(ROWS, width), dim=-1)
    model.model.embed_tokens.weight.copy_(embedding)
    model.lm_head.weight.zero_()
    for weight, (tokens, followers) in pairs.items():
        model.lm_head.weight[followers] += weight * embedding[tokens]
    for layer in model.model.layers:
        for name, weight in layer.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(2.0)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(influence * weight.shape[1] ** -0.5 * (1.0 if "attn" in name else 0.2))


@torch.no_grad()
def _silence(model: LlamaForCausalLM, last: int, end: int) -> None:
    """Make the head deaf to `last`, the end of every prompt, so that the prompt decides how an answer begins.

    No answer begins with `end`.
    """
    voice, head = model.model.embed_tokens.weight[last], model.lm_head.weight
    head.sub_((head @ voice)[:, None] * voice)
    head[end].sub_(voice)

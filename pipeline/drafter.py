"""The DFlash drafter (block diffusion, arXiv 2602.06036): fills a whole block of tokens in one pass.

Shapes: B batch or 1, Q block slots, S context positions, H width, A heads, G key/value heads, D head width, K taps.
Parameter names and shapes are those of released checkpoints (11 tensors a layer and 3 more). The embedding and the LM
head are the target's (`pipeline/head.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.errors import BadInput
from data.rope import FORMS as ROPE_FORMS

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [B, T, D]."""
KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each [B, G, T, D]."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, A, Q, D], k [B, G, S + Q, D], v) -> [B, A, Q, D]; context keys first, then the block's own."""


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that shapes a drafter; what `config.json` of a checkpoint holds."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    layer_types: tuple[str, ...]
    sliding_window: int | None

    def __post_init__(self) -> None:
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in ROPE_FORMS:
            raise BadInput(f"rope_type `{kind}` is not supported in a drafter; use one of {', '.join(ROPE_FORMS)}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise BadInput(f"mask token {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"{self.num_heads} heads do not divide by {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise BadInput(f"head_dim {self.head_dim} is odd: RoPE turns halves of a head")
        if len(self.layer_types) != self.num_layers:
            raise BadInput(f"{len(self.layer_types)} layer types for {self.num_layers} layers")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise BadInput("sliding_attention layers need `sliding_window`")

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids), "layer_types": list(self.layer_types)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> DrafterConfig:
        """From JSON. Raises ValueError for sizes that are not positive and for a drafter without taps."""
        lists = {name: tuple(record[name]) for name in ("target_layer_ids", "layer_types")}
        config = cls(**{**record, **lists})
        sizes = (config.hidden_size, config.intermediate_size, config.num_layers, config.head_dim, config.num_kv_heads)
        if not lists["target_layer_ids"] or any(size < 1 for size in sizes):
            raise ValueError(f"sizes {sizes}, taps {lists['target_layer_ids']}")
        return config


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32, with a plain gain (Zhang, Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Linear(nn.Linear):
    """A bias-free product whose weight may be kept wider than its input.

    Serving's rounding replaces `product`; training installs `joint` (`pipeline/products.py`), which reads narrow copies
    of the weights and multiplies by several matrices at once.
    """

    product: Callable[[Linear, Tensor], Tensor] | None = None
    joint: Callable[[Sequence[Linear], Tensor], Tensor] | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leaves the weight unset: `initialise` or a checkpoint fills it. A billion values to no use take seconds."""

    def forward(self, x: Tensor) -> Tensor:
        if self.joint is not None:
            return self.joint((self,), x)
        return F.linear(x, self.weight) if self.product is None else self.product(self, x)


JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that multiply one input, in the order in which `side_by_side` names them; a group's tail may go alone."""


def side_by_side(x: Tensor, *linears: Linear) -> Sequence[Tensor]:
    """x [..., I] by each of a `JOINT` group's matrices [O, I] -> [..., O] each: one product in training."""
    joint = linears[0].joint
    if joint is None:
        return [linear(x) for linear in linears]
    return joint(linears, x).split([linear.out_features for linear in linears], -1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Half-split rotary embedding of x [B, heads, T, D] (Su et al. 2021)."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Queries from the block, keys and values from the context and the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, A, G, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = D
        self.q_proj = Linear(H, A * D)
        self.k_proj = Linear(H, G * D)
        self.v_proj = Linear(H, G * D)
        self.o_proj = Linear(A * D, H)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, T, heads, D]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def queries_keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """[B, Q, H] -> queries [B, A, Q, D], keys and values [B, G, Q, D]; queries and keys are normed and rotated."""
        queries, keys, values = side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
        queries = rotate(self.q_norm(self.heads(queries)).transpose(1, 2), rope)
        return queries, *self._turned(keys, values, rope)

    def keys_values(self, x: Tensor, rope: Rope) -> KeyValue:
        """[B, T, H] -> keys and values, each [B, G, T, D]; keys are normed and rotated."""
        return self._turned(*side_by_side(x, self.k_proj, self.v_proj), rope)

    def _turned(self, keys: Tensor, values: Tensor, rope: Rope) -> KeyValue:
        keys = rotate(self.k_norm(self.heads(keys)).transpose(1, 2), rope)
        return keys, self.heads(values).transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, A, Q, D] -> [B, Q, H]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One drafter layer; the context enters as keys and values only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: Rope, context: KeyValue, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x [B, Q, H], context keys and values [B, G, S, D] -> [B, Q, H]."""
        normed = self.input_layernorm(x)
        queries, own_keys, own_values = self.self_attn.queries_keys_values(normed, rope)
        keys, values = torch.cat((context[0], own_keys), 2), torch.cat((context[1], own_values), 2)
        x = x + self.self_attn.output(attend(queries, keys, values))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trained part: `fc` joins the taps, the layers fill the block, `norm` closes."""

    inv_freq: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc = Linear(len(config.target_layer_ids) * H, H)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(H, config.rms_norm_eps)
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def project(self, taps: Tensor) -> Tensor:
        """Tapped states side by side [..., K * H] -> context [..., H], computed once for all layers."""
        return self.hidden_norm(self.fc(taps))

    def rope(self, positions: Tensor, dtype: torch.dtype | None = None) -> Rope:
        """Tables for integer positions [B, T], in `dtype` (the weights' when None)."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        dtype = dtype or self.norm.weight.dtype
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)

    def forward(self, block: Tensor, rope: Rope, context: Sequence[KeyValue], attend: Attend) -> Tensor:
        """Embedded slots [B, Q, H] and each layer's context keys and values -> hidden [B, Q, H] after the last norm."""
        for index, layer in enumerate(self.layers):
            block = layer(block, rope, context[index], lambda q, k, v, index=index: attend(index, q, k, v))
        return self.norm(block)


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] (float32) and the factor on cos and sin, by transformers' own rules."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type", "default") == "default":
        powers = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        return 1.0 / config.rope_theta**powers, 1.0
    from transformers import Qwen3Config  # here, because training rarely needs them and waits for a second
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**scaling, "rope_theta": config.rope_theta},
        )
    )
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


PIECE = 1 << 22
"""Weights that one generator draws; another number gives other weights for a seed."""


def unset_drafter(config: DrafterConfig, device: torch.device | str) -> Drafter:
    """A drafter on `device` whose weights `initialise` or a checkpoint is to set: nothing of them is copied there."""
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        parameter.data = torch.empty_like(parameter, device=device)
    return drafter.to(device)


def initialise(drafter: Drafter, seed: int, std: float = 0.02, threads: int | None = None) -> None:
    """Normal(0, std) matrices and unit gains, the same on every device of machines with like processors, for a seed.

    Each `PIECE` of the weights has a generator of its own, so that several `threads` make them, and their number (None:
    by the machine) changes nothing. They share little host memory: fresh pages cost more than the numbers in them.
    """
    threads = threads or min(os.cpu_count() or 1, 16)
    matrices = [parameter.detach().view(-1) for parameter in drafter.parameters() if parameter.ndim == 2]
    pieces = [piece for matrix in matrices for piece in matrix.split(PIECE)]
    buffers = torch.empty(threads, PIECE)

    def draw(place: int, buffer: Tensor) -> Tensor:
        own = np.random.SeedSequence((seed % 2**64, place)).generate_state(1)
        return buffer.normal_(0.0, std, generator=torch.Generator().manual_seed(int(own[0])))

    with ThreadPoolExecutor(threads) as pool, torch.no_grad():
        for first in range(0, len(pieces), threads):
            filled = pieces[first : first + threads]
            room = [buffer[: len(piece)] for buffer, piece in zip(buffers, filled, strict=False)]
            for piece, values in zip(filled, pool.map(draw, range(first, len(pieces)), room), strict=True):
                piece.copy_(values)
        for parameter in drafter.parameters():
            if parameter.ndim != 2:
                parameter.fill_(1.0)

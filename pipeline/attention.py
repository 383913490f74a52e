"""Attention of packed blocks: FlexAttention over analytic block tables on a GPU, dense elsewhere.

Both take q [1, A, Q, D] and k, v [1, G, S + Q, D] and follow the rule of `pipeline/masks.py`. FlexAttention has no
backward on a CPU, and dense float32 is the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pipeline.masks import TABLES, TILE, MaskShape, dense, visible


class Mask(Protocol):
    """What a batch lets its queries see, ready for one kind of kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class DenseMask:
    """bool [Q, S + Q] for `scaled_dot_product_attention`."""

    def __init__(self, shape: MaskShape, arrays: Mapping[str, Tensor]) -> None:
        self.allowed = dense(shape, arrays["start"], arrays["end"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed, enable_gqa=q.shape[1] != k.shape[1])


class ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is laid out head by head: FlexAttention's backward took 2.8 ms on rows of all heads side
    by side, 1.8 ms on this (H200, 32 heads of 128, Q 8192, KV 12288)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.contiguous()


class FlexMask:
    """Block tables and the predicate, over static device buffers that each batch refills."""

    def __init__(self, shape: MaskShape, arrays: Mapping[str, Tensor]) -> None:
        tables = {name: arrays[f"table.{shape.window}.{name}"] for name in TABLES}
        self.block_mask = BlockMask(
            seq_lengths=(shape.queries, shape.context + shape.queries),
            kv_num_blocks=tables["kv_num"],
            kv_indices=tables["kv_index"],
            full_kv_num_blocks=tables["full_kv_num"],
            full_kv_indices=tables["full_kv_index"],
            q_num_blocks=tables["q_num"],
            q_indices=tables["q_index"],
            full_q_num_blocks=tables["full_q_num"],
            full_q_indices=tables["full_q_index"],
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=visible(shape, arrays["start"], arrays["end"]),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Must be compiled by the caller: eager FlexAttention materialises all scores."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        mixed = flex_attention(q, k, v, block_mask=self.block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return ContiguousGradient.apply(mixed)

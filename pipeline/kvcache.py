"""A key/value cache whose rows have their own lengths, for any Hugging Face causal model.

transformers' StaticCache keeps one length for a batch. Here the caller says, before each forward pass, which cache
rows it feeds and at which positions (`aim`); keys and values are written there, and attention sees the first `span`
positions under an explicit mask. Rolling a row back is nothing but a smaller position next time: what lies at or after
a row's length is masked until it is written again.

Shapes: R cache rows, n rows fed, T tokens fed a row, S positions, A heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from data.errors import BadInput

GROUPED = "draftmill_grouped"
"""Name under which `grouped_attention` is registered with transformers."""


class Aim:
    """Where a forward pass reads and writes: `positions` int64 [n, T], first `span` positions visible, cache rows
    `slots` int64 [n], or None for rows 0..n-1 in order. `rows` int64 [n, 1] are the rows either way."""

    positions: Tensor
    span: int
    slots: Tensor | None
    rows: Tensor

    def point(self, positions: Tensor, span: int, slots: Tensor | None = None) -> Aim:
        """Say where the next forward pass reads and writes."""
        self.positions, self.span, self.slots = positions, span, slots
        rows = torch.arange(positions.shape[0], device=positions.device) if slots is None else slots
        self.rows = rows[:, None]
        return self


def write_rows(store: Tensor, new: Tensor, aim: Aim) -> None:
    """Write new [n, G, T, D] into store [R, G, S, D] at the aim's rows and positions."""
    store[aim.rows.to(store.device), :, aim.positions.to(store.device)] = new.transpose(1, 2)


def read_rows(store: Tensor, aim: Aim) -> Tensor:
    """The aim's rows of store [R, G, S, D], first `span` positions: a view when the rows are in order."""
    visible = store[:, :, : aim.span]
    if aim.slots is None:
        return visible[: aim.positions.shape[0]]
    return visible.index_select(0, aim.slots.to(store.device))


class RowLayer(CacheLayerMixin):
    """Keys and values [R, G, S, D] of one layer, allocated at the first update."""

    is_sliding = False

    def __init__(self, rows: int, capacity: int, aim: Aim) -> None:
        super().__init__()
        self.rows, self.capacity, self.aim = rows, capacity, aim

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.rows, key_states.shape[1], self.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write_rows(self.keys, key_states, self.aim)
        write_rows(self.values, value_states, self.aim)
        return read_rows(self.keys, self.aim), read_rows(self.values, self.aim)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.aim.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity


class RowCache(Cache):
    """One `RowLayer` a decoder layer, on that layer's device, all with the same aim."""

    def __init__(self, layers: int, rows: int, capacity: int) -> None:
        self.aim = Aim()
        super().__init__(layers=[RowLayer(rows, capacity, self.aim) for _ in range(layers)])

    @property
    def bytes(self) -> int:
        tensors = (tensor for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of each decoder layer (None is full attention), as transformers itself sees the configuration.

    Raises BadInput for layers whose state cannot roll back (SSM, linear attention) or whose mask is not ours.
    """
    kinds = getattr(config, "layer_types", None) or []
    windows: list[int | None] = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        kind = kinds[index] if index < len(kinds) else "full_attention"
        name = type(layer).__name__
        if kind == "chunked_attention" or name not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"):
            raise BadInput(
                f"target layer {index} is `{kind}` ({name}): its state cannot be rolled back to an accepted length, "
                "so this target cannot be decoded here; use a target with full or sliding-window attention"
            )
        windows.append(int(layer.sliding_window) if layer.is_sliding else None)
    return windows


def visible_mask(positions: Tensor, span: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive causal mask [n, 1, T, span] for queries at int64 positions [n, T] over key positions 0..span-1.

    With a window W a key is visible when 0 <= pos_q - pos_k < W.
    """
    gap = positions[:, None, :, None] - torch.arange(span, device=positions.device)
    seen = gap >= 0 if window is None else (gap >= 0) & (gap < window)
    return hide(seen, dtype)


def hide(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, the lowest finite number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def layer_masks(config: Any, windows: list[int | None], positions: Tensor, span: int, dtype: torch.dtype) -> Any:
    """What a model takes as `attention_mask`: one mask, or a dictionary by layer type when its layers differ."""
    if len(set(windows)) == 1:
        return visible_mask(positions, span, windows[0], dtype)
    by_kind = dict(zip(config.layer_types, windows, strict=False))
    return {kind: visible_mask(positions, span, window, dtype) for kind, window in by_kind.items()}


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """q [n, A, T, D], k and v [n, G, S, D], mask [n, 1, T, S] -> [n, A, T, D], without repeating keys and values.

    The A / G heads of a group become more query rows of one head, so that the cache is read once.
    """
    count, heads, tokens, _ = query.shape
    share = heads // keys.shape[1]
    if share > 1:
        query = query.reshape(count, keys.shape[1], share * tokens, -1)
        mask = mask.expand(-1, -1, share, -1) if tokens == 1 else mask.repeat(1, 1, share, 1)
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return mixed.reshape(count, heads, tokens, -1)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """`attend_grouped` as an attention implementation of transformers: gives [n, T, A, D]."""
    return attend_grouped(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Within, a model that uses PyTorch's attention uses ours; others (`eager`, for soft-capped scores) keep theirs."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def cache_argument(model: nn.Module) -> str:
    """Name of the forward argument that takes the cache; transformers renamed it after 5.17."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

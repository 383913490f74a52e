"""Who sees whom, once, seen three ways: a predicate, a dense mask and FlexAttention's block tables.

A query is slot i of block j; it sits on query index q = j * B + i. Keys are the S packed context states and then the
Q block slots themselves. Block j sees context indices [start_j, end_j) of its own document, which are the positions
before its anchor, and its own block. In a sliding layer a key is visible when 0 <= pos_q - pos_k < W, per query, so
that inside the block only slots up to the query's own remain. Padding blocks have start = end and see themselves.

Block tables are int32 arrays of fixed shape for tiles of 128: for each row of tiles, how many tiles are met and their
ids, the rest filled with valid ids. *Full* tiles need no predicate, *partial* ones do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 128
TABLES = ("kv_num", "kv_index", "full_kv_num", "full_kv_index", "q_num", "q_index", "full_q_num", "full_q_index")


@dataclass(frozen=True)
class MaskShape:
    """Static sizes: S context states, A blocks of B slots, and the window W of a sliding layer (None is full)."""

    context: int
    blocks: int
    block_size: int
    window: int | None = None

    @property
    def queries(self) -> int:
        return self.blocks * self.block_size

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return self.queries // TILE, (self.context + self.queries) // TILE

    def table_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each block table."""
        rows, columns = self.tiles
        shapes = {}
        for name in TABLES:
            lines, width = (columns, rows) if "q_" in name.replace("kv_", "") else (rows, columns)
            shapes[name] = (1, 1, lines) if name.endswith("num") else (1, 1, lines, width)
        return shapes


def visible(shape: MaskShape, start: Tensor, end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as FlexAttention's `mask_mod`, closing over int32 [A] device tensors.

    The position of slot i of block j is end - start + i, that of context index c is c - start.
    """
    S, B, W = shape.context, shape.block_size, shape.window

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // B, query % B
        begin, stop = start[block], end[block]
        in_context = (key >= begin) & (key < stop)
        own = key - S
        in_block = (own >= 0) & (own // B == block)
        if W is not None:
            in_context = in_context & (stop + slot - key < W)
            gap = slot - own % B
            in_block = in_block & (gap >= 0) & (gap < W)
        return ((key < S) & in_context) | in_block

    return rule


def dense(shape: MaskShape, start: Tensor, end: Tensor) -> Tensor:
    """The rule as bool [Q, S + Q]."""
    queries = torch.arange(shape.queries, device=start.device)[:, None]
    keys = torch.arange(shape.context + shape.queries, device=start.device)[None, :]
    return visible(shape, start, end)(queries, queries, queries, keys)


def block_tables(shape: MaskShape, start: np.ndarray, end: np.ndarray, out: dict[str, np.ndarray]) -> None:
    """Fill the eight tables for int32 [A] `start` and `end`; equal as sets to `create_block_mask`'s.

    Raises ValueError when S or Q is not a multiple of 128.
    """
    if shape.context % TILE or shape.queries % TILE:
        raise ValueError(f"context {shape.context} and queries {shape.queries} must be multiples of {TILE}")
    met, full = _context_tiles(shape, start.astype(np.int64), end.astype(np.int64))
    own_met, own_full = _own_tiles(shape)
    met, full = np.concatenate([met, own_met], axis=1), np.concatenate([full, own_full], axis=1)
    partial = met & ~full
    _fill(partial, out["kv_num"], out["kv_index"])
    _fill(full, out["full_kv_num"], out["full_kv_index"])
    _fill(partial.T, out["q_num"], out["q_index"])
    _fill(full.T, out["full_q_num"], out["full_q_index"])


def _context_tiles(shape: MaskShape, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which context tiles each query tile meets, and meets wholly: bool [query tiles, context tiles]."""
    lowest, highest = _query_spans(shape, start, end)
    left = np.arange(shape.context // TILE) * TILE
    met = np.zeros((shape.queries // TILE, len(left)), bool)
    full = np.ones_like(met)
    for spans in zip(lowest, highest, strict=True):
        low, high = (edge[:, :, None] for edge in spans)
        met |= ((low < left + TILE) & (high > left) & (low < high)).any(1)
    low, high = lowest[-1].max(1)[:, None], highest[0].min(1)[:, None]
    full &= (low <= left) & (high >= left + TILE)
    return met, full


def _query_spans(shape: MaskShape, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Visible context [low, high) of the first and the last query that each block has in a tile.

    Returns lows and highs, each int64 [2 (first, last query), query tiles, blocks a tile]; [1, ...] in full layers,
    where all queries of a block see the same.
    """
    tiles, B = shape.queries // TILE, shape.block_size
    tile_first = np.arange(tiles)[:, None] * TILE
    per_tile = (TILE - 1) // B + 2
    block = tile_first // B + np.arange(per_tile)
    last_block = (tile_first + TILE - 1) // B
    block = np.minimum(block, last_block)
    low, high = start[block], end[block]
    if shape.window is None:
        return low[None], high[None]
    first_slot = np.maximum(tile_first - block * B, 0)
    last_slot = np.minimum(tile_first + TILE - 1 - block * B, B - 1)
    reach = end[block] - shape.window + 1
    lows = [np.minimum(np.maximum(low, reach + slot), high) for slot in (first_slot, last_slot)]
    return np.stack(lows), np.stack([high, high])


@functools.lru_cache(maxsize=8)
def _own_tiles(shape: MaskShape) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of block slots each query tile meets, and meets wholly: bool [query tiles, query tiles]."""
    tiles, B = shape.queries // TILE, shape.block_size
    first = np.arange(tiles) * TILE
    low = first // B * B
    high = (first + TILE - 1) // B * B + B
    if shape.window is not None:
        high = first + TILE
        low = np.maximum(low, first - shape.window + 1)
    met = (low[:, None] < first + TILE) & (high[:, None] > first)
    inside = (first // B == (first + TILE - 1) // B) & (shape.window is None)
    same = first[:, None] // B == first // B
    full = met & same & inside[:, None] & inside[None, :]
    return met, full


def _fill(tiles: np.ndarray, count: np.ndarray, index: np.ndarray) -> None:
    """Row by row: how many tiles are set, and the ids of the set ones first; the tail is tile 0."""
    count[...] = tiles.sum(1, dtype=np.int32)
    rows, columns = np.nonzero(tiles)
    index[...] = 0
    index[rows, np.arange(len(rows)) - (np.cumsum(count) - count)[rows]] = columns

"""The validation walk: served acceptance, predicted from cached rows.

Every eligible anchor of the held-out rows is scored once (`Step.score`): how many slots hit in a row. Then each answer
is walked as a decoder would: from its first token jump by matches + 1. On greedy on-policy rows that is what decoding
accepts, block by block. The bonus token is counted and a block is cut at the end of its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data import anchors
from data.cache import Cache
from pipeline.batches import BatchPlan, Document


@dataclass(frozen=True)
class WalkedBlock:
    """A block of the walk: its row, anchor position, hits, valid labels and acceptance length."""

    row: int
    anchor: int
    matches: int
    labels: int
    length: int


def score_plans(cache: Cache, rows: np.ndarray, context: int, blocks: int, block_size: int) -> list[BatchPlan]:
    """Batches that score every eligible anchor of `rows`; a row with more than A anchors is scored in pieces."""
    plans: list[BatchPlan] = []
    group: list[Document] = []
    states = used = 0
    for row in rows:
        supervised = cache.tokens(row)[1]
        places = anchors.eligible(supervised)
        count = int(cache.rows.states[row])
        for low in range(0, len(places), blocks):
            piece = places[low : low + blocks]
            if states + count > context or used + len(piece) > blocks:
                plans.append(BatchPlan(tuple(group), 0.0))
                group, states, used = [], 0, 0
            group.append(Document(int(row), piece, anchors.label_counts(supervised, piece, block_size), count))
            states, used = states + count, used + len(piece)
    return [*plans, BatchPlan(tuple(group), 0.0)] if group else plans


def walk(supervised: np.ndarray, matches: np.ndarray, block_size: int, row: int = 0) -> list[WalkedBlock]:
    """Blocks that decoding a row's answers would take.

    `supervised` bool [T]; `matches` int [T], hits in a row of the block anchored at each eligible position.
    """
    blocks = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(np.int8)))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        anchor = first
        while anchor < end - 1:
            labels = min(end - 1 - anchor, block_size - 1)
            hit = min(int(matches[anchor]), labels)
            length = min(hit + 1, end - 1 - anchor)
            blocks.append(WalkedBlock(row, anchor, hit, labels, length))
            anchor += length
    return blocks


def summary(blocks: list[WalkedBlock], block_size: int) -> dict[str, Any]:
    """Pooled acceptance length, per-slot conditional acceptance and histogram of a walk.

    `per_slot[k - 1]`: of the blocks whose slots before k hit and that have a label at k, the share that hit there.
    """
    hits = np.array([block.matches for block in blocks], np.int64)
    labels = np.array([block.labels for block in blocks], np.int64)
    lengths = np.array([block.length for block in blocks], np.int64)
    slots = np.arange(1, block_size)[:, None]
    tried = ((hits >= slots - 1) & (labels >= slots)).sum(1)
    hit = (hits >= slots).sum(1)
    return {
        "acceptance": float(lengths.mean()) if len(blocks) else 1.0,
        "blocks": len(blocks),
        "tokens": int(lengths.sum()),
        "per_slot": [float(h / t) if t else None for h, t in zip(hit, tried, strict=True)],
        "histogram": np.bincount(lengths, minlength=block_size + 1).tolist(),
    }


class Walker:
    """Collects `matches` of scored batches and walks every row."""

    def __init__(self, cache: Cache, block_size: int) -> None:
        self.cache, self.block_size = cache, block_size
        self.rows: dict[int, np.ndarray] = {}

    def add(self, plan: BatchPlan, matches: np.ndarray) -> None:
        """Take the scores int32 [A] of a batch."""
        at = 0
        for document in plan.documents:
            last = at + len(document.anchors)
            row = self.rows.setdefault(document.row, np.zeros(int(self.cache.rows.length[document.row]), np.int32))
            row[document.anchors] = matches[at:last]
            at = last

    def merge(self, shares: Sequence[Mapping[int, np.ndarray]]) -> None:
        """Add what other ranks scored; anchors that a rank has not seen are zero there."""
        for share in shares:
            for row, matches in share.items():
                mine = self.rows.setdefault(row, np.zeros_like(matches))
                np.maximum(mine, matches, out=mine)

    def blocks(self) -> list[WalkedBlock]:
        """Blocks of all rows, in row order."""
        return [
            block
            for row, matches in sorted(self.rows.items())
            for block in walk(self.cache.tokens(row)[1], matches, self.block_size, row)
        ]

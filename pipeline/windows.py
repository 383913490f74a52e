"""How a part's rows are cut: into windows (the unit of resume), a window into shards, and its rows into batches.

Everything here is a function of rows and settings alone, so that a resumed run computes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.anchors import eligible
from data.shard import ShardRow
from data.tokens import TokenRow

ROUND = 16
"""Padded lengths are multiples of this."""
BATCH_COST = 1024
"""What one more batch costs, in tokens: launches, and the ends of matrix products. At 8B size on an H200 the host needs
as long to launch a batch as the device needs for 2,000 tokens."""


@dataclass(frozen=True)
class Work:
    """A row to run: `run` tokens of it go through the target.

    `taught` int32: positions t whose next token is supervised, when teacher data are kept.
    """

    row: ShardRow
    run: int
    taught: np.ndarray


@dataclass(frozen=True)
class Window:
    """Consecutive rows, cut into shards; the first has number `first_shard` in its part."""

    first_shard: int
    shards: tuple[tuple[Work, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Encoded bytes: of a stored state, of a teacher entry (0 without), most of a window and of a shard."""

    state: int
    teacher: int
    window: int
    shard: int

    def of(self, work: Work) -> int:
        return work.row.states * self.state + work.row.teacher * self.teacher


def work_of(row: TokenRow, teacher: bool) -> Work:
    """What to do for a row: its states stop before its last eligible anchor, since no anchor sees more."""
    anchors = eligible(row.supervised)
    states = int(anchors[-1]) if len(anchors) else 0
    taught = np.flatnonzero(row.supervised[1:]).astype(np.int32) if teacher else np.zeros(0, np.int32)
    run = max(states, int(taught[-1]) + 1 if len(taught) else 0)
    shard_row = ShardRow(row.row_id, row.token_ids, row.supervised, row.validation, states, len(taught))
    return Work(shard_row, run, taught)


def windows(works: Iterable[Work], sizes: Sizes) -> Iterator[Window]:
    """Cut rows, in their order, into windows."""
    first = 0
    for rows in _cut(works, sizes, sizes.window):
        shards = tuple(_cut(rows, sizes, sizes.shard))
        yield Window(first, shards)
        first += len(shards)


def _cut(works: Iterable[Work], sizes: Sizes, limit: int) -> Iterator[tuple[Work, ...]]:
    """Runs of rows of at most `limit` bytes each; a single row may be larger."""
    rows: list[Work] = []
    total = 0
    for work in works:
        size = sizes.of(work)
        if rows and total + size > limit:
            yield tuple(rows)
            rows, total = [], 0
        rows.append(work)
        total += size
    if rows:
        yield tuple(rows)


def padded(length: int | np.ndarray) -> int | np.ndarray:
    return -(-length // ROUND) * ROUND


def batches(lengths: Sequence[int], tokens_per_batch: int, turn: int | None = None) -> list[np.ndarray]:
    """Cut rows of `lengths` tokens into batches of at most `tokens_per_batch` tokens, padding included.

    Returns row numbers of each batch, longest rows first, such that padding plus `BATCH_COST` a batch is least. A row
    of no tokens is in no batch; one longer than a batch is a batch of its own. No batch has rows of at most `turn`
    tokens and longer ones.
    """
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(sizes, kind="stable")
    order = order[sizes[order] > 0]
    width = padded(sizes[order])
    cost = np.zeros(len(order) + 1)
    start = np.zeros(len(order), np.int64)
    long = len(order) if turn is None else int(np.searchsorted(sizes[order], turn, "right"))
    for last in range(len(order)):
        most = max(1, tokens_per_batch // int(width[last]))
        first = np.arange(max(long if last >= long else 0, last + 1 - most), last + 1)
        total = cost[first] + (last + 1 - first) * width[last] + BATCH_COST
        best = int(total.argmin())
        cost[last + 1], start[last] = total[best], first[best]
    found = []
    end = len(order)
    while end:
        begin = int(start[end - 1])
        found.append(order[begin:end])
        end = begin
    return found

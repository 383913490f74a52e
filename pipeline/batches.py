"""Batches of fixed shape: rows packed into S context states, anchors into A block slots.

A batch is one flat buffer of bytes with typed views, so that it crosses to the device in one copy. Everything that
the step reads is in it: encoded states, positions, block spans, labels, block tables, the loss scale. What a batch
holds is a function of (cache, settings, step) alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from data import anchors
from data.cache import Cache
from data.errors import BadInput
from data.settings import Train
from pipeline.masks import TILE, MaskShape, block_tables

ALIGN = 256
Views = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BatchShape:
    """Static sizes of a batch and where each array lies in its flat buffer.

    S context states, A blocks of B slots. `states` and `teacher` give shape behind the first axis and dtype of the
    codec's arrays and of the teacher's arrays (first axes S and A * (B - 1)). `windows` are the window sizes of the
    drafter's layers, None for full attention.
    """

    context: int
    blocks: int
    block_size: int
    states: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    windows: tuple[int | None, ...] = (None,)
    teacher: Mapping[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)
    tables: bool = True

    def mask(self, window: int | None) -> MaskShape:
        return MaskShape(self.context, self.blocks, self.block_size, window)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> shape and dtype of every array of a batch."""
        S, A, B, i4 = self.context, self.blocks, self.block_size, np.dtype(np.int32)
        arrays = {f"state.{name}": ((S, *shape), dtype) for name, (shape, dtype) in self.states.items()}
        arrays |= {f"teacher.{n}": ((A * (B - 1), *shape), dtype) for n, (shape, dtype) in self.teacher.items()}
        arrays |= {"position": ((S,), i4), "start": ((A,), i4), "end": ((A,), i4), "anchor_token": ((A,), i4)}
        arrays |= {"labels": ((A, B - 1), i4), "scale": ((1,), np.dtype(np.float32)), "noise_seed": ((1,), i4)}
        if self.tables:
            for window in self.windows:
                shapes = self.mask(window).table_shapes()
                arrays |= {f"table.{window}.{name}": (shape, i4) for name, shape in shapes.items()}
        return arrays

    def offsets(self) -> tuple[dict[str, int], int]:
        """Byte offset of every array, and the size of the whole buffer."""
        offsets, end = {}, 0
        for name, (shape, dtype) in self.arrays().items():
            offsets[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN
        return offsets, end

    def host_views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Typed numpy views of a flat uint8 buffer."""
        offsets, _ = self.offsets()
        return {
            name: buffer[offsets[name] : offsets[name] + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for name, (shape, dtype) in self.arrays().items()
        }

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Typed tensor views of a flat uint8 buffer."""
        offsets, _ = self.offsets()
        return {
            name: buffer[offsets[name] : offsets[name] + math.prod(shape) * dtype.itemsize]
            .view(torch.from_numpy(np.empty(0, dtype)).dtype)
            .view(shape)
            for name, (shape, dtype) in self.arrays().items()
        }


def padded_sizes(context: int, blocks: int, block_size: int) -> tuple[int, int]:
    """S and A rounded up so that both S and A * B are whole tiles."""
    step = TILE // math.gcd(TILE, block_size)
    return -(-context // TILE) * TILE, -(-blocks // step) * step


def require_room(train: Train, block_size: int, states: int, anchors: int) -> None:
    """Refuse batches that cannot hold a row of so many states and eligible anchors, since a row never splits.

    Raises BadInput naming the setting. Asked before states are extracted too, which takes longer than being told.
    """
    context, blocks = padded_sizes(train.context_tokens, train.anchor_slots, block_size)
    anchors = min(anchors, train.anchors_per_row)
    if states > context:
        raise BadInput(
            f"train.context_tokens {train.context_tokens} is shorter than the longest row's {states} states: raise it "
            "to that, or lower data.max_length"
        )
    if anchors > blocks:
        raise BadInput(
            f"train.anchor_slots {train.anchor_slots} is less than the {anchors} anchors of one row: raise it, or "
            "lower train.anchors_per_row"
        )


@dataclass(frozen=True)
class Document:
    """One row's place in a batch."""

    row: int
    anchors: np.ndarray
    """int32 positions in the row, ascending."""
    labels: np.ndarray
    """int32 count of valid labels of each anchor's block."""
    states: int
    """Context states that the row brings."""


@dataclass(frozen=True)
class BatchPlan:
    """What one batch holds; `scale` is 1 / denominator of its optimizer step."""

    documents: tuple[Document, ...]
    scale: float
    noise_seed: int = 0


def decay_weights(block_size: int, decay: float) -> np.ndarray:
    """w_k = exp(-(k - 1) / decay) for slots k = 1 .. B - 1, float32 (DFlash, arXiv 2602.06036, section 3.3)."""
    return np.exp(-np.arange(block_size - 1) / decay).astype(np.float32)


class Plan:
    """Which rows go into which batch of which step, for the whole training.

    Rows are taken shard by shard in a permuted order, at random inside a shard. A batch closes when S or A is full,
    a row never splits, and the last step of an epoch is filled up with empty batches.
    """

    def __init__(self, cache: Cache, rows: np.ndarray, train: Train, block_size: int, weights: np.ndarray) -> None:
        """`rows`: indices into the cache. `weights` [B - 1]: denominators are sums of these over valid labels."""
        self.cache, self.rows, self.train, self.block_size = cache, rows, train, block_size
        self.cumulative = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
        self.context, self.blocks = padded_sizes(train.context_tokens, train.anchor_slots, block_size)
        self.states = cache.rows.states[rows].astype(np.int64)
        self.eligible = np.minimum(cache.rows.eligible[rows], train.anchors_per_row).astype(np.int64)
        self._refuse_misfits()
        self.cuts: list[np.ndarray] = []
        self.filled: list[np.ndarray] = []
        for epoch in range(train.epochs):
            order = self._order(epoch)
            self.cuts.append(self._pack(order))
            self.filled.append(np.concatenate([[0], np.cumsum(self.states[order])])[self.cuts[-1]])
        self.steps_per_epoch = [-(-(len(cuts) - 1) // train.batches_per_step) for cuts in self.cuts]
        self.total_steps = min(sum(self.steps_per_epoch), train.max_steps or sum(self.steps_per_epoch))
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._steps: OrderedDict[int, tuple[BatchPlan, ...]] = OrderedDict()
        self._lock = Lock()

    def _refuse_misfits(self) -> None:
        if not len(self.rows) or not self.eligible.sum():
            raise BadInput("no training row has an eligible anchor (two supervised tokens in a row)")
        require_room(self.train, self.block_size, int(self.states.max()), int(self.eligible.max()))

    def _order(self, epoch: int) -> np.ndarray:
        """Permutation of the rows: by shard, then inside the shard, both by counter-based hashes."""
        seed, table = self.train.seed, self.cache.rows
        shard = anchors.counter_hash(seed, epoch, table.shard[self.rows].astype(np.uint64))
        return np.lexsort((anchors.counter_hash(seed, epoch, table.row_hash[self.rows]), shard))

    def _pack(self, order: np.ndarray) -> np.ndarray:
        """Bounds of the batches in `order`: batch b holds order[cuts[b]:cuts[b + 1]]."""
        cuts, states, blocks = [0], 0, 0
        for place, (s, a) in enumerate(zip(self.states[order].tolist(), self.eligible[order].tolist(), strict=True)):
            if states + s > self.context or blocks + a > self.blocks:
                cuts.append(place)
                states = blocks = 0
            states, blocks = states + s, blocks + a
        return np.array([*cuts, len(order)])

    def place(self, step: int) -> tuple[int, int]:
        """Epoch of a step, and its number inside the epoch."""
        for epoch, steps in enumerate(self.steps_per_epoch):
            if step < steps:
                return epoch, step
            step -= steps
        raise ValueError("step lies past the last epoch")

    def step(self, step: int) -> tuple[BatchPlan, ...]:
        """The batches of an optimizer step, over all ranks. Thread-safe; recent steps are remembered."""
        with self._lock:
            if step not in self._steps:
                self._steps[step] = self._plan_step(step)
                while len(self._steps) > 64:
                    self._steps.popitem(last=False)
            return self._steps[step]

    def _plan_step(self, step: int) -> tuple[BatchPlan, ...]:
        epoch, inside = self.place(step)
        if epoch not in self._orders:
            self._orders[epoch] = self._order(epoch)
            while len(self._orders) > 2:
                self._orders.popitem(last=False)
        order, cuts = self._orders[epoch], self.cuts[epoch]
        first = inside * self.train.batches_per_step
        bounds = [min(first + i, len(cuts) - 1) for i in range(self.train.batches_per_step + 1)]
        groups = [
            tuple(self._document(self.rows[r], epoch) for r in order[cuts[low] : cuts[high]])
            for low, high in pairwise(bounds)
        ]
        total = sum(self.cumulative[document.labels].sum() for group in groups for document in group)
        scale = 1.0 / total if total else 0.0
        return tuple(BatchPlan(group, scale, step * len(groups) + i) for i, group in enumerate(groups))

    def context_states(self, step: int) -> int:
        """Context states of a step's batches over all ranks, padding not counted."""
        epoch, inside = self.place(step)
        filled, first = self.filled[epoch], inside * self.train.batches_per_step
        return int(filled[min(first + self.train.batches_per_step, len(filled) - 1)] - filled[first])

    def _document(self, row: int, epoch: int) -> Document:
        supervised = self.cache.tokens(row)[1]
        candidates = anchors.eligible(supervised)
        row_hash = int(self.cache.rows.row_hash[row])
        chosen = anchors.choose(candidates, self.train.anchors_per_row, self.train.seed, epoch, row_hash)
        counts = anchors.label_counts(supervised, chosen, self.block_size)
        return Document(int(row), chosen, counts, int(self.cache.rows.states[row]))

    def fill_shares(self) -> tuple[float, float]:
        """How full the first epoch's batches get: shares of S and of A."""
        batches = max(len(self.cuts[0]) - 1, 1)
        return self.states.sum() / (batches * self.context), self.eligible.sum() / (batches * self.blocks)


def fill(cache: Cache, shape: BatchShape, plan: BatchPlan, out: Views) -> None:
    """Write a batch into the views of its buffer. Allocates small arrays only; touches no device."""
    B = shape.block_size
    at = block = 0
    out["scale"][0], out["noise_seed"][0] = plan.scale, plan.noise_seed
    states = {name.removeprefix("state."): view for name, view in out.items() if name.startswith("state.")}
    for document in plan.documents:
        tokens, _ = cache.tokens(document.row)
        count = cache.read_states(document.row, states, at)
        out["position"][at : at + count] = np.arange(count)
        last = block + len(document.anchors)
        out["start"][block:last] = at
        out["end"][block:last] = at + document.anchors
        out["anchor_token"][block:last] = tokens[document.anchors]
        out["labels"][block:last] = block_labels(tokens, document, B)
        if shape.teacher:
            _fill_teacher(cache, shape, document, block, out)
        at, block = at + count, last
    _pad(shape, out, at, block)
    if shape.tables:
        for window in shape.windows:
            mask = shape.mask(window)
            tables = {name: out[f"table.{window}.{name}"][0, 0] for name in mask.table_shapes()}
            block_tables(mask, out["start"], out["end"], tables)


def block_labels(tokens: np.ndarray, document: Document, block_size: int) -> np.ndarray:
    """int32 [anchors, B - 1]: slot k = 1 .. B - 1 predicts the token at anchor + k; -1 where there is no label."""
    slots = np.arange(1, block_size)
    places = np.minimum(document.anchors[:, None] + slots, len(tokens) - 1)
    return np.where(slots <= document.labels[:, None], tokens[places], -1)


def _fill_teacher(cache: Cache, shape: BatchShape, document: Document, block: int, out: Views) -> None:
    """The teacher of slot k is the target's distribution at anchor + k - 1, the entry that teaches token anchor + k."""
    slots = np.arange(shape.block_size - 1)
    valid = slots < document.labels[:, None]
    supervised = cache.tokens(document.row)[1]
    entries = (np.cumsum(supervised[1:]) - 1)[(document.anchors[:, None] + slots)[valid]]
    rows = ((block + np.arange(len(document.anchors)))[:, None] * (shape.block_size - 1) + slots)[valid]
    stored = {
        name: np.empty((int(cache.rows.teacher[document.row]), *tail), dtype)
        for name, (tail, dtype) in shape.teacher.items()
    }
    cache.read_teacher(document.row, stored, 0)
    for name, values in stored.items():
        out[f"teacher.{name}"][rows] = values[entries]


def _pad(shape: BatchShape, out: Views, at: int, block: int) -> None:
    """Padding states are zero bytes, finite in every codec; padding blocks have empty spans, slots without a label no
    teacher."""
    for name in shape.states:
        out[f"state.{name}"][at:] = 0
    out["position"][at:] = 0
    out["start"][block:] = out["end"][block:] = 0
    out["anchor_token"][block:] = 0
    out["labels"][block:] = -1
    for name in shape.teacher:
        out[f"teacher.{name}"][out["labels"].ravel() < 0] = 0

"""Extraction: token rows through the target, encoded states into shards, with the device always a batch ahead.

One thread, the caller's, touches the device: it uploads a batch, runs the truncated target, encodes on the device and
starts the copy to a slot of a pinned ring on a side stream. Once that copy is over, writer threads, which never touch
CUDA, put the slot's rows into their shards; other threads make finished shards durable. When no slot is free, the
device waits for the disk, and `Extraction.waited` says for how long. Windows come with their shards made and their
batches cut, by one more thread that never touches CUDA (`pipeline/ahead.py`), while the window before is run.

Shapes: B rows, T tokens (right-padded), N states kept of a batch, M teacher entries, K taps, H width.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.codec import ArraySpec
from data.errors import Failure
from data.shard import ShardWriter
from pipeline.console import say
from pipeline.encoder import Encoder, compilations
from pipeline.windows import Work, padded

AHEAD = 2
"""Batches that are launched while an earlier one runs: a small one is launched no faster than a large one."""
SLOTS = AHEAD + 3
"""Batches between device and disk: those on the device, one that is launched, and two for the writers."""
OPEN_WINDOWS = 2
"""Windows that are run and whose shards are not durable yet; one more is being made."""
PUTTERS, FINISHERS = 3, 4
"""Threads that put rows into shards, and that make shards durable."""
AMAX = ArraySpec((), np.dtype("float32"), torch.float32)


class Slot:
    """One batch's place in the ring: pinned inputs and outputs, and numpy views of the outputs for writers."""

    def __init__(self, specs: Mapping[str, ArraySpec], tokens: int, pinned: bool) -> None:
        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)

        self.ids, self.kept, self.taught = (empty((tokens,), torch.int64) for _ in range(3))
        self.out = {name: empty((tokens, *spec.shape), spec.torch_dtype) for name, spec in specs.items()}
        self.views = {name: tensor.numpy() for name, tensor in self.out.items()}


@dataclass
class Place:
    """Where a row goes: shard `shard`, its row `number`."""

    shard: Shard
    number: int


@dataclass
class Flight:
    """A batch on its way: its rows, their places, where its arrays are and when they have arrived."""

    works: list[Work]
    places: list[Place]
    slot: Slot
    arrived: torch.cuda.Event | None


class Shard:
    """A shard being written: closed by whoever puts its last row."""

    def __init__(self, writer: ShardWriter, done: Callable[[dict[str, Any]], None]) -> None:
        self.writer, self.done = writer, done
        self.complete = False
        self._left = len(writer.rows)
        self._lock = threading.Lock()

    def put(self, number: int, arrays: Mapping[str, np.ndarray]) -> bool:
        """Store a row; True when it was the last."""
        self.writer.put(number, arrays)
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        with self.writer:
            self.done(self.writer.finish())
        self.complete = True


@dataclass(frozen=True)
class OpenWindow:
    """A window ready to run: rows, where each goes (None: its shard is there already), and each batch's row numbers."""

    works: list[Work]
    places: list[Place | None]
    batches: list[np.ndarray]

    def shards(self) -> list[Shard]:
        return list({id(place.shard): place.shard for place in self.places if place is not None}.values())

    def abort(self) -> None:
        """Give up its unfinished shards."""
        for shard in self.shards():
            shard.writer.abort()


class Extraction:
    """Runs windows; use as a context manager.

    with Extraction(encoder, ...) as extraction:
        extraction.window(window, ready)   # again and again
        extraction.drain()
    """

    def __init__(self, encoder: Encoder, width: int, tokens_per_batch: int, longest: int) -> None:
        self.encoder, self.device = encoder, encoder.device
        self.state_names = tuple(encoder.codec.arrays())
        self.teacher_names = tuple(encoder.teacher.arrays(width))
        taps = len(encoder.taps.layer_ids)
        specs = encoder.codec.arrays() | encoder.teacher.arrays(width)
        specs["amax"] = ArraySpec((taps,), AMAX.dtype, AMAX.torch_dtype)
        capacity = max(tokens_per_batch, int(padded(longest)))
        pinned = self.device.type == "cuda"
        self.free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(SLOTS):
            self.free.put(Slot(specs, capacity, pinned))
        self.side = torch.cuda.Stream(self.device) if pinned else None
        self.putters = ThreadPoolExecutor(PUTTERS, "put")
        self.finishers = ThreadPoolExecutor(FINISHERS, "finish")
        self.flights: deque[Flight] = deque()
        self.futures: deque[Future[None]] = deque()
        self.open: deque[OpenWindow] = deque()
        self.shapes: set[tuple[int, int]] = set()
        self.waited = 0.0
        self.tokens = self.padded_tokens = 0

    def __enter__(self) -> Extraction:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and give up unfinished shards."""
        self.putters.shutdown(cancel_futures=True)
        self.finishers.shutdown(cancel_futures=True)
        for window in self.open:
            window.abort()
        self.encoder.close()

    def window(self, window: OpenWindow, ready: Callable[[np.ndarray], None]) -> None:
        """Run one window's rows. A row without a place is computed where its batch needs it, and not kept.

        `ready(rows)` is called with the row numbers of each batch and may raise to stop.
        """
        self.open.append(window)
        works, places = window.works, window.places
        for shard, number in _empty_rows(works, places):
            self._submit(self._put_empty, shard, number)
        for rows in window.batches:
            if any(places[row] is not None for row in rows):
                self._launch([works[row] for row in rows], [places[row] for row in rows])
                ready(rows)
        while len(self.open) >= OPEN_WINDOWS:
            self._settle_window()

    def drain(self) -> None:
        """Wait until everything is written and durable."""
        while self.open:
            self._settle_window()

    def _settle_window(self) -> None:
        shards = self.open[0].shards()
        while not all(shard.complete for shard in shards):
            idle = not self.flights
            if not idle and _is_over(self.flights[0].arrived):
                self._hand_over()
                continue
            started = time.monotonic()
            self._check()
            time.sleep(0.001)
            self.waited += idle * (time.monotonic() - started)
        self._check()
        self.open.popleft()

    def _launch(self, works: list[Work], places: list[Place | None]) -> None:
        slot = self._free_slot()
        length = int(padded(max(work.run for work in works)))
        self.shapes.add((len(works), length))
        self.tokens += sum(work.run for work in works)
        self.padded_tokens += len(works) * length
        ids, kept, taught = self._upload(slot, works, length)
        arrays = self.encoder(ids, kept, taught)
        self.flights.append(Flight(works, places, slot, self._download(slot, arrays)))
        while self.flights and (len(self.flights) > AHEAD or _is_over(self.flights[0].arrived)):
            self._hand_over()

    def _free_slot(self) -> Slot:
        """A slot that writers are done with; the time without one, and without a batch running, is the device waiting
        for the disk. Batches are handed over as they arrive, so that a slot is used as soon as it is free."""
        while True:
            idle = not self.flights
            if not idle and _is_over(self.flights[0].arrived):
                self._hand_over()
                continue
            started = time.monotonic()
            try:
                return self.free.get(timeout=0.2 if idle else 0.001)
            except Empty:
                self._check()
            finally:
                self.waited += idle * (time.monotonic() - started)

    def _upload(self, slot: Slot, works: list[Work], length: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = np.zeros((len(works), length), np.int64)
        for i, work in enumerate(works):
            ids[i, : work.run] = work.row.token_ids[: work.run]
        begins = np.arange(len(works)) * length
        kept = np.concatenate([begin + np.arange(w.row.states) for begin, w in zip(begins, works, strict=True)])
        taught = np.concatenate([begin + w.taught for begin, w in zip(begins, works, strict=True)])
        sent = []
        for pinned, values in ((slot.ids, ids), (slot.kept, kept), (slot.taught, taught)):
            here = pinned[: values.size]
            here.numpy()[:] = values.reshape(-1)
            sent.append(here.to(self.device, non_blocking=True))
        return sent[0].view(len(works), length), sent[1], sent[2]

    def _download(self, slot: Slot, arrays: dict[str, Tensor]) -> torch.cuda.Event | None:
        if self.side is None:
            for name, values in arrays.items():
                slot.out[name][: len(values)].copy_(values)
            return None
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            for name, values in arrays.items():
                slot.out[name][: len(values)].copy_(values, non_blocking=True)
                values.record_stream(self.side)
            arrived = torch.cuda.Event()
            arrived.record(self.side)
        return arrived

    def _hand_over(self) -> None:
        """Give the oldest batch to the writers once its arrays have arrived."""
        flight = self.flights.popleft()
        if flight.arrived is not None:
            flight.arrived.synchronize()
        self._submit(self._put, flight)
        self._check()

    def _submit(self, task: Callable[..., None], *arguments: Any) -> None:
        self.futures.append(self.putters.submit(task, *arguments))

    def _put(self, flight: Flight) -> None:
        try:
            at = taught = 0
            for work, place in zip(flight.works, flight.places, strict=True):
                row = {name: flight.slot.views[name][at : at + work.row.states] for name in self.state_names}
                row |= {
                    name: flight.slot.views[name][taught : taught + work.row.teacher] for name in self.teacher_names
                }
                if place is not None:
                    check_row(work, flight.slot.views["amax"][at : at + work.row.states], place.shard.writer)
                    self._put_row(place.shard, place.number, row)
                at, taught = at + work.row.states, taught + work.row.teacher
        finally:
            self.free.put(flight.slot)

    def _put_empty(self, shard: Shard, number: int) -> None:
        specs = {**shard.writer.state_specs, **shard.writer.teacher_specs}
        self._put_row(shard, number, {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in specs.items()})

    def _put_row(self, shard: Shard, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        if shard.put(number, arrays):
            self.futures.append(self.finishers.submit(shard.finish))

    def _check(self) -> None:
        """Raise what a thread raised."""
        for _ in range(len(self.futures)):
            future = self.futures.popleft()
            if future.done():
                future.result()
            else:
                self.futures.append(future)


def check_row(work: Work, amax: np.ndarray, writer: ShardWriter) -> None:
    """Raises Failure when a state of the row is not finite or all zero; `amax` [states, K] are largest magnitudes."""
    bad = np.argwhere(~(np.isfinite(amax) & (amax > 0)))
    if len(bad):
        position, tap = bad[0]
        what = "zero" if amax[position, tap] == 0 else "not finite"
        raise Failure(
            f"{writer.path}: row {work.row.row_id}: its state at position {position}, tap {tap} is {what}; nothing of "
            "this shard is kept. The target, its dtype or its weights are broken"
        )


def _empty_rows(works: Sequence[Work], places: Sequence[Place | None]) -> Iterator[tuple[Shard, int]]:
    for work, place in zip(works, places, strict=True):
        if work.run == 0 and place is not None:
            yield place.shard, place.number


def _is_over(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


class Meter:
    """Speed of this attempt, and the share of its time that the device waited for the disk."""

    def __init__(self, extraction: Extraction, name: str) -> None:
        self.extraction, self.name = extraction, name
        self.started = time.monotonic()
        self.before = (extraction.tokens, extraction.padded_tokens, extraction.waited)

    def note(self) -> str:
        waited = self.extraction.waited - self.before[2]
        return f"waiting for disk: {100 * waited / self._seconds():.0f} %"

    def _seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def report(self) -> None:
        tokens = self.extraction.tokens - self.before[0]
        padding = self.extraction.padded_tokens - self.before[1] - tokens
        say(
            f"extract {self.name}: {tokens:,} tokens run, {tokens / self._seconds():,.0f} tokens/s, {self.note()}; "
            f"padding {100 * padding / max(tokens, 1):.1f} %, "
            f"{len(self.extraction.shapes)} batch shapes, {compilations()} compilations"
        )

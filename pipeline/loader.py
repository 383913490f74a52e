"""Feeding: reader threads fill pinned buffers in order, copies run beside the step, nothing waits in silence.

Readers write into numpy views and make no CUDA call. The one thread that does owns the copies: host buffer ->
device slot on a side stream -> static inputs of the step just before it runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.errors import BadInput, Failure
from pipeline.batches import BatchPlan, BatchShape

HOST_BUFFERS = 6
DEVICE_SLOTS = 2

Fill = Callable[[BatchPlan, dict[str, np.ndarray]], None]


@dataclass
class _Host:
    buffer: Tensor
    views: dict[str, np.ndarray]


@dataclass
class _Slot:
    buffer: Tensor
    ready: torch.cuda.Event
    free: torch.cuda.Event


class Loader:
    """Batches of one rank in order. `next_into` puts the next one into a static buffer.

    `plans(i)` gives the i-th batch plan, `count` of them; `fill` writes one into host views.
    """

    def __init__(
        self,
        shape: BatchShape,
        plans: Callable[[int], BatchPlan],
        count: int,
        fill: Fill,
        device: torch.device,
        readers: int = 2,
    ) -> None:
        self.plans, self.count, self.fill, self.cuda = plans, count, fill, device.type == "cuda"
        size = shape.offsets()[1]
        self.free: deque[_Host] = deque()
        self.buffers = min(HOST_BUFFERS, count) if self.cuda else readers + 1
        for _ in range(self.buffers):
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.cuda)
            self.free.append(_Host(buffer, shape.host_views(buffer.numpy())))
        self.slots = [self._slot(size, device) for _ in range(DEVICE_SLOTS)] if self.cuda else []
        self.stream = torch.cuda.Stream() if self.cuda else None
        self._waited = 0.0
        self._gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._full: dict[int, _Host] = {}
        self._copying: deque[tuple[torch.cuda.Event, _Host]] = deque()
        self._taken = self._copied = self._given = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._read, name=f"reader-{i}", daemon=True) for i in range(readers)]

    def _slot(self, size: int, device: torch.device) -> _Slot:
        slot = _Slot(torch.empty(size, dtype=torch.uint8, device=device), torch.cuda.Event(), torch.cuda.Event())
        slot.free.record()
        return slot

    def start(self) -> None:
        """Start the readers: after warm-up and capture, never before."""
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        try:
            while (work := self._take()) is not None:
                index, host = work
                self.fill(self.plans(index), host.views)
                with self._changed:
                    self._full[index] = host
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> tuple[int, _Host] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._taken >= self.count or self.free)
            if self._closed or self._taken >= self.count:
                return None
            self._taken += 1
            return self._taken - 1, self.free.popleft()

    def waited(self) -> float:
        """Seconds so far in which whoever computes had nothing to do for want of a batch: the device, between the end
        of its work and a batch's arrival, as far as it has come; without one, the host."""
        while self._gaps and self._gaps[0][1].query():
            idle, arrival = self._gaps.popleft()
            self._waited += idle.elapsed_time(arrival) / 1e3
        return self._waited

    def _wait_full(self, index: int) -> _Host:
        with self._changed:
            self._changed.wait_for(lambda: index in self._full or self._error is not None)
            if isinstance(self._error, BadInput):  # damaged bytes: it names them, and the remedy
                raise BadInput(str(self._error)) from self._error
            if self._error is not None:
                raise Failure(f"a reader died: {self._error}") from self._error
            return self._full.pop(index)

    def _release(self, host: _Host) -> None:
        with self._changed:
            self.free.append(host)
            self._changed.notify_all()

    def next_into(self, static: Tensor) -> None:
        """Copy the next batch into `static`, in stream order.

        Raises BadInput when a reader met damaged bytes, Failure when one has died.
        """
        index = self._given
        self._given += 1
        self._give_back()
        if not self.cuda:
            start = time.perf_counter()
            host = self._wait_full(index)
            self._waited += time.perf_counter() - start
            static.copy_(host.buffer)
            self._release(host)
            return
        self.waited()  # takes what is over off the list
        current = torch.cuda.current_stream()
        idle, arrival = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        idle.record(current)
        if self._copied == index:
            self._start_copy(self._wait_full(index))
        slot = self.slots[index % DEVICE_SLOTS]
        current.wait_event(slot.ready)
        arrival.record(current)
        self._gaps.append((idle, arrival))
        static.copy_(slot.buffer, non_blocking=True)
        slot.free.record(current)
        self._copy_ahead(index)

    def _give_back(self) -> None:
        """Give host buffers whose copy is over back to the readers. When copies hold all of them, the host is that far
        ahead of the device: then it waits for the oldest, since no reader could fill what it asks for next."""
        while self._copying and (len(self._copying) == self.buffers or self._copying[0][0].query()):
            over, host = self._copying.popleft()
            over.synchronize()
            self._release(host)

    def _copy_ahead(self, index: int) -> None:
        """Start the copy of the next batch if it is there."""
        if self._copied == index + 1 < self.count and self._copied in self._full:
            self._start_copy(self._wait_full(self._copied))

    def _start_copy(self, host: _Host) -> None:
        slot = self.slots[self._copied % DEVICE_SLOTS]
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(slot.free)
            slot.buffer.copy_(host.buffer, non_blocking=True)
            slot.ready.record(self.stream)
            over = torch.cuda.Event()
            over.record(self.stream)
        self._copying.append((over, host))
        self._copied += 1

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


def rank_share(batches: Sequence[BatchPlan], rank: int, world: int) -> Sequence[BatchPlan]:
    """The batches of a step that one rank runs."""
    return batches[rank::world]

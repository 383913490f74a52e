"""The loader on a device that lags behind the host, which a CPU can only pretend to have."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import loader
from pipeline.loader import HOST_BUFFERS, Loader

COPY_SECONDS = 0.002


class Event:
    """Over some time after it was recorded, as a copy is."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.over = 0.0

    def record(self, stream: Any = None) -> None:
        self.over = time.monotonic() + COPY_SECONDS

    def query(self) -> bool:
        return time.monotonic() >= self.over

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.over - self.over)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.over - time.monotonic()))


class Stream:
    def wait_event(self, event: Event) -> None:
        pass


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(Event=Event, Stream=Stream, stream=lambda stream: nullcontext(), current_stream=Stream)
    fake = SimpleNamespace(uint8=torch.uint8, cuda=cuda, empty=lambda size, **_: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(loader, "torch", fake)


@pytest.mark.parametrize("readers", [1, 2, 8])
def test_a_host_far_ahead_of_its_device_gets_every_batch_in_order(slow_device: None, readers: int) -> None:
    count, got = 10 * HOST_BUFFERS, []

    def fill(plan: int, views: dict[str, np.ndarray]) -> None:
        views["number"][:] = plan

    shape = SimpleNamespace(offsets=lambda: ({}, 4), host_views=lambda buffer: {"number": buffer})
    feed = Loader(shape, lambda index: index, count, fill, SimpleNamespace(type="cuda"), readers)  # type: ignore[arg-type]
    static = torch.zeros(4, dtype=torch.uint8)

    def consume() -> None:
        for _ in range(count):
            feed.next_into(static)
            got.append(int(static[0]))

    feed.start()
    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    thread.join(10)
    assert got == list(range(count))
    feed.close()
    time.sleep(COPY_SECONDS)
    assert 0 <= feed.waited() < 10

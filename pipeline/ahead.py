"""Items made by one other thread, one ahead of whoever uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def ahead(items: Iterator[T], give_up: Callable[[T], None]) -> Iterator[Iterator[T]]:
    """The same items in the same order: the first is begun at once, each of the others when the one before is taken.

        with ahead(items, give_up) as made:
            for item in made: ...

    What making an item raises is raised where that item is asked for. An item that was made and never asked for is
    given up on leaving. No item is None.
    """
    thread = ThreadPoolExecutor(1, "ahead")

    def begin() -> Future[T | None]:
        return thread.submit(next, items, None)

    def taken() -> Iterator[T]:
        nonlocal coming
        while (item := coming.result()) is not None:
            coming = begin()
            yield item

    coming = begin()
    try:
        yield taken()
    finally:
        thread.shutdown()
        if coming.exception() is None and (item := coming.result()) is not None:
            give_up(item)

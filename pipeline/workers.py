"""Processes that prepare chunks and write parts. Each loads the tokenizer once; none touches a device.

Spawned, not forked: tokenizers and Arrow hold threads. Small inputs are prepared in the calling process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.errors import Failure
from data.settings import Run
from data.sources import Chunk
from data.spill import SPILL, write_spill
from data.tokens import in_validation, ragged, row_hash, stable_hash
from pipeline.job import die_with_parent
from pipeline.preparer import Kept, Preparer

SMALL = 4000
"""Rows up to which starting processes costs more than it saves."""

_preparer: Preparer | None = None


def start(run: Run, benchmarks: dict[str, frozenset[int]], threads: int | None = None) -> Preparer:
    """Make this process's preparer. `threads`: limit on the tokenizer's and Arrow's own threads."""
    global _preparer
    if threads is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pa.set_cpu_count(threads)
        gc.set_threshold(100_000, 50, 100)  # rows are many small objects without cycles
    from pipeline.target import load_tokenizer

    _preparer = Preparer(load_tokenizer(run), run.data, benchmarks)
    return _preparer


def _begin(run: Run, benchmarks: dict[str, frozenset[int]]) -> None:
    """First act of a worker process. Of a killed stage's workers nobody would hear again: they wait for each other."""
    die_with_parent()
    start(run, benchmarks, 1)


def prepare_chunk(chunk: Chunk, path: Path, wanted: str, held_out: bool | float) -> int:
    """Prepare a chunk into a spill file. `held_out`: of the whole source, or the share that is. Returns rows read."""
    assert _preparer is not None
    kept, dropped = _preparer.chunk(chunk, wanted)
    formats: dict[str, int] = {}
    for row in kept:
        formats[row.format] = formats.get(row.format, 0) + 1
    report = {
        "name": chunk.name,
        "rows": len(chunk.rows),
        "formats": formats,
        "dropped": [asdict(row) for row in dropped],
    }
    write_spill(path, spill_table(kept, chunk.name, held_out), report)
    return len(chunk.rows)


def spill_table(kept: list[Kept], source: str, held_out: bool | float) -> pa.Table:
    """Kept rows as a table of `SPILL`: the conversation's own row first, then its other token rows."""
    rows: list[tuple[Any, ...]] = []
    ids, masks = [], []
    nothing = (np.zeros(0, np.int32), np.zeros(0, bool), False)
    for row in kept:
        row_id = row.row_id if row.own_id else f"{row.row_id}-0"
        validation = held_out if isinstance(held_out, bool) else in_validation(row_id, held_out)
        shared = (source, validation, row.prompt_tokens)
        record = row.conversation.record
        hashes = (stable_hash(record), stable_hash(row.conversation.prompt()))
        pieces = {-1 if p.turn is None else p.turn: (p.ids, p.supervised, p.finished) for p in row.pieces}
        if -1 not in pieces and pieces:  # the whole row is unusable: its first usable answer stands for it
            pieces[-1] = pieces.pop(min(pieces))
        for turn, (tokens, mask, finished) in sorted((pieces or {-1: nothing}).items()):
            own = (record, *shared, row.notes) if turn < 0 else (None, *shared, ())
            rows.append((row_id, turn, row.own_id, *own, row_hash(row_id), *hashes, finished))
            ids.append(tokens)
            masks.append(mask)
    plain = list(zip(*rows, strict=True)) if rows else [()] * 12
    lists = [ragged(ids, pa.int32()), ragged(masks, pa.bool_())]
    arrays = [pa.array(values, field.type) for values, field in zip(plain[:11], list(SPILL)[:11], strict=True)]
    return pa.table([*arrays, *lists, pa.array(plain[11], pa.bool_())], schema=SPILL)


class Workers:
    """Runs tasks in `count` processes, or here when `count` is 0. Results come in the order of completion."""

    def __init__(self, run: Run, benchmarks: dict[str, frozenset[int]], count: int) -> None:
        self.count = count
        self.pool: ProcessPoolExecutor | None = None
        if count:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(run, benchmarks))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def run(self, task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """`task(*a)` for each `a`; at most two a process are under way, so that nothing piles up.

        Raises Failure when a process dies.
        """
        if self.pool is None:
            yield from (task(*each) for each in arguments)
            return
        try:
            yield from self._spread(self.pool, task, iter(arguments))
        except BrokenProcessPool:
            raise Failure(
                "a worker process was killed, or out of memory: the same command goes on with what is not done"
            ) from None

    def _spread(
        self, pool: ProcessPoolExecutor, task: Callable[..., Any], waiting: Iterator[tuple[Any, ...]]
    ) -> Iterator[Any]:
        running: set[Future[Any]] = {pool.submit(task, *each) for each in islice(waiting, 2 * self.count)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(task, *each) for each in islice(waiting, len(done))}
            yield from (future.result() for future in done)


def processes() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

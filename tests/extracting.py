"""Token tables from a seed, and extraction as child processes that die where they are told: for tests."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.layout import Layout
from data.manifest import file_record, publish
from data.settings import Run
from data.store import Bucket
from data.tokens import TokenRow, row_hash, write_tokens
from pipeline.targets_tiny import TOKENS
from stages.extract import Machine, Part

# What stages import late, imported early: children share it.
for late in ("data.part", "data.shard", "transformers.models.llama.modeling_llama", "pandas"):
    with contextlib.suppress(ImportError):
        importlib.import_module(late)

POINTS = ("pwrite", "fsync", "replace", "rename", "unlink", "mkdir", "ftruncate")
"""Calls of `os` between which a process may die."""


def write_token_parts(run: Run, rows: int = 24, seed: int = 0, salt: str = "") -> None:
    """Rows of 12 to 90 random tokens, some with gaps in their mask and one without any anchor."""
    layout = Layout.of(run)
    rng = np.random.default_rng(seed)
    parts: list[list[TokenRow]] = [[] for _ in range(run.extract.parts)]
    for number in range(rows):
        length = int(rng.integers(12, 91))
        ids = rng.integers(0, TOKENS, length).astype(np.int32)
        supervised = np.arange(length) >= int(rng.integers(2, length // 2))
        if number % 5 == 0:
            supervised &= rng.random(length) < 0.7
        if number == 3:
            supervised = np.arange(length) == 5
        row = TokenRow(f"row-{salt}{number}", ids, supervised, True, number % 7 == 0, "made")
        parts[row_hash(row.row_id) % run.extract.parts].append(row)
    for part, made in enumerate(parts):
        made.sort(key=lambda row: row_hash(row.row_id))
        path = layout.tokens(part)
        write_tokens(path.with_suffix(".parquet"), made)
        record = file_record(path.with_suffix(".parquet"), path.parent)
        counts = {"rows": len(made), "tokens": sum(len(row.token_ids) for row in made)}
        publish(path, "tokens", {"fingerprint": str(record["crc32c"]), "counts": counts, "files": [record]})


def extract(run: Run, parts: tuple[int, ...] = (0,), stop: Callable[[], None] = lambda: None, **options: Any) -> None:
    """What the stage does for `parts`, in this process, on the CPU."""
    work = SimpleNamespace(device="cpu", check_stop=stop)
    with ExitStack() as stack:
        machine = Machine(run, stack)
        for part in parts:
            Part(run, part, machine, work, options.get("force", False)).make()


def tree(run: Run) -> dict[str, bytes]:
    """Every published file of the cache."""
    cache = Layout.of(run).cache
    files = (path for path in sorted(cache.rglob("*")) if path.is_file())
    return {
        path.relative_to(cache).as_posix(): path.read_bytes()
        for path in files
        if path.suffix not in (".lock", ".tmp") and path.name != "state.json"
    }


class Children:
    """Children forked from a server that has torch loaded and no threads: a start takes a tenth of a second."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.extracting"])

    def run(
        self, run: Run, part: int = 0, die_at: int | None = None, half: bool = False, upload: int | None = None
    ) -> int:
        """Extract in a child; its exit code. It kills itself before its `die_at`-th call of `POINTS`, or before its
        `upload`-th upload."""
        child = self.start(run, part, die_at, half, upload)
        child.join(60)
        assert child.exitcode is not None, "the child hangs"
        return child.exitcode

    def start(
        self, run: Run, part: int = 0, die_at: int | None = None, half: bool = False, upload: int | None = None
    ) -> Any:
        remote = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        arguments = (run.model_dump_json(by_alias=True, exclude_unset=True), part, die_at, half, upload, remote)
        child = self.context.Process(target=_child, args=arguments)
        child.start()
        return child


def _child(run: str, part: int, die_at: int | None, half: bool, upload: int | None, remote: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(remote)
    counter = itertools.count(1)
    if die_at is not None:
        for name in POINTS:
            setattr(os, name, _deadly(getattr(os, name), name, counter, die_at, half))
    if upload is not None:
        Bucket.upload = _deadly(Bucket.upload, "upload", itertools.count(1), upload, False)
    extract(Run.model_validate_json(run), (part,))


def _deadly(call: Callable[..., Any], name: str, counter: Any, die_at: int, half: bool) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if next(counter) == die_at:
            if half and name == "pwrite":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)

    return wrapped


def calls(run: Run, part: int = 0) -> int:
    """How many calls of `POINTS` an undisturbed extraction makes, in this process."""
    counter = itertools.count(1)
    before = {name: getattr(os, name) for name in POINTS}
    for name in POINTS:
        setattr(os, name, _deadly(before[name], name, counter, -1, False))
    try:
        extract(run, (part,))
    finally:
        for name in POINTS:
            setattr(os, name, before[name])
    return next(counter) - 1


def shards(run: Run, part: int = 0) -> list[Path]:
    return sorted((Layout.of(run).cache / f"part-{part:04d}").glob("shard-*.zarr"))

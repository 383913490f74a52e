"""What a person sees of running work: plain lines, and progress as a bar on a terminal or a line every ten seconds.

Everything goes to stderr, and to the log and the status file of the job that is running (`pipeline/job.py` sets the
sink); the log has the progress lines also where the screen has a bar. Several jobs may share one terminal under
Snakemake, where bars would overwrite each other: the Snakefile asks for lines with `DRAFTMILL_LINES=1`. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Protocol

LINE_SECONDS = 10.0
"""Pause between two progress lines."""


@dataclass(frozen=True)
class Snapshot:
    """Where a piece of work stands: counts in `unit`, rate a second, seconds left (None while unknown)."""

    title: str
    unit: str
    done: float
    total: float
    rate: float
    left: float | None
    note: str

    def text(self) -> str:
        known = self.total >= self.done  # a total may be an estimate
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total and known else ""
        of = f"/{self.total:g}" if known else ""
        left = "" if self.left is None else f", {duration(self.left)} left"
        note = f"; {self.note}" if self.note else ""
        return f"{self.title}: {self.done:g}{of} {self.unit}{share}, {self.rate:.3g} {self.unit}/s{left}{note}"


class Sink(Protocol):
    """Where lines and progress of the running job are kept."""

    name: str

    def line(self, text: str) -> None: ...

    def progress(self, body: dict[str, Any]) -> None: ...

    def beat(self) -> None: ...


class _Console:
    sink: Sink | None = None
    bar: Any = None  # the live rich.progress.Progress, above which lines are printed


_console = _Console()


def set_sink(sink: Sink | None) -> Sink | None:
    """Make `sink` receive all lines and progress; gives back the one before."""
    before, _console.sink = _console.sink, sink
    return before


def say(text: str) -> None:
    """One plain line to stderr, flushed, and to the running job's log."""
    sink = _console.sink
    if sink is not None:
        sink.line(text)
        sink.beat()
    with _terminal():
        if _console.bar is not None:
            _console.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if sink is not None and not _has_terminal():
            text = f"{sink.name} | {text.removeprefix(f'{sink.name}: ')}"
        print(text, file=sys.stderr, flush=True)


def _terminal() -> contextlib.AbstractContextManager[None]:
    """Around every write: the terminal may be gone (closed SSH session) while the work goes on; the log has it all."""
    return contextlib.suppress(OSError, ValueError)


def duration(seconds: float) -> str:
    """`75` -> `1m15s`."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def size(count: float) -> str:
    """Bytes for people: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _has_terminal() -> bool:
    return sys.stderr.isatty() and not os.environ.get("DRAFTMILL_LINES")


class Progress:
    """Progress of `total` units of work.

    `done` is what an earlier attempt has finished: it counts as done, but not into the rate.

        with Progress(1000, "extract part-0003", unit="rows") as bar:
            bar.advance(16, note="disk 3 % of the time")
    """

    def __init__(self, total: float, title: str, unit: str = "rows", done: float = 0) -> None:
        self.total, self.title, self.unit = total, title, unit
        self.done = self._before = done
        self.note = self._detail = ""
        self._started = self._last_line = time.monotonic()
        self._told = -LINE_SECONDS
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._started = self._last_line = time.monotonic()
        if _has_terminal() and _console.bar is None:
            self._bar, self._task = _live_bar(self)
            _console.bar = self._bar
        self._report()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            with _terminal():
                self._bar.stop()
            self._bar = _console.bar = None
        self._report()
        if kind is None:
            self._line()

    def advance(self, n: float = 1, note: str | None = None) -> None:
        """`n` more units are done. Cheap enough to be called for every batch."""
        self.done += n
        if note is not None:
            self.note = note
        self._report()
        if self._bar is not None:
            with _terminal():
                self._bar.update(self._task, completed=self.done, note=self.note)
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._line()

    def tell(self, detail: str) -> None:
        """Numbers that a bar has no room for. They take the place of the note in one line: in this moment when none has
        shown such numbers for `LINE_SECONDS`, else in the next line, unless newer ones come before it."""
        self._detail = detail
        if time.monotonic() - self._told >= LINE_SECONDS:
            self._line()

    def _line(self) -> None:
        """A line to the log, and to the screen where no bar is."""
        text = replace(self.snapshot(), note=self._detail or self.note).text()
        self._last_line = time.monotonic()
        if self._detail:
            self._told, self._detail = self._last_line, ""
        if self._bar is None:
            say(text)
        elif _console.sink is not None:
            _console.sink.line(text)

    def snapshot(self) -> Snapshot:
        fresh = self.done - self._before
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = fresh / seconds if fresh else 0.0
        left = (self.total - self.done) / rate if rate and self.done <= self.total else None
        return Snapshot(self.title, self.unit, self.done, self.total, rate, left, self.note)

    def _report(self) -> None:
        if _console.sink is not None:
            _console.sink.progress(asdict(self.snapshot()))
            _console.sink.beat()


def _live_bar(work: Progress) -> tuple[Any, Any]:
    from rich import progress as rich_progress
    from rich.console import Console

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn(work.unit),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar, bar.add_task(work.title, total=work.total, completed=work.done, note="")

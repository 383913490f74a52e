"""One job: a stage at work on one part or one drafter. Devices, log, status, signals, watchdog.

    with job(run, "extract", label="part-0003", gpus=1) as work:
        for window in windows:
            work.check_stop()
            ...

No torch here: a stage imports it after its devices are leased.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from data.errors import BadInput, Failure, Stopped
from data.settings import Run
from pipeline import devices, preflight
from pipeline.console import duration, say, set_sink
from pipeline.journal import Journal
from pipeline.watchdog import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Asked to end: a scheduler's warning, a closed SSH session, Ctrl-C. The stage saves and raises Stopped."""


class Job:
    """What a stage holds while it works."""

    def __init__(self, stage: str, label: str) -> None:
        self.name = f"{stage} {label}".strip()
        self.lease = devices.Lease(())
        self.journal: Journal | None = None
        self.watchdog: Watchdog | None = None
        self._signal: signal.Signals | None = None
        self._interrupted = 0.0

    @property
    def device(self) -> str:
        """torch's name of the leased device: `cuda:0` (`cuda:LOCAL_RANK` in a rank) or `cpu`."""
        return self.lease.torch_device

    @property
    def log(self) -> Path | None:
        """Log of this attempt; None for commands without a run file."""
        return None if self.journal is None else self.journal.log

    def stop_requested(self) -> bool:
        """True once a signal has asked this job to end."""
        return self._signal is not None

    def check_stop(self) -> None:
        """Raise Stopped once a signal has asked this job to end: call it wherever everything is saved."""
        if self._signal is not None:
            raise Stopped(f"{self._signal.name} arrived; the same command goes on from here")

    def line(self, text: str) -> None:
        """Keep a line in the log, with the time before it."""
        if self.journal is not None:
            self.journal.line(text)

    def progress(self, body: dict[str, Any]) -> None:
        """Keep the newest progress for `draftmill status`."""
        if self.journal is not None:
            self.journal.progress(body)

    def beat(self) -> None:
        """A sign of life for the watchdog. Lines and progress are signs of life too."""
        if self.watchdog is not None:
            self.watchdog.beat()

    def allow(self, seconds: float | None = None, setting: str = "") -> None:
        """From now on end this job after `seconds` without a sign of life, because `setting` says so; in any case after
        `jobs.stall_seconds`, which holds alone when nothing is given."""
        if self.watchdog is None or self.journal is None:
            return
        whole = self.journal.run.jobs.stall_seconds
        bounds = [(math.inf if whole is None else whole, "jobs.stall_seconds")]
        self.watchdog.allow(*min(bounds if seconds is None else [*bounds, (seconds, setting)]))

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """First signal: asks for a stop. Ctrl-C again, a second or more later: ends at once."""
        if number == signal.SIGINT:
            if self._interrupted and time.monotonic() - self._interrupted > 1.0:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or time.monotonic()
        self._signal = self._signal or signal.Signals(number)


@contextmanager
def job(run: Run | None, stage: str, label: str = "", gpus: int = 0) -> Iterator[Job]:
    """Run a stage's work as a job: log and status, one process a job, signals, `gpus` leased devices, watchdog.

    With `run` None (a command without a run file) there is neither log nor status nor watchdog. A rank started by
    `draftmill train` uses its parent's lease, gets its rank into its label, and dies with its parent.
    Errors pass through, recorded.
    """
    rank = os.environ.get("RANK") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if rank is not None:
        die_with_parent()
        label = f"{label or stage}.rank{rank}"
    work = Job(stage, label)
    with ExitStack() as stack:
        stack.enter_context(_signals(work))
        if run is not None:
            journal = Journal(run, stage, label)
            journal.acquire(work.check_stop)
            journal.open()
            stack.callback(journal.close)
            work.journal = journal
        stack.callback(set_sink, set_sink(work))
        stack.enter_context(_recorded(work))
        stack.enter_context(_watched(work))
        _equip(work, gpus, idle_check=rank is None)
        yield work


def _equip(work: Job, gpus: int, idle_check: bool) -> None:
    """Lease what the job needs and write down what it got."""
    journal = work.journal

    def wait() -> None:
        """Waiting for other jobs is not a hang; a driver or a disk that does not answer is."""
        work.beat()
        work.check_stop()

    if journal is not None:
        journal.header()
    if gpus:
        work.lease = devices.lease(gpus, wait)
    if journal is None:
        return
    device = " ".join(work.lease.uuids) or "cpu"
    journal.line(f"device {device}")
    preflight.require_torch_build(work.lease)
    preflight.warn_low_disk(journal.run.folder)
    if idle_check and work.lease.uuids:
        limits = journal.run.jobs
        devices.require_idle(work.lease.uuids, limits.busy_share, limits.idle_wait_seconds, wait)
    journal.set(status="running", device=device)


@contextmanager
def _watched(work: Job) -> Iterator[None]:
    journal = work.journal
    if journal is None:
        yield
        return

    def told(text: str) -> None:
        journal.set(status="failed", why=text)
        say(f"error: {text}; log: {journal.log}")

    work.watchdog = Watchdog(journal.stacks_file(), told)
    work.allow()
    try:
        yield
    finally:
        work.watchdog.close()


@contextmanager
def _recorded(work: Job) -> Iterator[None]:
    """Write down how the work ended, whatever it was."""
    started = time.monotonic()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, BadInput | Failure | Stopped | KeyboardInterrupt):
            work.line(traceback.format_exc())
            error.draftmill_log = work.log  # type: ignore[attr-defined]  # for the last line on the terminal
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        why = " ".join(f"{type(error).__name__}: {error}".split())
        _end(work, "stopped" if stopped else "failed", time.monotonic() - started, why)
        raise
    _end(work, "done", time.monotonic() - started, "")


def _end(work: Job, status: str, seconds: float, why: str) -> None:
    if work.journal is None:
        return
    with suppress(OSError):  # a full disk must not hide the error that it caused
        work.line(f"end status={status} seconds={seconds:.1f} why={why or '-'}")
        work.journal.set(status=status, seconds=seconds, why=why)
    if status != "done":
        say(f"{status} after {duration(seconds)}; log: {work.log}")


@contextmanager
def _signals(work: Job) -> Iterator[None]:
    """Turn signals into requests to stop; only the main thread of a process can listen."""
    try:
        before = {number: signal.signal(number, work.on_signal) for number in SIGNALS}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that no rank outlives the lease (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

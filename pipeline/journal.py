"""What a job leaves to read: one log per attempt and one status file, and the lock that keeps two of a job apart.

logs/extract/part-0003-002.log      second attempt; each line starts with the time, in UTC
logs/extract/part-0003.log          points to the newest attempt
logs/extract/part-0003.status.json  where it stands, rewritten about once a second
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data.layout import Layout
from data.manifest import fingerprint
from data.settings import Run
from pipeline.console import say

WRITE_SECONDS = 1.0
"""Shortest pause between two writes of the status file."""

PACKAGES = ("draftmill", "torch", "transformers", "zarr", "numcodecs", "snakemake")


class Journal:
    """Log and status of one attempt of one job."""

    def __init__(self, run: Run, stage: str, label: str) -> None:
        self.run = run
        stem = label or stage
        folder = Layout.of(run).logs / stage
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / f".{stem}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._path = folder / f"{stem}.status.json"
        self._stem = stem
        self.status: dict[str, Any] = {"run": run.name, "stage": stage, "label": label, "status": "waiting"}
        self._written = 0.0

    def acquire(self, stop: Callable[[], None]) -> None:
        """Wait until no other process does this job: an orphan of a killed scheduler may still be at it."""
        told = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not told:
                    pid = read_status(self._path).get("pid", "unknown")
                    say(f"waiting: the same job is at work already (pid {pid})")
                    told = True
            stop()
            time.sleep(0.2)

    def open(self) -> None:
        """Start this attempt's log and status; only after `acquire`."""
        folder = self._path.parent
        earlier = [int(path.stem.rsplit("-", 1)[1]) for path in folder.glob(f"{self._stem}-[0-9][0-9][0-9].log")]
        attempt = max(earlier, default=0) + 1
        self.log = folder / f"{self._stem}-{attempt:03d}.log"
        self._file = self.log.open("a", encoding="utf-8")
        _point(folder / f"{self._stem}.log", self.log.name)
        self.status.update(
            attempt=attempt,
            log=str(self.log),
            pid=os.getpid(),
            born=born(os.getpid()),
            host=socket.gethostname(),
            command=" ".join(sys.argv),
            cache=self.run.cache.run,
            started=now(),
        )
        self.write()

    def header(self) -> None:
        """The first lines of a log: what runs, with which settings, where."""
        versions = " ".join(f"{name}={installed(name)}" for name in PACKAGES)
        status = self.status
        for text in (
            f"start run={self.run.name} stage={status['stage']} label={status['label']} attempt={status['attempt']}",
            f"command {status['command']}",
            f"settings fingerprint={fingerprint(self.run.model_dump(mode='json'))}",
            f"host {status['host']} pid={status['pid']} cpus={os.cpu_count()}",
            f"versions python={platform.python_version()} {versions}",
        ):
            self.line(text)

    def line(self, text: str) -> None:
        self._file.write(f"{now()} {text}\n")
        self._file.flush()

    def stacks_file(self) -> Any:
        return self._file

    def set(self, **more: Any) -> None:
        """Change the status and write it now."""
        self.status.update(more)
        self.write()

    def progress(self, body: dict[str, Any]) -> None:
        """Change the progress; written at most once a second, the first at once."""
        first = "progress" not in self.status
        self.status["progress"] = body
        if first or time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps({**self.status, "seen": now()}, indent=1), encoding="utf-8")
        os.replace(temporary, self._path)  # not synced: after a power cut the job is gone anyway

    def close(self) -> None:
        with suppress(OSError):  # a full disk has been reported by then
            self._file.close()
        os.close(self._lock)


def read_status(path: Path) -> dict[str, Any]:
    """A status file's body, `{}` when there is none; a *running* job whose process is gone is `died`."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    alive = body.get("host") != socket.gethostname() or born(body.get("pid", 0)) == body.get("born")
    if body.get("status") in ("running", "waiting") and not alive:
        body["status"] = "died"
        body["why"] = "its process is gone without a word: killed, or out of memory"
    return body


def statuses(run: Run) -> list[dict[str, Any]]:
    """The newest attempt of every job of a run, in the order in which they started."""
    found = [read_status(path) for path in Layout.of(run).logs.glob("*/*.status.json")]
    return sorted((body for body in found if body), key=lambda body: str(body.get("started")))


def tail(log: Path, lines: int = 12) -> Sequence[str]:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []


def now() -> str:
    """This moment, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def born(pid: int) -> str | None:
    """When a process was started, in ticks since boot: with the pid it names a process for good. None: not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def installed(package: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)

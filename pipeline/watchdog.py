"""Ends a stage that has stopped getting anywhere, loudly: a hang must not look like work.

A thread that makes no CUDA call looks at the time of the last sign of life. Collectives inside replayed graphs are
invisible to NCCL's own watchdog, so this one ends stalled ranks too.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

BACKSTOP_SECONDS = 30.0
"""How much later a C thread, which needs no interpreter lock, ends a process whose Python threads are all stuck."""


class Watchdog:
    """Ends the process with code 1 and all stacks in `log` after `seconds` without a `beat`."""

    def __init__(self, seconds: float, log: TextIO, told: Callable[[str], None]) -> None:
        self.seconds, self.log, self.told = seconds, log, told
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beat = time.monotonic()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        pause = min(5.0, self.seconds / 4)
        while not self._ended.wait(pause):
            faulthandler.dump_traceback_later(pause + self.seconds + BACKSTOP_SECONDS, exit=True, file=self.log)
            quiet = time.monotonic() - self._beat
            if quiet > self.seconds:
                faulthandler.dump_traceback(file=self.log, all_threads=True)
                self.told(f"no progress for {quiet:.0f} s: ended, with all stacks in the log (`jobs.stall_seconds`)")
                os._exit(1)

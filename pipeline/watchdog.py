"""Ends a stage that has stopped getting anywhere, loudly: a hang must not look like work.

A thread that makes no CUDA call looks at the time of the last sign of life. Collectives inside replayed graphs are
invisible to NCCL's own watchdog, so this one ends stalled ranks too.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

BACKSTOP_SECONDS = 30.0
"""How much later a C thread, which needs no interpreter lock, ends a process whose Python threads are all stuck."""


class Watchdog:
    """Ends the process with code 1 and all stacks in `log` when no `beat` comes for as long as `allow` says.

    `told` gets the last words, which name the setting that said so. At first nothing is bounded.
    """

    def __init__(self, log: TextIO, told: Callable[[str], None]) -> None:
        self.log, self.told = log, told
        self._bound = (math.inf, "")
        self._beat = time.monotonic()
        self._closed = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beat = time.monotonic()

    def allow(self, seconds: float, setting: str) -> None:
        """How long may pass between two signs of life from now on, and which setting says so."""
        self.beat()
        if self._bound != (seconds, setting):
            self._bound = (seconds, setting)
            self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._closed:
            seconds, setting = self._bound
            pause = min(5.0, seconds / 4)
            self._back(pause + seconds + BACKSTOP_SECONDS)
            quiet = time.monotonic() - self._beat
            if quiet > seconds:
                faulthandler.dump_traceback(file=self.log, all_threads=True)
                self.told(f"no progress for {quiet:.0f} s: ended, with all stacks in the log (`{setting}`)")
                os._exit(1)
            self._changed.wait(pause)
            self._changed.clear()

    def _back(self, seconds: float) -> None:
        """Let the C thread end the process after `seconds`, unless this is called again before."""
        if math.isfinite(seconds):
            faulthandler.dump_traceback_later(seconds, exit=True, file=self.log)
        else:
            faulthandler.cancel_dump_traceback_later()

"""`draftmill train` that gets a signal at a step of its own, for a process of its own: nothing here starts a compiler,
which would choose another place for its cache than the run's.

    python -m tests.interrupted RUN.yaml SIGNAL AFTER     # 0 0: nothing happens
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

from data.layout import Layout
from data.settings import load_run
from pipeline.checkpoint import list_checkpoints
from pipeline.job import Job
from stages.cli import exit_code


def interrupt(path: str, number: int, after: int) -> None:
    """Send signal `number` to this process once it has launched `after` steps; then, or never, train.

    SIGKILL waits for a checkpoint, which is written beside the steps.
    """
    folder, original, asked = Layout.of(load_run(path)).checkpoints("base"), Job.stop_requested, itertools.count(1)

    def stop_requested(self: Job) -> bool:
        if next(asked) == after:
            while number == signal.SIGKILL and not list_checkpoints(folder):
                time.sleep(0.01)
            os.kill(os.getpid(), number)
        return original(self)

    Job.stop_requested = stop_requested
    sys.exit(exit_code(["train", path]))


if __name__ == "__main__":
    interrupt(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

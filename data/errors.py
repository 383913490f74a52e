"""The four ways a stage can end, as exceptions; `stages/cli.py` turns them into exit codes."""


class BadInput(Exception):
    """The user's settings, files or arguments are wrong. Exit code 2. The text names file, value and remedy."""


class Failure(Exception):
    """The work could not be done although the request was sound (disk full, bad numbers, stalled). Exit code 1."""


class Stopped(Exception):
    """A signal asked for an end and everything is saved; the same command goes on from here. Exit code 75."""

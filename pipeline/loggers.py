"""Where the curves of a training go besides `metrics.jsonl`: TensorBoard, W&B, trackio.

One training is one run there, however often it is interrupted: W&B and trackio know it by an id that lies in the
drafter's folder, so that a forced re-run, whose folder is a new one, is another; TensorBoard forgets what was written
after the step that training goes on from.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.errors import BadInput
from data.manifest import read_json, write_json

PROJECT = "draftmill"
MODULES = {"tensorboard": "torch.utils.tensorboard"}
REMEDIES = {"wandb": "`wandb login`, or set WANDB_MODE=offline"}


@dataclass(frozen=True)
class Training:
    """What loggers show of a training: its names, its settings, and the step after which it goes on."""

    run: str
    drafter: str
    folder: Path
    config: Mapping[str, Any]
    step: int

    def id(self) -> str:
        """The same for every attempt at this training; made by the first, and kept in its folder."""
        path = self.folder / "loggers.json"
        if not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        return str(read_json(path, "delete it").get("id"))


class Logger(Protocol):
    """Takes numbers by name, one call a line; `failed`: training did not end well."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Files under `tensorboard/`."""

    def __init__(self, library: Any, training: Training) -> None:
        self.writer = library.SummaryWriter(training.folder / "tensorboard", purge_step=training.step + 1)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run in the group of its run file; the environment's `WANDB_PROJECT` names another project."""

    def __init__(self, library: Any, training: Training) -> None:
        self.run = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=training.run,
            name=f"{training.run}-{training.drafter}",
            id=training.id(),
            resume="allow",
            config=dict(training.config),
            dir=str(training.folder),
        )
        self.first = self.run.step

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        if step >= self.first:  # before it: the same numbers again, which W&B would refuse one by one
            self.run.log(dict(scalars), step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio:
    """A run whose name holds the id: names are what trackio resumes by."""

    def __init__(self, library: Any, training: Training) -> None:
        self.library = library
        name = f"{training.run}-{training.drafter}-{training.id()}"
        library.init(project=PROJECT, name=name, config=dict(training.config), resume="allow")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.library.log(dict(scalars), step=step)

    def close(self, failed: bool) -> None:
        self.library.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


def package_of(name: str) -> Any:
    """A logger's package; None for TensorBoard where it is not installed, since it is asked for by default.

    Raises BadInput for another that is not installed.
    """
    try:
        return importlib.import_module(MODULES.get(name, name))
    except ImportError as error:
        if name == "tensorboard":
            return None
        raise BadInput(
            f"train.loggers: `{name}` cannot be loaded ({error}): pip install {name}, or leave it out"
        ) from None


def require(names: Sequence[str]) -> None:
    """Raises BadInput for a logger that is asked for and not installed."""
    for name in names:
        package_of(name)


def open_loggers(names: Sequence[str], training: Training) -> list[Logger]:
    """The loggers that a training writes to.

    Raises BadInput for one that is not installed or cannot start (W&B without a login).
    """
    found = [(name, package) for name in names if (package := package_of(name)) is not None]
    return [_open(name, package, training) for name, package in found]


def _open(name: str, package: Any, training: Training) -> Logger:
    try:
        return KINDS[name](package, training)
    except Exception as error:  # each has errors of its own
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = f"{REMEDIES[name]}, or leave it out" if name in REMEDIES else "mend it, or leave it out"
        raise BadInput(f"train.loggers: `{name}` cannot start ({why}): {remedy}") from error

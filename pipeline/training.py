"""A drafter from its settings to its manifest: what is finished is left alone, what is torn is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.layout import Layout
from data.manifest import State, publish
from data.settings import Run
from pipeline.checkpoint import CONFIG, WEIGHTS, newest_sound
from pipeline.console import say
from pipeline.job import Job
from pipeline.loggers import require
from pipeline.trainer import Trainer


def check(run: Run, name: str) -> None:
    """Before ranks start: refuse what needs no device (raises BadInput), and let all ranks see the same manifest."""
    trainer = Trainer(run, name, Job("train", name))
    _state(run, name).recover(Layout.of(run).train_manifest(name))
    if not _is_current(trainer):
        require(trainer.settings.loggers)


def _state(run: Run, name: str) -> State:
    return State(Layout.of(run).drafter(name) / "state.json")


def _last(state: State) -> dict[str, Any]:
    """How the last attempt ended, and of which settings it was."""
    return {name: value for name, value in state.read().items() if name in ("status", "fingerprint")}


def _is_current(trainer: Trainer) -> bool:
    """Whether these very settings are trained, and a sound checkpoint is left of it."""
    layout, name = trainer.layout, trainer.name
    finished = _last(_state(trainer.run, name)) == {"status": "done", "fingerprint": trainer.identity}
    sound = (
        finished and layout.train_manifest(name).exists() and newest_sound(layout.checkpoints(name), (WEIGHTS, CONFIG))
    )
    return bool(sound)


def train_drafter(run: Run, name: str, work: Job, rank: int = 0, world: int = 1, profile: int | None = None) -> None:
    """Train drafter `name` on one rank of `world`, to `train.json`.

    Finished work of the same settings is left alone; when its manifest is gone (a forced re-run), no sound checkpoint
    is left of it, or its settings were others, it is set aside. `profile`: write a profiler trace of that many steps to
    the drafter's folder.
    """
    layout = Layout.of(run)
    trainer = Trainer(run, name, work, rank, world)
    trainer.profile = profile
    state, manifest = _state(run, name), layout.train_manifest(name)
    if world == 1:
        state.recover(manifest)
    if _is_current(trainer):
        say(f"drafter `{name}` is trained and current")
        if profile is not None:
            say(f"--profile: no step is left to record; delete {manifest} to train again, or name another drafter")
        return
    if rank == 0:
        require(trainer.settings.loggers)
    before = _last(state)
    if world > 1:
        trainer.host_group = dist.new_group(backend="gloo")
        dist.barrier(group=trainer.host_group)  # all have looked before the first changes anything
    if rank == 0:
        if before and before != {"status": "running", "fingerprint": trainer.identity}:
            _set_aside(layout.drafter(name))
        state.running(fingerprint=trainer.identity)
    if world > 1:
        dist.barrier(group=trainer.host_group)
    trainer.train()
    if rank == 0:
        publish(manifest, "drafter", trainer.manifest())
        state.done(manifest, fingerprint=trainer.identity)


def _set_aside(folder: Path) -> None:
    attempt = 1
    while (aside := folder.with_name(f".{folder.name}.old-{attempt}")).exists():
        attempt += 1
    folder.rename(aside)
    say(f"the earlier work of drafter `{folder.name}` is set aside in {aside}")

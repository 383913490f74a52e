"""A trial of the training step on a run's real shapes: `draftmill doctor --train RUN`.

Compiles and captures as training would, replays one step, and compares the replay with the same functions run
without graphs. Nothing is written to the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.settings import Run
from pipeline.batches import fill
from pipeline.job import Job
from pipeline.trainer import Trainer


@dataclass(frozen=True)
class Trial:
    """What a trial found. Memory in GiB, times in seconds; `equal` compares gradients bit for bit."""

    drafter: str
    mode: str
    graphs: int
    prepare_seconds: float
    step_seconds: float
    memory_gib: float
    loss: float
    equal: bool
    options: dict[str, dict[str, Any]]
    """What each mode of `torch.compile` turns on (`torch._inductor.list_mode_options`)."""


def try_step(run: Run, name: str, work: Job) -> Trial:
    """One optimizer step's batches of drafter `name`, replayed and run plainly."""
    from torch._inductor import list_mode_options

    trainer = Trainer(run, name, work)
    trainer.build()
    step, plans = trainer.step, trainer.plan.step(0)
    begun = time.monotonic()
    step.prepare(len(plans), score=False)
    prepared = time.monotonic() - begun
    first, seconds = _gradients(trainer, graphs=True)
    loss = float(step.take_sums()["loss"])
    second, _ = _gradients(trainer, graphs=False)
    cuda = trainer.device.type == "cuda"
    return Trial(
        drafter=name,
        mode=step.mode,
        graphs=len(step.graphs),
        prepare_seconds=prepared,
        step_seconds=seconds,
        memory_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        loss=loss,
        equal=all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
        options=list_mode_options(),
    )


def _gradients(trainer: Trainer, graphs: bool) -> tuple[list[torch.Tensor], float]:
    """Gradients of step 0's batches, and the seconds that the device was at them."""
    step, plans, seconds = trainer.step, trainer.plan.step(0), 0.0
    views = step.shape.host_views(np.empty(step.shape.offsets()[1], np.uint8))
    for number, plan in enumerate(plans):
        fill(trainer.cache, step.shape, plan, views)
        step.inputs_from(views)
        begun = time.monotonic()
        (step.micro if graphs else step.run_micro)(number == 0, number == len(plans) - 1)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.monotonic() - begun
    return [parameter.grad.clone() for parameter in step.drafter.parameters()], seconds

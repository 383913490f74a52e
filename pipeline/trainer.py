"""Training of one drafter on one rank: the loop around the step, and everything that it writes.

A run is a function of (cache, settings): step s of an interrupted run is step s of a straight one. The host waits for
the device only at log points, validations and checkpoints.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data import settings
from data.cache import Cache
from data.errors import BadInput, Failure, Stopped
from data.layout import Layout
from data.manifest import fingerprint
from data.part import AGAIN
from data.shaping import shaping
from pipeline.batches import BatchPlan, BatchShape, Plan, fill, require_room
from pipeline.checkpoint import (
    FILES,
    OPTIMIZER,
    WEIGHTS,
    CheckpointInfo,
    CheckpointWriter,
    choose,
    load_weights,
    newest_sound,
    read_tensors,
    record_validation,
)
from pipeline.console import Progress, say
from pipeline.drafter import Drafter, initialise, unset_drafter
from pipeline.graphs import Step
from pipeline.head import TargetHead, head_damage, load_head
from pipeline.interchange import read_checkpoint
from pipeline.job import Job
from pipeline.loader import Loader, rank_share
from pipeline.loggers import Training
from pipeline.loss import LossRule
from pipeline.metrics import Metrics, step_flops, told
from pipeline.optimizer import Optimizer
from pipeline.preflight import FP8_CAPABILITY
from pipeline.recipe import design_for
from pipeline.validation import Walker, score_plans, summary


def resolve_mode(train: settings.Train, device: torch.device) -> str:
    if train.graphs != "auto":
        if train.graphs == "whole" and device.type != "cuda":
            raise BadInput("train.graphs: whole needs a CUDA device; use auto, compile or eager here")
        return train.graphs
    return "whole" if device.type == "cuda" else "eager"


def resolve_dtype(train: settings.Train, device: torch.device) -> torch.dtype:
    name = train.compute if train.compute != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def require_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse float8 products where products are of `dtype` float32, or the device has none.

    Raises BadInput.
    """
    if dtype == torch.float32:
        raise BadInput("train.fp8: products are float32 on a CPU: set fp8: false, or compute: bfloat16 (slow here)")
    if device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        need, has = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, have))
        raise BadInput(f"train.fp8 needs a GPU of compute capability {need}, this one has {has}: set fp8: false")


class Trainer:
    """One rank of one drafter's training. `train()` runs it to its end, to a signal or to a failure."""

    def __init__(self, run: settings.Run, name: str, work: Job, rank: int = 0, world: int = 1) -> None:
        self.run, self.name, self.work, self.rank, self.world = run, name, work, rank, world
        self.host_group: dist.ProcessGroup | None = None
        self.profile: int | None = None
        self.walked: tuple[int, float] | None = None  # step and acceptance of the newest validation
        self.logged = 0  # the step up to which metrics are written
        self.unwalked: CheckpointInfo | None = None  # the one that training goes on from, when its validation is due
        self.device = torch.device(work.device)
        self.layout, self.settings = Layout.of(run), run.train_of(name)
        self.cache = Cache.open(run)
        self.design = design_for(run, name, self.cache)
        self.config = self.design.config
        self.rule = LossRule.of(self.settings.loss, self.config.block_size)
        self.head = self._head()
        held_out = self.cache.rows.validation
        rows = np.flatnonzero(~held_out & (self.cache.rows.eligible > 0))
        self.held_out = np.flatnonzero(held_out & (self.cache.rows.eligible > 0))
        self.plan = Plan(self.cache, rows, self.settings, self.config.block_size, self.rule.plan_weights())
        if len(self.held_out):
            require_room(self.settings, self.config.block_size, int(self.cache.rows.states[self.held_out].max()), 0)
        self.identity = fingerprint(
            {"cache": self.cache.fingerprint, "settings": shaping(run, "train", name), "config": self.config.record()}
        )

    def _head(self) -> TargetHead:
        """The cache's head as it lies in its file, every byte checked; `build` moves it to the device."""
        path = self.cache.layout.head
        if damaged := head_damage(self.cache.layout, {"target": self.cache.manifest["target"]}):
            raise BadInput(f"{damaged}: {AGAIN}")
        head = load_head(path)
        if head.embedding.shape[1] != self.cache.width or head.lm_head.shape[0] != self.cache.vocab_size:
            raise BadInput(
                f"{path}: head of {list(head.lm_head.shape)} does not fit a cache of width "
                f"{self.cache.width} and vocabulary {self.cache.vocab_size}: {AGAIN}"
            )
        return head

    def build(self, initial: bool = True) -> None:
        """Make the drafter, the optimizer and the step; nothing runs yet. Not `initial`: a checkpoint is to set the
        weights, and nothing is asked of what they once started from."""
        train, own = self.settings, self.run.drafter(self.name)
        dtype = resolve_dtype(train, self.device)
        if train.fp8:
            require_float8(self.device, dtype)
        self.head = self.head.to(self.device, dtype)
        drafter = unset_drafter(self.config, self.device)
        if initial:
            self._initialise(drafter)
        self.optimizer = Optimizer(drafter.named_parameters(), train, self.plan.total_steps)
        taps = self.cache.tap_indices(self.config.target_layer_ids, f"drafter `{self.name}`")
        every = taps == tuple(range(len(self.cache.layer_ids)))
        mode = resolve_mode(train, self.device)
        dense = self.device.type != "cuda" or mode == "eager"
        self.shape = BatchShape(
            context=self.plan.context,
            blocks=self.plan.blocks,
            block_size=own.block_size,
            states={name: (spec.shape, spec.dtype) for name, spec in self.cache.codec.arrays().items()},
            windows=self._windows(),
            teacher=self._teacher(),
            tables=not dense,
        )
        self.step = Step(
            drafter,
            self.head,
            self.cache.codec.to(self.device),
            None if every else taps,
            self.shape,
            self.rule,
            self.optimizer,
            mode=mode,
            dtype=dtype,
            fp8=train.fp8,
            noise=train.state_noise,
            deterministic=train.deterministic,
        )
        self.drafter = drafter

    def _windows(self) -> tuple[int | None, ...]:
        used = {kind == "sliding_attention" for kind in self.config.layer_types}
        return tuple(self.config.sliding_window if sliding else None for sliding in sorted(used))

    def _teacher(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        if self.rule.kind not in settings.DISTILLED:
            return {}
        return {name: (spec.shape, spec.dtype) for name, spec in self.cache.teacher_specs.items()}

    def _initialise(self, drafter: Drafter) -> None:
        if self.settings.warm_start is None:
            initialise(drafter, self.settings.seed)
        else:
            self._warm_start(drafter, self.settings.warm_start)
        if self.world > 1:  # processors of another kind may draw other last bits
            for parameter in drafter.parameters():
                dist.broadcast(parameter.data, 0)

    def _warm_start(self, drafter: Drafter, source: str) -> None:
        config, tensors = read_checkpoint(source, self.config.num_target_layers)
        theirs, ours = list(config.target_layer_ids), list(self.config.target_layer_ids)
        if theirs != ours:
            raise BadInput(f"train.warm_start: {source} reads layers {theirs}, drafter `{self.name}` reads {ours}")
        load_weights(drafter, {name: tensor.float() for name, tensor in tensors.items()}, Path(source))
        say(f"warm start from {source}")

    @contextmanager
    def _profiled(self) -> Iterator[Callable[[], None]]:
        """What to call after every step; with `profile` set it records steps after the first two."""
        if self.profile is None:
            yield lambda: None
            return
        path = self.layout.drafter(self.name) / f"trace-rank{self.rank}.json"
        plan = torch.profiler.schedule(wait=1, warmup=1, active=self.profile, repeat=1)

        def write(profiler: torch.profiler.profile) -> None:
            profiler.export_chrome_trace(str(path))
            say(f"profiler trace of {self.profile} steps: {path}")

        with torch.profiler.profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
            yield profiler.step

    def train(self) -> None:
        """Train from the newest sound checkpoint, or from the start."""
        newest = self._newest()
        self.build(initial=newest is None)
        start = 0 if newest is None else self._resume(newest)
        self._announce(start)
        with ExitStack() as stack:
            if self.rank == 0:  # one writer: the others' would replace its file
                # Before the compilers, which take minutes: a logger that is missing or locked out is told at once.
                self.metrics = stack.enter_context(
                    Metrics(
                        self.layout.metrics(self.name),
                        self.settings.loggers,
                        self._training(start),
                        walks_again=self.unwalked is not None,
                    )
                )
            begun = time.monotonic()
            self.step.prepare(self.settings.batches_per_step // self.world)
            if self.step.mode != "eager":
                say(f"compiled and captured in {time.monotonic() - begun:.1f} s: {len(self.step.graphs)} graphs")
            loader = self._loader(start)
            self.writer = CheckpointWriter(
                self.layout.checkpoints(self.name), self.settings.keep_last, self.settings.keep_best
            )
            stack.callback(loader.close)
            self._catch_up()
            loader.start()
            self._loop(start, loader)
        self.writer.wait()

    def _training(self, start: int) -> Training:
        """What loggers show; nothing in it changes from one attempt to the next but the step."""
        facts = {
            "run": self.run.name,
            "drafter": self.name,
            "target": self.run.target.model,
            "fingerprint": self.identity,
            "rows": len(self.plan.rows),
            "steps": self.plan.total_steps,
            "settings": json.loads(shaping(self.run, "train", self.name)),
        }
        return Training(self.run.name, self.name, self.layout.drafter(self.name), facts, start)

    def _announce(self, start: int) -> None:
        plan, (states, blocks) = self.plan, self.plan.fill_shares()
        count = sum(parameter.numel() for parameter in self.drafter.parameters())
        how = f"{self.step.mode}, {str(self.step.dtype).removeprefix('torch.')}"
        say(f"drafter `{self.name}`: {count:,} parameters; {how}")
        say(f"mask token {self.config.mask_token_id}: {self.design.mask_reason}")
        if self.design.rope_reason:
            say(self.design.rope_reason)
        say(f"{len(plan.rows)} rows, {len(self.held_out)} held out; {plan.total_steps} steps, from {start}")
        if self.settings.max_steps is not None and plan.total_steps < self.settings.max_steps:
            say(f"{self.settings.epochs} epochs end before train.max_steps ({self.settings.max_steps}): raise epochs")
        say(f"batches: {plan.context} states {100 * states:.0f} % full, {plan.blocks} blocks {100 * blocks:.0f} % full")
        if not len(self.held_out):
            say("no held-out row: validation is off and `best` is the last checkpoint")

    def _loader(self, start: int) -> Loader:
        per_step = self.settings.batches_per_step // self.world

        def plans(index: int) -> BatchPlan:
            step, micro = divmod(index, per_step)
            return rank_share(self.plan.step(start + step), self.rank, self.world)[micro]

        def write(plan: BatchPlan, views: dict[str, np.ndarray]) -> None:
            fill(self.cache, self.shape, plan, views)

        count = (self.plan.total_steps - start) * per_step
        return Loader(self.shape, plans, count, write, self.device, self.settings.readers)

    def _loop(self, start: int, loader: Loader) -> None:
        train, total = self.settings, self.plan.total_steps
        per_step = train.batches_per_step // self.world
        self._clock(start, loader)
        with self._profiled() as stepped, Progress(total, f"train {self.name}", unit="steps", done=start) as bar:
            for step in range(start, total):
                for micro in range(per_step):
                    loader.next_into(self.step.buffer)
                    self.step.micro(micro == 0, micro == per_step - 1)
                self.step.update()
                stepped()
                done, last = step + 1, step + 1 == total
                bar.advance(1)
                if done % train.log_every == 0 or last:
                    line = self._log(done, loader)
                    speed = f"{1e3 * line['seconds_per_step']:.1f} ms/step"
                    bar.note = f"loss {line['loss']:.4f}, slot 1 {line['accuracy'][0]:.2f}, {speed}"
                    bar.tell(told(line, self.walked))
                if step == start:  # compiling and capturing, which take minutes, lie behind
                    self._expect_steps()
                self._save_or_stop(done)
                if last:  # with the validation that only now is there
                    bar.tell(told(line, self.walked))
                if done % train.checkpoint_every == 0 or done % train.validate_every == 0:
                    self._clock(done, loader)

    def _expect_steps(self) -> None:
        """From here on a step ends now and then, or this rank does."""
        self.work.allow(self.settings.stall_timeout, "train.stall_timeout")

    def _saves(self, done: int) -> bool:
        return done == self.plan.total_steps or done % self.settings.checkpoint_every == 0

    def _walks(self, done: int) -> bool:
        return len(self.held_out) > 0 and (self._saves(done) or done % self.settings.validate_every == 0)

    def _save_or_stop(self, done: int) -> None:
        """What is due after step `done`. Of bad numbers nothing is saved: it would take the place of what is good."""
        stop = done < self.plan.total_steps and self._any_rank_stops()
        if stop or self._saves(done) or self._walks(done):
            self._refuse_bad_numbers()
        validation = None
        if self._walks(done) and not stop:
            validation = self._validate(done)
            stop = validation is None
        if stop or self._saves(done):
            self._save(done, validation)
        if stop:
            self.writer.wait()
            self._stop()

    def _stop(self) -> NoReturn:
        self.work.check_stop()
        raise Stopped("another rank was asked to stop; the same command goes on from here")

    def _catch_up(self) -> None:
        """The validation that a request to stop kept from a checkpoint, so that `best` is an undisturbed run's."""
        if self.unwalked is None:
            return
        validation = self._validate(self.unwalked.step)
        if validation is None:
            self._stop()
        if self.rank == 0 and self._saves(self.unwalked.step):
            record_validation(self.unwalked, validation)

    def _any_rank_stops(self) -> bool:
        """Whether any rank was asked to stop; over ranks they agree once a step, without a device sync when alone."""
        if self.world == 1:
            return self.work.stop_requested()
        flag = torch.tensor([self.work.stop_requested()], dtype=torch.int32)
        dist.all_reduce(flag, group=self.host_group)
        return bool(flag.item())

    def _clock(self, step: int, loader: Loader) -> None:
        self._since, self._since_step, self._since_wait = time.perf_counter(), step, loader.waited()

    def _log(self, done: int, loader: Loader) -> dict[str, Any]:
        """Fetch the sums of the interval (the host waits here), look for bad numbers, write a line; gives it back."""
        sums = self._over_ranks(self.step.take_sums())
        host = {name: value.cpu().numpy() for name, value in sums.items()}
        self._expect_steps()
        self._refuse_bad_numbers()
        self.writer.check()
        seconds, steps = time.perf_counter() - self._since, max(done - self._since_step, 1)
        interval, self.logged = done - self.logged, done
        line = {
            "step": done,
            "epoch": self.plan.place(done - 1)[0],
            "loss": float(host["loss"]) / interval,
            "grad_norm": float(host["norm"]) / interval,
            "lr": float(self.optimizer.lr),
            "accuracy": (host["hits"] / np.maximum(host["counts"], 1)).tolist(),
            "seconds_per_step": seconds / steps,
            "context_tokens_per_s": sum(map(self.plan.context_states, range(done - steps, done))) / seconds,
            "labels_per_s": int(host["counts"].sum()) / interval * steps / seconds,
            "tflops": step_flops(self.config, self.shape, self.settings.batches_per_step) * steps / seconds / 1e12,
            "wait_share": (loader.waited() - self._since_wait) / seconds,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None,
        }
        if not math.isfinite(line["loss"]):
            raise Failure(f"step {done}: the loss is {line['loss']} although gradients are finite")
        if self.rank == 0:
            self.metrics.write(line)
        self._clock(done, loader)
        return line

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums of all ranks; the gradient norm is the same on each."""
        if self.world > 1:
            for name in ("loss", "hits", "counts"):
                dist.all_reduce(sums[name])
        return sums

    def _refuse_bad_numbers(self) -> None:
        bad = int(self.optimizer.bad)
        if bad >= 0:
            raise Failure(f"step {bad + 1}: {self._blame(bad)}; weights are those before it; the last checkpoint stays")

    def _blame(self, bad: int) -> str:
        """Run the step once more without graphs and name the rows, of all ranks, and the first parameter with bad
        numbers."""
        culprits = self._culprits(bad)
        if self.world > 1:  # who finds none would end first, and the others with it
            shares: list[Any] = [None] * self.world
            dist.all_gather_object(shares, culprits, group=self.host_group)
            culprits = [each for share in shares for each in share]
        if not culprits:
            return "the gradient norm is not finite, although each row on its own gives finite gradients"
        rows = [row for row, _ in culprits]
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        return f"gradients are not finite from rows {rows[:5]}{more}, first in `{culprits[0][1]}`"

    def _culprits(self, bad: int) -> list[tuple[str, str]]:
        """Rows of this rank's batches that by themselves give bad gradients, and the first parameter of each."""
        found = []
        views = self.shape.host_views(np.empty(self.shape.offsets()[1], np.uint8))
        for plan in rank_share(self.plan.step(bad), self.rank, self.world):
            for document in plan.documents:
                fill(self.cache, self.shape, BatchPlan((document,), plan.scale, plan.noise_seed), views)
                self.step.inputs_from(views)
                self.step.run_micro(True, False)
                self.work.beat()
                broken = [n for n, p in self.drafter.named_parameters() if not torch.isfinite(p.grad).all()]
                if broken:
                    found.append((self.cache.row_id(document.row), broken[0]))
        return found

    def _score(self) -> Walker | None:
        """Scores of this rank's share of the held-out rows; None when it was asked to stop before the end."""
        plans = score_plans(self.cache, self.held_out, self.plan.context, self.plan.blocks, self.config.block_size)
        walker, mine = Walker(self.cache, self.config.block_size), plans[self.rank :: self.world]
        scorer = Loader(
            self.shape, mine.__getitem__, len(mine), lambda p, v: fill(self.cache, self.shape, p, v), self.device, 1
        )
        scorer.start()
        try:
            for plan in mine:
                if self.work.stop_requested():
                    self.work.allow()  # it waits for the other ranks, which may hear of it only with their last row
                    return None
                scorer.next_into(self.step.buffer)
                self.step.score()
                walker.add(plan, self.step.matches.cpu().numpy())
                self.work.beat()
        finally:
            scorer.close()
        return walker

    def _validate(self, done: int) -> dict[str, Any] | None:
        """Score and walk the held-out rows, each rank its share; None when one was asked to stop before the end."""
        begun, walker = time.perf_counter(), self._score()
        if self.world > 1:
            gathered: list[Any] = [None] * self.world
            dist.all_gather_object(gathered, None if walker is None else walker.rows, group=self.host_group)
            if walker is None or None in gathered:
                return None
            walker.merge(gathered)
        if walker is None:
            return None
        result = summary(walker.blocks(), self.config.block_size)
        seconds = time.perf_counter() - begun
        self.walked = (done, result["acceptance"])
        if self.rank == 0:
            self.metrics.write({"step": done, "validation": result, "seconds": seconds})
            acceptance, count = result["acceptance"], result["blocks"]
            say(f"step {done}: validation acceptance {acceptance:.3f} over {count} blocks ({seconds:.1f} s)")
        self.work.beat()
        return result

    def _save(self, done: int, validation: dict[str, Any] | None) -> None:
        """Write a checkpoint. That takes what the disk takes, on ranks that wait for the first one too: until all have
        come to a log point, only `jobs.stall_seconds` holds."""
        self.work.allow()
        sums = self._over_ranks({name: tensor.clone() for name, tensor in self.step.sums.items()})
        if self.rank == 0:
            state = self.optimizer.tensors() | {f"sums.{n}": t for n, t in sums.items()}
            meta = {
                "fingerprint": self.identity,
                "validation": validation,
                "total_steps": self.plan.total_steps,
                "logged": self.logged,
            }
            self.writer.save(done, self.config, dict(self.drafter.named_parameters()), state, meta)

    def _newest(self) -> CheckpointInfo | None:
        """The newest sound checkpoint of this very training.

        Raises BadInput when it belongs to another.
        """
        folder = self.layout.checkpoints(self.name)
        info = newest_sound(folder, FILES)
        if info is not None and info.meta.get("fingerprint") != self.identity:
            raise BadInput(
                f"{info.path} belongs to other settings: delete {folder} to train anew, or give the drafter a new name"
            )
        return info

    def _resume(self, info: CheckpointInfo) -> int:
        """Load a checkpoint whose files were found sound; the step to go on from."""
        load_weights(self.drafter, read_tensors(info.path, WEIGHTS), info.path)
        self._load_state(info, read_tensors(info.path, OPTIMIZER))
        say(f"resuming from step {info.step}")
        self.logged = info.meta.get("logged", info.step - info.step % self.settings.log_every)
        if info.acceptance is not None:
            self.walked = (info.step, info.acceptance)
        elif self._walks(info.step):
            self.unwalked = info
        return info.step

    def _load_state(self, info: CheckpointInfo, state: dict[str, Tensor]) -> None:
        own = self.optimizer.tensors() | {f"sums.{n}": t for n, t in self.step.sums.items()}
        if own.keys() != state.keys():
            raise BadInput(f"{info.path}: optimizer state has other names: {sorted(own.keys() ^ state.keys())[:3]}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        if self.rank > 0:  # the first rank carries the sums of all
            self.step.take_sums()
        if self.step.narrow is not None:
            self.step.narrow.refresh()

    def manifest(self) -> dict[str, Any]:
        """Body of `train.json`."""
        folder = self.layout.checkpoints(self.name)
        best, last = choose(folder, "best")[0], choose(folder, "last")[0]
        return {
            "fingerprint": self.identity,
            "inputs": {"cache": self.cache.fingerprint},
            "settings": json.loads(shaping(self.run, "train", self.name)),
            "config": self.config.record(),
            "mask_token": {"id": self.config.mask_token_id, "reason": self.design.mask_reason},
            "head": self.head.scales(),
            "target": self.cache.manifest["target"],
            "template": self.cache.manifest["template"],
            "codec": self.cache.manifest["codec"],
            "cache": {"run": self.cache.layout.folder.name}
            | {name: self.cache.manifest[name] for name in ("settings", "layer_ids")},
            "steps": self.plan.total_steps,
            "rows": {"train": len(self.plan.rows), "validation": len(self.held_out)},
            "best": {"step": best.step, "validation": best.meta["validation"]},
            "last": {"step": last.step, "validation": last.meta["validation"]},
        }

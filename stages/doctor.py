"""`draftmill doctor [RUN]`: is this machine, and is this run, fit to go? One table, with a remedy for what is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from data.errors import BadInput
from data.settings import Jobs, Run, load_run
from data.shaping import benchmark_files, source_files
from pipeline import devices, preflight
from pipeline.preflight import Check, guarded

ONE_LINE = 1000
"""Columns of a table that nobody looks at on a terminal: a check is one line there."""


@click.command("doctor")
@click.argument("run_file", type=click.Path(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as a JSON list.")
@click.option("--train", "train", is_flag=True, help="Compile, capture and replay one training step of each drafter.")
def command(run_file: str | None, as_json: bool, train: bool) -> int:
    """Check this machine, and what a run needs of it."""
    run = load_run(run_file) if run_file is not None else None
    if train and run is None:
        raise BadInput("doctor --train needs a run file whose cache is made")
    checks = list(_trials(run) if train and run is not None else _checks(run))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        _table(checks)
    return int(any(check.status == "failure" for check in checks))


def _checks(run: Run | None) -> Iterator[Check]:
    yield from preflight.versions()
    yield from preflight.gpus((run.jobs if run is not None else Jobs()).busy_share)
    yield preflight.memory()
    yield preflight.disk(run.folder if run is not None else Path("."))
    if run is not None:
        yield from _files(run)
        yield from _wanted_gpus(run)
        yield from _models(run)
    if devices.visible():
        yield guarded("torch on gpu", preflight.torch_sees, "install a torch whose CUDA the driver supports")
        yield guarded("compile and capture", _selftest, "update driver and torch, or set train.graphs to eager")


def _trials(run: Run) -> Iterator[Check]:
    """One training step of each drafter on its real shapes; a replay that differs from a plain run is a failure."""
    from pipeline.job import job

    with job(None, "doctor", gpus=1) as work:
        from pipeline.trial import try_step

        for name in run.drafters:
            trial = try_step(run, name, work)
            text = (
                f"{trial.mode}: {trial.graphs} graphs, compiled in {trial.prepare_seconds:.1f} s, a step in "
                f"{1e3 * trial.step_seconds:.1f} ms, {trial.memory_gib:.1f} GiB, loss {trial.loss:.4f}, "
                f"replay {'equals' if trial.equal else 'DIFFERS FROM'} the same step run plainly"
            )
            remedy = "" if trial.equal else "set train.graphs: compile, and report this"
            yield Check(f"train {name}", "ok" if trial.equal else "failure", text, remedy)
    for mode, options in trial.options.items():
        yield Check(f"mode {mode}", "ok", ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults")


def _selftest() -> Check:
    uuids = devices.visible()
    if all(devices.is_leased(uuid) for uuid in uuids):
        return Check("compile and capture", "warning", "every GPU is at work: not tried", "ask again when one is free")
    return preflight.selftest(devices.lease(1))


def _files(run: Run) -> Iterator[Check]:
    for path in (*source_files(run), *benchmark_files(run)):
        if not Path(path).exists():
            yield Check("file", "failure", f"{path} does not exist", "paths are relative to the folder you run in")
    for name, benchmark in run.eval.benchmarks.items():
        if benchmark.path is not None and Path(benchmark.path).exists():
            yield guarded(f"benchmark {name}", partial(_benchmark, run, name), "see `eval.benchmarks`")


def _benchmark(run: Run, name: str) -> Check:
    """A benchmark's file can be read to its end."""
    from data.benchmarks import load_benchmark

    prompts = load_benchmark(name, run.eval.benchmarks[name])
    return Check(f"benchmark {name}", "ok", f"{len(prompts)} prompts")


def _wanted_gpus(run: Run) -> Iterator[Check]:
    """Whether there are as many GPUs as a copy of the target, or one machine's share of a drafter, is spread over; none
    means the CPU."""
    have, nodes = len(devices.visible()), run.jobs.nodes
    wanted = {"target.gpus": (run.target.gpus, 1)}
    wanted |= {f"drafters.{name}.gpus": (drafter.gpus, nodes) for name, drafter in run.drafters.items()}
    for key, (count, machines) in wanted.items():
        each = count // machines
        if have and each > have:
            where = f" on each of {machines} machines (`jobs.nodes`)" if machines > 1 else ""
            text = f"{each} GPUs wanted{where}, {have} here"
            yield Check(key, "failure", text, f"set {key} to at most {have * machines}")


def _models(run: Run) -> Iterator[Check]:
    """The target, what else rests on it (told only where it is sound), and what drafters start from."""
    target = guarded("target", lambda: _target(run), "fix `target` in the run file")
    yield target
    if target.status == "failure":
        return
    yield guarded("template", lambda: _template(run), "fix `target` or `data.template_arguments`")
    for name in run.drafters:
        yield guarded(
            f"drafter {name}", partial(_drafter, run, name), f"change what the line names, in `drafters.{name}`"
        )


def _target(run: Run) -> Check:
    """The target is there and has the layers that the run taps; its weights are looked for and not loaded."""
    from pipeline.target import load_config, tap_layers
    from pipeline.weights import model_files, resolve_target

    config = load_config(run)
    model_files(resolve_target(run))
    taps = tap_layers(run.extract.layers, config.num_hidden_layers)
    text = f"{run.target.model}: {config.num_hidden_layers} layers of width {config.hidden_size}, taps {list(taps)}"
    return Check("target", "ok", text)


def _template(run: Run) -> Check:
    """The chat template renders."""
    from pipeline.target import load_tokenizer
    from pipeline.template import render_prompt

    tokenizer = load_tokenizer(run)
    ids = render_prompt(tokenizer, [{"role": "user", "content": "Hello"}], dict(run.data.template_arguments))
    if not ids:
        raise BadInput("the chat template renders to nothing")
    return Check("template", "ok", f"{len(ids)} tokens for one short turn")


def _drafter(run: Run, name: str) -> Check:
    """A drafter fits its target; whether its mask token occurs in the rows is known when they are tokens."""
    from pipeline.fitness import known_target, require_drafter

    made, start = require_drafter(run, name, known_target(run)), run.train_of(name).warm_start
    config = made.config
    text = (
        f"{config.num_layers} layers, {config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}, blocks of "
        f"{config.block_size}, reads layers {list(config.target_layer_ids)}; mask token {config.mask_token_id}: "
        f"{made.mask_reason}"
    )
    notes = [made.rope_reason] * bool(made.rope_reason) + [f"starts from {start}"] * (start is not None)
    return Check(f"drafter {name}", "ok", "; ".join([text, *notes]))


def _table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "warning": "yellow", "failure": "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        colour = colours[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/{colour}]", escape(check.found), escape(check.remedy))
    Console(width=None if sys.stdout.isatty() else ONE_LINE).print(table)

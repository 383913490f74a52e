"""`draftmill status RUN`: what is done, what runs, what failed and why, and what to run next.

draftmill status my.yaml --watch        again every two seconds
draftmill status my.yaml --failed       only what went wrong, with the end of each log
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from data.layout import Layout
from data.settings import Run, load_run
from pipeline.console import duration
from pipeline.journal import statuses, tail

LIVE = ("running", "waiting")
BAD = ("failed", "died", "stopped")


@click.command("status")
@click.argument("run_file", type=click.Path())
@click.option("--failed", is_flag=True, help="Only jobs that failed or died, with the last lines of their logs.")
@click.option("--watch", is_flag=True, help="Show it again every two seconds until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_file: str, failed: bool, watch: bool, as_json: bool) -> None:
    """Say what is done, running and failed, and what to run next."""
    run = load_run(run_file)
    while True:
        state = survey(run, run_file)
        if as_json:
            click.echo(json.dumps(state, indent=1))
        else:
            if watch:
                click.clear()
            click.echo("\n".join(_failures(state) if failed else _lines(state)))
        if not watch:
            return
        time.sleep(2.0)


def survey(run: Run, run_file: str) -> dict[str, Any]:
    """Where a run stands: `stages` (done of total), `jobs` (newest attempt of each), `next` command."""
    stages = {name: _count(paths) for name, paths in _artefacts(run).items()}
    jobs = [job for job in statuses(run) if job["status"] != "done"]
    unfinished = next((name for name, (done, total) in stages.items() if done < total), None)
    return {
        "run": run.name,
        "folder": str(run.folder),
        "stages": {name: {"done": done, "total": total} for name, (done, total) in stages.items()},
        "jobs": jobs,
        "next": _next(run, run_file, unfinished, jobs),
    }


def _artefacts(run: Run) -> dict[str, list[Path]]:
    """The manifests that each stage makes, in the order of the stages."""
    layout = Layout.of(run)
    parts, drafters = range(run.extract.parts), list(run.drafters)

    def each(path: Callable[[Any], Path], over: Any) -> list[Path]:
        return [path(item) for item in over]

    own_cache = run.cache.run is None
    dropped = layout.dropped.exists()
    return {
        "prepare": each(layout.prompts, parts) if own_cache else [],
        "regenerate": each(layout.tokens, parts) if own_cache and run.data.responses == "regenerate" else [],
        "extract": each(layout.cache_part, parts) if own_cache and not dropped else [],
        "train": each(layout.train_manifest, drafters),
        "eval": each(layout.eval_manifest, drafters) if run.eval.benchmarks else [],
        "export": each(layout.export_manifest, drafters),
        "report": [layout.report],
    }


def _count(paths: list[Path]) -> tuple[int, int]:
    return sum(path.exists() for path in paths), len(paths)


def _next(run: Run, run_file: str, unfinished: str | None, jobs: list[dict[str, Any]]) -> str:
    if any(job["status"] in LIVE for job in jobs):
        return "wait: jobs are at work"
    if unfinished is None:
        return f"nothing: read {Layout.of(run).report}"
    return f"snakemake --cores all --configfile {run_file}    (or by hand: draftmill {unfinished} {run_file})"


def _lines(state: dict[str, Any]) -> Iterator[str]:
    yield f"run {state['run']} in {state['folder']}"
    for name, count in state["stages"].items():
        if count["total"]:
            mark = "done" if count["done"] == count["total"] else "    "
            yield f"  {name:<11}{mark:<5}{count['done']}/{count['total']}"
    for job in state["jobs"]:
        if job["status"] in LIVE:
            yield "  " + _live(job)
    yield from _failures(state)
    yield f"next: {state['next']}"


def _live(job: dict[str, Any]) -> str:
    """One running job: pid, device, progress, rate, time left."""
    text = f"{job['status']} {job['stage']} {job['label']} pid {job['pid']} on {job.get('device', '-')}"
    progress = job.get("progress")
    if progress and progress["total"]:
        share = 100 * progress["done"] / progress["total"]
        text += f": {share:.0f} %, {progress['rate']:.3g} {progress['unit']}/s"
        if progress["left"] is not None:
            text += f", {duration(progress['left'])} left"
    return f"{text} (since {job['started']}, last seen {job['seen']}, {job['log']})"


def _failures(state: dict[str, Any]) -> Iterator[str]:
    for job in state["jobs"]:
        if job["status"] in BAD:
            yield f"  {job['status']} {job['stage']} {job['label']} (attempt {job['attempt']}): {job.get('why', '')}"
            yield f"    log: {job['log']}"
            yield from (f"    | {line}" for line in tail(Path(job["log"])))

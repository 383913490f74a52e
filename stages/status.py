"""`draftmill status RUN`: what is done, what runs, what failed and why, and what to run next.

draftmill status my.yaml --watch        again every two seconds
draftmill status my.yaml --failed       only what went wrong, with the end of each log
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from data.layout import Layout
from data.settings import Run, load_run
from pipeline.console import duration
from pipeline.journal import statuses, tail
from pipeline.standing import Artefact, artefacts, has_work, needed

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
    """Where a run stands: `stages` (how many outputs are current, of how many; how many are stale and why; whether what
    is missing is needed), `jobs` (newest attempt of each), `next` command."""
    found = artefacts(run)
    needs = needed(found)
    jobs = [job for job in statuses(run) if job["status"] != "done"]
    unfinished = next((name for name in found if has_work(found[name], needs[name])), None)
    stale = any(each.why for each in found.get(unfinished or "", ()))
    return {
        "run": run.name,
        "folder": str(run.folder),
        "stages": {name: _count(made, needs[name]) for name, made in found.items()},
        "jobs": jobs,
        "next": _next(run, run_file, unfinished, stale, jobs),
    }


def _count(made: list[Artefact], needs: bool) -> dict[str, Any]:
    why = [each.why for each in made if each.why]
    done = sum(each.current for each in made)
    return {"done": done, "total": len(made), "stale": len(why), "why": next(iter(why), None), "needed": needs}


def _next(run: Run, run_file: str, unfinished: str | None, stale: bool, jobs: list[dict[str, Any]]) -> str:
    """The command to run next. Snakemake times each job that it runs: what has no time there, it knows nothing of."""
    if any(job["status"] in LIVE for job in jobs):
        return "wait: jobs are at work"
    if unfinished is None:
        return f"nothing: read {Layout.of(run).report}"
    by_hand = f"draftmill {unfinished} {run_file}"
    if stale and not any(Layout.of(run).benchmarks.glob(f"{unfinished}*")):
        return f"{by_hand}    (it was made by hand, and Snakemake does not see what changed since)"
    return f"snakemake --cores all --configfile {run_file}    (or by hand: {by_hand})"


def _lines(state: dict[str, Any]) -> Iterator[str]:
    yield f"run {state['run']} in {state['folder']}"
    for name, count in state["stages"].items():
        if count["total"]:
            yield _stage(name, count)
    for job in state["jobs"]:
        if job["status"] in LIVE:
            yield "  " + _live(job)
    yield from _failures(state)
    yield f"next: {state['next']}"


def _stage(name: str, count: dict[str, Any]) -> str:
    """One stage: how much of it is current, and what is not."""
    done, total, stale = count["done"], count["total"], count["stale"]
    missing = total - done - stale
    mark = "done" if done == total else "gone" if missing and not stale and not count["needed"] else ""
    text = f"  {name:<11}{mark:<5}{done}/{total}"
    if mark == "gone":
        return f"{text}  no drafter needs it any more"
    return f"{text}  {stale} stale, first {count['why']}" if stale else text


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

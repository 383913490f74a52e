"""Faults of real stages: a refusal is cheap to repeat, and what is killed goes on by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from data.manifest import SINCE
from pipeline.journal import born, read_status
from tests.flow import PYTHONPATH, Flow, Snakemake, run_body, snakemake_server, stage_server
from tests.soak import NOTE_PID, RUN, digest, soak

STAGES = {
    "prepare": "prompts/accounting.json",
    "regenerate --part 0": "tokens/part-0000.json",
    "extract --part 1": "cache/part-0001.json",
    "train --drafter base": "drafters/base/train.json",
    "eval --drafter base": "eval/base/manifest.json",
    "export --drafter base": "export/base/draftmill.json",
    "report": "report/report.html",
}
"""Every stage with an output that Snakemake knows, and deletes before each attempt."""
WORK = ("prompts/*.parquet", "tokens/*.parquet", "cache/part-*/shard-*.zarr/zarr.json", "drafters/*/checkpoints/*/*")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Snakemake, Path]]:
    with snakemake_server() as snakemake, stage_server(tmp_path_factory.mktemp("servers")) as stages:
        yield snakemake, stages


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, servers: tuple[Snakemake, Path]) -> Flow:
    """The soak's tiny run, done. Tests leave it as it is."""
    snakemake, stages = servers
    flow = Flow(tmp_path_factory.mktemp("finished") / "flow", snakemake, dict(RUN), stages)
    result = flow()
    assert result.code == 0, result.output
    return flow


def draftmill(flow: Flow, arguments: str, **environment: str) -> None:
    """A stage by itself, with as many threads as Snakemake gives it: on some processors a product's last bits depend
    on how many share it."""
    verb, *options = arguments.split()
    command = [flow.folder / "bin" / "draftmill", verb, "run.yaml", *options]
    wanted = {**os.environ, "OMP_NUM_THREADS": "2", **environment}
    done = subprocess.run(command, cwd=flow.folder, env=wanted, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def work(flow: Flow) -> dict[Path, int]:
    """When each file of what the stages made was written."""
    return {path: path.stat().st_mtime_ns for pattern in WORK for path in flow.run_folder.glob(pattern)}


def processor_seconds(arguments: list[str], folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, done


@pytest.mark.parametrize("stage", ["regenerate", "extract", "train"])
def test_a_refusal_is_over_soon_so_that_retries_cost_nothing(tmp_path: Path, stage: str) -> None:
    """Under a second on an idle core; nothing is half-written but the log."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_body()))
    seconds, done = processor_seconds([stage, "run.yaml"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    made = [path for path in (tmp_path / "runs" / "x").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "runs" / "x").parts[0] for path in made} <= {"logs"}
    print(f"{stage}: {seconds:.2f} s of processor time")


WORKERS = """
import sys, time
from data.settings import Run
from pipeline.workers import Workers
with Workers(Run.model_validate({body}), {{}}, 2) as workers:
    next(workers.run(print, [("at work",), ("at work",)]))
    next(workers.run(time.sleep, [(600,)] * 2))
"""


@pytest.fixture
def stage_with_workers(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process whose two worker processes are at work, and their pids."""
    script = WORKERS.format(body={**run_body(), "root": str(tmp_path)})
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    yield process, [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    process.kill()
    process.communicate()


def test_no_worker_outlives_a_killed_stage(stage_with_workers: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, workers = stage_with_workers
    assert len(workers) == 2
    process.kill()
    until(lambda: not any(map(born, workers)))


def test_a_killed_worker_ends_the_stage_in_a_clear_line(
    stage_with_workers: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, workers = stage_with_workers
    os.kill(workers[0], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "Failure: a worker process was killed, or out of memory" in error


@pytest.mark.slow
def test_a_failed_stage_shows_the_end_of_its_log_in_the_flow(tmp_path: Path) -> None:
    with snakemake_server() as snakemake, stage_server(tmp_path) as stages:
        flow = Flow(tmp_path / "flow", snakemake, run_body(jobs={"retries": 0}), stages)
        (flow.folder / "rows.jsonl").write_text('{"nothing": "usable"}\n')
        result = flow()
    assert result.code == 1
    assert "failed prepare" in result.output
    assert "    log: runs/x/logs/prepare/prepare-001.log" in result.output
    assert "    | " in result.output


@pytest.mark.slow
def test_snakemakes_own_report_holds_the_page_and_pictures_of_a_real_run(finished: Flow) -> None:
    pictures = {path.name for path in (finished.run_folder / "report" / "pictures").glob("*.svg")}
    results = finished.results()
    assert {Path(path).name for path in results} == {"report.html", *pictures}
    assert {"curves.svg", "slots-base.svg", "acceptance.svg", "times.svg"} <= pictures
    assert all(result["caption"] for result in results.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_an_output_that_was_deleted_comes_back(finished: Flow, stage: str) -> None:
    """Everything else is there, and the same bytes come out."""
    before = digest(finished.run_folder)
    (finished.run_folder / STAGES[stage]).unlink()
    draftmill(finished, stage)
    assert (finished.run_folder / STAGES[stage]).exists()
    assert digest(finished.run_folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("stage", list(STAGES)[:5])
def test_what_an_orphan_finished_is_not_done_again(finished: Flow, stage: str) -> None:
    """Snakemake deletes the output of a job that it lost sight of; nobody has forced that stage."""
    began = time.time()
    (finished.run_folder / STAGES[stage]).unlink()
    draftmill(finished, stage)
    before = work(finished), digest(finished.run_folder)
    (finished.run_folder / STAGES[stage]).unlink()
    draftmill(finished, stage, **{SINCE: str(began)})
    assert (work(finished), digest(finished.run_folder)) == before


@pytest.mark.slow
def test_after_a_killed_snakemake_the_orphans_training_counts(
    tmp_path: Path, finished: Flow, servers: tuple[Snakemake, Path]
) -> None:
    snakemake, stages = servers
    flow = Flow(tmp_path / "flow", snakemake, dict(RUN), stages)
    killer = f"""
import threading, time
{NOTE_PID}
def kill():
    while not os.path.exists("runs/soak/drafters/base/metrics.jsonl"):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
"""
    assert flow(prelude=killer).code == -signal.SIGKILL
    train = flow.run_folder / "logs" / "train" / "base.status.json"
    until(lambda: read_status(train)["status"] == "done")
    before = work(flow)
    assert flow("--unlock").code == 0
    result = flow()
    assert result.code == 0, result.output
    assert result.planned.get("train") == 1, "Snakemake does not trust it and deletes its manifest"
    assert work(flow) == before
    assert "is trained and current" in train.with_name("base.log").read_text()
    assert flow("-R", "train").code == 0
    assert (flow.run_folder / "drafters" / ".base.old-1" / "checkpoints").exists(), "forced: done again"


@pytest.mark.slow
@pytest.mark.timeout(900)  # 40 s on an idle machine; a stage may wait for its watchdog
def test_three_rounds_of_the_soak_end_right(tmp_path: Path) -> None:
    lines: list[str] = []
    faults = ["snakemake:kill", "stage:kill", "inside:disk"]
    assert soak(3, 1, tmp_path, lines.append, faults) == 0, "\n".join(lines)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)

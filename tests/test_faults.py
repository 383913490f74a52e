"""Faults of real stages: a refusal is cheap to repeat, and what is killed goes on by the same command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.flow import ROOT, Flow, run_body, snakemake_server, stage_server


def processor_seconds(arguments: list[str], folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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

"""The flow on a cluster under SLURM, with stand-ins for SLURM's commands: what is asked for, and that it ends well."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow import ROOT, Flow, Result, Snakemake, run_body, snakemake_server

COMMANDS = ROOT / "tests" / "slurm_commands.py"
JOBS = {"memory_mb": 4321, "runtime_minutes": 77, "cpus_per_gpu": 1, "nodes": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Snakemake]:
    with snakemake_server() as running:
        yield running


@pytest.fixture
def cluster(tmp_path: Path, server: Snakemake) -> Flow:
    body = run_body(jobs=JOBS, drafters={"base": {"gpus": 4}}, extract={"parts": 1})
    body["data"]["responses"] = "keep"
    flow = Flow(tmp_path / "flow", server, body)
    (flow.folder / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "slurm").mkdir()
    for name in ("sbatch", "srun", "sacct", "squeue", "scontrol", "sinfo", "scancel", "sacctmgr"):
        path = flow.folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {COMMANDS} {tmp_path / "slurm"} {name} "$@"\n')
        path.chmod(0o755)
    return flow


def run(flow: Flow, *arguments: str) -> Result:
    profile = str(ROOT / "stages" / "profiles" / "slurm")
    path = f"{flow.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    quick = [
        "--latency-wait",
        "5",
        "--slurm-init-seconds-before-status-checks",
        "1",
        "--seconds-between-status-checks",
        "1",
    ]
    accounts = ["--default-resources", "slurm_account=me", "slurm_partition=gpu"]
    options = ["--workflow-profile", profile, *quick, *accounts]
    return flow("--jobs", "4", *arguments, *options, PATH=path, PYTHONPATH=packages)


def submissions(flow: Flow) -> dict[str, str]:
    """The options of each submission, by the rule that it was for."""
    lines = (flow.folder.parent / "slurm" / "sbatch").read_text().splitlines()
    found = {}
    for arguments in map(json.loads, lines):
        rule = arguments[arguments.index("--comment") + 1].removeprefix("rule_").split("_")[0]
        found[rule] = " ".join(arguments[:-1])
    return found


def test_jobs_go_through_sbatch_with_what_the_run_file_asks(cluster: Flow) -> None:
    """One part, then one drafter on two machines: one SLURM job, with one torchrun a machine."""
    planned = run(cluster, "runs/x/drafters/base/train.json", "--dry-run").output
    assert re.findall(r" gpu=(\d+)", planned) == ["1", "4"], "what will be asked for, not what this machine has"
    result = run(cluster, "runs/x/drafters/base/train.json")
    assert result.code == 0, result.output
    asked = submissions(cluster)
    assert set(asked) == {"prepare", "extract", "train"}
    for rule in asked:
        assert "--mem 4321" in asked[rule]
        assert "-t 77" in asked[rule]
        assert "-A me" in asked[rule]
        assert "-p gpu" in asked[rule]
    assert "--gpus" not in asked["prepare"]
    assert "--gpus=1" in asked["extract"]
    assert "--cpus-per-task=1" in asked["extract"]
    for option in ("--gpus=4", "--nodes=2", "--ntasks=2", "--cpus-per-task=2"):
        assert option in asked["train"]
    steps = [json.loads(line) for line in (cluster.folder.parent / "slurm" / "srun").read_text().splitlines()]
    assert [step[:3] for step in steps] == [
        ["-n1", "--cpu-bind=q", "--cpus-per-task=1"],
        ["-n1", "--cpu-bind=q", "--cpus-per-task=1"],
        ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"],
    ]
    assert [call for call in cluster.calls() if call[0] == "train"] == [
        ["train", "--drafter", "base", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "node1:29400"]
    ]
    assert cluster("--dry-run", "runs/x/drafters/base/train.json").planned == {}

"""Data-parallel training: two ranks on a CPU give the losses and weights of one, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.layout import Layout
from data.settings import Run, load_run
from pipeline.checkpoint import choose, list_checkpoints, load_drafter
from tests.test_train import cached, token_row, write_run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run file of a cache of 12 rows, a third held out."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = [token_row(i, list(range(15 * i, 15 * i + 40))) for i in range(12)]
    sizes = {"context_tokens": 128, "anchor_slots": 96, "batches_per_step": 2, "max_steps": 12, "log_every": 3}
    path = write_run(folder, "ranks", "tiny-successor:1", rows, data={"validation": 0.3}, train=sizes)
    cached(path)
    return path


def run_file(base: Path, name: str, gpus: int, **train: Any) -> Path:
    body = yaml.safe_load(base.read_text())
    body |= {"name": name, "cache": {"from": body["name"]}}
    body["train"] |= train
    body["drafters"]["base"]["gpus"] = gpus
    path = base.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(body))
    return path


def start(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DRAFTMILL_LINES": "1"}
    command = [sys.executable, "-m", "stages.cli", "train", str(path)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=path.parent)


def outcome(run: Run) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    layout = Layout.of(run)
    drafter = load_drafter(choose(layout.checkpoints("base"), "last")[0].path, "cpu", torch.float32)
    lines = [json.loads(line) for line in layout.metrics("base").read_text().splitlines()]
    return dict(drafter.named_parameters()), [(m["step"], m["loss"]) for m in lines if "loss" in m]


def test_two_ranks_give_the_losses_of_one_and_survive_a_killed_rank(base: Path) -> None:
    alone, pair = run_file(base, "alone", 1), run_file(base, "pair", 2, checkpoint_every=4)
    _, errors = start(alone).communicate(timeout=120)
    assert Layout.of(load_run(alone)).train_manifest("base").exists(), errors
    job = start(pair)
    folder = Layout.of(load_run(pair)).checkpoints("base")
    killed = kill_a_rank(job, folder)
    _, errors = job.communicate(timeout=120)
    if killed:
        assert job.returncode == 1
        assert "a rank ended with an error" in errors
        assert list_checkpoints(folder)
        again = start(pair)
        _, errors = again.communicate(timeout=120)
        assert again.returncode == 0, errors
    weights, losses = outcome(load_run(alone))
    pair_weights, pair_losses = outcome(load_run(pair))
    assert [step for step, _ in losses] == [step for step, _ in pair_losses]
    for (_, one), (_, other) in zip(losses, pair_losses, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    assert weights.keys() == pair_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(pair_weights[name], tensor, rtol=1e-2, atol=1e-4), name


def kill_a_rank(job: subprocess.Popen[str], folder: Path) -> bool:
    """kill -9 one rank after the first checkpoint; False when the run was over before."""
    end = time.monotonic() + 120
    while time.monotonic() < end and job.poll() is None:
        if list(folder.glob("step-*/meta.json")):
            ranks = [pid for pid in descendants(job.pid) if b"LOCAL_RANK=1" in environment_of(pid)]
            if ranks:
                os.kill(ranks[0], signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [*found, *(grand for child in found for grand in descendants(child))]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""

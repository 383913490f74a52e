"""Data-parallel training: two ranks on a CPU give the losses and weights of one, end together, and export alike.

Trained once here, and used by all tests: eagerly, on two ranks of which one is killed, and compiled.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.layout import Layout
from data.settings import Run, load_run
from pipeline import devices
from pipeline.checkpoint import CheckpointInfo, choose, list_checkpoints, load_drafter
from pipeline.interchange import open_checkpoint, tensor_shapes
from pipeline.job import Job
from pipeline.training import train_drafter
from stages.cli import exit_code
from stages.export import command as export
from tests.flow import PYTHONPATH
from tests.test_train import cached, token_row, write_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run file of a cache of 12 rows, a third held out. Made, and trained from, on the CPU, whatever is there."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = [token_row(i, list(range(15 * i, 15 * i + 40))) for i in range(12)]
    sizes = {"context_tokens": 128, "anchor_slots": 96, "batches_per_step": 2, "max_steps": 12, "log_every": 3}
    path = write_run(folder, "ranks", "tiny-successor:1", rows, data={"validation": 0.3}, train=sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices._Held, "lease", devices.Lease(()))
        cached(path)
        yield path


def run_file(base: Path, name: str, gpus: int, **train: Any) -> Path:
    body = yaml.safe_load(base.read_text())
    body |= {"name": name, "cache": {"from": body["name"]}}
    body["train"] |= train
    body["drafters"]["base"]["gpus"] = gpus
    path = base.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(body))
    return path


def start(path: Path, gpus: str = "") -> subprocess.Popen[str]:
    own = {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "DRAFTMILL_LINES": "1"}
    environment = os.environ | own
    command = [sys.executable, "-m", "stages.cli", "train", str(path)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=path.parent)


@dataclass(frozen=True)
class Pair:
    """Two ranks, one of them killed with -9: how that ended, what was left, and the run once it was started again."""

    run: Run
    code: int
    errors: str
    left: list[CheckpointInfo]


@pytest.fixture(scope="module")
def alone(base: Path) -> Run:
    return trained_here(run_file(base, "alone", 1, graphs="eager"))


@pytest.fixture(scope="module")
def pair(base: Path) -> Pair:
    path = run_file(base, "pair", 2, checkpoint_every=4)
    run, job = load_run(path), start(path)
    folder = Layout.of(run).checkpoints("base")
    assert kill_a_rank(job, folder), job.communicate()[1]
    _, errors = job.communicate(timeout=120)
    left, again = list_checkpoints(folder), start(path)
    _, later = again.communicate(timeout=120)
    assert again.returncode == 0, later
    return Pair(run, job.returncode, errors, left)


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` without Inductor, which takes most of a minute on a CPU: tracing and wrapping are the same."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained_here(path: Path, work: Job | None = None) -> Run:
    run = load_run(path)
    train_drafter(run, "base", work or Job("train", "test"))
    return run


def outcome(run: Run) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    layout = Layout.of(run)
    drafter = load_drafter(choose(layout.checkpoints("base"), "last")[0].path, "cpu", torch.float32)
    lines = [json.loads(line) for line in layout.metrics("base").read_text().splitlines()]
    return dict(drafter.named_parameters()), [(m["step"], m["loss"]) for m in lines if "loss" in m]


def test_ranks_are_told_to_profile(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Ranks:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ranks)
    assert exit_code(["train", str(run_file(base, "told", 2)), "--profile", "3"]) == 0
    assert commands[0][-4:] == ["--drafter", "base", "--profile", "3"]


def test_a_killed_rank_ends_the_run_with_its_checkpoints(pair: Pair) -> None:
    assert pair.code == 1
    assert "a rank ended with an error" in pair.errors
    assert pair.left


def test_two_ranks_started_again_give_the_losses_and_weights_of_one(alone: Run, pair: Pair) -> None:
    weights, losses = outcome(alone)
    pair_weights, pair_losses = outcome(pair.run)
    assert [step for step, _ in losses] == [step for step, _ in pair_losses]
    for (_, one), (_, other) in zip(losses, pair_losses, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    assert weights.keys() == pair_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(pair_weights[name], tensor, rtol=1e-2, atol=1e-4), name


@dataclass(frozen=True)
class Export:
    """A folder written by `draftmill export`: all that could differ between trainings of the same settings."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    layout: bytes
    config: bytes
    record: dict[str, Any]
    card: list[str]

    @classmethod
    def of(cls, run: Run, path: Path) -> Export:
        export.main([str(path), "--checkpoint", "last"], standalone_mode=False)
        folder = Layout.of(run).export("base")
        weights = (folder / "model.safetensors").read_bytes()
        read = open_checkpoint(folder)
        assert {name: tuple(tensor.shape) for name, tensor in read.tensors.items()} == tensor_shapes(read.config)
        return cls(
            {name: (tensor.shape, tensor.dtype) for name, tensor in read.tensors.items()},
            weights[: 8 + int.from_bytes(weights[:8], "little")],
            (folder / "config.json").read_bytes(),
            dict(flat(json.loads((folder / "draftmill.json").read_text()))),
            (folder / "README.md").read_text().splitlines(),
        )


def flat(body: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a JSON body by dotted path."""
    entries = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in entries:
        yield from flat(value, f"{path}.{key}" if path else str(key))
    if not isinstance(body, dict | list):
        yield path, body


def assert_same_but_for_values(one: Export, other: Export) -> None:
    assert one.tensors == other.tensors
    assert one.layout == other.layout  # names, order, shapes, dtypes and offsets: all of the file but the numbers
    assert one.config == other.config
    assert one.record.keys() == other.record.keys()
    differing = {path for path, value in one.record.items() if other.record[path] != value}
    name, weights, card, train = (
        {"run", "fingerprint", "inputs.drafter"},
        "files.0.",
        "files.2.",
        "training.settings.train.",
    )
    values = {f"{weights}crc32c", f"{card}crc32c", f"{card}bytes"}
    assert differing <= name | values | {f"{train}graphs", f"{train}checkpoint_every"}
    assert {one.record[f"files.{i}.path"] for i in (0, 2)} == {"model.safetensors", "README.md"}
    assert [outline(line) for line in one.card] == [outline(line) for line in other.card]


def outline(line: str) -> str:
    """A line of the card without hashes, numbers and folders."""
    return re.sub(r"[0-9a-f]{32}|\d+\.\d+|/\S*", "_", line)


def test_exports_of_eager_compiled_and_two_rank_training_differ_in_values_only(
    base: Path, alone: Run, pair: Pair, quick_compile: None
) -> None:
    path = run_file(base, "compiled", 1, graphs="compile")
    compiled = trained_here(path)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    eager = Export.of(alone, base.with_name("alone.yaml"))
    assert len(eager.tensors) == 11 * 1 + 3
    for run in (compiled, pair.run):
        assert_same_but_for_values(eager, Export.of(run, base.with_name(f"{run.name}.yaml")))


@pytest.mark.gpu
def test_exports_of_graphed_training_differ_in_values_only(base: Path, alone: Run) -> None:
    eager = Export.of(alone, base.with_name("alone.yaml"))
    for mode in ("eager", "compile", "whole"):
        torch._dynamo.reset()
        work = Job("train", "test")
        work.lease = devices.Lease(("0",))
        assert work.device == "cuda:0"
        path = run_file(base, f"gpu-{mode}", 1, graphs=mode)
        run = trained_here(path, work)
        assert_same_but_for_values(eager, Export.of(run, path))


@pytest.mark.gpu2
@pytest.mark.parametrize(("train", "code"), [({"learning_rate": 1e30}, 1), ({"max_steps": 100_000}, 75)])
def test_two_graphed_ranks_end_soon(base: Path, train: dict[str, Any], code: int) -> None:
    """Bad numbers and a signal: collectives that graphs hold keep no rank from its end."""
    path = run_file(base, f"end-{code}", 2, epochs=100_000, log_every=1, **train)
    job, metrics = start(path, "0,1"), Layout.of(load_run(path)).metrics("base")
    while job.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.1)
    if code == 75:
        job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == code, errors


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

"""Training end to end on tiny targets: overfitting, resume, the walk against the decoder, refusals."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from data.cache import Cache
from data.errors import BadInput, Failure, Stopped
from data.layout import Layout
from data.manifest import read_manifest
from data.settings import Run, load_run
from pipeline import checkpoint, devices
from pipeline.checkpoint import CheckpointWriter, choose, list_checkpoints, load_drafter, record_validation
from pipeline.decode import Answer, Engine, Prompt
from pipeline.graphs import Step
from pipeline.job import Job, job
from pipeline.sampling import Sampling
from pipeline.target import load_target
from pipeline.trainer import Trainer
from pipeline.training import check, train_drafter
from pipeline.trial import try_step
from pipeline.validation import Walker
from stages.cli import exit_code
from stages.extract import command as extract
from stages.prepare import command as prepare
from tests.flow import PYTHONPATH
from tests.interchange_samples import change_a_byte

PROMPT, LIMIT = 6, 40


class StoppingJob(Job):
    """A job that is asked to stop, or dies, when a given number of steps were asked about."""

    def __init__(self, after: int, die: bool = False) -> None:
        super().__init__("train", "test")
        self.left, self.die = after, die

    def stop_requested(self) -> bool:
        self.left -= 1
        if self.left == 0 and self.die:
            raise RuntimeError("killed")
        return self.left <= 0

    def check_stop(self) -> None:
        raise Stopped("asked")


def write_run(folder: Path, name: str, model: str, rows: list[dict[str, Any]], **sections: Any) -> Path:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "name": name,
        "root": str(folder / "runs"),
        "target": {"model": model, "dtype": "float32"},
        "data": {"train": [{"path": str(source)}], "validation": 0.0, "max_length": 256},
        "extract": {"parts": 1, "codec": "float32"},
        "train": {
            "context_tokens": 512, "anchor_slots": 256, "anchors_per_row": 32, "batches_per_step": 1, "epochs": 40,
            "learning_rate": 5e-3, "checkpoint_every": 1000, "validate_every": 1000, "loggers": [],
        },
        "drafters": {"base": {"layers": 1, "block_size": 4}},
    }  # fmt: skip
    for section, changes in sections.items():
        body[section] = {**body[section], **changes}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def token_row(number: int, ids: list[int], prompt: int = PROMPT) -> dict[str, Any]:
    return {"id": f"row-{number}", "token_ids": ids, "supervised": [i >= prompt for i in range(len(ids))]}


def cached(path: Path) -> Run:
    prepare.callback(run_file=str(path), show=None)
    extract.callback(run_file=str(path), part=None, force=False)
    return load_run(path)


def decode(run: Run, prompts: list[list[int]], limit: int = LIMIT, stop_ids: tuple[int, ...] = ()) -> list[Answer]:
    target = load_target(run, "cpu")
    info = choose(Layout.of(run).checkpoints("base"), "last")[0]
    drafter = load_drafter(info.path, "cpu", torch.float32)
    engine = Engine(target, drafter, batch_size=4, max_length=160, sampling=Sampling(), stop_ids=stop_ids)
    asked = [Prompt(f"row-{i}", ids) for i, ids in enumerate(prompts)]
    return sorted(engine.generate(asked, limit), key=lambda answer: int(answer.id.removeprefix("row-")))


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A cache of 8 rows of a target that always continues +1. Made on the CPU, whatever is there."""
    folder = tmp_path_factory.mktemp("successor")
    rows = [token_row(i, list(range(20 * i, 20 * i + PROMPT + LIMIT))) for i in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices._Held, "lease", devices.Lease(()))
        return cached(write_run(folder, "plus-one", "tiny-successor:1", rows))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[list[int]]]:
    """A cache of a tiny target's own greedy answers, half of the rows held out; and the prompts."""
    folder = tmp_path_factory.mktemp("answered")
    blank = load_run(write_run(folder, "blank", "tiny:2", [token_row(0, [1] * 20)]))
    target = load_target(blank, "cpu")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(33, 120, PROMPT).tolist() for _ in range(24)]
    stop = int(target.tokenizer.eos_token_id)
    engine = Engine(target, None, batch_size=8, max_length=160, sampling=Sampling(), stop_ids=(stop,))
    answers = {a.id: list(a.ids) for a in engine.generate([Prompt(str(i), p) for i, p in enumerate(prompts)], LIMIT)}
    rows = [token_row(i, prompt + answers[str(i)]) for i, prompt in enumerate(prompts)]
    path = write_run(folder, "answers", "tiny:2", rows, data={"validation": 0.4}, train={"epochs": 12})
    return cached(path), prompts


def train(run: Run, work: Job | None = None) -> dict[str, torch.Tensor]:
    train_drafter(run, "base", work or Job("train", "test"))
    return last_weights(run)


def last_weights(run: Run) -> dict[str, torch.Tensor]:
    info = choose(Layout.of(run).checkpoints("base"), "last")[0]
    return dict(load_drafter(info.path, "cpu", torch.float32).named_parameters())


def metrics_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Layout.of(run).metrics("base").read_text().splitlines()]


def renamed(run: Run, name: str, **changes: Any) -> Run:
    """The same run under another name, its cache shared, with other training settings."""
    body = run.model_dump(mode="json", by_alias=True, exclude_unset=True)
    body |= {"name": name, "cache": {"from": run.name}, "train": {**body["train"], **changes}}
    return Run.model_validate(body)


def test_overfitting_eight_rows_makes_decoding_accept_whole_blocks(successor: Run) -> None:
    run = renamed(successor, "overfit", epochs=90)
    train(run)
    metrics = [json.loads(line) for line in Layout.of(run).metrics("base").read_text().splitlines()]
    assert min(metrics[-1]["accuracy"]) > 0.95
    answers = decode(run, [list(range(20 * i, 20 * i + PROMPT)) for i in range(8)])
    for number, answer in enumerate(answers):
        assert list(answer.ids) == list(range(20 * number + PROMPT, 20 * number + PROMPT + LIMIT))
    lengths = [block.length for answer in answers for block in answer.blocks[:-1]]
    assert np.mean(lengths) >= 0.9 * 4


def test_the_log_shows_everything_that_training_measures(
    answered: tuple[Run, list[list[int]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.console.LINE_SECONDS", 1000.0)
    run = renamed(answered[0], "told", max_steps=12, validate_every=6, log_every=4)
    with job(run, "train", "base") as work:
        train_drafter(run, "base", work)
    log, screen = work.log.read_text().splitlines(), capsys.readouterr().err.splitlines()
    lines = [line for line in log if "loss" in line]
    assert [line.split(" train base: ")[1].partition(" ")[0] for line in lines] == ["4/12", "12/12"], "first and last"
    assert [line for line in screen if "loss" in line] == [f"train base | {line[33:]}" for line in lines]
    assert re.search(
        r"; epoch \d+, loss \d\.\d{4}, slots \d+ \d+ \d+ % right, validation acceptance \d\.\d{3} at step 12, "
        r"[\d.]+ ms/step, [\d,]+ context tokens/s, [\d.e-]+ TFLOP/s, waiting for data: \d+ %$",
        lines[-1],
    )


def test_rates_count_a_token_of_a_row_once_and_each_label(successor: Run) -> None:
    run = renamed(successor, "rates", max_steps=4, log_every=2)
    train(run)
    plan = Trainer(run, "base", Job("train", "test")).plan
    lines = [json.loads(line) for line in Layout.of(run).metrics("base").read_text().splitlines()]
    for line, steps in zip([line for line in lines if "loss" in line], ((0, 1), (2, 3)), strict=True):
        documents = [d for step in steps for batch in plan.step(step) for d in batch.documents]
        seconds = 2 * line["seconds_per_step"]
        assert line["context_tokens_per_s"] * seconds == pytest.approx(sum(d.states for d in documents))
        assert line["labels_per_s"] * seconds == pytest.approx(sum(int(d.labels.sum()) for d in documents))


def test_the_walk_is_what_the_decoder_accepts_block_by_block(answered: tuple[Run, list[list[int]]]) -> None:
    run, prompts = answered
    trainer = Trainer(run, "base", Job("train", "walk"))
    train(run)
    walked = walk_of(trainer, run)
    target_stop = int(load_target(run, "cpu").tokenizer.eos_token_id)
    answers = decode(run, prompts, stop_ids=(target_stop,))
    cache = Cache.open(run)
    compared = 0
    for row in trainer.held_out:
        answer = answers[int(cache.row_id(int(row)).removeprefix("row-"))]
        served = [(b.start_position, b.length) for b in answer.blocks]
        predicted = [(b.anchor, b.length) for b in walked if b.row == row]
        if not answer.finished:
            edge = PROMPT + LIMIT - 4
            served = [b for b in served if b[0] < edge]
            predicted = [b for b in predicted if b[0] < edge]
        assert served == predicted
        compared += len(served)
    assert compared > 40
    assert len({b.length for b in walked}) > 1


def walk_of(trainer: Trainer, run: Run) -> list[Any]:
    """Blocks of the validation walk with the trained weights."""
    blocks: list[Any] = []
    original = Walker.blocks

    def keep(self: Walker) -> list[Any]:
        blocks[:] = original(self)
        return blocks

    trainer.build()
    trainer._resume(trainer._newest())
    trainer.metrics = type("Nowhere", (), {"write": lambda self, line: None})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walker, "blocks", keep)
        trainer._validate(0)
    return blocks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("die", [False, True])
def test_interrupted_training_gives_the_same_bits(successor: Run, accumulate: int, die: bool) -> None:
    changes = {
        "context_tokens": 128,
        "anchor_slots": 96,
        "max_steps": 26,
        "batches_per_step": accumulate,
        "checkpoint_every": 17 if die else 1000,
        "log_every": 7,
        "state_noise": 0.05,
    }
    straight = renamed(successor, f"straight-{accumulate}-{die}", **changes)
    broken = renamed(successor, f"broken-{accumulate}-{die}", **changes)
    expected = train(straight)
    with pytest.raises((Stopped, RuntimeError)):
        train(broken, StoppingJob(22 if die else 17, die))
    assert [info.step for info in list_checkpoints(Layout.of(broken).checkpoints("base"))] == [17]
    found = train(broken)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    losses = [[(line["step"], line["loss"]) for line in metrics_of(run)] for run in (straight, broken)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("before", [3, 7, 50])
def test_an_interval_that_began_under_another_log_every_is_counted_right(successor: Run, before: int) -> None:
    changes = {"max_steps": 20, "context_tokens": 128, "anchor_slots": 96, "learning_rate": 1e-12}
    straight, broken = renamed(successor, f"by-ten-{before}", **changes), f"by-{before}"
    train(straight)
    with pytest.raises(Stopped):
        train(renamed(successor, broken, **changes, log_every=before), StoppingJob(17))
    run = renamed(successor, broken, **changes)
    train(run)
    expected = metrics_of(straight)[0]["loss"]
    assert [line["loss"] for line in metrics_of(run)] == pytest.approx([expected] * len(metrics_of(run)), rel=0.05)


class Interrupted(Job):
    """A job that gets a signal when it has asked so many times about one."""

    def __init__(self, after: int) -> None:
        super().__init__("train", "test")
        self.left = after

    def stop_requested(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.on_signal(signal.SIGTERM, None)
        return super().stop_requested()


@pytest.mark.parametrize("share", [0.05, 0.25, 0.45, 0.5, 0.55, 0.95, 1.0])
def test_the_best_of_interrupted_training_is_that_of_undisturbed(
    answered: tuple[Run, list[list[int]]], share: float
) -> None:
    """Signals before a validation and within one: of a checkpoint, of none, and of the last step."""
    changes = {
        "max_steps": 8, "checkpoint_every": 4, "validate_every": 2, "keep_last": 9, "context_tokens": 128,
        "anchor_slots": 64,
    }  # fmt: skip
    straight, broken = (renamed(answered[0], f"{name}-{share}", **changes) for name in ("calm", "shaken"))
    calm = Interrupted(0)
    train(straight, calm)
    with pytest.raises(Stopped, match="SIGTERM"):
        train(broken, Interrupted(round(-calm.left * share)))
    assert not Layout.of(broken).train_manifest("base").exists()
    train(broken)
    assert walks_and_scores(broken) == walks_and_scores(straight)
    assert set(walks_and_scores(straight)[1]) == {4, 8}


def test_a_rank_that_stops_within_a_validation_may_wait_for_the_others(
    answered: tuple[Run, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they score, which `train.stall_timeout` does not know of."""
    work = Interrupted(1)
    trainer = Trainer(renamed(answered[0], "waiting", max_steps=1), "base", work)
    trainer.build()
    bounds: list[tuple[Any, ...]] = []
    monkeypatch.setattr(work, "allow", lambda *bound: bounds.append(bound))
    assert trainer._score() is None
    assert bounds == [()]


def test_a_validation_that_is_made_up_for_again_and_again_is_in_the_metrics_once(
    answered: tuple[Run, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_steps": 4, "checkpoint_every": 4, "validate_every": 2, "context_tokens": 128, "anchor_slots": 64}
    run = renamed(answered[0], "made-up-for", **changes)
    with pytest.raises(Stopped):
        train(run, StoppingJob(2))

    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_loop", killed)
            with pytest.raises(RuntimeError, match="killed"):
                train(run)
    train(run)
    assert [line["step"] for line in metrics_of(run) if "validation" in line] == [2, 4]


def walks_and_scores(run: Run) -> list[dict[int, float]]:
    """Acceptance by step: of all validations, and of the checkpoints that have one."""
    walks = {line["step"]: line["validation"]["acceptance"] for line in metrics_of(run) if "validation" in line}
    every = list_checkpoints(Layout.of(run).checkpoints("base"))
    return [walks, {info.step: info.acceptance for info in every if info.acceptance is not None}]


def train_apart(run: Run, lease: devices.Lease, number: int = 0, after: int = 0) -> int:
    """Train in a fresh process on the devices of `lease`, interrupted when `number` is a signal; its exit code.

    What it compiles it finds under the run's root alone.
    """
    path = Path(run.root) / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH, **lease.environment()}
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in caches} | own
    command = [sys.executable, "-m", "tests.interrupted", str(path), str(int(number)), str(after)]
    done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True)
    print(done.stderr, file=sys.stderr)
    return done.returncode


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("number", "after", "code"), [(signal.SIGTERM, 17, 75), (signal.SIGKILL, 22, -9)])
def test_on_a_gpu_training_that_another_process_goes_on_with_gives_the_same_bits(
    successor: Run, accumulate: int, number: signal.Signals, after: int, code: int
) -> None:
    changes = {
        "context_tokens": 128,
        "anchor_slots": 96,
        "max_steps": 26,
        "batches_per_step": accumulate,
        "checkpoint_every": 17 if number == signal.SIGKILL else 1000,
        "log_every": 7,
        "state_noise": 0.05,
        "deterministic": True,
    }
    lease = devices.Lease((os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],))
    straight = renamed(successor, f"gpu-straight-{accumulate}-{number.name}", **changes)
    broken = renamed(successor, f"gpu-broken-{accumulate}-{number.name}", **changes)
    assert train_apart(straight, lease) == 0
    assert train_apart(broken, lease, number, after) == code
    assert [info.step for info in list_checkpoints(Layout.of(broken).checkpoints("base"))] == [17]
    assert train_apart(broken, lease) == 0
    assert metrics_of(broken)[-1]["memory_gib"], "on the GPU"
    assert any(Layout.of(broken).compiled.iterdir()), "kernels that all three share"
    expected, found = last_weights(straight), last_weights(broken)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    losses = [[(line["step"], line["loss"]) for line in metrics_of(run)] for run in (straight, broken)]
    assert losses[0] == losses[1]


def test_a_logger_that_is_missing_or_locked_out_is_told_before_the_compilers_start(
    successor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("compiled")

    def locked_out(**_: Any) -> None:
        raise RuntimeError("no login")

    run = renamed(successor, "unlogged", loggers=["wandb"], max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(Step, "prepare", never)
        patch.setitem(sys.modules, "wandb", None)
        for refuse in (lambda: train(run), lambda: check(run, "base")):
            with pytest.raises(BadInput, match="pip install wandb"):
                refuse()
        assert not Layout.of(run).drafter("base").exists()
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=locked_out))
        with pytest.raises(BadInput, match="wandb login"):
            train(run)
    train(renamed(successor, "unlogged", max_steps=2))
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(run)  # it is finished: nobody needs the logger any more
    check(run, "base")


def test_a_profile_is_a_trace_of_the_steps_that_were_asked_for(
    successor: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run = renamed(successor, "profiled", max_steps=5)
    train_drafter(run, "base", Job("train", "test"), profile=2)
    trace = json.loads((Layout.of(run).drafter("base") / "trace-rank0.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "profiler trace of 2 steps" in capsys.readouterr().err
    train_drafter(run, "base", Job("train", "test"), profile=2)
    assert "--profile: no step is left to record; delete " in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_ends_training_at_the_next_line_and_leaves_no_torso(
    successor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_steps": 40, "checkpoint_every": 4, "log_every": 1}
    expected = train(renamed(successor, "roomy", **changes))
    run, original = renamed(successor, "full", **changes), checkpoint.save_tensors

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        original(tensors, path)
        if "step-000012" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    folder, lines = Layout.of(run).checkpoints("base"), Layout.of(run).metrics("base")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", full)
        with pytest.raises(Failure, match=r"could not be written \(.*No space left.*\): .* run the same command again"):
            train(run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000008"]
    assert 12 <= json.loads(lines.read_text().splitlines()[-1])["step"] < 16
    (folder / ".step-000009.tmp").mkdir()  # of a kill
    found = train(run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000036", "step-000040"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("keep_last", [1, 3])
def test_of_equally_good_checkpoints_the_newest_is_the_best_whichever_are_kept(successor: Run, keep_last: int) -> None:
    run = renamed(successor, f"equal-{keep_last}", max_steps=3, checkpoint_every=1, keep_last=3)
    train(run)
    folder = Layout.of(run).checkpoints("base")
    for info, acceptance in zip(list_checkpoints(folder), (2.0, 2.0, 1.0), strict=True):
        record_validation(info, {"acceptance": acceptance})
    CheckpointWriter(folder, keep_last, keep_best=1)._prune(3)
    assert choose(folder, "best")[0].step == 2


def test_a_torn_checkpoint_is_passed_over(successor: Run, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"max_steps": 12, "checkpoint_every": 4, "keep_last": 3}
    expected = train(renamed(successor, "whole", **changes))
    torn = renamed(successor, "torn", **changes)
    with pytest.raises(RuntimeError):
        train(torn, StoppingJob(10, die=True))
    folder = Layout.of(torn).checkpoints("base")
    weights = folder / "step-000008" / "drafter.safetensors"
    change_a_byte(weights)
    found = train(torn)
    assert f"{weights} has another crc32c than its meta.json says: passed over" in capsys.readouterr().err
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_saved_after_a_damaged_checkpoint_was_passed_over_is_kept(successor: Run) -> None:
    changes = {"max_steps": 12, "checkpoint_every": 4, "keep_last": 1}
    expected = train(renamed(successor, "sane", **changes))
    run, folder = renamed(successor, "passed-over", **changes), Layout.of(renamed(successor, "passed-over"))
    with pytest.raises(RuntimeError):
        train(run, StoppingJob(6, die=True))
    shutil.copytree(folder.checkpoints("base") / "step-000004", folder.folder / "kept")
    with pytest.raises(RuntimeError):
        train(run, StoppingJob(6, die=True))
    change_a_byte(folder.checkpoints("base") / "step-000008" / "drafter.safetensors")
    shutil.copytree(folder.folder / "kept", folder.checkpoints("base") / "step-000004")
    with pytest.raises(Stopped):
        train(run, StoppingJob(2))
    assert [info.step for info in list_checkpoints(folder.checkpoints("base"))] == [6, 8]
    found = train(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_finished_training_is_left_alone_until_it_is_forced(successor: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run = renamed(successor, "forced", max_steps=3)
    train(run)
    layout = Layout.of(run)
    manifest = layout.train_manifest("base")
    before = manifest.read_bytes()
    first = read_manifest(manifest, "drafter")
    assert first["steps"] == 3
    train(run)
    assert "trained and current" in capsys.readouterr().err
    manifest.unlink()
    train(run)
    assert manifest.read_bytes() == before
    assert (layout.drafter("base").with_name(".base.old-1")).is_dir()


@pytest.mark.parametrize("torn", [True, False])
def test_finished_training_without_a_sound_checkpoint_is_done_again(
    successor: Run, torn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = renamed(successor, f"unsound-{torn}", max_steps=4, checkpoint_every=2, keep_last=2)
    expected = train(run)
    folder = Layout.of(run).checkpoints("base")
    files = sorted(folder.glob("*/drafter.safetensors"), reverse=True)
    assert len(files) == 2
    for weights, again in zip(files, (False, True), strict=True):
        if torn:
            os.truncate(weights, 100)
        else:
            change_a_byte(weights)
        capsys.readouterr()
        train_drafter(run, "base", Job("train", "test"))
        assert ("trained and current" in capsys.readouterr().err) != again
        assert folder.parent.with_name(".base.old-1").exists() == again
    found = train(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_checkpoints_of_other_settings_are_not_gone_on_with_and_the_remedy_works(successor: Run) -> None:
    """Nothing says whose they are once `state.json` is gone, as when a folder was copied: else they are set aside."""
    train(renamed(successor, "moved", max_steps=2))
    changed = renamed(successor, "moved", max_steps=2, seed=9)
    layout, identity = Layout.of(changed), Trainer(changed, "base", Job("train", "test")).identity
    (layout.drafter("base") / "state.json").unlink()
    with pytest.raises(BadInput, match=f"belongs to other settings.* delete {layout.checkpoints('base')} to train"):
        train(changed)
    shutil.rmtree(layout.checkpoints("base"))
    train(changed)
    assert read_manifest(layout.train_manifest("base"), "drafter")["fingerprint"] == identity


def test_bad_states_stop_training_with_step_row_and_parameter(successor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Cache.read_states

    def poisoned(self: Cache, row: int, out: dict[str, np.ndarray], at: int) -> int:
        count = original(self, row, out, at)
        if self.row_id(row) == "row-3":
            out["hidden"][at : at + count] = np.nan
        return count

    monkeypatch.setattr(Cache, "read_states", poisoned)
    run = renamed(successor, "poisoned", max_steps=5, log_every=2)
    with pytest.raises(Failure, match=r"step 1: gradients are not finite from rows \['row-3'\], first in `fc.weight`"):
        train(run)


def test_what_is_bad_is_never_saved_and_training_goes_on_from_what_was_good(
    successor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_steps": 12, "log_every": 100, "checkpoint_every": 2, "context_tokens": 128, "anchor_slots": 96}
    expected = train(renamed(successor, "sound", **changes))
    run, original, steps = renamed(successor, "spoilt", **changes), Step.update, iter(range(100))

    def spoilt(self: Step) -> None:
        if next(steps) == 4:  # a bit that flips once, say
            self.drafter.fc.weight.grad[0, 0] = np.nan
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "update", spoilt)
        with pytest.raises(Failure, match=r"step 5: .*; the last checkpoint stays"):
            train(run)
    assert [info.step for info in list_checkpoints(Layout.of(run).checkpoints("base"))] == [2, 4]
    found = train(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_rows_of_all_ranks_are_blamed_for_bad_numbers(successor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose own rows are sound says what the others found, not that no row is bad."""
    trainer = Trainer(renamed(successor, "blamed", max_steps=2, batches_per_step=2), "base", Job("train", "test"))
    trainer.build()
    trainer.world = 2

    def gather(shares: list[Any], own: Any, group: Any) -> None:
        shares[:] = [own, [("row-9", "norm.weight")]]

    monkeypatch.setattr("pipeline.trainer.dist.all_gather_object", gather)
    assert trainer._blame(0) == "gradients are not finite from rows ['row-9'], first in `norm.weight`"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set by the watchdog where it would end this process."""
    event = threading.Event()
    monkeypatch.setattr("pipeline.watchdog.os", SimpleNamespace(_exit=lambda code: event.set()))
    return event


def test_a_step_that_does_not_end_ends_the_training_with_all_stacks(
    successor: Run, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = Step.update, iter(range(100))

    def stalling(self: Step) -> None:
        if next(steps) == 2:
            assert ended.wait(60), "nobody ended it"
            raise ZeroDivisionError("it would be dead")
        original(self)

    monkeypatch.setattr(Step, "update", stalling)
    run = renamed(successor, "stalled", max_steps=5, stall_timeout=1.0, log_every=100)
    with pytest.raises(ZeroDivisionError), job(run, "train", "base") as work:
        train_drafter(run, "base", work)
    log = work.log.read_text()
    assert "all stacks in the log (`train.stall_timeout`)" in log
    assert "in stalling" in log


def test_what_takes_long_beside_steps_is_no_stall(
    answered: tuple[Run, list[list[int]]], ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling before the first step, writing a checkpoint, and a validation that gets on."""
    calls: list[str] = []

    def slow(owner: type, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def late(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            time.sleep(seconds)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, late)

    slow(Step, "prepare", 2.5)
    slow(CheckpointWriter, "save", 2.5)
    slow(Step, "score", 1.2)
    run = renamed(
        answered[0], "patient", max_steps=2, stall_timeout=2.0, context_tokens=128, anchor_slots=64, log_every=1
    )
    with job(run, "train", "base") as work:
        train_drafter(run, "base", work)
    assert not ended.is_set()
    assert (calls[0], calls[-1], calls.count("score") > 1) == ("prepare", "save", True)


def test_a_dead_reader_ends_the_run_with_its_error(successor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Cache, row: int, out: dict[str, np.ndarray], at: int) -> int:
        raise OSError("disk gone")

    monkeypatch.setattr(Cache, "read_states", broken)
    with pytest.raises(Failure, match="a reader died: disk gone"):
        train(renamed(successor, "reader", max_steps=5))


def test_a_zeroed_part_of_a_shard_ends_training_and_names_shard_and_row(successor: Run, tmp_path: Path) -> None:
    run = renamed(successor, "zeroed", max_steps=5)
    shutil.copytree(Layout.of_cache(run).cache, tmp_path / "plus-one" / "cache")
    run = run.model_copy(update={"root": str(tmp_path)})
    hidden = next((tmp_path / "plus-one" / "cache").glob("part-*/shard-*.zarr/hidden/c/0/0/0"))
    body = hidden.read_bytes()
    hidden.write_bytes(bytes(len(body) // 2) + body[len(body) // 2 :])
    with pytest.raises(BadInput, match=r"part-0000/shard-00000\.zarr: row row-\d: not the bytes that were written"):
        train(run)


def test_a_zeroed_head_is_refused_before_step_one(successor: Run, tmp_path: Path) -> None:
    run = renamed(successor, "beheaded", max_steps=5)
    shutil.copytree(Layout.of_cache(run).cache, tmp_path / "plus-one" / "cache")
    head = tmp_path / "plus-one" / "cache" / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-20_000] + bytes(20_000))
    with pytest.raises(BadInput, match=r"head\.safetensors has another crc32c .*: run `draftmill extract` again"):
        train(run.model_copy(update={"root": str(tmp_path)}))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"taps": [0, 9]}, r"cache was made with layers .* drafter `base` wants \[0, 9\]"),
        ({"mask_token": 5000}, "5000 is outside the target's vocabulary"),
        ({"mask_token": 21}, "id 21 occurs"),
        ({"mask_token": "<nope>"}, "not a special token"),
    ],
)
def test_what_does_not_fit_is_refused_before_step_one(successor: Run, drafter: dict, message: str) -> None:
    body = renamed(successor, "misfit").model_dump(mode="json", by_alias=True, exclude_unset=True)
    body["drafters"] = {"base": {"block_size": 4, **drafter}}
    run = Run.model_validate(body)
    with pytest.raises(BadInput, match=message):
        train(run)
    assert not Layout.of(run).drafter("base").exists()


def test_held_out_rows_too_long_for_a_batch_are_refused_before_the_target_runs_and_before_step_one(
    tmp_path: Path, successor: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would end training at its first validation, again and again."""
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps(token_row(9, list(range(20, 220)))) + "\n")
    rows = [token_row(i, list(range(20 * i, 20 * i + 30))) for i in range(2)]
    short = {"context_tokens": 128, "max_steps": 1}
    path = write_run(tmp_path, "long", "tiny-successor:1", rows, data={"validation": [{"path": str(held_out)}]},
                     train=short)  # fmt: skip
    message = "train.context_tokens 128 is shorter than the longest row's 198 states"
    with pytest.raises(BadInput, match=message):
        cached(path)
    run = cached(write_run(tmp_path, "long", "tiny-successor:1", rows, data={"validation": [{"path": str(held_out)}]}))
    with pytest.raises(BadInput, match=message):
        train(renamed(run, "long", **short))


def test_float8_products_are_refused_where_products_are_float32(successor: Run) -> None:
    with pytest.raises(BadInput, match=r"train\.fp8: products are float32 on a CPU: set fp8: false"):
        train(renamed(successor, "narrow", fp8=True, max_steps=1))
    with pytest.raises(ValidationError, match=r"train\.fp8 with train\.compute float32"):
        renamed(successor, "narrow", fp8=True, compute="float32")


def test_a_cache_of_other_settings_is_refused_by_name(successor: Run) -> None:
    body = renamed(successor, "other").model_dump(mode="json", by_alias=True, exclude_unset=True)
    body["extract"]["codec"] = "fp8"
    with pytest.raises(BadInput, match=r"extract\.codec = 'float32', this run wants 'fp8'"):
        train(Run.model_validate(body))


def test_warm_start_begins_where_the_other_ended(successor: Run, tmp_path: Path) -> None:
    run = renamed(successor, "first", max_steps=5)
    weights = train(run)
    from stages.export import command as export

    exported = export_folder(export, run, tmp_path)
    warm = renamed(successor, "warm", max_steps=1, warm_start=str(exported), learning_rate=1e-12)
    found = train(warm)
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor.bfloat16().float(), atol=1e-6), name


def test_resumed_training_asks_nothing_of_what_it_started_from_and_reads_files_once_for_their_checksums(
    successor: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.export import command as export

    first = renamed(successor, "start", max_steps=2)
    train(first)
    shutil.copytree(export_folder(export, first, tmp_path), tmp_path / "start")
    changes = {"max_steps": 6, "warm_start": str(tmp_path / "start")}
    expected, broken = (
        train(renamed(successor, "warm-straight", **changes)),
        renamed(successor, "warm-broken", **changes),
    )
    with pytest.raises(Stopped):
        train(broken, StoppingJob(3))
    shutil.rmtree(tmp_path / "start")
    read, original = [], checkpoint.crc32c
    monkeypatch.setattr(checkpoint, "crc32c", lambda path: read.append(path.name) or original(path))
    found = train(broken)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert read[: len(checkpoint.FILES)] == list(checkpoint.FILES)
    assert read[len(checkpoint.FILES) :] == ["config.json", "drafter.safetensors"], "as the test itself loads them"


@pytest.mark.parametrize("equal", [True, False])
def test_doctor_tries_a_step_and_writes_nothing(
    successor: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    equal: bool,
) -> None:
    """On a CPU there is nothing to compile or capture: the step runs twice, eagerly."""
    if not equal:
        monkeypatch.setattr(torch, "equal", lambda a, b: False)
    run = renamed(successor, f"tried-{equal}", batches_per_step=3)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    assert exit_code(["doctor", "--train", "--json", str(path)]) == int(not equal)
    train_base, *modes = json.loads(capsys.readouterr().out)
    assert (train_base["name"], train_base["status"]) == ("train base", "ok" if equal else "failure")
    assert re.fullmatch(
        r"eager: 0 graphs, compiled in 0\.0 s, a step in [\d.]+ ms, 0\.0 GiB, loss [\d.]+, "
        rf"replay {'equals' if equal else 'DIFFERS FROM'} the same step run plainly",
        train_base["found"],
    )
    assert ("train.graphs: compile" in train_base["remedy"]) == (not equal)
    assert {check["name"] for check in modes} >= {"mode default", "mode max-autotune"}
    assert not run.folder.exists()


def test_doctor_tries_steps_of_a_run_with_a_cache_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_code(["doctor", "--train"]) == 2
    assert "needs a run file whose cache is made" in capsys.readouterr().err
    path = write_run(tmp_path, "blank", "tiny-successor:1", [token_row(0, [1] * 20)])
    assert exit_code(["doctor", "--train", str(path)]) == 2
    assert "part-0000.json does not exist: run `draftmill extract` first" in capsys.readouterr().err


def test_a_trials_first_step_is_trainings(successor: Run) -> None:
    run = renamed(successor, "first-step", batches_per_step=3, max_steps=1, log_every=1)
    trial = try_step(run, "base", Job("doctor", ""))
    train(run)
    (line,) = map(json.loads, Layout.of(run).metrics("base").read_text().splitlines())
    assert trial.loss == line["loss"]
    assert (trial.drafter, trial.mode, trial.equal) == ("base", "eager", True)


def export_folder(export: Any, run: Run, folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    export.main([str(path), "--drafter", "base", "--checkpoint", "last"], standalone_mode=False)
    return Layout.of(run).export("base")


def test_teacher_losses_train(tmp_path: Path) -> None:
    rows = [token_row(i, list(range(20 * i, 20 * i + 26))) for i in range(4)]
    losses: dict[str, list[float]] = {}
    for extra in ("last_hidden", "top_k"):
        path = write_run(tmp_path, extra.replace("_", "-"), "tiny-successor:1", rows,
                         extract={"extras": [extra], "top_k": 8}, train={"epochs": 30, "log_every": 1})  # fmt: skip
        base = cached(path)
        for kind in ("kl", "tv"):
            run = renamed(base, f"{base.name}-{kind}", loss={"kind": kind, "distill": 0.5})
            train(run)
            lines = map(json.loads, Layout.of(run).metrics("base").read_text().splitlines())
            losses[f"{extra} {kind}"] = [line["loss"] for line in lines if "loss" in line]
    for name, series in losses.items():
        assert series[-1] < 0.5 * series[0], name


def test_rows_prepared_again_make_the_cache_and_its_drafter_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [token_row(i, list(range(20 * i, 20 * i + 26))) for i in range(4)]
    path = write_run(tmp_path, "moved", "tiny-successor:1", rows, train={"epochs": 1})
    run = cached(path)
    train(run)
    (tmp_path / "moved.jsonl").write_text(json.dumps(token_row(9, list(range(100, 140)))) + "\n")
    prepare.callback(run_file=str(path), show=None)
    with pytest.raises(
        BadInput, match=r"part-0000\.json: made with inputs\.tokens = .*: run `draftmill extract` again"
    ):
        train(run)
    assert exit_code(["verify", str(path), "--fast"]) == 1
    assert "made with inputs.tokens" in (said := capsys.readouterr().err)
    assert said.endswith("run `draftmill extract` again\n")
    extract.callback(run_file=str(path), part=None, force=False)
    assert exit_code(["verify", str(path), "--fast"]) == 0
    assert exit_code(["export", str(path)]) == 2
    assert "train.json: made with inputs.cache = " in capsys.readouterr().err
    train(run)
    assert exit_code(["export", str(path)]) == 0
    assert read_manifest(Layout.of(run).train_manifest("base"), "drafter")["cache"]["run"] == "moved"


def test_nothing_of_a_run_is_left_half_written(successor: Run) -> None:
    run = renamed(successor, "tidy", max_steps=2)
    train(run)
    hidden = [p for p in Layout.of(run).drafter("base").rglob(".*") if p.is_file() or p.suffix == ".tmp"]
    assert hidden == []
    shutil.rmtree(Layout.of(run).folder)

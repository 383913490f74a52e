"""Loggers: one training is one run there, named and described, closed as it ended, and rewound when it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import BadInput
from pipeline.loggers import Training, open_loggers, require
from pipeline.metrics import Metrics

LINES = [{"step": step, "loss": 3.0 - step, "accuracy": [0.5, 0.25]} for step in (1, 2)]
CONFIG = {"target": "tiny:0", "settings": {"train": {"seed": 1}}}


class Package(SimpleNamespace):
    """Stands for an installed logger: `calls` are what it was asked for."""

    def __init__(self, steps_known: int = 0) -> None:
        super().__init__(calls=[], step=steps_known)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Package:
            self.calls.append((name, arguments, options))
            return self

        return call

    def asked(self, wanted: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for name, arguments, options in self.calls if name == wanted]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Package]:
    def install(module: str, **known: int) -> Package:
        package = Package(**known)
        monkeypatch.setitem(sys.modules, module, package)
        return package

    return install


def training(folder: Path, step: int = 0) -> Training:
    return Training("my-run", "base", folder, CONFIG, step)


def written(folder: Path, logger: str, step: int = 0, error: type[BaseException] | None = None) -> None:
    """Write `LINES`, to an end that is good or that `error` makes."""
    try:
        with Metrics(folder / "metrics.jsonl", [logger], training(folder, step)) as metrics:
            for line in LINES:
                metrics.write(line)
            if error is not None:
                raise error
    except RuntimeError:
        pass


def test_a_wandb_run_has_names_settings_and_one_id_for_all_attempts(
    tmp_path: Path, installed: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    first, second, other = tmp_path / "a", tmp_path / "a", tmp_path / "b"
    made = []
    for folder in (first, second, other):
        wandb = installed("wandb")
        written(folder, "wandb")
        made += [options for _, options in wandb.asked("init")]
    assert made[0]["id"] == made[1]["id"] != made[2]["id"], "a forced re-run has a folder of its own"
    assert {name: made[0][name] for name in ("project", "group", "name", "resume", "config", "dir")} == {
        "project": "draftmill", "group": "my-run", "name": "my-run-base", "resume": "allow", "config": CONFIG,
        "dir": str(first),
    }  # fmt: skip


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError, 1)])
def test_a_wandb_run_is_finished_as_training_ended(
    tmp_path: Path, installed: Callable[..., Package], error: type[BaseException] | None, code: int
) -> None:
    wandb = installed("wandb")
    written(tmp_path, "wandb", error=error)
    assert wandb.asked("log") == [
        (({"loss": 2.0, "accuracy/1": 0.5, "accuracy/2": 0.25},), {"step": 1}),
        (({"loss": 1.0, "accuracy/1": 0.5, "accuracy/2": 0.25},), {"step": 2}),
    ]
    assert wandb.calls[-1] == ("finish", (), {"exit_code": code})


def test_wandb_is_not_told_again_what_it_knows_of_an_interrupted_attempt(
    tmp_path: Path, installed: Callable[..., Package]
) -> None:
    wandb = installed("wandb", steps_known=2)
    written(tmp_path, "wandb")
    assert [options["step"] for _, options in wandb.asked("log")] == [2]


def test_the_environment_names_another_wandb_project(
    tmp_path: Path, installed: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    wandb = installed("wandb")
    written(tmp_path, "wandb")
    assert wandb.asked("init")[0][1]["project"] == "ours"


def test_a_trackio_run_is_resumed_by_its_name_and_finished(tmp_path: Path, installed: Callable[..., Package]) -> None:
    made = []
    for _ in range(2):
        trackio = installed("trackio")
        written(tmp_path, "trackio")
        made.append(trackio.asked("init")[0][1])
        assert [options["step"] for _, options in trackio.asked("log")] == [1, 2]
        assert trackio.calls[-1][0] == "finish"
    assert made[0] == made[1]
    assert made[0]["name"].startswith("my-run-base-")
    assert (made[0]["resume"], made[0]["config"]) == ("allow", CONFIG)


def test_tensorboard_forgets_what_comes_again_and_is_closed(tmp_path: Path, installed: Callable[..., Package]) -> None:
    board = installed("torch.utils.tensorboard")
    written(tmp_path, "tensorboard", step=40)
    assert board.asked("SummaryWriter") == [((tmp_path / "tensorboard",), {"purge_step": 41})]
    assert board.asked("add_scalar")[0] == (("loss", 2.0, 1), {})
    assert board.calls[-1][0] == "close"


def test_tensorboard_shows_each_step_of_an_interrupted_training_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, "tensorboard")
    written(tmp_path, "tensorboard", step=1)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo\n', b'{"step": 1, "lo\xff\xfe\n', b"3\n", b"{}\n"])
def test_lines_of_steps_that_come_again_are_dropped(
    tmp_path: Path, torn: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(json.dumps(line) + "\n" for line in LINES).encode() + torn)
    with Metrics(path, [], training(tmp_path, 1)) as metrics:
        metrics.write({"step": 2, "loss": 9.0})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [2.0, 9.0]
    assert "a torn line is dropped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_logger_that_is_not_installed_is_refused_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=rf"train\.loggers: `{name}` cannot be loaded .*: pip install {name}, or leave"):
        require([name])


def test_tensorboard_which_is_asked_for_by_default_is_left_out_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    require(["tensorboard"])
    assert open_loggers(["tensorboard"], training(tmp_path)) == []


def test_a_logger_that_does_not_start_is_one_line_with_the_remedy(
    tmp_path: Path, installed: Callable[..., Package]
) -> None:
    def locked_out(**_: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    installed("wandb").init = locked_out
    with pytest.raises(
        BadInput, match=r"`wandb` cannot start \(RuntimeError: api_key .*\): `wandb login`, or set WANDB"
    ):
        open_loggers(["wandb"], training(tmp_path))

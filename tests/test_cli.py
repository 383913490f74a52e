"""The command line: quick to answer, one line for an error, the promised exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from data.errors import BadInput, Failure, Stopped
from stages import cli

ROOT = Path(__file__).resolve().parents[1]


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("broken")
    def broken() -> None:
        raise error

    monkeypatch.setattr(cli.Verbs, "get_command", lambda self, ctx, name: broken)


def test_help_lists_every_command_without_loading_one() -> None:
    code = "import sys; from stages.cli import exit_code; exit_code(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    for verb in cli.COMMANDS:
        assert re.search(rf"^  {verb} ", done.stdout, re.MULTILINE)
    for heavy in ("torch", "transformers", "pydantic", "numpy", "stages.train", "data.settings"):
        assert f"'{heavy}'" not in done.stdout


def test_help_answers_in_under_04_seconds() -> None:
    before = os.times()
    for _ in range(3):
        subprocess.run([sys.executable, "-m", "stages.cli", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds / 3 < 0.4


def test_every_command_loads_without_torch_and_explains_itself() -> None:
    code = (
        "import sys; from stages import cli\n"
        "for name, line in cli.COMMANDS.items():\n"
        "    command = cli.group.get_command(None, name)\n"
        "    assert command.name == name, command.name\n"
        "    assert command.help, name\n"
        "    assert cli.exit_code([name, '--help']) == 0\n"
        "print([m for m in ('torch', 'transformers', 'zarr', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_training_does_not_wait_for_transformers() -> None:
    code = "import sys, pipeline.training; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BadInput("run.yaml: no such layer"), 2, "error: run.yaml: no such layer\n"),
        (Failure("disk full"), 1, "error: disk full\n"),
        (Stopped("SIGTERM arrived"), 75, "error: stopped: SIGTERM arrived\n"),
        (BadInput("two\nlines"), 2, "error: two lines\n"),
        (KeyboardInterrupt(), 1, "error: interrupted\n"),
        (
            PermissionError(13, "Permission denied", "/runs/mine"),
            2,
            "error: /runs/mine: permission denied: give this user access, or set `root` in the run file to a folder "
            "that can be written\n",
        ),
        (MemoryError(), 1, "error: out of memory: lower the batch sizes of this stage in the run file\n"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error, monkeypatch)
    assert cli.exit_code(["broken"]) == code
    assert capsys.readouterr().err.lstrip("\n") == line


def test_a_lost_gpu_is_one_line_and_exit_code_1_whatever_its_tensors_do() -> None:
    code = """if True:
        import os, torch
        from stages import cli

        class Doomed:  # as a tensor on a lost device: to free it aborts the process
            def __del__(self):
                os.abort()

        def fail(*_, **__):
            error = torch.AcceleratorError("CUDA error: unspecified launch failure\\nmore of it")
            error.frames = Doomed()
            raise error

        cli.group.main = fail
        cli.main(["train", "run.yaml"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(
        "error: the GPU failed (CUDA error: unspecified launch failure): run the same command"
    )
    assert len(done.stderr.splitlines()) == 1


def test_an_unexpected_error_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(ZeroDivisionError("ours"), monkeypatch)
    assert cli.exit_code(["broken"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("error: ZeroDivisionError: ours\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian", "x.yaml"], "No such command 'trian'; did you mean `train`?"),
        (["launch", "x.yaml"], "No such command 'launch'"),
        (["train"], "Missing argument 'RUN_FILE'"),
        (["train", "x.yaml", "--speed"], "No such option"),
        (["extract", "x.yaml", "--part", "-1"], "Invalid value for '--part'"),
        (["status", "missing.yaml"], "missing.yaml: cannot read the run file: No such file or directory"),
    ],
)
def test_bad_use_is_exit_code_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert text in error
    assert error.count("\n") == 1


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code([]) == 2
    assert "Usage: draftmill" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["prepare", "regenerate", "extract", "verify", "train", "eval", "export", "report"])
def test_every_stage_refuses_a_missing_run_file_in_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not (ROOT / "stages" / f"{verb}.py").exists():
        pytest.skip(f"no {verb} yet")
    assert cli.exit_code([verb, "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == ("error: nowhere.yaml: cannot read the run file: No such file or directory\n")

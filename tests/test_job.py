"""Jobs: what they leave to read, how they listen to signals, and that they end when they hang."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import BadInput, Stopped
from data.settings import Run
from pipeline import devices
from pipeline.console import Progress, say
from pipeline.job import job
from pipeline.journal import read_status, statuses, tail

ROOT = Path(__file__).resolve().parents[1]

STAGE = """
import sys, time
sys.path.insert(0, {root!r})
import click
from data.settings import Run
from pipeline import devices
from pipeline.console import Progress, say
from pipeline.job import job
from stages import cli
{setup}

@click.command("work")
def work():
    run = Run.model_validate({body!r})
    with job(run, "extract", "part-0000", gpus=1) as work, Progress(1000, "extract part-0000") as bar:
        say("begun")
        {step}

cli.COMMANDS["work"] = "."
cli.Verbs.get_command = lambda self, ctx, name: work
cli.main(["work"])
"""
NO_GPU = "devices.visible = lambda: []"
STEPS = "for _ in range(400): bar.advance(1); time.sleep(0.02); work.check_stop()"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.model_validate(body_in(tmp_path))


def body_in(folder: Path, **jobs: Any) -> dict[str, Any]:
    return {
        "name": "r",
        "root": str(folder),
        "target": {"model": "tiny:0"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "jobs": jobs,
    }


def stage(folder: Path, step: str = STEPS, setup: str = NO_GPU, **jobs: Any) -> subprocess.Popen[str]:
    script = STAGE.format(root=str(ROOT), body=body_in(folder, **jobs), step=step, setup=setup)
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)


def begun(folder: Path) -> None:
    until(lambda: "begun" in "\n".join(tail(folder / "r" / "logs" / "extract" / "part-0000.log")))


def status(folder: Path) -> dict[str, Any]:
    return read_status(folder / "r" / "logs" / "extract" / "part-0000.status.json")


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_log_says_what_ran_with_which_settings_where(run: Run) -> None:
    with job(run, "extract", "part-0003") as work:
        say("a line")
    lines = work.log.read_text().splitlines()
    text = "\n".join(lines)
    assert work.log.name == "part-0003-001.log"
    for wanted in ("start run=r stage=extract label=part-0003 attempt=1", "settings fingerprint=", "versions python="):
        assert wanted in text
    assert "device cpu" in text
    assert lines[-1].endswith("why=-")
    assert "end status=done" in lines[-1]
    assert all(line[:4].isdecimal() and line[19] == "Z" for line in lines)


def test_attempts_have_logs_of_their_own(run: Run) -> None:
    for _ in range(2):
        with job(run, "extract", "part-0000") as work:
            pass
    newest = work.log.with_name("part-0000.log")
    assert work.log.name == "part-0000-002.log"
    assert newest.resolve() == work.log.resolve()
    assert work.log.with_name("part-0000-001.log").exists()


def test_status_tells_progress_while_it_runs(run: Run) -> None:
    with job(run, "train", "base"), Progress(10, "train base", unit="steps", done=4) as bar:
        bar.advance(1, note="loss 2")
        body = statuses(run)[0]
        assert body["status"] == "running"
        assert body["pid"] == os.getpid()
        assert body["device"] == "cpu"
        assert (body["progress"]["done"], body["progress"]["total"]) == (4, 10), "the first at once, then once a second"
    assert statuses(run)[0]["status"] == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks_for_an_orderly_end(tmp_path: Path, number: signal.Signals) -> None:
    process = stage(tmp_path)
    begun(tmp_path)
    process.send_signal(number)
    error = process.communicate()[1]
    assert process.returncode == 75
    assert f"error: stopped: {number.name} arrived; the same command goes on from here" in error
    assert "part-0000-001.log" in error
    assert status(tmp_path)["status"] == "stopped"


def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    process = stage(tmp_path, "time.sleep(60)")
    begun(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None, "the first asks"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 1


def test_a_stage_that_hangs_ends_itself_with_all_stacks(tmp_path: Path) -> None:
    process = stage(tmp_path, "time.sleep(600)", stall_seconds=1.0)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "no progress for" in error
    log = (tmp_path / "r" / "logs" / "extract" / "part-0000.log").read_text()
    assert 'File "<string>"' in log
    assert status(tmp_path)["status"] == "failed"


STALLS = "time.sleep(600)"


@pytest.mark.parametrize(
    ("step", "stall_seconds", "setting"),
    [
        (f"work.allow(1.0, 'train.stall_timeout'); {STALLS}", 600.0, "train.stall_timeout"),
        (f"work.allow(1.0, 'train.stall_timeout'); {STALLS}", None, "train.stall_timeout"),
        (f"work.allow(600.0, 'train.stall_timeout'); {STALLS}", 1.0, "jobs.stall_seconds"),
        (f"work.allow(0.5, 'x'); work.allow(); {STALLS}", 1.5, "jobs.stall_seconds"),
    ],
)
def test_the_shorter_of_two_bounds_ends_a_stage_and_is_named(
    tmp_path: Path, step: str, stall_seconds: float | None, setting: str
) -> None:
    process = stage(tmp_path, step, stall_seconds=stall_seconds)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert f"all stacks in the log (`{setting}`)" in error


def test_a_bound_that_is_lifted_ends_nothing(tmp_path: Path) -> None:
    process = stage(tmp_path, "work.allow(0.5, 'x'); work.allow(); time.sleep(2)", stall_seconds=None)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 0, error


def test_a_driver_that_does_not_answer_ends_the_stage_too(tmp_path: Path) -> None:
    hangs = "devices.visible = lambda: time.sleep(600)"
    process = stage(tmp_path, "pass", hangs, stall_seconds=1.0)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "no progress for" in error


def test_waiting_for_a_device_is_not_a_hang(tmp_path: Path) -> None:
    waits = "[(stop(), time.sleep(0.1)) for _ in range(30)]"
    setup = f"devices.lease = lambda gpus, stop: {waits} and devices.Lease(())"
    process = stage(tmp_path, "pass", setup, stall_seconds=1.0)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 0, error


def test_signs_of_life_keep_the_watchdog_quiet(tmp_path: Path) -> None:
    process = stage(tmp_path, "for _ in range(20): bar.advance(1); time.sleep(0.1)", stall_seconds=1.0)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_killed_job_is_told_from_a_running_one(tmp_path: Path) -> None:
    process = stage(tmp_path)
    begun(tmp_path)
    assert status(tmp_path)["status"] == "running"
    process.kill()
    process.communicate()
    assert status(tmp_path)["status"] == "died"
    assert "killed, or out of memory" in status(tmp_path)["why"]


def test_the_same_job_waits_for_an_orphan(tmp_path: Path) -> None:
    first = stage(tmp_path)
    begun(tmp_path)
    second = stage(tmp_path, "pass")
    line = second.stderr.readline()
    assert f"waiting: the same job is at work already (pid {first.pid})" in line
    assert second.poll() is None
    first.terminate()
    first.communicate()
    second.communicate(timeout=30)
    assert second.returncode == 0


def test_an_error_of_ours_has_its_traceback_in_the_log_and_one_line_outside(tmp_path: Path) -> None:
    process = stage(tmp_path, "{}['missing']")
    error = process.communicate()[1]
    assert process.returncode == 1
    assert "Traceback" not in error
    assert "error: KeyError: 'missing' (traceback in" in error
    assert "Traceback" in (tmp_path / "r" / "logs" / "extract" / "part-0000.log").read_text()


def test_a_refusal_is_recorded_and_passes_through(run: Run) -> None:
    with pytest.raises(BadInput, match="no such layer"), job(run, "extract", "part-0000"):
        raise BadInput("no such layer")
    body = statuses(run)[0]
    assert (body["status"], body["why"]) == ("failed", "BadInput: no such layer")


def test_a_full_disk_says_so_in_one_line(tmp_path: Path) -> None:
    process = stage(tmp_path, f"raise OSError({errno.ENOSPC}, 'No space left on device', '/disk/file')")
    error = process.communicate()[1]
    assert process.returncode == 1
    assert "error: disk full while writing /disk/file: free some space, then run the same command again" in error


def test_work_goes_on_when_the_terminal_is_gone(tmp_path: Path) -> None:
    script = STAGE.format(root=str(ROOT), body=body_in(tmp_path), step=STEPS.replace("400", "40"), setup=NO_GPU)
    script = script.replace("work.check_stop()", "say('alive')")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs)
    os.close(theirs)
    begun(tmp_path)
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert status(tmp_path)["status"] == "done"


def test_commands_without_a_run_have_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with job(None, "import") as work:
        say("hello")
        assert work.log is None
    assert list(tmp_path.iterdir()) == []


def test_a_rank_has_its_own_log_and_its_parents_devices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices._Held, "lease", None)
    monkeypatch.setattr("pipeline.job.die_with_parent", lambda: None)
    environment = {
        "TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "DRAFTMILL_LEASE": "GPU-0,GPU-1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipeline.preflight.require_torch_build", lambda lease: None)
    with job(run, "train", "base", gpus=2) as work:
        assert work.device == "cuda:1"
        assert work.log.name == "base.rank1-001.log"
    monkeypatch.setattr(devices._Held, "lease", None)


def test_signals_are_only_listened_to_inside_a_job(run: Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with job(run, "extract") as work:
        os.kill(os.getpid(), signal.SIGTERM)
        assert work.stop_requested()
        with pytest.raises(Stopped, match="SIGTERM"):
            work.check_stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_progress_is_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.console.LINE_SECONDS", 0.0)
    with Progress(4, "extract part-0001", unit="rows") as bar:
        bar.advance(2, note="disk 3 %")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("extract part-0001: 2/4 rows (50 %), ")
    assert lines[0].endswith("left; disk 3 %")


@pytest.mark.parametrize("terminal", [False, True])
def test_numbers_stand_in_one_line_in_ten_seconds_in_the_log_always(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr("pipeline.console.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("pipeline.console._has_terminal", lambda: terminal)
    with job(run, "train", "base") as work, Progress(10_000, "train base", unit="steps") as bar:
        for step in range(1, 3001):
            clock[0] += 0.01
            bar.advance(1, note="loss 2")
            if step % 10 == 0:
                bar.tell(f"loss 2, numbers of {step}")
    lines = [line.partition(" train base: ")[2] for line in work.log.read_text().splitlines() if "train base: " in line]
    assert [line.partition(" ")[0] for line in lines] == ["10/10000", "1010/10000", "2010/10000", "3000/10000"]
    assert [line.rpartition("; ")[2] for line in lines] == [
        f"loss 2, numbers of {step}" for step in (10, 1000, 2000, 3000)
    ]  # fmt: skip
    shown = capsys.readouterr().err
    assert ("train base | 10/10000 steps" in shown) == (not terminal)  # a line names its job once
    assert [f"numbers of {step}" in shown for step in (10, 1000, 3000)] == [not terminal, not terminal, True]


def test_slow_steps_show_their_numbers_at_once_and_never_twice(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("pipeline.console.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Progress(30, "train base", unit="steps") as bar:
        for step in range(1, 31):
            clock[0] += 4.0
            bar.advance(1, note="loss 2")
            if step % 10 == 0:
                bar.tell(f"numbers of {step}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines if "numbers of" in line] == ["10/30", "20/30", "30/30"]
    assert len({line for line in lines if "numbers of" in line}) == 3


def test_a_status_file_that_is_not_one_counts_as_none(tmp_path: Path) -> None:
    for text in ("", "[1]", '{"status": ', json.dumps({"status": "running", "pid": "x", "host": 3})):
        (tmp_path / "a.status.json").write_text(text)
        read_status(tmp_path / "a.status.json")


def test_more_done_than_an_estimate_said_shows_no_share_and_no_time_left() -> None:
    with Progress(4, "prepare", unit="rows") as bar:
        bar.advance(7)
        assert bar.snapshot().left is None
        text = bar.snapshot().text()
    assert text.startswith("prepare: 7 rows, ")
    assert "%" not in text
    assert "left" not in text

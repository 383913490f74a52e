"""Leases: jobs never share a device, death releases, the environment's choice is kept."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.errors import BadInput, Failure, Stopped
from pipeline import devices

ROOT = Path(__file__).resolve().parents[1]

JOB = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pipeline import devices
count, gpus, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
devices.visible = lambda: [f"GPU-{i}" for i in range(count)]
devices.POLL_SECONDS = 0.02
def note(what):
    os.write(log, f"{what} {time.monotonic()} {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\\n".encode())
log = os.open(sys.argv[5], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
note("ask")
lease = devices.lease(gpus)
note("take")
if len(sys.argv) > 6:
    import subprocess
    nap = f"import time; time.sleep({sys.argv[6]})"
    child = subprocess.Popen([sys.executable, "-c", nap], pass_fds=lease.descriptors)
time.sleep(seconds)
note("give")
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(devices._Held, "lease", None)
    monkeypatch.setenv("DRAFTMILL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    if devices._Held.lease is not None:
        devices._Held.lease.release()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(devices, "visible", lambda: [f"GPU-{i}" for i in range(count)])


def start(log: Path, count: int, gpus: int, seconds: float, *child: str) -> subprocess.Popen[bytes]:
    arguments = [ROOT, str(count), str(gpus), str(seconds), log, *child]
    return subprocess.Popen([sys.executable, "-S", "-c", JOB, *arguments], stderr=subprocess.DEVNULL)


def test_no_gpu_is_a_cpu_lease_and_says_so(
    fake: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(0)
    lease = devices.lease(2)
    assert (lease.kind, lease.torch_device, lease.uuids) == ("cpu", "cpu", ())
    assert "no GPU here: running on the CPU" in capsys.readouterr().err


def test_a_lease_shows_cuda_its_devices_only_and_gives_them_back(fake: Callable[[int], None]) -> None:
    fake(3)
    lease = devices.lease(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert devices.is_leased("GPU-0")
    assert not devices.is_leased("GPU-2")
    assert f"pid {os.getpid()}" in devices.holder("GPU-1")
    lease.release()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert not devices.is_leased("GPU-0")


def test_asking_again_gives_the_same_lease(fake: Callable[[int], None]) -> None:
    fake(2)
    assert devices.lease(2) is devices.lease(1)


def test_more_than_the_machine_has_is_refused(fake: Callable[[int], None]) -> None:
    fake(2)
    with pytest.raises(BadInput, match="needs 3 GPUs, this machine shows 2"):
        devices.lease(3)


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, ["GPU-aa", "GPU-ab", "MIG-1"]),
        ("1,0", ["GPU-ab", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]),
        ("GPU-a", []),  # not unique
        ("0,7,1", ["GPU-aa"]),  # ends at the first that is none
        ("0,0", ["GPU-aa"]),
        ("MIG-1", ["MIG-1"]),
        ("MIG-other/3/0", ["MIG-other/3/0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_an_inherited_choice_is_read_as_cuda_reads_it(setting: str | None, chosen: list[str]) -> None:
    assert devices.choose(["GPU-aa", "GPU-ab", "MIG-1"], setting) == chosen


def test_ranks_use_their_parents_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = devices.Lease(("GPU-0", "GPU-1"), ())
    for name, value in parent.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    rank = devices.lease(2)
    assert (rank.uuids, rank.torch_device, rank.descriptors) == (("GPU-0", "GPU-1"), "cuda:1", ())


def test_waiting_names_the_holder_and_stops_when_asked(
    fake: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(1)
    log = tmp_path / "log"
    holder = start(log, 1, 1, 30)
    until(lambda: "take" in text(log))
    began = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began > 1.4:
            raise Stopped("asked")

    with pytest.raises(Stopped):
        devices.lease(1, stop)
    assert f"held by pid {holder.pid} (-c" in capsys.readouterr().err
    holder.kill()
    holder.wait()
    devices.lease(1)


def test_a_child_that_was_given_the_lease_keeps_it_after_the_parents_death(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = start(log, 1, 1, 30, "1.0")
    until(lambda: "take" in text(log))
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    assert devices.is_leased("GPU-0")
    until(lambda: not devices.is_leased("GPU-0"))


def test_busy_devices_are_waited_for_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.Device("GPU-0", "H200", 100 << 30, 50 << 30, (9, 0), (77,))
    monkeypatch.setattr(devices, "describe", lambda: [device])
    with pytest.raises(Failure, match=r"50.0 GiB in use by pids \[77\]"):
        devices.require_idle(["GPU-0"], 0.1, 0.0, lambda: None)
    devices.require_idle(["GPU-0"], 0.6, 0.0, lambda: None)
    devices.require_idle(["GPU-1"], 0.1, 0.0, lambda: None)


def test_40_jobs_on_8_devices_with_kills_never_overlap_nor_leak(tmp_path: Path) -> None:
    log, random_ = tmp_path / "log", random.Random(3)
    jobs = []
    killed = set()
    single = set()
    for number in range(40):
        gpus = random_.choice([1, 1, 1, 2, 3])
        jobs.append(start(log, 8, gpus, random_.uniform(0.1, 0.5)))
        if gpus == 1:
            single.add(jobs[-1].pid)
        if number % 4 == 3:
            victim = random_.choice(jobs)
            if victim.poll() is None:
                victim.send_signal(signal.SIGKILL)
                killed.add(victim.pid)
    ends = {}
    while pending := [job for job in jobs if job.pid not in ends]:
        for job in pending:
            if job.poll() is not None:
                ends[job.pid] = time.monotonic()
        time.sleep(0.005)
    spans: dict[str, list[tuple[float, float]]] = {}
    taken: dict[int, tuple[float, list[str]]] = {}
    asked: dict[int, float] = {}
    for line in text(log).splitlines():
        what, at, pid, names = line.split()
        if what == "ask":
            asked[int(pid)] = float(at)
        elif what == "take":
            taken[int(pid)] = float(at), names.split(",")
        elif what == "give":
            ends[int(pid)] = float(at)
    assert set(taken) >= {job.pid for job in jobs} - killed
    for pid, (begin, names) in taken.items():
        for name in names:
            spans.setdefault(name, []).append((begin, ends[pid]))
    for name, turns in spans.items():
        turns.sort()
        for (_, end), (begin, _) in itertools.pairwise(turns):
            assert begin >= end, f"{name} was shared"
    assert not any(devices.is_leased(f"GPU-{i}") for i in range(8))
    for pid in single & set(taken):
        for name in (f"GPU-{i}" for i in range(8)):
            idle = longest_idle(spans.get(name, []), asked[pid], taken[pid][0])
            assert idle < 2.0, f"{name} lay idle for {idle:.1f} s while a job waited for one device"


def test_the_lock_says_who_holds_it(fake: Callable[[int], None]) -> None:
    fake(1)
    devices.lease(1)
    body = json.loads(devices._lock_path("GPU-0").read_text())
    assert body["pid"] == os.getpid()


def longest_idle(turns: list[tuple[float, float]], begin: float, end: float) -> float:
    """The longest time between `begin` and `end` in which a device with these turns was free."""
    longest = 0.0
    for start_, stop_ in [*turns, (end, end)]:
        longest = max(longest, min(start_, end) - begin)
        begin = max(begin, stop_)
    return longest


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)

"""Which GPUs this process may use: found, leased and shown to CUDA before torch wakes up.

A lease is an exclusive `flock` per device on a raw, inheritable descriptor. The kernel lets go of it when the last
process that holds the descriptor dies, `kill -9` included, so no lease outlives its job. Locks are named by device
UUID, because cgroups renumber devices, and lie on a local disk. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import BadInput, Failure
from pipeline.console import duration, say, size

LOCKS = Path(os.environ.get("DRAFTMILL_LOCKS", "/tmp/draftmill-locks"))
"""Folder of lock files: one for the whole machine, so not `TMPDIR`, which schedulers set job by job."""

INHERITED = "DRAFTMILL_LEASE"
"""Environment variable by which a parent tells its ranks that their devices are leased already."""

POLL_SECONDS = 0.2
REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG slice of it, as NVML sees it. Memory in bytes."""

    uuid: str
    name: str
    memory: int
    used: int
    capability: tuple[int, int]
    processes: tuple[int, ...]


@dataclass
class Lease:
    """Devices that this process owns until it dies, or until `release`."""

    uuids: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    before: str | None = None

    @property
    def kind(self) -> str:
        return "cuda" if self.uuids else "cpu"

    @property
    def torch_device(self) -> str:
        """Device of a single-GPU stage, or of this rank."""
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if self.uuids else "cpu"

    def environment(self) -> dict[str, str]:
        """What child processes need to know; start them with `pass_fds=lease.descriptors`, so that they hold it too."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids), INHERITED: ",".join(self.uuids)} if self.uuids else {}

    def release(self) -> None:
        """Give the devices back. Only for processes that have not started CUDA."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        if self.uuids and self.descriptors:
            _set_visible(self.before)
        self.descriptors = ()


class _Held:
    lease: Lease | None = None


def lease(gpus: int, stop: Callable[[], None] = lambda: None) -> Lease:
    """Take `gpus` devices, all or none, waiting for other jobs' to end; no GPU at all means the CPU, with a line.

    Sets `CUDA_VISIBLE_DEVICES`, so it comes before torch starts CUDA. A process keeps what it has: asking again for no
    more than that gives the same lease. `stop` is called while waiting and may raise.

    Raises BadInput when the machine shows fewer GPUs than that.
    """
    held = _Held.lease
    if held is not None and (not held.uuids or (held.descriptors and len(held.uuids) >= gpus)):
        return held
    if INHERITED in os.environ:
        _Held.lease = Lease(tuple(os.environ[INHERITED].split(",")))
        return _Held.lease
    uuids = visible()
    if not uuids:
        say("no GPU here: running on the CPU")
        _Held.lease = Lease(())
        return _Held.lease
    if gpus > len(uuids):
        raise BadInput(f"this stage needs {gpus} GPUs, this machine shows {len(uuids)}: lower `gpus` in the run file")
    _require_asleep()
    descriptors = _wait(uuids, gpus, stop)
    taken = tuple(uuids[i] for i in descriptors)
    _Held.lease = Lease(taken, tuple(descriptors.values()), os.environ.get("CUDA_VISIBLE_DEVICES"))
    _set_visible(",".join(taken))
    return _Held.lease


def visible() -> list[str]:
    """UUIDs of the devices that this process may lease, within an inherited `CUDA_VISIBLE_DEVICES`."""
    with _nvml() as nvml:
        present = [] if nvml is None else [device.uuid for device in _enumerate(nvml)]
    return choose(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def choose(present: Sequence[str], setting: str | None) -> list[str]:
    """Devices that a value of `CUDA_VISIBLE_DEVICES` names, by CUDA's rules, out of those `present` in PCI order.

    Entries are indices, UUIDs or unique beginnings of UUIDs, and MIG ids; the list ends at the first that is none.
    """
    if setting is None or not present:
        return list(present)
    chosen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            matches = [present[int(entry)]] if int(entry) < len(present) else []
        else:
            matches = [uuid for uuid in present if entry and uuid.startswith(entry)]
            if not matches and entry.startswith("MIG-"):
                matches = [entry]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


def describe() -> list[Device]:
    """Every device that NVML shows, whoever may use it."""
    with _nvml() as nvml:
        return [] if nvml is None else list(_enumerate(nvml))


def driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    with _nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def holder(uuid: str) -> str:
    """Who has leased a device, as it wrote into the lock: for messages only."""
    try:
        body = json.loads(_lock_path(uuid).read_text())
        return f"pid {body['pid']} ({body['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_leased(uuid: str) -> bool:
    """Whether some process holds a device now. Looking does not take it."""
    descriptor = _open(uuid)
    try:
        return not _flock(descriptor)
    finally:
        os.close(descriptor)


def require_idle(uuids: Sequence[str], share: float, wait_seconds: float, stop: Callable[[], None]) -> None:
    """Wait until programs outside draftmill hold no more than `share` of the memory of each leased device.

    Raises Failure, naming them, when they still do after `wait_seconds` (0: refuse at once).
    """
    until = time.monotonic() + wait_seconds
    while busy := [device for device in describe() if device.uuid in uuids and device.used > share * device.memory]:
        text = "; ".join(
            f"{device.name} {device.uuid} has {size(device.used)} in use by pids {list(device.processes) or 'unknown'}"
            for device in busy
        )
        if time.monotonic() >= until:
            raise Failure(f"{text}: end those programs, use other GPUs, or raise `jobs.busy_share` in the run file")
        say(f"{text}: waiting up to {duration(wait_seconds)} for it")
        stop()
        time.sleep(min(5.0, max(0.1, until - time.monotonic())))


def _wait(uuids: Sequence[str], count: int, stop: Callable[[], None]) -> dict[int, int]:
    reminded = time.monotonic() - REMIND_SECONDS + 1.0
    while True:
        taken = _try_locks(uuids, count)
        if taken is not None:
            return taken
        stop()
        if time.monotonic() - reminded >= REMIND_SECONDS:
            reminded = time.monotonic()
            say(f"waiting for {count} of {len(uuids)} GPUs; held by " + "; ".join(sorted({holder(u) for u in uuids})))
        time.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))


def _try_locks(uuids: Sequence[str], count: int) -> dict[int, int] | None:
    """Lock `count` devices or none: index in `uuids` -> descriptor. One process tries at a time."""
    gate = _open("gate")
    try:
        if not _flock(gate):
            return None
        taken: dict[int, int] = {}
        for index, uuid in enumerate(uuids):
            descriptor = _open(uuid)
            if not _flock(descriptor):
                os.close(descriptor)
                continue
            taken[index] = descriptor
            if len(taken) == count:
                for each in taken.values():
                    _sign(each)
                return taken
        for each in taken.values():
            os.close(each)
        return None
    finally:
        os.close(gate)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _open(name: str) -> int:
    """A raw descriptor of a lock file that every user of the machine can open."""
    path = _lock_path(name)
    if not LOCKS.is_dir():
        LOCKS.mkdir(parents=True, exist_ok=True)
        LOCKS.chmod(0o1777)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor
    except OSError as error:
        raise Failure(f"{path}: cannot open the device lock ({error.strerror}); set DRAFTMILL_LOCKS") from None


def _lock_path(name: str) -> Path:
    return LOCKS / (name.replace("/", "_") + ".lock")


def _sign(descriptor: int) -> None:
    command = " ".join(sys.argv)[:200]
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "command": command}).encode(), 0)
    os.set_inheritable(descriptor, True)


def _set_visible(value: str | None) -> None:
    if value is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = value


def _require_asleep() -> None:
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    assert not started, "CUDA was started before the lease: it would use devices that are not ours"


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, or None on a machine without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _enumerate(nvml: Any) -> Iterator[Device]:
    """Devices in PCI order; a GPU cut into MIG slices is its slices."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        slices = list(_slices(nvml, handle))
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
        for each in slices or [handle]:
            memory = nvml.nvmlDeviceGetMemoryInfo(each)
            yield Device(
                uuid=_text(nvml.nvmlDeviceGetUUID(each)),
                name=_text(nvml.nvmlDeviceGetName(each)),
                memory=int(memory.total),
                used=int(memory.used),
                capability=capability,
                processes=tuple(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(each)),
            )


def _slices(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # cards that know no MIG
        return
    for index in range(count):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # an empty place
            continue


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

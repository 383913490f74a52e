"""Is this machine able to do it? Checks that `draftmill doctor` prints, and the few that every GPU job runs first.

A check never raises for what it finds: it says ok, warning or failure, and what to do. torch is imported only by the
checks that are about torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.errors import BadInput
from pipeline import devices
from pipeline.console import say, size
from pipeline.journal import installed

PACKAGES = ("torch", "transformers", "zarr", "numcodecs", "snakemake", "pyarrow", "safetensors")

FP8_CAPABILITY = (8, 9)
BF16_CAPABILITY = (8, 0)
LOW_DISK = 2 << 30
SPEED_BYTES = 128 << 20


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table."""

    name: str
    status: Literal["ok", "warning", "failure"]
    found: str
    remedy: str = ""


def require_torch_build(lease: devices.Lease) -> None:
    """Refuse a CPU build of torch on a leased GPU.

    Raises BadInput. Told from the package's version, since torch is imported only after the lease.
    """
    build = installed("torch")
    if lease.uuids and build.endswith("+cpu"):
        raise BadInput(f"torch {build} is a CPU build on a machine with GPUs: install torch from the CUDA index")


def warn_low_disk(folder: Path) -> None:
    """Say so when little room is left where artefacts go."""
    free = _room(folder)
    if free < LOW_DISK:
        say(f"warning: only {size(free)} free at {folder}; `draftmill clean` frees caches and checkpoints")


def versions() -> Iterator[Check]:
    """Python and the packages that matter."""
    yield Check("python", "ok", platform.python_version())
    for name in PACKAGES:
        found = installed(name)
        missing = found == "none"
        yield Check(name, "failure" if missing else "ok", found, "pip install -e ." if missing else "")


def gpus(busy_share: float) -> Iterator[Check]:
    """Driver and every device: memory, capability, who uses it."""
    found = devices.describe()
    if not found:
        yield Check("gpu", "warning", "none: everything runs on the CPU", "check `nvidia-smi` if there should be one")
        return
    yield Check("driver", "ok", str(devices.driver()))
    usable = set(devices.visible())
    for device in found:
        yield _device(device, busy_share, device.uuid in usable)


def _device(device: devices.Device, busy_share: float, usable: bool) -> Check:
    major, minor = device.capability
    text = f"{device.name}, {size(device.memory)}, capability {major}.{minor}, {size(device.used)} in use"
    name = f"gpu {device.uuid[:12]}"
    if not usable:
        return Check(name, "warning", f"{text}, hidden by CUDA_VISIBLE_DEVICES", "unset it to use this GPU")
    if devices.is_leased(device.uuid):
        return Check(name, "ok", f"{text}, leased by {devices.holder(device.uuid)}")
    if device.used > busy_share * device.memory:
        pids = ", ".join(map(str, device.processes)) or "unknown"
        return Check(name, "warning", f"{text} by pids {pids}", "end those programs, or raise jobs.busy_share")
    if device.capability < BF16_CAPABILITY:
        return Check(name, "warning", f"{text}: no bfloat16", "set target.dtype and train.compute to float32")
    note = "" if device.capability >= FP8_CAPABILITY else ": no float8 products, leave train.fp8 off"
    return Check(name, "ok", text + note)


def torch_sees() -> Check:
    """torch's own view of the devices: a driver older than its CUDA shows up only here."""
    import torch

    wanted, seen = len(devices.visible()), torch.cuda.device_count()
    text = f"CUDA {torch.version.cuda}, sees {seen} of {wanted} GPUs"
    if wanted and not (seen and torch.cuda.is_available()):
        return Check("torch on gpu", "failure", text, "install a torch whose CUDA the driver supports")
    return Check("torch on gpu", "ok", text)


def selftest(lease: devices.Lease) -> Check:
    """Compile a small function and replay it as a CUDA graph: what training rests on."""
    import torch

    started = time.monotonic()
    x = torch.randn(256, 256, device=lease.torch_device)
    step = torch.compile(lambda a: torch.nn.functional.gelu(a @ a).sum(1), fullgraph=True, dynamic=False)
    step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(x)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    worst = (out - torch.nn.functional.gelu(x @ x).sum(1)).abs().max().item()
    text = f"compiled, captured and replayed in {time.monotonic() - started:.1f} s, off by {worst:.1e} at most"
    sound = worst < 1.0  # 256 sums of products whose size is about 16, TF32 or not
    return Check("compile and capture", "ok" if sound else "failure", text, "" if sound else "update driver and torch")


def memory(needed: int = 0) -> Check:
    """Main memory that is free now."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    short = free < max(needed, 2 << 30)
    return Check("memory", "warning" if short else "ok", f"{size(free)} free, {os.cpu_count()} cores")


def disk(folder: Path) -> Check:
    """Room and writing speed where artefacts go."""
    free = _room(folder)
    if free < LOW_DISK:
        return Check("disk", "failure", f"{size(free)} free at {folder}", "free some space, or move `root`")
    rate = _write_rate(_existing(folder))
    slow = rate < 100e6
    text = f"{size(free)} free at {folder}, writes {size(rate)}/s"
    return Check("disk", "warning" if slow else "ok", text, "extract will wait for this disk" if slow else "")


def guarded(name: str, check: Callable[[], Check], remedy: str) -> Check:
    """A check whose own crash is a finding, not the doctor's end."""
    try:
        return check()
    except Exception as error:
        kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
        return Check(name, "failure", f"{kind}{' '.join(str(error).split())[:200]}", remedy)


def _room(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _write_rate(folder: Path) -> float:
    path = folder / f".draftmill-speed-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        started = time.monotonic()
        with path.open("wb") as file:
            for _ in range(SPEED_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return SPEED_BYTES / (time.monotonic() - started)
    finally:
        path.unlink(missing_ok=True)

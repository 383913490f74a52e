"""`draftmill train`: train drafters from the cache, one after the other or the one named.

A drafter with `gpus: 1` is trained in this process. With more, this process leases the devices and starts one rank a
device through `torchrun`, several machines with torchrun's own flags:

    draftmill train RUN.yaml --drafter base --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29500
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from data.errors import BadInput, Failure
from data.layout import Layout
from data.settings import Run, load_run

if TYPE_CHECKING:
    from pipeline.job import Job


@click.command("train")
@click.argument("run_file", type=click.Path())
@click.option("--drafter", "name", help="Train this drafter only.")
@click.option("--profile", type=click.IntRange(min=1), help="Write a torch profiler trace of N steps.")
@click.option("--nnodes", type=click.IntRange(min=1), default=1, help="Machines that train this drafter together.")
@click.option("--node-rank", type=click.IntRange(min=0), default=0, help="Number of this machine among them.")
@click.option("--rdzv-endpoint", help="HOST:PORT of the first machine (torchrun's).")
def command(
    run_file: str, name: str | None, profile: int | None, nnodes: int, node_rank: int, rdzv_endpoint: str | None
) -> None:
    """Train drafters from the cache; resumes by itself."""
    run = load_run(run_file)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Layout.of(run).compiled.resolve()))
    if nnodes > 1 and rdzv_endpoint is None:
        raise BadInput("--nnodes needs --rdzv-endpoint HOST:PORT of the first machine")
    _require_cache(run)
    for drafter in [name] if name else run.drafters:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _rank(run, drafter, profile)
            continue
        gpus = run.drafter(drafter).gpus
        if gpus % nnodes:
            raise BadInput(f"drafters.{drafter}.gpus: {gpus} does not divide over --nnodes {nnodes}")
        if gpus == 1:
            _alone(run, drafter, profile)
        else:
            endpoint = (
                ["--rdzv-backend", "c10d", "--rdzv-endpoint", rdzv_endpoint] if rdzv_endpoint else ["--standalone"]
            )
            launch = ["--nnodes", str(nnodes), "--node-rank", str(node_rank), *endpoint]
            label = drafter if nnodes == 1 else f"{drafter}.node{node_rank}"
            _launch(run, run_file, drafter, label, gpus // nnodes, launch, profile)


def _require_cache(run: Run) -> None:
    """Refuse a cache that is not there before torch is loaded: what is in it is checked after."""
    for part in range(run.extract.parts):
        path = Layout.of_cache(run).cache_part(part)
        if not path.exists():
            raise BadInput(f"{path} does not exist: run `draftmill extract` first")


def _alone(run: Run, name: str, profile: int | None) -> None:
    from pipeline.job import job

    with job(run, "train", label=name, gpus=1) as work:
        from pipeline.training import train_drafter

        train_drafter(run, name, work, profile=profile)


def _rank(run: Run, name: str, profile: int | None) -> None:
    from pipeline.job import job

    with job(run, "train", label=name, gpus=run.drafter(name).gpus) as work:
        import torch
        import torch.distributed as dist

        from pipeline.training import train_drafter

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda = work.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(work.device)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device(work.device) if cuda else None)
        train_drafter(run, name, work, rank, world, profile)
        # Not after an error: it waits for every graph that holds a collective, and the error holds the graphs.
        dist.destroy_process_group()


def _launch(run: Run, run_file: str, name: str, label: str, ranks: int, launch: list[str], profile: int | None) -> None:
    """Lease devices and run the ranks; their exit becomes this process's. torchrun holds the lease too."""
    from pipeline.job import job

    with job(run, "train", label=label, gpus=ranks) as work:
        from pipeline.training import check

        check(run, name)
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "--nproc-per-node", str(ranks)]
        command += ["-m", "stages.cli", "train", run_file, "--drafter", name]
        command += [] if profile is None else ["--profile", str(profile)]
        environment = os.environ | work.lease.environment()
        code = _wait(subprocess.Popen(command, env=environment, pass_fds=work.lease.descriptors), work)
        if code == 0:
            return
        work.check_stop()
        raise Failure(
            f"drafter `{name}`: a rank ended with an error (torchrun exit {code}); its log lies beside {work.log}"
        )


def _wait(ranks: subprocess.Popen[bytes], work: Job) -> int:
    """Wait for torchrun, passing a request to stop on to it, with signs of life for the watchdog."""
    told = False
    while True:
        try:
            return ranks.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            work.beat()
            if work.stop_requested() and not told:
                told = True
                ranks.send_signal(signal.SIGTERM)

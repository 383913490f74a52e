"""The tiny run again and again, each time with a fault at a random moment, then the same command until it is done.

    python -m tests.soak --rounds 30 --seed 0
    python -m tests.soak --rounds 9 --fault snakemake:kill --fault stage:kill

Every round must end in the artefacts of an undisturbed run, bit for bit, with no hand-work but `--unlock` where
Snakemake itself was killed. Faults: kill -9 and signals to a stage or to Snakemake, out of memory, a full disk, a stage
that sleeps for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.journal import read_status
from tests.flow import ROOT, Flow, snakemake_server, stage_server

RUN: dict[str, Any] = {
    "name": "soak",
    "target": {"model": "tiny:0", "dtype": "float32"},
    "data": {
        "train": [{"path": str(ROOT / "data" / "prompts" / "quickstart.jsonl"), "limit": 16}],
        "validation": 0.25,
        "responses": "regenerate",
        "regenerate": {"max_new_tokens": 16, "batch_size": 4},
        "max_length": 512,
    },
    "extract": {"parts": 2, "tokens_per_batch": 1024, "codec": "bf16", "window_bytes": 200_000, "shard_bytes": 100_000},
    "train": {
        "context_tokens": 1024, "anchor_slots": 32, "anchors_per_row": 16, "batches_per_step": 1, "epochs": 3,
        "validate_every": 4, "checkpoint_every": 2, "keep_last": 2,
    },
    "drafters": {"base": {"layers": 1, "block_size": 4}},
    "eval": {
        "benchmarks": {"held": {"path": str(ROOT / "data" / "prompts" / "quickstart-eval.jsonl"), "limit": 2}},
        "max_new_tokens": 12, "batch_size": 2, "speed_prompts": 1,
    },
    "jobs": {"stall_seconds": 30.0, "retries": 1},
}  # fmt: skip

HANGS = 240.0
"""Seconds after which Snakemake is killed: a signal that comes while it selects jobs makes 9.27 wait for itself."""
NOTE_PID = "open('snakemake.pid', 'w').write(str(os.getpid()))"
SIGNALS = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "hup": signal.SIGHUP, "kill": signal.SIGKILL}
FAULTS = [
    *(f"stage:{name}" for name in SIGNALS),
    "snakemake:kill", "snakemake:term", "both:hup", "inside:memory", "inside:disk", "inside:sleep",
]  # fmt: skip


def digest(folder: Path) -> dict[str, str]:
    """Hashes of what a run has made, without what tells the time."""
    found = {}
    for pattern in (
        "tokens/*.parquet", "prompts/*.parquet", "cache/*.safetensors", "cache/part-*/shard-*.zarr/**/*",
        "drafters/*/checkpoints/*/*.safetensors", "export/*/*.safetensors", "export/*/config.json",
    ):  # fmt: skip
        for path in sorted(folder.glob(pattern)):
            # `.base.old-1` is work that a forced re-run has set aside.
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.glob("**/*.json")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        body = json.loads(path.read_text())
        if "kind" in body and "fingerprint" in body:
            found[f"{path.relative_to(folder)} fingerprint"] = body["fingerprint"]
    return found


def disturb(flow: Flow, fault: str, after: float, over: threading.Event) -> str:
    """Do `fault` after so many seconds, or as soon as there is something to do it to. Says what it did."""
    where, name = fault.split(":")
    time.sleep(after)
    while not over.wait(0.02):
        jobs = map(read_status, flow.run_folder.glob("logs/*/*.status.json"))
        pids = [job["pid"] for job in jobs if job.get("status") == "running"]
        if where == "stage" and not pids:
            continue
        snakemake = flow.folder / "snakemake.pid"
        if where in ("snakemake", "both") and not snakemake.exists():
            continue
        victims = pids[:1] if where == "stage" else [int(snakemake.read_text())]
        for pid in victims + (pids if where == "both" else []):
            try:
                os.kill(pid, SIGNALS[name])
            except ProcessLookupError:
                continue
        return f"{fault} to {victims}"
    return f"{fault}: the run was over first"


def run_bounded(flow: Flow, said: list[str], *arguments: str, **environment: str) -> int:
    """Exit code of Snakemake, which is killed when it hangs, and that is said."""

    def kill() -> None:
        said.append(f"Snakemake hung and was killed after {HANGS:.0f} s")
        os.kill(int((flow.folder / "snakemake.pid").read_text()), signal.SIGKILL)

    timer = threading.Timer(HANGS, kill)
    timer.daemon = True
    timer.start()
    try:
        return flow(*arguments, prelude=NOTE_PID, **environment).code
    finally:
        timer.cancel()


def play(flow: Flow, fault: str, after: float, stage: str) -> tuple[list[int], str]:
    """Run with a fault, then the same command until it is done. Exit codes, and what was done."""
    over, done = threading.Event(), [f"{fault} in {stage}"]
    environment = {}
    if fault.startswith("inside:"):
        environment = {
            "STAGE_FAULT": f"{fault.split(':')[1]}:{stage}:{int(after * 10) % 6}",
            "STAGE_FAULT_DONE": "fault",
        }
        thread = None
    else:
        thread = threading.Thread(target=lambda: done.__setitem__(0, disturb(flow, fault, after, over)))
        thread.start()
    codes = [run_bounded(flow, done, **environment)]
    over.set()
    if thread is not None:
        thread.join()
    while codes[-1] != 0 and len(codes) < 6:
        if codes[-1] < 0 or "LockException" in (flow.folder / ".snakemake-output").read_text():
            run_bounded(flow, done, "--unlock")
        codes.append(run_bounded(flow, done, **environment))
    return codes, "; ".join(done)


def soak(rounds: int, seed: int, folder: Path, tell: Callable[[str], None], faults: Sequence[str] = FAULTS) -> int:
    """Play all rounds, each fault once before any comes again; gives back how many ended wrong."""
    random_ = random.Random(seed)
    with snakemake_server() as snakemake, stage_server(folder) as stages:

        def fresh() -> Flow:
            # One place for all rounds: an export names its target by its path.
            shutil.rmtree(folder / "run", ignore_errors=True)
            return Flow(folder / "run", snakemake, dict(RUN), stages)

        began = time.monotonic()
        reference = fresh()
        result = reference()
        if result.code:
            raise SystemExit(f"the undisturbed run failed:\n{result.output[-3000:]}")
        seconds, wanted = time.monotonic() - began, digest(reference.run_folder)
        tell(f"reference: {len(wanted)} artefacts in {seconds:.1f} s")
        order = [fault for _ in range(-(-rounds // len(faults))) for fault in random_.sample(faults, len(faults))]
        return sum(_round(fresh, number, order[number], random_, seconds, wanted, tell) for number in range(rounds))


def _round(
    fresh: Callable[[], Flow], number: int, fault: str, random_: random.Random, seconds: float,
    wanted: dict[str, str], tell: Callable[[str], None],
) -> bool:  # fmt: skip
    flow = fresh()
    stage = random_.choice(["prepare", "regenerate", "extract", "train", "eval", "export"])
    began = time.monotonic()
    codes, text = play(flow, fault, random_.uniform(0.05, 0.6) * seconds, stage)
    have = digest(flow.run_folder)
    wrong = sorted(name for name in wanted.keys() | have.keys() if wanted.get(name) != have.get(name))
    ok = codes[-1] == 0 and not wrong
    mark, took = "ok " if ok else "BAD", time.monotonic() - began
    tell(f"round {number:2}: {mark} {text}; exits {codes}, {took:.0f} s {wrong[:5]}")
    if not ok:
        shutil.copytree(flow.folder, flow.folder.with_name(f"bad-{number:02d}"), symlinks=True)
    return not ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--fault", dest="faults", action="append", choices=FAULTS, help="only these; may be repeated")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    bad = soak(options.rounds, options.seed, folder, partial(print, flush=True), options.faults or FAULTS)
    print(f"{options.rounds - bad} of {options.rounds} rounds ended right")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

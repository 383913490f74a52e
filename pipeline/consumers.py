"""Does everybody else read an export as the trainer does? Each consumer answers in a process of its own.

Logits of one small batch are computed here, by the trainer's forward in float32, and by each consumer's own model
code; where the arithmetic is the same they are equal bit for bit. Consumers without a CPU model (vLLM, SGLang) are
asked what their configuration code makes of the files.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from data.errors import Failure
from pipeline import consumer_probe
from pipeline.drafter import Drafter
from pipeline.float8 import serve
from pipeline.head import TargetHead
from pipeline.interchange import Checkpoint, open_checkpoint
from pipeline.interchange_config import SLIDING

CONSUMERS = ("speculators", "dflash", "specforge", "autoconfig", "vllm", "sglang")
FLAT_ONLY = ("dflash", "specforge", "autoconfig", "sglang")
"""They read the flat keys of z-lab's form; speculators reads its own only, vLLM either."""
HEAD_ROWS = 4096
"""Rows of the LM head that are compared, at most."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What a consumer's process takes its number of threads from; see `one_thread`."""


@dataclass(frozen=True)
class Verdict:
    """What one consumer made of one export.

    `difference` is the largest of its logits from the trainer's, None where only the configuration was read; `problem`
    is empty when all is well; `version` is None where it is not installed.
    """

    consumer: str
    version: str | None
    difference: float | None = None
    problem: str = ""
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.version is not None and bool(self.problem)


def check_exports(
    folders: Sequence[Path], head: TargetHead | None = None, python: str = sys.executable
) -> dict[Path, list[Verdict]]:
    """Verdicts by folder, in the order of `CONSUMERS`.

    `head` embeds the blocks (None: random rows, for a target that is not at hand).
    """
    exports = [open_checkpoint(folder) for folder in folders]
    with tempfile.TemporaryDirectory() as scratch:
        cases = [Path(scratch) / f"{index}.safetensors" for index in range(len(exports))]
        expected = [make_case(export, head, case) for export, case in zip(exports, cases, strict=True)]
        verdicts: dict[Path, list[Verdict]] = {export.path: [] for export in exports}
        jobs = {name: [_job(name, e, c) for e, c in zip(exports, cases, strict=True)] for name in CONSUMERS}
        for name, answer in ask(jobs, python).items():
            for index, export in enumerate(exports):
                found = _judge(name, answer, index, export, cases[index], expected[index])
                verdicts[export.path].append(found)
    return verdicts


def _job(consumer: str, export: Checkpoint, case: Path) -> dict[str, Any]:
    kind = "logits" if reads(consumer, export) else "skip"
    return {"kind": kind, "export": str(export.path.resolve()), "case": str(case)}


def ask(jobs: Mapping[str, list[dict[str, Any]]], python: str = sys.executable) -> dict[str, Any]:
    """Every consumer's answers to its jobs, both as in `pipeline/consumer_probe.py`.

    Raises Failure when the interpreter itself ends badly; a consumer that does so only spoils its own answers.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **quiet, **dict.fromkeys(THREADS, "1")}
    with tempfile.TemporaryDirectory() as scratch:
        listing = Path(scratch) / "jobs.json"
        listing.write_text(json.dumps(jobs))
        command = [python, consumer_probe.__file__, str(listing)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch, check=False)
    if done.returncode or not done.stdout.strip():
        tail = " ".join(done.stderr.split())[-400:]
        raise Failure(f"the check's process ended with {done.returncode}: {tail}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_case(export: Checkpoint, head: TargetHead | None, path: Path) -> Tensor:
    """Write a batch for the probe; returns the trainer's logits of it, [N, B - 1, R] float32."""
    config, target = export.config, export.target
    if head is None:
        head = replace(random_head(config.vocab_size, config.hidden_size), embedding_scale=target.embedding_scale)
    head = head.to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    length, width = 3 * config.block_size + 5, config.hidden_size
    taps = torch.randn(length, len(config.target_layer_ids) * width, generator=generator)
    anchors = torch.tensor([1, config.block_size + 3, length])
    tokens = torch.randint(config.vocab_size, (len(anchors),), generator=generator)
    ids = torch.full((len(anchors), config.block_size), config.mask_token_id)
    ids[:, 0] = tokens
    rows = head.lm_head[:HEAD_ROWS].contiguous()
    save_file({"taps": taps, "anchors": anchors, "blocks": F.embedding(ids, head.embedding), "rows": rows}, path)
    drafter = export.drafter()
    if "quantization_config" in export.raw:
        serve(drafter)
    part = TargetHead(rows, rows, None, 1.0, target.logit_multiplier, target.softcap)
    with torch.no_grad(), one_thread():
        hidden = [
            block_hidden(drafter, taps[:a], block) for a, block in zip(anchors.tolist(), head.embed(ids), strict=True)
        ]
        return torch.stack([part.logits(states[1:]) for states in hidden])


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, whoever computes: with more threads the last bits depend on how a product is shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block_hidden(drafter: Drafter, taps: Tensor, block: Tensor) -> Tensor:
    """The trainer's forward of one block: taps [a, K * H] before anchor a, embedded slots [B, H] -> hidden [B, H]."""
    anchor, size = taps.shape[0], block.shape[0]
    context = drafter.project(taps[None])
    past, own = drafter.rope(torch.arange(anchor)[None]), drafter.rope(torch.arange(anchor, anchor + size)[None])
    kept = [layer.self_attn.keys_values(context, past) for layer in drafter.layers]
    distance = torch.arange(anchor, anchor + size)[:, None] - torch.arange(anchor + size)[None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sliding = drafter.config.layer_types[layer] == SLIDING
        mask = (distance >= 0) & (distance < (drafter.config.sliding_window or 0)) if sliding else None
        groups = q.shape[1] // k.shape[1]
        if mask is not None:
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=groups > 1)

    return drafter(block[None], own, kept, attend)[0]


def random_head(vocabulary: int, width: int) -> TargetHead:
    """Rows with the spread of a real embedding, the same every time."""
    rows = torch.randn(min(vocabulary, HEAD_ROWS), width, generator=torch.Generator().manual_seed(1)) / math.sqrt(width)
    rows = torch.cat((rows, rows[:1].expand(max(vocabulary - HEAD_ROWS, 0), width)))
    return TargetHead(rows, rows)


def _judge(name: str, answer: dict[str, Any], index: int, export: Checkpoint, case: Path, expected: Tensor) -> Verdict:
    version = answer["version"]
    if version is None:
        return Verdict(name, None, note="not installed")
    if not reads(name, export):
        return Verdict(name, version, note="does not read this form")
    said = answer["answers"][index]
    if "error" in said:
        return Verdict(name, version, problem=said["error"])
    if "config" in said:
        return Verdict(name, version, problem=_wrong_config(said["config"], export), note="configuration only")
    for what in ("missing_keys", "unexpected_keys"):
        if said[what]:
            return Verdict(name, version, problem=f"{len(said[what])} {what.replace('_', ' ')}: {said[what][:3]}")
    if said["drafted"] != export.config.block_size - 1:
        return Verdict(
            name, version, problem=f"drafts {said['drafted']} tokens of a block of {export.config.block_size}"
        )
    if export.target.scales() and name != "dflash":
        return Verdict(name, version, note="loads; it leaves out the target's scales, so not compared")
    if SLIDING in export.config.layer_types and name != "dflash":
        return Verdict(name, version, note="loads; its training code counts windows from the anchor, so not compared")
    difference = (load_file(f"{case}.{name}")["logits"] - expected).abs().max().item()
    problem = "" if difference == 0.0 else f"logits differ by up to {difference:.3g}"
    return Verdict(name, version, difference, problem, said.get("note", ""))


def reads(consumer: str, export: Checkpoint) -> bool:
    """Whether a consumer is meant to read a checkpoint of this form."""
    if consumer == "speculators":
        return "speculators_model_type" in export.raw and "quantization_config" not in export.raw
    return consumer not in FLAT_ONLY or "model_type" in export.raw


def _wrong_config(read: dict[str, Any], export: Checkpoint) -> str:
    """What a consumer's configuration code understood otherwise than it was meant; empty when nothing."""
    config = export.config
    want = {
        **config.record(),
        "rope_theta": config.rope_theta,
        "drafted": config.block_size - 1,
        "causal": [kind == SLIDING for kind in config.layer_types],
    }
    return "; ".join(f"{key} read as {value!r}, not {want[key]!r}" for key, value in read.items() if value != want[key])

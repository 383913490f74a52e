"""From token ids to encoded states on the device: the truncated target, the codec, and teacher data.

Shapes: B rows, T tokens (right-padded), N states kept of a batch, M teacher entries, K taps, H width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from data.codec import ArraySpec, Codec
from pipeline.head import TargetHead
from pipeline.target import Taps, Target
from pipeline.windows import Work

LOGIT_ROWS = 1024
"""States whose logits exist at once."""
KERNELS = 64
"""Kernels that one function of the target may be compiled into."""
CHUNK = 4096
"""States that compiled code encodes at once. One fixed shape: compilers handle a varying one badly or not at all."""


@dataclass(frozen=True)
class Teacher:
    """What is kept of the target's last layer: `last_hidden`, and the `top_k` likeliest tokens (0: none)."""

    last_hidden: bool = False
    top_k: int = 0

    def __bool__(self) -> bool:
        return self.last_hidden or self.top_k > 0

    def arrays(self, width: int) -> dict[str, ArraySpec]:
        """Stored arrays, one entry a taught position: post-norm bf16 states, token ids and their log-probabilities."""
        specs: dict[str, ArraySpec] = {}
        if self.last_hidden:
            specs["last_hidden"] = ArraySpec.of((width,), "uint16")
        if self.top_k:
            specs["top_k_ids"] = ArraySpec.of((self.top_k,), "int32")
            specs["top_k_logprobs"] = ArraySpec.of((self.top_k,), "float16")
        return specs


class Encoder:
    """Token ids to encoded states, on the device.

    Compiled: every decoder layer is the same compiled code with dynamic B and T, and states are encoded `CHUNK` at a
    time, so shapes cost no compilation.
    """

    def __init__(
        self, target: Target, layer_ids: Sequence[int], codec: Codec, teacher: Teacher, compiled: bool
    ) -> None:
        self.teacher, self.device = teacher, target.device
        self.codec = codec.to(target.device)
        self.taps = Taps(target, layer_ids, whole=bool(teacher))
        self.head: TargetHead | None = target.head().to(target.device, target.dtype) if teacher.top_k else None
        self.encode, self.chunk = self._encode, 0
        self._plain: list[tuple[nn.Module, str, Any]] = []
        self._limit = torch._dynamo.config.recompile_limit
        if compiled:
            torch._dynamo.config.recompile_limit = KERNELS
            for layer in self.taps.layers:
                name = "_old_forward" if hasattr(layer, "_old_forward") else "forward"  # inside a device map's wrapper
                self._plain.append((layer, name, layer.__dict__.get(name)))
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))
            self.encode, self.chunk = torch.compile(self._encode, dynamic=False), CHUNK
            self._warm_up()

    def close(self) -> None:
        """Leave the target, and torch's limit for all that is compiled, as they were."""
        torch._dynamo.config.recompile_limit = self._limit
        self.taps.close()
        for layer, name, before in self._plain:
            delattr(layer, name)
            if before is not None:
                setattr(layer, name, before)

    def _warm_up(self) -> None:
        """Compile for one row and for several; sizes that no dimension of a model has, lest they be taken for it."""
        for rows in (3, 1):
            ids = torch.zeros((rows, 80), dtype=torch.int64, device=self.device)
            index = torch.arange(37, device=self.device)
            self(ids, index, index)

    def __call__(self, ids: Tensor, kept: Tensor, taught: Tensor) -> dict[str, Tensor]:
        """Encoded arrays [N, ...], `amax` [N, K] and teacher arrays [M, ...] of ids [B, T].

        `kept` [N] and `taught` [M] are positions in the flattened batch.
        """
        tapped = self.taps(ids)
        for states in tapped:
            assert states.shape[:2] == ids.shape, f"a tap gave {tuple(states.shape)} for ids {tuple(ids.shape)}"
        with torch.inference_mode():
            return {**self._encoded(tapped, kept), **self._teach(taught)}

    def _encoded(self, tapped: list[Tensor], kept: Tensor) -> dict[str, Tensor]:
        count, size = len(kept), self.chunk or len(kept)
        pieces = []
        for index in kept.split(size):
            index = functional.pad(index, (0, size - len(index)))
            states = torch.stack([layer.flatten(0, 1).index_select(0, index) for layer in tapped], 1)
            pieces.append(self.encode(states))
        return {name: torch.cat([piece[name] for piece in pieces])[:count] for name in pieces[0]}

    def _encode(self, states: Tensor) -> dict[str, Tensor]:
        return {**self.codec.encode(states), "amax": states.abs().amax(-1).float()}

    def _teach(self, taught: Tensor) -> dict[str, Tensor]:
        if not self.teacher:
            return {}
        assert self.taps.last is not None
        last = self.taps.last.flatten(0, 1).index_select(0, taught)
        arrays = {"last_hidden": last.bfloat16().view(torch.uint16)} if self.teacher.last_hidden else {}
        if self.head is not None:
            best = [self._likeliest(self.head, rows) for rows in last.split(LOGIT_ROWS)]
            arrays["top_k_logprobs"] = torch.cat([values for values, _ in best]).half()
            arrays["top_k_ids"] = torch.cat([ids for _, ids in best]).int()
        return arrays

    def _likeliest(self, head: TargetHead, rows: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = head.logits(rows).float().log_softmax(-1).topk(self.teacher.top_k, dim=-1)
        return values, ids


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process, without waking it up."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


@torch.inference_mode()
def on_policy(target: Target, works: Sequence[Work]) -> tuple[int, int]:
    """Of the rows' supervised tokens: how many equal the target's argmax, and how many there are."""
    hits = total = 0
    for work in works:
        ids = torch.from_numpy(np.asarray(work.row.token_ids, np.int64))
        said = target.logits(ids[None])[0, :-1].argmax(-1).cpu()
        wanted = torch.from_numpy(np.asarray(work.row.supervised[1:]))
        hits += int((said[wanted] == ids[1:][wanted]).sum())
        total += int(wanted.sum())
    return hits, total


def state_sample(target: Target, layer_ids: Sequence[int], works: Sequence[Work]) -> Tensor:
    """States [N, K, H] on the CPU, of each row on its own: what fitted codecs are fitted to."""
    taken = []
    for work in works:
        ids = torch.from_numpy(np.asarray(work.row.token_ids[: work.run], np.int64))
        taken.append(target.tap(ids[None], layer_ids)[0, : work.row.states].cpu())
    return torch.cat(taken)

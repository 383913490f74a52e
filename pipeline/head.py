"""What a drafter borrows from its target: the token embedding and the LM head, both frozen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from data.errors import BadInput, Failure
from data.layout import Layout
from data.lock import locked
from data.manifest import file_record, publish, read_manifest, understood
from data.part import AGAIN
from pipeline.tensor_file import save_tensors


@dataclass(frozen=True)
class TargetHead:
    """Frozen ends of a target: V tokens, width H.

    `embedding` [V, H]; `lm_head` [V, H], the same tensor when tied; `bias` [V] or None. `embedding_scale` multiplies
    looked-up rows, `logit_multiplier` the logits, `softcap` c bounds them to c * tanh(logits / c).
    """

    embedding: Tensor
    lm_head: Tensor
    bias: Tensor | None = None
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    softcap: float | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Rows for token ids: [...] -> [..., H]."""
        rows = F.embedding(ids, self.embedding)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] post-norm states -> [..., V]."""
        logits = F.linear(hidden, self.lm_head, self.bias)
        if self.logit_multiplier != 1.0:
            logits = logits * self.logit_multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def scales(self) -> dict[str, float | None]:
        """The numbers beside the tensors, by name."""
        return {name: getattr(self, name) for name in ("embedding_scale", "logit_multiplier", "softcap")}

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHead:
        embedding = self.embedding.to(device, dtype)
        tied = self.lm_head.data_ptr() == self.embedding.data_ptr()
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(
            self, embedding=embedding, lm_head=embedding if tied else self.lm_head.to(device, dtype), bias=bias
        )


def save_head(head: TargetHead, path: Path) -> None:
    """Write `head.safetensors`; a tied head is stored once."""
    tensors = {"embedding": head.embedding.contiguous()}
    if head.lm_head.data_ptr() != head.embedding.data_ptr():
        tensors["lm_head"] = head.lm_head.contiguous()
    if head.bias is not None:
        tensors["bias"] = head.bias.contiguous()
    save_tensors(tensors, path, metadata={"scales": json.dumps(head.scales())})


def head_damage(layout: Layout, identity: Mapping[str, Any], fast: bool = False) -> str | None:
    """What is wrong with the head of a cache, None when nothing is: every byte is read, or with `fast` its size.

    `identity` are fields that its manifest must have: the target that it is for.
    """
    about = layout.head.with_suffix(".json")
    try:
        made = read_manifest(about, "head")
        with understood(about, AGAIN):
            wanted = made["files"][0]
            size = wanted["bytes"]
    except BadInput:
        return f"{about} is missing or damaged"
    if other := [field for field, value in identity.items() if made.get(field) != value]:
        return f"{layout.head} is that of another {other[0]}"
    if not layout.head.exists():
        return f"{layout.head} is gone"
    if layout.head.stat().st_size != size:
        return f"{layout.head} has {layout.head.stat().st_size} bytes, its manifest says {size}"
    if not fast and file_record(layout.head, layout.cache) != wanted:
        return f"{layout.head} has another crc32c than its manifest says"
    return None


def publish_head(layout: Layout, identity: Mapping[str, Any], make: Callable[[], TargetHead]) -> None:
    """Write the head that `make` gives, and its manifest, unless they are there, whole and of `identity`.

    Safe among parts. Raises Failure when the disk does not take it.
    """
    with locked(layout.cache / ".head.lock"):
        if head_damage(layout, identity) is None:
            return
        head = make()
        temporary = layout.head.with_name(".head.tmp")
        try:
            save_head(head, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, layout.head)
            about = {**identity, "files": [file_record(layout.head, layout.cache)]}
            publish(layout.head.with_suffix(".json"), "head", about)
        except (OSError, SafetensorError) as error:
            raise Failure(
                f"{layout.head}: cannot write ({error}): free some space and run the same command again"
            ) from None


def load_head(path: Path) -> TargetHead:
    """Read `head.safetensors` onto the CPU.

    Raises BadInput when the file is missing or is not one of ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            scales = json.loads((file.metadata() or {})["scales"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        embedding = tensors["embedding"]
        return TargetHead(embedding, tensors.get("lm_head", embedding), tensors.get("bias"), **scales)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: no usable target head ({error}): {AGAIN}") from None

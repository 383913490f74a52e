"""What a codec is: how hidden states become stored bytes and come back.

A codec is torch code of static shapes: it encodes on the device, before states are copied to the host, and decodes
inside the training step. It never waits for the device, compiles without graph breaks and can be captured in a CUDA
graph. Shapes: T states (positions), K tapped layers, H width.

    codec = make_codec("fp8", layers=5, width=4096)
    arrays = codec.encode(states)                  # {"hidden": uint8 [T, K, H], "scale": float32 [T, K]}
    states = codec.decode(arrays, taps=(0, 2, 4))  # bf16 [T, 3, H]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

TINY = 1e-30
"""Least magnitude that a scale is made from, so that an all-zero state divides by something."""


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: `shape` per state, dtype on disk, and its exact counterpart in torch."""

    shape: tuple[int, ...]
    dtype: np.dtype
    torch_dtype: torch.dtype

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str) -> Self:
        return cls(tuple(shape), np.dtype(dtype), getattr(torch, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes a state."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Codec:
    """States [T, K, H] to stored arrays and back.

    `tables` are constants that were fitted to a sample of states, each [K, ...]. They must lie on the device that
    encodes or decodes: `codec.to(device)`.
    """

    name: ClassVar[str]
    fitted: ClassVar[bool] = False
    """True when `make_codec` needs a sample of states."""
    decoded: ClassVar[torch.dtype] = torch.bfloat16
    error: ClassVar[float]
    """Largest relative L2 error of a token's state at a layer that `decode(encode(bf16 states))` may show."""

    layers: int
    width: int
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def fit(cls, layers: int, width: int, sample: Tensor | None) -> Self:
        """A codec whose tables suit `sample` [T, K, H]."""
        return cls(layers, width)

    @classmethod
    def sample_states(cls, width: int) -> int:
        """States that a sample for `fit` should hold."""
        return 8192

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tables: Mapping[str, Tensor]) -> Self:
        """The codec that `record()` described."""
        return cls(record["layers"], record["width"], dict(tables))

    def arrays(self) -> dict[str, ArraySpec]:
        """What is stored, by array name; every array has one entry a state on its first axis."""
        raise NotImplementedError

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        """Stored arrays of finite `states` [T, K, H], on their device."""
        raise NotImplementedError

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def decode(self, arrays: Mapping[str, Tensor], taps: Sequence[int] | None = None) -> Tensor:
        """States [T, K, H] in `decoded` dtype; `taps` picks layers by their index in the cache, [T, len(taps), H]."""
        if taps is None:
            return self._decode(arrays, self.tables)
        picked = {name: torch.stack([array[:, tap] for tap in taps], 1) for name, array in arrays.items()}
        return self._decode(picked, {name: torch.stack([t[tap] for tap in taps]) for name, t in self.tables.items()})

    def to(self, device: torch.device | str) -> Self:
        """The same codec with its tables on `device`. Call it before warm-up and capture."""
        return replace(self, tables={name: table.to(device) for name, table in self.tables.items()})

    def bytes_per_state(self) -> int:
        """Stored bytes of one position, all layers."""
        return sum(spec.nbytes for spec in self.arrays().values())

    def record(self) -> dict[str, Any]:
        """What a manifest says of the codec; `codec_from_record` needs its tables beside it."""
        tables = {name: _digest(table) for name, table in self.tables.items()}
        return {"name": self.name, "layers": self.layers, "width": self.width, "tables": tables}


def _digest(table: Tensor) -> str:
    return hashlib.sha256(table.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()[:32]


def need(sample: Tensor | None, name: str) -> Tensor:
    if sample is None:
        raise ValueError(f"codec {name} is fitted: it needs a sample of states")
    return sample


def loud_channels(sample: Tensor, count: int) -> Tensor:
    """Channels of largest rms over `sample` [T, K, H], ascending: int64 [K, count]."""
    energy = torch.stack([layer.float().square().mean(0) for layer in sample.unbind(1)])
    return energy.topk(count, dim=-1).indices.sort(-1).values.cpu()


def upper_bf16(scale: Tensor) -> Tensor:
    """Smallest bf16 number not below positive float32 `scale`, as float32.

    By its bits: compilers may skip a rounding that is undone at once.
    """
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def pack_bf16(scale: Tensor) -> Tensor:
    """Upper half of float32 numbers: uint16, exact for what `upper_bf16` gives."""
    return (scale.view(torch.int32) >> 16).to(torch.int16).view(torch.uint16)


def unpack_bf16(bits: Tensor) -> Tensor:
    """The inverse of `pack_bf16`: float32."""
    return (bits.view(torch.int16).int() << 16).view(torch.float32)

"""Codecs: how hidden states become stored bytes and come back.

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

    def bits_per_value(self) -> float:
        return 8 * self.bytes_per_state() / (self.layers * self.width)

    def record(self) -> dict[str, Any]:
        """What a manifest says of the codec; `codec_from_record` needs its tables beside it."""
        tables = {name: _digest(table) for name, table in self.tables.items()}
        return {"name": self.name, "layers": self.layers, "width": self.width, "tables": tables}


@dataclass(frozen=True, eq=False)
class Float32(Codec):
    """Nothing lost: for oracles and tests."""

    name: ClassVar[str] = "float32"
    decoded: ClassVar[torch.dtype] = torch.float32
    error: ClassVar[float] = 0.0

    def arrays(self) -> dict[str, ArraySpec]:
        return {"hidden": ArraySpec.of((self.layers, self.width), "float32")}

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        return {"hidden": states.float()}

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        return arrays["hidden"].clone()


@dataclass(frozen=True, eq=False)
class Bf16(Codec):
    """What a bf16 target says, bit for bit; the disk names it uint16, because Zarr has no bfloat16 of its own."""

    name: ClassVar[str] = "bf16"
    error: ClassVar[float] = 0.0

    def arrays(self) -> dict[str, ArraySpec]:
        return {"hidden": ArraySpec.of((self.layers, self.width), "uint16")}

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        return {"hidden": states.bfloat16().view(torch.uint16)}

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        return arrays["hidden"].view(torch.bfloat16).clone()


@dataclass(frozen=True, eq=False)
class Fp8(Codec):
    """Float8 e4m3 with one float32 scale a token and layer.

    Without the scale the few channels that carry the energy overflow (KL 0.54 on SmolLM2).
    """

    name: ClassVar[str] = "fp8"
    error: ClassVar[float] = 0.045

    def arrays(self) -> dict[str, ArraySpec]:
        return {
            "hidden": ArraySpec.of((self.layers, self.width), "uint8"),
            "scale": ArraySpec.of((self.layers,), "float32"),
        }

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        values = states.float()
        scale = values.abs().amax(-1).clamp_min(TINY) / torch.finfo(torch.float8_e4m3fn).max
        return {
            "hidden": (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8),
            "scale": scale,
        }

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        values = arrays["hidden"].view(torch.float8_e4m3fn).float()
        return (values * arrays["scale"].unsqueeze(-1)).bfloat16()


@dataclass(frozen=True, eq=False)
class Int8Outlier(Codec):
    """Int8 with one 2-byte scale a token and layer, beside `OUTLIERS` fixed channels a layer that stay bf16.

    A bf16 channel puts its low byte where its int8 would be and its high byte into `outlier`, so that a state takes
    width + OUTLIERS + 2 bytes a layer.
    """

    OUTLIERS: ClassVar[int] = 4
    name: ClassVar[str] = "int8-outlier"
    fitted: ClassVar[bool] = True
    error: ClassVar[float] = 0.04

    @classmethod
    def fit(cls, layers: int, width: int, sample: Tensor | None) -> Self:
        return cls(layers, width, {"channels": loud_channels(need(sample, cls.name), cls.OUTLIERS)})

    def arrays(self) -> dict[str, ArraySpec]:
        return {
            "hidden": ArraySpec.of((self.layers, self.width), "uint8"),
            "outlier": ArraySpec.of((self.layers, self.OUTLIERS), "uint8"),
            "scale": ArraySpec.of((self.layers,), "uint16"),
        }

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        channels = self.tables["channels"].expand(len(states), -1, -1)
        loud = states.gather(-1, channels).bfloat16().view(torch.int16).int()
        values = states.float().scatter(-1, channels, 0.0)
        scale = upper_bf16(values.abs().amax(-1).clamp_min(TINY) / 127)
        codes = (values / scale.unsqueeze(-1)).round().clamp(-127, 127).int()
        return {
            "hidden": codes.scatter(-1, channels, loud & 0xFF).to(torch.uint8),
            "outlier": ((loud >> 8) & 0xFF).to(torch.uint8),
            "scale": pack_bf16(scale),
        }

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        hidden, channels = arrays["hidden"], tables["channels"].expand(len(arrays["hidden"]), -1, -1)
        scale = unpack_bf16(arrays["scale"])
        values = (hidden.view(torch.int8).float() * scale.unsqueeze(-1)).bfloat16()
        loud = (arrays["outlier"].int() << 8) | hidden.gather(-1, channels).int()
        return values.scatter(-1, channels, loud.to(torch.int16).view(torch.bfloat16))

    def record(self) -> dict[str, Any]:
        return {**super().record(), "channels": self.tables["channels"].tolist()}


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float32, Bf16, Fp8, Int8Outlier)}


def make_codec(name: str, layers: int, width: int, sample: Tensor | None = None) -> Codec:
    """A codec by name; `sample` [T, K, H] is needed by fitted ones (`CODECS[name].fitted`)."""
    return CODECS[name].fit(layers, width, sample)


def codec_from_record(record: Mapping[str, Any], tables: Mapping[str, Tensor] | None = None) -> Codec:
    """The codec that `record` describes, with the `tables` it was stored with.

    Raises ValueError when the tables are not the ones that the record was made with.
    """
    codec = CODECS[record["name"]](record["layers"], record["width"], dict(tables or {}))
    if codec.record() != dict(record):
        raise ValueError(f"tables of codec {record['name']} do not fit its record: {codec.record()} != {dict(record)}")
    return codec


def _digest(table: Tensor) -> str:
    return hashlib.sha256(table.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:32]


def need(sample: Tensor | None, name: str) -> Tensor:
    if sample is None:
        raise ValueError(f"codec {name} is fitted: it needs a sample of states")
    return sample


def loud_channels(sample: Tensor, count: int) -> Tensor:
    """Channels of largest rms over `sample` [T, K, H], ascending: int64 [K, count]."""
    return sample.float().square().mean(0).topk(count, dim=-1).indices.sort(-1).values.cpu()


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

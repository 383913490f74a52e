"""The codecs by name; `data/coding.py` says what a codec is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from data.coding import TINY, ArraySpec, Codec, loud_channels, need, pack_bf16, unpack_bf16, upper_bf16
from data.klt import Klt4, Klt5, Klt6

__all__ = ["CODECS", "ArraySpec", "Codec", "codec_from_record", "make_codec"]


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


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float32, Bf16, Fp8, Int8Outlier, Klt6, Klt5, Klt4)}


def make_codec(name: str, layers: int, width: int, sample: Tensor | None = None) -> Codec:
    """A codec by name; `sample` [T, K, H] is needed by fitted ones (`CODECS[name].fitted`)."""
    return CODECS[name].fit(layers, width, sample)


def codec_from_record(record: Mapping[str, Any], tables: Mapping[str, Tensor] | None = None) -> Codec:
    """The codec that `record` describes, with the `tables` it was stored with.

    Raises ValueError when the tables are not the ones that the record was made with.
    """
    codec = CODECS[record["name"]].from_record(record, tables or {})
    if codec.record() != dict(record):
        raise ValueError(f"tables of codec {record['name']} do not fit its record: {codec.record()} != {dict(record)}")
    return codec

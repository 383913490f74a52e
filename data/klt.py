"""Fewer bits a value: a rotation into each layer's own basis, then as many bits as a direction's energy deserves.

Channels of the residual stream are correlated. Their Karhunen-Loève basis (eigenvectors of the second moments of a
sample of states) packs most energy into few directions, so that at equal error 0.6 to 1.2 bits a value are saved
(SmolLM2). Directions are taken in groups of 32, loudest first. A group has a number of bits, the same for all tokens
and layers, and a scale of its own for each token and layer, its largest magnitude: nothing is ever clipped, because
tails matter. A few channels of huge energy stay out of it all, as bf16.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from data.coding import TINY, ArraySpec, Codec, loud_channels, need, pack_bf16, unpack_bf16, upper_bf16
from data.errors import BadInput

GROUP = 32
"""Directions that share a number of bits and a scale."""
LEAST, MOST = 2, 8
"""Bits a direction."""
STEPS = 16
"""Group scales an octave: 255 of them reach 16 octaves below the token's largest."""


@dataclass(frozen=True, eq=False)
class Klt(Codec):
    """Rotated states at `BUDGET` bits a value, scales and outliers included (more when width is below 512)."""

    OUTLIERS: ClassVar[int] = 4
    BUDGET: ClassVar[float]
    fitted: ClassVar[bool] = True

    bits: tuple[int, ...] = ()
    """Bits of each group, descending; empty before the fit."""

    @property
    def groups(self) -> int:
        return self.width // GROUP

    @property
    def total_bits(self) -> int:
        """Sum of `bits`, known before the fit."""
        scales = (16 * self.OUTLIERS + 16) / max(self.width, 512) + 8 / GROUP
        return max(int((self.BUDGET - scales) * self.groups), LEAST * self.groups)

    @classmethod
    def sample_states(cls, width: int) -> int:
        return min(16 * width, 1 << 16)

    @classmethod
    def fit(cls, layers: int, width: int, sample: Tensor | None) -> Self:
        """Rotations from three quarters of the sample, bits from the rest, which they have not seen."""
        if width % GROUP:
            raise BadInput(
                f"extract.codec: {cls.name} needs a target whose width {GROUP} divides, not {width}; choose fp8"
            )
        sample = need(sample, cls.name)
        channels = loud_channels(sample, cls.OUTLIERS)
        total = cls(layers, width).total_bits
        rotations, energies = [], []
        for layer in range(layers):
            rotation, energy = basis(sample[:, layer], channels[layer])
            rotations.append(rotation)
            energies.append(energy)
        tables = {"channels": channels, "rotation": torch.stack(rotations)}
        return cls(layers, width, tables, spread_bits(torch.stack(energies), total))

    def arrays(self) -> dict[str, ArraySpec]:
        return {
            "hidden": ArraySpec.of((self.layers, self.total_bits * GROUP // 8), "uint8"),
            "scale": ArraySpec.of((self.layers, self.groups), "uint8"),
            "peak": ArraySpec.of((self.layers,), "uint16"),
            "outlier": ArraySpec.of((self.layers, self.OUTLIERS), "uint16"),
        }

    def encode(self, states: Tensor) -> dict[str, Tensor]:
        rotation = self.tables["rotation"]
        if states.shape[1:] != (self.layers, self.width) or rotation.shape != (self.layers, self.width, self.width):
            # Also tells a compiler with dynamic shapes that the number of states alone varies.
            raise ValueError(f"states {list(states.shape)} or rotation {list(rotation.shape)} do not fit {self.name}")
        channels = self.tables["channels"].expand(len(states), -1, -1)
        quiet = states.scatter(-1, channels, 0.0)
        groups = rotate(quiet, rotation).unflatten(-1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        peak = upper_bf16(largest.amax(-1).clamp_min(TINY))
        scale = (255 + torch.ceil(STEPS * torch.log2(largest / peak.unsqueeze(-1)))).clamp(0, 255).to(torch.uint8)
        unit = groups / scale_of(scale, peak).clamp_min(TINY).unsqueeze(-1)
        return {
            "hidden": torch.cat([pack(unit[:, :, first:last], bits) for first, last, bits in self._runs()], -1),
            "scale": scale,
            "peak": pack_bf16(peak),
            "outlier": states.gather(-1, channels).bfloat16().view(torch.uint16),
        }

    def _decode(self, arrays: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
        hidden, at, pieces = arrays["hidden"], 0, []
        for first, last, bits in self._runs():
            size = (last - first) * bits * GROUP // 8
            pieces.append(unpack(hidden[:, :, at : at + size], bits))
            at += size
        scale = scale_of(arrays["scale"], unpack_bf16(arrays["peak"]))
        quiet = rotate_back((torch.cat(pieces, 2) * scale.unsqueeze(-1)).flatten(2), tables["rotation"])
        channels = tables["channels"].expand(len(hidden), -1, -1)
        return quiet.scatter(-1, channels, arrays["outlier"].view(torch.bfloat16))

    def _runs(self) -> list[tuple[int, int, int]]:
        """(first group, one past the last, bits) of each run of groups with equal bits."""
        edges = [i for i in range(1, self.groups) if self.bits[i] != self.bits[i - 1]]
        firsts = [0, *edges]
        return [(a, b, self.bits[a]) for a, b in zip(firsts, [*edges, self.groups], strict=True)]

    def record(self) -> dict[str, Any]:
        return {**super().record(), "channels": self.tables["channels"].tolist(), "bits": list(self.bits)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tables: Mapping[str, Tensor]) -> Self:
        return cls(record["layers"], record["width"], dict(tables), tuple(record["bits"]))


@dataclass(frozen=True, eq=False)
class Klt6(Klt):
    name: ClassVar[str] = "klt6"
    BUDGET: ClassVar[float] = 6.25
    error: ClassVar[float] = 0.05


@dataclass(frozen=True, eq=False)
class Klt5(Klt):
    name: ClassVar[str] = "klt5"
    BUDGET: ClassVar[float] = 4.8
    error: ClassVar[float] = 0.12


@dataclass(frozen=True, eq=False)
class Klt4(Klt):
    name: ClassVar[str] = "klt4"
    BUDGET: ClassVar[float] = 3.8
    error: ClassVar[float] = 0.3


def basis(sample: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation bf16 [H, H] and group energies [groups] of one layer's states [T, H], `channels` left out, on the CPU.

    Three quarters of the states shape the rotation. Energies are mean squares of the groups' largest magnitudes over
    the rest, which it has not seen. All tokens weigh equally. A GPU is used where there is one: 4096 channels take it
    seconds, a CPU a minute.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else sample.device
    quiet = sample.to(device).float().index_fill(1, channels.to(device), 0.0)
    quiet = quiet / quiet.square().mean(-1, keepdim=True).sqrt().clamp_min(TINY)
    cut = len(quiet) * 3 // 4
    rotation = torch.linalg.eigh(quiet[:cut].T @ quiet[:cut]).eigenvectors.flip(1)
    groups = (quiet[cut:] @ rotation).unflatten(1, (-1, GROUP))
    return rotation.bfloat16().cpu(), groups.abs().amax(-1).square().mean(0).cpu()


def spread_bits(energies: Tensor, total: int) -> tuple[int, ...]:
    """Bits a group, descending, `total` in all, that minimise the error summed over layers.

    `energies` [K, groups] are mean squares of the groups' largest magnitudes. A bit quarters a group's error. Layers
    weigh equally: each is divided by its geometric mean.
    """
    weight = (energies / energies.clamp_min(TINY).log().mean(1, keepdim=True).exp()).mean(0)
    weight = weight.flip(0).cummax(0).values.flip(0).tolist()
    bits = [LEAST] * len(weight)
    heap = [(-value, group) for group, value in enumerate(weight)]
    for _ in range(total - sum(bits)):
        error, group = heapq.heappop(heap)
        bits[group] += 1
        heapq.heappush(heap, (error / 4 if bits[group] < MOST else 0.0, group))
    return tuple(bits)


def scale_of(code: Tensor, peak: Tensor) -> Tensor:
    """Scales [T, K, groups] from their codes and the tokens' peaks [T, K]; code 0 is scale 0."""
    scale = torch.exp2((code.float() - 255) / STEPS) * peak.unsqueeze(-1)
    return torch.where(code == 0, 0.0, scale)


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Coefficients float32 [T, K, H] of states in the bases `rotation` [K, H, H], whose columns are directions."""
    return _batched(states, rotation).float()


def rotate_back(coefficients: Tensor, rotation: Tensor) -> Tensor:
    """The inverse: bf16 states [T, K, H]."""
    return _batched(coefficients, rotation.transpose(1, 2)).bfloat16()


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """[T, K, A] times [K, A, B]: bf16 products on a GPU, whose rounding lies far below the quantiser's."""
    kind = torch.bfloat16 if left.is_cuda else torch.float32
    return torch.bmm(left.to(kind).transpose(0, 1), right.to(kind)).transpose(0, 1)


def fields(bits: int) -> list[int]:
    """Widths, of 4, 2 and 1 bits, that a code of `bits` is stored in, lowest first."""
    return [4] * (bits // 4) + [width for width in (2, 1) if bits & width]


def pack(unit: Tensor, bits: int) -> Tensor:
    """Values in [-1, 1], [T, K, groups, 32], as codes of `bits` bits: uint8 [T, K, groups * 4 * bits].

    Field by field; a field of f bits of a group fills 4 f bytes, whose parts belong to values 4 f apart.
    """
    codes = ((unit + 1) * 2 ** (bits - 1)).floor().clamp(0, 2**bits - 1).int()
    packed, shift = [], 0
    for width in fields(bits):
        part = ((codes >> shift) & (2**width - 1)).unflatten(-1, (8 // width, 4 * width))
        packed.append(_joined(part, width).flatten(2))
        shift += width
    return torch.cat(packed, -1)


def _joined(part: Tensor, width: int) -> Tensor:
    """Fields [..., 8 / width, bytes] side by side in bytes: uint8 [..., bytes]."""
    whole = part[..., 0, :]
    for i in range(1, 8 // width):
        whole = whole | (part[..., i, :] << (i * width))
    return whole.to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`, at the middle of each code's cell: float32 [T, K, groups, 32]."""
    groups = packed.shape[-1] // (4 * bits)
    codes, at, shift = 0, 0, 0
    for width in fields(bits):
        size = groups * 4 * width
        part = packed[:, :, at : at + size].unflatten(-1, (groups, 4 * width))
        spread = torch.cat([(part >> (i * width)) & (2**width - 1) for i in range(8 // width)], -1)
        codes = codes + (spread.int() << shift)
        at, shift = at + size, shift + width
    return (codes.float() + 0.5) * 2.0 ** (1 - bits) - 1

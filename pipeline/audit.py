"""A part of the cache judged by its content: shapes, offsets, finite states, and states that the target still gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data.anchors import eligible
from data.codec import ArraySpec, Codec
from data.layout import Layout, part_name
from data.part import load_codec, rows_path
from data.reader import ShardReader
from data.store import open_store
from pipeline.target import Target

BLOCK = 4096
"""States decoded at once."""
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative L2 distance of a token's state at a layer to a fresh eager forward pass of its row alone, before the
codec's own error. Batching alone moves bf16 states by up to 1 %."""


@dataclass(frozen=True)
class Row:
    """A row of a shard: `length` tokens, `states` states, and where both begin."""

    row_id: str
    length: int
    states: int
    token_start: int
    state_start: int


class PartAudit:
    """Reads one part; every method yields what is wrong, one line each."""

    def __init__(self, layout: Layout, part: int, manifest: Mapping[str, Any], device: str) -> None:
        self.part, self.manifest, self.device = part, manifest, device
        self.codec: Codec = load_codec(layout, manifest["codec"]).to(device)
        self.store = open_store(layout, manifest["store"])
        self.teacher = {name: ArraySpec.of(shape, dtype) for name, (shape, dtype) in manifest["teacher"].items()}
        table = pq.read_table(rows_path(layout, part))
        self.table = {name: table[name].to_pylist() for name in ("row_id", "length", "states", "eligible")}
        self.layers = list(manifest["layer_ids"])

    def shards(self) -> Iterator[tuple[str, ShardReader, list[Row]]]:
        """Shards with their rows."""
        first = 0
        for shard in self.manifest["shards"]:
            relative = f"{part_name(self.part)}/{shard['name']}"
            counts = shard["counts"]
            specs = {name: (spec, counts["states"]) for name, spec in self.codec.arrays().items()}
            specs |= {name: (spec, counts["teacher"]) for name, spec in self.teacher.items()}
            compressor = self.manifest["compressor"]
            rows = self._rows(first, counts["rows"])
            files = shard["files"]
            yield relative, ShardReader(self.store, relative, files, specs, compressor, compressor == "none"), rows
            first += counts["rows"]

    def _rows(self, first: int, count: int) -> list[Row]:
        rows = []
        token = state = 0
        for i in range(first, first + count):
            length, states = self.table["length"][i], self.table["states"][i]
            rows.append(Row(self.table["row_id"][i], length, states, token, state))
            token, state = token + length, state + states
        return rows

    def shapes(self) -> Iterator[str]:
        """Arrays and counts that do not fit the manifest, and rows whose states do not fit their supervised mask."""
        counts = self.manifest["counts"]
        for name, column in (("rows", "row_id"), ("tokens", "length"), ("states", "states")):
            values = self.table[column]
            have = len(values) if name == "rows" else sum(values)
            if have != counts[name]:
                yield f"part {self.part}: the table counts {have} {name}, the manifest {counts[name]}"
        for (relative, reader, rows), shard in zip(self.shards(), self.manifest["shards"], strict=True):
            for name, spec in self.codec.arrays().items():
                want = (shard["counts"]["states"], *spec.shape)
                if tuple(reader.arrays[name].shape) != want:
                    yield f"{relative}/{name} has shape {tuple(reader.arrays[name].shape)}, expected {want}"
            tokens = sum(row.length for row in rows)
            if len(reader.arrays["token_ids"]) != tokens or tokens != shard["counts"]["tokens"]:
                yield f"{relative}: {len(reader.arrays['token_ids'])} token ids for {tokens} tokens"
                continue
            for row in rows:
                mask = reader.arrays["supervised"][row.token_start : row.token_start + row.length] > 0
                anchors = eligible(mask)
                if row.states != (int(anchors[-1]) if len(anchors) else 0):
                    yield f"{relative}: row {row.row_id} has {row.states} states, its mask asks for other"

    def values(self) -> Iterator[str]:
        """States that are not finite or all zero, by row."""
        for relative, reader, rows in self.shards():
            total = sum(row.states for row in rows)
            starts = np.array([row.state_start for row in rows])
            for begin in range(0, total, BLOCK):
                amax = self.decode(reader, begin, min(begin + BLOCK, total)).abs().amax(-1)
                bad = torch.nonzero(~(amax.isfinite() & (amax > 0)))
                if len(bad):
                    at, tap = bad[0].tolist()
                    row = rows[int(np.searchsorted(starts, begin + at, "right")) - 1]
                    what = "all zero" if amax[at, tap] == 0 else "not finite"
                    yield (
                        f"{relative}: row {row.row_id}: state {begin + at - row.state_start} after layer "
                        f"{self.layers[tap]} is {what} ({len(bad)} such within {BLOCK} states)"
                    )

    def decode(self, reader: ShardReader, start: int, stop: int) -> Tensor:
        """Stored states [stop - start, K, H] as the training step sees them, float32."""
        arrays = {}
        for name, spec in self.codec.arrays().items():
            out = np.empty((stop - start, *spec.shape), spec.dtype)
            reader.copy(name, start, stop, out)
            arrays[name] = torch.from_numpy(out).to(self.device)
        return self.codec.decode(arrays).float()

    def against(self, target: Target, count: int) -> Iterator[tuple[float, str | None]]:
        """For `count` rows, evenly spread: largest relative L2 error against a fresh forward pass, and the complaint
        when it is beyond `limit`."""
        every = max(1, sum(states > 0 for states in self.table["states"]) // count)
        seen = 0
        for relative, reader, rows in self.shards():
            for row in rows:
                seen += row.states > 0
                if row.states == 0 or (seen - 1) % every:
                    continue
                ids = np.array(reader.arrays["token_ids"][row.token_start : row.token_start + row.states], np.int64)
                fresh = target.tap(torch.from_numpy(ids)[None], self.layers)[0].to(self.device)
                stored = self.decode(reader, row.state_start, row.state_start + row.states)
                error, allowed = relative_error(stored, fresh), limit(target.dtype, self.codec, fresh)
                beyond = bool((error > allowed).any())
                yield float(error.max()), self._complaint(relative, row, error, allowed) if beyond else None

    def _complaint(self, relative: str, row: Row, error: Tensor, allowed: Tensor) -> str:
        worst = int((error / allowed).argmax())
        at, tap = divmod(worst, error.shape[1])
        return (
            f"{relative}: row {row.row_id}: state {at} after layer {self.layers[tap]} is {error[at, tap]:.2g} away "
            f"(relative L2) from a fresh forward pass; the limit is {allowed[at, tap]:.2g}"
        )


def limit(dtype: torch.dtype, codec: Codec, fresh: Tensor) -> Tensor:
    """Largest relative L2 errors [T, K] of stored states that are `fresh` [T, K, H] anew, of a target in `dtype`.

    A codec's stated error is that of ordinary states. One with heavy tails may lose more: as much as it loses of the
    fresh state, and a quarter more, since the stored one was rounded elsewhere.
    """
    rounding = 2.0**-8 if codec.decoded == torch.bfloat16 and dtype != torch.bfloat16 else 0.0
    lost = relative_error(codec.decode(codec.encode(fresh)).float(), fresh)
    return LIMITS[dtype] + rounding + (1.25 * lost).clamp_min(codec.error)


def relative_error(states: Tensor, fresh: Tensor) -> Tensor:
    """Relative L2 error [T, K] of states [T, K, H]."""
    fresh = fresh.float()
    return (states - fresh).norm(dim=-1) / fresh.norm(dim=-1)

"""The hidden-state cache: what training reads, and the manifests that say what it is.

A part is `part-0003.json` (its manifest, written last), `part-0003/rows.parquet` (one line a row, in the order of the
shards) and `part-0003/shard-*.zarr`. `codec.safetensors` holds the constants of a fitted codec, one for all parts.
`Cache` opens all parts at once; rows are numbered across parts, in part order, then hash order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from data.codec import ArraySpec, Codec
from data.errors import BadInput
from data.layout import Layout, part_name
from data.manifest import fingerprint, read_manifest, require_equal, understood
from data.part import AGAIN, COMMON, load_codec, read_rows
from data.provenance import refuse, stale_part
from data.reader import ShardReader, remake
from data.settings import Run
from data.store import Bucket, Folder, open_store
from data.tokens import outside

OPEN_SHARDS = 4096
"""Shards kept open at once; each takes a handful of memory maps, of which Linux allows 65,530 a process."""
OPEN_BYTES = 4 << 30
"""Bytes of the shards kept open: mapped pages count as the process's memory, however little it owns of them."""


@dataclass(frozen=True)
class RowTable:
    """Rows of all parts; every array is [rows].

    `shard` numbers shards across parts; `*_start` are offsets inside the shard; `teacher` counts teacher entries,
    `eligible` anchors that a block may start from; `*_crc32c` are checksums of what was stored for the row.
    """

    row_hash: np.ndarray
    length: np.ndarray
    states: np.ndarray
    teacher: np.ndarray
    eligible: np.ndarray
    validation: np.ndarray
    state_crc32c: np.ndarray
    teacher_crc32c: np.ndarray
    shard: np.ndarray
    token_start: np.ndarray
    state_start: np.ndarray
    teacher_start: np.ndarray

    def __len__(self) -> int:
        return len(self.row_hash)


_COLUMNS = (
    "row_hash",
    "length",
    "states",
    "teacher",
    "eligible",
    "validation",
    "state_crc32c",
    "teacher_crc32c",
)


@dataclass(frozen=True)
class _Shard:
    relative: str
    files: list[dict[str, Any]]
    counts: dict[str, int]


class Cache:
    """A finished cache, open for reading from any thread.

    What is read is what was stored: token ids and masks are checked when a shard is opened, states and teacher entries
    row by row, against the crc32c taken before they were written. So a zeroed page, a hole or a flipped bit ends the
    reading, whatever the codec. `verify` finds all damage beforehand, also of what nothing reads, and asks the target.
    """

    def __init__(self, layout: Layout, manifests: Sequence[Mapping[str, Any]], mapped: bool = True) -> None:
        self.layout = layout
        self.manifest = manifests[0]
        self.codec: Codec = load_codec(layout, self.manifest["codec"])
        self.layer_ids = tuple(self.manifest["layer_ids"])
        self.width: int = self.manifest["width"]
        if (self.codec.layers, self.codec.width) != (len(self.layer_ids), self.width):
            raise BadInput(f"{layout.cache}: codec and manifest differ in layers or width: {AGAIN}")
        self.vocab_size: int = self.manifest["vocab_size"]
        self.fingerprint = fingerprint([manifest["fingerprint"] for manifest in manifests])
        self.bytes = sum(manifest["counts"]["bytes"] for manifest in manifests)
        self.store: Folder | Bucket = open_store(layout, self.manifest["store"])
        self.teacher_specs = {
            name: ArraySpec.of(shape, dtype) for name, (shape, dtype) in self.manifest["teacher"].items()
        }
        self.shards = [shard for part, manifest in enumerate(manifests) for shard in _shards(part, manifest)]
        self.rows, self._row_ids = _row_table(layout, manifests, self.shards)
        self._mapped = mapped
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._open_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, run: Run, mapped: bool = True) -> Self:
        """The cache that `run` trains on; `mapped=False` reads local shards through Zarr too.

        Raises BadInput when a part is missing, parts differ, or the cache was made with other settings or from other
        tokens than are there, naming them.
        """
        layout = Layout.of_cache(run)
        manifests = [read_manifest(layout.cache_part(part), "cache") for part in range(run.extract.parts)]
        with understood(layout.cache, AGAIN):
            for part, manifest in enumerate(manifests):
                refuse(stale_part(run, part, manifest))
                first = {field: manifests[0][field] for field in COMMON}
                both = f"parts must agree: remove this manifest and {layout.cache_part(0).name}, and {AGAIN}"
                require_equal(layout.cache_part(part), manifest, {"codec": first.pop("codec")}, AGAIN)
                require_equal(layout.cache_part(part), manifest, first, both)
            return cls(layout, manifests, mapped)

    def __len__(self) -> int:
        return len(self.rows)

    def row_id(self, row: int) -> str:
        return self._row_ids[row].as_py()

    def tap_indices(self, layers: Sequence[int], who: str) -> tuple[int, ...]:
        """Where `layers` lie among the cached ones.

        Raises BadInput, naming `who` wants them, when one is not there.
        """
        if not set(layers) <= set(self.layer_ids):
            raise BadInput(
                f"{self.layout.cache}: cache was made with layers {list(self.layer_ids)}; {who} wants {list(layers)}: "
                "re-run extract or change its taps"
            )
        return tuple(self.layer_ids.index(layer) for layer in layers)

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T] and supervised bool [T]: read-only views where the shard is on this machine."""
        shard, start = self._shard(row), self.rows.token_start[row]
        part = slice(start, start + self.rows.length[row])
        return shard.arrays["token_ids"][part], shard.arrays["supervised"][part].view(np.bool_)

    def read_states(self, row: int, out: Mapping[str, np.ndarray], at: int) -> int:
        """Copy the row's encoded states into `out[name][at : at + n]` and return n, the states stored for it.

        Raises BadInput, naming shard and row, when they are not those that were stored.
        """
        rows = self.rows
        begin, count = int(rows.state_start[row]), int(rows.states[row])
        return self._read(row, self.codec.arrays(), out, at, begin, count, int(rows.state_crc32c[row]))

    def read_teacher(self, row: int, out: Mapping[str, np.ndarray], at: int) -> int:
        """Copy the row's teacher entries into `out[name][at : at + n]` and return n.

        Entry i belongs to the i-th position t with supervised[t + 1]: it teaches token t + 1.

        Raises BadInput, naming shard and row, when they are not those that were stored.
        """
        rows = self.rows
        begin, count = int(rows.teacher_start[row]), int(rows.teacher[row])
        return self._read(row, self.teacher_specs, out, at, begin, count, int(rows.teacher_crc32c[row]))

    def _read(
        self, row: int, names: Iterable[str], out: Mapping[str, np.ndarray], at: int, start: int, count: int, crc: int
    ) -> int:
        if count:
            shard, relative, found = self._shard(row), self.shards[self.rows.shard[row]].relative, 0
            with understood(f"{self.store}/{relative}", remake(relative)):
                for name in names:
                    found = shard.copy(name, start, start + count, out[name][at : at + count], found)
            if found != crc:
                row_id = self.row_id(row)
                raise BadInput(
                    f"{self.store}/{relative}: row {row_id}: not the bytes that were written: {remake(relative)}"
                )
        return count

    def _shard(self, row: int) -> ShardReader:
        number = int(self.rows.shard[row])
        with self._lock:
            reader = self._open.pop(number, None)
            if reader is None:
                reader = self._open_shard(number)
                self._open_bytes += self.shards[number].counts["bytes"]
            self._open[number] = reader
            while len(self._open) > OPEN_SHARDS or (self._open_bytes > OPEN_BYTES and len(self._open) > 1):
                oldest, _ = self._open.popitem(last=False)
                self._open_bytes -= self.shards[oldest].counts["bytes"]
        return reader

    def _open_shard(self, number: int) -> ShardReader:
        shard = self.shards[number]
        with understood(f"{self.store}/{shard.relative}", remake(shard.relative)):
            reader = self._reader(shard)
            self._require_known(number, reader.arrays["token_ids"])
            return reader

    def _reader(self, shard: _Shard) -> ShardReader:
        specs = {name: (spec, shard.counts["states"]) for name, spec in self.codec.arrays().items()}
        specs |= {name: (spec, shard.counts["teacher"]) for name, spec in self.teacher_specs.items()}
        return ShardReader(self.store, shard.relative, shard.files, specs, self.manifest["compressor"], self._mapped)

    def _require_known(self, number: int, ids: np.ndarray) -> None:
        """Refuse ids that are no row of the head: as labels they point into a row of logits, unchecked on a GPU."""
        at = outside(ids, self.vocab_size)
        if at is None:
            return
        rows = np.flatnonzero(self.rows.shard == number)
        row = rows[np.searchsorted(self.rows.token_start[rows], at, "right") - 1]
        relative, place = self.shards[number].relative, at - self.rows.token_start[row]
        raise BadInput(
            f"{self.store}/{relative}: row {self.row_id(row)}: token {place} has id {ids[at]}, the target's vocabulary "
            f"{self.vocab_size} rows: {remake(relative)}"
        )


def _shards(part: int, manifest: Mapping[str, Any]) -> list[_Shard]:
    return [_Shard(f"{part_name(part)}/{s['name']}", s["files"], s["counts"]) for s in manifest["shards"]]


def _row_table(
    layout: Layout, manifests: Sequence[Mapping[str, Any]], shards: Sequence[_Shard]
) -> tuple[RowTable, Any]:
    table = read_rows(layout, manifests)
    columns = {name: table[name].to_numpy() for name in _COLUMNS}
    rows = np.array([shard.counts["rows"] for shard in shards], np.int64)
    if rows.sum() != len(table):
        raise BadInput(f"{layout.cache}: tables list {len(table)} rows, shards {rows.sum()}: {AGAIN}")
    first = (np.cumsum(rows) - rows).repeat(rows)
    starts = {
        f"{name}_start": _starts(columns[column], first)
        for name, column in (("token", "length"), ("state", "states"), ("teacher", "teacher"))
    }
    shard = np.arange(len(shards), dtype=np.int32).repeat(rows)
    return RowTable(shard=shard, **columns, **starts), table["row_id"]


def _starts(lengths: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Offset of each row inside its shard, whose first row's number is `first` [rows]: int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    return begins - begins[first] if len(begins) else begins

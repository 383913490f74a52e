"""Shards: one Zarr v3 group each, ragged rows stored flat, written once by one writer.

A shard is built in a hidden folder beside its final place, fsynced and renamed; its record (`shard-00012.json`, with a
crc32c a file and a row) is published after that. A shard without a record of the right fingerprint does not exist.

Arrays: the codec's (`hidden` [states, layers, width], ...) and the teacher's are Zarr-sharded into one file of chunks
of 256 states; without a compressor that file is the plain array followed by its chunk index, so that rows are written
to their final place in any order, and read through a memory map. One chunk each: `token_ids` int32,
`supervised` uint8, `validation` uint8 [rows], `row_ids` (UTF-8 bytes, end to end), and for all ragged things int64
offsets [rows + 1]: `token_offsets`, `state_offsets`, `teacher_offsets`, `row_id_offsets`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
import zarr
from zarr.codecs import BloscCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore

from data.anchors import eligible
from data.codec import ArraySpec, Codec
from data.errors import BadInput, Failure
from data.manifest import file_record, fsync_folder, publish, read_json
from data.settings import FORMAT
from data.store import Bucket, Folder

CHUNK = 256
"""States a Zarr chunk."""


@dataclass(frozen=True)
class ShardRow:
    """One row of a shard: token ids int32 [T], supervised bool [T], and how many states and teacher entries it has."""

    row_id: str
    token_ids: np.ndarray
    supervised: np.ndarray
    validation: bool
    states: int
    teacher: int = 0


def compressors(name: str, itemsize: int) -> list[BloscCodec] | None:
    """Zarr compressors of a setting `extract.compressor`."""
    if name == "none":
        return None
    return [BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize, blocksize=2**19)]


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """int64 [rows + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def row_crc32c(arrays: Iterable[np.ndarray]) -> int:
    """Castagnoli checksum of a row's entries, array after array in the order of the codec (or of the teacher)."""
    value = 0
    for array in arrays:
        value = google_crc32c.extend(value, np.ascontiguousarray(array))
    return value


def create_array(group: zarr.Group, name: str, count: int, spec: ArraySpec, compressor: str) -> zarr.Array:
    """An empty array [count, *spec.shape], chunked along its first axis, all chunks in one file."""
    chunk = max(1, min(CHUNK, count))
    whole = -(-count // chunk) * chunk
    return group.create_array(
        name,
        shape=(count, *spec.shape),
        chunks=(chunk, *spec.shape),
        shards=(whole, *spec.shape) if count else None,
        dtype=spec.dtype,
        compressors=compressors(compressor, spec.dtype.itemsize),
        fill_value=0,
        config={"write_empty_chunks": True},
    )


def chunk_index(count: int, chunk: int, state_bytes: int) -> bytes:
    """The index that ends a Zarr shard file whose uncompressed chunks lie end to end, with its crc32c."""
    nbytes = chunk * state_bytes
    starts = np.arange(-(-count // chunk), dtype="<u8") * nbytes
    body = np.stack([starts, np.full_like(starts, nbytes)], 1).tobytes()
    return body + google_crc32c.value(body).to_bytes(4, "little")


class _Plain:
    """An uncompressed array's file, written in place."""

    def __init__(self, array: zarr.Array, path: Path, spec: ArraySpec) -> None:
        count, chunk = array.shape[0], array.chunks[0]
        self.state_bytes = spec.nbytes
        self.file: int | None = None
        if count:
            path.parent.mkdir(parents=True)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            end = -(-count // chunk) * chunk * spec.nbytes
            os.ftruncate(self.file, end)
            _write_at(self.file, memoryview(chunk_index(count, chunk, spec.nbytes)), end)

    def put(self, values: np.ndarray, at: int) -> None:
        if self.file is not None and values.size:
            _write_at(self.file, memoryview(values).cast("B"), at * self.state_bytes)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class _Packed:
    """A compressed array: its values wait in a file without a name until all are there, then Zarr compresses them.

    Rows of a window come in the order of their lengths, so that all its shards wait at once: too much for memory.
    """

    def __init__(self, array: zarr.Array, folder: Path, spec: ArraySpec) -> None:
        self.array, self.state_bytes = array, spec.nbytes
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (`close` ends it)

    def put(self, values: np.ndarray, at: int) -> None:
        if values.size and not self.file.closed:  # another thread may have given the shard up
            _write_at(self.file.fileno(), memoryview(values).cast("B"), at * self.state_bytes)

    def finish(self) -> None:
        if self.array.shape[0]:
            self.array[:] = np.memmap(self.file, self.array.dtype, "r", shape=self.array.shape)
        self.close()

    def close(self) -> None:
        self.file.close()


def _write_at(file: int, body: memoryview, at: int) -> None:
    while body:
        done = os.pwrite(file, body, at)
        body, at = body[done:], at + done


class ShardWriter:
    """Writes one shard.

        with ShardWriter(path, codec, rows, fingerprint) as shard:
            shard.put(row, {"hidden": ..., "scale": ...})    # any order, from any thread
            record = shard.finish()

    Leaving the block without `finish` takes everything back. A torn shard of
    the same name is replaced. Raises BadInput when another process writes the same shard or it is finished already,
    Failure when the disk is full.
    """

    def __init__(
        self,
        path: Path,
        codec: Codec,
        rows: Sequence[ShardRow],
        fingerprint: str,
        compressor: str = "none",
        teacher: Mapping[str, ArraySpec] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.rows, self.fingerprint = path, rows, fingerprint
        self.temporary = path.with_name(f".{path.name}.tmp")
        self.missing = set(range(len(rows)))
        self.state_specs, self.teacher_specs = codec.arrays(), dict(teacher or {})
        self.state_offsets = offsets([row.states for row in rows])
        self.teacher_offsets = offsets([row.teacher for row in rows])
        self.state_crc32c, self.teacher_crc32c = [0] * len(rows), [0] * len(rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock: int | None = _lock(path)
        self.arrays: dict[str, _Plain | _Packed] = {}
        with self._faults():
            if finished(path, fingerprint):
                raise BadInput(f"{path} is there already: a shard is written once; discard it to write it again")
            discard(path)
            shutil.rmtree(self.temporary, ignore_errors=True)
            self._create(codec, compressor, dict(attributes or {}))

    def _create(self, codec: Codec, compressor: str, attributes: dict[str, Any]) -> None:
        """The group, its small arrays, and the codec's and the teacher's arrays, all zeros.

        Zarr writes them to memory, and from there each file is written once: its own way to a folder takes twice as
        long. Only what it compresses later needs it to know the folder.
        """
        about = {"draftmill": FORMAT, "codec": codec.record(), "fingerprint": self.fingerprint, **attributes}
        written: dict[str, Buffer] = {}
        store = MemoryStore(written) if compressor == "none" else LocalStore(self.temporary)
        group = zarr.create_group(store, attributes=about)
        counts = dict.fromkeys(self.state_specs, self.state_offsets[-1])
        counts |= dict.fromkeys(self.teacher_specs, self.teacher_offsets[-1])
        for name, spec in (self.state_specs | self.teacher_specs).items():
            array = create_array(group, name, int(counts[name]), spec, compressor)
            file = self.temporary / name / "/".join(["c", *("0" * array.ndim)])
            self.arrays[name] = (
                _Plain(array, file, spec) if compressor == "none" else _Packed(array, self.temporary, spec)
            )
        for name, values in self._small().items():
            array = group.create_array(
                name,
                shape=values.shape,
                chunks=(max(1, len(values)),),
                dtype=values.dtype,
                compressors=None,
                fill_value=0,
                config={"write_empty_chunks": True},
            )
            array[:] = values
        for name, body in written.items():
            path = self.temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body.to_bytes())

    def _small(self) -> dict[str, np.ndarray]:
        names = [row.row_id.encode("utf-8", "surrogatepass") for row in self.rows]
        empty = np.zeros(0, np.int32)
        return {
            "token_ids": np.concatenate([empty, *(row.token_ids for row in self.rows)]).astype(np.int32),
            "supervised": np.concatenate([empty, *(row.supervised for row in self.rows)]).astype(np.uint8),
            "validation": np.array([row.validation for row in self.rows], np.uint8),
            "row_ids": np.frombuffer(b"".join(names), np.uint8),
            "token_offsets": offsets([len(row.token_ids) for row in self.rows]),
            "state_offsets": self.state_offsets,
            "teacher_offsets": self.teacher_offsets,
            "row_id_offsets": offsets([len(name) for name in names]),
        }

    def put(self, row: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Store row number `row`: each of the codec's arrays [states, ...], each of the teacher's [teacher, ...]."""
        with self._faults():
            for name, sink in self.arrays.items():
                spec, at = self._place(name, row)
                values = arrays[name]
                want = (at.stop - at.start, *spec.shape)
                if values.shape != want or values.dtype != spec.dtype:
                    have = f"{values.dtype}{list(values.shape)}"
                    raise ValueError(f"row {row}: `{name}` is {have}, expected {spec.dtype}{list(want)}")
                sink.put(np.ascontiguousarray(values), at.start)
            self.state_crc32c[row] = row_crc32c(arrays[name] for name in self.state_specs)
            self.teacher_crc32c[row] = row_crc32c(arrays[name] for name in self.teacher_specs)
            self.missing.discard(row)

    def _place(self, name: str, row: int) -> tuple[ArraySpec, slice]:
        if name in self.state_specs:
            return self.state_specs[name], slice(int(self.state_offsets[row]), int(self.state_offsets[row + 1]))
        return self.teacher_specs[name], slice(int(self.teacher_offsets[row]), int(self.teacher_offsets[row + 1]))

    def finish(self) -> dict[str, Any]:
        """Make the shard durable under its name and publish its record, which is returned."""
        if self.missing:
            raise Failure(f"{self.path}: rows {sorted(self.missing)[:5]} were never written; the shard is given up")
        with self._faults():
            for sink in self.arrays.values():
                sink.finish()
            files = [path for path in sorted(self.temporary.rglob("*")) if path.is_file()]
            for path in [*files, *{path.parent for path in files}]:
                fsync_folder(path)  # a file's descriptor is synced the same way
            records = [file_record(path, self.temporary) for path in files]
            os.rename(self.temporary, self.path)
            fsync_folder(self.path.parent)
            body = self._record(records)
            publish(record_path(self.path), "shard", body)
        self._release()
        return body

    def _record(self, files: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "name": self.path.name,
            "fingerprint": self.fingerprint,
            "files": files,
            "counts": {
                "rows": len(self.rows),
                "tokens": sum(len(row.token_ids) for row in self.rows),
                "states": int(self.state_offsets[-1]),
                "teacher": int(self.teacher_offsets[-1]),
                "bytes": sum(record["bytes"] for record in files),
            },
            "rows": {
                "row_id": [row.row_id for row in self.rows],
                "length": [len(row.token_ids) for row in self.rows],
                "states": [row.states for row in self.rows],
                "teacher": [row.teacher for row in self.rows],
                "eligible": [len(eligible(row.supervised)) for row in self.rows],
                "validation": [bool(row.validation) for row in self.rows],
                "state_crc32c": self.state_crc32c,
                "teacher_crc32c": self.teacher_crc32c,
            },
        }

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Failure(f"{self.path}: the disk is full; free some and run the same command again") from None
            raise Failure(f"{self.path}: cannot write: {error}") from error
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written and let go of the lock."""
        if self.lock is not None:
            for sink in self.arrays.values():
                sink.close()
            shutil.rmtree(self.temporary, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()


def _lock(path: Path) -> int:
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(f"{path} is being written by another process; wait for it or stop it") from None
    return descriptor


def record_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def finished(shard: Path, fingerprint: str) -> dict[str, Any] | None:
    """The record of a shard of the right fingerprint that is whole, here or uploaded; else None."""
    path = record_path(shard)
    if not path.exists():
        return None
    body = read_json(path, "delete it")
    if body.get("format") != FORMAT or body.get("fingerprint") != fingerprint:
        return None
    store = Bucket(body["store"]) if "store" in body else Folder(shard.parent.parent)
    sizes = store.sizes(f"{shard.parent.name}/{shard.name}")
    whole = all(sizes.get(file["path"]) == file["bytes"] for file in body["files"])
    return body if whole else None


def discard(shard: Path) -> None:
    """Remove a shard and its record, the record first."""
    record_path(shard).unlink(missing_ok=True)
    shutil.rmtree(shard, ignore_errors=True)

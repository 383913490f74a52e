"""Reading one shard: memory maps where its files are plain arrays, Blosc chunks from a map, Zarr for remote stores."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numcodecs import Blosc
from zarr.core.buffer import default_buffer_prototype

from data.codec import ArraySpec
from data.errors import BadInput
from data.manifest import inside
from data.shard import CHUNK, chunk_index
from data.store import Bucket, Folder, answering

SMALL = {"token_ids": np.dtype("int32"), "supervised": np.dtype("uint8")}
"""Arrays that are one plain chunk each, whatever the compressor."""

PIECE = 256 << 10
"""Bytes that are copied, and then checked, at once."""


def remake(relative: str) -> str:
    """What mends a shard whose files have their sizes and other bytes: extract compares sizes, and reads none again."""
    return f"remove the manifest {relative.partition('/')[0]}.json of its part and run `draftmill extract` again"


def check_sizes(store: Folder | Bucket, relative: str, files: list[dict[str, Any]]) -> None:
    """Raises BadInput when a file that a manifest lists under `relative` is missing or has another size."""
    have = store.sizes(relative)
    for file in files:
        size = have.get(file["path"])
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes, its manifest says {file['bytes']}"
            raise BadInput(f"{store}/{relative}/{file['path']} {found}: run `draftmill extract` again")


class ShardReader:
    """One shard, open for reading from any thread.

    `specs` are the sharded arrays by name with their number of entries. Opening checks that every file is there in
    full, the chunk index of every array that is mapped, and every byte of the `SMALL` arrays.
    """

    def __init__(
        self,
        store: Folder | Bucket,
        relative: str,
        files: list[dict[str, Any]],
        specs: Mapping[str, tuple[ArraySpec, int]],
        compressor: str,
        mapped: bool = True,
    ) -> None:
        check_sizes(store, relative, files)
        self.store = store
        self.arrays: dict[str, np.ndarray | Chunks | zarr.Array] = {}
        folder = inside(store.path, relative) if isinstance(store, Folder) else None
        group = {} if mapped and folder else _open_arrays(store, relative)
        for name, (spec, count) in specs.items():
            if count == 0:
                self.arrays[name] = np.zeros((0, *spec.shape), spec.dtype)
            elif mapped and folder:
                path = folder / name / "/".join(["c", "0", *("0" for _ in spec.shape)])
                kind = _map_sharded if compressor == "none" else Chunks
                self.arrays[name] = kind(path, spec, count, remake(relative))
            else:
                self.arrays[name] = group[name]
        wanted = {file["path"]: file["crc32c"] for file in files}
        for name, dtype in SMALL.items():
            array = _map(folder / name / "c" / "0", dtype) if folder else _whole(store, group[name])
            if len(array) and google_crc32c.value(array) != wanted[f"{name}/c/0"]:
                raise BadInput(f"{store}/{relative}/{name}/c/0: not the bytes that were written: {remake(relative)}")
            self.arrays[name] = array

    def copy(self, name: str, start: int, stop: int, out: np.ndarray, crc: int = 0) -> int:
        """Entries start..stop of an array into contiguous `out` [stop - start, ...], without an array in between.

        Gives back the crc32c of what came before, `crc`, and of these entries. Both are done piece by piece, which
        finds a piece in the processor's cache, and holds Python's lock for microseconds.
        """
        array = self.arrays[name]
        if isinstance(array, Chunks):
            array.copy(start, stop, out)
        elif not isinstance(array, np.ndarray):
            with answering(self.store, "s3:GetObject"):
                array.get_basic_selection((slice(start, stop),), out=_BUFFER.from_numpy_array(out))
        step = max(1, PIECE // max(1, out[:1].nbytes))
        for begin in range(0, stop - start, step):
            piece = out[begin : begin + step]
            if isinstance(array, np.ndarray):
                np.copyto(piece, array[start + begin : start + begin + len(piece)], casting="no")
            crc = google_crc32c.extend(crc, piece)
        return crc


class Chunks:
    """A Zarr shard of Blosc chunks, mapped: a chunk that is wanted whole is decompressed straight to where it goes.

    Raises BadInput when the chunk index is damaged, on reading when a chunk is.
    """

    def __init__(self, path: Path, spec: ArraySpec, count: int, remedy: str) -> None:
        self.path, self.spec, self.chunk, self.remedy = path, spec, max(1, min(CHUNK, count)), remedy
        self.body = _map(path, np.dtype("uint8"))
        size = 16 * -(-count // self.chunk)
        index = self.body[-size - 4 :].tobytes()
        if len(index) != size + 4 or google_crc32c.value(index[:size]) != int.from_bytes(index[size:], "little"):
            raise BadInput(f"{path}: its chunk index is damaged: {remedy}")
        self.places = np.frombuffer(index[:size], "<u8").reshape(-1, 2).tolist()

    def copy(self, start: int, stop: int, out: np.ndarray) -> None:
        """Entries start..stop into `out`."""
        at = start
        while at < stop:
            number, skip = divmod(at, self.chunk)
            take = min(self.chunk - skip, stop - at)
            target = out[at - start : at - start + take]
            if take == self.chunk and target.flags.c_contiguous:
                self._decompress(number, target)
            else:
                whole = np.empty((self.chunk, *self.spec.shape), self.spec.dtype)
                self._decompress(number, whole)
                np.copyto(target, whole[skip : skip + take])
            at += take

    def _decompress(self, number: int, out: np.ndarray) -> None:
        offset, size = self.places[number]
        try:
            Blosc().decode(self.body[offset : offset + size], out)
        except (RuntimeError, ValueError) as error:
            raise BadInput(f"{self.path}: chunk {number} is damaged ({error}): {self.remedy}") from None


_BUFFER = default_buffer_prototype().nd_buffer


def _open_arrays(store: Folder | Bucket, relative: str) -> dict[str, zarr.Array]:
    with zarr.config.set(_pipeline(store)), answering(store, "s3:GetObject"):
        return dict(zarr.open_group(store.zarr(relative), mode="r").arrays())


def _whole(store: Folder | Bucket, array: zarr.Array) -> np.ndarray:
    with answering(store, "s3:GetObject"):
        return np.asarray(array[:])


def _pipeline(store: Folder | Bucket) -> dict[str, Any]:
    """The `zarrs` codec pipeline, 2-4 times as fast, where it is installed and can reach the store."""
    if isinstance(store, Bucket):
        return {}
    try:
        import zarrs  # noqa: F401
    except ImportError:
        return {}
    return {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file as a read-only array; empty when there is none, because Zarr writes no chunk for an empty array."""
    if not path.exists():
        return np.zeros(0, dtype)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _map_sharded(path: Path, spec: ArraySpec, count: int, remedy: str) -> np.ndarray:
    """An uncompressed Zarr shard as the array [count, *spec.shape] that it is, once its index says so."""
    body = _map(path, np.dtype("uint8"))
    if not 0 < count * spec.nbytes <= len(body):
        raise BadInput(f"{path}: {len(body)} bytes cannot hold {count} entries: {remedy}")
    index = np.frombuffer(chunk_index(count, max(1, min(CHUNK, count)), spec.nbytes), np.uint8)
    if not np.array_equal(body[-len(index) :], index):
        raise BadInput(f"{path}: its chunk index is not that of a plain array: {remedy}")
    return body[: count * spec.nbytes].view(spec.dtype).reshape(count, *spec.shape)

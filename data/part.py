"""A part of the cache on disk: its manifest, its rows, and the codec that parts share."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.torch

from data.codec import ArraySpec, Codec, codec_from_record
from data.errors import BadInput
from data.layout import Layout, part_name
from data.lock import locked
from data.manifest import (
    crc32c,
    file_record,
    fingerprint,
    manifest_bytes,
    publish,
    read_manifest,
    understood,
    write_bytes,
)
from data.settings import Run
from data.shaping import cache_settings
from data.shard import record_path
from data.store import Bucket, Folder, open_store
from data.tokens import row_hash

AGAIN = "run `draftmill extract` again"

COMMON = (
    "settings",
    "layer_ids",
    "width",
    "vocab_size",
    "target",
    "model",
    "template",
    "codec",
    "compressor",
    "store",
    "teacher",
)
"""Fields of a part's manifest in which all parts of a cache agree."""


def part_body(
    run: Run,
    codec: Codec,
    layer_ids: Sequence[int],
    vocab_size: int,
    target: Mapping[str, Any],
    template: Mapping[str, Any],
    inputs: Mapping[str, str],
    teacher: Mapping[str, ArraySpec] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that shaped a part; its `fingerprint` field stands for all of it, and marks each of its shards."""
    body = {
        "settings": cache_settings(run),
        "layer_ids": list(layer_ids),
        "width": codec.width,
        "vocab_size": vocab_size,
        "target": dict(target),
        "model": dict(model or {}),
        "template": dict(template),
        "codec": codec.record(),
        "compressor": run.extract.compressor,
        "store": run.extract.store,
        "teacher": {name: [list(spec.shape), str(spec.dtype)] for name, spec in (teacher or {}).items()},
        "inputs": dict(inputs),
    }
    body = json.loads(json.dumps(body))
    return {**body, "fingerprint": fingerprint(body)}


def publish_part(layout: Layout, part: int, body: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> None:
    """Make a part exist: its table of rows, then its manifest (for a remote store a copy of both there first).

    `shards` are the records that `ShardWriter.finish` (or `shard.finished`) returned, in the order of their rows.
    """
    for record in shards:
        if record["fingerprint"] != body["fingerprint"]:
            raise ValueError(f"{record['name']} has fingerprint {record['fingerprint']}, not {body['fingerprint']}")
    table = rows_path(layout, part)
    write_bytes(table, _table_bytes([record["rows"] for record in shards]))
    counts = {"shards": len(shards)} | {name: sum(r["counts"][name] for r in shards) for name in COUNTED}
    manifest = {
        **body,
        "counts": counts,
        "files": [file_record(table, layout.cache)],
        "shards": [{name: record[name] for name in ("name", "counts", "files")} for record in shards],
    }
    path = layout.cache_part(part)
    store = open_store(layout, body["store"])
    if isinstance(store, Bucket):
        for copied in _copied(layout, part):
            store.upload(copied, copied.relative_to(layout.cache).as_posix())
        store.upload(manifest_bytes("cache", manifest), path.name)
    publish(path, "cache", manifest)


def withdraw_part(layout: Layout, part: int, store: Folder | Bucket) -> None:
    """Make a part not exist, before anything of it changes: its manifest goes, and the copy in a remote store.

    Without a copy nothing is deleted there: for a part's first time a role needs no permission to.
    """
    path = layout.cache_part(part)
    path.unlink(missing_ok=True)
    if isinstance(store, Bucket):
        store.remove({path.name} & store.top())


def leave_bucket(layout: Layout, part: int, bucket: Bucket) -> None:
    """Remove all of a part from a bucket, its manifest first, and with the last part what parts share."""
    name, manifest = part_name(part), layout.cache_part(part).name
    bucket.remove({manifest} & bucket.top())
    bucket.remove(f"{name}/{path}" for path in bucket.sizes(name))
    left = bucket.top()
    if left == {codec_path(layout).name}:
        bucket.remove(left)


COUNTED = ("rows", "tokens", "states", "teacher", "bytes")


def upload_shard(layout: Layout, part: int, body: Mapping[str, Any], record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a finished shard to the remote store of its part and return its record, which says so.

    Nothing happens for a local store. The copy on this machine goes last.
    """
    store = open_store(layout, body["store"])
    if isinstance(store, Folder):
        return record
    shard = layout.cache / part_name(part) / record["name"]
    if "store" not in record:
        for file in record["files"]:
            store.upload(shard / file["path"], f"{part_name(part)}/{shard.name}/{file['path']}")
        record = {**record, "store": str(store)}
        publish(record_path(shard), "shard", record)
    shutil.rmtree(shard, ignore_errors=True)  # there still, if it was uploaded before and a kill came in between
    return record


def rows_path(layout: Layout, part: int) -> Path:
    return layout.cache / part_name(part) / "rows.parquet"


def _table_bytes(rows: Sequence[Mapping[str, list[Any]]]) -> bytes:
    def column(name: str) -> list[Any]:
        return [value for shard in rows for value in shard[name]]

    ids = column("row_id")
    table = pa.table(
        {
            "row_id": pa.array(ids, pa.string()),
            "row_hash": pa.array([row_hash(name) for name in ids], pa.uint64()),
            "length": pa.array(column("length"), pa.int32()),
            "states": pa.array(column("states"), pa.int32()),
            "teacher": pa.array(column("teacher"), pa.int32()),
            "eligible": pa.array(column("eligible"), pa.int32()),
            "validation": pa.array(column("validation"), pa.bool_()),
            "state_crc32c": pa.array(column("state_crc32c"), pa.uint32()),
            "teacher_crc32c": pa.array(column("teacher_crc32c"), pa.uint32()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def read_rows(layout: Layout, manifests: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The tables of all parts end to end, each checked against its manifest.

    Raises BadInput when one is missing or damaged.
    """
    tables = []
    for part, manifest in enumerate(manifests):
        path = rows_path(layout, part)
        if not _table_whole(layout, part, manifest):
            raise BadInput(f"{path} is missing or damaged: {AGAIN} for part {part}")
        with pq.ParquetFile(path) as file:  # `read_table` loads pandas, where it is installed
            tables.append(file.read())
    return pa.concat_tables(tables).combine_chunks()


def damage(layout: Layout, part: int, fast: bool = False) -> list[str]:
    """What is wrong with a part's files, one line each: every byte is read, or with `fast` only sizes are compared."""
    manifest = read_manifest(layout.cache_part(part), "cache")
    store = open_store(layout, manifest["store"])
    found = [f"{rows_path(layout, part)} is missing or damaged"] if not _table_whole(layout, part, manifest) else []
    for shard in manifest["shards"]:
        relative = f"{part_name(part)}/{shard['name']}"
        sizes = store.sizes(relative)
        for file in shard["files"]:
            record = {**file, "path": f"{relative}/{file['path']}"}
            found += _complaints(store, record, sizes.get(file["path"]), "its manifest says", fast)
    if isinstance(store, Bucket) and not found:
        for path in filter(Path.exists, (layout.cache_part(part), *_copied(layout, part))):
            record = file_record(path, layout.cache)
            found += _complaints(store, record, store.size(record["path"]), f"{path} has", fast)
    return found


def _complaints(
    store: Folder | Bucket, record: Mapping[str, Any], size: int | None, source: str, fast: bool
) -> Iterator[str]:
    """What is wrong with a file of a store that has `size` bytes, by its `record`, which `source` gave."""
    name = record["path"]
    if size != record["bytes"]:
        yield f"{store}/{name} has {'no' if size is None else size} bytes, {source} {record['bytes']}"
    elif not fast and (crc := store.checksum(name)) != record["crc32c"]:
        yield f"{store}/{name} has crc32c {crc:08x}, {source} {record['crc32c']:08x}"


def _copied(layout: Layout, part: int) -> tuple[Path, Path]:
    """Files that are kept on this machine, and in a remote store too, so that it has all of a part."""
    return codec_path(layout), rows_path(layout, part)


def _table_whole(layout: Layout, part: int, manifest: Mapping[str, Any]) -> bool:
    path, wanted = rows_path(layout, part), manifest["files"][0]
    return path.is_file() and path.stat().st_size == wanted["bytes"] and crc32c(path) == wanted["crc32c"]


def codec_path(layout: Layout) -> Path:
    return layout.cache / "codec.safetensors"


def shared_codec(layout: Layout, identity: str, make: Callable[[], Codec]) -> Codec:
    """The codec of all parts: the stored one when it was made for `identity`, else `make()`, stored for the others.

    Safe against parts that start at the same time. `identity` stands for what the codec's constants depend on.
    """
    path = codec_path(layout)
    with locked(path.with_name(".codec.lock")):
        if (stored := _stored_codec(layout, identity)) is not None:
            return stored
        codec = make().to("cpu")
        # One key, since safetensors writes several in an order of chance.
        about = {"about": json.dumps({"identity": identity, "record": codec.record()}, sort_keys=True)}
        write_bytes(path, safetensors.torch.save({k: v.contiguous() for k, v in codec.tables.items()}, about))
        return codec


def _stored_codec(layout: Layout, identity: str) -> Codec | None:
    """None when there is none, or it is damaged or for another identity: it is made again then."""
    path = codec_path(layout)
    try:
        with understood(path, AGAIN), safetensors.safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            return load_codec(layout, about["record"]) if about["identity"] == identity else None
    except (BadInput, OSError, safetensors.SafetensorError):
        return None


def load_codec(layout: Layout, record: Mapping[str, Any]) -> Codec:
    """The codec that a part's manifest records.

    Raises BadInput when its stored constants are missing, damaged or of another codec.
    """
    path = codec_path(layout)
    try:
        return codec_from_record(record, safetensors.torch.load_file(path))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise BadInput(f"{path}: not the constants that the cache was made with ({error}): {AGAIN}") from None

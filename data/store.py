"""Where shards lie: a folder of this machine, or a prefix of an S3 bucket reached through Zarr's ObjectStore.

Paths inside a store are relative, with forward slashes, and the same in both. Credentials, region and endpoint of S3
come from the usual `AWS_*` variables (`AWS_ENDPOINT_URL`, and `AWS_ALLOW_HTTP=true` for a server without TLS). Their
role needs s3:ListBucket, s3:GetObject and s3:PutObject, and s3:DeleteObject to make again or clean what is there.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
from zarr.abc.store import Store
from zarr.storage import LocalStore, ObjectStore, StorePath

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import MALFORMED, crc32c, inside, read_json


@dataclass(frozen=True)
class Folder:
    """Shards in a folder of this machine."""

    path: Path

    def zarr(self, relative: str) -> Store:
        """A read-only Zarr store of the group at `relative`."""
        return LocalStore(inside(self.path, relative), read_only=True)

    def sizes(self, relative: str) -> dict[str, int]:
        """Bytes of every file under `relative`, by path from there."""
        base = str(inside(self.path, relative))
        paths = (os.path.join(folder, name) for folder, _, names in os.walk(base) for name in names)
        return {path[len(base) + 1 :].replace(os.sep, "/"): os.path.getsize(path) for path in paths}

    def checksum(self, relative: str) -> int:
        """crc32c of a file, every byte read."""
        return crc32c(inside(self.path, relative))

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Bucket:
    """Shards under `s3://bucket/prefix`. Every method raises Failure when S3 does not answer or refuses."""

    url: str

    @property
    def _client(self) -> Any:
        return client(self.url)

    def zarr(self, relative: str) -> StorePath:
        """A read-only Zarr store of the group at `relative`."""
        return StorePath(ObjectStore(self._client, read_only=True), relative)

    def sizes(self, relative: str) -> dict[str, int]:
        """Bytes of every object under `relative`, by path from there."""
        with answering(self, "s3:ListBucket"):
            items = [item for page in self._client.list(relative or None) for item in page]
        return {item["path"].removeprefix(f"{relative}/"): item["size"] for item in items}

    def top(self) -> set[str]:
        """Names directly under the prefix: of objects, and what stands before the `/` in those of others."""
        with answering(self, "s3:ListBucket"):
            found = self._client.list_with_delimiter()
        return {*found["common_prefixes"], *(item["path"] for item in found["objects"])}

    def size(self, relative: str) -> int | None:
        """Bytes of an object; None when there is none."""
        with answering(self, "s3:GetObject"):
            try:
                return self._client.head(relative)["size"]
            except FileNotFoundError:
                return None

    def checksum(self, relative: str) -> int:
        """crc32c of an object, every byte fetched."""
        value = 0
        with answering(self, "s3:GetObject"):
            for block in self._client.get(relative).stream(min_chunk_size=8 << 20):
                value = google_crc32c.extend(value, bytes(block))
        return value

    def upload(self, body: Path | bytes, relative: str) -> None:
        """Put a file of this machine, or bytes, under `relative`; a large file goes in pieces, and is there as a
        whole.

        Raises Failure also when the file is gone, which is not the bucket's doing.
        """
        try:
            source = body.open("rb") if isinstance(body, Path) else io.BytesIO(body)
        except FileNotFoundError:
            raise Failure(f"{body}: gone before it was uploaded to {self}: run the same command again") from None
        with source, answering(self, "s3:PutObject"):
            self._client.put(relative, source)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete objects, also some that are not there."""
        with answering(self, "s3:DeleteObject"):
            self._client.delete(list(paths))

    def __str__(self) -> str:
        return self.url


@functools.cache
def client(url: str) -> Any:
    """The client of a bucket's prefix, one a process: a client has its own connections and keys, and there are many
    shards. Threads may share it. (A process that was forked from one that used obstore can use none, old or new.)
    """
    try:
        from obstore.store import S3Store
    except ImportError:
        raise BadInput("extract.store: `s3://` needs the package obstore: pip install -e '.[s3]'") from None
    # Not by `from_url`, which ends a prefix at `#`, and with it the run's name.
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(bucket, prefix=prefix)


@contextmanager
def answering(store: Folder | Bucket, permission: str) -> Iterator[None]:
    """Around requests to a store that need a permission of S3.

    Raises Failure when it is a bucket that does not answer, refuses, or is not there.
    """
    try:
        yield
    except Exception as error:
        # obstore's, named rather than imported; it has Python's own for what is not there.
        theirs = type(error) is FileNotFoundError or type(error).__module__ == "obstore.exceptions"
        if isinstance(store, Folder) or not theirs:
            raise
        why = " ".join(str(error).partition("\n\nDebug source")[0].split())
        remedy = f"see that the bucket exists, and that the AWS_* variables are for it and allow {permission}"
        raise Failure(f"{store}: {why}: {remedy}") from error


def open_store(layout: Layout, store: str | None) -> Folder | Bucket:
    """Where a run's shards lie, from its `extract.store`.

    Raises BadInput for a store that is not `s3://bucket/prefix`.
    """
    if store is None:
        return Folder(layout.cache)
    if not re.fullmatch(r"s3:/(/(?!\.\.?(/|$))[^/]+)+/?", store):
        raise BadInput(f"extract.store: {store!r} is not of the form s3://bucket/prefix")
    return Bucket(f"{store.rstrip('/')}/{layout.folder.name}/cache")


def written(layout: Layout, parts: str = "part-*") -> set[Bucket]:
    """Buckets that a run wrote its cache to, as the records in its folder have it; `parts` is a pattern of names.

    `extract.store` does not tell: it may have been another one when the cache was made, and a run of this name under
    another root may be the one that wrote to it.
    """
    found: set[Bucket] = set()
    for path in (*layout.cache.glob(f"{parts}.json"), *layout.cache.glob(f"{parts}/*.json")):
        with suppress(BadInput, *MALFORMED):  # a torn record leads nowhere; there are others
            found.update(_named(layout, read_json(path, "delete it")))
    return found


def _named(layout: Layout, record: Mapping[str, Any]) -> Iterator[Bucket]:
    """Buckets in the record of a part, of a shard, or of the state of a part's work (which may hold the part's).

    Those of shards are this run's only under its name: its folder may be a copy of another's.
    """
    part = record.get("manifest", record)
    if part.get("kind") == "cache" and isinstance(store := open_store(layout, part["store"]), Bucket):
        yield store
    urls = [record["store"]] if record.get("kind") == "shard" and "store" in record else record.get("stores", [])
    yield from (Bucket(url) for url in urls if url.endswith(f"/{layout.folder.name}/cache"))

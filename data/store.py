"""Where shards lie: a folder of this machine, or a prefix of an S3 bucket reached through Zarr's ObjectStore.

Paths inside a store are relative, with forward slashes, and the same in both. Credentials, region and endpoint of S3
come from the usual `AWS_*` variables (`AWS_ENDPOINT_URL`, and `AWS_ALLOW_HTTP=true` for a server without TLS).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
from zarr.abc.store import Store
from zarr.storage import LocalStore, ObjectStore, StorePath

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import crc32c, inside


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

    @cached_property
    def _client(self) -> Any:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise BadInput("extract.store: `s3://` needs the package obstore: pip install -e '.[s3]'") from None
        # Not by `from_url`, which ends a prefix at `#`, and with it the run's name.
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        return S3Store(bucket, prefix=prefix)

    def zarr(self, relative: str) -> StorePath:
        """A read-only Zarr store of the group at `relative`."""
        return StorePath(ObjectStore(self._client, read_only=True), relative)

    def sizes(self, relative: str) -> dict[str, int]:
        """Bytes of every object under `relative`, by path from there."""
        with answering(self):
            items = [item for page in self._client.list(relative or None) for item in page]
        return {item["path"].removeprefix(f"{relative}/"): item["size"] for item in items}

    def size(self, relative: str) -> int | None:
        """Bytes of an object; None when there is none."""
        with answering(self):
            try:
                return self._client.head(relative)["size"]
            except FileNotFoundError:
                return None

    def checksum(self, relative: str) -> int:
        """crc32c of an object, every byte fetched."""
        value = 0
        with answering(self):
            for block in self._client.get(relative).stream(min_chunk_size=8 << 20):
                value = google_crc32c.extend(value, bytes(block))
        return value

    def upload(self, body: Path | bytes, relative: str) -> None:
        """Put a file of this machine, or bytes, under `relative`; a large file goes in pieces, and is there as a
        whole."""
        with answering(self):
            self._client.put(relative, body)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete objects, also some that are not there."""
        with answering(self):
            self._client.delete(list(paths))

    def __str__(self) -> str:
        return self.url


@contextmanager
def answering(store: Folder | Bucket) -> Iterator[None]:
    """Around requests to a store.

    Raises Failure when it is a bucket that does not answer, refuses, or is not there.
    """
    try:
        yield
    except Exception as error:
        # obstore's, named rather than imported; it has Python's own for what is not there.
        theirs = type(error) is FileNotFoundError or type(error).__module__ == "obstore.exceptions"
        if isinstance(store, Folder) or not theirs:
            raise
        why = str(error).partition("\n\nDebug source")[0]
        raise Failure(f"{store}: {why}: see that the bucket exists, and that the AWS_* variables are for it") from error


def open_store(layout: Layout, store: str | None) -> Folder | Bucket:
    """Where a run's shards lie, from its `extract.store`.

    Raises BadInput for a store that is not `s3://bucket/prefix`.
    """
    if store is None:
        return Folder(layout.cache)
    if not re.fullmatch(r"s3:/(/(?!\.\.?(/|$))[^/]+)+/?", store):
        raise BadInput(f"extract.store: {store!r} is not of the form s3://bucket/prefix")
    return Bucket(f"{store.rstrip('/')}/{layout.folder.name}/cache")

"""Where shards lie: a folder of this machine, or a prefix of an S3 bucket reached through Zarr's ObjectStore.

Paths inside a store are relative, with forward slashes, and the same in both. Credentials, region and endpoint of S3
come from the usual `AWS_*` variables (`AWS_ENDPOINT_URL`, and `AWS_ALLOW_HTTP=true` for a server without TLS).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import google_crc32c
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ObjectStore

from data.errors import BadInput
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
    """Shards under `s3://bucket/prefix`."""

    url: str

    def _store(self, relative: str = "") -> Any:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise BadInput("extract.store: `s3://` needs the package obstore: pip install -e '.[s3]'") from None
        return S3Store.from_url(f"{self.url}/{relative}".rstrip("/"))

    def zarr(self, relative: str) -> Store:
        """A read-only Zarr store of the group at `relative`."""
        return ObjectStore(self._store(relative), read_only=True)

    def sizes(self, relative: str) -> dict[str, int]:
        """Bytes of every object under `relative`, by path from there."""
        return {item["path"]: item["size"] for page in self._store(relative).list() for item in page}

    def checksum(self, relative: str) -> int:
        """crc32c of an object, every byte fetched."""
        value = 0
        for block in self._store().get(relative).stream(min_chunk_size=8 << 20):
            value = google_crc32c.extend(value, bytes(block))
        return value

    def upload(self, path: Path, relative: str) -> None:
        """Put a file of this machine under `relative`."""
        buffer = default_buffer_prototype().buffer.from_bytes(path.read_bytes())
        sync(ObjectStore(self._store()).set(relative, buffer))

    def remove(self, relative: str) -> None:
        """Delete every object under `relative`."""
        store = self._store(relative)
        for page in store.list():
            store.delete([item["path"] for item in page])

    def __str__(self) -> str:
        return self.url


def open_store(layout: Layout, store: str | None) -> Folder | Bucket:
    """Where a run's shards lie, from its `extract.store`.

    Raises BadInput for a store that is not `s3://bucket/prefix`.
    """
    if store is None:
        return Folder(layout.cache)
    parts = urlsplit(store)
    if parts.scheme != "s3" or not parts.netloc:
        raise BadInput(f"extract.store: {store!r} is not of the form s3://bucket/prefix")
    return Bucket(f"{store.rstrip('/')}/{layout.folder.name}/cache")

"""Manifests: an artefact is what its manifest says, or it does not exist.

A stage writes under temporary names, fsyncs, renames, and publishes the manifest last. A consumer reads the manifest,
never the folder. `State` beside it tells a forced re-run from a resumed one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from data.errors import BadInput
from data.settings import FORMAT


def fingerprint(body: Any) -> str:
    """32 hex digits over the canonical JSON of `body`."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def crc32c(path: Path) -> int:
    """Castagnoli checksum of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            value = google_crc32c.extend(value, block)
    return value


def file_record(path: Path, base: Path) -> dict[str, Any]:
    """`{path, bytes, crc32c}` of a file, its path relative to `base` with forward slashes."""
    return {"path": path.relative_to(base).as_posix(), "bytes": path.stat().st_size, "crc32c": crc32c(path)}


def inside(base: Path, relative: str) -> Path:
    """`base / relative`, refused when it leads out of `base`.

    Raises BadInput: a manifest is data, and data does not choose where on the disk we read or write.
    """
    path = (base / relative).resolve()
    if not path.is_relative_to(base.resolve()):
        raise BadInput(f"{base}: a manifest names `{relative}`, which lies outside; the manifest is not one of ours")
    return path


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, body: bytes) -> None:
    """Write a whole file atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def json_bytes(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write a JSON file atomically and durably."""
    write_bytes(path, json_bytes(body))


def manifest_bytes(kind: str, body: Mapping[str, Any]) -> bytes:
    return json_bytes({"format": FORMAT, "kind": kind, **body})


def publish(path: Path, kind: str, body: Mapping[str, Any]) -> None:
    """Write a manifest: the last act of making an artefact."""
    write_bytes(path, manifest_bytes(kind, body))


MAKERS = {
    "prompts": "`draftmill prepare`",
    "accounting": "`draftmill prepare`",
    "tokens": "`draftmill prepare` (and `draftmill regenerate`, where the target answers)",
    "head": "`draftmill extract`",
    "cache": "`draftmill extract`",
    "drafter": "`draftmill train`",
    "eval": "`draftmill eval`",
    "export": "`draftmill export`",
}
"""What to run for each kind of artefact, in the words of a remedy."""


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """A manifest's body.

    Raises BadInput when it is missing, damaged, of another kind or of another format version.
    """
    body = read_json(path, f"run {MAKERS[kind]} first")
    for field, want in (("format", FORMAT), ("kind", kind)):
        if body.get(field) != want:
            raise BadInput(f"{path}: {field} is {body.get(field)!r}, this version needs {want!r}; make it again")
    return body


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises BadInput, with `remedy`, when it is missing or is not a JSON object.
    """
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist: {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not readable as JSON ({error}): {remedy}") from None
    if not isinstance(body, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(body).__name__}: {remedy}")
    return body


def require_equal(path: Path, made: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str) -> None:
    """Refuse an artefact whose recorded settings differ, naming the first field that does.

    Raises BadInput with both values.
    """
    for field, want in wanted.items():
        have = made.get(field)
        if have != want:
            raise BadInput(f"{path}: made with {field} = {have!r}, this run wants {want!r}: {remedy}")


MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RuntimeError, EOFError)
"""What code meets when fields of a file are missing or of another form than we write."""


class understood:  # noqa: N801 (used like a function)
    """Around the reading of something that may be damaged: what it makes of our code becomes a refusal.

        with understood(path, "run `draftmill extract` again"):
            width = manifest["width"] + 1

    Raises BadInput, with the cause attached.
    """

    def __init__(self, path: Path | str, remedy: str) -> None:
        self.path, self.remedy = path, remedy

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, MALFORMED):
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise BadInput(f"{self.path}: damaged, or not one of ours ({what}): {self.remedy}") from error


SINCE = "DRAFTMILL_SINCE"
"""Environment variable: when Snakemake's work began, in seconds since the epoch. Without it nothing is put back."""


class State:
    """`state.json` beside a stage's work: *running*, or *done* (written after the manifest, with a copy of it).

    State running: an interrupted run to resume. Manifest gone and state done: somebody forced a re-run. But work that
    was done after Snakemake began cannot be what was to be forced: an orphan of a killed Snakemake did it, or a job
    whose end Snakemake missed, and Snakemake deleted the manifest to try again. `recover` puts it back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        return read_json(self.path, "delete it to start over") if self.path.exists() else {}

    def running(self, **more: Any) -> None:
        write_json(self.path, {"status": "running", **more})

    def done(self, manifest: Path, **more: Any) -> None:
        """The work is finished, and `manifest` published."""
        write_json(self.path, {"status": "done", "manifest": read_json(manifest, "make it again"), **more})

    def recover(self, manifest: Path) -> bool:
        """Put a manifest back that was deleted although nobody forced a re-run, before anything else is looked at.

        Gives back whether it did.
        """
        body = self.read()
        lost = body.get("status") == "done" and "manifest" in body and not manifest.exists()
        if lost and self.path.stat().st_mtime > float(os.environ.get(SINCE, "inf")):
            write_json(manifest, body["manifest"])
            return True
        return False

    def wanted(self, manifest: Path, kept: bool = True) -> bool:
        """True when a manifest is missing although its work was begun: a job that failed, or one that is to be forced.

        Of work that is not `kept` once others have used it, only one that failed.
        """
        if manifest.exists():
            return False
        status = self.read().get("status")
        return status == "running" or (status == "done" and kept)

    def forced(self, manifest: Path) -> bool:
        """True when finished work has lost its manifest: set the old work aside and start over."""
        return self.read().get("status") == "done" and not manifest.exists()

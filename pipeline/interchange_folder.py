"""The folder of an export: where it may go, and how it gets there whole or not at all. No torch here."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from data.errors import BadInput
from data.manifest import fsync_folder, read_json

MANIFEST = "draftmill.json"


def destination(to: Path) -> Path:
    """The folder that `--to` names, as an absolute path: one whose replacement costs nobody's files.

    Raises BadInput unless it is missing, empty, or one of our exports, and can be replaced as a whole.
    """
    folder = to.resolve()
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise BadInput(f"--to {to}: {place} is a file: name a folder")
    if folder.is_mount() or Path.cwd().is_relative_to(folder):
        raise BadInput(
            f"--to {to}: an export replaces its folder as a whole, and {folder} is a mount point or what this command "
            "runs in: name a folder inside it"
        )
    if folder.exists() and any(folder.iterdir()) and not _holds_export(folder):
        raise BadInput(
            f"--to {to}: {folder} is neither empty nor an export of draftmill (no {MANIFEST} of kind export), and all "
            "in it would be deleted: name a new or an empty folder"
        )
    return folder


def _holds_export(folder: Path) -> bool:
    """Of whatever format version: an export of an older one may be made again."""
    try:
        return read_json(folder / MANIFEST, "").get("kind") == "export"
    except BadInput:
        return False


def new_beside(folder: Path) -> Path:
    """A new folder beside `folder` to write an export in; what killed exports to `folder` left there is removed."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.(tmp|old)")
    for left in folder.parent.glob(".*"):
        match = ours.fullmatch(left.name)
        if match and (match[1] == str(os.getpid()) or not Path("/proc", match[1]).exists()):
            shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    return temporary


def put_in_place(temporary: Path, folder: Path) -> None:
    """Let what was written take the place of `folder` by a rename."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)

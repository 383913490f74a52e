"""What a run's cache will still take of the disk, part by part, before it is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.layout import Layout, part_name
from data.manifest import read_manifest
from data.settings import Run
from data.shaping import cache_settings


@dataclass(frozen=True)
class Need:
    """Bytes yet to be stored: of one part, and of all parts with it."""

    part: int
    cache: int


def need_of(run: Run, part: int, size: int, tokens: int) -> Need:
    """What is yet to be stored when `part`, of so many tokens, takes `size` bytes in all.

    Another part takes bytes by its tokens (the mean of all parts, where it has no token table yet), at the rate of the
    finished parts, or at this part's when none is. Before one is, nobody knows what a compressor saves: others do not
    count. What lies in a part's folder is stored already.
    """
    layout, parts = Layout.of(run), range(run.extract.parts)
    made = {other: body for other in parts if (body := _finished(run, layout, other)) is not None}
    known = {other: _tokens(layout.tokens(other)) for other in parts if layout.tokens(other).exists()}
    mean = sum(known.values()) / max(1, len(known))
    rate = size / max(1, tokens) if run.extract.compressor == "none" else 0.0
    if done := sum(body["counts"]["tokens"] for body in made.values()):
        rate = sum(body["counts"]["bytes"] for body in made.values()) / done
    own = max(0, size - _stored(layout, part))
    others = (
        max(0, round(rate * known.get(other, mean)) - _stored(layout, other))
        for other in parts
        if other != part and other not in made
    )
    return Need(own, own + sum(others))


def _finished(run: Run, layout: Layout, part: int) -> Mapping[str, Any] | None:
    """The manifest of a part that is there and made with the run's settings."""
    if not layout.cache_part(part).exists():
        return None
    body = read_manifest(layout.cache_part(part), "cache")
    return body if body["settings"] == cache_settings(run) else None


def _tokens(manifest: Path) -> int:
    return read_manifest(manifest, "tokens")["counts"]["tokens"]


def _stored(layout: Layout, part: int) -> int:
    """Bytes that a part's files take now: no hole of one that is being written, and none that was renamed meanwhile."""
    total = 0
    for folder, _, names in os.walk(layout.cache / part_name(part)):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(folder, name))
                total += min(status.st_size, 512 * status.st_blocks)
    return total

"""Is the cache what its manifests say, and what the target says? Every byte, shape and count; sampled rows again.

Training refuses damage in what it reads, when it reads it. This finds all of it before, and states that were never the
target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput, Failure
from data.layout import Layout, part_name
from data.manifest import read_manifest
from data.provenance import refuse, stale_part
from data.settings import Run, load_run

if TYPE_CHECKING:
    from pipeline.job import Job

SHOWN = 20
"""Problems printed of a part."""
SAMPLED = 16
"""Rows, over all parts, that the target runs again; at least 2 of a part."""


@click.command("verify")
@click.argument("run_file", type=click.Path())
@click.option("--part", type=click.IntRange(min=0), help="One part; all of them when omitted.")
@click.option("--fast", is_flag=True, help="Manifests and file sizes only: seconds, and no target.")
def command(run_file: str, part: int | None, fast: bool) -> None:
    """Check every byte of the cache, and sampled rows against the target."""
    from pipeline.console import say
    from pipeline.job import job

    run = load_run(run_file)
    if part is not None and part >= run.extract.parts:
        raise BadInput(f"--part {part}: this run has parts 0 to {run.extract.parts - 1}")
    parts = tuple(range(run.extract.parts)) if part is None else (part,)
    label = "" if part is None else part_name(part)
    with job(run, "verify", label=label, gpus=0 if fast else run.target.gpus) as work:
        check = Verification(run, work, fast)
        problems = list(check.head(parts[0]))
        for line in problems:
            say(line)
        for number in parts:
            lines = list(check.part(number))
            for line in lines[:SHOWN]:
                say(f"{part_name(number)}: {line}")
            problems += lines
            say(f"{part_name(number)}: {'whole' if not lines else f'{len(lines)} problems'}")
        if problems:
            found = f"{len(problems)} problems in the cache of {check.layout.folder}, first: {problems[0]}"
            raise Failure(f"{found}: {check.remedy()}")
        say(f"verified {len(parts)} parts" + (" (sizes and manifests only)" if fast else ""))


class Verification:
    """One pass over the parts; the target is loaded when the first sound part needs it."""

    def __init__(self, run: Run, work: Job, fast: bool) -> None:
        self.run, self.work, self.fast = run, work, fast
        self.layout = Layout.of_cache(run)
        self._target: Any = None
        self._rotten: list[Path] = []
        self._older: set[str] = set()

    def head(self, part: int) -> Iterator[str]:
        """What is wrong with head.safetensors, which must be that of the part's target."""
        from pipeline.head import head_damage

        manifest = read_manifest(self.layout.cache_part(part), "cache")
        if line := head_damage(self.layout, {"target": manifest["target"]}, self.fast):
            yield line

    def part(self, part: int) -> Iterator[str]:
        """What is wrong with a part: inputs, codec, files, shapes, values, and sampled rows. Stops at the first kind.

        Raises BadInput when it was made with other settings.
        """
        from data.part import codec_path, damage, load_codec

        path = self.layout.cache_part(part)
        manifest = read_manifest(path, "cache")
        if stale := stale_part(self.run, part, manifest):
            if stale.setting:
                refuse(stale)
            self._older.add(stale.stage)
            yield f"{stale.path}: {stale.what}"
            return
        try:
            load_codec(self.layout, manifest["codec"])
        except BadInput:
            yield f"{codec_path(self.layout)} is missing, damaged or not what {path.name} was written with"
            return
        found = damage(self.layout, part, self.fast)
        yield from found
        if not found and not self.fast:
            for line in self._content(part, manifest):
                found.append(line)
                yield line
        if found and not damage(self.layout, part, fast=True):
            self._rotten.append(path)

    def remedy(self) -> str:
        """What makes the problems found so far go.

        Extract mends by itself what sizes tell, and what parts share. A part that only its bytes give away counts as
        there as long as its manifest is.
        """
        from data.part import AGAIN

        again = AGAIN
        if "regenerate" in self._older:
            again = f"run `draftmill regenerate` again, then {AGAIN}"
        if not self._rotten:
            return again
        more = f" and the manifests of {len(self._rotten) - SHOWN} more parts" if len(self._rotten) > SHOWN else ""
        return f"remove {' '.join(map(str, self._rotten[:SHOWN]))}{more} and {again}"

    def _content(self, part: int, manifest: dict[str, Any]) -> Iterator[str]:
        from pipeline.audit import PartAudit

        audit = PartAudit(self.layout, part, manifest, self.work.device)
        for lines in (audit.shapes(), audit.values()):
            found = False
            for line in lines:
                self.work.check_stop()
                found = True
                yield line
            if found:
                return
        yield from self._target_says(part, audit)

    def _target_says(self, part: int, audit: Any) -> Iterator[str]:
        from pipeline.console import say
        from pipeline.target import load_target

        if self._target is None:
            self._target = load_target(self.run, self.work.device)
        count = max(2, SAMPLED // self.run.extract.parts)
        worst = 0.0
        for error, complaint in audit.against(self._target, count):
            self.work.check_stop()
            worst = max(worst, error)
            if complaint is not None:
                yield complaint
        say(f"{part_name(part)}: sampled rows are within {worst:.2g} of a fresh forward pass (relative L2)")

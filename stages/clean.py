"""`draftmill clean RUN`: free the disk of what can be made again, after showing how much that is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import fsync_folder, read_json
from data.settings import Run, load_run
from pipeline.console import say, size
from pipeline.journal import read_status, statuses

if TYPE_CHECKING:
    from data.store import Bucket

USERS = {"cache": ("extract", "verify", "train"), "checkpoints": ("train", "eval", "export")}
"""Stages that read or write what is to be deleted: others may go on meanwhile."""


@dataclass(frozen=True)
class Doomed:
    """Something to delete: `first` is what makes it count as there, and goes before the rest; `objects` of buckets,
    with their bytes, are more of it."""

    what: str
    path: Path
    first: tuple[Path, ...] = ()
    objects: Mapping[Bucket, Mapping[str, int]] = field(default_factory=dict)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Bytes and place of what goes."""
        yield _bytes(self.path), f"{self.what}  {self.path}"
        for bucket, sizes in self.objects.items():
            yield sum(sizes.values()), f"shards of the cache  {bucket}"


@click.command("clean")
@click.argument("run_file", type=click.Path())
@click.option("--cache", is_flag=True, help="The hidden-state cache: extract makes it again.")
@click.option(
    "--checkpoints", is_flag=True,
    help="Checkpoints of trained drafters, all but the best and the last, and work that forced re-runs set aside.",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="The whole folder of the run, logs and exports included.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(run_file: str, cache: bool, checkpoints: bool, everything: bool, yes: bool) -> None:
    """Free the disk of caches or checkpoints."""
    run = load_run(run_file)
    if cache + checkpoints + everything != 1:
        raise BadInput("say what to delete: one of --cache, --checkpoints and --all")
    _require_quiet(run, cache or everything, None if everything else USERS["cache" if cache else "checkpoints"])
    objects, out_of_reach = _objects(run) if cache or everything else ({}, [])
    doomed = list(_whole(run, objects) if everything else _cache(run, objects) if cache else _checkpoints(run))
    if not doomed:
        say("nothing to delete")
        return
    if (cache or everything) and (others := _readers(run)):
        say(f"other runs read this cache (cache.from) and cannot train without it: {', '.join(others)}")
    lines = [line for item in doomed for line in item.lines()]
    for nbytes, text in lines:
        click.echo(f"{size(nbytes):>12}  {text}")
    if not yes and not click.confirm(f"Delete {size(sum(nbytes for nbytes, _ in lines))}?"):
        say("nothing was deleted")
        return
    for item in doomed:
        _delete(item)
    if out_of_reach:
        raise Failure(f"{'; '.join(out_of_reach)}. What lies there was left: remove it with the bucket's own tools")


def _require_quiet(run: Run, cache: bool, stages: tuple[str, ...] | None) -> None:
    """Refuse while one of `stages` (None: any) of the run is at work, or with `cache` a training that reads its cache.

    Raises BadInput.
    """
    jobs = [job for job in statuses(run) if stages is None or job["stage"] in stages]
    if cache:
        others = map(read_status, run.folder.parent.glob("*/logs/train/*.status.json"))
        jobs += [job for job in others if job.get("cache") == run.name]
    for job in jobs:
        if job["status"] in ("running", "waiting"):
            raise BadInput(
                f"{job['stage']} {job['label']} of run {job['run']} is at work (pid {job['pid']}): end it first"
            )


def _readers(run: Run) -> list[str]:
    """Other runs under the root that read this one's cache: their jobs noted it, and their drafters' manifests do."""
    root, found = run.folder.parent, set()
    for path in root.glob("*/logs/*/*.status.json"):
        if read_status(path).get("cache") == run.name:
            found.add(path.relative_to(root).parts[0])
    for path in root.glob("*/drafters/*/train.json"):
        with suppress(BadInput):  # whatever has become of another run's manifest
            if read_json(path, "make it again").get("cache", {}).get("run") == run.name:
                found.add(path.relative_to(root).parts[0])
    return sorted(found - {run.name})


def _cache(run: Run, objects: Mapping[Bucket, Mapping[str, int]]) -> Iterator[Doomed]:
    layout = Layout.of(run)
    if layout.cache.is_dir():
        yield Doomed("hidden-state cache", layout.cache, _manifests(layout), objects)


def _manifests(layout: Layout) -> tuple[Path, ...]:
    return tuple(sorted(layout.cache.glob("part-*.json")))


def _objects(run: Run) -> tuple[dict[Bucket, dict[str, int]], list[str]]:
    """Objects of the run's cache by bucket, and what is wrong with the buckets that could not be asked.

    Says of those, and of one that only the run file names, that nothing is deleted there.
    """
    from data.store import Bucket, open_store, written

    layout, objects, out_of_reach = Layout.of(run), {}, []
    buckets = written(layout)
    for bucket in sorted(buckets, key=str):
        try:
            objects[bucket] = bucket.sizes("")
        except Failure as error:
            say(f"{error}. What lies there will stay")
            out_of_reach.append(str(error))
    named = open_store(layout, run.extract.store)
    if isinstance(named, Bucket) and named not in buckets:
        say(
            f"{named}: left alone: no record in {layout.cache} says that this run wrote there; "
            "remove its objects there, if any, with the bucket's own tools"
        )
    return objects, out_of_reach


def _checkpoints(run: Run) -> Iterator[Doomed]:
    """Checkpoints that nothing needs any more. An unfinished drafter keeps all: it resumes from one."""
    layout = Layout.of(run)
    for name in run.drafters:
        for path in sorted(layout.drafter(name).parent.glob(f".{name}.old-*")):
            yield Doomed(f"earlier work of {name}", path)
        manifest = layout.train_manifest(name)
        if not manifest.exists():
            continue
        body = read_json(manifest, "run `draftmill train` again")
        kept = {f"step-{int(body[which]['step']):06d}" for which in ("best", "last")}
        for path in sorted(layout.checkpoints(name).glob("step-*")):
            if path.name not in kept:
                yield Doomed(f"checkpoint of {name}", path, (path / "meta.json",))


def _whole(run: Run, objects: Mapping[Bucket, Mapping[str, int]]) -> Iterator[Doomed]:
    layout = Layout.of(run)
    if layout.folder.is_dir():
        yield Doomed("the whole run", layout.folder, _manifests(layout), objects)


def _delete(item: Doomed) -> None:
    """Delete so that a kill in between leaves nothing that looks whole."""
    for path in item.first:
        path.unlink(missing_ok=True)
    if item.first and item.path.is_dir():
        fsync_folder(item.first[0].parent)
    for bucket, names in item.objects.items():  # before the folder, whose records lead to them
        bucket.remove(name for name in names if "/" not in name)
        bucket.remove(names)
    _empty(item.path)


def _empty(folder: Path) -> None:
    """Remove a folder. One that is a link, to another disk say, is emptied and stays a link."""
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _bytes(path: Path) -> int:
    """Bytes under a folder; links count nothing and lead nowhere."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path, followlinks=False)
        for name in names
    )

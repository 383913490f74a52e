"""What is known of a run, gathered from its files: the matter of the report page. Whatever is absent is said so.

Everything here is plain data from manifests, `metrics.jsonl`, `eval/*/*.json` and job status files; nothing is
computed again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from data.accounting import Accounting
from data.errors import BadInput
from data.layout import Layout
from data.manifest import read_json, read_manifest
from data.settings import Run
from pipeline.journal import statuses
from pipeline.standing import artefacts

Body = dict[str, Any]
STAGES = ("prepare", "regenerate", "extract", "verify", "train", "eval", "export", "report")


@dataclass(frozen=True)
class DrafterStory:
    """One drafter: `trained` is train.json (None: not finished), `steps` and `walks` the lines of metrics.jsonl,
    `evaluations` the bodies of its benchmarks, `exported` its export's manifest."""

    name: str
    trained: Body | None = None
    steps: list[Body] = field(default_factory=list)
    walks: list[Body] = field(default_factory=list)
    evaluations: list[Body] = field(default_factory=list)
    exported: Body | None = None

    @property
    def block_size(self) -> int | None:
        if self.trained is not None:
            return self.trained["config"]["block_size"]
        return next((body["block_size"] for body in self.evaluations), None)

    @property
    def walk(self) -> Body | None:
        """Numbers of the validation walk at the checkpoint that was kept as best."""
        if self.trained is not None and self.trained["best"]["validation"]:
            return self.trained["best"]["validation"]
        return self.walks[-1]["validation"] if self.walks else None


@dataclass(frozen=True)
class CacheFacts:
    """A finished cache, all parts together. `codecs`: bytes that each codec would take for the same states.
    `on_policy`: of how many supervised tokens, in how many rows, which share the target itself would have said."""

    counts: dict[str, int]
    layers: list[int]
    width: int
    codec: str
    compressor: str
    codecs: dict[str, int]
    on_policy: Body
    manifest: Body


@dataclass(frozen=True)
class Job:
    """Newest attempt of a job: its seconds, how it ended, and where its progress stood last."""

    label: str
    seconds: float
    status: str
    attempt: int
    rate: str
    note: str


@dataclass(frozen=True)
class StageTime:
    """A stage's jobs: seconds of work in all, and from the first start to the last sign of life."""

    stage: str
    jobs: list[Job]
    work: float
    span: float

    @property
    def unfinished(self) -> bool:
        return any(job.status != "done" for job in self.jobs)


@dataclass(frozen=True)
class Story:
    """All of a run. `others` are drafters that were only evaluated, `servers` what `eval --server` found, `account`
    what became of the rows that were read; `missing` says in plain words what could not be shown, and what makes it;
    `stale` what is shown although the run file asks for something else by now, and why.
    """

    run: Run
    drafters: list[DrafterStory]
    others: list[DrafterStory]
    servers: list[Body]
    cache: CacheFacts | None
    account: Body | None
    prompts: dict[str, int] | None
    tokens: Body | None
    times: list[StageTime]
    missing: list[str]
    stale: list[str]


def gather(run: Run) -> Story:
    """Read everything that there is of a run."""
    layout, missing = Layout.of(run), _Missing()
    drafters = [_drafter(layout, name, missing, bool(run.eval.benchmarks)) for name in run.drafters]
    known = {drafter.name for drafter in drafters}
    folders = sorted(path.parent.name for path in layout.folder.glob("eval/*/manifest.json"))
    others = [
        DrafterStory(name, evaluations=list(_evaluations(layout, name, missing)))
        for name in folders
        if name not in known
    ]
    return Story(
        run,
        drafters,
        [other for other in others if other.evaluations],
        list(_servers(layout, missing)),
        _cache(run, missing),
        missing.attempt(lambda: _account(run)),
        missing.attempt(lambda: _sums(run, layout.prompts, "prompts")),
        missing.attempt(lambda: _example(layout, run)),
        list(stage_times(run)),
        missing.lines,
        list(out_of_date(run)),
    )


def out_of_date(run: Run) -> Iterator[str]:
    """What is there although the run file asks for something else by now: stage and reason."""
    for stage, made in artefacts(run).items():
        reasons = dict.fromkeys(each.why for each in made if each.why is not None)
        if stage != "report":  # which is about to be made
            yield from (f"{stage}: {reason}" for reason in reasons)


class _Missing:
    """Collects what is absent: the files' own errors name the file and what to run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def attempt(self, read: Callable[[], Any]) -> Any:
        """What `read` returns, or None with a line when a file is not there or not usable."""
        try:
            return read()
        except BadInput as error:
            self.lines.append(str(error))
            return None


def _drafter(layout: Layout, name: str, missing: _Missing, evaluated: bool) -> DrafterStory:
    lines = list(metrics_lines(layout.metrics(name)))
    if not lines:
        missing.lines.append(f"{layout.metrics(name)}: no curves yet: run `draftmill train`")
    return DrafterStory(
        name,
        missing.attempt(lambda: read_manifest(layout.train_manifest(name), "drafter")),
        [line for line in lines if "loss" in line],
        [line for line in lines if "validation" in line],
        list(_evaluations(layout, name, missing)) if evaluated else [],
        missing.attempt(lambda: read_manifest(layout.export_manifest(name), "export")),
    )


def metrics_lines(path: Path) -> Iterator[Body]:
    """Lines of metrics.jsonl; a line that a kill or the disk has torn, at whatever byte, is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            body = json.loads(line)
            if isinstance(body, dict):
                yield body


def _evaluations(layout: Layout, name: str, missing: _Missing) -> Iterator[Body]:
    manifest = missing.attempt(lambda: read_manifest(layout.eval_manifest(name), "eval"))
    for record in manifest["files"] if manifest else ():
        path = layout.eval(name) / record["path"]
        body = missing.attempt(lambda path=path: read_json(path, "run `draftmill eval` again"))
        if body is not None and "histogram" in body:
            yield body


def _servers(layout: Layout, missing: _Missing) -> Iterator[Body]:
    for path in sorted(layout.folder.glob("eval/server-*/*.json")):
        body = missing.attempt(lambda path=path: read_json(path, "run `draftmill eval --server` again"))
        if body is not None and "server" in body:
            yield body


def _sums(run: Run, path: Callable[[int], Path], kind: str) -> dict[str, int]:
    """Counts of a part's manifests over all parts: sums, and the longest of all rows."""
    total: dict[str, int] = {}
    for part in range(run.extract.parts):
        for key, value in read_manifest(path(part), kind)["counts"].items():
            if isinstance(value, int):
                before = total.get(key, 0)
                total[key] = max(before, value) if key == "longest" else before + value
    return total


def _account(run: Run) -> Body:
    """What `prepare` read, kept and dropped, and lengths; where answers are regenerated, as it is after them, with
    `answers` asked for in `counts` where a prompt has several: what is kept then, and dropped after, are answers."""
    layout = Layout.of_cache(run)
    read = read_manifest(layout.prepared, "accounting")
    if run.data.responses != "regenerate":
        return read
    answered = Accounting()
    for part in range(run.extract.parts):
        answered.add(Accounting.of(read_manifest(layout.tokens(part), "tokens")))
    body = answered.body()
    dropped = Counter(read["dropped"]) + Counter(body["dropped"])
    notes = Counter(read["notes"]) + Counter(body["notes"])
    counts = {**read["counts"], "kept": body["counts"]["kept"]}
    if run.data.regenerate.answers > 1:
        counts["answers"] = body["counts"]["rows_in"]
    return {**read, "counts": counts, "dropped": dict(dropped), "notes": dict(notes), "lengths": body["lengths"]}


def _example(layout: Layout, run: Run) -> Body:
    """Counts of the token tables, and one rendered row."""
    first = read_manifest(layout.tokens(0), "tokens")
    return {"counts": _sums(run, layout.tokens, "tokens"), "example": first.get("example")}


def _cache(run: Run, missing: _Missing) -> CacheFacts | None:
    layout = Layout.of_cache(run)
    if not layout.cache_part(0).exists() and Layout.of(run).dropped.exists():
        missing.lines.append(f"{layout.cache}: the cache was dropped after training (extract.keep: false)")
        return None
    counts = missing.attempt(lambda: _sums(run, layout.cache_part, "cache"))
    if counts is None:
        return None
    manifest = read_manifest(layout.cache_part(0), "cache")
    layers, width = manifest["layer_ids"], manifest["width"]
    return CacheFacts(
        counts,
        layers,
        width,
        manifest["codec"]["name"],
        manifest["compressor"],
        {name: size * counts["states"] for name, size in codec_sizes(len(layers), width).items()},
        on_policy(run, layout),
        manifest,
    )


def on_policy(run: Run, layout: Layout) -> Body:
    """`{rows, tokens, share}` of what extraction found in each part, pooled over tokens; share None without tokens."""
    found = [read_manifest(layout.cache_part(part), "cache")["on_policy"] for part in range(run.extract.parts)]
    rows, tokens = (sum(body[name] for body in found) for name in ("rows", "tokens"))
    hits = sum(body["share"] * body["tokens"] for body in found)
    return {"rows": rows, "tokens": tokens, "share": hits / tokens if tokens else None}


def codec_sizes(layers: int, width: int) -> dict[str, int]:
    """Stored bytes of one position by codec."""
    from data.codec import CODECS

    return {name: kind(layers, width).bytes_per_state() for name, kind in CODECS.items()}


def stage_times(run: Run) -> Iterator[StageTime]:
    """Time by stage, in the order of a run."""
    jobs = [job for job in statuses(run) if job.get("started") and job.get("seen")]
    for stage in STAGES[:-1]:
        own = [job for job in jobs if job["stage"] == stage]
        if not own:
            continue
        starts, ends = [_seconds(job["started"]) for job in own], [_seconds(job["seen"]) for job in own]
        every = [_job(job, end - start) for job, start, end in zip(own, starts, ends, strict=True)]
        yield StageTime(stage, every, sum(job.seconds for job in every), max(ends) - min(starts))


def _job(status: Body, seconds: float) -> Job:
    progress = status.get("progress") or {}
    rate = f"{progress['rate']:.3g} {progress['unit']}/s" if progress.get("rate") else ""
    note, attempt = progress.get("note") or "", status.get("attempt", 1)
    return Job(status["label"], status.get("seconds", seconds), status["status"], attempt, rate, note)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()

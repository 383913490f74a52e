"""Where a run stands: which outputs of its stages are there, are what the run file asks for now, and are needed.

Without torch: `draftmill status` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import BadInput
from data.layout import Layout
from data.manifest import State, read_manifest, understood
from data.provenance import (
    Stale,
    cache_fingerprint,
    stale_drafter,
    stale_eval,
    stale_export,
    stale_part,
    stale_prompts,
    stale_tokens,
)
from data.settings import Run


@dataclass(frozen=True)
class Artefact:
    """One output of a stage: whether it is there, and `why` it is not what the run asks for now (None: it is)."""

    there: bool
    why: str | None = None
    begun: bool = False
    """Missing although its work was begun: interrupted, or to be forced."""

    @property
    def current(self) -> bool:
        return self.there and self.why is None

    def after(self, *sources: Artefact) -> Artefact:
        """This one, which is out of date too when one of its sources is."""
        if self.current and any(source.why for source in sources):
            return Artefact(True, "what it was made from is out of date")
        return self


def artefacts(run: Run) -> dict[str, list[Artefact]]:
    """What each stage makes, in the order of the stages."""
    layout, own_cache = Layout.of(run), run.cache.run is None
    parts = range(run.extract.parts) if own_cache else ()
    prompts = [_look(layout.prompts(part), "prompts", partial(stale_prompts, run, part)) for part in parts]
    cache = [
        _look(layout.cache_part(part), "cache", partial(stale_part, run, part), _wanted(run, layout.cache_state(part)))
        for part in parts
    ]
    tokens = []
    if run.data.responses == "regenerate":
        tokens = [
            _look(
                layout.tokens(part), "tokens", partial(stale_tokens, run, part), _wanted(run, layout.tokens_state(part))
            )
            for part in parts
        ]
        tokens = [each.after(source) for each, source in zip(tokens, prompts, strict=True)]
    cache = [each.after(source) for each, source in zip(cache, tokens or prompts, strict=True)]
    now = _fingerprint(run)
    drafters, evals, exports = [], [], []
    for name in run.drafters:
        judge = partial(stale_drafter, run, name, now=now)
        drafter = _look(layout.train_manifest(name), "drafter", judge).after(*cache)
        drafters.append(drafter)
        if run.eval.benchmarks:
            evals.append(_look(layout.eval_manifest(name), "eval", partial(stale_eval, run, name)).after(drafter))
        export = _look(layout.export_manifest(name), "export", partial(stale_export, run, name))
        exports.append(export.after(drafter, *evals[-1:]))
    report = [_report(run).after(*exports, *evals)]
    return {
        "prepare": prompts,
        "regenerate": tokens,
        "extract": cache,
        "train": drafters,
        "eval": evals,
        "export": exports,
        "report": report,
    }


def _wanted(run: Run, state: Path) -> Callable[[Path], bool]:
    return partial(State(state).wanted, kept=run.extract.keep)


def _look(
    path: Path,
    kind: str,
    judge: Callable[[dict[str, Any]], Stale | None],
    wanted: Callable[[Path], bool] = lambda path: False,
) -> Artefact:
    try:
        if not path.exists():
            return Artefact(False, begun=wanted(path))
        with understood(path, "make it again"):
            stale = judge(read_manifest(path, kind))
    except BadInput as error:
        return Artefact(True, str(error))
    return Artefact(True, None if stale is None else f"{stale.path}: {stale.what}")


def _fingerprint(run: Run) -> str | None:
    try:
        with understood(Layout.of_cache(run).cache, "make it again"):
            return cache_fingerprint(run)
    except BadInput:  # a part that cannot be read says so itself
        return None


def _report(run: Run) -> Artefact:
    """The page has no manifest: it is out of date once something that it shows is younger."""
    layout = Layout.of(run)
    if not layout.report.exists():
        return Artefact(False)
    made = layout.report.stat().st_mtime
    for path in (each(name) for name in run.drafters for each in (layout.eval_manifest, layout.export_manifest)):
        if path.exists() and path.stat().st_mtime > made:
            return Artefact(True, f"{layout.report} is older than {path}")
    return Artefact(True)


def needed(found: dict[str, list[Artefact]]) -> dict[str, bool]:
    """Whether what is missing of a stage is needed: rows, tokens and cache may be gone once drafters are trained."""
    needs, consumer = dict.fromkeys(found, True), "train"
    for name in ("extract", "regenerate", "prepare"):
        if found[name]:
            needs[name] = has_work(found[consumer], needs[consumer])
            consumer = name
    return needs


def has_work(made: list[Artefact], needed: bool) -> bool:
    """Whether a stage has something to make: what is out of date, and what is missing and needed."""
    return any(each.why or each.begun or (needed and not each.there) for each in made)

"""Is an artefact what the run file and its inputs ask for now? Its manifest says what it was made with, and from what.

Stages refuse by these answers, `status` shows them. Inputs that are gone tell nothing: a cache may outlive its tokens,
and a drafter its cache. Nothing here loads torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import BadInput
from data.layout import Layout
from data.manifest import fingerprint, read_manifest
from data.settings import Run
from data.shaping import cache_settings, shaping

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Stale:
    """Why the artefact at `path` is not what is asked for, and the `stage` that makes it anew."""

    path: Path
    what: str
    stage: str
    setting: bool
    """A setting differs, which can be changed back; else an input."""

    def __str__(self) -> str:
        back = ", or change it back" if self.setting else ""
        return f"{self.path}: {self.what}: run `draftmill {self.stage}` again{back}"


def refuse(stale: Stale | None) -> None:
    """Raises BadInput when there is something to refuse."""
    if stale is not None:
        raise BadInput(str(stale))


def stale_prompts(run: Run, part: int, body: Body) -> Stale | None:
    """Of a part that `prepare` made, whose manifest is `body`."""
    return _by_settings(Layout.of(run).prompts(part), "prepare", body.get("settings"), _shaping(run, "prepare"))


def stale_tokens(run: Run, part: int, body: Body) -> Stale | None:
    """Of a part's token rows, which `prepare` made, or `regenerate` from prompts."""
    layout, stage = Layout.of(run), "prepare" if run.data.responses == "keep" else "regenerate"
    by_settings = _by_settings(layout.tokens(part), stage, body.get("settings"), _shaping(run, stage))
    return by_settings or _stale_answers(layout, part, body)


def stale_part(run: Run, part: int, body: Body) -> Stale | None:
    """Of a part of the cache that `run` reads, and of the tokens that it was made from."""
    layout = Layout.of_cache(run)
    path, tokens = layout.cache_part(part), layout.tokens(part)
    stale = _by_settings(path, "extract", body.get("settings"), _cache_settings(run, body))
    stale = stale or _by_input(path, "extract", body, "tokens", tokens)
    if stale is None and tokens.exists():
        return _stale_answers(layout, part, read_manifest(tokens, "tokens"))
    return stale


def stale_drafter(run: Run, name: str, body: Body, now: str | None = None) -> Stale | None:
    """Of a trained drafter, whose `train.json` is `body`; `now` is the `cache_fingerprint`, where it is known."""
    path, cache = Layout.of(run).train_manifest(name), body.get("cache", {})
    stale = _by_settings(path, "train", body.get("settings"), _shaping(run, "train", name))
    stale = stale or _by_settings(path, "train", cache.get("settings"), _cache_settings(run, cache))
    return stale or _differs(path, "train", body, "cache", now or cache_fingerprint(run), Layout.of_cache(run).cache)


def stale_eval(run: Run, name: str, body: Body) -> Stale | None:
    """Of a drafter's evaluation."""
    layout = Layout.of(run)
    path = layout.eval_manifest(name)
    stale = _by_settings(path, "eval", body.get("settings"), _shaping(run, "eval", name))
    return stale or _by_input(path, "eval", body, "drafter", layout.train_manifest(name))


def stale_export(run: Run, name: str, body: Body) -> Stale | None:
    """Of a drafter's export."""
    layout = Layout.of(run)
    path = layout.export_manifest(name)
    stale = _by_input(path, "export", body, "drafter", layout.train_manifest(name))
    return stale or _by_input(path, "export", body, "eval", layout.eval_manifest(name))


def cache_fingerprint(run: Run) -> str | None:
    """What stands for the whole cache that `run` reads; None while a part of it is missing."""
    paths = [Layout.of_cache(run).cache_part(part) for part in range(run.extract.parts)]
    if not all(path.exists() for path in paths):
        return None
    return fingerprint([read_manifest(path, "cache")["fingerprint"] for path in paths])


def flat(body: Body, before: str = "") -> dict[str, Any]:
    """Nested settings as `{"data.max_length": 3072, ...}`."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


def _shaping(run: Run, stage: str, drafter: str | None = None) -> Body:
    return json.loads(shaping(run, stage, drafter))


def _cache_settings(run: Run, made: Body) -> Body:
    """The settings that a cache must have; layers given by hand equal those that `auto` chose."""
    wanted = cache_settings(run)
    if "settings" in made and wanted["extract.layers"] == list(made["layer_ids"]):
        wanted["extract.layers"] = made["settings"]["extract.layers"]
    return wanted


def _by_settings(path: Path, stage: str, made: Body | None, wanted: Body) -> Stale | None:
    """The first setting that differs, also one that only the artefact has. None also where none were recorded."""
    if made is None:
        return None
    have, want = flat(made), flat(json.loads(json.dumps(wanted)))
    for field in {**want, **have}:
        if have.get(field) != want.get(field):
            text = f"made with {field} = {have.get(field)!r}, this run wants {want.get(field)!r}"
            return Stale(path, text, stage, setting=True)
    return None


def _by_input(path: Path, stage: str, body: Body, name: str, source: Path) -> Stale | None:
    """Whether the manifest at `source`, of the kind `name`, is another than the one that the artefact was made from."""
    now = read_manifest(source, name)["fingerprint"] if source.exists() else None
    return _differs(path, stage, body, name, now, source)


def _differs(path: Path, stage: str, body: Body, name: str, now: str | None, source: Path) -> Stale | None:
    made = body.get("inputs", {}).get(name)
    if made is None or now is None or made == now:
        return None
    text = f"made with inputs.{name} = {made}, {source} is {now} now"
    return Stale(path, text, stage, setting=False)


def _stale_answers(layout: Layout, part: int, tokens: Body) -> Stale | None:
    """Answers to prompts that were prepared again since."""
    return _by_input(layout.tokens(part), "regenerate", tokens, "prompts", layout.prompts(part))

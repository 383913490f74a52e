"""A finished run made of manifests alone, which say what they were made with and from, as stages leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.layout import Layout
from data.manifest import publish
from data.provenance import cache_fingerprint
from data.settings import Run
from data.shaping import cache_settings, shaping

KINDS = {"prompts": "prompts", "tokens": "tokens", "cache": "cache", "train.json": "drafter", "manifest.json": "eval"}


def make(run: Run, *paths: Path, **body: Any) -> None:
    """Manifests with nothing in them but `body`."""
    for path in paths:
        kind = KINDS.get(path.parent.name) or KINDS.get(path.name, "export")
        publish(path, kind, {"fingerprint": "f", **body})


def finish(run: Run) -> None:
    """Manifests as the stages of a finished run leave them, as far as they say what they were made with and from."""
    layout = Layout.of(run)

    def settings(stage: str, drafter: str | None = None) -> Any:
        return json.loads(shaping(run, stage, drafter))

    for part in range(run.extract.parts):
        make(run, layout.prompts(part), fingerprint=f"p{part}", settings=settings("prepare"))
        answers = {"settings": settings("regenerate"), "inputs": {"prompts": f"p{part}"}}
        make(run, layout.tokens(part), fingerprint=f"t{part}", **answers)
        states = {"settings": cache_settings(run), "layer_ids": [1, 2, 3], "inputs": {"tokens": f"t{part}"}}
        make(run, layout.cache_part(part), fingerprint=f"c{part}", **states)
    cache = {"run": run.name, "settings": cache_settings(run), "layer_ids": [1, 2, 3]}
    for name in run.drafters:
        trained = {"settings": settings("train", name), "cache": cache, "inputs": {"cache": cache_fingerprint(run)}}
        make(run, layout.train_manifest(name), fingerprint=f"d-{name}", **trained)
        inputs = {"drafter": f"d-{name}"}
        make(run, layout.eval_manifest(name), fingerprint=f"e-{name}", settings=settings("eval", name), inputs=inputs)
        make(run, layout.export_manifest(name), inputs={**inputs, "eval": f"e-{name}"})
    layout.report.parent.mkdir(parents=True, exist_ok=True)
    layout.report.write_text("page")

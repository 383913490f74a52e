"""Which settings shape which stage's artefact: what Snakemake compares to decide what runs again.

A setting that is listed for no stage (log intervals, reader counts, memory of jobs) never makes anything run again.
Later stages run again because their inputs changed, so each stage lists only what it reads itself.
"""

from __future__ import annotations

import json
from typing import Any

from data.settings import FORMAT, Run

Settings = dict[str, Any]

CACHE_FORMAT = 2
"""Version of the cache alone, so that a change makes nothing before it again. 2: every row has a crc32c."""


UNUSED_MUON_RATE = 1e-3
"""Stands for a rate that AdamW does not read: the default when it was first written down, so that no other default
makes those drafters again."""


def shaping(run: Run, stage: str, drafter: str | None = None) -> str:
    """The settings that shape what `stage` makes, as sorted JSON; `drafter` for train and eval."""
    settings = _STAGES[stage](run, drafter)
    return json.dumps({"format": FORMAT, **settings}, sort_keys=True)


def cache_settings(run: Run) -> Settings:
    """The settings that shape the cache, as `{"extract.codec": "fp8", ...}`, so that a refusal names the very one.

    Extract records them, consumers compare them, and Snakemake runs extract again by them.
    """
    sections = {"target": _target(run), "data": _data(run), "extract": _dump(run.extract, "keep", "compile")}
    if (answers := _answers(run)) is not None:
        sections["data.regenerate"] = answers
    flat = {f"{section}.{name}": value for section, body in sections.items() for name, value in body.items()}
    return {"format": FORMAT, "extract.format": CACHE_FORMAT, **flat}


def source_files(run: Run) -> list[str]:
    """Local files and folders of conversations that the run reads."""
    validation = () if isinstance(run.data.validation, float) else run.data.validation
    return [source.path for source in (*run.data.train, *validation) if source.path is not None]


def benchmark_files(run: Run) -> list[str]:
    """Local files of prompts that evaluation reads."""
    return [benchmark.path for benchmark in run.eval.benchmarks.values() if benchmark.path is not None]


def _dump(section: Any, *left_out: str) -> Settings:
    return section.model_dump(mode="json", by_alias=True, exclude=set(left_out))


def _target(run: Run, *left_out: str) -> Settings:
    return _dump(run.target, "gpus", "trust_remote_code", *left_out)


def _data(run: Run) -> Settings:
    return _dump(run.data, "max_dropped", "regenerate")


def _answers(run: Run) -> Settings | None:
    """How the target answers, and who does, without how many requests are under way; None: answers are kept."""
    if run.data.responses == "keep":
        return None
    server = run.data.regenerate.server
    who = None if server is None else {"url": server.url, "model": server.model}
    return _dump(run.data.regenerate, "batch_size", "server") | {"server": who}


def _prepare(run: Run, drafter: str | None) -> Settings:
    return {"target": _target(run, "dtype"), "data": _data(run), "parts": run.extract.parts}


def _regenerate(run: Run, drafter: str | None) -> Settings:
    data = _data(run) | {"regenerate": _answers(run)}
    return {"target": _target(run), "data": data, "parts": run.extract.parts}


def _extract(run: Run, drafter: str | None) -> Settings:
    return cache_settings(run)


def _train(run: Run, drafter: str | None) -> Settings:
    assert drafter is not None
    watching = ("log_every", "keep_last", "keep_best", "stall_timeout", "readers", "loggers")
    settings = run.train_of(drafter)
    train = _dump(settings, *watching)
    if settings.optimizer == "adamw":
        train["muon_learning_rate"] = UNUSED_MUON_RATE
    return {"drafter": _dump(run.drafter(drafter), "train", "gpus"), "train": train}


def _eval(run: Run, drafter: str | None) -> Settings:
    return {"target": _target(run), "eval": _dump(run.eval)}


def _export(run: Run, drafter: str | None) -> Settings:
    return {"target": _target(run, "dtype"), "checkpoints": "best"}


def _report(run: Run, drafter: str | None) -> Settings:
    return {"drafters": sorted(run.drafters)}


_STAGES = {
    "prepare": _prepare,
    "regenerate": _regenerate,
    "extract": _extract,
    "train": _train,
    "eval": _eval,
    "export": _export,
    "report": _report,
}

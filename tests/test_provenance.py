"""What an artefact was made with and from, against what is asked for and there now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import BadInput
from data.layout import Layout
from data.manifest import read_manifest
from data.provenance import (
    Stale,
    refuse,
    stale_drafter,
    stale_eval,
    stale_export,
    stale_part,
    stale_prompts,
    stale_tokens,
)
from data.settings import Run
from tests.finished import finish, make
from tests.flow import run_body

JUDGES: dict[str, tuple[Callable[..., Any], str, Any, Callable[..., Stale | None]]] = {
    "prompts": (Layout.prompts, "prompts", 1, stale_prompts),
    "tokens": (Layout.tokens, "tokens", 1, stale_tokens),
    "cache": (Layout.cache_part, "cache", 1, stale_part),
    "drafter": (Layout.train_manifest, "drafter", "base", stale_drafter),
    "eval": (Layout.eval_manifest, "eval", "base", stale_eval),
    "export": (Layout.export_manifest, "export", "base", stale_export),
}


@pytest.fixture
def made(tmp_path: Path) -> Run:
    run = Run.model_validate(run_body(root=str(tmp_path)))
    finish(run)
    return run


def changed(run: Run, section: str, **settings: Any) -> Run:
    body = run.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Run.model_validate({**body, section: {**body.get(section, {}), **settings}})


def judged(run: Run, what: str) -> Stale | None:
    path, kind, which, judge = JUDGES[what]
    return judge(run, which, read_manifest(path(Layout.of(run), which), kind))


@pytest.mark.parametrize("what", JUDGES)
def test_nothing_that_was_just_made_is_stale(made: Run, what: str) -> None:
    assert judged(made, what) is None
    refuse(judged(made, what))


@pytest.mark.parametrize(
    ("what", "section", "settings", "text"),
    [
        (
            "prompts",
            "data",
            {"max_length": 9},
            "max_length = 3072, this run wants 9: run `draftmill prepare` again",
        ),
        (
            "tokens",
            "data",
            {"regenerate": {"top_k": 9}},
            "regenerate.top_k = 0, .*: run `draftmill regenerate` again",
        ),
        (
            "cache",
            "extract",
            {"codec": "bf16"},
            "codec = 'fp8', .*: run `draftmill extract` again, or change it",
        ),
        ("drafter", "train", {"epochs": 1}, "train.epochs = 6, .*: run `draftmill train` again, or change it back"),
        (
            "drafter",
            "extract",
            {"codec": "bf16"},
            "codec = 'fp8', .*: run `draftmill train` again, or change it",
        ),
        ("eval", "eval", {"seed": 1}, "eval.seed = 0, .*: run `draftmill eval` again, or change it back"),
    ],
)
def test_a_changed_setting_is_refused_by_name_with_the_stage_that_makes_it_good(
    made: Run, what: str, section: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadInput, match=text):
        refuse(judged(changed(made, section, **settings), what))


@pytest.mark.parametrize("taken_away", [False, True])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("regenerate", {"server": {"url": "http://a/v1"}}), ("template_arguments", {"a": 1}), ("system_prompt", "s")],
)
def test_a_setting_that_only_one_side_has_counts(made: Run, setting: str, value: Any, taken_away: bool) -> None:
    """A server, or an argument of the template, was not missed when it was taken away."""
    with_it = changed(made, "data", **{setting: value})
    before, now = (with_it, made) if taken_away else (made, with_it)
    finish(before)
    assert f"made with data.{setting}" in str(judged(now, "tokens"))
    assert f"made with data.{setting}" in str(judged(now, "cache"))


def test_what_watches_training_and_how_many_gpus_it_takes_makes_nothing_stale(made: Run) -> None:
    for run in (changed(made, "train", log_every=1), changed(made, "target", gpus=2), changed(made, "jobs", retries=9)):
        assert not any(judged(run, what) for what in JUDGES)


@pytest.mark.parametrize(
    ("source", "what", "stage"),
    [
        (Layout.prompts, "tokens", "regenerate"),
        (Layout.prompts, "cache", "regenerate"),
        (Layout.tokens, "cache", "extract"),
        (Layout.cache_part, "drafter", "train"),
        (Layout.train_manifest, "eval", "eval"),
        (Layout.train_manifest, "export", "export"),
        (Layout.eval_manifest, "export", "export"),
    ],
)
def test_an_input_that_was_made_again_is_named(made: Run, source: Callable[..., Path], what: str, stage: str) -> None:
    path = source(Layout.of(made), JUDGES[what][2] if source is not Layout.cache_part else 1)
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "fingerprint": "another"}))
    found = judged(made, what)
    assert found is not None
    assert (found.stage, found.setting) == (stage, False)
    assert "made with inputs." in found.what
    path.unlink()
    assert judged(made, what) is None, "an input that is gone tells nothing"


def test_a_cache_of_another_run_is_compared_with_the_tokens_of_that_run(made: Run) -> None:
    body = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
    other = Run.model_validate({**body, "name": "other", "cache": {"from": made.name}})
    part = read_manifest(Layout.of(made).cache_part(0), "cache")
    make(other, Layout.of(other).tokens(0), fingerprint="its own")
    assert stale_part(other, 0, part) is None
    make(made, Layout.of(made).tokens(0), fingerprint="another")
    assert stale_part(other, 0, part) is not None


def test_layers_given_by_hand_equal_those_that_were_chosen(made: Run) -> None:
    by_hand = changed(made, "extract", layers=[1, 2, 3])
    assert judged(by_hand, "cache") is None
    assert judged(by_hand, "drafter") is None
    assert "extract.layers" in str(judged(changed(made, "extract", layers=[1, 2]), "drafter"))

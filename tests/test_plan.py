"""Plan: what it says beforehand is what comes out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

import stages.cli as cli
from data.layout import Layout
from data.manifest import read_manifest
from data.settings import Run, load_run
from pipeline.forecast import Model, cache_bytes, drafter_parameters
from stages.plan import amounts_of, described, lines
from tests.extracting import extract, write_token_parts


def test_forecast_bytes_are_the_cache_s_bytes(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run("planned", extract={"parts": 1, "codec": "fp8", "tokens_per_batch": 512})
    write_token_parts(run, rows=60)
    amounts = amounts_of(run)
    extract(run)
    counts = read_manifest(Layout.of(run).cache_part(0), "cache")["counts"]
    assert amounts.from_tokens
    assert (amounts.rows, amounts.tokens, amounts.states) == (60, counts["tokens"], counts["states"])
    forecast = cache_bytes(amounts, Model.of(run, described(run)[0]), "fp8", run)
    assert abs(forecast - counts["bytes"]) < 0.1 * counts["bytes"]


def test_a_manifest_is_read_once_and_not_for_every_row(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("read-once", extract={"parts": 2, "codec": "fp8"})
    write_token_parts(run, rows=20)
    read: list[Path] = []
    monkeypatch.setattr("stages.plan.read_manifest", lambda path, kind: read.append(path))
    assert amounts_of(run).rows == 20
    assert len(read) == 2


def test_plan_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_root: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    one = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes, hello there"}]}
    rows.write_text("".join(json.dumps(one) + "\n" for _ in range(50)))
    body = {
        "name": "p",
        "root": str(tiny_root),
        "target": {"model": "tiny:2"},
        "data": {"train": [{"path": str(rows)}]},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(body))
    assert cli.exit_code(["plan", str(tmp_path / "run.yaml")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^rows +50 \(estimated", text, re.M)
    for word in ("fp8", "<- this run", "checkpoints", "free in", "pinned host memory", "hours     extract"):
        assert word in text
    assert "NOT possible" not in text
    assert not (tiny_root / "p").exists()
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "train": {"anchor_slots": 1}}))
    assert cli.exit_code(["plan", str(tmp_path / "run.yaml")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^batches +base: NOT possible: train.anchor_slots 1 is less than the 14 anchors", text, re.M)
    assert re.search(r"^drafter +base: mask token 265, the lowest embedding row above the tokenizer", text, re.M)
    assert re.search(r"^drafter +base: 0\.\d\d M parameters", text, re.M)  # not 0 M
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "train": {"max_steps": 3}}))
    assert cli.exit_code(["plan", str(tmp_path / "run.yaml")]) == 0
    assert re.search(r"^batches +base: .* steps, at most 3 in all;", capsys.readouterr().out, re.M)
    sampled = {"responses": "regenerate", "regenerate": {"answers": 3, "temperature": 1.0}}
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "data": {**body["data"], **sampled}}))
    assert cli.exit_code(["plan", str(tmp_path / "run.yaml")]) == 0
    assert re.search(r"^rows +150 \(estimated", capsys.readouterr().out, re.M)
    drafters = {"wide": {"taps": [0, 4]}, "base": {"mask_token": 99999}}
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "drafters": drafters}))
    assert cli.exit_code(["plan", str(tmp_path / "run.yaml")]) == 0
    text = capsys.readouterr().out
    assert "drafter   NOT possible: drafters.wide: taps [0, 4] are not all in extract.layers [1, 2, 3]" in text
    assert (
        "drafter   NOT possible: drafters.base: mask_token: id 99999 is outside the target's vocabulary of 320" in text
    )


def test_a_forecast_from_rows_is_what_prepare_makes_of_them(tmp_path: Path, tiny_root: Path) -> None:
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    short = [{"messages": [turn("user", "hi"), turn("assistant", "yes.")]} for _ in range(100)]
    long = [{"messages": [turn("user", "hi"), turn("assistant", "yes, and more " * 9)]} for _ in range(100)]
    broken = [{"messages": []} for _ in range(100)]
    for name, rows in (
        ("short", [row for pair in zip(short, broken, strict=True) for row in pair]),
        ("long", long),
    ):
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "name": "forecast",
        "root": str(tiny_root),
        "target": {"model": "tiny:2"},
        "data": {
            "train": [{"path": str(tmp_path / "short.jsonl")}],
            "validation": [{"path": str(tmp_path / "long.jsonl")}],
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(body))
    run = load_run(tmp_path / "run.yaml")
    guess = amounts_of(run)
    assert cli.exit_code(["prepare", str(tmp_path / "run.yaml")]) == 0
    assert dataclasses.replace(guess, from_tokens=True) == amounts_of(run)
    assert guess.rows == 200
    data = {**body["data"], "validation": 0.0}
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "name": "all", "data": data}))
    alone = amounts_of(load_run(tmp_path / "run.yaml"))
    assert alone.rows == 100
    names = ("trained_states", "anchors", "most_anchors")
    assert [getattr(guess, name) for name in names] == [getattr(alone, name) for name in names], "no batch has others"
    assert guess.trained_states == alone.states < guess.states
    (tmp_path / "run.yaml").write_text(json.dumps({**body, "name": "half", "data": {**data, "validation": 0.5}}))
    assert amounts_of(load_run(tmp_path / "run.yaml")).trained_states == alone.states // 2


def test_every_question_that_is_asked_is_forecast(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"turns": ["one?", "two?", "three?"]}) + "\n")
    answers = {"responses": "regenerate", "regenerate": {"max_new_tokens": 100}}
    run = make_run("asked", data={"train": [{"path": str(tmp_path / "rows.jsonl")}], **answers})
    assert amounts_of(run).supervised == 3 * 70


def test_sizes_of_the_published_recipe(tmp_path: Path) -> None:
    run = load_run("data/recipes/qwen3-8b.yaml")
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    model = Model.of(run, config)
    assert model.taps == (1, 9, 17, 25, 33)
    assert model.parameters == pytest.approx(8.19e9, rel=0.01)
    assert model.tapped_parameters == pytest.approx(34 / 36 * model.layer_parameters, rel=1e-3)
    assert drafter_parameters(model, run.drafters["base"]) == pytest.approx(1.05e9, rel=0.01)
    from pipeline.forecast import Amounts

    amounts = Amounts(1000, 1_000_000, 990_000, 300_000, 700_000, 2048, True, 980_000)
    assert cache_bytes(amounts, model, "fp8", run) == pytest.approx(20_500 * 990_000, rel=0.01)
    assert any("NOT enough" in line or "enough" in line for line in lines(run, model, amounts, []))

"""Drafters judged against their target without a cache, and what of a target they follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from data.cache import Cache
from data.errors import BadInput
from data.layout import Layout
from data.settings import Drafter, Run
from pipeline import target
from pipeline.drafter import rope_frequencies
from pipeline.fitness import known_target, require_drafter
from pipeline.interchange_config import write_config
from pipeline.interchange_reader import read_config
from pipeline.recipe import Known, design, design_for, occurrences
from pipeline.target import rope_scaling
from pipeline.targets_tiny import make_tiny
from tests.extracting import extract, write_token_parts
from tests.interchange_samples import tiny_config, tiny_target_info, tiny_tensors

MakeRun = Callable[..., Run]

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}


def of_target(folder: Path, scaling: dict[str, Any]) -> str:
    """A tiny target's folder, its RoPE scaled."""
    make_tiny(folder, 2)
    body = json.loads((folder / "config.json").read_text())
    body["rope_parameters"] = {**scaling, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(body))
    return str(folder)


@pytest.mark.parametrize(
    ("drafter", "train", "words"),
    [
        ({"taps": [0, 4]}, {}, r"drafters\.base: taps \[0, 4\] are not all in extract\.layers \[1, 2, 3\]"),
        ({"heads": 3}, {}, r"drafters\.base: 3 heads do not divide by 2 key/value heads"),
        ({"head_dim": 15}, {}, r"drafters\.base: head_dim 15 is odd"),
        ({"mask_token": 99999}, {}, r"drafters\.base: mask_token: id 99999 is outside the target's vocabulary of 320"),
        ({}, {"warm_start": "nowhere"}, r"drafters\.base: train\.warm_start: nowhere: not a folder"),
        ({"intermediate_size": 100}, {"fp8": True}, r"drafters\.base: train\.fp8: `layers\.0\.mlp\.gate_proj`"),
    ],
)
def test_what_contradicts_the_target_is_told_without_a_cache(
    make_run: MakeRun, drafter: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    run = make_run("misfit", drafters={"base": drafter}, train=train)
    with pytest.raises(BadInput, match=words):
        require_drafter(run, "base", known_target(run))


def test_what_a_drafter_starts_from_has_its_shape(make_run: MakeRun, tmp_path: Path) -> None:
    known = known_target(run := make_run("plain", drafters={"base": {"layers": 2}}))
    config = require_drafter(run, "base", known).config
    info = tiny_target_info(
        num_layers=6, width=64, vocab_size=320, max_position_embeddings=config.max_position_embeddings
    )
    (tmp_path / "config.json").write_text(json.dumps(write_config(config, info, "zlab", "float32")))
    save_file(tiny_tensors(config), tmp_path / "model.safetensors")
    start = {"warm_start": str(tmp_path)}
    assert require_drafter(make_run("same", drafters={"base": {"layers": 2}}, train=start), "base", known)
    for change, words in (({"layers": 3}, "has num_layers 2, this drafter 3"), ({"taps": [1, 2]}, "has target_layer_")):
        run = make_run("other", drafters={"base": {"layers": 2, **change}}, train=start)
        with pytest.raises(BadInput, match=words):
            require_drafter(run, "base", known)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ({"taps": [0, 4]}, r"taps \[0, 4\] are not all in"),
        ({"mask_token": 21}, r"mask_token: id 21 occurs \d+ times in the rows"),
        ({"train": {"warm_start": "nowhere"}}, "nowhere: not a folder"),
    ],
)
def test_extract_refuses_a_drafter_before_the_target_runs(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, drafter: dict[str, Any], words: str
) -> None:
    run = make_run("early", drafters={"good": {}, "base": drafter})
    write_token_parts(run)
    monkeypatch.setattr(target, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(BadInput, match=rf"drafters\.base: .*{words}"):
        extract(run)


def test_ids_are_counted_once_and_beyond_the_vocabulary_there_are_none() -> None:
    counts = occurrences(iter([torch.tensor([1, 2, 2]).numpy(), torch.tensor([2]).numpy()]), 4)
    assert counts([2, 3, 9]) == {2: 3, 3: 0, 9: 0}
    assert counts([1]) == {1: 1}


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR], ids=lambda scaling: scaling["rope_type"])
def test_rope_scaling_follows_the_target_and_is_exported_both_ways(
    make_run: MakeRun, tmp_path: Path, scaling: dict[str, Any]
) -> None:
    run = make_run("scaled", target={"model": of_target(tmp_path / "model", scaling), "dtype": "float32"})
    made = require_drafter(run, "base", known_target(run))
    assert made.config.rope_scaling == scaling
    assert made.rope_reason.startswith(f"RoPE is scaled as the target's: {scaling['rope_type']}, factor")
    rotary = target.load_target(run, "cpu").model.model.rotary_emb
    frequencies, factor = rope_frequencies(made.config)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=0, atol=0)
    assert factor == rotary.attention_scaling
    config = tiny_config(rope_scaling=made.config.rope_scaling)
    assert read_config(write_config(config, tiny_target_info(), "union", "bfloat16"), "config.json") == config


@pytest.mark.parametrize(
    ("own", "theirs", "wanted", "words"),
    [
        (None, None, None, ""),
        (None, LONG, None, "RoPE is not scaled: the target's scaling is of no form that a drafter can have"),
        (None, {**YARN, "attention_factor": 1.2}, None, "`rope_type: yarn` has no attention_factor"),
        (None, {}, None, "the cache, of an earlier version, does not tell"),
        (LINEAR, LLAMA3, LINEAR, ""),
        ({"rope_type": "default"}, LLAMA3, None, ""),
    ],
)
def test_what_is_not_followed_is_said(make_run: MakeRun, own: Any, theirs: Any, wanted: Any, words: str) -> None:
    run = make_run("ropes", drafters={"base": Drafter(rope_scaling=own).model_dump()})
    known = known_target(run)
    known = Known(known.layer_ids, known.width, known.vocab_size, known.model, theirs)
    made = design(run, "base", known, lambda ids: dict.fromkeys(ids, 0))
    assert made.config.rope_scaling == wanted
    assert words in made.rope_reason
    assert bool(words) == bool(made.rope_reason)


def test_scaling_is_read_of_any_configuration() -> None:
    scaled = AutoConfig.for_model("llama", rope_scaling={**LINEAR, "type": "linear"}, rope_theta=5e5)
    assert rope_scaling(scaled) == LINEAR
    nested = {
        "full_attention": {**LINEAR, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_scaling(AutoConfig.for_model("gemma3_text", rope_parameters=nested)) == LINEAR
    partial = AutoConfig.for_model("qwen3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    assert rope_scaling(partial) is None


def test_a_cache_tells_how_its_target_scales_rope(make_run: MakeRun, tmp_path: Path) -> None:
    model = {"model": of_target(tmp_path / "model", LLAMA3), "dtype": "float32"}
    run = make_run("ropecache", root=str(tmp_path / "runs"), target=model)
    write_token_parts(run)
    extract(run, (0, 1))
    made = design_for(run, "base", Cache.open(run))
    assert made.config.rope_scaling == LLAMA3
    about = Layout.of(run).head.with_suffix(".json")
    body = json.loads(about.read_text())
    del body["rope_scaling"]
    about.write_text(json.dumps(body))
    made = design_for(run, "base", Cache.open(run))
    assert made.config.rope_scaling is None
    assert "does not tell" in made.rope_reason
    Layout.of(run).cache_part(1).unlink()
    extract(run, (1,))
    assert design_for(run, "base", Cache.open(run)).config.rope_scaling == LLAMA3, "one new part, and the cache tells"

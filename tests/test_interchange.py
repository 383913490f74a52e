"""Checkpoints out and in: forms, rules, and every key of config.json."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.errors import BadInput
from pipeline.card import serving_lines
from pipeline.drafter import Drafter
from pipeline.interchange import open_checkpoint, read_checkpoint, tensor_shapes, write_union
from pipeline.interchange_config import SLIDING, check_rules, write_config
from pipeline.interchange_reader import read_config
from stages import import_
from tests.interchange_samples import LAYERS, VOCABULARY, tiny_config, tiny_target_info, tiny_tensors

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FORMS = ("union", "zlab", "speculators")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    write_union(tmp_path / "export", tiny_config(), tiny_tensors(tiny_config()), tiny_target_info())
    return tmp_path / "export"


def edit(export: Path, change: Any) -> None:
    body = json.loads((export / "config.json").read_text())
    change(body)
    (export / "config.json").write_text(json.dumps(body))


def test_names_and_shapes_are_the_drafters_own() -> None:
    config = tiny_config()
    shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    assert shapes == tensor_shapes(config)
    assert len(shapes) == 11 * config.num_layers + 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaling", [None, YARN])
def test_every_form_reads_back_as_it_was_written(tmp_path: Path, form: Any, scaling: Any) -> None:
    config = tiny_config(7, rope_scaling=scaling)
    tensors = tiny_tensors(config)
    write_union(tmp_path / "e", config, tensors, tiny_target_info(), form, "float32")
    (tmp_path / "e" / "draftmill.json").unlink()
    read, weights = read_checkpoint(tmp_path / "e", num_target_layers=LAYERS)
    assert read == config
    assert all(torch.equal(weights[name], tensors[name]) for name in tensors)


ROUND_TRIPS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "bfloat16"),
    ({"block_size": 16}, {}, "float16"),
    ({"rope_scaling": YARN, "rope_theta": 1e6}, {}, "float32"),
    ({"layer_types": (SLIDING, "full_attention"), "sliding_window": 9}, {}, "bfloat16"),
    ({"max_position_embeddings": 512}, {"embedding_scale": 8.0, "softcap": 30.0}, "bfloat16"),
]


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize(("drafter", "target", "dtype"), ROUND_TRIPS)
def test_round_trip_of_a_union_is_byte_identical(
    tmp_path: Path, drafter: Any, target: Any, dtype: str, with_manifest: bool
) -> None:
    config = tiny_config(**drafter)
    write_union(tmp_path / "e", config, tiny_tensors(config), tiny_target_info(**target), dtype=dtype)
    if not with_manifest:
        (tmp_path / "e" / "draftmill.json").unlink()
    first = open_checkpoint(tmp_path / "e")
    import_.write(first, first.target, tmp_path / "again", "union", None)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(export: Path) -> None:
    config = tiny_config()
    write_union(export, config, tiny_tensors(config, seed=5), tiny_target_info())
    assert torch.equal(read_checkpoint(export)[1]["fc.weight"], tiny_tensors(config, 5)["fc.weight"].bfloat16())
    assert [path.name for path in export.parent.iterdir()] == ["export"]


def test_what_killed_exports_left_is_swept_and_a_running_one_is_not(export: Path) -> None:
    gone, config = 1 << 30, tiny_config()
    others = {".export.1.tmp", f".other.{gone}.tmp", ".export.mine.old", f".export.v2.{gone}.tmp"}
    for name in (f".export.{gone}.tmp", f".export.{gone}.old", *others):
        (export.with_name(name)).mkdir()
    write_union(export, config, tiny_tensors(config, seed=5), tiny_target_info())
    assert {path.name for path in export.parent.iterdir()} == {"export", *others}


def leaves(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in body if isinstance(body, dict) else ():
        yield from leaves(body[key], (*path, key))


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def false_value(value: Any) -> Any:
    """Another value of the same kind and length."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [false_value(item) for item in value]
    return {"false": True}


UNION = write_config(tiny_config(), tiny_target_info(), "union", "bfloat16")
UNSAID_TWICE = {("speculators_config", "verifier", name) for name in ("name_or_path", "architectures")}


def refuses_each_key(export: Path, change: str, left_out: Container[tuple[Any, ...]] = ()) -> None:
    """Drop or falsify every key of config.json in turn, sections included: refused with that very key's path."""
    original = (export / "config.json").read_text()
    body = json.loads(original)
    for path in leaves(body):
        if path in left_out:
            continue

        def alter(body: Any, path: tuple[Any, ...] = path) -> None:
            section = at(body, path[:-1])
            if change == "dropped":
                del section[path[-1]]
            else:
                section[path[-1]] = false_value(section[path[-1]])

        edit(export, alter)
        with pytest.raises(BadInput) as caught:
            open_checkpoint(export)
        named = path[-1] if left_out else f"`{'.'.join(path)}"
        assert named in str(caught.value), (path, str(caught.value))
        (export / "config.json").write_text(original)
    open_checkpoint(export)


@pytest.mark.parametrize("change", ["dropped", "falsified"])
@pytest.mark.parametrize("options", [{}, {"form": "zlab"}, {"form": "speculators"}, {"quantize": "fp8"}])
def test_each_key_dropped_or_falsified_is_refused_by_name(tmp_path: Path, options: dict[str, Any], change: str) -> None:
    write_union(tmp_path / "e", tiny_config(), tiny_tensors(tiny_config()), tiny_target_info(), **options)
    refuses_each_key(tmp_path / "e", change)


def test_each_key_falsified_is_refused_by_name_without_the_manifest(export: Path) -> None:
    (export / "draftmill.json").unlink()
    sections = {path for path in leaves(UNION) if isinstance(at(UNION, path), dict)}
    refuses_each_key(export, "falsified", UNSAID_TWICE | sections)


def test_a_union_saved_again_by_transformers_or_speculators_is_read(export: Path) -> None:
    (export / "draftmill.json").unlink()

    def by_transformers(body: dict[str, Any]) -> None:
        del body["rope_theta"], body["rope_scaling"]
        body |= {"bos_token_id": None, "transformers_version": "5.19.0"}

    def by_speculators(body: dict[str, Any]) -> None:
        del body["model_type"]
        for key in ("rope_theta", "rope_scaling", "hidden_act"):
            del body["transformer_layer_config"][key]

    for change in (by_transformers, by_speculators):
        edit(export, change)
        assert read_checkpoint(export)[0] == tiny_config()


def test_wrong_taps_of_the_right_count_are_caught_against_the_manifest(export: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["dflash_config"]["target_layer_ids"] = [1, 3, 6]
        body["aux_hidden_state_layer_ids"] = [2, 4, 7]

    edit(export, change)
    with pytest.raises(BadInput, match=r"layer_ids` is \[2, 4, 7\], expected \[2, 4, 6\] by draftmill.json"):
        open_checkpoint(export)


def test_a_flipped_byte_of_the_weights_is_found(export: Path) -> None:
    path = export / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(BadInput, match="not the bytes"):
        open_checkpoint(export)


@pytest.mark.parametrize("damage", ["drop", "rename", "extra", "shape", "nan"])
def test_weights_that_do_not_fit_are_refused_by_name(export: Path, damage: str) -> None:
    (export / "draftmill.json").unlink()
    tensors = load_file(export / "model.safetensors")
    name = "layers.1.mlp.up_proj.weight"
    weight = tensors.pop(name) if damage in ("drop", "rename") else tensors[name]
    if damage == "rename":
        tensors["_orig_mod." + name] = weight
    elif damage == "extra":
        tensors["layers.2.mlp.up_proj.weight"] = weight.clone()
    elif damage == "shape":
        tensors[name] = weight[:-1].contiguous()
    elif damage == "nan":
        tensors[name] = torch.full_like(weight, torch.nan)
    save_file(tensors, export / "model.safetensors")
    with pytest.raises(BadInput, match=r"layers\.[12]\.mlp\.up_proj\.weight"):
        open_checkpoint(export)


FOREIGN = [
    ("dflash_config", "projector_type", "domino"),
    ("dflash_config", "conv_kernel_size", 3),
    ("dflash_config", "selector_rank", 64),
    ("dflash_config", "use_swa", True),
    ("dflash_config", "attention_value_scale", 0.5),
    ("dflash_config", "causal", True),
    (None, "sample_from_anchor", True),
    (None, "draft_vocab_size", 32),
    (None, "speculators_model_type", "dspark"),
    (None, "attention_bias", True),
    (None, "is_causal", True),
    (None, "partial_rotary_factor", 0.5),
    (None, "is_neox_style", False),
    ("rope_parameters", "partial_rotary_factor", 0.5),
]


@pytest.mark.parametrize("key", ["attention_factor", "mscale"])
def test_a_scaling_of_rope_that_engines_do_not_read_is_refused_by_key(key: str) -> None:
    raw = write_config(tiny_config(), tiny_target_info(), "zlab", "bfloat16")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw |= {"rope_scaling": {**yarn, key: 0.5}, "rope_parameters": {**yarn, key: 0.5, "rope_theta": 10000.0}}
    with pytest.raises(BadInput, match=key):
        read_config(raw, "config.json")
    del raw["rope_scaling"][key], raw["rope_parameters"][key]
    assert read_config(raw, "config.json").rope_scaling == yarn


@pytest.mark.parametrize(("section", "key", "value"), FOREIGN)
def test_other_designs_are_refused_by_key(section: str | None, key: str, value: Any) -> None:
    raw = write_config(tiny_config(), tiny_target_info(), "zlab", "bfloat16")
    (raw if section is None else raw[section])[key] = value
    with pytest.raises(BadInput, match=key):
        read_config(raw, "config.json")


def test_a_reduced_vocabulary_tensor_is_refused_by_key(export: Path) -> None:
    (export / "draftmill.json").unlink()
    tensors = {**load_file(export / "model.safetensors"), "d2t": torch.zeros(4)}
    save_file(tensors, export / "model.safetensors")
    with pytest.raises(BadInput, match="`d2t`"):
        open_checkpoint(export)


def test_a_released_checkpoint_reads_with_block_size_and_rope_in_either_place() -> None:
    raw = write_config(tiny_config(), tiny_target_info(), "zlab", "bfloat16")
    for key in ("rope_theta", "rope_scaling", "is_causal", "layer_types"):
        del raw[key]
    del raw["block_size"], raw["dflash_config"]["causal"], raw["mask_token_id"]
    assert read_config(raw, "config.json") == tiny_config()
    raw |= {"rope_theta": 10000.0, "rope_scaling": None, "block_size": 4}
    del raw["rope_parameters"], raw["dflash_config"]["block_size"]
    assert read_config(raw, "config.json") == tiny_config()
    raw["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert read_config(raw, "config.json").rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "key", ["hidden_size", "head_dim", "block_size", "mask_token_id", "target_layer_ids", "rope_theta"]
)
def test_missing_keys_are_named_never_guessed(key: str) -> None:
    raw = write_config(tiny_config(), tiny_target_info(), "zlab", "bfloat16")
    for section in (raw, raw["dflash_config"], raw["rope_parameters"]):
        section.pop(key, None)
    with pytest.raises(BadInput, match=f"{key}` is missing"):
        read_config(raw, "config.json")


def test_the_speculators_form_needs_the_targets_depth_from_elsewhere() -> None:
    raw = write_config(tiny_config(), tiny_target_info(), "speculators", "bfloat16")
    with pytest.raises(BadInput, match="num_target_layers` is missing"):
        read_config(raw, "config.json")
    assert read_config(raw, "config.json", num_target_layers=LAYERS) == tiny_config()


def test_another_targets_depth_is_refused(export: Path) -> None:
    with pytest.raises(BadInput, match=r"num_target_layers` is 8, the target has 12"):
        open_checkpoint(export, num_target_layers=12)


def test_fused_projections_are_split(export: Path) -> None:
    (export / "draftmill.json").unlink()
    tensors = load_file(export / "model.safetensors")
    fused = dict(tensors)
    for layer in ("layers.0", "layers.1"):
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            room = whole.split(".")[0]
            names = [f"{layer}.{room}.{part}_proj.weight" for part in parts]
            fused[f"{layer}.{whole}.weight"] = torch.cat([fused.pop(name) for name in names])
    save_file(fused, export / "model.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_checkpoint(export)[1].items())


def agreed_union(block_size: int) -> dict[str, Any]:
    """The union of the tiny drafter, written out by hand: each number where the engine that reads it looks."""
    shape = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 256},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0},
        **{"initializer_range": 0.02, "max_window_layers": 2, "layer_types": ["full_attention", "full_attention"]},
        **{"sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "use_cache": True},
        **{"rope_theta": 10000.0, "rope_scaling": None},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    inner = {"block_size": block_size, "mask_token_id": 95, "target_layer_ids": [1, 3, 5], "num_target_layers": 8}
    proposal = {"proposal_type": "greedy", "speculative_tokens": block_size - 1}
    return {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16"},
        **{"block_size": block_size, "num_target_layers": 8, "mask_token_id": 95, "is_causal": False},
        "dflash_config": {**inner, "causal": False},
        **shape,
        **{"speculators_model_type": "dflash", "speculators_version": "0.9.0", "draft_vocab_size": 96},
        **{"target_hidden_size": None, "aux_hidden_state_layer_ids": [2, 4, 6], "sample_from_anchor": False},
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "qwen3", **shape},
    }


@pytest.mark.parametrize("block_size", [4, 7, 16])
def test_every_number_written_is_each_engines_own(block_size: int) -> None:
    union = agreed_union(block_size)
    config, info = tiny_config(block_size), tiny_target_info()
    assert write_config(config, info, "union", "bfloat16") == union
    zlab, speculators = (write_config(config, info, form, "bfloat16") for form in ("zlab", "speculators"))
    assert all(union[key] == value for form in (zlab, speculators) for key, value in form.items())
    assert "speculators_config" not in zlab
    assert "model_type" not in speculators
    lines = serving_lines(config, info, "export")
    assert f'"num_speculative_tokens": {block_size - 1}}}' in lines["vLLM"]  # drafted ones; SGLang, dflash: the files'
    assert str(block_size) not in lines["SGLang"] + lines["dflash"]


def test_full_attention_says_both_ways_everywhere() -> None:
    assert UNION["is_causal"] is False
    assert UNION["dflash_config"]["causal"] is False
    assert UNION["sliding_window_non_causal"] is True


def test_sliding_layers_leave_causality_to_the_layer_types() -> None:
    config = tiny_config(layer_types=(SLIDING, "full_attention"), sliding_window=16)
    raw = write_config(config, tiny_target_info(), "union", "bfloat16")
    assert "is_causal" not in raw
    assert "causal" not in raw["dflash_config"]
    assert (raw["sliding_window"], raw["use_sliding_window"], raw["sliding_window_non_causal"]) == (16, True, False)
    assert read_config(raw, "config.json") == config
    with pytest.raises(BadInput, match="sliding-window drafters have no `speculators` form"):
        write_config(config, tiny_target_info(), "speculators", "bfloat16")
    raw["is_causal"] = False
    with pytest.raises(BadInput, match="is_causal"):
        read_config(raw, "config.json")


RULES = [
    ({"target_layer_ids": (3, 1, 5)}, {}, "ascending"),
    ({"target_layer_ids": (1, 1, 5)}, {}, "ascending"),
    ({"target_layer_ids": ()}, {}, "ascending"),
    ({"target_layer_ids": (-1, 3, 5)}, {}, "must lie in"),
    ({"target_layer_ids": (1, 3, LAYERS - 1)}, {}, "must lie in"),
    ({}, {"num_layers": 9}, "num_target_layers"),
    ({}, {"width": 48}, "hidden_size"),
    ({}, {"vocab_size": VOCABULARY + 1}, "vocab_size"),
    ({}, {"max_position_embeddings": 512}, "max_position_embeddings"),
    ({"block_size": 1}, {}, "block_size"),
    ({"layer_types": ("chunked_attention",) * 2}, {}, "layer_types"),
    ({"mask_token_id": VOCABULARY}, {}, "mask token 96 is outside the vocabulary"),
]


@pytest.mark.parametrize(("drafter", "target", "text"), RULES)
def test_each_rule_of_the_exporter_has_its_own_error(drafter: Any, target: Any, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        check_rules(tiny_config(**drafter), tiny_target_info(**target))


def test_a_target_that_scales_is_written_and_read(tmp_path: Path) -> None:
    info = tiny_target_info(embedding_scale=8.0, logit_multiplier=0.5, softcap=30.0)
    write_union(tmp_path / "e", tiny_config(), tiny_tensors(tiny_config()), info)
    inner = json.loads((tmp_path / "e" / "config.json").read_text())["dflash_config"]
    assert (inner["input_embedding_scale"], inner["output_multiplier"], inner["final_logit_softcapping"]) == (
        8,
        0.5,
        30,
    )
    assert open_checkpoint(tmp_path / "e").target == info


def test_float8_stores_the_matrices_small_and_reads_back_close(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    write_union(tmp_path / "e", config, tensors, tiny_target_info(), quantize="fp8")
    stored = load_file(tmp_path / "e" / "model.safetensors")
    small = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(small) == 7 * config.num_layers
    assert stored["fc.weight"].dtype == torch.bfloat16
    read = read_checkpoint(tmp_path / "e")[1]
    for name in small:
        gap = (read[name] - tensors[name]).abs().amax(1) / tensors[name].abs().amax(1)
        assert gap.max() < 0.04, name


def test_a_mask_vector_of_its_own_is_another_design(export: Path) -> None:
    torch.save(torch.zeros(32), export / "mask_embedding.pt")
    with pytest.raises(BadInput, match="mask_embedding"):
        open_checkpoint(export)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_checkpoint_gets_one_clear_line(export: Path, missing: str) -> None:
    (export / missing).unlink()
    with pytest.raises(BadInput, match=missing):
        open_checkpoint(export)
    with pytest.raises(BadInput, match="not a folder with a DFlash checkpoint"):
        open_checkpoint("no/such/folder/anywhere")

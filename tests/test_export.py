"""`draftmill export` and `draftmill import` on a run with a trained drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from huggingface_hub import HfApi

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import publish
from data.settings import Run
from data.shaping import shaping
from pipeline.card import FLOAT8, serving_lines, write_card
from pipeline.checkpoint import CheckpointWriter
from pipeline.drafter import Drafter, DrafterConfig, initialise
from pipeline.head import save_head
from pipeline.interchange import open_checkpoint, write_union
from pipeline.interchange_config import TargetInfo
from pipeline.target import Target
from stages import export, import_
from tests.interchange_samples import change_a_byte, tiny_config, tiny_target_info, tiny_tensors

Trained = tuple[Path, Run]


def drafter_config(target: Target, **changes: Any) -> DrafterConfig:
    body = {
        "hidden_size": target.width,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 4,
        "mask_token_id": target.vocab - 1,
        "target_layer_ids": (1, 3),
        "num_target_layers": target.layers,
        "vocab_size": target.vocab,
        "max_position_embeddings": target.config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ("full_attention",) * 2,
        "sliding_window": None,
    }
    return DrafterConfig(**{**body, **changes})


@pytest.fixture
def trained(make_run: Callable[..., Run], tiny_root: Path, tiny_target: Target, tmp_path: Path) -> Trained:
    """A run file and its run, with checkpoints of steps 2 (better) and 4, and a head beside an absent cache."""
    run = make_run(f"export-{tmp_path.name}", drafters={"base": {"layers": 2, "block_size": 4}})
    layout, config = Layout.of(run), drafter_config(tiny_target)
    Layout.of_cache(run).cache.mkdir(parents=True)
    save_head(tiny_target.head(), Layout.of_cache(run).head)
    writer = CheckpointWriter(layout.checkpoints("base"), 2, 1)
    for step, acceptance in ((2, 2.5), (4, 2.0)):
        drafter = Drafter(config)
        initialise(drafter, step)
        meta = {"validation": {"acceptance": acceptance, "per_slot": [0.7, 0.6, 0.5], "blocks": 10}}
        writer.save(step, config, drafter.state_dict(), {"step": torch.tensor(step)}, meta)
    writer.wait()
    body = {
        "fingerprint": "f" * 32,
        "inputs": {"cache": "c" * 32},
        "settings": json.loads(shaping(run, "train", "base")),
        "config": config.record(),
        "mask_token": {"id": config.mask_token_id, "reason": "a spare row"},
        "head": {"embedding_scale": 1.0, "logit_multiplier": 1.0, "softcap": None},
        "target": {},
        "template": {},
        "codec": {},
        "steps": 4,
        "rows": {"train": 30, "validation": 2},
    }
    publish(layout.train_manifest("base"), "drafter", body)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True)))
    return path, run


def call(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=True)


def test_a_checkpoint_of_a_training_is_no_export(trained: Trained) -> None:
    checkpoint = next(Layout.of(trained[1]).checkpoints("base").glob("step-*"))
    with pytest.raises(BadInput, match="a checkpoint of our own training: give what `draftmill export` makes of it"):
        open_checkpoint(checkpoint)


def test_the_best_checkpoint_is_written_with_card_and_provenance(trained: Trained) -> None:
    path, run = trained
    assert call(export.command, path).exception is None
    folder = Layout.of(run).export("base")
    read = open_checkpoint(folder)
    want = Drafter(read.config)
    initialise(want, 2)
    assert torch.equal(read.tensors["fc.weight"], want.fc.weight.bfloat16())
    made = json.loads((folder / "draftmill.json").read_text())
    assert (made["kind"], made["step"], made["inputs"]["cache"]) == ("export", 2, "c" * 32)
    card = (folder / "README.md").read_text()
    assert '"num_speculative_tokens": 3}' in card
    assert f"--speculative-draft-model-path {folder}" in card
    assert "validation walk): 2.50" in card
    assert card.startswith("---\nlicense:  #")


def test_a_server_that_runs_as_somebody_else_may_read_whatever_is_written(trained: Trained, tmp_path: Path) -> None:
    path, run = trained
    assert call(export.command, path).exception is None
    (tmp_path / "new").touch()
    wanted = {(tmp_path / "new").stat().st_mode}
    targets = Path(run.root) / ".targets"
    made = [
        file for place in (Layout.of(run).folder, Layout.of_cache(run).folder, targets) for file in place.rglob("*")
    ]
    weights = [file for file in made if file.suffix == ".safetensors"]
    assert {file.name for file in weights} >= {"head.safetensors", "drafter.safetensors", "model.safetensors"}
    assert {file.stat().st_mode for file in weights} == wanted


def test_the_cache_may_be_gone(trained: Trained) -> None:
    shutil.rmtree(Layout.of_cache(trained[1]).cache)
    assert call(export.command, trained[0]).exception is None


def test_the_chosen_step_form_and_numbers_are_written(trained: Trained, tmp_path: Path) -> None:
    options = ("--checkpoint", "step-4", "--format", "zlab", "--dtype", "float32", "--to", tmp_path / "out")
    assert call(export.command, trained[0], "--drafter", "base", *options).exception is None
    read = open_checkpoint(tmp_path / "out")
    want = Drafter(read.config)
    initialise(want, 4)
    assert torch.equal(read.tensors["fc.weight"], want.fc.weight)
    assert "speculators_config" not in read.raw


def test_evaluations_of_the_drafter_stand_in_the_card(trained: Trained) -> None:
    path, run = trained
    folder = Layout.of(run).eval("base")
    folder.mkdir(parents=True)
    interval = {"value": 3.25, "low": 3.0, "high": 3.5}
    body = {"benchmark": "gsm8k", "checkpoint": "step-000002", "prompts": 8, "pooled": interval, "definition": "..."}
    body |= {"per_response": interval, "record": {"sampling": {"temperature": 0.0}}}
    (folder / "gsm8k.json").write_text(json.dumps(body))
    publish(folder / "manifest.json", "eval", {"files": [{"path": "gsm8k.json"}]})
    call(export.command, path)
    assert "| gsm8k | 8 | 3.25 (3.00-3.50) |" in (Layout.of(run).export("base") / "README.md").read_text()


def test_numbers_of_another_checkpoint_stay_out_of_the_card(trained: Trained) -> None:
    path, run = trained
    folder = Layout.of(run).eval("base")
    folder.mkdir(parents=True)
    interval = {"value": 3.25, "low": 3.0, "high": 3.5}
    body = {"benchmark": "gsm8k", "prompts": 8, "pooled": interval, "per_response": interval, "definition": "..."}
    for step in (2, 4):
        (folder / f"{step}.json").write_text(json.dumps({**body, "checkpoint": f"step-{step:06d}", "prompts": step}))
    publish(folder / "manifest.json", "eval", {"files": [{"path": "2.json"}, {"path": "4.json"}]})
    assert call(export.command, path, "--checkpoint", "step-4").exception is None
    made = Layout.of(run).export("base")
    rows = [line for line in (made / "README.md").read_text().splitlines() if line.startswith("| gsm8k")]
    assert [row[:13] for row in rows] == ["| gsm8k | 4 |"]
    told = json.loads((made / "draftmill.json").read_text())["evaluation"]
    assert [each["checkpoint"] for each in told] == ["step-000004"]


def test_numbers_of_an_earlier_training_stay_out_of_the_card(trained: Trained) -> None:
    path, run = trained
    body = {"inputs": {"drafter": "another"}, "files": [{"path": "gsm8k.json"}]}
    publish(Layout.of(run).eval_manifest("base"), "eval", body)
    done = call(export.command, path)
    assert done.exception is None
    assert "no evaluation in the card: " in done.output
    assert "eval" not in json.loads(Layout.of(run).export_manifest("base").read_text())["inputs"]


def test_a_drafter_trained_with_other_settings_is_refused(trained: Trained) -> None:
    path, run = trained
    body = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**body, "train": {"learning_rate": 1.0}}))
    refused = call(export.command, path).exception
    assert isinstance(refused, BadInput)
    assert str(refused).endswith(
        "made with train.learning_rate = 0.0006, this run wants 1.0: run `draftmill train` again, or change it back"
    )
    assert not Layout.of(run).export("base").exists()


def test_a_drafter_that_was_not_trained_gets_one_clear_line(trained: Trained, make_run: Any, tmp_path: Path) -> None:
    missing = call(export.command, trained[0], "--checkpoint", "step-3")
    assert isinstance(missing.exception, BadInput)
    assert "step-3" in str(missing.exception)
    Layout.of(trained[1]).train_manifest("base").unlink()
    assert "train.json" in str(call(export.command, trained[0]).exception)
    assert not Layout.of(trained[1]).export("base").exists()


def test_a_checkpoint_of_another_training_is_refused_by_field(trained: Trained) -> None:
    manifest = Layout.of(trained[1]).train_manifest("base")
    body = json.loads(manifest.read_text())
    body["config"]["target_layer_ids"] = [1, 2]
    manifest.write_text(json.dumps(body))
    assert "target_layer_ids" in str(call(export.command, trained[0]).exception)


@pytest.mark.parametrize("name", ["drafter.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_refused_by_file_and_the_remedies_work(trained: Trained, name: str) -> None:
    path, run = trained
    best = Layout.of(run).checkpoints("base") / "step-000002"
    change_a_byte(best / name)
    refused = call(export.command, path).exception
    assert isinstance(refused, BadInput)
    assert str(best / name) in str(refused)
    assert not Layout.of(run).export("base").exists()
    assert call(export.command, path, "--checkpoint", "last").exception is None
    shutil.rmtree(best)
    assert call(export.command, path).exception is None
    assert json.loads(Layout.of(run).export_manifest("base").read_text())["step"] == 4


@pytest.mark.parametrize("verb", ["export", "import"])
@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("notes", "is neither empty nor an export"),
        ("theirs", "is neither empty nor an export"),
        ("prepared", "is neither empty nor an export"),
        ("notes/a.txt", "is a file"),
        ("notes/a.txt/below", "notes/a.txt is a file"),
        (".", "runs in: name a folder inside it"),
        ("", "runs in: name a folder inside it"),
        ("..", "runs in: name a folder inside it"),
        ("/", "a mount point"),
    ],
)
def test_nobodys_files_are_replaced(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, to: str, says: str
) -> None:
    """Refused before anything is read: neither the checkpoint that was to be imported nor the drafter is there."""
    shutil.rmtree(Layout.of(trained[1]).drafter("base"))
    for name in ("notes/a.txt", "theirs/model.safetensors", "prepared/.hidden"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    publish(tmp_path / "prepared" / "draftmill.json", "accounting", {})
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    asked = (export.command, trained[0], "--drafter", "base") if verb == "export" else (import_.command, "no/such")
    refused = call(*asked, "--to", to).exception
    assert isinstance(refused, BadInput)
    assert str(refused).startswith(f"--to {Path(to)}: ")
    assert says in str(refused)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("to", ["new/deep", "empty", "export", "link"])
def test_what_nobody_misses_is_replaced(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("link").symlink_to("export")
    options = ("--drafter", "base", "--to")
    assert call(export.command, trained[0], "--checkpoint", "last", *options, "export").exception is None
    manifest = Path("export/draftmill.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": -1}))  # of an older version
    done = call(export.command, trained[0], *options, to)
    assert done.exception is None, done.exception
    assert open_checkpoint(to).manifest["step"] == 2
    assert Path("link").is_symlink()


def test_the_runs_own_folder_is_replaced_although_snakemake_deleted_its_manifest(trained: Trained) -> None:
    manifest = Layout.of(trained[1]).export_manifest("base")
    assert call(export.command, trained[0], "--checkpoint", "last").exception is None
    manifest.unlink()
    assert call(export.command, trained[0]).exception is None
    assert json.loads(manifest.read_text())["step"] == 2


def test_check_prints_a_table_and_asks_transformers(trained: Trained) -> None:
    done = call(export.command, trained[0], "--check")
    assert done.exception is None, done.exception
    lines = {line.split()[0]: line for line in done.output.splitlines() if line}
    assert "read as meant (configuration only)" in lines["autoconfig"]
    assert {"consumer", "dflash", "vllm", "sglang", "specforge", "speculators"} <= set(lines)


def test_the_folder_goes_up_whole_and_the_card_names_the_repository(trained: Trained, monkeypatch: Any) -> None:
    uploads: list[dict[str, Any]] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: uploads.append({"name": name, **options}))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: uploads.append(options))
    options = ("--drafter", "base", "--push-to-hub", "me/my-drafter", "--private")
    assert call(export.command, trained[0], *options).exception is None
    folder = Layout.of(trained[1]).export("base")
    assert uploads[0] == {"name": "me/my-drafter", "private": True, "exist_ok": True}
    assert (uploads[1]["repo_id"], uploads[1]["folder_path"]) == ("me/my-drafter", folder)
    assert "--speculative-draft-model-path me/my-drafter" in (folder / "README.md").read_text()


def test_without_a_login_the_upload_fails_in_one_line(trained: Trained) -> None:
    failed = call(export.command, trained[0], "--drafter", "base", "--push-to-hub", "me/my-drafter")
    assert isinstance(failed.exception, Failure)
    assert "the export itself is whole" in str(failed.exception)


def test_import_describes_and_rewrites_byte_for_byte(trained: Trained, tmp_path: Path) -> None:
    call(export.command, trained[0])
    folder = Layout.of(trained[1]).export("base")
    done = call(import_.command, folder, "--to", tmp_path / "again")
    assert done.exception is None, done.exception
    assert "4 (3 drafted tokens)" in done.output
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("form", ["union", "zlab", "speculators"])
def test_import_writes_every_form_that_export_writes(trained: Trained, tmp_path: Path, form: str) -> None:
    call(export.command, trained[0], "--drafter", "base", "--dtype", "float32", "--to", tmp_path / "union")
    for name, dtype in (("same", ()), ("narrow", ("--dtype", "bfloat16"))):
        own = (trained[0], "--drafter", "base", "--to", tmp_path / "own", *(dtype or ("--dtype", "float32")))
        assert call(export.command, *own, "--format", form).exception is None
        done = call(import_.command, tmp_path / "union", "--to", tmp_path / name, "--format", form, *dtype)
        assert done.exception is None, done.exception
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "own" / file).read_bytes() == (tmp_path / name / file).read_bytes()
    card = (tmp_path / "narrow" / "README.md").read_text()
    assert "| weights stored as | bfloat16 |" in card
    assert ("SGLang:" in card) == (form != "speculators")


def test_import_refuses_a_form_that_the_drafter_has_not(tmp_path: Path) -> None:
    config = tiny_config(layer_types=("sliding_attention", "full_attention"), sliding_window=9)
    write_union(tmp_path / "sliding", config, tiny_tensors(config), tiny_target_info())
    refused = call(import_.command, tmp_path / "sliding", "--to", tmp_path / "to", "--format", "speculators")
    assert "have no `speculators` form" in str(refused.exception)
    assert not (tmp_path / "to").exists()


def test_import_asks_for_the_target_that_a_checkpoint_does_not_name(trained: Trained, tmp_path: Path) -> None:
    call(export.command, trained[0], "--drafter", "base", "--format", "zlab", "--to", tmp_path / "zlab")
    (tmp_path / "zlab" / "draftmill.json").unlink()
    refused = call(import_.command, tmp_path / "zlab", "--to", tmp_path / "own")
    assert "--target MODEL" in str(refused.exception)
    target = Layout.of(trained[1]).targets / "tiny-2"
    assert call(import_.command, tmp_path / "zlab", "--to", tmp_path / "own", "--target", target).exception is None
    assert open_checkpoint(tmp_path / "own").target.name == str(target)


def test_the_card_says_what_mixed_layers_and_float8_need(tiny_target: Target) -> None:
    kinds = ("sliding_attention", "full_attention")
    config = drafter_config(tiny_target, layer_types=kinds, sliding_window=64)
    info = TargetInfo("owner/target", "LlamaForCausalLM", 6, config.hidden_size, config.vocab_size, 4096)
    lines = serving_lines(config, info, "me/drafter")
    assert lines["vLLM"].startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve owner/target")
    assert list(serving_lines(config, info, "me/drafter", "speculators")) == ["vLLM"]
    card = write_card("base", config, info, "me/drafter", "union", FLOAT8, {}, [])
    assert "base_model: owner/target" in card
    assert "vLLM 0.33.0" in card
    scaled = replace(info, embedding_scale=8.0)
    assert "scales its embedding by 8." in write_card("base", config, scaled, "me/drafter", "union", "", {}, [])

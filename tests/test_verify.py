"""Verify: whatever is not what the manifests or the target say is found and named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stages.cli as cli
from data.codec import make_codec
from data.layout import Layout
from data.part import codec_path
from data.settings import Run
from pipeline.audit import limit, relative_error
from tests.extracting import extract, shards, write_token_parts


@pytest.fixture(scope="module")
def made(make_run: Callable[..., Run], tiny_target: object, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A cache of two parts, fp8."""
    root = tmp_path_factory.mktemp("verify")
    settings = {"parts": 2, "codec": "fp8", "tokens_per_batch": 512, "shard_bytes": 60_000}
    run = make_run("r", root=str(root), extract=settings)
    shutil.copytree(Layout.of(make_run("tiny")).targets, Layout.of(run).targets)
    write_token_parts(run)
    extract(run, (0, 1))
    return run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    """A copy of it to damage."""
    shutil.copytree(made.root, tmp_path / "root")
    return made.model_copy(update={"root": str(tmp_path / "root")})


def verify(run: Run, *options: str) -> int:
    path = Path(run.root) / "run.yaml"
    path.write_text(json.dumps(run.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    return cli.exit_code(["verify", str(path), *options])


def test_a_sound_cache_passes_and_says_how_near_the_target_is(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(run) == 0
    text = capfd.readouterr().err
    assert text.count("of a fresh forward pass") == 2
    assert "verified 2 parts" in text
    assert verify(run, "--fast", "--part", "1") == 0


FAULTS = {
    "flipped byte": ("has crc32c", False),
    "truncated file": ("bytes, its manifest says", True),
    "missing chunk": ("has no bytes", True),
    "deleted metadata": ("has no bytes", True),
    "head cut": ("head.safetensors has", True),
    "head zeroed": ("head.safetensors has another crc32c", False),
    "codec gone": ("codec.safetensors is missing", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named(run: Run, capfd: pytest.CaptureFixture[str], fault: str) -> None:
    shard = shards(run, 1)[0]
    body = shard / "hidden" / "c" / "0" / "0" / "0"
    match fault:
        case "flipped byte":
            content = bytearray(body.read_bytes())
            content[1000] ^= 1
            body.write_bytes(content)
        case "truncated file":
            body.write_bytes(body.read_bytes()[:-1])
        case "missing chunk":
            body.unlink()
        case "deleted metadata":
            (shard / "zarr.json").unlink()
        case "head cut":
            head = Layout.of(run).head
            head.write_bytes(head.read_bytes()[:-8])
        case "head zeroed":
            head = Layout.of(run).head
            head.write_bytes(head.read_bytes()[:-20_000] + bytes(20_000))
        case "codec gone":
            codec_path(Layout.of(run)).unlink()
    text, fast_finds = FAULTS[fault]
    assert verify(run, "--fast") == (1 if fast_finds else 0)
    assert verify(run) == 1
    error = capfd.readouterr().err
    assert text in error
    assert "head" in fault or "codec" in fault or shard.name in error
    follow(run, error.splitlines()[-1])
    assert verify(run) == 0


def follow(run: Run, error: str) -> None:
    """Do what the last line of verify says, word by word."""
    remedy = re.search(r"(?:: remove (?P<files>.*) and|:) run `draftmill extract` again$", error)
    assert remedy is not None, error
    for path in (remedy["files"] or "").split():
        Path(path).unlink()
    extract(run, (0, 1))


def test_states_of_another_target_are_found(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline import target as module

    load = module.load_target

    def other(run: Run, device: str) -> object:
        loaded = load(run, device)
        with torch.no_grad():
            loaded.decoder_layers()[2].mlp.down_proj.weight.mul_(3.0)
        return loaded

    monkeypatch.setattr(module, "load_target", other)
    assert verify(run) == 1
    assert "after layer 3 is" in (text := capfd.readouterr().err) or "after layer 2 is" in text


def test_zero_and_nan_states_are_found(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    from data.manifest import file_record, read_json, write_json

    layout = Layout.of(run)
    shard = shards(run, 0)[0]
    scale = shard / "scale" / "c" / "0" / "0"
    content = bytearray(scale.read_bytes())
    content[24:28] = b"\0\0\xc0\x7f"  # NaN: the third state's first tap
    scale.write_bytes(content)
    manifest = read_json(layout.cache_part(0), "")
    record = next(s for s in manifest["shards"] if s["name"] == shard.name)
    record["files"] = [file_record(shard / file["path"], shard) for file in record["files"]]
    write_json(layout.cache_part(0), manifest)
    assert verify(run) == 1
    assert "state 2 after layer 1 is not finite" in capfd.readouterr().err


def test_a_cache_of_other_settings_is_bad_input(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    other = run.model_copy(update={"extract": run.extract.model_copy(update={"codec": "bf16"})})
    assert verify(other) == 2
    assert "made with extract.codec = 'fp8', this run wants 'bf16'" in capfd.readouterr().err
    assert verify(run, "--part", "2") == 2


@pytest.mark.parametrize("name", ["fp8", "klt6", "klt5", "klt4"])
def test_a_state_that_a_codec_loses_more_of_is_sound_and_another_state_is_not(name: str) -> None:
    """Heavy tails cost a rotation codec more than its stated error; that is its loss, not damage."""
    torch.manual_seed(0)
    sample = torch.randn(4096, 2, 64).bfloat16()
    codec = make_codec(name, 2, 64, sample)
    tails = torch.distributions.StudentT(1.5).sample((512, 2, 64)).bfloat16()
    stored = codec.decode(codec.encode(tails)).float()
    error, allowed = relative_error(stored, tails), limit(torch.bfloat16, codec, tails)
    if name in ("klt6", "klt5"):
        assert error.max() > codec.error
    assert (error <= allowed).all()
    shifted = relative_error(stored.roll(1, 0), tails)
    assert (shifted > allowed).all()

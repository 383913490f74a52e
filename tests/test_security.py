"""Hostile input: a clear refusal, never a crash, a hang or an escape. No pickle, no foreign code, no secrets kept."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data.cache import Cache
from data.conversations import Conversation, Rejected
from data.errors import BadInput
from data.formats import normalise
from data.layout import Layout
from data.manifest import file_record, inside, read_manifest
from data.settings import Run, load_run
from data.sources import decode
from pipeline.checkpoint import FILES, CheckpointWriter, list_checkpoints, load_drafter
from pipeline.head import TargetHead, load_head, save_head
from pipeline.interchange import open_checkpoint
from pipeline.interchange_config import write_config
from pipeline.job import job
from pipeline.journal import read_status
from tests import test_cache
from tests.interchange_samples import tiny_config, tiny_target_info, tiny_tensors

ROOT = Path(__file__).resolve().parents[1]
FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
HOSTILE = JUNK | st.sampled_from(["../../../etc/passwd", "/etc/passwd", "", ".", "x" * 5000, "\0", -1, 2**63, 1e308])


def refused_in_one_line(error: BadInput) -> None:
    text = str(error)
    assert text
    assert "\n" not in text


def places(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value that could be changed."""
    if at:
        yield at
    children = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in children:
        yield from places(value, (*at, key))


@st.composite
def mutated(draw: st.DrawFn, body: Any) -> Any:
    """The value with one to three places replaced by junk, or removed."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(body))
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        node = body
        for step in way:
            node = node[step]
        if draw(st.booleans()) and isinstance(node, dict):
            del node[last]
        else:
            node[last] = draw(HOSTILE)
    return body


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes cut, or with some of the first few hundred, where headers are, replaced."""
    body = bytearray(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)
    for _ in range(draw(st.integers(0, 4))):
        if body:
            body[draw(st.integers(0, min(len(body), 300) - 1))] = draw(st.integers(0, 255))
    return bytes(body)


RECIPE = yaml.safe_load((ROOT / "data" / "recipes" / "qwen3-8b.yaml").read_text())


@FUZZ
@given(body=mutated(RECIPE))
def test_a_mutated_run_file_loads_or_is_refused_in_one_line(body: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(body), encoding="utf-8")
    try:
        run = load_run(path)
    except BadInput as error:
        refused_in_one_line(error)
    else:
        root = Path(run.root)
        assert (root / run.name).parent == root


@FUZZ
@given(text=st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_refused_as_a_run_file(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BadInput):
        load_run(path)


@FUZZ
@given(row=HOSTILE | mutated({"id": "a", "messages": [{"role": "user", "content": "q"}], "tools": [{"a": 1}]}))
def test_any_row_is_a_conversation_or_rejected(row: Any) -> None:
    try:
        conversation = normalise(decode(json.dumps(row).encode()))
    except Rejected:
        return
    assert isinstance(conversation, Conversation)


@FUZZ
@given(line=st.binary(max_size=80))
def test_any_line_is_a_row_or_rejected(line: bytes) -> None:
    try:
        normalise(decode(line))
    except Rejected:
        return


@pytest.fixture(scope="module")
def whole_cache(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = test_cache.make_run(tmp_path_factory.mktemp("cache"), parts=1, codec="fp8", compressor="zstd")
    test_cache.make_cache(run, None)
    return run


def read_all(run: Run) -> None:
    cache = Cache.open(run)
    out = {name: np.zeros((700, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}
    for row in range(0, len(cache), 7):
        cache.tokens(row)
        cache.read_states(row, out, 0)


def reads_or_refuses(run: Run) -> None:
    try:
        read_all(run)
    except BadInput as error:
        refused_in_one_line(error)


@FUZZ
@given(data=st.data())
def test_a_mutated_cache_manifest_is_read_or_refused(whole_cache: Run, data: st.DataObject) -> None:
    path = Layout.of(whole_cache).cache_part(0)
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps(data.draw(mutated(json.loads(whole)))), encoding="utf-8")
        reads_or_refuses(whole_cache)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "name", ["zarr.json", "hidden/zarr.json", "hidden/c/0/0/0", "token_ids/c/0", "scale/zarr.json"]
)
def test_damaged_zarr_files_are_read_or_refused(whole_cache: Run, name: str) -> None:
    path = Layout.of(whole_cache).cache / "part-0000" / "shard-00000.zarr" / name
    whole = path.read_bytes()

    @FUZZ
    @given(body=damaged(whole))
    def check(body: bytes) -> None:
        path.write_bytes(body.ljust(len(whole), b" ")[: len(whole)])  # the size is checked before anything is read
        reads_or_refuses(whole_cache)

    try:
        check()
    finally:
        path.write_bytes(whole)


def test_damaged_safetensors_are_read_or_refused(tmp_path: Path, whole_cache: Run) -> None:
    head = tmp_path / "head.safetensors"
    save_head(TargetHead(torch.ones(4, 2), torch.ones(4, 2)), head)
    whole = head.read_bytes()

    @FUZZ
    @given(body=damaged(whole))
    def check(body: bytes) -> None:
        head.write_bytes(body)
        try:
            load_head(head)
        except BadInput as error:
            refused_in_one_line(error)

    check()


def test_a_mutated_export_is_read_or_refused(tmp_path: Path) -> None:
    config = tiny_config()
    folder = tmp_path / "export"
    folder.mkdir()
    raw = write_config(config, tiny_target_info(), "union", "bfloat16")
    save_file({name: value.bfloat16() for name, value in tiny_tensors(config).items()}, folder / "model.safetensors")

    @FUZZ
    @given(body=mutated(json.loads(json.dumps(raw))))
    def check(body: Any) -> None:
        (folder / "config.json").write_text(json.dumps(body), encoding="utf-8")
        try:
            open_checkpoint(folder)
        except BadInput as error:
            refused_in_one_line(error)

    (folder / "config.json").write_text(json.dumps(raw))
    open_checkpoint(folder)
    check()


def test_a_mutated_checkpoint_is_read_or_refused(tmp_path: Path) -> None:
    """Its checksums fit, so that the configuration is read: what it says is not to be trusted either."""
    config = tiny_config()
    folder = tmp_path / "step-000001"
    folder.mkdir()
    body = json.loads(json.dumps(config.record()))
    save_file(tiny_tensors(config), folder / "drafter.safetensors")
    save_file({"step": torch.zeros(())}, folder / "optimizer.safetensors")

    def write(changed: Any) -> None:
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        files = [file_record(folder / name, folder) for name in FILES]
        (folder / "meta.json").write_text(json.dumps({"files": files}))

    @FUZZ
    @given(changed=mutated(body))
    def check(changed: Any) -> None:
        write(changed)
        try:
            load_drafter(folder, "cpu", torch.float32)
        except BadInput as error:
            refused_in_one_line(error)

    write(body)
    load_drafter(folder, "cpu", torch.float32)
    check()


def test_a_mutated_meta_of_a_checkpoint_is_read_or_refused(tmp_path: Path) -> None:
    config = tiny_config()
    writer = CheckpointWriter(tmp_path, 1, 1)
    writer.save(1, config, tiny_tensors(config), {}, {})
    writer.wait()
    folder = tmp_path / "step-000001"

    @FUZZ
    @given(changed=mutated(json.loads((folder / "meta.json").read_text())))
    def check(changed: Any) -> None:
        (folder / "meta.json").write_text(json.dumps(changed), encoding="utf-8")
        list_checkpoints(tmp_path)
        try:
            load_drafter(folder, "cpu", torch.float32)
        except BadInput as error:
            refused_in_one_line(error)

    check()


@FUZZ
@given(body=st.binary(max_size=60) | HOSTILE | mutated({"status": "running", "pid": 1, "host": "h", "born": "1"}))
def test_any_status_file_is_read(body: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.status.json"
    path.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert isinstance(read_status(path), dict)


@FUZZ
@given(path=st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "a", "", "/"]), max_size=8).map("/".join))
def test_no_path_of_a_manifest_leads_out(path: str, tmp_path: Path) -> None:
    try:
        found = inside(tmp_path, path)
    except BadInput:
        return
    assert found.is_relative_to(tmp_path)


def test_a_pickle_in_place_of_weights_is_not_loaded(tmp_path: Path) -> None:
    """The file would create another one if anything unpickled it."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    for loader in (load_head, open_checkpoint):
        folder = tmp_path / loader.__name__
        folder.mkdir()
        for name in ("model.safetensors", "head.safetensors", "pytorch_model.bin"):
            torch.save(Trap(), folder / name)
        shutil.copy(ROOT / "LICENSE", folder / "config.json")
        with pytest.raises(BadInput):
            loader(folder / "head.safetensors" if loader is load_head else folder)
    assert not (tmp_path / "sprung").exists()


def test_no_code_loads_pickles_or_unsafe_yaml() -> None:
    for path in [*ROOT.glob("data/*.py"), *ROOT.glob("pipeline/*.py"), *ROOT.glob("stages/*.py")]:
        text = path.read_text()
        for banned in ("import pickle", "torch.load(", "yaml.load(", "allow_pickle=True", "trust_remote_code=True"):
            assert banned not in text, f"{path.name}: {banned}"


def test_secrets_of_the_environment_reach_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf_aSecretToken", "AWS_SECRET_ACCESS_KEY": "aSecretKey", "AWS_ACCESS_KEY_ID": "AKIASECRET"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run = Run.model_validate({**RECIPE, "root": str(tmp_path), "extract": {"store": "s3://bucket/prefix"}})
    with job(run, "extract", "part-0000"):
        pass
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not any(value in path.read_text() for value in secrets.values())


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("extract", {"store": "s3://KEY:SECRET@bucket/prefix"}),
        ("data", {"train": [{"path": "a"}], "regenerate": {"server": {"url": "http://me:SECRET@host/v1"}}}),
        ("data", {"train": [{"path": "a"}], "regenerate": {"server": {"url": "http://host/v1?key=SECRET"}}}),
    ],
)
def test_a_key_inside_a_url_is_refused_and_not_repeated(tmp_path: Path, section: str, value: Any) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({**RECIPE, section: value}))
    with pytest.raises(BadInput, match="give keys by environment variables") as caught:
        load_run(tmp_path / "run.yaml")
    assert "SECRET" not in str(caught.value)


def test_a_manifest_of_another_run_cannot_be_named_from_outside(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({**RECIPE, "cache": {"from": "../../elsewhere"}}))
    with pytest.raises(BadInput, match=r"`cache\.from`"):
        load_run(tmp_path / "run.yaml")
    with pytest.raises(BadInput):
        read_manifest(tmp_path / "none.json", "cache")

"""A cache on S3: written through obstore, read through Zarr, its manifest there put last."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cache import Cache
from data.codec import make_codec
from data.errors import BadInput, Failure
from data.layout import Layout, part_name
from data.manifest import State, publish, read_json, read_manifest
from data.part import damage, part_body, publish_part, shared_codec, upload_shard
from data.settings import Run
from data.shard import ShardRow, ShardWriter, finished, record_path
from data.store import Bucket, Folder, client, open_store
from stages.cli import exit_code
from tests.extracting import Children, extract, shards
from tests.test_train import cached, last_weights, token_row, write_run
from tests.test_verify import follow, verify

pytest.importorskip("obstore")
LAYERS, WIDTH = (0, 2), 32


@pytest.fixture(scope="module")
def server():
    """Address of an S3 server in this process."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def put(server: str, path: str, body: str | None = None) -> None:
    connection = http.client.HTTPConnection(server.removeprefix("http://"))
    connection.request("PUT", path, body)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture(scope="module")
def bucket(server: str) -> Iterator[str]:
    """A prefix of a bucket there, and the environment that leads to it."""
    put(server, "/states")
    client.cache_clear()  # of other servers that were meant by the same names
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": server,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        yield "s3://states/some/prefix"


@pytest.fixture
def run(tmp_path, bucket):
    return Run.model_validate(
        {
            "name": "far",
            "root": str(tmp_path),
            "target": {"model": "tiny:0"},
            "data": {"train": [{"path": "rows.jsonl"}]},
            "extract": {"parts": 1, "codec": "fp8", "store": bucket},
        }
    )


def write_cache(run: Run) -> tuple[list[ShardRow], list[dict[str, np.ndarray]]]:
    layout = Layout.of(run)
    codec = shared_codec(layout, "id", lambda: make_codec("fp8", len(LAYERS), WIDTH))
    body = part_body(run, codec, LAYERS, 300, {}, {}, {})
    rng = np.random.default_rng(0)
    rows = [
        ShardRow(f"r{i}", rng.integers(0, 300, 400).astype(np.int32), rng.random(400) < 0.5, False, i * 90)
        for i in range(4)
    ]
    states = [torch.randn(row.states, len(LAYERS), WIDTH).bfloat16() for row in rows]
    arrays = [{name: array.numpy() for name, array in codec.encode(s).items()} for s in states]
    path = layout.cache / part_name(0) / "shard-00000.zarr"
    with ShardWriter(path, codec, rows, body["fingerprint"], run.extract.compressor) as writer:
        for i, encoded in enumerate(arrays):
            writer.put(i, encoded)
        record = writer.finish()
    record = upload_shard(layout, 0, body, record)
    assert finished(path, body["fingerprint"]) == read_json(record_path(path), "")
    publish_part(layout, 0, body, [record])
    return rows, arrays


def objects(run: Run) -> dict[str, int]:
    return open_store(Layout.of(run), run.extract.store).sizes("")


def test_rows_come_back_from_s3(run):
    rows, arrays = write_cache(run)
    assert not (Layout.of(run).cache / "part-0000" / "shard-00000.zarr").exists()
    cache = Cache.open(run)
    out = {name: np.zeros((400, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}
    for number, row in enumerate(rows):
        assert cache.read_states(number, out, 7) == row.states
        for name, values in arrays[number].items():
            assert np.array_equal(out[name][7 : 7 + row.states], values)
        ids, supervised = cache.tokens(number)
        assert np.array_equal(ids, row.token_ids)
        assert np.array_equal(supervised, row.supervised)


def test_the_bucket_holds_shards_and_a_copy_of_the_manifest(run):
    write_cache(run)
    names = objects(run)
    assert {"part-0000.json", "codec.safetensors", "part-0000/rows.parquet"} <= names.keys()
    assert "part-0000/shard-00000.zarr/hidden/c/0/0/0" in names
    assert Layout.of(run).cache_part(0).exists()


def test_the_manifest_is_put_last(run, monkeypatch):
    put, order = Bucket.upload, []
    monkeypatch.setattr(Bucket, "upload", lambda self, path, name: (order.append(name), put(self, path, name)))
    write_cache(run)
    assert order[-1] == "part-0000.json"
    assert order.index("part-0000/rows.parquet") > order.index("part-0000/shard-00000.zarr/hidden/c/0/0/0")


def test_a_lost_object_is_found(run):
    write_cache(run)
    assert damage(Layout.of(run), 0) == []
    name = "part-0000/shard-00000.zarr/hidden/c/0/0/0"
    open_store(Layout.of(run), run.extract.store).remove([name])
    assert any(name in line for line in damage(Layout.of(run), 0, fast=True))
    cache = Cache.open(run)
    out = {name: np.zeros((400, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}
    with pytest.raises(BadInput, match="hidden/c/0/0/0 is missing"):
        cache.read_states(1, out, 0)


def test_a_changed_object_is_found(run, tmp_path):
    write_cache(run)
    name = "part-0000/shard-00000.zarr/scale/c/0/0"
    junk = tmp_path / "junk"
    junk.write_bytes(bytes(objects(run)[name]))
    open_store(Layout.of(run), run.extract.store).upload(junk, name)
    assert damage(Layout.of(run), 0, fast=True) == []
    assert any(name in line for line in damage(Layout.of(run), 0))


def test_an_uploaded_shard_that_was_lost_is_not_finished(run):
    write_cache(run)
    shard = Layout.of(run).cache / "part-0000" / "shard-00000.zarr"
    fingerprint = read_json(record_path(shard), "")["fingerprint"]
    assert finished(shard, fingerprint)
    open_store(Layout.of(run), run.extract.store).remove(["part-0000/shard-00000.zarr/zarr.json"])
    assert finished(shard, fingerprint) is None


@pytest.mark.parametrize(
    "store", ["gs://bucket/x", "s3:///prefix", "/some/folder", "s3://a//b", "s3://a/../b", "s3://a/."]
)
def test_other_stores_are_refused(tmp_path, store):
    with pytest.raises(BadInput, match="s3://bucket/prefix"):
        open_store(Layout(tmp_path), store)


def test_a_folder_is_the_default(tmp_path):
    assert open_store(Layout(tmp_path), None) == Folder(tmp_path / "cache")


def write_whole_run(folder: Path, store: str | None) -> Path:
    """A run of two parts with some shards each and a few steps of training; the run file."""
    rng = np.random.default_rng(1)
    rows = [token_row(i, rng.integers(33, 120, int(rng.integers(12, 60))).tolist()) for i in range(16)]
    extracted = {"parts": 2, "codec": "fp8", "window_bytes": 80_000, "shard_bytes": 40_000, "store": store}
    return write_run(
        folder, "whole", "tiny:2", rows, data={"responses": "keep"}, extract=extracted, train={"max_steps": 3}
    )


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run whose shards lie on this machine."""
    return cached(write_whole_run(tmp_path_factory.mktemp("near"), None))


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> Run:
    """The same with its shards in the bucket."""
    return cached(write_whole_run(tmp_path_factory.mktemp("far"), bucket))


def contents(run: Run) -> dict[str, str]:
    """MD5 of every object of a run's cache."""
    client = open_store(Layout.of(run), run.extract.store)._client
    return {item["path"]: item["e_tag"] for page in client.list() for item in page}


def read_all(run: Run) -> None:
    cache = Cache.open(run)
    out = {name: np.zeros((64, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}
    for row in range(len(cache)):
        cache.tokens(row)
        cache.read_states(row, out, 0)


def test_training_from_a_bucket_equals_training_from_a_folder(
    near: Run, far: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    for run in (near, far):
        assert verify(run) == 0
        assert exit_code(["train", str(Path(run.root) / "run.yaml")]) == 0
    assert capfd.readouterr().err.count("verified 2 parts") == 2
    ours, theirs = last_weights(near), last_weights(far)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(shards(near)) == 2
    assert not shards(far)


FAULTS = {
    "flipped": (
        ["shard-00000.zarr/hidden/c/0/0/0", "shard-00001.zarr/token_ids/c/0"],
        "has crc32c .*, its manifest says",
        "not the bytes that were written",
    ),
    "lost or cut": (
        ["shard-00000.zarr/hidden/c/0/0/0", "shard-00000.zarr/zarr.json", "shard-00001.zarr/scale/c/0/0"],
        "has [a-z0-9]+ bytes, its manifest says",
        "is missing",
    ),
    "lost copies": (["../part-0001.json", "../codec.safetensors", "rows.parquet"], "has no bytes, .* has", None),
    "flipped copies": (["../part-0001.json", "rows.parquet"], "has crc32c .*, .* has", None),
}
"""Objects of part 1, what verify says of each, and a reader, which looks at no copy of what is on this machine."""


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_in_the_bucket_is_named_and_its_remedy_works(
    far: Run, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    found, says, reader_says = FAULTS[fault]
    names = [os.path.normpath(f"part-0001/{name}") for name in found]
    store, before = open_store(Layout.of(far), far.extract.store), contents(far)
    for name in names:
        body = bytearray(store._client.get(name).bytes())
        body[len(body) // 2] ^= 1
        if fault.startswith("flipped"):
            store.upload(bytes(body), name)
        elif "scale" in name:
            store.upload(bytes(body[:-1]), name)
        else:
            store.remove([name])
    assert bool(damage(Layout.of(far), 1, fast=True)) != fault.startswith("flipped")
    assert verify(far, "--part", "1") == 1
    error = capfd.readouterr().err
    for name in names:
        assert re.search(rf"{store}/{name} {says} \w+", error)
    if reader_says is None:
        read_all(far)
    else:
        with pytest.raises(BadInput, match=rf"{store}/part-0001/shard-0000.\.zarr.* {reader_says}"):
            read_all(far)
    follow(far, error.splitlines()[-1])
    assert contents(far) == before
    assert damage(Layout.of(far), 1) == []


def test_what_is_lost_here_or_there_is_made_again(far: Run) -> None:
    layout, before = Layout.of(far), contents(far)
    shutil.rmtree(layout.cache / "part-0000")
    layout.head.unlink()
    open_store(layout, far.extract.store).remove(name for name in before if not name.startswith("part-0000"))
    extract(far, (0, 1))
    assert contents(far) == before
    assert damage(layout, 0) + damage(layout, 1) == []
    read_all(far)


def test_kills_leave_the_same_objects_and_never_a_manifest_of_less(far: Run) -> None:
    layout, before = Layout.of(far), contents(far)
    part = {name for name in before if name.startswith("part-0000")}
    layout.cache_part(0).unlink()
    open_store(layout, far.extract.store).remove(part)
    children, left = Children(), []
    each = len([name for name in part if "shard-00000" in name])
    for upload in (each // 2, each + each // 2):
        assert children.run(far, upload=upload) != 0
        found = part & contents(far).keys()
        assert not layout.cache_part(0).exists()
        assert "part-0000.json" not in found
        left.append(len(found))
    assert 0 < left[0] < left[1] < len(part)
    assert children.run(far) == 0
    assert contents(far) == before
    assert damage(layout, 0) == []
    assert not shards(far)


def test_a_kill_between_a_shard_s_record_and_its_removal_leaves_no_copy_here(far: Run) -> None:
    layout = Layout.of(far)
    layout.cache_part(0).unlink()
    extract(far)
    left = layout.cache / "part-0000" / "shard-00001.zarr"
    left.mkdir()
    open_store(layout, far.extract.store).remove(["part-0000.json"])
    extract(far)
    assert not left.exists()


def test_a_part_that_is_made_again_has_no_manifest_meanwhile(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, before = Layout.of(far), contents(far)
    store = open_store(layout, far.extract.store)
    manifest = bytes(store._client.get("part-0000.json").bytes())
    store.remove(["part-0000/shard-00000.zarr/zarr.json"])

    def fail(*_: object) -> None:
        raise RuntimeError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", fail)
        with pytest.raises(RuntimeError, match="the line is cut"):
            extract(far)
    assert "part-0000.json" not in objects(far)
    store.upload(manifest, "part-0000.json")  # too early
    with pytest.raises(BadInput, match=r"part-0000\.json does not exist: run `draftmill extract` first"):
        read_all(far)
    extract(far)
    assert contents(far) == before


def test_shards_that_larger_ones_replace_leave_the_bucket(far: Run) -> None:
    before = contents(far)
    whole = {"window_bytes": 1 << 20, "shard_bytes": 1 << 20}
    larger = changed(far, **whole)
    extract(larger, (0, 1))
    assert {name.split("/")[1] for name in objects(far) if "/" in name} == {"shard-00000.zarr", "rows.parquet"}
    assert objects(larger).keys() == recorded(larger)
    read_all(larger)
    extract(far, (0, 1))
    assert contents(far) == before


def changed(run: Run, **settings: object) -> Run:
    return run.model_copy(update={"extract": run.extract.model_copy(update=settings)})


def recorded(run: Run) -> set[str]:
    """Names of all objects that a run of two parts has by its manifests."""
    layout, names = Layout.of(run), {"codec.safetensors"}
    for part in (0, 1):
        names |= {f"{part_name(part)}.json", f"{part_name(part)}/rows.parquet"}
        for shard in read_manifest(layout.cache_part(part), "cache")["shards"]:
            names |= {f"{part_name(part)}/{shard['name']}/{file['path']}" for file in shard["files"]}
    return names


def test_arrays_of_another_codec_leave_shards_that_keep_their_names(far: Run) -> None:
    before = contents(far)
    assert any("/scale/" in name for name in before)
    other = changed(far, codec="bf16")
    extract(other, (0, 1))
    assert objects(other).keys() == recorded(other)
    assert not any("/scale/" in name for name in objects(other))
    extract(far, (0, 1))
    assert contents(far) == before


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("store", [None, "s3://states/moved"])
def test_parts_that_move_leave_nothing_in_the_bucket_before(far: Run, store: str | None, forced: bool) -> None:
    """`forced`: Snakemake has deleted the manifest."""
    layout, before = Layout.of(far), contents(far)
    moved = changed(far, store=store)
    if forced:
        layout.cache_part(0).unlink()
    extract(moved, (0,))
    assert {name.split("/")[0] for name in objects(far)} == {"part-0001.json", "part-0001", "codec.safetensors"}
    extract(moved, (1,))
    assert objects(far) == {}
    read_all(moved)
    extract(far, (0, 1))
    assert contents(far) == before
    assert store is None or objects(moved) == {}
    assert not shards(far)


def test_a_bucket_that_a_part_has_left_is_found_again_after_a_kill(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before, moved = contents(far), changed(far, store="s3://states/moved")

    def fail(*_: object) -> None:
        raise RuntimeError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr("data.part.leave_bucket", fail)
        with pytest.raises(RuntimeError, match="the line is cut"):
            extract(moved, (0, 1))
    assert "part-0000.json" in objects(far)
    extract(moved, (0, 1))
    assert objects(far) == {}
    extract(far, (0, 1))
    assert contents(far) == before


def test_a_former_bucket_that_is_gone_is_named_and_stops_nothing(far: Run, capfd: pytest.CaptureFixture[str]) -> None:
    layout, before = Layout.of(far), contents(far)
    manifest = read_json(layout.cache_part(0), "")
    publish(layout.cache_part(0), "cache", {**manifest, "store": "s3://nowhere/x", "settings": {}})
    extract(far)
    assert re.search(
        r"extract part-0000: s3://nowhere/x/whole/cache: .*; an earlier part-0000 stays there: remove it with",
        capfd.readouterr().err,
    )
    assert contents(far) == before


def test_a_part_begun_over_is_made_by_a_role_that_may_not_delete(
    far: Run, server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put(server, "/guarded")
    rule = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::guarded/*"}
    put(server, "/guarded?policy", json.dumps({"Version": "2012-10-17", "Statement": [rule]}))
    path = write_whole_run(tmp_path, "s3://guarded/x")
    shutil.copytree(Path(far.root) / ".targets", tmp_path / "runs" / ".targets")
    run = cached(path)
    assert objects(run).keys() == recorded(run)
    allow = r"s3://guarded/x/whole/cache: .*: see that .* AWS_\* variables are for it and allow s3:DeleteObject"
    with pytest.raises(Failure, match=allow):
        extract(changed(run, codec="bf16"))
    assert exit_code(["clean", str(path), "--all", "--yes"]) == 1
    assert re.search(allow, capfd.readouterr().err)
    assert run.folder.exists(), "its records lead to the objects"


def test_a_process_has_one_client_a_store(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = importlib.import_module("obstore.store"), []
    S3Store = module.S3Store
    monkeypatch.setattr(module, "S3Store", lambda *a, **k: (made.append(a), S3Store(*a, **k))[1])
    client.cache_clear()
    Layout.of(far).cache_part(0).unlink()
    State(Layout.of(far).cache_state(0)).running()  # so that shards are resumed
    extract(far, (0, 1))
    read_all(far)
    assert len(made) == 1


def test_a_file_that_is_gone_is_not_the_bucket_s_fault(run: Run, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=rf"^{tmp_path}/gone: gone before it was uploaded to {bucket}: run the same"):
        Bucket(bucket).upload(tmp_path / "gone", "x")


PREFIXES = ("s3://states/a", "s3://states/a/b", "s3://states/ab", "s3://states/a#b", "s3://states/a%41", "s3://states")


def test_prefixes_do_not_mix(bucket: str, tmp_path: Path) -> None:
    for prefix in PREFIXES:
        open_store(Layout(tmp_path / "run"), prefix).upload(prefix.encode(), "part-0000/x")
        open_store(Layout(tmp_path / "run-2"), prefix).upload(b"", "part-0000/y")
    for prefix in PREFIXES:
        store = open_store(Layout(tmp_path / "run"), prefix)
        assert store.sizes("") == {"part-0000/x": len(prefix)}
        assert bytes(store._client.get("part-0000/x").bytes()) == prefix.encode()


@pytest.mark.parametrize("what", ["--cache", "--all"])
def test_clean_empties_the_prefix_of_its_run_alone(
    run: Run, bucket: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_cache(run)
    beside = open_store(Layout(Path("far-2")), bucket)
    beside.upload(b"x", "part-0000.json")
    assert clean(run, what) == 0
    assert f"shards of the cache  {bucket}/far/cache" in capfd.readouterr().out
    assert objects(run) == {}
    assert not Layout.of(run).cache.exists()
    assert beside.sizes("") == {"part-0000.json": 1}


def clean(run: Run, what: str) -> int:
    path = Path(run.root) / "run.yaml"
    path.write_text(run.model_dump_json(by_alias=True, exclude_unset=True))
    return exit_code(["clean", str(path), what, "--yes"])


@pytest.mark.parametrize("what", ["--cache", "--all"])
def test_clean_leaves_objects_alone_that_a_run_of_the_same_name_made(
    run: Run, bucket: str, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_cache(run)
    before = contents(run)
    other = run.model_copy(update={"root": str(tmp_path / "elsewhere")})
    Layout.of(other).cache.mkdir(parents=True)
    assert clean(other, what) == 0
    assert contents(run) == before
    assert not Layout.of(other).cache.exists()
    said = f"{bucket}/far/cache: left alone: no record in {Layout.of(other).cache} says that this run wrote there"
    assert said in capfd.readouterr().err


def test_clean_of_a_copied_folder_leaves_the_first_one_s_objects(run: Run, bucket: str, tmp_path: Path) -> None:
    write_cache(run)
    before = contents(run)
    copy = run.model_copy(update={"name": "copy"})
    shutil.copytree(run.folder, copy.folder)
    assert clean(copy, "--all") == 0
    assert contents(run) == before


@pytest.mark.parametrize("store", [None, "s3://states/other"])
@pytest.mark.parametrize("left", ["part-0000.json", "part-0000/shard-00000.json", "part-0000/state.json"])
def test_clean_finds_the_bucket_by_any_record(run: Run, store: str | None, left: str) -> None:
    """Whatever the run file says by now, and whatever else a kill or a forced re-run has left."""
    write_cache(run)
    layout = Layout.of(run)
    State(layout.cache_state(0)).done(layout.cache_part(0))
    for path in layout.cache.rglob("*.json"):
        if path != layout.cache / left:
            path.unlink()
    assert objects(run)
    assert clean(changed(run, store=store), "--cache") == 0
    assert objects(run) == {}


def test_clean_finds_what_an_upload_left_that_was_cut_short(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any record of a shard says so."""
    before, moved = contents(far), changed(far, store="s3://states/cut")
    upload, names = Bucket.upload, []

    def fail(self: Bucket, body: Path | bytes, relative: str) -> None:
        if names:
            raise RuntimeError("the line is cut")
        names.append(relative)
        upload(self, body, relative)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", fail)
        with pytest.raises(RuntimeError, match="the line is cut"):
            extract(moved)
    assert objects(moved).keys() == set(names)
    assert clean(moved, "--cache") == 0
    assert objects(moved) == objects(far) == {}
    extract(far, (0, 1))
    assert contents(far) == before


@pytest.mark.parametrize("what", ["--cache", "--all"])
def test_clean_names_the_bucket_when_no_record_is_left(
    run: Run, bucket: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_cache(run)
    shutil.rmtree(run.folder)
    assert clean(run, what) == 0
    said = capfd.readouterr().err
    assert f"{bucket}/far/cache: left alone: no record in" in said
    assert "remove its objects there, if any, with the bucket's own tools" in said
    assert "nothing to delete" in said
    assert objects(run)
    open_store(Layout.of(run), bucket).remove(objects(run))


@pytest.mark.parametrize("what", ["--cache", "--all"])
def test_clean_of_a_bucket_out_of_reach_cleans_the_rest_and_fails(
    run: Run, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_cache(run)
    layout = Layout.of(run)
    publish(layout.cache_part(1), "cache", {"store": "s3://nowhere/x"})
    assert clean(run, what) == 1
    assert not layout.cache.exists()
    assert objects(run) == {}
    error = capfd.readouterr().err.splitlines()
    assert any(line.endswith("allow s3:ListBucket. What lies there will stay") for line in error)
    assert error[-1].startswith("error: s3://nowhere/x/far/cache: ")
    assert error[-1].endswith("What lies there was left: remove it with the bucket's own tools")


def test_a_bucket_that_is_not_there_is_told_before_the_target_is_loaded(
    near: Run, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.target.load_target", None)
    path = write_whole_run(tmp_path, "s3://nowhere/x")
    shutil.copytree(Path(near.root) / ".targets", tmp_path / "runs" / ".targets")
    assert exit_code(["prepare", str(path)]) == 0
    assert exit_code(["extract", str(path)]) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: s3://nowhere/x/whole/cache: ")
    assert line.endswith(
        ": see that the bucket exists, and that the AWS_* variables are for it and allow s3:ListBucket"
    )


def test_a_server_that_refuses_while_a_shard_is_read_is_a_failure(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Cache.open(far)
    reader.tokens(0)
    row = int(np.argmax(reader.rows.states > 0))
    out = {name: np.zeros((64, *spec.shape), spec.dtype) for name, spec in reader.codec.arrays().items()}
    generic = importlib.import_module("obstore.exceptions").GenericError

    async def refuse(*_: object, **__: object) -> None:
        raise generic("Generic S3 error: 403 Forbidden\n\nDebug source:\nmuch")

    monkeypatch.setattr("zarr.storage.ObjectStore.get", refuse)
    with pytest.raises(Failure, match=r"/whole/cache: Generic S3 error: 403 Forbidden: see that the bucket exists"):
        reader.read_states(row, out, 0)

"""A cache on S3: written through obstore, read through Zarr, its manifest there put last."""

import numpy as np
import pytest
import torch

from data.cache import Cache
from data.codec import make_codec
from data.errors import BadInput
from data.layout import Layout, part_name
from data.manifest import read_json
from data.part import damage, part_body, publish_part, shared_codec, upload_shard
from data.settings import Run
from data.shard import ShardRow, ShardWriter, finished, record_path
from data.store import Bucket, Folder, open_store

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


@pytest.fixture
def bucket(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import http.client

    connection = http.client.HTTPConnection(server.removeprefix("http://"))
    connection.request("PUT", "/states")
    assert connection.getresponse().status == 200
    connection.close()
    return "s3://states/some/prefix"


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
    open_store(Layout.of(run), run.extract.store)._store().delete(name)
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
    open_store(Layout.of(run), run.extract.store)._store().delete("part-0000/shard-00000.zarr/zarr.json")
    assert finished(shard, fingerprint) is None


@pytest.mark.parametrize("store", ["gs://bucket/x", "s3:///prefix", "/some/folder"])
def test_other_stores_are_refused(tmp_path, store):
    with pytest.raises(BadInput, match="s3://bucket/prefix"):
        open_store(Layout(tmp_path), store)


def test_a_folder_is_the_default(tmp_path):
    assert open_store(Layout(tmp_path), None) == Folder(tmp_path / "cache")

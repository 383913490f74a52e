"""The cache: what is written is what is read, and whatever is not whole is refused by name."""

import multiprocessing
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from data.anchors import eligible
from data.cache import Cache
from data.codec import CODECS, ArraySpec, make_codec
from data.errors import BadInput, Failure
from data.layout import Layout, part_name
from data.manifest import inside, read_manifest, write_json
from data.part import codec_path, damage, part_body, publish_part, rows_path, shared_codec
from data.settings import Run
from data.shard import ShardRow, ShardWriter, finished, record_path
from data.tokens import outside, row_hash

LAYERS, WIDTH, VOCAB = (1, 3, 4), 32, 300
TEACHER = {"last_hidden": ArraySpec.of((WIDTH,), "uint16")}


def make_run(root, **extract) -> Run:
    return Run.model_validate(
        {
            "name": "t",
            "root": str(root),
            "target": {"model": "tiny:0"},
            "data": {"train": [{"path": "rows.jsonl"}]},
            "extract": {"parts": 2, "codec": "int8-outlier", **extract},
        }
    )


def make_rows(part: int, shard: int, rng: np.random.Generator) -> list[ShardRow]:
    """Ragged rows: lengths 2 to 600, some without any state; the last shard of a part stores no state at all."""
    rows = []
    for i in range(8):
        length = int(rng.integers(2, 600))
        supervised = rng.random(length) < 0.5
        states = 0 if i % 4 == 3 or shard == 2 else int(rng.integers(1, length))
        rows.append(
            ShardRow(
                row_id=f"r-{part}-{shard}-{i}-é",
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                supervised=supervised,
                validation=bool(i % 2),
                states=states,
                teacher=int(supervised[1:].sum()),
            )
        )
    return rows


def states_of(row: ShardRow) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row_hash(row.row_id) % 2**31)
    return torch.randn(row.states, len(LAYERS), WIDTH, generator=generator).bfloat16()


def teacher_of(row: ShardRow) -> np.ndarray:
    return np.arange(row.teacher * WIDTH, dtype=np.uint16).reshape(row.teacher, WIDTH)


def encoded(codec, row: ShardRow) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in codec.encode(states_of(row)).items()}


@pytest.fixture(scope="module")
def write_cache(tmp_path_factory):
    """Puts a whole cache of two parts under a run and returns its rows by id; each kind is made once and copied."""
    made = {}

    def write(run: Run, teacher=None) -> dict[str, ShardRow]:
        kind = (run.extract.codec, run.extract.compressor, teacher is None)
        if kind not in made:
            template = run.model_copy(update={"root": str(tmp_path_factory.mktemp("cache"))})
            made[kind] = (template.folder, make_cache(template, teacher))
        shutil.copytree(made[kind][0], run.folder)
        return made[kind][1]

    return write


def make_cache(run: Run, teacher) -> dict[str, ShardRow]:
    layout = Layout.of(run)
    codec = shared_codec(
        layout, "id", lambda: make_codec(run.extract.codec, len(LAYERS), WIDTH, torch.randn(64, len(LAYERS), WIDTH))
    )
    rng, rows = np.random.default_rng(0), {}
    for part in range(run.extract.parts):
        body = part_body(run, codec, LAYERS, VOCAB, {"weights": "w"}, {"template": "t"}, {"tokens": "x"}, teacher)
        records = []
        for shard in range(3):
            these = make_rows(part, shard, rng)
            path = layout.cache / part_name(part) / f"shard-{shard:05d}.zarr"
            with ShardWriter(path, codec, these, body["fingerprint"], run.extract.compressor, teacher) as writer:
                for i in rng.permutation(len(these)):
                    extra = {"last_hidden": teacher_of(these[i])} if teacher else {}
                    writer.put(int(i), encoded(codec, these[i]) | extra)
                records.append(writer.finish())
            rows |= {row.row_id: row for row in these}
        publish_part(layout, part, body, records)
    return rows


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def buffers(cache: Cache, count: int = 700) -> dict[str, np.ndarray]:
    return {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in cache.codec.arrays().items()}


def assert_reads(cache: Cache, rows: dict[str, ShardRow]) -> None:
    out = buffers(cache)
    assert len(cache) == len(rows)
    for number in range(len(cache)):
        row = rows[cache.row_id(number)]
        assert cache.read_states(number, out, 5) == row.states
        for name, values in encoded(cache.codec, row).items():
            assert np.array_equal(out[name][5 : 5 + row.states], values)
        ids, supervised = cache.tokens(number)
        assert ids.dtype == np.int32
        assert np.array_equal(ids, row.token_ids)
        assert np.array_equal(supervised, row.supervised)
        assert cache.rows.row_hash[number] == row_hash(row.row_id)
        assert cache.rows.length[number] == len(row.token_ids)
        assert cache.rows.validation[number] == row.validation
        assert cache.rows.eligible[number] == len(eligible(row.supervised))


@pytest.mark.parametrize(
    ("codec", "compressor"), [("int8-outlier", "none"), ("int8-outlier", "zstd"), ("bf16", "none"), ("fp8", "zstd")]
)
def test_reads_what_was_written(tmp_path, write_cache, codec, compressor):
    run = make_run(tmp_path, compressor=compressor, codec=codec)
    rows = write_cache(run)
    assert_reads(Cache.open(run), rows)
    assert_reads(Cache.open(run, mapped=False), rows)


@pytest.mark.parametrize("installed", [True, False])
def test_zarrs_reads_the_same_where_it_is_installed(tmp_path, write_cache, monkeypatch, installed):
    """Its pipeline counts what it reads; without the package nothing of it is asked for."""
    zarrs = pytest.importorskip("zarrs")
    if not installed:
        monkeypatch.setitem(sys.modules, "zarrs", None)
    reads = []
    read = zarrs.ZarrsCodecPipeline.read

    async def counted(self, batch, out, **more):
        reads.append(1)
        return await read(self, batch, out, **more)

    monkeypatch.setattr(zarrs.ZarrsCodecPipeline, "read", counted)
    run = make_run(tmp_path, compressor="zstd", codec="fp8")
    rows = write_cache(run)
    assert_reads(Cache.open(run, mapped=False), rows)
    assert (len(reads) > 0) == installed


def test_teacher_entries_have_offsets_of_their_own(run, write_cache):
    rows = write_cache(run, TEACHER)
    cache = Cache.open(run)
    out = {"last_hidden": np.zeros((700, WIDTH), np.uint16)}
    for number in range(len(cache)):
        row = rows[cache.row_id(number)]
        assert cache.read_teacher(number, out, 3) == row.teacher
        assert np.array_equal(out["last_hidden"][3 : 3 + row.teacher], teacher_of(row))
    assert_reads(cache, rows)


def test_any_zarr_reader_reads_a_shard(run, write_cache):
    rows = write_cache(run)
    cache = Cache.open(run)
    group = zarr.open_group(str(cache.layout.cache / "part-0001" / "shard-00000.zarr"), mode="r")
    first = next(n for n in range(len(cache)) if cache.shards[cache.rows.shard[n]].relative.startswith("part-0001"))
    row = rows[cache.row_id(first)]
    assert np.array_equal(group["hidden"][: row.states], encoded(cache.codec, row)["hidden"])
    assert np.array_equal(group["token_ids"][: len(row.token_ids)], row.token_ids)
    ends = group["row_id_offsets"][:]
    assert bytes(group["row_ids"][ends[0] : ends[1]]).decode() == row.row_id
    assert group["state_offsets"][:].tolist()[1] == row.states
    assert group["hidden"].chunks[1:] == (len(LAYERS), WIDTH)


def test_plain_chunks_lie_on_the_disk_as_the_array_itself(run, write_cache):
    write_cache(run)
    shard = Cache.open(run)._shard(0)
    assert isinstance(shard.arrays["hidden"], np.ndarray)
    assert not shard.arrays["hidden"].flags.owndata
    assert not shard.arrays["hidden"].flags.writeable


def test_few_shards_stay_open_when_they_are_large(run, write_cache, monkeypatch):
    rows = write_cache(run)
    largest = max(shard.counts["bytes"] for shard in Cache.open(run).shards)
    monkeypatch.setattr("data.cache.OPEN_BYTES", largest)
    cache = Cache.open(run)
    assert_reads(cache, rows)
    assert sum(cache.shards[number].counts["bytes"] for number in cache._open) <= largest


def test_threads_read_side_by_side(run, write_cache):
    rows = write_cache(run)
    cache, failures = Cache.open(run), []

    def read():
        try:
            assert_reads(cache, rows)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"extract": {"parts": 2, "codec": "fp8"}}, "extract.codec"),
        ({"extract": {"parts": 2, "codec": "int8-outlier", "layers": [0, 2]}}, "extract.layers"),
        ({"target": {"model": "tiny:1"}}, "target.model"),
        ({"data": {"train": [{"path": "other.jsonl"}]}}, "data.train"),
        ({"data": {"train": [{"path": "rows.jsonl"}], "max_length": 99}}, "data.max_length"),
    ],
)
def test_another_setting_is_refused_by_name(run, change, named, write_cache):
    write_cache(run)
    with pytest.raises(BadInput, match=named.replace(".", r"\.")):
        Cache.open(Run.model_validate({**run.model_dump(by_alias=True), **change}))


def test_a_cache_without_checksums_of_rows_is_refused(run, write_cache):
    write_cache(run)
    path = Layout.of(run).cache_part(0)
    body = read_manifest(path, "cache")
    del body["settings"]["extract.format"]
    write_json(path, body)
    with pytest.raises(BadInput, match=r"extract\.format = None, this run wants 2: run `draftmill extract` again"):
        Cache.open(run)


def test_training_settings_do_not_touch_the_cache(run, write_cache):
    write_cache(run)
    changed = Run.model_validate({**run.model_dump(by_alias=True), "train": {"learning_rate": 1e-5}})
    assert Cache.open(changed).fingerprint == Cache.open(run).fingerprint


def test_layers_given_by_hand_equal_those_chosen(run, write_cache):
    write_cache(run)
    extract = run.extract.model_dump() | {"layers": LAYERS}
    Cache.open(Run.model_validate({**run.model_dump(by_alias=True), "extract": extract}))


def test_another_runs_cache(run, write_cache):
    rows = write_cache(run)
    other = Run.model_validate({**run.model_dump(by_alias=True), "name": "u", "cache": {"from": "t"}})
    assert_reads(Cache.open(other), rows)


def test_taps_that_are_not_there_are_refused_with_both_lists(run, write_cache):
    write_cache(run)
    cache = Cache.open(run)
    assert cache.tap_indices([1, 4], "drafter `a`") == (0, 2)
    with pytest.raises(BadInput, match=r"\[1, 3, 4\]; drafter `wide` wants \[2, 4\]"):
        cache.tap_indices([2, 4], "drafter `wide`")


def test_parts_that_disagree_are_refused(run, write_cache):
    write_cache(run)
    path = Layout.of(run).cache_part(1)
    body = read_manifest(path, "cache") | {"target": {"weights": "others"}}
    write_json(path, body)
    with pytest.raises(BadInput, match="target"):
        Cache.open(run)


def test_a_missing_part_is_named(run, write_cache):
    write_cache(run)
    Layout.of(run).cache_part(1).unlink()
    with pytest.raises(BadInput, match=r"part-0001\.json"):
        Cache.open(run)


def shard_file(run: Run, name: str):
    return Layout.of(run).cache / "part-0000" / "shard-00000.zarr" / name


def read_all(run: Run, mapped: bool = True) -> None:
    cache = Cache.open(run, mapped)
    out = buffers(cache)
    for number in range(len(cache)):
        cache.read_states(number, out, 0)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
def test_rows_that_wait_for_the_rest_of_their_shard_take_no_memory(tmp_path: Path, compressor: str) -> None:
    """All shards of a window wait at once, 8 GiB by default."""

    def own() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    count, mask = 8192, np.ones(8193, bool)
    rows = [ShardRow(name, np.zeros(count + 1, np.int32), mask, False, count) for name in "ab"]
    values = np.random.default_rng(0).integers(0, 9, (count, 2, 1024), np.uint16)
    with ShardWriter(tmp_path / "shard-00000.zarr", make_codec("bf16", 2, 1024), rows, "f" * 32, compressor) as writer:
        before = own()
        writer.put(1, {"hidden": values})
        assert own() - before < values.nbytes // 4
        writer.put(0, {"hidden": values})
        writer.finish()
    assert np.array_equal(zarr.open_group(tmp_path / "shard-00000.zarr", mode="r")["hidden"][count:], values)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
@pytest.mark.parametrize("name", ["hidden/c/0/0/0", "scale/c/0/0", "hidden/zarr.json", "zarr.json", "token_ids/c/0"])
@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_file_that_is_cut_or_gone_is_found_on_reading(tmp_path, compressor, name, harm, write_cache):
    run = make_run(tmp_path, compressor=compressor)
    write_cache(run)
    path = shard_file(run, name)
    os.truncate(path, path.stat().st_size - 1) if harm == "truncate" else path.unlink()
    with pytest.raises(BadInput, match=name):
        read_all(run)
    assert any(name in line for line in damage(Layout.of(run), 0, fast=True))


def test_a_flipped_byte_is_found_by_the_full_check(run, write_cache):
    write_cache(run)
    layout = Layout.of(run)
    assert damage(layout, 0) == []
    path = shard_file(run, "hidden/c/0/0/0")
    body = bytearray(path.read_bytes())
    body[len(body) // 3] ^= 4
    path.write_bytes(body)
    assert damage(layout, 0, fast=True) == []
    found = damage(layout, 0)
    assert len(found) == 1
    assert "hidden/c/0/0/0" in found[0]
    assert damage(layout, 1) == []


def damaged(body: bytearray, how: str) -> bytes:
    """A file's bytes after something that leaves its size as it is."""
    match how:
        case "half of it zeroed":
            body[: len(body) // 2] = bytes(len(body) // 2)
        case "a page zeroed":
            body[4096:8192] = bytes(4096)
        case "a bit flipped":
            body[9] ^= 4
    return bytes(body)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("how", ["half of it zeroed", "a page zeroed", "a bit flipped"])
@pytest.mark.parametrize("codec", CODECS)
def test_states_that_are_not_those_written_are_refused_by_row(tmp_path, write_cache, codec, how, mapped):
    run = make_run(tmp_path, codec=codec)
    write_cache(run)
    path = shard_file(run, "hidden/c/0/0/0")
    path.write_bytes(damaged(bytearray(path.read_bytes()), how))
    with pytest.raises(BadInput, match=r"shard-00000\.zarr: row r-0-0-\d-é: .* remove the manifest part-0000\.json"):
        read_all(run, mapped)
    assert damage(Layout.of(run), 0, fast=True) == [], "sizes do not tell"


@pytest.mark.parametrize("name", ["scale/c/0/0", "outlier/c/0/0/0", "token_ids/c/0", "supervised/c/0"])
def test_a_zero_byte_in_any_array_that_training_reads_is_found(run, name, write_cache):
    write_cache(run)
    path = shard_file(run, name)
    body = bytearray(path.read_bytes())
    place = next(i for i, value in enumerate(body) if value)
    body[place] = 0
    path.write_bytes(body)
    with pytest.raises(BadInput, match=r"shard-00000\.zarr.*not the bytes that were written"):
        read_all(run)


def test_teacher_entries_that_are_not_those_written_are_refused_by_row(run, write_cache):
    write_cache(run, TEACHER)
    path = shard_file(run, "last_hidden/c/0/0")
    path.write_bytes(damaged(bytearray(path.read_bytes()), "half of it zeroed"))
    cache = Cache.open(run)
    with pytest.raises(BadInput, match=r"row r-0-0-0-é: not the bytes that were written"):
        cache.read_teacher(0, {"last_hidden": np.zeros((700, WIDTH), np.uint16)}, 0)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
def test_a_damaged_chunk_index_is_found_on_reading(tmp_path, write_cache, compressor):
    run = make_run(tmp_path, compressor=compressor)
    write_cache(run)
    path = shard_file(run, "hidden/c/0/0/0")
    body = bytearray(path.read_bytes())
    body[-10] ^= 1
    path.write_bytes(body)
    with pytest.raises(BadInput, match="chunk index"):
        read_all(run)


def test_a_damaged_compressed_chunk_is_named(tmp_path, write_cache):
    run = make_run(tmp_path, compressor="zstd")
    write_cache(run)
    path = shard_file(run, "hidden/c/0/0/0")
    body = bytearray(path.read_bytes())
    body[:64] = bytes(64)
    path.write_bytes(body)
    with pytest.raises(BadInput, match="chunk 0 is damaged"):
        read_all(run)


def test_a_damaged_table_of_rows_is_found(run, write_cache):
    write_cache(run)
    path = rows_path(Layout.of(run), 0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"rows\.parquet"):
        Cache.open(run)


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"junk" * 9)])
def test_lost_codec_constants_are_named(run, harm, write_cache):
    write_cache(run)
    harm(codec_path(Layout.of(run)))
    with pytest.raises(BadInput, match=r"codec\.safetensors"):
        Cache.open(run)


def test_a_manifest_cannot_lead_out_of_the_cache(run, write_cache):
    write_cache(run)
    layout = Layout.of(run)
    body = read_manifest(layout.cache_part(0), "cache")
    body["shards"][0]["name"] = "../../../elsewhere"
    write_json(layout.cache_part(0), body)
    with pytest.raises(BadInput, match="outside"):
        read_all(run)
    with pytest.raises(BadInput, match="outside"):
        inside(layout.cache, "../x")


class TestWriting:
    def writer(self, run, rows=None, **more):
        codec = make_codec("fp8", len(LAYERS), WIDTH)
        rows = make_rows(0, 0, np.random.default_rng(1)) if rows is None else rows
        path = Layout.of(run).cache / "part-0000" / "shard-00000.zarr"
        return codec, rows, ShardWriter(path, codec, rows, "f" * 32, **more)

    def test_a_row_that_was_never_put_is_refused(self, run):
        codec, rows, writer = self.writer(run)
        with writer:
            writer.put(0, encoded(codec, rows[0]))
            with pytest.raises(Failure, match=r"rows \[1, 2"):
                writer.finish()
        assert not writer.path.exists()

    def test_leaving_early_takes_everything_back(self, run):
        codec, rows, writer = self.writer(run)
        with writer:
            writer.put(0, encoded(codec, rows[0]))
        assert [path.name for path in writer.path.parent.iterdir()] == [f".{writer.path.name}.lock"]

    def test_wrong_shapes_are_refused(self, run):
        codec, rows, writer = self.writer(run)
        with writer, pytest.raises(ValueError, match="hidden"):
            writer.put(0, encoded(codec, rows[1]))

    def test_a_finished_shard_is_not_written_again(self, run):
        codec, rows, writer = self.writer(run)
        with writer:
            for i, row in enumerate(rows):
                writer.put(i, encoded(codec, row))
            record = writer.finish()
        assert finished(writer.path, "f" * 32)["files"] == record["files"]
        assert finished(writer.path, "e" * 32) is None
        with pytest.raises(BadInput, match="there already"):
            self.writer(run)

    def test_a_torn_shard_is_written_again(self, run):
        codec, rows, writer = self.writer(run)
        with writer:
            for i, row in enumerate(rows):
                writer.put(i, encoded(codec, row))
            writer.finish()
        (writer.path / "hidden/c/0/0/0").unlink()
        assert finished(writer.path, "f" * 32) is None
        with self.writer(run)[2] as again:
            assert not again.path.exists()
            assert not record_path(again.path).exists()

    def test_a_second_writer_is_refused(self, run):
        _, _, writer = self.writer(run)
        with writer, pytest.raises(BadInput, match="another process"):
            self.writer(run)
        self.writer(run)[2].abort()

    def test_a_killed_writer_leaves_no_lock(self, run):
        context = multiprocessing.get_context("fork")
        child = context.Process(target=lambda: (self.writer(run), os._exit(9)))
        child.start()
        child.join()
        codec, rows, writer = self.writer(run)
        with writer:
            for i, row in enumerate(rows):
                writer.put(i, encoded(codec, row))
            writer.finish()
        assert finished(writer.path, "f" * 32)

    def test_a_full_disk_ends_in_one_clear_line(self, run, monkeypatch):
        codec, rows, writer = self.writer(run)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(Failure, match="disk is full"):
            writer.put(0, encoded(codec, rows[0]))
        assert not writer.temporary.exists()

    @pytest.mark.parametrize("compressor", ["none", "zstd"])
    def test_of_threads_that_meet_a_full_disk_none_hides_it_behind_another_error(self, run, monkeypatch, compressor):
        codec, rows, writer = self.writer(run, compressor=compressor)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(Failure, match="disk is full"):
                writer.put(0, encoded(codec, rows[0]))
        writer.put(1, encoded(codec, rows[1]))
        assert not writer.temporary.exists()

    def test_rows_without_any_state(self, run):
        row = ShardRow("a", np.arange(3, dtype=np.int32), np.zeros(3, bool), False, 0)
        codec, _, writer = self.writer(run, rows=[row])
        with writer:
            writer.put(0, encoded(codec, row))
            assert writer.finish()["counts"]["states"] == 0


def test_parts_share_one_codec_until_its_identity_changes(run):
    layout = Layout.of(run)

    def make():
        return make_codec("int8-outlier", len(LAYERS), WIDTH, torch.randn(64, len(LAYERS), WIDTH))

    first = shared_codec(layout, "a", make)
    again = shared_codec(layout, "a", lambda: pytest.fail("must not be made twice"))
    assert again.record() == first.record()
    assert shared_codec(layout, "b", make).record() != first.record()


def test_opens_100_000_rows_in_under_2_seconds(run):
    """Four thousand shards of 25 rows: what an 8B target's cache of 100,000 rows looks like."""
    layout = Layout.of(run)
    codec = shared_codec(layout, "id", lambda: make_codec("int8-outlier", len(LAYERS), WIDTH, torch.randn(8, 3, WIDTH)))
    names = [f"row-{i:09d}" for i in range(50_000)]
    files = [{"path": f"array-{i}/c/0/0/0", "bytes": 1, "crc32c": 1} for i in range(19)]
    for part in range(2):
        body = part_body(run, codec, LAYERS, VOCAB, {}, {}, {})
        counts = {"rows": 25, "tokens": 25_000, "states": 25_000, "teacher": 0, "bytes": 5 << 20}
        records = [
            {
                "name": f"shard-{s:05d}.zarr",
                "fingerprint": body["fingerprint"],
                "files": files,
                "counts": counts,
                "rows": {
                    "row_id": names[s * 25 : s * 25 + 25],
                    "length": [1000] * 25,
                    "states": [1000] * 25,
                    "teacher": [0] * 25,
                    "eligible": [100] * 25,
                    "validation": [False] * 25,
                    "state_crc32c": [0] * 25,
                    "teacher_crc32c": [0] * 25,
                },
            }
            for s in range(2000)
        ]
        publish_part(layout, part, body, records)
    start = time.process_time()
    cache = Cache.open(run)
    assert time.process_time() - start < 2
    assert len(cache) == 100_000
    assert cache.row_id(99_999) == names[-1]
    assert cache.rows.state_start[26] == 1000


def test_an_id_outside_the_vocabulary_is_refused_where_its_shard_is_opened(run, write_cache):
    """Its bytes are those that were written. As a label it would point past its row of logits."""
    write_cache(run)
    layout = Layout.of(run)
    for part in range(2):
        manifest = read_manifest(layout.cache_part(part), "cache")
        write_json(layout.cache_part(part), manifest | {"vocab_size": VOCAB - 1})
    cache, known = Cache.open(run), Cache.open(run)
    known.vocab_size = VOCAB
    refused = 0
    for shard in range(len(cache.shards)):
        rows = np.flatnonzero(cache.rows.shard == shard)
        bad = next((row for row in rows if VOCAB - 1 in known.tokens(row)[0]), None)
        if bad is None:
            cache.tokens(rows[0])
            continue
        refused += 1
        place = known.tokens(bad)[0].tolist().index(VOCAB - 1)
        text = rf"part-000{shard // 3}/shard-0000{shard % 3}.zarr: row {cache.row_id(bad)}: token {place} has id 299, "
        for row in rows[[0, -1]]:  # whatever row is asked for
            with pytest.raises(BadInput, match=text + r"the target's vocabulary 299 rows: remove the manifest"):
                cache.tokens(row)
    assert refused


@pytest.mark.parametrize(
    ("ids", "place"), [([], None), ([0, 9], None), ([3, 10, 11], 1), ([-1], 0), ([5, -(2**31)], 1), ([2**31 - 1], 0)]
)
def test_ids_are_outside_below_zero_and_from_the_vocabulary_s_size_on(ids, place):
    assert outside(np.array(ids, np.int32), 10) == place

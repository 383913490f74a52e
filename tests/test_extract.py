"""Extraction: what is cached is what the target says, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.anchors import eligible
from data.cache import Cache
from data.codec import CODECS, make_codec
from data.errors import BadInput, Failure, Stopped
from data.layout import Layout
from data.manifest import file_record, read_manifest, write_json
from data.part import codec_path, damage
from data.settings import Run
from data.shard import ShardWriter
from data.tokens import read_tokens, write_tokens
from pipeline.ahead import ahead
from pipeline.encoder import Encoder, Teacher, compilations
from pipeline.extraction import AHEAD, SLOTS, Extraction, Flight, OpenWindow
from pipeline.head import load_head
from pipeline.target import Target, load_target
from pipeline.targets_tiny import ROWS
from pipeline.windows import Sizes, Window, batches, padded, windows, work_of
from stages.extract import Part
from tests.extracting import Children, calls, extract, shards, tree, write_token_parts
from tests.test_fitness import of_target

WINDOWS = {"window_bytes": 200_000, "shard_bytes": 80_000}


@pytest.fixture
def new_run(make_run: Callable[..., Run], tmp_path: Path, tiny_target: Target) -> Callable[..., Run]:
    """`new_run(codec="fp8", ...)`: a run of its own root with token tables, its target taken from the session's."""

    def make(rows: int = 24, salt: str = "", **extract_settings: object) -> Run:
        settings = {"parts": 1, "codec": "float32", "tokens_per_batch": 256, **WINDOWS, **extract_settings}
        run = make_run("r", root=str(tmp_path), extract=settings)
        targets = Layout.of(run).targets
        if not targets.exists():
            shutil.copytree(Layout.of(make_run("tiny")).targets, targets)
        write_token_parts(run, rows, salt=salt)
        return run

    return make


def stored(cache: Cache, row: int) -> torch.Tensor:
    specs = cache.codec.arrays()
    count = int(cache.rows.states[row])
    out = {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in specs.items()}
    assert cache.read_states(row, out, 0) == count
    return cache.codec.decode({name: torch.from_numpy(array) for name, array in out.items()})


def test_states_are_those_of_a_fresh_forward_pass(new_run: Callable[..., Run], tiny_target: Target) -> None:
    run = new_run(parts=2)
    extract(run, (0, 1))
    cache = Cache.open(run)
    assert len(cache) == 24
    assert cache.layer_ids == (1, 2, 3)
    assert (cache.rows.states == 0).sum() == 1
    for row in range(len(cache)):
        ids, supervised = cache.tokens(row)
        anchors = eligible(supervised)
        assert cache.rows.states[row] == (anchors[-1] if len(anchors) else 0)
        if len(anchors):
            fresh = tiny_target.tap(torch.from_numpy(ids.astype(np.int64))[None], cache.layer_ids)[0, : anchors[-1]]
            error = (stored(cache, row) - fresh).norm(dim=-1) / fresh.norm(dim=-1)
            assert error.max() <= 1e-5


def test_head_is_the_target_s_and_the_same_from_any_part(new_run: Callable[..., Run], tiny_target: Target) -> None:
    run = new_run(parts=2)
    head = Layout.of(run).head
    extract(run, (1,))
    from_one = head.read_bytes()
    head.unlink()
    extract(run, (0,))
    assert head.read_bytes() == from_one
    assert torch.equal(load_head(head).lm_head, tiny_target.model.lm_head.weight)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8-outlier", "klt6", "klt4"])
def test_codecs_keep_states_within_their_error(new_run: Callable[..., Run], tiny_target: Target, codec: str) -> None:
    run = new_run(codec=codec)
    extract(run)
    cache = Cache.open(run)
    row = int(cache.rows.states.argmax())
    ids = torch.from_numpy(cache.tokens(row)[0].astype(np.int64))
    fresh = tiny_target.tap(ids[None], cache.layer_ids)[0, : cache.rows.states[row]].bfloat16().float()
    error = (stored(cache, row).float() - fresh).norm(dim=-1) / fresh.norm(dim=-1)
    assert error.max() <= cache.codec.error + 2**-8


def test_a_codec_is_fitted_though_the_first_part_has_no_rows(new_run: Callable[..., Run]) -> None:
    run = new_run(rows=3, salt="b", codec="klt6", parts=4)
    counts = [read_manifest(Layout.of(run).tokens(part), "tokens")["counts"]["rows"] for part in range(4)]
    assert counts[0] == 0
    extract(run, (0, 1, 2, 3))
    assert len(Cache.open(run)) == 3


def test_teacher_entries_are_the_last_layer_s(new_run: Callable[..., Run], tiny_target: Target) -> None:
    run = new_run(codec="bf16", extras=["last_hidden", "top_k"], top_k=4)
    extract(run)
    cache = Cache.open(run)
    assert read_manifest(Layout.of(run).cache_part(0), "cache")["counts"]["teacher"] == cache.rows.teacher.sum() > 0
    for row in (0, 5, 11):
        ids, supervised = cache.tokens(row)
        count = int(cache.rows.teacher[row])
        out = {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in cache.teacher_specs.items()}
        assert cache.read_teacher(row, out, 0) == count == supervised[1:].sum()
        taught = np.flatnonzero(supervised[1:])
        ids_T = torch.from_numpy(ids.astype(np.int64))[None]
        last = tiny_target.last_hidden(ids_T)[0, taught]
        kept = torch.from_numpy(out["last_hidden"]).view(torch.bfloat16).float()
        torch.testing.assert_close(kept, last, rtol=1e-2, atol=1e-2)
        best = tiny_target.logits(ids_T)[0, taught].log_softmax(-1).topk(4)
        assert np.array_equal(out["top_k_ids"][:, 0], best.indices[:, 0].numpy())
        torch.testing.assert_close(torch.from_numpy(out["top_k_logprobs"]).float(), best.values, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_kill_at_twenty_points_leaves_the_same_bytes(new_run: Callable[..., Run]) -> None:
    run = new_run(rows=12, window_bytes=250_000, shard_bytes=150_000)
    count = calls(run)
    wanted = tree(run)
    assert len(shards(run)) == 4
    children, rng, killed = Children(), random.Random(0), 0
    while killed < 20:
        shutil.rmtree(Layout.of(run).cache)
        points = []
        while killed < 20 and len(points) < 4:  # killed, resumed, killed again, ...
            points.append(rng.randint(1, count // (len(points) + 1)))
            if children.run(run, die_at=points[-1], half=bool(points[-1] % 2)) == 0:
                break
            killed += 1
        assert children.run(run) == 0
        assert damage(Layout.of(run), 0) == []
        assert tree(run) == wanted, f"killed before calls {points} of {count}"


def test_resume_keeps_finished_shards(new_run: Callable[..., Run]) -> None:
    run = new_run()
    stops = 0

    def stop() -> None:
        nonlocal stops
        stops += 1
        if stops == 6:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        extract(run, stop=stop)
    before = {path: path.stat().st_mtime_ns for path in shards(run)}
    assert before
    extract(run)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(shards(run)) > len(before)


def test_a_lost_manifest_means_again_after_done_and_onwards_while_running(new_run: Callable[..., Run]) -> None:
    run = new_run()
    extract(run)
    layout = Layout.of(run)
    wanted = tree(run)
    first = shards(run)[0].stat().st_mtime_ns
    layout.cache_part(0).unlink()  # as Snakemake does for `-R extract`
    extract(run)
    assert shards(run)[0].stat().st_mtime_ns > first
    again = shards(run)[0].stat().st_mtime_ns
    layout.cache_part(0).unlink()  # as Snakemake does before a retry, the kill having hit before `done`
    (layout.cache / "part-0000" / "state.json").write_text('{"status": "running"}')
    extract(run)
    assert shards(run)[0].stat().st_mtime_ns == again
    extract(run)
    assert tree(run) == wanted


@pytest.mark.parametrize("fault", ["truncated", "chunk gone", "metadata gone", "folder gone", "table gone"])
def test_torn_files_are_written_again(new_run: Callable[..., Run], fault: str) -> None:
    run = new_run()
    extract(run)
    wanted, shard = tree(run), shards(run)[1]
    body = shard / "hidden" / "c" / "0" / "0" / "0"
    match fault:
        case "truncated":
            body.write_bytes(body.read_bytes()[:-100])
        case "chunk gone":
            body.unlink()
        case "metadata gone":
            (shard / "hidden" / "zarr.json").unlink()
        case "folder gone":
            shutil.rmtree(shard)
        case "table gone":
            (shard.parent / "rows.parquet").unlink()
    assert damage(Layout.of(run), 0, fast=True)
    kept = shards(run)[0].stat().st_mtime_ns
    extract(run)
    assert tree(run) == wanted
    assert shards(run)[0].stat().st_mtime_ns == kept


SHARED_FAULTS = {
    "head gone": ("head.safetensors", None),
    "head cut": ("head.safetensors", lambda body: body[:-8]),
    "head zeroed": ("head.safetensors", lambda body: body[:-20_000] + bytes(20_000)),
    "head's manifest gone": ("head.json", None),
    "head's manifest torn": ("head.json", lambda body: body[:20]),
    "codec gone": ("codec.safetensors", None),
    "codec torn": ("codec.safetensors", lambda body: body[:20]),
    "codec zeroed": ("codec.safetensors", lambda body: body[:-64] + bytes(64)),
    "manifest torn": ("part-0000.json", lambda body: body[:20]),
}


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_what_parts_share_is_made_again_and_no_shard_with_it(new_run: Callable[..., Run], fault: str) -> None:
    """Training refuses such a cache and says to extract again, so extract must not call it current."""
    run = new_run(rows=12, codec="klt6")
    extract(run)
    wanted, kept = tree(run), {path: path.stat().st_mtime_ns for path in shards(run)}
    name, harm = SHARED_FAULTS[fault]
    path = Layout.of(run).cache / name
    body = path.read_bytes()
    path.unlink() if harm is None else path.write_bytes(harm(body))
    extract(run)
    assert tree(run) == wanted
    assert {path: path.stat().st_mtime_ns for path in shards(run)} == kept


def test_parts_whose_codec_cannot_be_made_again_are_extracted_again(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(codec="klt6", parts=2)
    extract(run, (0, 1))
    before = Cache.open(run).codec.record()
    sample = Part._sample
    monkeypatch.setattr(Part, "_sample", lambda self: sample(self) * torch.linspace(1, 9, 64))
    codec_path(Layout.of(run)).unlink()
    extract(run, (1,))
    with pytest.raises(BadInput, match=r"made with codec = .*: run `draftmill extract` again"):
        Cache.open(run)
    extract(run, (0, 1))
    cache = Cache.open(run)
    assert cache.codec.record() != before
    assert all(damage(Layout.of(run), part) == [] for part in (0, 1))
    assert all(stored(cache, row).isfinite().all() for row in range(len(cache)))


def test_full_disk_stops_cleanly_and_resumes(new_run: Callable[..., Run]) -> None:
    run = new_run(shard_bytes=200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, name in ((60_000, "head.safetensors"), (170_000, r"shard-\d+\.zarr")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(Failure, match=rf"{name}: cannot write"):
                extract(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not Layout.of(run).cache_part(0).exists()
    extract(run)
    assert damage(Layout.of(run), 0) == []


def test_a_disk_that_is_full_at_the_end_of_the_head_is_told_and_leaves_nothing_to_sweep(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = new_run()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", full)
        with pytest.raises(Failure, match=r"head\.safetensors: cannot write .*: free some space and run the same"):
            extract(run)
    assert {path.name for path in Layout.of(run).cache.glob(".*head*")} == {".head.lock", ".head.tmp"}
    extract(run)
    assert {path.name for path in Layout.of(run).cache.glob(".*head*")} == {".head.lock"}


def test_a_disk_too_small_is_refused_unless_forced(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 0, 1000))
    with pytest.raises(Failure, match=r"too little disk for the cache: .* KiB to store, .* free: free some.*--force"):
        extract(run)
    assert not Layout.of(run).head.exists(), "said before the target is loaded"
    extract(run, force=True)


def test_a_label_that_the_target_does_not_know_is_refused_with_its_row(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's last token never meets the target, whose embedding would refuse it, and is a label all the same."""
    run = new_run()
    path = Layout.of(run).tokens(0)
    table = path.with_suffix(".parquet")
    rows = list(read_tokens(table))
    rows[2] = replace(rows[2], token_ids=np.append(rows[2].token_ids[:-1], np.int32(ROWS)))
    write_tokens(table, rows)
    write_json(path, read_manifest(path, "tokens") | {"files": [file_record(table, path.parent)]})
    monkeypatch.setattr("pipeline.target.load_target", None)
    place = len(rows[2].token_ids) - 1
    with pytest.raises(
        BadInput,
        match=rf"{table}: row {rows[2].row_id}: token {place} has id {ROWS}, the target's vocabulary {ROWS} rows: take",
    ):
        extract(run)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(size, 0, size))


def sizes_of(run: Run) -> list[int]:
    parts = range(run.extract.parts)
    return [read_manifest(Layout.of(run).cache_part(part), "cache")["counts"]["bytes"] for part in parts]


@pytest.mark.parametrize(("begun_by", "answered"), [(0, True), (2, False)])
def test_a_disk_that_cannot_hold_all_parts_is_refused_by_the_first(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, begun_by: int, answered: bool
) -> None:
    """Also while the answers of another part are still to come."""
    run = new_run(parts=3, rows=60)
    extract(run, (0, 1, 2))
    sizes = sizes_of(run)
    shutil.rmtree(Layout.of(run).cache)
    if not answered:
        Layout.of(run).tokens(0).unlink()
    free(monkeypatch, sum(sizes) * 3 // 4)
    with pytest.raises(Failure, match="too little disk for the cache"):
        extract(run, (begun_by,))
    assert not shards(run, begun_by)
    free(monkeypatch, sum(sizes) * 5 // 4)
    extract(run, (begun_by,))
    free(monkeypatch, (sum(sizes) - sizes[begun_by]) * 5 // 4)  # what is stored is needed no more
    extract(run, (1,))


def test_what_an_interrupted_part_has_stored_is_not_asked_for_again(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(parts=2, rows=60)
    extract(run, (0, 1))
    sizes = sizes_of(run)
    layout = Layout.of(run)
    layout.cache_part(1).unlink()
    (layout.cache / "part-0001" / "state.json").write_text('{"status": "running"}')
    shutil.rmtree(layout.cache / "part-0000")
    layout.cache_part(0).unlink()
    free(monkeypatch, sizes[0] * 5 // 4)
    extract(run, (0,))


def test_nobody_knows_what_a_compressor_saves_before_a_part_is_there(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(parts=3, rows=60, compressor="zstd")
    extract(run, (0, 1, 2))
    sizes = sizes_of(run)
    shutil.rmtree(Layout.of(run).cache)
    free(monkeypatch, sizes[0] * 3 // 2)
    extract(run, (0,))
    free(monkeypatch, sizes[1] * 3 // 2)
    with pytest.raises(Failure, match="too little disk for the cache"):
        extract(run, (1,))


def test_rows_that_training_cannot_hold_are_refused_before_the_target_runs(new_run: Callable[..., Run]) -> None:
    run = new_run()
    train = run.train.model_copy(update={"anchor_slots": 1, "context_tokens": 256})
    with pytest.raises(BadInput, match=r"train.anchor_slots 1 is less than the \d+ anchors of one row"):
        extract(run.model_copy(update={"train": train}))
    assert not Layout.of(run).head.exists()
    extract(run)


def test_two_extracts_of_one_part_never_mix(new_run: Callable[..., Run]) -> None:
    run = new_run(rows=40)
    extract(run)
    wanted = tree(run)
    shutil.rmtree(Layout.of(run).cache)
    children = Children()
    both = [children.start(run) for _ in range(2)]
    for child in both:
        child.join(60)
    assert 0 in [child.exitcode for child in both]
    assert tree(run) == wanted


def test_changed_settings_make_the_part_again_and_leave_nothing_old(new_run: Callable[..., Run]) -> None:
    run = new_run(codec="float32")
    extract(run)
    count = len(shards(run))
    smaller = new_run(codec="fp8")
    with pytest.raises(BadInput, match=r"extract\.codec = 'float32', this run wants 'fp8'"):
        Cache.open(smaller)
    extract(smaller)
    assert len(shards(smaller)) < count
    assert damage(Layout.of(smaller), 0) == []
    Cache.open(smaller)


def test_new_rows_make_the_part_again(new_run: Callable[..., Run]) -> None:
    extract(new_run())
    run = new_run(salt="new-")
    extract(run)
    cache = Cache.open(run)
    assert all(cache.row_id(row).startswith("row-new-") for row in range(len(cache)))


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "not finite"), (0.0, "zero")])
def test_broken_states_are_refused_by_row(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, value: float, what: str
) -> None:
    run = new_run()
    broken = load_target(run, "cpu")
    broken.model.model.layers[3].register_forward_hook(lambda module, given, output: output * value)
    monkeypatch.setattr("pipeline.target.load_target", lambda run, device: broken)
    monkeypatch.setattr(Part, "_on_policy", lambda self: {})
    monkeypatch.setattr("pipeline.head.publish_head", lambda *arguments: None)
    with pytest.raises(Failure, match=rf"shard-0000\d\.zarr: row row-\d+: its state at position \d+, tap 2 is {what}"):
        extract(run)
    assert not shards(run)


def test_batches_hold_every_row_once_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 600, 300).tolist(), 0, 5000]
    found = batches(lengths, 2048)
    assert sorted(np.concatenate(found).tolist()) == [i for i, length in enumerate(lengths) if length]
    for rows in found:
        longest = max(lengths[row] for row in rows)
        assert len(rows) * padded(longest) <= 2048 or len(rows) == 1
    total = sum(len(rows) * padded(max(lengths[row] for row in rows)) for rows in found)
    assert total <= 1.1 * sum(lengths)


def test_rows_on_both_sides_of_a_rope_s_turn_are_never_batched_together(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """A forward pass turns all its rows' heads as its longest row wants it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors}
    model = {"model": of_target(tmp_path / "model", scaling), "dtype": "float32"}
    settings = {"parts": 1, "codec": "float32", "tokens_per_batch": 4096}
    run = make_run("r", root=str(tmp_path), target=model, extract=settings)
    write_token_parts(run)
    extract(run)
    cache, target = Cache.open(run), load_target(run, "cpu")
    assert (cache.rows.states > 48).any()
    assert ((cache.rows.states > 0) & (cache.rows.states < 48)).any()
    for row in np.flatnonzero(cache.rows.states):
        ids = torch.from_numpy(cache.tokens(row)[0][: cache.rows.states[row]].astype(np.int64))
        torch.testing.assert_close(stored(cache, row), target.tap(ids[None], cache.layer_ids)[0], rtol=1e-4, atol=1e-4)


def test_waiting_for_the_disk_is_measured(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    put = ShardWriter.put
    monkeypatch.setattr(ShardWriter, "put", lambda *arguments: (time.sleep(0.05), put(*arguments))[1])
    extract(run)
    line = next(line for line in capfd.readouterr().err.splitlines() if "batch shapes" in line)
    assert int(line.split("waiting for disk: ")[1].split(" %")[0]) > 3


@pytest.mark.parametrize("kept", [0, 1, 16, 37])
def test_states_encoded_in_pieces_are_those_encoded_at_once(kept: int, tiny_target: Target) -> None:
    encoder = Encoder(tiny_target, (1, 2, 3), make_codec("fp8", 3, tiny_target.width), Teacher(), compiled=False)
    ids, index = torch.arange(60).view(3, 20), torch.arange(kept) + 5
    whole = encoder(ids, index, index[:0])
    encoder.chunk = 16
    pieces = encoder(ids, index, index[:0])
    encoder.close()
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(pieces[name].float(), whole[name].float()) for name in whole)


def test_a_slot_is_used_once_it_is_free_though_batches_run(tiny_target: Target) -> None:
    """Batches that the device still works on are not waited for."""

    class Running:
        def query(self) -> bool:
            return False

    encoder = Encoder(tiny_target, (1, 2, 3), make_codec("fp8", 3, tiny_target.width), Teacher(), compiled=False)
    extraction = Extraction(encoder, tiny_target.width, 64, 64)
    slots = [extraction.free.get() for _ in range(SLOTS)]
    flights = [Flight([], [], slot, Running()) for slot in slots[:AHEAD]]
    extraction.flights.extend(flights)
    threading.Timer(0.1, extraction.free.put, [slots[-1]]).start()
    assert extraction._free_slot() is slots[-1]
    assert list(extraction.flights) == flights
    assert extraction.waited == 0
    extraction.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CODECS))
def test_compiled_extraction_agrees_and_compiles_no_more_after_warm_up(name: str, new_run: Callable[..., Run]) -> None:
    torch._dynamo.reset()
    target = load_target(new_run(codec=name), "cuda:0", torch.float32)
    sample = target.tap(torch.randint(0, 200, (64, 64), device="cuda"), (1, 2, 3)).flatten(0, 1)
    codec = make_codec(name, 3, target.width, sample)
    encoder = Encoder(target, (1, 2, 3), codec, Teacher(last_hidden=True, top_k=4), compiled=True)
    warm = compilations()
    for rows, length in ((2, 64), (5, 96), (1, 128), (90, 48)):
        ids = torch.randint(0, 200, (rows, length), device="cuda")
        kept = torch.arange(rows * length, device="cuda")
        states = codec.to("cuda").decode(encoder(ids, kept, kept[:5])).float()
        plain = target.tap(ids, (1, 2, 3)).flatten(0, 1).float()
        error = (states - plain).norm(dim=-1) / plain.norm(dim=-1)
        assert error.max() <= 2 * codec.error + 1e-2  # 64 channels are few groups of few bits
    assert compilations() == warm
    encoder.close()


def test_an_extraction_given_up_leaves_nothing_half_written(new_run: Callable[..., Run]) -> None:
    run = new_run()

    def stop() -> None:
        raise Stopped("at once")

    with pytest.raises(Stopped):
        extract(run, stop=stop)
    assert not Layout.of(run).cache_part(0).exists()
    assert not list((Layout.of(run).cache / "part-0000").glob(".shard-*.tmp"))


def windows_of(run: Run) -> list[Window]:
    sizes = Sizes(3 * 64 * 4, 0, run.extract.window_bytes, run.extract.shard_bytes)
    rows = read_tokens(Layout.of(run).tokens(0).with_suffix(".parquet"))
    return list(windows((work_of(row, False) for row in rows), sizes))


def test_a_window_is_made_while_the_one_before_runs(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that makes all of them, and one ahead only."""
    run = new_run(rows=40)
    firsts = [window.first_shard for window in windows_of(run)]
    assert len(firsts) >= 3
    made: list[int] = []
    makers: set[threading.Thread] = set()
    one_more = threading.Condition()
    make, run_window = Part._open, Extraction.window
    running = iter(range(len(firsts)))

    def noted(part: Part, window: Window, *arguments: Any) -> OpenWindow:
        opened = make(part, window, *arguments)
        with one_more:
            made.append(window.first_shard)
            makers.add(threading.current_thread())
            one_more.notify()
        return opened

    def run_late(extraction: Extraction, *arguments: Any) -> None:
        wanted = firsts[: next(running) + 2]
        with one_more:
            assert one_more.wait_for(lambda: made == wanted, timeout=60), f"made: {made}, not {wanted}"
        run_window(extraction, *arguments)

    monkeypatch.setattr(Part, "_open", noted)
    monkeypatch.setattr(Extraction, "window", run_late)
    extract(run)
    assert next(running, None) is None
    assert len(makers) == 1
    assert threading.main_thread() not in makers
    assert damage(Layout.of(run), 0) == []


@pytest.mark.parametrize(
    ("fault", "error"), [("locked", "is being written by another process"), ("full", "the disk is full")]
)
def test_an_error_in_making_the_second_window_ends_the_stage_and_leaves_nothing(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, fault: str, error: str
) -> None:
    """The window's first shard is made by then."""
    run = new_run()
    extract(run)
    wanted = tree(run)
    shutil.rmtree(Layout.of(run).cache)
    second = windows_of(run)[1].first_shard
    folder = Layout.of(run).cache / "part-0000"
    folder.mkdir(parents=True)
    made, broken = (f"shard-{number:05d}.zarr" for number in (second, second + 1))
    begun: list[str] = []

    def truncate(file: int, size: int, call: Callable[[int, int], None] = os.ftruncate) -> None:
        begun.append(Path(os.readlink(f"/proc/self/fd/{file}")).relative_to(folder).parts[0])
        if fault == "full" and begun[-1] == f".{broken}.tmp":
            raise OSError(errno.ENOSPC, "full")
        call(file, size)

    monkeypatch.setattr(os, "ftruncate", truncate)
    with (folder / f".{broken}.lock").open("w") as lock:
        if fault == "locked":
            fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises((BadInput, Failure), match=f"{broken}.* {error}"):
            extract(run)
    monkeypatch.undo()
    assert f".{made}.tmp" in begun
    assert not Layout.of(run).cache_part(0).exists()
    assert not list(folder.glob(".shard-*.tmp"))
    assert all(path.name < made for path in shards(run))
    assert all(path.name < made for path in folder.glob("shard-*.json"))
    for path in folder.glob(".shard-*.lock"):
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    extract(run)
    assert tree(run) == wanted


def test_what_is_made_ahead_and_never_asked_for_is_given_up() -> None:
    given_up: list[int] = []

    def take(count: int, items: Iterable[int]) -> list[int]:
        with ahead(iter(items), given_up.append) as made:
            return list(islice(made, count))

    def broken() -> Iterator[int]:
        yield 1
        raise Failure("no more")

    assert take(2, [1, 2, 3, 4]) == [1, 2]
    assert given_up == [3]
    assert take(9, [1, 2]) == [1, 2]
    assert take(1, broken()) == [1]
    with pytest.raises(Failure, match="no more"):
        take(2, broken())
    assert given_up == [3]

"""The target's hidden states at a few layers, cached part by part.

A part's rows are in hash order, cut into windows; a window's shards are written, made durable and recorded together.
While a window runs, another thread reads and cuts the next one and makes its empty shards, so that the device need not
wait for that; the first one is made while the target's own answers are judged.
Interrupted, the same command goes on with the first shard that is missing and computes the same batches again, so the
bytes do not depend on interruptions. The part's manifest is published last. `cache/head.safetensors` and the fitted
codec are the same for all parts, written once, and made again where they are missing or damaged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput, Failure
from data.layout import Layout, part_name
from data.manifest import State, file_record, fingerprint, read_manifest
from data.provenance import refuse, stale_tokens
from data.settings import Run, load_run
from data.shaping import cache_settings

if TYPE_CHECKING:
    from data.codec import Codec
    from data.store import Bucket
    from data.tokens import TokenRow
    from pipeline.encoder import Teacher
    from pipeline.extraction import Extraction, Meter, OpenWindow, Shard
    from pipeline.head import TargetHead
    from pipeline.job import Job
    from pipeline.target import Target
    from pipeline.windows import Sizes, Window, Work

POLICY_ROWS = 256
"""Rows, over all parts, whose supervised tokens are compared with the target's own argmax; at most 1 of 8."""


@click.command("extract")
@click.argument("run_file", type=click.Path())
@click.option("--part", type=click.IntRange(min=0), help="One part; all of them, one after the other, when omitted.")
@click.option("--force", is_flag=True, help="Start although the disk looks too small.")
def command(run_file: str, part: int | None, force: bool) -> None:
    """Run the target once and cache its hidden states."""
    run = load_run(run_file)
    if run.cache.run is not None:
        raise BadInput(f"{run_file}: takes its cache from run `{run.cache.run}`; extract that one")
    if part is not None and part >= run.extract.parts:
        raise BadInput(f"--part {part}: this run has parts 0 to {run.extract.parts - 1}")
    from pipeline.job import job

    with ExitStack() as stack:
        machine = Machine(run, stack)
        for number in range(run.extract.parts) if part is None else (part,):
            with job(run, "extract", label=part_name(number), gpus=run.target.gpus) as work:
                Part(run, number, machine, work, force).make()


class Machine:
    """The target and the pipeline around it, loaded for the first part that needs them and kept for the rest."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        self.run, self._stack = run, stack
        self._target: Target | None = None
        self._extraction: Extraction | None = None
        self._head = False

    def target(self, device: str) -> Target:
        from pipeline.target import load_target

        if self._target is None:
            self._target = load_target(self.run, device)
        return self._target

    def share_head(self, layout: Layout, target: Mapping[str, Any], device: str) -> None:
        """See to it that the head of `target` (its record) is there, every byte of it; once for all parts."""
        from pipeline.head import publish_head
        from pipeline.target import load_config, rope_scaling

        def make() -> TargetHead:
            loaded = self.target(device)
            return loaded.head().to("cpu", loaded.dtype)

        if not self._head:
            identity = {"target": target, "dtype": f"torch.{self.run.target.dtype}"}
            identity["rope_scaling"] = rope_scaling(load_config(self.run))
            publish_head(layout, identity, make)
            self._head = True

    def extraction(self, layer_ids: tuple[int, ...], codec: Codec, teacher: Teacher) -> Extraction:
        from pipeline.encoder import Encoder
        from pipeline.extraction import Extraction

        if self._extraction is None:
            assert self._target is not None
            compiled = self.run.extract.compile and self._target.device.type == "cuda"
            encoder = Encoder(self._target, layer_ids, codec, teacher, compiled)
            settings = self.run.extract
            pipe = Extraction(encoder, codec.width, settings.tokens_per_batch, self.run.data.max_length)
            self._extraction = self._stack.enter_context(pipe)
        return self._extraction


class Part:
    """One part of the cache being made."""

    def __init__(self, run: Run, part: int, machine: Machine, work: Job, force: bool) -> None:
        self.run, self.part, self.machine, self.work, self.force = run, part, machine, work, force
        self.layout = Layout.of(run)
        self.manifest = self.layout.cache_part(part)
        self.folder = self.layout.cache / part_name(part)
        self.state = State(self.layout.cache_state(part))
        self.table = self.layout.tokens(part).with_suffix(".parquet")
        self.tokens = read_manifest(self.layout.tokens(part), "tokens")
        refuse(stale_tokens(run, part, self.tokens))

    def make(self) -> None:
        from data.part import publish_part
        from data.store import open_store
        from pipeline.ahead import ahead
        from pipeline.extraction import OpenWindow

        self.state.recover(self.manifest)
        shaped = self._shape()
        if self._current(shaped):
            self.state.done(self.manifest)
            return
        self.store = open_store(self.layout, self.run.extract.store)
        self._withdraw()
        self._check_table()
        self._check_disk()
        body = self._body(shaped)
        found: dict[int, Mapping[str, Any]] = {}
        with ahead(self._windows(body, found), OpenWindow.abort) as opened:
            on_policy = self._on_policy()
            self._extract(opened)
        records = [found[number] for number in sorted(found)]
        self._sweep(records)
        publish_part(self.layout, self.part, {**body, "on_policy": on_policy}, records)
        self.state.done(self.manifest)

    def _withdraw(self) -> None:
        """Make the part not exist, before anything of it changes, and empty buckets that it is not to lie in any more.

        What says that it lies there goes after that; else nothing would lead to those objects.
        """
        from data.part import withdraw_part
        from data.store import Bucket, written

        former = written(self.layout, part_name(self.part))
        now = {self.store} if isinstance(self.store, Bucket) else set()
        forced = self.state.forced(self.manifest)
        if not forced:
            self.state.running(stores=sorted(map(str, former | now)))
        withdraw_part(self.layout, self.part, self.store)
        for bucket in former if forced else former - now:
            self._leave(bucket)
        if forced:
            shutil.rmtree(self.folder)
            self.state.running(stores=sorted(map(str, now)))

    def _leave(self, bucket: Bucket) -> None:
        """Remove the part from a bucket, nothing of which is needed any more, or say that it stays."""
        from data.part import leave_bucket
        from pipeline.console import say

        name = part_name(self.part)
        try:
            leave_bucket(self.layout, self.part, bucket)
            say(f"extract {name}: removed from {bucket}, since it is made again")
        except Failure as error:
            say(f"extract {name}: {error}; an earlier {name} stays there: remove it with the bucket's own tools")

    def _shape(self) -> dict[str, Any]:
        """What shapes this part, as far as it is known without loading weights."""
        from pipeline.encoder import Teacher
        from pipeline.target import load_config, rope_turn, tap_layers, target_record

        config = load_config(self.run)
        self.turn = rope_turn(config)
        self.layer_ids = tap_layers(self.run.extract.layers, config.num_hidden_layers)
        self.width = config.hidden_size
        extras = self.run.extract.extras
        self.teacher = Teacher("last_hidden" in extras, self.run.extract.top_k if "top_k" in extras else 0)
        return {
            "settings": json.loads(json.dumps(cache_settings(self.run))),
            "layer_ids": list(self.layer_ids),
            "target": target_record(self.run),
            "inputs": {"tokens": self.tokens["fingerprint"]},
        }

    def _current(self, shaped: Mapping[str, Any]) -> bool:
        """Whether the part is there, made from what the run says now, and every file has its size.

        What it shares with other parts is made again where it is missing: the part is of no use without.
        """
        from data.part import damage
        from pipeline.console import say

        name = f"extract {part_name(self.part)}"
        made = self._made()
        if made is None:
            return False
        changed = [field for field, value in shaped.items() if made.get(field) != value]
        if changed:
            say(f"{name}: made with other {', '.join(changed)}: made again")
            return False
        damaged = damage(self.layout, self.part, fast=True)
        if damaged:
            say(f"{name}: {damaged[0]}: torn shards are written again")
            return False
        self.machine.share_head(self.layout, shaped["target"], self.work.device)
        if self._codec(shaped).record() != made["codec"]:
            say(f"{name}: the codec that it was written with is gone, and came out otherwise now: made again")
            return False
        say(f"{name}: there and current")
        return True

    def _made(self) -> dict[str, Any] | None:
        """The part's manifest; None when there is none that this version can read."""
        from pipeline.console import say

        if not self.manifest.exists():
            return None
        try:
            return read_manifest(self.manifest, "cache")
        except BadInput as error:
            say(f"{error}; the part is made again")
            return None

    def _check_table(self) -> None:
        wanted = self.tokens["files"][0]
        if not self.table.exists() or file_record(self.table, self.table.parent) != wanted:
            raise BadInput(f"{self.table}: not the table that its manifest describes: make its part of tokens again")
        self._check_rows()

    def _check_rows(self) -> None:
        """Refuse, before the target runs, rows with ids that it does not know, drafters that training would refuse, and
        rows that no batch of theirs can hold."""
        from data.anchors import eligible
        from data.tokens import read_tokens
        from pipeline.batches import require_room
        from pipeline.fitness import known_target, require_drafter
        from pipeline.recipe import occurrences

        known = known_target(self.run)
        seen = occurrences((row.token_ids for row in read_tokens(self.table)), known.vocab_size)
        states = anchors = 0
        for row in read_tokens(self.table):
            self._require_known(row, known.vocab_size)
            found = eligible(row.supervised)
            if len(found):
                states = max(states, int(found[-1]))
            if not row.validation:  # held-out rows are scored in pieces of their anchors
                anchors = max(anchors, len(found))
        for name, drafter in self.run.drafters.items():
            require_drafter(self.run, name, known, seen)
            require_room(self.run.train_of(name), drafter.block_size, states, anchors)

    def _require_known(self, row: TokenRow, vocabulary: int) -> None:
        """Refuse ids that are no row of the target, of which a tokenizer may know some. Those of a row's last tokens
        would become labels without ever having met the target."""
        from data.tokens import outside

        at = outside(row.token_ids, vocabulary)
        if at is not None:
            raise BadInput(
                f"{self.table}: row {row.row_id}: token {at} has id {row.token_ids[at]}, the target's vocabulary "
                f"{vocabulary} rows: take the row out of data.train"
            )

    def _works(self, part: int | None = None) -> Iterator[Work]:
        from data.tokens import read_tokens
        from pipeline.windows import work_of

        table = self.table if part is None else self.layout.tokens(part).with_suffix(".parquet")
        return (work_of(row, bool(self.teacher)) for row in read_tokens(table))

    def _body(self, shaped: Mapping[str, Any]) -> dict[str, Any]:
        from data.part import part_body

        target = self.machine.target(self.work.device)
        if target.width != self.width:
            raise BadInput(f"target: width {target.width}, its configuration says {self.width}")
        self.machine.share_head(self.layout, shaped["target"], self.work.device)
        self.codec = self._codec(shaped)
        template = {name: self.tokens.get(name) for name in ("template", "tokenizer", "arguments")}
        teacher = self.teacher.arrays(self.width)
        inputs = shaped["inputs"]
        model = self._model(target)
        return part_body(
            self.run, self.codec, self.layer_ids, target.vocab, shaped["target"], template, inputs, teacher, model
        )

    def _model(self, target: Target) -> dict[str, Any]:
        from pipeline.target import load_config, load_tokenizer, model_record

        return model_record(self.run, load_config(self.run), load_tokenizer(self.run), target.vocab)

    def _codec(self, shaped: Mapping[str, Any]) -> Codec:
        """The codec of all parts; a fitted one is fitted to the first rows of the lowest part that has anchors."""
        from data.codec import CODECS, make_codec
        from data.part import shared_codec

        name = self.run.extract.codec
        layers = len(self.layer_ids)
        if not CODECS[name].fitted:
            identity = fingerprint([name, layers, self.width])
            return shared_codec(self.layout, identity, lambda: make_codec(name, layers, self.width))
        identity = fingerprint([name, self.layer_ids, shaped["target"], self.run.target.dtype])
        return shared_codec(self.layout, identity, lambda: make_codec(name, layers, self.width, self._sample()))

    def _sample(self) -> Any:
        from data.codec import CODECS
        from pipeline.console import say
        from pipeline.encoder import state_sample

        wanted = CODECS[self.run.extract.codec].sample_states(self.width)
        parts = [part for part in range(self.run.extract.parts) if self.layout.tokens(part).exists()]
        works = next(filter(None, (self._first_works(part, wanted) for part in parts)), None)
        if works is None:
            raise BadInput(f"{self.layout.tokens(parts[-1]).parent}: no row has an anchor: nothing to extract")
        say(f"fitting codec {self.run.extract.codec} to {sum(w.row.states for w in works)} states")
        return state_sample(self.machine.target(self.work.device), self.layer_ids, works)

    def _first_works(self, part: int, wanted: int) -> list[Work]:
        """A part's first rows with states, as many as make `wanted` states."""
        works: list[Work] = []
        for work in self._works(part):
            if sum(each.row.states for each in works) >= wanted:
                break
            if work.row.states:
                works.append(work)
        return works

    def _on_policy(self) -> dict[str, Any]:
        from pipeline.console import say
        from pipeline.encoder import on_policy

        rows = self.tokens["counts"]["rows"]
        wanted = min(-(-POLICY_ROWS // self.run.extract.parts), -(-rows // 8))
        works = [work for work, _ in zip(self._works(), range(wanted), strict=False)]
        hits, total = on_policy(self.machine.target(self.work.device), works)
        share = hits / total if total else 0.0
        say(f"on-policy: {100 * share:.1f} % of {total} supervised tokens of {len(works)} rows are the target's argmax")
        return {"rows": len(works), "tokens": total, "share": round(share, 6)}

    def _windows(self, body: Mapping[str, Any], records: dict[int, Mapping[str, Any]]) -> Iterator[OpenWindow]:
        """Windows with their shards open. `records` gets each shard's, now for those of an earlier attempt."""
        from pipeline.windows import windows

        for window in windows(self._works(), self._sizes()):
            yield self._open(window, body, records)

    def _open(self, window: Window, body: Mapping[str, Any], records: dict[int, Mapping[str, Any]]) -> OpenWindow:
        from data.part import upload_shard
        from data.shard import ShardWriter, finished
        from pipeline.extraction import OpenWindow, Place, Shard
        from pipeline.windows import batches

        def done(number: int, record: Mapping[str, Any]) -> None:
            records[number] = upload_shard(self.layout, self.part, body, record)

        works: list[Work] = []
        places: list[Place | None] = []
        with ExitStack() as stack:
            for number, rows in enumerate(window.shards, window.first_shard):
                path = self.folder / f"shard-{number:05d}.zarr"
                shard: Shard | None = None
                if found := finished(path, body["fingerprint"]):
                    done(number, found)
                else:
                    teacher = self.teacher.arrays(self.width)
                    writer = ShardWriter(
                        path,
                        self.codec,
                        [work.row for work in rows],
                        body["fingerprint"],
                        self.run.extract.compressor,
                        teacher,
                        {"layer_ids": list(self.layer_ids), "last_hidden": "post-norm"},
                    )
                    stack.enter_context(writer)
                    shard = Shard(writer, partial(done, number))
                works += rows
                places += [None if shard is None else Place(shard, i) for i in range(len(rows))]
            cut = batches([work.run for work in works], self.run.extract.tokens_per_batch, self.turn)
            stack.pop_all()
        return OpenWindow(works, places, cut)

    def _extract(self, opened: Iterator[OpenWindow]) -> None:
        """Windows through the target, until every shard is durable and recorded."""
        from pipeline.console import Progress
        from pipeline.extraction import Meter

        extraction = self.machine.extraction(self.layer_ids, self.codec, self.teacher)
        meter = Meter(extraction, part_name(self.part))
        tokens = self.tokens["counts"]["tokens"]
        with Progress(tokens, f"extract {part_name(self.part)}", unit="tokens") as bar:
            for window in opened:
                self._extract_window(window, extraction, meter, bar)
            extraction.drain()
        meter.report()

    def _extract_window(self, window: OpenWindow, extraction: Extraction, meter: Meter, bar: Any) -> None:
        tokens, before = [len(work.row.token_ids) for work in window.works], bar.done

        def ready(batch: Iterable[int]) -> None:
            self.work.check_stop()
            bar.advance(sum(tokens[row] for row in batch), note=meter.note())

        extraction.window(window, ready)
        bar.advance(sum(tokens) - (bar.done - before), note=meter.note())  # rows that no batch had to run

    def _sizes(self) -> Sizes:
        from data.codec import CODECS
        from pipeline.windows import Sizes

        settings = self.run.extract
        state = CODECS[settings.codec](len(self.layer_ids), self.width).bytes_per_state()
        teacher = sum(spec.nbytes for spec in self.teacher.arrays(self.width).values())
        return Sizes(state, teacher, settings.window_bytes, settings.shard_bytes)

    def _check_disk(self) -> None:
        """Refuse, before the target is loaded, to begin a cache that the disk cannot hold, whichever part begins it."""
        from data.store import Bucket
        from pipeline.console import say, size
        from pipeline.storage import need_of

        if isinstance(self.store, Bucket):
            return
        sizes = self._sizes()
        stored = sum(sizes.of(work) + 6 * len(work.row.token_ids) for work in self._works())
        need = need_of(self.run, self.part, stored, self.tokens["counts"]["tokens"])
        free = shutil.disk_usage(self.folder).free
        both = f"{size(need.part)} to store, {size(need.cache)} with the parts that are not there, {size(free)} free"
        say(f"extract {part_name(self.part)}: {both}")
        if need.cache > free and not self.force:
            raise Failure(
                f"{self.folder}: too little disk for the cache: {both}: free some, set another root or codec, or pass "
                "--force"
            )

    def _sweep(self, records: Collection[Mapping[str, Any]]) -> None:
        """Remove what earlier settings made and `records` of shards do not name, and files that kills cut short."""
        from data.part import rows_path
        from data.shard import discard
        from data.store import Bucket

        keep = {record["name"] for record in records}
        for left in (*self.folder.glob(".*.tmp"), *self.layout.cache.glob(f".{self.manifest.name}.*.tmp")):
            if left.is_file():
                left.unlink()
        for path in self.folder.glob("shard-*.zarr"):
            if path.name not in keep:
                discard(path)
        for record in self.folder.glob("shard-*.json"):
            if record.with_suffix(".zarr").name not in keep:
                record.unlink()
        if isinstance(self.store, Bucket):
            name = part_name(self.part)
            kept = {f"{record['name']}/{file['path']}" for record in records for file in record["files"]}
            left_there = self.store.sizes(name).keys() - kept - {rows_path(self.layout, self.part).name}
            self.store.remove(f"{name}/{path}" for path in left_there)

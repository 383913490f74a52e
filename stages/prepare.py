"""Conversations in; counted, supervised token rows out, or prompts when the target is to answer them.

Two passes, so that memory stays flat. Chunks of the sources are prepared by several processes, each into a file of its
own; then every part is gathered from those files in hash order and published. Interrupted, the same command goes on
from the chunks that are there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from data.errors import BadInput, Failure
from data.layout import Layout
from data.manifest import State, file_record, fingerprint, publish, read_json, read_manifest
from data.settings import Run, Source, load_run
from data.shaping import shaping

if TYPE_CHECKING:
    from data.accounting import Accounting
    from data.sources import Chunk
    from data.spill import Placed
    from pipeline.preparer import Preparer
    from pipeline.workers import Workers


@click.command("prepare")
@click.argument("run_file", type=click.Path())
@click.option(
    "--show", type=click.IntRange(min=1), metavar="N", help="Print N rows, supervised text coloured; write nothing."
)
def command(run_file: str, show: int | None) -> None:
    """Read conversations, render them, mark what is supervised, split and count them."""
    run = load_run(run_file)
    if show is not None:
        show_rows(run, show)
        return
    from pipeline.job import job

    with job(run, "prepare") as work:
        Preparation(run).make(work.check_stop)


class Preparation:
    """The stage at work on one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.layout = Layout.of(run)
        self.parts = run.extract.parts
        self.folder = self.layout.prompts(0).parent
        self.spills = self.folder / ".chunks"
        self.state = State(self.layout.prepare_state)
        self.keep = run.data.responses == "keep"
        self.rows_read = 0
        self.formats: Counter[str] = Counter()

    def make(self, check_stop: Callable[[], None]) -> None:
        from data import hub
        from data.sources import source_record
        from pipeline.console import say
        from pipeline.contamination import Benchmarks
        from pipeline.workers import SMALL, Workers, processes, start

        self.benchmarks = Benchmarks.of(self.run)
        preparer = start(self.run, self.benchmarks.keys)
        self.commits = hub.commits(self.sources, self.state.read().get("commits", {}))
        self.shape = {
            "settings": json.loads(shaping(self.run, "prepare")),
            "sources": [source_record(source, self.commits) for source in self.sources],
            "tokenizer": template_or_tokenizer(preparer),
        }
        self.wanted = fingerprint(self.shape)
        self.state.recover(self.layout.prepared)
        if made_from(self.layout.prepared) == self.wanted and all(map(self.current, range(self.parts))):
            say("prepare: all parts are there and current")
            self.compare_again(preparer)
            self.finish()
            return
        self.begin()
        head, stream = self.opened()
        expected = self.expected(head)
        with Workers(self.run, self.benchmarks.keys, 0 if expected <= SMALL else processes()) as workers:
            paths = self.prepare_chunks(workers, chain(head, stream), expected, check_stop)
            self.publish_parts(workers, paths, preparer, check_stop)
        self.finish()

    def compare_again(self, preparer: Preparer) -> None:
        """Count the overlap with the benchmarks anew where they are others than when the rows were prepared."""
        from data.accounting import overlap
        from pipeline.console import say
        from pipeline.contamination import recount

        body = read_manifest(self.layout.prepared, "accounting")
        if body.get("benchmarks") == self.benchmarks.record():
            return
        tables = [self.layout.prompts(part).with_suffix(".parquet") for part in range(self.parts)]
        found = recount(tables, self.benchmarks.keys, preparer.decoded)
        for line in self.benchmarks.lines(found):
            say(line)
        body |= {"contamination": overlap(found), "benchmarks": self.benchmarks.record()}
        publish(self.layout.prepared, "accounting", body)

    def finish(self) -> None:
        self.state.done(self.layout.prepared, wanted=self.wanted, commits=self.commits)
        shutil.rmtree(self.spills, ignore_errors=True)

    @property
    def held_out(self) -> tuple[Source, ...]:
        return () if isinstance(self.run.data.validation, float) else self.run.data.validation

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.run.data.train + self.held_out

    def current(self, part: int) -> bool:
        """Whether a part's manifests are there and made from what this run says."""
        manifests = [self.layout.prompts(part)] + [self.layout.tokens(part)] * self.keep
        return all(made_from(path) == self.wanted for path in manifests)

    def begin(self) -> None:
        """Resume work that was made from the same input; set anything else aside."""
        now = {"wanted": self.wanted, "benchmarks": self.benchmarks.record(), "commits": self.commits}
        known = self.state.read()
        if known != {"status": "running", **now}:
            shutil.rmtree(self.spills, ignore_errors=True)
        self.state.running(**now)
        self.layout.prepared.unlink(missing_ok=True)
        for part in range(self.parts):
            if not self.current(part):
                self.layout.prompts(part).unlink(missing_ok=True)
                if self.keep:
                    self.layout.tokens(part).unlink(missing_ok=True)

    def opened(self) -> tuple[list[Chunk], Iterator[Chunk]]:
        """The first chunks of the sources, to judge them by, and the others.

        Raises BadInput when there is no row at all.
        """
        from data.sources import chunks, label

        stream = chunks(self.sources, self.layout.folder.parent / ".datasets")
        head = list(islice(stream, 3))
        if not head:
            raise BadInput(f"{', '.join(map(label, self.sources))}: no rows; correct data.train")
        return head, stream

    def prepare_chunks(
        self, workers: Workers, stream: Iterator[Chunk], expected: int, check_stop: Callable[[], None]
    ) -> list[Path]:
        """First pass: spill files of all chunks, in the order of the input."""
        from pipeline.console import Progress
        from pipeline.workers import prepare_chunk

        held_out = self.run.data.validation
        paths: list[Path] = []

        def tasks() -> Iterator[tuple[Any, ...]]:
            for chunk in stream:
                check_stop()
                path = self.spills / f"{chunk.number:06d}.arrow"
                paths.append(path)
                if not path.exists():
                    own = chunk.source >= len(self.run.data.train)
                    share = held_out if isinstance(held_out, float) else own
                    yield chunk, path, self.sources[chunk.source].format, share

        with Progress(expected, "prepare", unit="rows") as bar:
            for done in workers.run(prepare_chunk, tasks()):
                bar.advance(done)
        return paths

    def expected(self, head: list[Chunk]) -> int:
        """Rows to come, guessed from the first chunks and the size of plain JSON lines; exact for small inputs."""
        rows = sum(len(chunk.rows) for chunk in head)
        weight = sum(len(row) + 1 for chunk in head for row in chunk.rows if isinstance(row, bytes))
        files = [Path(source.path) for source in self.sources if source.path]
        size = sum(file.stat().st_size for file in files if file.is_file() and file.suffix == ".jsonl")
        return max(rows, round(rows * size / weight)) if weight and len(head) == 3 else rows

    def publish_parts(
        self, workers: Workers, paths: list[Path], preparer: Preparer, check_stop: Callable[[], None]
    ) -> None:
        """Second pass: tables and manifests of all parts, after the account has been checked as a whole."""
        from data.accounting import Accounting, alone_lines, compared_alone
        from data.parts import write_part
        from data.spill import place
        from pipeline.console import say

        share = self.run.data.validation if isinstance(self.run.data.validation, float) else 0.0
        placed = place(paths, self.parts, share, self.run.data.duplicates == "drop", answered_later=not self.keep)
        self.check_account(paths, placed)
        alone = compared_alone(self.formats)
        total = Accounting(contaminated={name: [] for name in self.benchmarks.keys})
        for part, account, digests in workers.run(write_part, self.part_tasks(paths, placed)):
            check_stop()
            total.add(account)
            for kind, digest in digests.items():
                self.publish_part(kind, part, account, digest, preparer)
        assert total.rows_in == self.rows_read, f"{self.rows_read} rows read, {total.rows_in} accounted for"
        repeats = {
            "same_content": placed.same_content,
            "same_prompt": placed.same_prompt,
            "validation_prompts_trained_on": placed.trained_prompt,
        }
        made = {"benchmarks": self.benchmarks.record(), "made_from": self.wanted, "commits": self.commits}
        body = {**total.body(), "repeats": repeats, "compared_alone": alone, **made}
        publish(self.layout.prepared, "accounting", body)
        for line in total.lines():
            say(line)
        if self.run.data.validation and not total.validation:
            say("no row is held out, so training will not be validated: raise data.validation")
        say("repeats: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in repeats.items()))
        for line in alone_lines(alone):
            say(line)
        for line in self.benchmarks.lines(total.contaminated):
            say(line)

    def part_tasks(self, paths: list[Path], placed: Placed) -> Iterator[tuple[Any, ...]]:
        """Arguments of `write_part` for every part."""
        for part in range(self.parts):
            prompts, tokens = (path(part).with_suffix(".parquet") for path in (self.layout.prompts, self.layout.tokens))
            yield paths, placed, part, self.parts, prompts, tokens if self.keep else None

    def publish_part(self, kind: str, part: int, account: Accounting, digest: str, preparer: Preparer) -> None:
        from pipeline.examples import example

        path = getattr(self.layout, kind)(part)
        body = {
            **account.body(),
            "fingerprint": fingerprint({"digest": digest, **self.shape["tokenizer"]}),  # of this part's rows alone
            "made_from": self.wanted,
            "settings": self.shape["settings"],
            "digest": digest,
            "files": [file_record(path.with_suffix(".parquet"), path.parent)],
            "inputs": {"settings": self.wanted},
            **self.shape["tokenizer"],
        }
        if kind == "tokens":
            body["example"] = example(path.with_suffix(".parquet"), preparer.tokenizer)
        publish(path, kind, body)

    def check_account(self, paths: list[Path], placed: Placed) -> None:
        """List dropped rows, and refuse to go on when nothing or too little is left."""
        from data.parts import dropped_rows
        from data.sources import label
        from pipeline.console import say

        reasons: Counter[str] = Counter()
        listed = self.folder / "dropped.jsonl"
        temporary = listed.with_name(f".{listed.name}.tmp")
        with temporary.open("w", encoding="ascii") as file:
            for row in dropped_rows(paths, placed, self.parts):
                reasons[row["reason"]] += 1
                file.write(f"{json.dumps(row, sort_keys=True)}\n")
        os.replace(temporary, listed)
        kept = sum(int((chunk.part >= 0).sum()) for chunk in placed.chunks)
        self.count_files(paths)
        dropped, limit = sum(reasons.values()), self.run.data.max_dropped
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(4))
        if not kept and set(reasons) == {"too_long"}:
            raise BadInput(
                f"data.max_length {self.run.data.max_length} is shorter than every prompt: raise it ({listed})"
            )
        if not kept:
            raise BadInput(
                f"{label(self.sources[0])}: not one row of {dropped} is usable: {why}; each is listed in {listed}"
            )
        if self.held_out and not any((chunk.held_out & (chunk.part >= 0)).any() for chunk in placed.chunks):
            raise BadInput(
                f"{', '.join(map(label, self.held_out))}: not one row is left to validate with; correct data.validation"
            )
        if dropped > limit * (kept + dropped):
            raise Failure(
                f"{dropped} of {kept + dropped} rows dropped, more than data.max_dropped {limit:g}: {why}; "
                f"each is listed in {listed}"
            )
        if dropped:
            say(f"{dropped} dropped rows are listed in {listed}")

    def count_files(self, paths: list[Path]) -> None:
        """Count rows read and formats found, and say what is in each file."""
        from data.spill import read_spill
        from pipeline.console import say

        read: Counter[str] = Counter()
        formats: Counter[tuple[str, str]] = Counter()
        for path in paths:
            report = read_spill(path)[1]
            read[report["name"]] += report["rows"]
            self.formats.update(report["formats"])
            formats.update({(report["name"], name): count for name, count in report["formats"].items()})
        self.rows_read += read.total()
        for (name, form), count in formats.items():
            say(f"{name}: {count} rows of format {form}")
        for name in read.keys() - {name for name, _ in formats}:
            say(f"{name}: not one row of {read[name]} is usable")


def made_from(manifest: Path) -> str | None:
    """What a manifest of ours was made from; None when it is not there."""
    return read_json(manifest, "delete it and prepare again").get("made_from") if manifest.exists() else None


def template_or_tokenizer(preparer: Any) -> dict[str, Any]:
    """Hashes of what turns text into ids; a tokenizer without template serves rows of text and ids."""
    from pipeline.encoding import tokenizer_hash

    if preparer.tokenizer.chat_template:
        return preparer.template.record()
    return {"template": None, "tokenizer": tokenizer_hash(preparer.tokenizer), "arguments": {}}


def show_rows(run: Run, count: int) -> None:
    """Print the first rows as the target sees them: supervised text green, everything else grey."""
    from rich.console import Console
    from rich.text import Text

    from data.conversations import Rejected
    from data.sources import chunks, decode
    from pipeline.workers import start

    preparer = start(run, {})
    console = Console()
    left = count
    for chunk in chunks(run.data.train, Layout.of(run).folder.parent / ".datasets", size=count):
        for at, raw in enumerate(chunk.rows, chunk.first):
            place = f"{chunk.name}:{at + 1}"
            try:
                row = preparer.row(decode(raw), run.data.train[chunk.source].format)
            except Rejected as error:
                console.print(Text(f"--- {place}: dropped, {error}", style="red"))
            else:
                for piece in row.pieces or (None,):
                    console.print(Text(f"--- {place}: {row.row_id} ({row.format})", style="bold"))
                    console.print(shown(row, piece, preparer))
            left -= 1
            if not left:
                return


def shown(row: Any, piece: Any, preparer: Any) -> Any:
    from rich.text import Text

    from pipeline.examples import pieces

    if piece is None:
        from data.conversations import asked, with_system

        conversation = with_system(row.conversation, preparer.settings.system_prompt)
        prompt = preparer.template.text(asked(conversation)[0], conversation.tools, prompt=True)
        return Text(prompt, style="bright_black")
    text = Text()
    for part, supervised in pieces(preparer.tokenizer, piece.ids, piece.supervised):
        text.append(part, style="green" if supervised else "bright_black")
    return text

"""Prepared rows between the reading of the sources and the writing of the parts.

One Arrow file per chunk of input, written whole or not at all: what an interrupted run has prepared is found again.
Rows carry hashes; `place` turns them into final ids, parts and order with 24 bytes of memory a row.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.tokens import in_validation, row_hash

SPILL = pa.schema(
    [
        ("row_id", pa.string()),
        ("turn", pa.int32()),
        ("own_id", pa.bool_()),
        ("record", pa.string()),
        ("source", pa.string()),
        ("held_out", pa.bool_()),
        ("prompt_tokens", pa.int32()),
        ("notes", pa.list_(pa.string())),
        ("id_hash", pa.uint64()),
        ("content_hash", pa.uint64()),
        ("prompt_hash", pa.uint64()),
        ("token_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("finished", pa.bool_()),
    ]
)
"""A conversation is one row with `turn` -1 and its `record`, and a row more for each of its answers that is a token row
of its own (`turn`: the answer's number), directly behind it."""

MADE_LATER = r"[~@][0-9]+$"
"""How the ids end that `answer_id` and `piece_id` make."""


def write_spill(path: Path, table: pa.Table, report: dict[str, Any]) -> None:
    """Write one chunk's rows, with what was dropped (`report`, JSON) in the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    schema = SPILL.with_metadata({"report": json.dumps(report)})
    options = pa.ipc.IpcWriteOptions(use_threads=False)
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table.replace_schema_metadata(schema.metadata))
    os.replace(temporary, path)


def read_spill(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """A chunk's rows, memory-mapped, and its report."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        return reader.read_all(), json.loads(reader.schema.metadata[b"report"])


class Seen:
    """How often each 64-bit hash has come before, at 8 bytes a hash: sorted runs that are merged as they grow."""

    def __init__(self) -> None:
        self.runs: list[np.ndarray] = []
        self.repeated: Counter[int] = Counter()

    def occurrences(self, hashes: np.ndarray) -> np.ndarray:
        """For uint64 [n] hashes in order: int64 [n], 0 for a hash that is new, 1 for its second coming, and so on."""
        order = np.argsort(hashes, kind="stable")
        ranked = hashes[order]
        first = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, bool)
        starts = np.flatnonzero(first)
        within = np.arange(len(ranked)) - np.repeat(starts, np.diff(np.append(starts, len(ranked))))
        unique = ranked[starts]
        known = np.zeros(len(unique), bool)
        for run in self.runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[at] == unique
        before = np.array([int(k) + self.repeated[int(h)] if k else 0 for h, k in zip(unique, known, strict=True)], int)
        result = np.empty(len(hashes), np.int64)
        counts = np.diff(np.append(starts, len(ranked)))
        result[order] = within + np.repeat(before, counts)
        for at in np.flatnonzero(known | (counts > 1)):
            self.repeated[int(unique[at])] += int(counts[at]) - (0 if known[at] else 1)
        self._add(unique[~known])
        return result

    def _add(self, run: np.ndarray) -> None:
        while len(self.runs) and len(self.runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self.runs.pop(), run]))
        if len(run):
            self.runs.append(run)


@dataclass(frozen=True)
class Placement:
    """Where the n rows of one chunk go: `part` (-1: left out as a duplicate), final `hashes`, whether they are held out
    of training, and final ids by row where those differ from the chunk's."""

    part: np.ndarray
    hashes: np.ndarray
    held_out: np.ndarray
    renamed: dict[int, str]


@dataclass
class Placed:
    """All placements, and how many conversations repeat an earlier one: wholly, or by prompt, or as a validation row
    whose prompt is also trained on."""

    chunks: list[Placement]
    same_content: int = 0
    same_prompt: int = 0
    trained_prompt: int = 0


def piece_id(row_id: str, turn: int) -> str:
    """Id of the token row that holds one answer of a conversation; -1 is the conversation's own row."""
    return row_id if turn < 0 else f"{row_id}@{turn}"


def answer_id(row_id: str, number: int) -> str:
    """Id of a prompt's answer; 0 is its first, which keeps the prompt's own."""
    return row_id if number == 0 else f"{row_id}~{number + 1}"


def place(paths: list[Path], parts: int, share: float, drop_duplicates: bool, answered_later: bool) -> Placed:
    """Final ids, parts and validation marks of all rows, in the order of the input. `share`: part held out by id.

    A row without an id is called content digest + "-" + occurrence number; a repeated id gets "#" + its number. An id
    that another row has been given this way gets one more number: no two rows share an id. Of rows that are
    `answered_later`, one whose id ends as if it were made then gets "#0", so that no answer and no piece of one, in
    whatever part, has another row's id either.
    """
    ids, contents, prompts, finals = Seen(), Seen(), Seen(), Seen()
    placed = Placed([])
    asked_held_out = []
    for path in paths:
        table, _ = read_spill(path)
        main = table["turn"].to_numpy() < 0
        home = np.cumsum(main) - 1
        hashes = {name: table[name].to_numpy() for name in ("id_hash", "content_hash", "prompt_hash")}
        again = contents.occurrences(hashes["content_hash"][main])
        placed.same_content += int((again > 0).sum())
        placed.same_prompt += int((prompts.occurrences(hashes["prompt_hash"][main]) > 0).sum())
        number = ids.occurrences(hashes["id_hash"][main])[home]
        placement = _placement(table, hashes["id_hash"], number, parts, share, answered_later, finals)
        if drop_duplicates:
            placement.part[again[home] > 0] = -1
        placed.chunks.append(placement)
        asked_held_out.append(hashes["prompt_hash"][main & placement.held_out])
    placed.trained_prompt = _trained_prompts(paths, placed, np.concatenate([np.zeros(0, np.uint64), *asked_held_out]))
    return placed


def _placement(
    table: pa.Table,
    hashes: np.ndarray,
    number: np.ndarray,
    parts: int,
    share: float,
    answered_later: bool,
    finals: Seen,
) -> Placement:
    held_out = table["held_out"].to_numpy(zero_copy_only=False).copy()
    turns = table["turn"].to_numpy()
    own = table["own_id"].to_numpy(zero_copy_only=False)
    numbered = number > 0
    if answered_later:
        numbered |= pc.match_substring_regex(table["row_id"], MADE_LATER).to_numpy()
    final = hashes.copy()
    renamed = {}
    for at in np.flatnonzero(numbered | (turns >= 0)).tolist():
        row_id = table["row_id"][at].as_py()
        if numbered[at]:
            row_id = f"{row_id}#{number[at]}" if own[at] else f"{row_id.rpartition('-')[0]}-{number[at]}"
            held_out[at] = held_out[at] if share == 0.0 else in_validation(row_id, share)
        renamed[at] = piece_id(row_id, int(turns[at]))
        final[at] = row_hash(renamed[at])
    for at in np.flatnonzero(finals.occurrences(final)).tolist():
        renamed[at] = _unused(renamed.get(at) or table["row_id"][at].as_py(), finals)
        final[at] = row_hash(renamed[at])
    return Placement((final % np.uint64(parts)).astype(np.int32), final, held_out, renamed)


def _unused(row_id: str, finals: Seen) -> str:
    """The id with the first number that makes it no other row's, which is then taken."""
    names = (f"{row_id}#{number}" for number in count(1))
    return next(name for name in names if not finals.occurrences(np.array([row_hash(name)], np.uint64))[0])


def _trained_prompts(paths: list[Path], placed: Placed, held_out: np.ndarray) -> int:
    """How many of the held-out prompts (hashes) are trained on as well."""
    if not len(held_out):
        return 0
    trained = np.zeros(len(held_out), bool)
    for path, chunk in zip(paths, placed.chunks, strict=True):
        used = (chunk.part >= 0) & ~chunk.held_out
        trained |= np.isin(held_out, read_spill(path)[0]["prompt_hash"].to_numpy()[used])
    return int(trained.sum())


def bucket_rows(paths: list[Path], placed: Placed, part: int, low: int, high: int) -> pa.Table:
    """Rows of a part whose hashes lie in [low, high), in hash order, with their final ids and validation marks."""
    tables, hashes = [], []
    for path, chunk in zip(paths, placed.chunks, strict=True):
        inside = (chunk.part == part) & (chunk.hashes >= low) & (chunk.hashes <= high - 1)
        rows = np.flatnonzero(inside)
        if not len(rows):
            continue
        table = read_spill(path)[0].take(pa.array(rows))
        if any(int(at) in chunk.renamed for at in rows):
            ids = table["row_id"].to_pylist()
            names = [chunk.renamed.get(int(at), row_id) for at, row_id in zip(rows, ids, strict=True)]
            table = table.set_column(0, "row_id", pa.array(names, pa.string()))
        held_out = pa.array(chunk.held_out[rows])
        tables.append(table.set_column(SPILL.get_field_index("held_out"), "held_out", held_out))
        hashes.append(chunk.hashes[rows])
    if not tables:
        return SPILL.empty_table()
    order = np.argsort(np.concatenate(hashes), kind="stable")
    return pa.concat_tables(tables).take(pa.array(order)).combine_chunks()


def buckets(size: int, target: int) -> Iterator[tuple[int, int]]:
    """Ranges of 64-bit hashes that cut `size` bytes into pieces of about `target`."""
    pieces = max(1, -(-size // target))
    edges = [(1 << 64) * i // pieces for i in range(pieces + 1)]
    yield from pairwise(edges)

"""Parts of a run's rows: gathered from spilled chunks in hash order, written as Parquet, digested and counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.accounting import Accounting
from data.conversations import Conversation
from data.spill import Placed, answer_id, bucket_rows, buckets, read_spill
from data.tokens import SCHEMA, TableWriter, read_batches, row_hash

PROMPTS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("validation", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)
"""Normalised conversations. `record` is `Conversation.record`; `prompt_tokens` the length of the first prompt."""
BUCKET_BYTES = 64 << 20
"""Rows of a part that are sorted in memory together."""


@dataclass(frozen=True)
class Prompt:
    """A normalised conversation of a part; `number`: which of its answers is asked for, from 0."""

    row_id: str
    conversation: Conversation
    prompt_tokens: int
    validation: bool
    source: str
    number: int = 0


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Conversations of a part in hash order."""
    for batch in read_batches(path, PROMPTS):
        for row in batch.to_pylist():
            conversation = Conversation.loads(row["row_id"], row["record"])
            yield Prompt(row["row_id"], conversation, row["prompt_tokens"], row["validation"], row["source"])


def each_answer(prompts: Iterable[Prompt], answers: int) -> Iterator[Prompt]:
    """A part's prompts, each as often as it is answered, with ids of the answers."""
    for prompt in prompts:
        for number in range(answers):
            yield replace(prompt, row_id=answer_id(prompt.row_id, number), number=number)


def write_part(
    spills: list[Path], placed: Placed, part: int, parts: int, prompts: Path, tokens: Path | None
) -> tuple[int, Accounting, dict[str, str]]:
    """Write one part's tables; `tokens` None: rows are not answered yet.

    Returns the part, its account and a digest of each table's rows, which does not depend on how Parquet stores them.
    """
    account = Accounting()
    account.drop(row["reason"] for row in dropped_rows(spills, placed, parts, part))
    writers = {"prompts": TableWriter(prompts, PROMPTS)}
    if tokens is not None:
        writers["tokens"] = TableWriter(tokens, SCHEMA)
    digests = {name: hashlib.sha256() for name in writers}
    size = sum(path.stat().st_size for path in spills) // parts
    for low, high in buckets(size, BUCKET_BYTES):
        rows = bucket_rows(spills, placed, part, low, high)
        whole = rows.filter(pc.less(rows["turn"], 0)) if rows.num_rows else rows
        account.keep_conversations(whole)
        tables = {"prompts": prompt_table(whole)}
        if tokens is not None:
            tables["tokens"] = token_rows(rows)
            count_tokens(account, tables["tokens"])
        for name, table in tables.items():
            writers[name].write(table)
            digest_rows(digests[name], table)
    for writer in writers.values():
        writer.close()
    return part, account, {name: digest.hexdigest() for name, digest in digests.items()}


def prompt_table(rows: pa.Table) -> pa.Table:
    columns = [rows[name] for name in ("row_id", "record", "prompt_tokens", "held_out", "source")]
    return pa.table(columns, schema=PROMPTS)


def token_rows(rows: pa.Table) -> pa.Table:
    columns = [rows[name] for name in ("row_id", "token_ids", "supervised", "finished", "held_out", "source")]
    return pa.table(columns, schema=SCHEMA)


def count_tokens(account: Accounting, table: pa.Table) -> None:
    """Add token rows to an account."""
    if not table.num_rows:
        return
    lengths = pc.list_value_length(table["token_ids"]).to_numpy()
    supervised = pc.sum(pc.list_flatten(table["supervised"])).as_py() or 0
    account.keep_tokens(lengths, supervised, table["finished"].to_numpy(zero_copy_only=False))


def digest_rows(digest: Any, table: pa.Table) -> None:
    """Feed what rows say into a hash: every column's values, and where one list ends."""
    for column in table.itercolumns():
        column = column.combine_chunks()
        if isinstance(column, pa.ListArray):
            digest.update(pc.list_value_length(column).to_numpy().astype(np.int32).tobytes())
            column = column.flatten()
        if isinstance(column, pa.StringArray):
            for text in column.to_pylist():
                digest.update(text.encode() + b"\0")
        else:
            digest.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).tobytes())


def dropped_rows(spills: list[Path], placed: Placed, parts: int, part: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows that are not used, of one part or of all: `row_id`, `place`, `reason`, `detail`."""
    for path, chunk in zip(spills, placed.chunks, strict=True):
        table, report = read_spill(path)
        for row in report["dropped"]:
            if part is None or row_hash(row["row_id"]) % parts == part:
                yield row
        left_out = np.flatnonzero((chunk.part < 0) & (table["turn"].to_numpy() < 0))
        for at in left_out.tolist():
            if part is None or int(chunk.hashes[at]) % parts == part:
                row_id = chunk.renamed.get(at) or table["row_id"][at].as_py()
                yield {"row_id": row_id, "place": table["source"][at].as_py(), "reason": "duplicate", "detail": ""}

"""Token rows on disk: ids, which of them are supervised, and where a row belongs. Ids are data; text is a rendering."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import BadInput
from data.manifest import fsync_folder

SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("supervised", pa.list_(pa.bool_()), nullable=False),
        pa.field("finished", pa.bool_(), nullable=False),
        pa.field("validation", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)
ROWS_PER_GROUP = 4096
"""Rows of one Parquet row group: what a reader holds in memory at once."""


@dataclass(frozen=True)
class TokenRow:
    """One row of T tokens.

    `token_ids` int32 [T]; `supervised` bool [T]: the token is part of an answer to learn from; `finished`: the last
    answer ends in its end of turn; `validation`: held out of training; `source`: file or data set it came from.
    """

    row_id: str
    token_ids: np.ndarray
    supervised: np.ndarray
    finished: bool
    validation: bool
    source: str


def stable_hash(text: str) -> int:
    """64 bits of SHA-256, the same on every machine, version and day."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def row_hash(row_id: str) -> int:
    """Hash that orders rows and, modulo the number of parts, assigns them."""
    return stable_hash(row_id)


def outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """Where the first of `ids` (int32) that is not in [0, vocab_size) lies; None when all are."""
    unsigned = ids.view(np.uint32)  # a negative id is a large one
    if not len(ids) or unsigned.max() < vocab_size:
        return None
    return int(np.argmax(unsigned >= vocab_size))


def in_validation(row_id: str, share: float) -> bool:
    """Whether a row is held out. It depends on the id alone, so that adding rows moves none."""
    return stable_hash(f"validation:{row_id}") < share * 2.0**64


def token_table(rows: Iterable[TokenRow]) -> pa.Table:
    """Rows as an Arrow table of `SCHEMA`."""
    rows = list(rows)
    return pa.table(
        [
            pa.array([row.row_id for row in rows], pa.string()),
            ragged([row.token_ids for row in rows], pa.int32()),
            ragged([row.supervised for row in rows], pa.bool_()),
            pa.array([row.finished for row in rows], pa.bool_()),
            pa.array([row.validation for row in rows], pa.bool_()),
            pa.array([row.source for row in rows], pa.string()),
        ],
        schema=SCHEMA,
    )


def ragged(arrays: list[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    """Arrays of different lengths as one Arrow list column, without a Python object per element."""
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(kind.to_pandas_dtype(), copy=False), kind))


class TableWriter:
    """A Parquet file written under a temporary name and renamed, durably, when it is whole."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer = pq.ParquetWriter(
            self._temporary, schema, compression="zstd", compression_level=1, use_dictionary=["source"]
        )

    def write(self, table: pa.Table) -> None:
        if table.num_rows:
            self._writer.write_table(table, row_group_size=ROWS_PER_GROUP)

    def close(self) -> None:
        self._writer.close()
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)
        fsync_folder(self.path.parent)


def write_tokens(path: Path, rows: Iterable[TokenRow]) -> None:
    """Write rows, in the order given, as one Parquet file."""
    writer = TableWriter(path, SCHEMA)
    rows = iter(rows)
    while group := list(islice(rows, ROWS_PER_GROUP)):
        writer.write(token_table(group))
    writer.close()


def read_tokens(path: Path) -> Iterator[TokenRow]:
    """Rows of a part in file order, one row group in memory at a time.

    Raises BadInput when the file is missing or is not a token table.
    """
    for batch in read_batches(path, SCHEMA):
        ids, supervised = unragged(batch.column("token_ids")), unragged(batch.column("supervised"))
        plain = [batch.column(name).to_pylist() for name in ("row_id", "finished", "validation", "source")]
        for row_id, finished, validation, source, tokens, mask in zip(*plain, ids, supervised, strict=True):
            yield TokenRow(row_id, tokens, mask, finished, validation, source)


def read_batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Record batches of a Parquet file that must have exactly `schema`."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist: run `draftmill prepare` first") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{path}: not a readable Parquet file ({error}): make it again") from None
    with file:
        if file.schema_arrow.names != schema.names:
            raise BadInput(f"{path}: has columns {file.schema_arrow.names}, expected {schema.names}: make it again")
        yield from file.iter_batches(ROWS_PER_GROUP)


def unragged(column: pa.ListArray) -> list[np.ndarray]:
    """Rows of a list column as numpy arrays."""
    offsets = column.offsets.to_numpy()
    flat = column.values.to_numpy(zero_copy_only=False)
    return [flat[start:end] for start, end in pairwise(offsets)]

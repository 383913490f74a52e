"""Where rows come from: files, compressed files, folders, saved data sets and the hub, read as a stream.

JSON lines travel undecoded, so that decoding them is the work of whoever prepares them.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from data import hub
from data.conversations import Rejected
from data.errors import BadInput
from data.formats import detect
from data.manifest import crc32c
from data.settings import Source

ROWS_PER_CHUNK = 2000
"""Rows that are prepared, and resumed, together. A change makes unfinished work start over."""
BYTES_PER_CHUNK = 16 << 20
"""Text after which a chunk is closed early: bounds memory when rows are long."""
ROWS_PER_BATCH = 128
"""Rows of a Parquet file that are decoded together."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt")
BLOCK = 1 << 20
BETWEEN = re.compile(r"\s*,?\s*")
"""What stands between two elements of a JSON array."""

Raw = bytes | dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file. `number` counts chunks over the whole input, `first` is the first row's number."""

    number: int
    source: int
    name: str
    first: int
    rows: list[Raw]


def label(source: Source) -> str:
    """How a source is called in tables and messages."""
    return source.path or hub.label(source)


def chunks(sources: Iterable[Source], cache: Path, size: int | None = None) -> Iterator[Chunk]:
    """All rows of all sources, in order, in chunks of `size`. `cache`: folder for downloads of hub data sets.

    Raises BadInput for what cannot be read.
    """
    number = 0
    for index, source in enumerate(sources):
        left = source.limit
        for name, rows in files_of(source, cache):
            first = 0
            filled = (row for row in rows if row != b"")
            for group in grouped(islice(filled, left), size or ROWS_PER_CHUNK):
                yield Chunk(number, index, name, first, group)
                number += 1
                first += len(group)
            left = None if left is None else left - first
            if left == 0:
                break


def grouped(rows: Iterable[Raw], size: int) -> Iterator[list[Raw]]:
    group: list[Raw] = []
    weight = 0
    for row in rows:
        group.append(row)
        weight += weight_of(row)
        if len(group) == size or weight >= BYTES_PER_CHUNK:
            yield group
            group, weight = [], 0
    if group:
        yield group


def weight_of(value: Any) -> int:
    """About how many bytes a value fills as text; of a list of numbers, by its length."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(weight_of, value.values()))
    if isinstance(value, list):
        return 8 * len(value) if value and isinstance(value[0], int) else sum(map(weight_of, value))
    return 8


def decode(row: Raw) -> Any:
    """A raw row as Python values.

    Raises Rejected when it is not JSON or not UTF-8.
    """
    if not isinstance(row, bytes):
        return row
    try:
        return json.loads(row.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", str(error)[:120]) from None
    except (ValueError, RecursionError) as error:
        raise Rejected("not_json", str(error)[:120]) from None


def files_of(source: Source, cache: Path) -> Iterator[tuple[str, Iterator[Raw]]]:
    """Names and rows of the files of a source. A blank line is an empty row: rows keep their lines' numbers."""
    if source.hub is not None:
        yield label(source), map(without_nulls, hub.hub_rows(source, cache))
        return
    path = Path(source.path or "")
    if is_saved_dataset(path):
        yield str(path), saved_rows(path, source.split)
        return
    for file in data_files(path):
        yield str(file), file_rows(file)


def data_files(path: Path) -> list[Path]:
    """The file itself, or the data files below a folder in the order of their names; hidden ones (copies that editors
    and notebooks keep) are none.

    Raises BadInput when there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path} does not exist: correct the path (paths are relative to where you run)")
    found = (file for file in path.rglob("*") if file.is_file() and plain_suffix(file) in SUFFIXES)
    files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise BadInput(f"{path}: no data files in this folder; known kinds: {', '.join(SUFFIXES)}, also .gz and .zst")
    return files


def plain_suffix(path: Path) -> str:
    """Suffix without that of the compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def file_rows(path: Path) -> Iterator[Raw]:
    """Rows of one file, by its suffix.

    Raises BadInput for an unknown suffix and for damaged files.
    """
    readers = {
        ".jsonl": line_rows,
        ".ndjson": line_rows,
        ".json": json_rows,
        ".parquet": parquet_rows,
        ".csv": csv_rows,
        ".tsv": csv_rows,
        ".txt": text_rows,
    }
    reader = readers.get(plain_suffix(path))
    if reader is None:
        raise BadInput(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)}, also compressed as .gz or .zst")
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read to its end ({error}): repair or replace the file") from None


def opened(path: Path) -> BinaryIO:
    """The file's bytes, decompressed.

    Raises BadInput for text in UTF-16 or UTF-32, which begins with its own byte-order mark.
    """
    file = io.BufferedReader(decompressed(path), BLOCK)  # type: ignore[type-var]
    if file.peek(4)[:4].startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        file.close()
        raise BadInput(f"{path}: UTF-16 or UTF-32 text: convert it first (`iconv -f UTF-16 -t UTF-8`)")
    return file


def decompressed(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return pa.input_stream(str(path), compression="zstd")  # tells a cut file from a whole one
    return path.open("rb")


def line_rows(path: Path) -> Iterator[bytes]:
    """Lines without white space around them and without a byte-order mark."""
    with opened(path) as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield line.strip()


def text_rows(path: Path) -> Iterator[Raw]:
    """One text row a line that is not blank."""
    for line in line_rows(path):
        yield {"text": line.decode("utf-8")} if line else line


def json_rows(path: Path) -> Iterator[Raw]:
    """Elements of a JSON array, rows of an object that wraps one, or JSON lines under a `.json` name: those are told by
    a first line that is whole and not the last."""
    with opened(path) as file:
        line = first_line(file)
        lines = not only_blanks(file) and is_json(line)
    if lines:
        yield from line_rows(path)
    elif line.startswith(b"["):
        yield from array_rows(path)
    else:
        yield from wrapped_rows(path)


def first_line(file: BinaryIO) -> bytes:
    """The first line that is not blank, without a byte-order mark; of an array's at most a block, since a big array may
    stand on one line."""
    line = file.readline(BLOCK).removeprefix(b"\xef\xbb\xbf")
    while line and not line.strip():
        line = file.readline(BLOCK)
    line = line.lstrip()
    return line if line.startswith(b"[") or line.endswith(b"\n") else line + file.readline()


def only_blanks(file: BinaryIO) -> bool:
    """Whether nothing but white space is left."""
    return not any(block.strip() for block in iter(lambda: file.read(BLOCK), b""))


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def array_rows(path: Path) -> Iterator[Raw]:
    """Elements of one big JSON array, decoded one by one so that memory stays flat."""
    decoder = json.JSONDecoder()
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig") as file:
        text = file.read(BLOCK)
        at = text.index("[") + 1
        while True:
            at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                if text[at + 1 :].strip() or any(more.strip() for more in iter(lambda: file.read(BLOCK), "")):
                    raise BadInput(f"{path}: more follows the JSON array: name the file .jsonl if a line is a row")
                return
            try:
                value, end = decoder.raw_decode(text, at)
                complete = end < len(text)
            except ValueError as error:
                complete, value, end, problem = False, None, at, error
            if complete:
                yield value if isinstance(value, dict) else json.dumps(value).encode()
                at = end
            elif more := file.read(max(BLOCK, len(text) - at)):
                text, at = text[at:] + more, 0
            else:
                raise BadInput(f"{path}: the JSON array is cut or broken ({problem}): repair or replace the file")


def wrapped_rows(path: Path) -> Iterator[Raw]:
    """Rows of `{"data": [...]}` and the like: an object with exactly one list of objects that is no row itself."""
    with opened(path) as file:
        try:
            body = json.load(file)
        except (ValueError, RecursionError) as error:
            raise BadInput(
                f"{path}: not JSON ({error}): repair the file, or name it .jsonl if a line is a row"
            ) from None
    if not isinstance(body, dict):
        raise BadInput(f"{path}: one JSON {type(body).__name__}, neither an array nor an object: it holds no rows")
    lists = [value for value in body.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1 and not is_row(body):
        yield from lists[0]
    else:
        yield body


def is_row(body: dict[str, Any]) -> bool:
    """Whether an object has the fields of a conversation."""
    try:
        detect(body)
    except Rejected:
        return False
    return True


def parquet_rows(path: Path) -> Iterator[Raw]:
    import pyarrow.parquet as pq

    if path.suffix.lower() != ".parquet":
        raise BadInput(f"{path}: a compressed Parquet file: decompress it first (Parquet compresses by itself)")
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_PER_BATCH):
                yield from map(without_nulls, batch.to_pylist())
    except pa.ArrowException as error:
        raise BadInput(f"{path}: not a readable Parquet file ({error}): repair or replace it") from None


def without_nulls(value: Any) -> Any:
    """A table's row without the fields that are null: a column of structs has every field of every row, and a tool
    would be asked for with the arguments of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:1]):
        return list(map(without_nulls, value))
    return value


def csv_rows(path: Path) -> Iterator[Raw]:
    """Rows of a table with a header line; empty cells are absent fields."""
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if plain_suffix(path) == ".tsv" else ","
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, delimiter=delimiter):
            yield {key: value for key, value in row.items() if key is not None and value not in (None, "")}


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` saved this folder (`save_to_disk`)."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def saved_rows(path: Path, split: str) -> Iterator[Raw]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not a readable saved data set ({error}): repair or replace it") from None
    if isinstance(data, DatasetDict):
        if split not in data:
            raise BadInput(f"{path}: no split `{split}`; it has: {', '.join(data)}: set its `split`")
        data = data[split]
    yield from map(without_nulls, data.with_format(None))  # not the tensors, nor the columns alone, of a trainer


def source_record(source: Source, commits: Mapping[str, str]) -> dict[str, Any]:
    """What identifies a source's content: sizes and checksums of its files, or the hub's names and its commit, where
    `commits` (of `hub.commits`) has it."""
    if source.hub is not None:
        body = {"hub": source.hub, "subset": source.subset, "split": source.split, "limit": source.limit}
        commit = commits.get(hub.name_of(source))
        return body if commit is None else {**body, "commit": commit}
    path = Path(source.path or "")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else data_files(path)
    sums = [{"name": file.name, "bytes": file.stat().st_size, "crc32c": crc32c(file)} for file in files]
    return {"files": sums, "split": source.split, "format": source.format, "limit": source.limit}

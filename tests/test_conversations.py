"""Any conversation file in: shapes, containers and odd rows."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.sources
from data import hub
from data.conversations import REASONS, Conversation, Rejected, with_system
from data.errors import BadInput
from data.formats import detect, normalise
from data.settings import Source
from data.sources import chunks, decode, source_record

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TURNS = (USER, ASSISTANT)


def rows_of(path: Path, **more: Any) -> list[Any]:
    source = Source(path=str(path), **more)
    return [decode(row) for chunk in chunks([source], path.parent / "cache") for row in chunk.rows]


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, "conversations"),
        ({"prompt": "hi", "response": "hello"}, "prompt_response"),
        ({"question": "hi", "answer": "hello"}, "prompt_response"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_response"),
        ({"instruction": "hi", "input": "", "output": "hello"}, "alpaca"),
        ({"instruction": "hi", "context": None, "response": "hello", "category": "x"}, "alpaca"),
        ({"messages": json.dumps(TURNS)}, "messages"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "hel"}, {"text": "lo"}]}]},
            "messages",
        ),
    ],
)
def test_shapes_become_the_same_conversation(record: dict[str, Any], form: str) -> None:
    assert detect(record) == form
    assert normalise(record).messages == TURNS


def test_alpaca_input_follows_the_instruction() -> None:
    made = normalise({"instruction": "Sum", "input": "1 2", "output": "3", "system": "Be brief."})
    assert [m["content"] for m in made.messages] == ["Be brief.", "Sum\n\n1 2", "3"]


def test_a_system_prompt_beside_a_question_is_its_system_turn() -> None:
    made = normalise({"system_prompt": "Be brief.", "question": "1 2", "response": "3"})
    assert [turn["content"] for turn in made.messages] == ["Be brief.", "1 2", "3"]
    assert len(normalise({"system_prompt": "", "question": "1 2", "response": "3"}).messages) == 2


def test_turns_are_questions() -> None:
    made = normalise({"id": 7, "turns": ["one", "two"]})
    assert made.row_id == "7"
    assert made.messages == ({"role": "user", "content": "one"}, {"role": "user", "content": "two"})


def test_token_ids_with_and_without_mask() -> None:
    assert normalise({"input_ids": [1, 2], "labels": [-100, 2]}).supervised == (False, True)
    assert normalise({"token_ids": [1, 2], "loss_mask": [0, 1]}).supervised == (False, True)
    assert normalise({"token_ids": [1, 2]}).supervised is None


def test_tools_reasoning_and_results_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    rows = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "need a sum"},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    made = normalise({"messages": rows, "tools": '[{"type": "function"}]'})
    assert made.tools == ({"type": "function"},)
    assert made.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert made.messages[1]["reasoning_content"] == "need a sum"
    assert made.messages[2]["tool_call_id"] == "c1"


def test_reasoning_is_read_in_parts_and_never_lost() -> None:
    def reasoned(found: Any) -> str | None:
        made = normalise({"messages": [USER, {**ASSISTANT, "reasoning": found}]})
        return made.messages[1].get("reasoning_content")

    assert reasoned([{"type": "text", "text": "need "}, "a sum"]) == "need a sum"
    assert reasoned(True) is reasoned([]) is reasoned("") is None
    with pytest.raises(Rejected, match="content_not_text"):
        reasoned({"steps": ["need a sum"]})


def test_sharegpt_function_calls() -> None:
    turns = [
        {"from": "human", "value": "2+2"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4."},
    ]
    made = normalise({"conversations": turns})
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_system_prompt_is_added_only_where_there_is_none() -> None:
    plain, own = (
        normalise({"messages": [*TURNS]}),
        normalise({"messages": [{"role": "system", "content": "Own"}, *TURNS]}),
    )
    assert with_system(plain, "New").messages[0]["content"] == "New"
    assert with_system(own, "New").messages[0]["content"] == "Own"


def test_a_conversation_survives_its_own_text() -> None:
    made = normalise({"id": "a", "messages": [*TURNS], "response_ids": [3, 4], "finished": False})
    assert Conversation.loads("a", made.record) == made


DAY = datetime.date(2020, 2, 29)


def endless(depth: int) -> dict[str, Any]:
    """Objects in objects."""
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


ODD: list[tuple[Any, str]] = [
    ([], "not_an_object"),
    ("text", "not_an_object"),
    ({}, "unknown_format"),
    ({"foo": 1}, "unknown_format"),
    ({"messages": []}, "empty"),
    ({"messages": "not a list"}, "wrong_format"),
    ({"messages": ["hi"]}, "wrong_format"),
    ({"messages": [{"role": "system", "content": "only"}]}, "no_user"),
    ({"messages": [ASSISTANT, USER]}, "assistant_first"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty_answer"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty_answer"),
    ({"messages": [{"role": "user", "content": ""}, ASSISTANT]}, "empty_content"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "null_content"),
    ({"messages": [USER, {"role": "assistant"}]}, "null_content"),
    ({"messages": [USER, {"role": "assistant", "content": 5}]}, "content_not_text"),
    ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "unknown_role"),
    ({"messages": [USER, {"role": None, "content": "x"}]}, "unknown_role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ASSISTANT]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "odd"}]}, ASSISTANT]}, "unknown_part"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_tool_call"),
    ({"messages": [{"role": "user", "content": "\ud800"}, ASSISTANT]}, "not_utf8"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"d": DAY}}]}]}, "not_plain"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": b"x"}]}]}, "not_plain"),
    ({"messages": [*TURNS], "tools": [{"name": "f", "parameters": endless(3000)}]}, "not_plain"),
    ({"instruction": "hi", "output": "hello", "history": "cut"}, "wrong_format"),
    ({"token_ids": []}, "empty"),
    ({"token_ids": [1, -2]}, "bad_token_ids"),
    ({"token_ids": [1, 2.5]}, "bad_token_ids"),
    ({"token_ids": [1, True]}, "bad_token_ids"),
    ({"token_ids": [1, 2], "supervised": [True]}, "bad_token_ids"),
    ({"text": "  "}, "empty"),
]


@pytest.mark.parametrize(("record", "reason"), ODD)
def test_odd_rows_are_dropped_by_the_right_reason(record: Any, reason: str) -> None:
    assert reason in REASONS
    with pytest.raises(Rejected) as caught:
        normalise(record)
    assert caught.value.reason == reason


def test_a_forced_format_is_not_guessed_around() -> None:
    assert normalise({"messages": [*TURNS], "text": "abc"}, "text").text == "abc"
    with pytest.raises(Rejected, match="wrong_format"):
        normalise({"messages": [*TURNS]}, "alpaca")


@pytest.mark.parametrize("value", ["", None, 1.5, True, ["a"]])
def test_ids_that_name_nothing_are_no_ids(value: Any) -> None:
    assert normalise({"id": value, "messages": [*TURNS]}).row_id is None


def zst(text: bytes) -> bytes:
    return pa.compress(text, codec="zstd", asbytes=True)


LINES = b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "\xc3\xa9"}\n'


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "json"])
def test_lines_in_any_wrapping(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    pack = {"gz": gzip.compress, "zst": zst}.get(suffix.rpartition(".")[2], bytes)
    path.write_bytes(pack(LINES[:24]) + pack(LINES[24:]))  # as `cat` joins two files
    assert rows_of(path) == [{"text": "a"}, {"text": "é"}]


def test_json_arrays_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    body = [{"text": "x" * 300_000, "n": i} for i in range(8)]
    path.write_text(json.dumps(body, indent=1))
    assert rows_of(path) == body
    for around in ("", "\ufeff\n "):
        path.write_text(around + json.dumps(body) + "\n", encoding="utf-8")
        assert rows_of(path) == body


@pytest.mark.parametrize("indent", [1, None])
@pytest.mark.parametrize("rows", [2, 3000])
@pytest.mark.parametrize("around", ["", "\n", "\ufeff\n "])
def test_json_objects_that_wrap_rows(tmp_path: Path, indent: int | None, rows: int, around: str) -> None:
    path = tmp_path / "rows.json"
    body = [{"text": "a" * 500, "n": i} for i in range(rows)]
    path.write_text(around + json.dumps({"version": 1, "data": body}, indent=indent) + "\n", encoding="utf-8")
    assert rows_of(path) == body


@pytest.mark.parametrize("length", [3, 3 << 20])
@pytest.mark.parametrize("rows", [1, 3])
def test_json_lines_of_any_length_under_the_name_of_json(tmp_path: Path, length: int, rows: int) -> None:
    path = tmp_path / "rows.json"
    body = [{"prompt": "p" * length, "response": "a", "tools": [{"name": "f"}], "n": i} for i in range(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in body))
    assert rows_of(path) == body
    path.write_text(json.dumps(body[0], indent=1))
    assert rows_of(path) == body[:1]


def test_json_lines_that_are_arrays(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[1, 2]\n[3]\n")
    assert rows_of(path) == [[1, 2], [3]]
    path.write_text(json.dumps([{"text": "x" * 2_000_000}]) + "\n[3]\n")
    with pytest.raises(BadInput, match=r"rows\.json: more follows the JSON array: name the file \.jsonl"):
        rows_of(path)
    path.write_text('"rows"')
    with pytest.raises(BadInput, match="one JSON str, neither an array nor an object"):
        rows_of(path)


def test_tables(tmp_path: Path) -> None:
    records = [{"prompt": "a, b", "response": "line\nbreak"}, {"prompt": "é", "response": "x"}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "response"])
        writer.writeheader()
        writer.writerows(records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    for name in ("rows.csv", "rows.parquet", "saved"):
        assert rows_of(tmp_path / name) == records


def test_saved_datasets_are_rows_whatever_a_trainer_wanted_of_them(tmp_path: Path) -> None:
    row = {"id": 7, "messages": [*TURNS], "token_ids": [1, 2]}
    data = datasets.Dataset.from_list([row])
    for kind, columns in (("numpy", None), ("torch", ["token_ids"])):
        data.set_format(kind, columns=columns)
        data.save_to_disk(tmp_path / kind)
        assert rows_of(tmp_path / kind) == [row]


def test_a_call_in_a_table_has_its_own_arguments_alone(tmp_path: Path) -> None:
    def asking(name: str, **arguments: Any) -> dict[str, Any]:
        schema = {"name": name, "parameters": {"properties": {key: {"type": "x"} for key in arguments}}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"tools": [{"type": "function", "function": schema}], "messages": turns}

    rows = [asking("weather", city="Ulm"), asking("add", a=1, b=2)]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    for name in ("rows.parquet", "saved"):
        assert [normalise(row) for row in rows_of(tmp_path / name)] == [normalise(row) for row in rows]


def test_saved_datasets_with_splits(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved", split="test") == [{"text": "a"}]
    with pytest.raises(BadInput, match="no split `dev`; it has: train, test"):
        rows_of(tmp_path / "saved", split="dev")


def test_long_rows_of_tables_close_a_chunk_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sources, "BYTES_PER_CHUNK", 10_000)
    texts = pa.table({"text": ["x" * 4000] * 10})
    tokens = pa.table({"messages": [[{"role": "user", "content": "x" * 900}] * 4] * 7, "token_ids": [[1] * 100] * 7})
    pq.write_table(texts, tmp_path / "a.parquet")
    pq.write_table(tokens, tmp_path / "b.parquet")
    source = Source(path=str(tmp_path))
    assert [len(chunk.rows) for chunk in chunks([source], tmp_path)] == [3, 3, 3, 1, 3, 3, 1]


def test_hub_sets_are_asked_for_as_the_source_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*names: Any, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((names, options))
        yield from ({"text": "a"}, {"text": "b"})
        raise datasets.exceptions.DatasetGenerationError("a shard is\ndamaged")

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = Source(hub="some/set", subset="main", split="test", revision="v2", streaming=True, limit=2)
    assert [row for chunk in chunks([source], tmp_path / "cache") for row in chunk.rows] == [
        {"text": "a"},
        {"text": "b"},
    ]
    options = {"split": "test", "revision": "v2", "streaming": True, "cache_dir": str(tmp_path / "cache")}
    assert asked == [(("some/set", "main"), options)]
    with pytest.raises(BadInput, match=r"data set some/set/default/train: cannot be read .*a shard is damaged"):
        list(chunks([Source(hub="some/set")], tmp_path))


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.jsonl").write_text('{"text": "2"}\n')
    (folder / "a.jsonl").write_text('{"text": "1"}\n')
    (folder / "sub" / "c.jsonl").write_text('{"text": "3"}\n')
    (folder / "README.md").write_text("no rows")
    (folder / ".ipynb_checkpoints").mkdir()
    for name in (".ipynb_checkpoints/a.jsonl", "._b.jsonl"):
        (folder / name).write_text('{"text": "0"}\n')
    assert [row["text"] for row in rows_of(folder)] == ["1", "2", "3"]
    assert [row["text"] for row in rows_of(folder, limit=2)] == ["1", "2"]


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "rows.jsonl.gz"
    cut.write_bytes(gzip.compress(LINES * 100)[:-20])
    cut_too, no_zst, saved = (tmp_path / name for name in ("rows.jsonl.zst", "none.jsonl.zst", "saved"))
    cut_too.write_bytes(zst(b"".join(b'{"text": "%d"}\n' % number for number in range(200_000)))[:-20])
    no_zst.write_bytes(LINES)
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(saved)
    next(saved.glob("*.arrow")).unlink()
    odd, array = tmp_path / "rows.xml", tmp_path / "rows.json"
    odd.write_text("<a/>")
    array.write_text('[{"text": "a"}, {"text"')
    for path, words in (
        (cut, "cannot be read to its end"),
        (cut_too, "cannot be read to its end"),
        (no_zst, "cannot be read to its end"),
        (saved, "not a readable saved data set"),
        (odd, "unknown kind of file"),
        (array, "cut or broken"),
        (tmp_path / "none.jsonl", "does not exist"),
    ):
        with pytest.raises(BadInput, match=words) as caught:
            rows_of(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "txt.gz"])
def test_other_encodings_are_refused_as_a_file(tmp_path: Path, suffix: str, encoding: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    pack = gzip.compress if suffix.endswith("gz") else bytes
    path.write_bytes(pack(f'{mark}{{"text": "a"}}\n'.encode(encoding)))
    with pytest.raises(BadInput, match=r"UTF-16 or UTF-32 text: convert it first"):
        rows_of(path)


def test_a_source_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES)
    first = source_record(Source(path=str(path)), {})
    assert source_record(Source(path=str(path)), {}) == first
    path.write_bytes(LINES + b'{"text": "b"}\n')
    assert source_record(Source(path=str(path)), {}) != first


def test_a_hub_set_is_known_by_the_commit_that_the_hub_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def tell(self: Any, name: str, **options: Any) -> Any:
        asked.append((name, options["revision"]))
        if name == "some/secret":
            raise ConnectionError("no route")
        return SimpleNamespace(sha=f"sha of {options['revision']}")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", tell)
    full = "0123456789" * 4
    train, test = Source(hub="some/set"), Source(hub="some/set", split="test")
    sources = (train, test, *(Source(hub=name, revision=given) for name, given in (("some/set", "v2"), ("b/c", full))))
    offline = {"some/set@newest": "seen before"}
    assert hub.commits(sources, offline) == {**offline, f"b/c@{full}": full}
    assert asked == [], "HF_HUB_OFFLINE is set in tests"
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    secret = Source(hub="some/secret")
    found = hub.commits((*sources, secret), {"some/secret@newest": "seen before"})
    assert found == {
        "some/set@newest": "sha of None", "some/set@v2": "sha of v2", f"b/c@{full}": full,
        "some/secret@newest": "seen before",
    }  # fmt: skip
    assert asked == [("some/set", None), ("some/set", "v2"), ("some/secret", None)]
    assert source_record(test, found)["commit"] == "sha of None"
    assert source_record(test, {}) == {"hub": "some/set", "subset": None, "split": "test", "limit": None}

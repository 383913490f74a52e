"""Regenerate: the target's own answers, as ids, from here or from a server; nothing asked twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

import pipeline.server
import pipeline.server_answers
from data.answers import AnswerLog, Reply
from data.conversations import Rejected
from data.errors import BadInput, Failure, Stopped
from data.layout import Layout
from data.manifest import read_manifest
from data.parts import Prompt, each_answer, read_prompts
from data.settings import Run, load_run
from data.spill import piece_id
from data.tokens import TokenRow, read_tokens
from pipeline.template import Template, render_prompt
from stages.prepare import command as prepare_command
from stages.regenerate import command

MakeRun = Callable[..., tuple[Path, Run]]


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ROWS: list[dict[str, Any]] = [
    *({"id": f"row-{i}", "messages": [say(f"question {i}?")]} for i in range(9)),
    {"id": "two", "turns": ["first?", "second?"]},
]


@pytest.fixture
def run_of(tmp_path: Path, tiny_root: Path) -> MakeRun:
    """A prepared run whose rows the target is to answer."""
    (tmp_path / "runs").mkdir()
    (tiny_root / ".targets").mkdir(exist_ok=True)
    (tmp_path / "runs" / ".targets").symlink_to(tiny_root / ".targets")

    def make(rows: list[dict[str, Any]] = ROWS, parts: int = 1, **data: Any) -> tuple[Path, Run]:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answers = {"max_new_tokens": 24, "batch_size": 4, **data.pop("regenerate", {})}
        body = {
            "name": "run",
            "root": str(tmp_path / "runs"),
            "target": {"model": "tiny:2", "dtype": "float32"},
            "data": {
                "train": [{"path": str(source)}],
                "max_length": 160,
                "responses": "regenerate",
                "regenerate": answers,
                **data,
            },
            "extract": {"parts": parts},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(body))
        CliRunner().invoke(prepare_command, [str(path)], catch_exceptions=False)
        return path, load_run(path)

    return make


def regenerate(path: Path, *options: str) -> None:
    CliRunner().invoke(command, [str(path), *options], catch_exceptions=False)


def rows_of(run: Run) -> dict[str, TokenRow]:
    parts = range(run.extract.parts)
    return {row.row_id: row for p in parts for row in read_tokens(Layout.of(run).tokens(p).with_suffix(".parquet"))}


def prompts_of(run: Run, part: int) -> Iterator[Prompt]:
    return read_prompts(Layout.of(run).prompts(part).with_suffix(".parquet"))


def tokens_manifest(run: Run) -> dict[str, Any]:
    return read_manifest(Layout.of(run).tokens(0), "tokens")


def answer_of(row: TokenRow) -> list[int]:
    return row.token_ids[row.supervised].tolist()


def greedy(target: Any, prompt: list[int], limit: int) -> list[int]:
    """What `generate` answers, one prompt at a time."""
    with torch.no_grad():
        out = target.model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
        )
    return out[0, len(prompt) :].tolist()


def test_prompts_prepared_with_other_settings_are_not_answered(run_of: MakeRun) -> None:
    path, run = run_of(ROWS[:2])
    path.write_text(path.read_text().replace("max_length: 160", "max_length: 99"))
    with pytest.raises(BadInput, match=r"data\.max_length = 160, this run wants 99: run `draftmill prepare` again"):
        regenerate(path)
    assert not Layout.of(run).tokens(0).exists()


def test_answers_are_those_of_generate(run_of: MakeRun, tiny_target: Any) -> None:
    path, run = run_of(ROWS[:9], parts=2, regenerate={"max_new_tokens": 8})
    regenerate(path)
    rows = rows_of(run)
    assert len(rows) == 9
    for i, source in enumerate(ROWS[:9]):
        row = rows[f"row-{i}"]
        prompt = render_prompt(tiny_target.tokenizer, source["messages"], {})
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert not row.supervised[: len(prompt)].any()
        assert answer_of(row) == greedy(tiny_target, prompt, 8)
        assert row.finished == (answer_of(row)[-1] == tiny_target.tokenizer.eos_token_id)
    assert {row.finished for row in rows.values()} == {True, False}


def test_the_system_prompt_is_put_before_what_is_asked(run_of: MakeRun, tiny_target: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [{"id": "one", "messages": [say("a?")]}, {"id": "own", "messages": [{**system, "content": "x"}, say("a?")]}]
    path, run = run_of(rows, system_prompt=system["content"])
    regenerate(path)
    asked_for = {"one": [system, say("a?")], "own": rows[1]["messages"]}
    for name, row in rows_of(run).items():
        prompt = render_prompt(tiny_target.tokenizer, asked_for[name], {})
        assert row.token_ids[: len(prompt)].tolist() == prompt


def test_every_turn_is_answered_in_turn_with_the_ids_before_it(run_of: MakeRun, tiny_target: Any) -> None:
    questions = [{"id": f"t{i}", "turns": [f"first {i}?", f"second {i}?"]} for i in range(6)]
    path, run = run_of(questions, regenerate={"max_new_tokens": 60})
    regenerate(path)
    finished = 0
    for row in rows_of(run).values():
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.supervised.astype(int), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            prompt, answer = row.token_ids[:start].tolist(), row.token_ids[start:end].tolist()
            assert answer == greedy(tiny_target, prompt, 60)[: len(answer)]
        finished += len(edges) == 4
    assert finished > 0


@pytest.mark.parametrize(("choice", "kept"), [("keep", 2), ("drop", 0), ("cut", 0)])
def test_unfinished_answers_by_choice(run_of: MakeRun, choice: str, kept: int) -> None:
    path, run = run_of(ROWS[:2], max_dropped=1.0, regenerate={"max_new_tokens": 2, "unfinished": choice})
    regenerate(path)
    assert len(rows_of(run)) == kept
    assert tokens_manifest(run)["dropped"] == ({"unfinished": 2} if not kept else {})


def test_a_second_run_asks_nothing_and_a_forced_one_asks_all(run_of: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.decode

    path, run = run_of(ROWS[:3])
    regenerate(path)
    before = Layout.of(run).tokens(0).read_bytes()
    original = pipeline.decode.Engine.generate
    calls = []

    def counted(self: Any, prompts: Any, *more: Any) -> Any:
        prompts = list(prompts)
        calls.extend(prompts)
        return original(self, prompts, *more)

    monkeypatch.setattr(pipeline.decode.Engine, "generate", counted)
    regenerate(path)
    assert not calls
    Layout.of(run).tokens(0).unlink()
    regenerate(path, "--part", "0")
    assert len(calls) == 3
    assert Layout.of(run).tokens(0).read_bytes() == before


def test_several_answers_of_a_prompt_differ_and_stay_together(run_of: MakeRun) -> None:
    settings = {"temperature": 1.0}
    path, run = run_of(parts=2, validation=0.4, regenerate=settings)
    regenerate(path)
    alone = rows_of(run)
    path, run = run_of(parts=2, validation=0.4, regenerate={**settings, "answers": 3})
    regenerate(path)
    rows = rows_of(run)
    assert set(rows) == {f"{name}{mark}" for name in alone for mark in ("", "~2", "~3")}
    for name, first in alone.items():
        three = [rows[name], rows[f"{name}~2"], rows[f"{name}~3"]]
        assert three[0].token_ids.tolist() == first.token_ids.tolist()
        assert len({tuple(answer_of(row)) for row in three}) == 3
        assert {(row.validation, row.source) for row in three} == {(first.validation, first.source)}
    assert {row.validation for row in rows.values()} == {True, False}
    for part in range(2):
        table, prompts = Layout.of(run).tokens(part).with_suffix(".parquet"), Layout.of(run).prompts(part)
        asked = {prompt.row_id for prompt in read_prompts(prompts.with_suffix(".parquet"))}
        assert {row.row_id.partition("~")[0] for row in read_tokens(table)} == asked


def test_every_answer_is_accounted_for(run_of: MakeRun) -> None:
    settings = {"temperature": 1.0, "answers": 2, "max_new_tokens": 12, "unfinished": "drop"}
    path, run = run_of(max_dropped=1.0, regenerate=settings)
    regenerate(path)
    manifest, listed = tokens_manifest(run), Layout.of(run).tokens(0).with_name("part-0000.dropped.jsonl")
    counts, dropped = manifest["counts"], [json.loads(line)["row_id"] for line in listed.read_text().splitlines()]
    assert counts["rows_in"] == counts["kept"] + counts["dropped"] == 2 * len(ROWS)
    assert 0 < counts["dropped"] == manifest["dropped"]["unfinished"] == len(dropped) < counts["rows_in"]
    assert set(dropped).isdisjoint(rows_of(run))
    assert any(name.removesuffix("~2") in rows_of(run) for name in dropped), "one answer of a prompt falls alone"


def test_answers_that_repeat_one_of_their_prompt_are_counted_and_said(run_of: MakeRun) -> None:
    likeliest = {"temperature": 1.0, "top_k": 1, "answers": 3}
    path, run = run_of([*ROWS[:2], ROWS[0] | {"id": "the same again"}], regenerate=likeliest)
    said = CliRunner().invoke(command, [str(path)], catch_exceptions=False).output
    assert tokens_manifest(run)["notes"]["answer_repeated"] == 2 * 3
    assert "3 prompts, 3 answers each; 6 answers repeat an earlier one of their prompt" in " ".join(said.split())
    path, run = run_of(ROWS[:2], regenerate={**likeliest, "top_k": 0})
    regenerate(path)
    assert "answer_repeated" not in tokens_manifest(run)["notes"]


def test_no_answer_has_the_id_of_another_row_in_whatever_part(run_of: MakeRun) -> None:
    names = [f"{name}{mark}" for name in "abcdefg" for mark in ("", "~2", "@1", "~2@1", "~", "~two")]
    _, run = run_of([{"id": name, "turns": [f"question {name}?"]} for name in names], parts=5)
    rows = [row.row_id for part in range(5) for row in prompts_of(run, part)]
    answers = [each.row_id for part in range(5) for each in each_answer(prompts_of(run, part), 3)]
    pieces = [piece_id(name, turn) for name in answers for turn in (-1, 1, 2)]
    assert len(set(pieces)) == len(pieces) == 9 * len(names)
    assert set(rows) == {f"{name}#0" if name[-1] in "12" else name for name in names}
    assert {"a~2", "a~3", "a~~2", "a~2#0~2"} <= set(answers)


@pytest.mark.parametrize("settings", [{}, {"answers": 2, "temperature": 1.0}], ids=["one", "two"])
def test_an_interrupted_run_asks_only_the_rest_and_gives_the_same_bytes(
    run_of: MakeRun, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    asked = 24 // settings.get("answers", 1)
    many = [{"id": f"row-{i}", "messages": [say(f"question {i}?")]} for i in range(asked)]
    path, run = run_of(many, regenerate={"batch_size": 2, **settings})
    regenerate(path)
    table, manifest = Layout.of(run).tokens(0).with_suffix(".parquet"), Layout.of(run).tokens(0)
    whole = table.read_bytes(), manifest.read_bytes()
    manifest.unlink()

    original, added = AnswerLog.add, []

    def dies(self: AnswerLog, key: str, reply: Reply) -> None:
        added.append(key)
        if len(added) == 12:
            raise KeyboardInterrupt
        original(self, key, reply)

    monkeypatch.setattr(AnswerLog, "add", dies)
    with pytest.raises(click.Abort):
        command.main([str(path)], standalone_mode=False)
    regenerate(path)
    assert (table.read_bytes(), manifest.read_bytes()) == whole
    assert len(added) == 25
    assert max(Counter(added).values()) == 2


def test_the_log_forgets_cut_lines_and_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with AnswerLog(path, "a") as log:
        log.add("x", Reply((1, 2), True))
        log.add("y", Reply((3,), False, True))
    path.write_bytes(path.read_bytes()[:-5])
    with AnswerLog(path, "a") as log:
        assert log.replies == {"x": Reply((1, 2), True)}
        log.add("z", Reply((), False))
        assert b'"z"' in path.read_bytes()  # at once: there may be no end in order
    with AnswerLog(path, "a") as log:
        assert list(log.replies) == ["x", "z"]
    with AnswerLog(path, "b") as log:
        assert not log.replies


ODD_REPLIES: list[Any] = [
    [],
    {"error": "no"},
    {"choices": []},
    {"choices": [None]},
    {"choices": [{"text": None}]},
    {"choices": [{"text": "", "finish_reason": "stop", "token_ids": [10**6]}]},
    {"choices": [{"text": None, "finish_reason": "stop", "token_ids": [None]}]},
    {"choices": [{"text": None, "finish_reason": "stop", "logprobs": [1]}]},
]


class Stub(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that answers `len(prompt)` as an id, then 66, and misbehaves on request."""

    style = "ids"
    finish = "length"
    end = 0
    trouble: ClassVar[Counter[int]] = Counter()
    asked: ClassVar[list[tuple[int, ...]]] = []
    lock = threading.Lock()
    refuse_odd = False
    hold: threading.Event | None = None
    down = False
    key: str | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(*((200, {"data": [{"id": "stub"}]}) if self.allowed() else (401, {"error": "no key"})))

    def allowed(self) -> bool:
        return self.headers["Authorization"] == (None if self.key is None else f"Bearer {self.key}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tuple(body["prompt"])
        with self.lock:
            kind = self.trouble[len(prompt)]
            self.trouble[len(prompt)] += 1
            self.asked.append(prompt)
        if not self.allowed():
            self.reply(401, {"error": "no key"})
        elif self.hold is not None:
            self.hold.wait(60)
        elif self.down:
            self.reply(503, {"error": "restarting"})
        elif self.refuse_odd and len(prompt) % 2:
            self.reply(400, {"error": "too odd"})
        elif self.style == "odd":
            self.reply(200, ODD_REPLIES[len(self.asked) % len(ODD_REPLIES)])
        elif kind == 0 and self.style == "flaky":
            self.reply(429 if len(prompt) % 2 else 500, {"error": "busy"})
        elif kind == 2 and self.style == "flaky":
            self.reply(502, {"error": "cut off"}, missing=50)
        elif kind == 1 and self.style == "flaky":
            self.close_connection = True  # hangs up without a word
            self.connection.close()
        else:
            self.reply(200, {"choices": [self.choice(body)]})

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = [len(body["prompt"]) % 200, 66]
        if self.style == "text":
            return {"text": "th.", "finish_reason": "stop"}
        if self.style == "seed":
            ids = [body["seed"], 66]
        if self.style == "end":
            ids = [66, self.end]
        if self.style == "names":
            return {"text": "", "finish_reason": "length", "logprobs": {"tokens": [f"token_id:{i}" for i in ids]}}
        return {"text": "", "finish_reason": self.finish, "token_ids": ids}

    def reply(self, status: int, body: dict[str, Any], missing: int = 0) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Stub], dict[str, Any]]]:
    """The stub's class, to set its mood, and the settings that lead to it."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(pipeline.server, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pipeline.server_answers, "REFUSALS_TO_STOP", 6)
    mood = type("Mood", (Stub,), {"trouble": Counter(), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), mood)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    yield mood, {"server": {"url": url, "concurrency": 3, "retries": 3, "timeout": 20}}
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("style", ["ids", "names", "flaky"])
def test_a_server_gives_ids_through_any_weather(run_of: MakeRun, stub: Any, style: str) -> None:
    mood, settings = stub
    mood.style = style
    path, run = run_of(ROWS[:9], regenerate=settings)
    regenerate(path)
    rows = rows_of(run)
    assert len(rows) == 9
    for row in rows.values():
        assert answer_of(row) == [int((~row.supervised).sum()) % 200, 66]
        assert not row.finished
    assert "retokenised" not in tokens_manifest(run)["notes"]


def test_a_server_that_wants_a_key_gets_the_environments(
    run_of: MakeRun, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mood, settings = stub
    mood.key = "sk-aSecret"
    path, run = run_of(ROWS[:3], regenerate=settings)
    with pytest.raises(BadInput, match=r"HTTP 401: .*; set OPENAI_API_KEY to a key that this server takes"):
        regenerate(path)
    monkeypatch.setenv("OPENAI_API_KEY", mood.key)
    regenerate(path)
    assert len(rows_of(run)) == 3
    files = [file for file in run.folder.rglob("*") if file.is_file() and b"sk-aSecret" in file.read_bytes()]
    assert files == []


def test_a_server_draws_each_answer_of_a_prompt_with_a_seed_of_its_own(run_of: MakeRun, stub: Any) -> None:
    mood, settings = stub
    mood.style = "seed"
    sampled = {"temperature": 1.0, "seed": 7, "answers": 3}
    path, run = run_of(ROWS[:9], regenerate={**settings, **sampled})
    regenerate(path)
    seeds = {"": 7, "~2": 8, "~3": 9}
    assert {name: answer_of(row) for name, row in rows_of(run).items()} == {
        f"row-{i}{mark}": [seed, 66] for i in range(9) for mark, seed in seeds.items()
    }


def test_an_answer_that_another_token_ended_gets_no_second_end(run_of: MakeRun, stub: Any, tiny_target: Any) -> None:
    mood, settings = stub
    tokenizer = tiny_target.tokenizer
    mood.style, mood.finish = "end", "stop"
    mood.end = next(id_ for id_ in tokenizer.all_special_ids if id_ != tokenizer.eos_token_id)
    path, run = run_of(ROWS[:2], regenerate=settings)
    regenerate(path)
    assert [(answer_of(row), row.finished) for row in rows_of(run).values()] == 2 * [([66, mood.end], True)]


def test_a_signal_is_heard_while_the_server_says_nothing(run_of: MakeRun, stub: Any) -> None:
    mood, settings = stub
    mood.hold = threading.Event()
    path, _ = run_of(ROWS[:5], regenerate=settings)
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(Stopped, match="SIGTERM"):
        regenerate(path)
    assert time.monotonic() - began < 10
    mood.hold.set()


def test_later_turns_meet_the_same_patience(run_of: MakeRun, stub: Any) -> None:
    mood, settings = stub
    mood.style = "flaky"
    mood.finish = "stop"
    path, run = run_of([{"id": "two", "turns": ["first?", "second?"]}], regenerate=settings)
    regenerate(path)
    assert tokens_manifest(run)["dropped"] == {}
    assert len(mood.asked) == 8


def test_replies_without_an_answer_of_the_target_fail_row_by_row(
    run_of: MakeRun, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mood, settings = stub
    mood.style = "odd"
    monkeypatch.setattr(pipeline.server_answers, "REFUSALS_TO_STOP", 99)
    path, run = run_of(ROWS[: len(ODD_REPLIES)], max_dropped=1.0, regenerate=settings)
    regenerate(path)
    assert tokens_manifest(run)["dropped"] == {"server": len(ODD_REPLIES)}
    assert not rows_of(run)


def test_a_later_question_that_the_template_refuses_costs_its_row(
    run_of: MakeRun, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mood, settings = stub
    mood.finish = "stop"
    original = Template.text

    def refuses(self: Template, messages: Any, *more: Any, **most: Any) -> str:
        if messages[-1]["content"] == "second?":
            raise Rejected("template_error", "one question only")
        return original(self, messages, *more, **most)

    monkeypatch.setattr(Template, "text", refuses)
    rows = [{"id": "one", "turns": ["first?"]}, {"id": "two", "turns": ["first?", "second?"]}]
    path, run = run_of(rows, regenerate=settings)
    regenerate(path)
    assert set(rows_of(run)) == {"one"}
    manifest = tokens_manifest(run)
    assert manifest["dropped"] == {"template_error": 1}
    assert manifest["counts"]["rows_in"] == 2


def test_text_replies_are_encoded_and_counted(run_of: MakeRun, stub: Any, tiny_target: Any) -> None:
    mood, settings = stub
    mood.style = "text"
    path, run = run_of(regenerate=settings)
    regenerate(path)
    end = tiny_target.tokenizer.eos_token_id
    assert all(answer_of(row)[-1] == end and row.finished for row in rows_of(run).values())
    assert tokens_manifest(run)["notes"] == {"retokenised": 11}
    assert (
        rows_of(run)["two"].supervised.sum()
        == 2 * len(tiny_target.tokenizer.encode("th.", add_special_tokens=False)) + 2
    )


def test_refused_rows_are_dropped_by_reason_and_the_rest_is_kept(run_of: MakeRun, stub: Any) -> None:
    mood, settings = stub
    mood.refuse_odd = True
    rows = [{"id": f"r{i}", "messages": [say("x" * i)]} for i in range(1, 9)]
    path, run = run_of(rows, max_dropped=0.6, regenerate=settings)
    regenerate(path)
    assert tokens_manifest(run)["dropped"] == {"server": 4}
    listed = Layout.of(run).tokens(0).with_name("part-0000.dropped.jsonl").read_text().splitlines()
    assert all("too odd" in json.loads(line)["detail"] for line in listed)
    assert len(rows_of(run)) == 4


def test_a_dead_server_fails_and_answers_so_far_are_kept(run_of: MakeRun, stub: Any) -> None:
    mood, settings = stub
    path, run = run_of([{"id": f"r{i}", "messages": [say(f"q {i}")]} for i in range(40)], regenerate=settings)
    do_post, choice, answered = mood.do_POST, mood.choice, set()

    def dies(self: Any) -> None:
        mood.down = len(mood.asked) >= 12
        do_post(self)

    def noted(self: Any, body: dict[str, Any]) -> dict[str, Any]:
        answered.add(tuple(body["prompt"]))
        return choice(self, body)

    mood.do_POST, mood.choice = dies, noted
    with pytest.raises(Failure, match="requests in a row failed"):
        regenerate(path)
    assert not Layout.of(run).tokens(0).exists()
    mood.do_POST, mood.choice, mood.down = do_post, choice, False
    mood.asked.clear()
    assert answered
    regenerate(path)
    assert len(rows_of(run)) == 40
    assert not answered & set(mood.asked)


def test_bad_use_is_refused(run_of: MakeRun, tmp_path: Path) -> None:
    path, _ = run_of(ROWS[:2])
    with pytest.raises(BadInput, match="--part 5: this run has parts 0 to 0"):
        regenerate(path, "--part", "5")
    body = yaml.safe_load(path.read_text())
    body["data"]["responses"] = "keep"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(BadInput, match=r"data\.responses is `keep`"):
        regenerate(path)

"""Prompt sets for evaluation: conversations in files or on the hub, read as those to train on are, and presets.

A prompt has one or more *turns*; each turn is the messages that are put before the next answer. A row of `turns`
without answers has a turn for each text of the user; of any other conversation a last answer is left out, unread, and
all others stand. Ids are the row's own `id`, else made of the set's name and the row's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.conversations import REASONS, Conversation, Message, Rejected, asked
from data.errors import BadInput
from data.formats import FORMATS, before_answer, normalise
from data.messages import role_of
from data.settings import Benchmark, Source
from data.sources import Raw, decode, files_of

ASKING = tuple(name for name, shape in FORMATS.items() if shape.messages is not None)
"""Formats whose rows ask something."""


@dataclass(frozen=True)
class BenchmarkPrompt:
    """`turns[t]` are the messages put before answer t; answers come between them. `tools`: JSON schemas, put before
    each."""

    id: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Preset:
    """Where a well-known set lies on the hub and what its prompts look like (z-lab's forms, where it has one)."""

    load: tuple[str, ...]
    """Arguments of `datasets.load_dataset`: id and configuration."""
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]
    """The user texts of a row."""
    files: str | None = None
    """Files to read instead, for repositories that are not plain data sets."""

    @property
    def place(self) -> str:
        return self.files or f"{' '.join(self.load)}, split {self.split}"


_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(row: Mapping[str, Any]) -> list[str]:
    starter = row["starter_code"]
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program",
        f"### Question:\n{row['question_content']}",
        f"### Format: {how}",
        f"```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{ask}\n```python\n{row['prompt']}\n```"]


PRESETS = {
    "gsm8k": Preset(("openai/gsm8k", "main"), "test", lambda row: [row["question"] + _BOXED]),
    "math500": Preset(("HuggingFaceH4/MATH-500",), "test", lambda row: [row["problem"] + _BOXED]),
    "humaneval": Preset(("openai/openai_humaneval",), "test", _humaneval),
    "mbpp": Preset(("google-research-datasets/mbpp", "sanitized"), "test", lambda row: [row["prompt"]]),
    "mt-bench": Preset(("HuggingFaceH4/mt_bench_prompts",), "train", lambda row: list(row["prompt"])),
    "alpaca": Preset(("tatsu-lab/alpaca",), "train", _alpaca),
    "livecodebench": Preset(
        ("json",), "train", _livecodebench, "hf://datasets/livecodebench/code_generation_lite/test.jsonl"
    ),
    "arena-hard": Preset(
        ("json",),
        "train",
        lambda row: [row["prompt"]],
        "hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",
    ),
}


def load_benchmark(name: str, settings: Benchmark, limit: int | None = None) -> list[BenchmarkPrompt]:
    """Prompts of a set, the first `limit` (or the settings' own, if fewer).

    Raises BadInput, in one line, for a file or hub set that is missing, empty, or not made of prompts.
    """
    limits = [value for value in (limit, settings.limit) if value is not None]
    rows = islice(_rows(name, settings), min(limits) if limits else None)
    prompts = list(rows)
    place = settings.path or settings.hub or settings.preset
    if not prompts:
        raise BadInput(f"benchmark `{name}`: {place} holds no prompts; give a file with a `turns` row for each prompt")
    repeated = len(prompts) - len({prompt.id for prompt in prompts})
    if repeated:
        raise BadInput(f"benchmark `{name}`: {place} repeats {repeated} ids; give each prompt an `id` of its own")
    return prompts


def _rows(name: str, settings: Benchmark) -> Iterator[BenchmarkPrompt]:
    if settings.path is not None:
        return _prompts(name, _from_files(name, settings), own_ids=True)
    if settings.preset is None:
        place = f"{settings.hub}, split {settings.split}"
        load = (settings.hub or "", *([settings.subset] if settings.subset else []))
        rows = _from_hub(name, place, lambda datasets: datasets.load_dataset(*load, split=settings.split))
        return _prompts(name, ((f"row {index}", row) for index, row in enumerate(rows)), own_ids=False)
    if settings.preset not in PRESETS:
        raise BadInput(f"benchmark `{name}`: no preset `{settings.preset}`; there are: {', '.join(PRESETS)}")
    preset = PRESETS[settings.preset]
    files = {"data_files": preset.files} if preset.files else {}
    rows = _from_hub(
        name, preset.place, lambda datasets: datasets.load_dataset(*preset.load, split=preset.split, **files)
    )
    return (BenchmarkPrompt(f"{name}-{index}", user_turns(preset.turns(row))) for index, row in enumerate(rows))


def _from_files(name: str, settings: Benchmark) -> Iterator[tuple[str, Raw]]:
    """Places and rows of a file, a folder or a saved data set, blank lines included."""
    source = Source(path=settings.path, split=settings.split)
    try:
        for file, rows in files_of(source, cache=Path()):
            for number, row in enumerate(rows, start=1):
                yield f"{file}, {'line' if isinstance(row, bytes) else 'row'} {number}", row
    except BadInput as error:
        raise BadInput(f"benchmark `{name}`: {error}") from None


def _from_hub(name: str, place: str, load: Callable[[Any], Any]) -> Iterable[Mapping[str, Any]]:
    import datasets

    try:
        return load(datasets)
    except Exception as error:  # the hub client has no common base for offline, missing, gated, renamed
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(
            f"benchmark `{name}`: the hub's {place} cannot be loaded ({why}); where the hub is out of reach, give "
            "`path:` a JSONL file with one `turns` list a row"
        ) from None


def _prompts(name: str, rows: Iterable[tuple[str, Raw]], own_ids: bool) -> Iterator[BenchmarkPrompt]:
    for index, (where, row) in enumerate(rows):
        if row == b"":
            continue
        try:
            record = decode(row)
            turns, tools = _asks(record)
        except Rejected as error:
            detail = f" ({error.detail})" if error.detail else ""
            raise BadInput(
                f"benchmark `{name}`: {where}: {REASONS[error.reason]}{detail}; correct the row or take it out: a "
                f"prompt needs one of {', '.join(FORMATS[asking].needs for asking in ASKING)}"
            ) from None
        own = record.get("id") if own_ids else None
        yield BenchmarkPrompt(f"{name}-{index}" if own is None else str(own), turns, tools)


def _asks(record: Any) -> tuple[tuple[tuple[Message, ...], ...], tuple[dict[str, Any], ...]]:
    """Turns and tools of a decoded row.

    Raises Rejected.
    """
    name = _format(record) if isinstance(record, Mapping) else None
    if name is None:
        normalise(record)
        raise Rejected("nothing_to_answer", "text or token ids ask no question")
    conversation = normalise(before_answer(record, name), "messages")
    if name == "turns" and not any(role_of(turn) == "assistant" for turn in FORMATS[name].messages(record)):
        return _each_question(conversation), conversation.tools
    return (conversation.messages,), conversation.tools


def _each_question(conversation: Conversation) -> tuple[tuple[Message, ...], ...]:
    """A turn for each text of the user in a row that has no answers.

    Raises Rejected when that leaves a message out: nothing of a row is lost in silence.
    """
    turns = tuple(map(tuple, asked(conversation)))
    taken, messages = sum(map(len, turns)), conversation.messages
    if taken < len(messages):
        place = f"message {taken + 1} of {len(messages)}, of role {messages[taken]['role']}"
        raise Rejected("not_asked", f"{place}; each question ends with the user's text")
    return turns


def _format(record: Mapping[str, Any]) -> str | None:
    """The format to read a row in that may have the fields of several: one that asks, a list of `turns` first."""
    if isinstance(record.get("turns"), list):
        return "turns"
    return next((name for name in ASKING if FORMATS[name].fits(record)), None)


def user_turns(texts: Iterable[str]) -> tuple[tuple[Message, ...], ...]:
    """One user message a turn."""
    return tuple(({"role": "user", "content": text},) for text in texts)

"""Prompts of the evaluation among the rows to train on.

Texts are compared by keys that case, spacing and punctuation do not change. Wrappers hide nothing: a benchmark's prompt
is known by all of it and without the words that all prompts of its set begin or end with; a row's text is looked up as
it is and without its first line, its last, and both. Rows of plain text and of ids are looked up line by line too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path

from data.benchmarks import PRESETS, load_benchmark
from data.conversations import Conversation
from data.errors import BadInput
from data.manifest import fingerprint
from data.parts import read_prompts
from data.settings import Benchmark, Run
from data.tokens import stable_hash

WRAPPER = 4
"""Words at least that all prompts of a set share at an end before they count as its wrapper."""
CORE = 3
"""Words at least that a prompt must have without its wrapper to be known by them."""


@dataclass(frozen=True)
class Benchmarks:
    """Keys of the prompts of each benchmark by name, and why others could not be read."""

    keys: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Benchmarks:
        """All benchmarks of a run; a set on the hub that is out of reach is unread.

        Raises BadInput for a file that is missing, empty or has an unusable row, and for a preset that does not exist.
        """
        keys, unread = {}, {}
        for name, settings in run.eval.benchmarks.items():
            try:
                keys[name] = prompt_keys(_questions(name, settings))
            except BadInput as error:
                if settings.path is not None or (settings.preset is not None and settings.preset not in PRESETS):
                    raise
                unread[name] = str(error)
        return cls(keys, unread)

    def record(self) -> dict[str, str]:
        """What identifies them: a hash of each one's keys, or why there are none."""
        return {**{name: fingerprint(sorted(keys)) for name, keys in self.keys.items()}, **self.unread}

    def lines(self, found: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """What a person reads, given the ids of rows that ask what a benchmark asks."""
        for name in self.keys:
            ids = found.get(name, ())
            first = f", first: {', '.join(ids[:3])}" if ids else ""
            yield f"contamination: {len(ids)} rows ask what benchmark `{name}` asks{first}"
        for name, why in self.unread.items():
            yield f"contamination: rows are not compared with benchmark `{name}`: {why}"


def _questions(name: str, settings: Benchmark) -> list[str]:
    """What users ask in a benchmark, read as `eval` reads it: what it would refuse after training is refused now."""
    messages = chain.from_iterable(turn for prompt in load_benchmark(name, settings) for turn in prompt.turns)
    return [message["content"] for message in messages if message["role"] == "user"]


def words_of(text: str) -> list[str]:
    return re.sub(r"\W+", " ", text).lower().split()


def key_of(words: Iterable[str]) -> int:
    return stable_hash(" ".join(words))


def prompt_keys(texts: Sequence[str]) -> frozenset[int]:
    """Keys of a benchmark's prompts, with and without their common wrapper. Prompts without a word have none."""
    split = [words for words in map(words_of, texts) if words]
    start, end = shared(split), shared([words[::-1] for words in split])
    cores = [words[start : len(words) - end] for words in split]
    return frozenset(map(key_of, [*split, *(core for core in cores if len(core) >= CORE)]))


def shared(texts: Sequence[Sequence[str]]) -> int:
    """How many words all texts begin with; 0 where they are too few to be a wrapper, or there is only one text."""
    same = takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))
    count = sum(1 for _ in same) if len(texts) > 1 else 0
    return count if count >= WRAPPER else 0


def looked_up(conversation: Conversation, decoded: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Texts of a row under which a benchmark's prompt could stand. `decoded`: ids as text."""
    asked = [message["content"] for message in conversation.messages if message["role"] == "user"]
    if conversation.token_ids is not None:
        asked.append(decoded(conversation.token_ids))
    if conversation.text is not None:
        asked.append(conversation.text)
    for text in asked:
        yield text
        lines = text.strip().split("\n")
        if len(lines) > 1:
            yield from ("\n".join(part) for part in (lines[1:], lines[:-1], lines[1:-1]))
        if not conversation.messages:
            yield from lines


def benchmarks_in(
    conversation: Conversation, known: Mapping[str, frozenset[int]], decoded: Callable[[Sequence[int]], str]
) -> list[str]:
    """Names of the benchmarks, of those `known` by their keys, that ask what is asked here."""
    if not known:
        return []
    found = {key_of(words) for words in map(words_of, looked_up(conversation, decoded)) if words}
    return [name for name, keys in known.items() if not keys.isdisjoint(found)]


def recount(
    prompts: Iterable[Path], known: Mapping[str, frozenset[int]], decoded: Callable[[Sequence[int]], str]
) -> dict[str, list[str]]:
    """Ids of the rows of prepared parts (tables of prompts) that ask what a benchmark asks, by its name."""
    found: dict[str, list[str]] = {name: [] for name in known}
    for prompt in chain.from_iterable(map(read_prompts, prompts)):
        for name in benchmarks_in(prompt.conversation, known, decoded):
            found[name].append(prompt.row_id)
    return found

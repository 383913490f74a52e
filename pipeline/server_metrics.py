"""A server whose own drafting is measured: drives vLLM or SGLang over prompts and reads its acceptance counters.

vLLM counts drafts, drafted and accepted tokens under `/metrics`: acceptance is 1 + accepted / drafts, bonus counted,
pooled, over the difference of two readings. SGLang gives a gauge of its own running mean, one for each of its ranks.
Other traffic on the server spoils both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from data.errors import BadInput
from data.settings import Server
from pipeline.decode import Prompt
from pipeline.sampling import Sampling
from pipeline.server import Connection, Refused

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SGLANG_LENGTH = "sglang:spec_accept_length"

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[-+]?\d[-+.\deE]*)(?:\s|$)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Served:
    """An answer as far as the measure needs it: its text for the next turn, and its new tokens."""

    text: str
    tokens: int


@dataclass
class Metrics:
    """Sums of the counters that matter, over all labels; `by_position` accepted drafts at slots 1, 2, ...; `lengths`
    that ranks which have drafted tell."""

    values: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read Prometheus' text format; lines that are no samples are passed over."""
        metrics = cls()
        for match in map(_SAMPLE.match, text.splitlines()):
            if match is None:
                continue
            name, value = match["name"], float(match["value"])
            if name == SGLANG_LENGTH and value > 0:  # a gauge: ranks are not added up
                metrics.lengths.append(value)
            metrics.values[name] = metrics.values.get(name, 0.0) + value
            position = _POSITION.search(match["labels"] or "")
            if name == ACCEPTED_AT and position:
                slot = int(position[1]) + 1
                metrics.by_position[slot] = metrics.by_position.get(slot, 0.0) + value
        return metrics

    def since(self, before: Metrics) -> dict[str, Any]:
        """Acceptance between two readings: `source`, `acceptance`, `drafts`, `per_slot`; empty when not measured."""
        drafts = self.values.get(DRAFTS, 0.0) - before.values.get(DRAFTS, 0.0)
        if drafts > 0:
            hits = [self.by_position[k] - before.by_position.get(k, 0.0) for k in sorted(self.by_position)]
            reached = [drafts, *hits[:-1]]
            accepted = self.values.get(ACCEPTED, 0.0) - before.values.get(ACCEPTED, 0.0)
            return {
                "source": "vLLM counters, pooled over steps, bonus token counted",
                "acceptance": 1 + accepted / drafts,
                "drafts": int(drafts),
                "draft_tokens": int(self.values.get(DRAFTED, 0.0) - before.values.get(DRAFTED, 0.0)),
                "per_slot": [hit / count if count else None for hit, count in zip(hits, reached, strict=False)],
            }
        if self.lengths:
            ranks = f" of {len(self.lengths)} ranks" if len(self.lengths) > 1 else ""
            return {
                "source": f"SGLang gauge: its own running mean{ranks}, bonus token counted",
                "acceptance": sum(self.lengths) / len(self.lengths),
            }
        return {}


class MeasuredServer(Connection):
    """A server with a drafter of its own. Network errors are tried again, then raise Failure; refusals BadInput."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, "`--model`")

    def metrics(self) -> Metrics:
        """Counters as they stand; none when the server has no `/metrics`."""
        try:
            return Metrics.parse(self.request(f"{self.root}/metrics", read=bytes.decode))
        except Refused:
            return Metrics()

    def complete(self, prompt: Prompt, max_new_tokens: int, plan: Sampling) -> Served:
        try:
            made = self.completion(prompt.ids, max_new_tokens, plan)
        except Refused as error:
            raise BadInput(f"{self.base}/completions: prompt {prompt.id}: {error}") from None
        choice = made["choices"][0]
        tokens = int((made.get("usage") or {}).get("completion_tokens", 0))
        return Served(choice["text"], tokens)

    def run(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        plan: Sampling,
        check_stop: Callable[[], None],
        answered: Callable[[], None],
    ) -> tuple[list[Served], float]:
        """All prompts: replies in order, and wall seconds. `answered` is called after each reply, `check_stop` as
        `replies` says; when one raises, or a request fails, no other one is begun."""
        started, found = time.perf_counter(), {}
        with closing(
            self.replies(enumerate(prompts), lambda each: self.complete(each[1], max_new_tokens, plan), check_stop)
        ) as replies:
            for (number, _), reply in replies:
                if isinstance(reply, Exception):
                    raise reply
                found[number] = reply
                answered()
        return [found[number] for number in range(len(prompts))], time.perf_counter() - started

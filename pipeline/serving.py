"""Drives an OpenAI-compatible server (vLLM, SGLang) over prompts and reads its own acceptance counters.

Prompts go as token ids to `/v1/completions`, so that the server sees exactly what decoding here sees. vLLM counts
drafts, drafted and accepted tokens under `/metrics`: acceptance is 1 + accepted / drafts, bonus counted, pooled, over
the difference of two readings. SGLang gives a gauge of its own running mean. Other traffic on the server spoils both.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from data.errors import BadInput, Failure
from data.settings import Server
from pipeline.decode import Prompt
from pipeline.sampling import Sampling

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SGLANG_LENGTH = "sglang:spec_accept_length"

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[-+]?\d[-+.\deE]*)(?:\s|$)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Reply:
    """A server's answer: text, new tokens, and whether a stop ended it."""

    text: str
    tokens: int
    finished: bool


@dataclass
class Metrics:
    """Sums of the counters that matter, over all labels; `by_position` accepted drafts at slots 1, 2, ..."""

    values: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read Prometheus' text format; lines that are no samples are passed over."""
        metrics = cls()
        for match in map(_SAMPLE.match, text.splitlines()):
            if match is None:
                continue
            name, value = match["name"], float(match["value"])
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
        if self.values.get(SGLANG_LENGTH):
            return {
                "source": "SGLang gauge: its own running mean, bonus token counted",
                "acceptance": self.values[SGLANG_LENGTH],
            }
        return {}


class Client:
    """Talks to one server. Network errors are tried again, then raise Failure; refusals raise BadInput."""

    def __init__(self, server: Server) -> None:
        self.server = server
        base = server.url.rstrip("/")
        self.api = base if base.endswith("/v1") else f"{base}/v1"
        self.root = self.api.removesuffix("/v1")
        self.model = server.model or self._first_model()

    def _first_model(self) -> str:
        listed = json.loads(self._call(f"{self.api}/models")).get("data") or []
        if not listed:
            raise BadInput(f"{self.api}/models lists no model; name one with `--model`")
        return str(listed[0]["id"])

    def metrics(self) -> Metrics:
        """Counters as they stand; none when the server has no `/metrics`."""
        try:
            return Metrics.parse(self._call(f"{self.root}/metrics"))
        except BadInput:
            return Metrics()

    def complete(self, prompt: Prompt, max_new_tokens: int, plan: Sampling) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt.ids),
            "max_tokens": max_new_tokens,
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "seed": plan.seed,
        }
        if plan.top_k:
            body["top_k"] = plan.top_k
        made = json.loads(self._call(f"{self.api}/completions", body))
        choice = made["choices"][0]
        tokens = int((made.get("usage") or {}).get("completion_tokens", 0))
        return Reply(choice["text"], tokens, choice.get("finish_reason") == "stop")

    def run(self, prompts: Sequence[Prompt], max_new_tokens: int, plan: Sampling) -> tuple[list[Reply], float]:
        """All prompts, `concurrency` at once: replies in order, and wall seconds."""
        started = time.perf_counter()
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            replies = list(pool.map(lambda prompt: self.complete(prompt, max_new_tokens, plan), prompts))
        return replies, time.perf_counter() - started

    def _call(self, url: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        for attempt in range(self.server.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.server.timeout) as reply:
                    return reply.read().decode()
            except urllib.error.HTTPError as error:
                text = " ".join(error.read().decode(errors="replace").split())[:200]
                error.close()
                if error.code < 500 and error.code != 429:
                    raise BadInput(f"{url}: the server says {error.code}: {text}") from None
                why = f"{error.code} {text}"
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                why = str(getattr(error, "reason", error))
            if attempt < self.server.retries:
                time.sleep(min(2.0**attempt * 0.2, 30.0))
        raise Failure(f"{url}: no answer after {self.server.retries + 1} attempts ({why}); is the server up?")

"""An OpenAI-compatible server, and such a one as the source of answers: many requests at once, patience, ids not text.

Prompts go as token ids to `/completions`, so that the server sees exactly what training sees, and token ids are asked
for in return (vLLM: `return_token_ids`; else log-probabilities named by id). A reply that is only text is encoded, and
counted as such: for some answers that gives other ids.
"""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from typing import Any, Protocol

from data.answers import Reply
from data.errors import BadInput, Failure
from data.settings import Regenerate, Server

FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubles with each, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 60.0
REFUSALS_TO_STOP = 20
"""Failures in a row, without a success between, after which the server counts as broken."""


@dataclass(frozen=True)
class Question:
    """Ids to continue by at most `limit` tokens."""

    key: str
    ids: Sequence[int]
    limit: int


class Refused(Exception):
    """The server answers, but not this request. `status` is its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class Sampled(Protocol):
    """How an answer is drawn: greedy at temperature 0."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class Connection:
    """One server, asked with patience. `setting`: where its model can be named, for messages.

    Raises BadInput when it lists no model and none is named.
    """

    def __init__(self, server: Server, setting: str) -> None:
        self.server = server
        base = server.url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.root = self.base.removesuffix("/v1")
        self.stopping = threading.Event()
        self.model = server.model or self._first_model(setting)

    def _first_model(self, setting: str) -> str:
        try:
            return str(self.request(f"{self.base}/models")["data"][0]["id"])
        except Refused as error:
            raise BadInput(f"{self.base}/models: {error}; name a model in {setting}") from None
        except (LookupError, TypeError):
            raise BadInput(f"{self.base}/models lists no model; name one in {setting}") from None

    def completion(self, ids: Sequence[int], limit: int, plan: Sampled, **more: Any) -> dict[str, Any]:
        """What the server says to `ids`, continued by at most `limit` tokens; `more` joins the request.

        Raises Refused, or Failure when all attempts fail or the reply holds no answer.
        """
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": limit,
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "seed": plan.seed,
            **({"top_k": plan.top_k} if plan.top_k else {}),
            **more,
        }
        reply = self.request(f"{self.base}/completions", body)
        if not is_answer(reply):
            raise Failure(f"{self.base}/completions: a reply without an answer: {json.dumps(reply)[:200]}")
        return reply

    def request(self, url: str, body: dict[str, Any] | None = None, read: Callable[[bytes], Any] = json.loads) -> Any:
        """One request, tried again with growing pauses when the server is busy, restarting or out of reach.

        Raises Refused for what trying again cannot mend, Failure when patience ends.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        why = ""
        for attempt in range(self.server.retries + 1):
            pause = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            try:
                with urllib.request.urlopen(request, timeout=self.server.timeout) as reply:
                    return read(reply.read())
            except urllib.error.HTTPError as error:
                with error:
                    why = f"HTTP {error.code} " + " ".join(error.read().decode(errors="replace").split())[:200]
                if error.code < 500 and error.code not in (408, 409, 425, 429):
                    raise Refused(error.code, why.partition(" ")[2].partition(" ")[2]) from None
                pause = max(pause, retry_after(error.headers.get("Retry-After")))
            except (OSError, HTTPException, ValueError) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
            if attempt < self.server.retries and self.stopping.wait(pause):
                break
        raise Failure(f"{url}: no answer in {self.server.retries + 1} attempts ({why}); is the server up?")


class Client(Connection):
    """A server that answers for the target. `encode` turns text into ids where the server gives none; `ends` are ids
    that end a turn, `end` the one that is put where the server leaves it out; `vocabulary`: ids that the target knows.
    """

    def __init__(
        self,
        server: Server,
        plan: Regenerate,
        encode: Callable[[str], list[int]],
        ends: Sequence[int],
        end: int,
        vocabulary: int,
    ) -> None:
        super().__init__(server, "data.regenerate.server.model")
        self.plan, self.encode, self.ends, self.end, self.vocabulary = plan, encode, frozenset(ends), end, vocabulary

    def answers(self, questions: Iterable[Question]) -> Iterator[tuple[str, Reply | str]]:
        """Replies, or why there is none, in the order of their arrival; `concurrency` requests are under way.

        Raises Failure when the server has stopped working.
        """
        self.stopping.clear()
        waiting, failures = iter(questions), 0
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            running = {self._submit(pool, question) for question in islice(waiting, 2 * self.server.concurrency)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    running |= {self._submit(pool, question) for question in islice(waiting, len(done))}
                    for future in done:
                        key, result = future.result()
                        failures = failures + 1 if isinstance(result, str) else 0
                        yield key, result
                    if failures >= REFUSALS_TO_STOP:
                        raise Failure(f"{self.base}: {failures} requests in a row failed, last: {result}; is it up?")
            finally:
                self.stopping.set()
                for future in running:
                    future.cancel()

    def _submit(self, pool: ThreadPoolExecutor, question: Question) -> Future[tuple[str, Reply | str]]:
        return pool.submit(self._ask, question)

    def _ask(self, question: Question) -> tuple[str, Reply | str]:
        try:
            return question.key, self.reply(question)
        except (Refused, Failure) as error:
            return question.key, str(error)

    def reply(self, question: Question) -> Reply:
        """One answer.

        Raises Refused, or Failure when all attempts fail or the answer is not the target's.
        """
        asking = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        made = self.completion(question.ids, question.limit, self.plan, skip_special_tokens=False, **asking)
        choice = made["choices"][0]
        finished = choice.get("finish_reason") == "stop"
        ids = token_ids(choice)
        from_text = ids is None
        if ids is None:
            ids = self.encode(choice["text"])
        if max(ids, default=0) >= self.vocabulary:
            raise Failure(
                f"{self.base}: id {max(ids)}, the target knows {self.vocabulary}: another model answers there"
            )
        if finished and (not ids or ids[-1] not in self.ends):
            ids = [*ids, self.end]  # servers leave out the token that stopped them
        return Reply(tuple(ids[: question.limit + 1]), finished, from_text)


def is_answer(reply: Any) -> bool:
    """Whether a reply's first choice has text or ids."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and (isinstance(first.get("text"), str) or token_ids(first) is not None)


def token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Ids of a reply, wherever this kind of server puts them; None when it gives only text."""
    if isinstance(choice.get("token_ids"), list):
        return [int(token) for token in choice["token_ids"]]
    names = (choice.get("logprobs") or {}).get("tokens") or []
    if names and all(str(name).startswith("token_id:") for name in names):
        return [int(name.partition(":")[2]) for name in names]
    return None


def retry_after(header: str | None) -> float:
    """Seconds that a server asks to be left alone, at most `LONGEST_PAUSE`."""
    return min(float(header), LONGEST_PAUSE) if header and header.isdigit() else 0.0

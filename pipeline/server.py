"""An OpenAI-compatible server, asked with patience: the connection that both who ask for answers
(`pipeline/server_answers.py`) and who measure the server's own drafting (`pipeline/server_metrics.py`) use.

Prompts go as token ids to `/completions`, so that the server sees exactly what training and decoding here see. A key
comes from the environment variable `OPENAI_API_KEY`; it goes to the server and nowhere else, into no log and no error.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPException
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from data.errors import BadInput, Failure
from data.settings import Server
from pipeline.console import say

KEY = "OPENAI_API_KEY"
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubles with each, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 60.0
FIRST_TIMEOUT = 10.0
"""Seconds that the first request may take: nothing is computed for it, so a server that is slower is not there."""
LISTEN = 0.5
"""Seconds between two looks for a signal while the server says nothing."""

Q, R = TypeVar("Q"), TypeVar("R")


class Refused(Exception):
    """The server answers, but not this request."""

    def __init__(self, status: int, text: str) -> None:
        remedy = f"; set {KEY} to a key that this server takes" if status in (401, 403) else ""
        super().__init__(f"HTTP {status}: {text}{remedy}")


class Sampled(Protocol):
    """How an answer is drawn: greedy at temperature 0."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class Connection:
    """One server. `setting`: where its model can be named, for messages.

    Raises Failure when it is not there, BadInput when it lists no model and none is named, or when the key is none.
    """

    def __init__(self, server: Server, setting: str) -> None:
        self.server, self.key = server, api_key()
        base = server.url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.root = self.base.removesuffix("/v1")
        self.stopping = threading.Event()
        say(f"connecting to {self.base}" + (f" with the key in {KEY}" if self.key else ""))
        self.model = self._contact(setting)

    def _contact(self, setting: str) -> str:
        """The model to ask for: the one that is named, else the first that the server lists. Asks in any case, so that
        a server that is not there is known before anything is prepared for it."""
        try:
            body = self.request(f"{self.base}/models", timeout=min(FIRST_TIMEOUT, self.server.timeout))
            return self.server.model or str(body["data"][0]["id"])
        except Refused as error:
            why = f"{self.base}/models: {error}; name a model in {setting}"
        except (LookupError, TypeError):
            why = f"{self.base}/models lists no model; name one in {setting}"
        if self.server.model is None:
            raise BadInput(why)
        return self.server.model

    def replies(
        self, questions: Iterable[Q], reply: Callable[[Q], R], check_stop: Callable[[], None]
    ) -> Iterator[tuple[Q, R | Exception]]:
        """Each question and its `reply`, or what that raised, in the order of their arrival; `concurrency` requests
        are under way.

        `check_stop` is called at least every `LISTEN` seconds and may raise. When it does, or this is closed early, no
        other request is begun, and what is under way is let go.
        """
        self.stopping.clear()
        waiting, under_way = iter(questions), 0
        asked: SimpleQueue[Q | None] = SimpleQueue()
        arrived: SimpleQueue[tuple[Q, R | Exception]] = SimpleQueue()

        def serve() -> None:
            while (question := asked.get()) is not None and not self.stopping.is_set():
                try:
                    arrived.put((question, reply(question)))
                except Exception as error:  # for whoever reads the replies
                    arrived.put((question, error))

        for _ in range(self.server.concurrency):  # daemons: no process waits at its end for a server that says nothing
            threading.Thread(target=serve, daemon=True).start()
        try:
            while True:
                for question in islice(waiting, 2 * self.server.concurrency - under_way):
                    asked.put(question)
                    under_way += 1
                if not under_way:
                    return
                check_stop()
                try:
                    yield arrived.get(timeout=LISTEN)
                except Empty:
                    continue
                under_way -= 1
        except BaseException:
            self.stopping.set()
            raise
        finally:
            for _ in range(self.server.concurrency):
                asked.put(None)

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
            raise Failure(f"{self.base}/completions: a reply without an answer: {self._told(json.dumps(reply))}")
        return reply

    def request(
        self,
        url: str,
        body: dict[str, Any] | None = None,
        read: Callable[[bytes], Any] = json.loads,
        timeout: float | None = None,
    ) -> Any:
        """One request, tried again with growing pauses when the server is busy, restarting or out of reach.

        Raises Refused for what trying again cannot mend, Failure when patience ends.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if self.key is not None:  # not to where the server may send us on to
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        why = ""
        for attempt in range(self.server.retries + 1):
            pause = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            try:
                with urllib.request.urlopen(request, timeout=timeout or self.server.timeout) as reply:
                    return read(reply.read())
            except urllib.error.HTTPError as error:
                said = self._told(body_of(error))
                if error.code < 500 and error.code not in (408, 409, 425, 429):
                    raise Refused(error.code, said) from None
                why = f"HTTP {error.code} {said}"
                pause = max(pause, retry_after(error.headers.get("Retry-After")))
            except (OSError, HTTPException, ValueError) as error:
                why = self._told(str(getattr(error, "reason", error))) or type(error).__name__
            if attempt < self.server.retries and self.stopping.wait(pause):
                break
        raise Failure(f"{url}: no answer in {self.server.retries + 1} attempts ({why}); is the server up?")

    def _told(self, text: str) -> str:
        """What a server says, in one short line; some say the key that they were given."""
        if self.key is not None:
            text = text.replace(self.key, f"[{KEY}]")
        return " ".join(text.split())[:200]


def body_of(error: urllib.error.HTTPError) -> str:
    """What came with an error, nothing when the connection broke before its end."""
    try:
        with error:
            return error.read().decode(errors="replace")
    except (OSError, HTTPException):
        return ""


def api_key() -> str | None:
    """The key that the environment holds for servers, None when it holds none.

    Raises BadInput, without showing it, when it cannot be one.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadInput(f"the environment variable {KEY} holds characters that no key has: set it again")
    return key or None


def is_answer(reply: Any) -> bool:
    """Whether a reply's first choice has text or ids."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and (isinstance(first.get("text"), str) or token_ids(first) is not None)


def token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Ids of a reply, wherever this kind of server puts them; None when it gives only text."""
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(type(number) is int and number >= 0 for number in ids):
        return ids
    logprobs = choice.get("logprobs")
    names = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    found = [re.fullmatch(r"token_id:(\d+)", str(name)) for name in names or ()]
    return [int(match[1]) for match in found if match] if found and all(found) else None


def retry_after(header: str | None) -> float:
    """Seconds that a server asks to be left alone, at most `LONGEST_PAUSE`."""
    return min(float(header), LONGEST_PAUSE) if header and header.isdigit() else 0.0

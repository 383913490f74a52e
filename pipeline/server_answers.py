"""A server as the source of answers: many requests at once, ids not text.

Token ids are asked for (vLLM: `return_token_ids`; else log-probabilities named by id). A reply that is only text is
encoded, and counted as such: for some answers that gives other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

from data.answers import Reply
from data.errors import Failure
from data.settings import Regenerate, Server
from pipeline.server import Connection, Refused, token_ids

REFUSALS_TO_STOP = 20
"""Failures in a row, without a success between, after which the server counts as broken."""


@dataclass(frozen=True)
class Question:
    """Ids to continue by at most `limit` tokens, sampled with `seed`."""

    key: str
    ids: Sequence[int]
    limit: int
    seed: int


class AnsweringServer(Connection):
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
        asking = {"seed": question.seed, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
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

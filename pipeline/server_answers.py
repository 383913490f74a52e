"""A server as the source of answers: many requests at once, ids not text.

Token ids are asked for (vLLM: `return_token_ids`; else log-probabilities named by id). A reply that is only text is
encoded, and counted as such: for some answers that gives other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

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
    that can end a turn, `end` the one that is put where the server leaves it out; `vocabulary`: ids that the target
    knows.
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

    def answers(
        self, questions: Iterable[Question], check_stop: Callable[[], None]
    ) -> Iterator[tuple[str, Reply | str]]:
        """Replies, or why there is none, in the order of their arrival; `check_stop` is that of `replies`.

        Raises Failure when the server has stopped working.
        """
        failures = 0
        with closing(self.replies(questions, self.reply, check_stop)) as replies:
            for question, result in replies:
                if not isinstance(result, Reply | Refused | Failure):
                    raise result
                failures = 0 if isinstance(result, Reply) else failures + 1
                yield question.key, result if isinstance(result, Reply) else str(result)
                if failures >= REFUSALS_TO_STOP:
                    raise Failure(f"{self.base}: {failures} requests in a row failed, last: {result}; is it up?")

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

"""Raw rows in, token rows or prompts out, and a reason for each row that is left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, Rejected, asked, with_system
from data.formats import detect, normalise, row_id
from data.settings import Data
from data.sources import Chunk, decode
from pipeline.contamination import benchmarks_in
from pipeline.encoding import Draft, Encoder, Rendered
from pipeline.template import Template, template_of


@dataclass(frozen=True)
class Kept:
    """A row that is used. `row_id` is its own or its content's digest; `pieces` are its token rows, none before it is
    answered; `prompt_tokens` is the length of its first prompt."""

    row_id: str
    own_id: bool
    conversation: Conversation
    format: str
    pieces: tuple[Rendered, ...]
    prompt_tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Pending:
    """A row between rendering and encoding: its token rows, encoded or not, and what `Kept` will say of it."""

    conversation: Conversation
    format: str
    drafts: tuple[Draft | Rendered, ...]
    prompt_tokens: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Dropped:
    """A row that is not used: `place` is file and row number, `row_id` its id or, without one, its place."""

    row_id: str
    place: str
    reason: str
    detail: str


class Preparer:
    """Prepares rows for one tokenizer under one run's `data` settings.

    `benchmarks`: keys of the prompts of evaluation sets by name, to count contamination.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: Data, benchmarks: Mapping[str, frozenset[int]] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.benchmarks = dict(benchmarks or {})
        self.vocabulary = len(tokenizer)

    @cached_property
    def template(self) -> Template:
        return template_of(self.tokenizer, self.settings.template_arguments)

    def chunk(self, chunk: Chunk, wanted: str = "auto") -> tuple[list[Kept], list[Dropped]]:
        """All rows of a chunk, each either kept or dropped. `wanted`: the source's format."""
        kept: list[Kept] = []
        dropped: list[Dropped] = []
        pending: list[tuple[str, Pending]] = []
        for at, raw in enumerate(chunk.rows, chunk.first):
            record, place = None, f"{chunk.name}:{at + 1}"
            try:
                record = decode(raw)
                pending.append((place, self.pending(record, wanted)))
            except Rejected as error:
                dropped.append(Dropped(known_id(record) or place, place, error.reason, error.detail))
        encoded = iter(self.encoded([draft for _, row in pending for draft in row.drafts]))
        for place, row in pending:
            try:
                kept.append(self.kept(row, list(islice(encoded, len(row.drafts)))))
            except Rejected as error:
                dropped.append(Dropped(row.conversation.row_id or place, place, error.reason, error.detail))
        return kept, dropped

    def row(self, record: Any, wanted: str = "auto") -> Kept:
        """One decoded row.

        Raises Rejected.
        """
        pending = self.pending(record, wanted)
        return self.kept(pending, self.encoded(pending.drafts))

    def pending(self, record: Any, wanted: str) -> Pending:
        """A decoded row, rendered and not encoded yet.

        Raises Rejected.
        """
        own = normalise(record, wanted)
        conversation = with_system(own, self.settings.system_prompt)
        name = detect(record) if wanted == "auto" else wanted
        if self.settings.responses == "regenerate":
            return Pending(own, name, (), self.first_prompt(conversation), self.contamination(own))
        drafts, notes = self.drafts(conversation)
        return Pending(own, name, tuple(drafts), None, (*notes, *self.contamination(own)))

    def encoded(self, drafts: Sequence[Draft | Rendered]) -> list[Rendered | Rejected]:
        """Drafts as rows, together; what is a row already stays."""
        texts = [draft for draft in drafts if isinstance(draft, Draft)]
        rows = iter(self.template.encoder.rendered(texts) if texts else ())
        return [next(rows) if isinstance(draft, Draft) else draft for draft in drafts]

    def kept(self, pending: Pending, rows: Sequence[Rendered | Rejected]) -> Kept:
        """The row with those of its token rows that are usable.

        Raises Rejected when it should have some and has none.
        """
        usable, problem = [], Rejected("no_answer")
        for row in rows:
            try:
                usable.append(self.fitted(row))
            except Rejected as error:
                problem = error
        if not usable and pending.prompt_tokens is None:
            raise problem
        prompt = pending.prompt_tokens
        own = pending.conversation
        notes = [note for row in usable for note in row.notes] + ["answer_not_used"] * (len(rows) - len(usable))
        return Kept(
            own.row_id if own.row_id is not None else own.digest(),
            own.row_id is not None,
            own,
            pending.format,
            tuple(usable),
            int(np.argmax(usable[0].supervised)) if prompt is None else prompt,
            (*pending.notes, *notes),
        )

    def first_prompt(self, conversation: Conversation) -> int:
        """Tokens of the first prompt that the target will answer.

        Raises Rejected when there is none, or when it leaves no room for an answer.
        """
        length = len(self.template.prompt(asked(conversation)[0], conversation.tools))
        self.require_room(length)
        return length

    def require_room(self, prompt_tokens: int) -> None:
        if prompt_tokens + self.settings.min_supervised > self.settings.max_length:
            raise Rejected("too_long", f"the prompt alone has {prompt_tokens} tokens")

    def drafts(self, conversation: Conversation) -> tuple[list[Draft | Rendered], tuple[str, ...]]:
        """Token rows of a row that brings its answers, encoded or not, and what to count about it.

        Raises Rejected.
        """
        if conversation.token_ids is not None:
            return [self.from_ids(conversation)], ()
        if conversation.text is not None:
            ids = self.plain(conversation.text)
            return [Rendered(ids, np.ones(len(ids), bool), self.ends(ids))], ()
        messages, notes = up_to_last_answer(conversation)
        if conversation.response_ids is not None and not notes:
            return [self.with_ids(conversation)], ()
        ended = conversation.finished is not False
        return self.template.drafts(messages, conversation.tools, self.settings.supervise, ended), notes

    def plain(self, text: str) -> np.ndarray:
        """Ids int32 [T] of text as the tokenizer encodes it; a BOS that the text prints itself is not added again."""
        ids = self.tokenizer.encode(text)
        printed = self.tokenizer.bos_token_id is not None and ids[:2] == [self.tokenizer.bos_token_id] * 2
        return np.asarray(ids[1:] if printed else ids, np.int32)

    def from_ids(self, conversation: Conversation) -> Rendered:
        ids = self.in_vocabulary(conversation.token_ids or ())
        given = conversation.supervised
        mask = np.ones(len(ids), bool) if given is None else np.asarray(given, bool)
        ended = conversation.finished if conversation.finished is not None else self.ends(ids)
        return Rendered(ids, mask, ended)

    def with_ids(self, conversation: Conversation) -> Draft:
        """The last answer's own ids after its rendered prompt."""
        answer = self.in_vocabulary(conversation.response_ids or ())
        if not len(answer):
            raise Rejected("empty_answer", "response_ids is empty")
        ended = self.ends(answer) if conversation.finished is None else conversation.finished
        notes: tuple[str, ...] = ()
        if ended and not self.ends(answer):
            answer = np.append(answer, np.int32(self.template.end_of_turn()))
            notes = ("end_of_turn_added",)
        row = self.template.continued(
            conversation.messages[:-1], answer, conversation.tools, self.settings.supervise, ended
        )
        return replace(row, notes=notes)

    def in_vocabulary(self, ids: tuple[int, ...]) -> np.ndarray:
        if max(ids, default=0) >= self.vocabulary:
            raise Rejected("token_out_of_range", f"id {max(ids)}, the tokenizer knows {self.vocabulary}")
        return np.asarray(ids, np.int32)

    def ends(self, ids: np.ndarray) -> bool:
        """Whether ids end in a token that can end a turn."""
        return bool(len(ids)) and int(ids[-1]) in self.specials

    @cached_property
    def specials(self) -> frozenset[int]:
        return frozenset(Encoder(self.tokenizer).specials)

    def fitted(self, row: Rendered | Rejected) -> Rendered:
        """The row cut at `max_length`.

        Raises Rejected when what is left teaches nothing.
        """
        if isinstance(row, Rejected):
            raise row
        limit = self.settings.max_length
        if len(row.ids) > limit:
            row = replace(
                row, ids=row.ids[:limit], supervised=row.supervised[:limit], finished=False, notes=(*row.notes, "cut")
            )
        count = int(row.supervised.sum())
        if not (row.supervised[1:] & row.supervised[:-1]).any():
            raise Rejected("too_long" if "cut" in row.notes else "too_few_supervised", f"{count} supervised tokens")
        if count < self.settings.min_supervised:
            raise Rejected("too_few_supervised", f"{count} supervised tokens")
        return row

    def contamination(self, conversation: Conversation) -> tuple[str, ...]:
        """A note for each benchmark that asks what is asked here."""
        return tuple(f"in_benchmark:{name}" for name in benchmarks_in(conversation, self.benchmarks, self.decoded))

    def decoded(self, ids: Sequence[int]) -> str:
        """Ids as text without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def up_to_last_answer(conversation: Conversation) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Messages without what follows the last answer, and a note when something did.

    Raises Rejected when nothing is answered.
    """
    messages = conversation.messages
    end = max((i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if not end:
        raise Rejected("no_answer")
    return messages[:end], () if end == len(messages) else ("turns_after_last_answer",)


def known_id(record: Any) -> str | None:
    """The id of a row that could not be used, if it can be told."""
    return row_id(record) if isinstance(record, Mapping) else None

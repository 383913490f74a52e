"""A row of conversation files, whatever shape it was published in: a `Conversation`, or a reason why it is unusable."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

Message = dict[str, Any]

REASONS = {
    "not_json": "the line is not JSON",
    "not_utf8": "the text is not valid Unicode; a file in another encoding needs `iconv -t UTF-8` first",
    "not_plain": "a value that JSON cannot hold: a date, bytes, or nesting without end",
    "not_an_object": "the row is not an object with fields",
    "unknown_format": "none of the known fields is there",
    "wrong_format": "the fields of the row's format are not there, or have the wrong types",
    "empty": "no messages",
    "no_user": "no user turn",
    "assistant_first": "the assistant speaks before any user",
    "unknown_role": "a role that no template knows",
    "null_content": "a message without content",
    "empty_content": "a user turn or tool result with nothing in it",
    "empty_answer": "an answer with nothing in it",
    "content_not_text": "content that is neither text nor a list of parts",
    "image": "an image, audio or video part: only text can be trained on",
    "unknown_part": "a content part of unknown type",
    "bad_tool_call": "a tool call without a name",
    "bad_token_ids": "token ids that are not integers, or a mask of another length",
    "token_out_of_range": "token ids outside the vocabulary",
    "no_answer": "no answer to learn from",
    "nothing_to_answer": "no prompt that the target could answer",
    "not_asked": "a message that no question takes in",
    "template_error": "the chat template refuses the conversation",
    "prompt_not_prefix": "the rendered prompt is not how the rendered row begins: no mask can be derived",
    "answer_not_rendered": "the template loses the answer's text",
    "content_not_rendered": "the template loses a message",
    "no_end_of_turn": "the template does not mark the end of an answer",
    "end_inside_answer": "the end-of-turn token stands inside an answer",
    "boundary": "a token spans the border of prompt and answer and cannot be split",
    "thinking_open": "thinking cannot be told from the answer",
    "too_long": "no supervised pair is left within max_length",
    "too_few_supervised": "fewer supervised tokens than min_supervised",
    "duplicate": "an exact duplicate of an earlier row",
    "unfinished": "the answer did not end within max_new_tokens",
    "server": "the server could not answer",
}
"""Why rows are dropped, and what that means in words."""


class Rejected(Exception):
    """A row that cannot be used: `reason` is a key of `REASONS`, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Conversation:
    """One row. Exactly one of `messages`, `text` and `token_ids` is there.

    `messages` in OpenAI's form, contents joined to text; `tools` JSON schemas; `response_ids` the last answer's own
    ids, which are used as they are; `supervised` marks `token_ids`; `finished`: the last answer came to its end (None:
    the row does not say).
    """

    row_id: str | None
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    supervised: tuple[bool, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    finished: bool | None = None

    @cached_property
    def record(self) -> str:
        """All but the id as canonical JSON, without empty fields."""
        names = (field.name for field in fields(self) if field.name != "row_id")
        body = {name: value for name in names if (value := getattr(self, name)) is not None and value != ()}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True)

    def digest(self) -> str:
        """32 hex digits over the record: what a row without an id is called."""
        return hashlib.sha256(self.record.encode()).hexdigest()[:32]

    def prompt(self) -> str:
        """What is asked, as one text: equal for rows that ask the same. A row without messages is its own prompt."""
        asked_for = [f"{turn['role']}\0{turn['content']}" for turn in self.messages if turn["role"] != "assistant"]
        return "\0".join(asked_for) or self.record

    @classmethod
    def loads(cls, row_id: str, record: str) -> Conversation:
        """Inverse of `record`."""
        body = json.loads(record)
        return cls(row_id, **{key: tuple(value) if isinstance(value, list) else value for key, value in body.items()})


def with_system(conversation: Conversation, prompt: str | None) -> Conversation:
    """Put a system turn before messages that bring none."""
    if prompt is None or not conversation.messages or conversation.messages[0]["role"] in ("system", "developer"):
        return conversation
    return replace(conversation, messages=({"role": "system", "content": prompt}, *conversation.messages))


def asked(conversation: Conversation) -> list[list[Message]]:
    """What is said before each answer, for a target that is to give the answers.

    Without answers in the row, every user turn is a question. Results of tools belong to calls that the target has not
    made: they end the row.

    Raises Rejected when nothing is asked.
    """
    answered = any(turn["role"] == "assistant" for turn in conversation.messages)
    questions: list[list[Message]] = [[]]
    for turn in conversation.messages:
        if turn["role"] == "tool":
            break
        if turn["role"] != "assistant":
            questions[-1].append(turn)
        if turn["role"] == ("assistant" if answered else "user") and questions[-1]:
            questions.append([])
    questions = [turns for turns in questions if any(turn["role"] == "user" for turn in turns)]
    if not questions:
        raise Rejected("nothing_to_answer")
    return questions

"""Rows of conversation files in the shapes that people publish them, made into one: a `Conversation`.

`normalise` takes a decoded record; it keeps the row right or raises `Rejected` with a reason from `REASONS`. No row is
repaired by guessing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

Message = dict[str, Any]

REASONS = {
    "not_json": "the line is not JSON",
    "not_utf8": "the text is not valid Unicode",
    "not_plain": "a value that JSON cannot hold: a date, bytes, or nesting without end",
    "not_an_object": "the row is not an object with fields",
    "unknown_format": "none of the known fields is there",
    "wrong_format": "the fields of the format that was asked for are not there, or have the wrong types",
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
"""Why rows are dropped."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names of roles as they are found, and what templates call them."""


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


def detect(record: Mapping[str, Any]) -> str:
    """The format of a decoded row.

    Raises Rejected when it has the fields of none.
    """
    for name, shape in FORMATS.items():
        if shape.fits(record):
            return name
    raise Rejected("unknown_format", f"fields: {', '.join(sorted(map(str, record)))[:200]}")


def normalise(record: Any, wanted: str = "auto") -> Conversation:
    """A decoded row as a `Conversation`.

    Raises Rejected.
    """
    if not isinstance(record, Mapping):
        raise Rejected("not_an_object", f"found {type(record).__name__}")
    name = detect(record) if wanted == "auto" else wanted
    shape = FORMATS[name]
    if not shape.fits(record):
        raise Rejected(
            "wrong_format", f"format {name} needs {shape.needs}; fields: {', '.join(map(str, record))[:200]}"
        )
    conversation = replace(shape.read(record), row_id=row_id(record), finished=finished(record))
    require_plain(conversation)
    return conversation


def row_id(record: Mapping[str, Any]) -> str | None:
    """The row's own id, when it brings one that is text or a whole number."""
    for key in ("id", "row_id", "uuid", "conversation_id", "prompt_id", "question_id", "task_id"):
        value = record.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return None


def finished(record: Mapping[str, Any]) -> bool | None:
    """What the row says about its last answer: came to its end, was cut off, or nothing."""
    if isinstance(record.get("finished"), bool):
        return record["finished"]
    return {"stop": True, "length": False}.get(str(record.get("finish_reason")))


def require_plain(conversation: Conversation) -> None:
    """Refuse what no file can hold: lone surrogates, dates and bytes out of tables, nesting without end."""
    try:
        (conversation.record + (conversation.row_id or "")).encode()
    except UnicodeEncodeError as error:
        raise Rejected("not_utf8", str(error)[:200]) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejected("not_plain", str(error)[:200]) from None


def with_system(conversation: Conversation, prompt: str | None) -> Conversation:
    """Put a system turn before messages that bring none."""
    if prompt is None or not conversation.messages or conversation.messages[0]["role"] in ("system", "developer"):
        return conversation
    return replace(conversation, messages=({"role": "system", "content": prompt}, *conversation.messages))


def check_turns(messages: Sequence[Message]) -> None:
    """Refuse conversations without a user, or whose assistant speaks first."""
    if not messages:
        raise Rejected("empty")
    speakers = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if "user" not in speakers:
        raise Rejected("no_user")
    if speakers[0] != "user":
        raise Rejected("assistant_first" if speakers[0] == "assistant" else "unknown_role", f"first: {speakers[0]}")


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


def message(raw: Any) -> Message:
    """One turn in OpenAI's or ShareGPT's form.

    Raises Rejected.
    """
    if not isinstance(raw, Mapping):
        raise Rejected("wrong_format", f"a message is {type(raw).__name__}")
    name = raw.get("role", raw.get("from"))
    if name == "function_call":  # ShareGPT: a call is a turn of its own, as JSON text
        raw = {"role": "assistant", "tool_calls": [decoded(raw.get("value"))]}
        name = "assistant"
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Rejected("unknown_role", repr(name)[:80])
    calls = tool_calls(raw)
    reasoning = next((raw[key] for key in ("reasoning_content", "reasoning", "thinking") if raw.get(key)), None)
    content = text_of(raw.get("content", raw.get("value")), optional=bool(calls) or bool(reasoning))
    if not content.strip() and not calls and not reasoning and role not in ("system", "developer"):
        raise Rejected("empty_answer" if role == "assistant" else "empty_content", role)
    turn: Message = {"role": role, "content": content}
    if isinstance(reasoning, str):
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = calls
    return turn | {key: raw[key] for key in ("name", "tool_call_id") if isinstance(raw.get(key), str)}


def text_of(content: Any, optional: bool = False) -> str:
    """Content as text; text parts are joined.

    Raises Rejected for null (unless `optional`), images and anything else.
    """
    if content is None:
        if optional:
            return ""
        raise Rejected("null_content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Rejected("content_not_text", type(content).__name__)
    return "".join(part_text(part) for part in content)


def part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise Rejected("unknown_part", type(part).__name__)
    kind = str(part.get("type", "text" if "text" in part else "?"))
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return part["text"]
    if any(medium in kind for medium in ("image", "audio", "video", "file")):
        raise Rejected("image", kind)
    raise Rejected("unknown_part", kind[:80])


def tool_calls(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tool calls with decoded arguments, which is what templates expect."""
    calls = raw.get("tool_calls") or ([{"function": raw["function_call"]}] if raw.get("function_call") else [])
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise Rejected("bad_tool_call", type(calls).__name__)
    return [tool_call(call) for call in calls]


def tool_call(call: Any) -> dict[str, Any]:
    body = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
        raise Rejected("bad_tool_call", repr(call)[:80])
    known = {key: call[key] for key in ("id",) if isinstance(call.get(key), str)}
    return known | {
        "type": "function",
        "function": {"name": body["name"], "arguments": decoded(body.get("arguments", {}))},
    }


def decoded(value: Any) -> Any:
    """JSON text as what it says; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


@dataclass(frozen=True)
class Format:
    """A published row shape: whether a record has it, and how to read it."""

    needs: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Conversation]


def from_messages(record: Mapping[str, Any], key: str = "messages") -> Conversation:
    turns = [message(raw) for raw in sequence(record[key])]
    system = record.get("system")
    if isinstance(system, str) and system and (not turns or turns[0]["role"] != "system"):
        turns.insert(0, {"role": "system", "content": system})
    check_turns(turns)
    conversation = Conversation(None, messages=tuple(turns), tools=tools_of(record))
    return with_response_ids(conversation, record)


def with_response_ids(conversation: Conversation, record: Mapping[str, Any]) -> Conversation:
    if record.get("response_ids") is None:
        return conversation
    return replace(conversation, response_ids=integers(record["response_ids"]))


def tools_of(record: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = decoded(record.get("tools"))
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return ()
    return tuple(tool for tool in tools if isinstance(tool, Mapping))


def from_prompt_response(record: Mapping[str, Any]) -> Conversation:
    prompt, answer = pick(record, PROMPTS), pick(record, RESPONSES)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(sequence(prompt))
    if isinstance(answer, str):
        turns.append({"role": "assistant", "content": answer})
    elif answer is not None:
        turns.extend(sequence(answer))
    return from_messages({**record, "messages": turns})


def from_alpaca(record: Mapping[str, Any]) -> Conversation:
    more, answer = pick(record, CONTEXTS), pick(record, ANSWERS)
    prompt = record["instruction"] + (f"\n\n{more}" if isinstance(more, str) and more.strip() else "")
    turns = [turn for pair in sequence(record.get("history") or ()) for turn in alternate(sequence(pair))]
    turns.append({"role": "user", "content": prompt})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return from_messages({**record, "messages": turns})


def alternate(pair: Sequence[Any]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=False)]


def from_turns(record: Mapping[str, Any]) -> Conversation:
    turns = sequence(record["turns"])
    return from_messages(
        {**record, "messages": [t if isinstance(t, Mapping) else {"role": "user", "content": t} for t in turns]}
    )


def from_text(record: Mapping[str, Any]) -> Conversation:
    if not record["text"].strip():
        raise Rejected("empty")
    return Conversation(None, text=record["text"])


def from_token_ids(record: Mapping[str, Any]) -> Conversation:
    ids = integers(pick(record, TOKEN_IDS))
    labels, mask = record.get("labels"), pick(record, MASKS)
    if mask is None and labels is not None:
        mask = [label != -100 for label in integers(labels, negative=True)]
    if mask is not None and len(sequence(mask)) != len(ids):
        raise Rejected("bad_token_ids", f"{len(ids)} ids, mask of {len(mask)}")
    if not ids:
        raise Rejected("empty")
    supervised = None if mask is None else tuple(bool(value) for value in mask)
    return Conversation(None, token_ids=ids, supervised=supervised)


def sequence(value: Any) -> Sequence[Any]:
    """A list, also when a table stored it as JSON text.

    Raises Rejected.
    """
    value = decoded(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    raise Rejected("wrong_format", f"expected a list, found {type(value).__name__}")


def integers(value: Any, negative: bool = False) -> tuple[int, ...]:
    ids = tuple(sequence(value))
    if not all(type(item) is int and (negative or item >= 0) for item in ids):
        raise Rejected("bad_token_ids", "not all are whole numbers from 0 up")
    return ids


def pick(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first of these fields that is there and not null."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


TOKEN_IDS = ("token_ids", "input_ids")
MASKS = ("supervised", "loss_mask", "assistant_masks", "assistant_mask")
PROMPTS = ("prompt", "question", "query", "problem")
RESPONSES = ("response", "completion", "answer", "solution", "output")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "completion", "answer")
"""Alpaca's fields and those of its kin, which name the input and the output otherwise."""

FORMATS: dict[str, Format] = {
    "token_ids": Format("token_ids or input_ids", lambda r: pick(r, TOKEN_IDS) is not None, from_token_ids),
    "messages": Format("messages", lambda r: r.get("messages") is not None, from_messages),
    "conversations": Format(
        "conversations",
        lambda r: pick(r, ("conversations", "conversation")) is not None,
        lambda r: from_messages({**r, "messages": pick(r, ("conversations", "conversation"))}),
    ),
    "turns": Format("turns", lambda r: r.get("turns") is not None, from_turns),
    "alpaca": Format("instruction", lambda r: isinstance(r.get("instruction"), str), from_alpaca),
    "prompt_response": Format("prompt (and response)", lambda r: pick(r, PROMPTS) is not None, from_prompt_response),
    "text": Format("text", lambda r: isinstance(r.get("text"), str), from_text),
}
"""Formats in the order in which they are tried."""

"""Shapes of rows that people publish, each read into a `Conversation`.

`normalise` takes a decoded record; it keeps the row right or raises `Rejected` with a reason from `REASONS`. No row is
repaired by guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.conversations import Conversation, Message, Rejected
from data.messages import decoded, message, nothing_in, role_of


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


def check_turns(messages: Sequence[Message]) -> None:
    """Refuse conversations without a user, or whose assistant speaks first."""
    if not messages:
        raise Rejected("empty")
    speakers = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if "user" not in speakers:
        raise Rejected("no_user")
    if speakers[0] != "user":
        raise Rejected("assistant_first" if speakers[0] == "assistant" else "unknown_role", f"first: {speakers[0]}")


@dataclass(frozen=True)
class Format:
    """A published row shape: whether a record has it, and how to read it.

    `messages` gives a record's messages as they are found (None: rows of this shape have none), `answers` names fields
    that hold the last of them.
    """

    needs: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Conversation]
    messages: Callable[[Mapping[str, Any]], list[Any]] | None = None
    answers: tuple[str, ...] = ()


def talk(
    needs: str,
    fits: Callable[[Mapping[str, Any]], bool],
    messages: Callable[[Mapping[str, Any]], list[Any]],
    answers: tuple[str, ...] = (),
) -> Format:
    """A shape whose rows are read by their messages."""
    return Format(needs, fits, lambda record: from_messages(record, messages(record)), messages, answers)


def before_answer(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row of messages in the format `name` as one of the format `messages` that ends before its last answer.

    The answer is not looked at: it may be a placeholder, a number, a list of choices. So may the results of its tools,
    which go with it where all are empty; any that says something is answered itself.

    Raises Rejected.
    """
    shape = FORMATS[name]
    assert shape.messages is not None, f"rows of format {name} have no messages"
    rest = {key: value for key, value in record.items() if key not in (*shape.answers, "response_ids")}
    turns = shape.messages(rest)
    if pick(record, shape.answers) is None:
        last = max((at for at, raw in enumerate(turns) if role_of(raw) == "assistant"), default=len(turns))
        if all(role_of(raw) == "tool" and nothing_in(raw) for raw in turns[last + 1 :]):
            turns = turns[:last]
    return {**rest, "messages": turns}


def from_messages(record: Mapping[str, Any], found: Sequence[Any]) -> Conversation:
    turns = [message(raw) for raw in found]
    system = pick(record, SYSTEMS)
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


def prompt_and_response(record: Mapping[str, Any]) -> list[Any]:
    prompt, answer = pick(record, PROMPTS), pick(record, RESPONSES)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(sequence(prompt))
    if isinstance(answer, str):
        turns.append({"role": "assistant", "content": answer})
    elif answer is not None:
        turns.extend(sequence(answer))
    return turns


def instruction_and_output(record: Mapping[str, Any]) -> list[Any]:
    more, answer = pick(record, CONTEXTS), pick(record, ANSWERS)
    prompt = record["instruction"] + (f"\n\n{more}" if isinstance(more, str) and more.strip() else "")
    turns = [turn for pair in sequence(record.get("history") or ()) for turn in alternate(sequence(pair))]
    turns.append({"role": "user", "content": prompt})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return turns


def alternate(pair: Sequence[Any]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=False)]


def texts_and_messages(record: Mapping[str, Any]) -> list[Any]:
    return [
        turn if isinstance(turn, Mapping) else {"role": "user", "content": turn} for turn in listed(record, "turns")
    ]


def listed(record: Mapping[str, Any], *keys: str) -> list[Any]:
    return list(sequence(pick(record, keys)))


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
SYSTEMS = ("system", "system_prompt")
CONVERSATIONS = ("conversations", "conversation")
MASKS = ("supervised", "loss_mask", "assistant_masks", "assistant_mask")
PROMPTS = ("prompt", "question", "query", "problem")
RESPONSES = ("response", "completion", "answer", "solution", "output")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "completion", "answer")
"""Alpaca's fields and those of its kin, which name the input and the output otherwise."""

FORMATS: dict[str, Format] = {
    "token_ids": Format("token_ids or input_ids", lambda r: pick(r, TOKEN_IDS) is not None, from_token_ids),
    "messages": talk("messages", lambda r: r.get("messages") is not None, lambda r: listed(r, "messages")),
    "conversations": talk(
        "conversations", lambda r: pick(r, CONVERSATIONS) is not None, lambda r: listed(r, *CONVERSATIONS)
    ),
    "turns": talk("turns", lambda r: r.get("turns") is not None, texts_and_messages),
    "alpaca": talk("instruction", lambda r: isinstance(r.get("instruction"), str), instruction_and_output, ANSWERS),
    "prompt_response": talk(
        "prompt (and response)", lambda r: pick(r, PROMPTS) is not None, prompt_and_response, RESPONSES
    ),
    "text": Format("text", lambda r: isinstance(r.get("text"), str), from_text),
}
"""Formats in the order in which they are tried."""

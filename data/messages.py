"""One turn of a conversation in the forms that people publish, made into OpenAI's: role, text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.conversations import Message, Rejected

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


CALL = "function_call"
"""ShareGPT's role of a call: an assistant's turn of its own, as JSON text."""


def role_of(raw: Any) -> str | None:
    """What templates call the role of a message as it is found; None when it has none that they know."""
    name = raw.get("role", raw.get("from")) if isinstance(raw, Mapping) else None
    if name == CALL:
        return "assistant"
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def nothing_in(raw: Mapping[str, Any]) -> bool:
    """Whether a message as it is found has no content."""
    content = raw.get("content", raw.get("value"))
    return not (content.strip() if isinstance(content, str) else content)


def message(raw: Any) -> Message:
    """One turn in OpenAI's or ShareGPT's form.

    Raises Rejected.
    """
    if not isinstance(raw, Mapping):
        raise Rejected("wrong_format", f"a message is {type(raw).__name__}")
    role = role_of(raw)
    if role is None:
        raise Rejected("unknown_role", repr(raw.get("role", raw.get("from")))[:80])
    if raw.get("role", raw.get("from")) == CALL:
        raw = {"role": "assistant", "tool_calls": [decoded(raw.get("value"))]}
    calls = tool_calls(raw)
    thoughts = (raw.get(key) for key in ("reasoning_content", "reasoning", "thinking"))
    reasoning = text_of(next((found for found in thoughts if found and not isinstance(found, bool | int)), ""))
    content = text_of(raw.get("content", raw.get("value")), optional=bool(calls) or bool(reasoning))
    if not content.strip() and not calls and not reasoning and role not in ("system", "developer"):
        raise Rejected("empty_answer" if role == "assistant" else "empty_content", role)
    turn: Message = {"role": role, "content": content}
    if reasoning:
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

"""How targets mark their thinking, and which part of a text is not thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""What opens and closes it, by family."""
MARKS = frozenset(mark for pair in THINKING for mark in pair) - {"<|end|>"}
"""Those that stand for thinking alone."""
FINAL = "<|channel|>final<|message|>"
"""Where gpt-oss begins what the user sees."""


def literal_thinking(message: Mapping[str, Any]) -> str:
    """Thinking that is written out in an answer's content."""
    content = message["content"].lstrip()
    for opening, close in THINKING:
        if content.startswith(opening) and close in content:
            return content.partition(close)[0].removeprefix(opening)
    return ""


def without_thinking(text: str, start: int, end: int, prompt: str = "") -> list[tuple[int, int]]:
    """`text[start:end]` without its thinking, as spans. The prompt (by default what is before `start`) may have opened
    it; thinking that is not closed goes on to the end."""
    before = (prompt or text[:start]).rstrip()
    pieces, at = [], start
    close = next((close for opening, close in THINKING if before.endswith(opening)), None)
    while at < end:
        if close is None:
            found = [(text.find(opening, at, end), close) for opening, close in THINKING]
            where, close = min((place for place in found if place[0] >= 0), default=(end, None))
            if where > at:
                pieces.append((at, where))
            at = where
        else:
            closed = text.find(close, at, end)
            at, close = (end if closed < 0 else closed + len(close)), None
    return pieces

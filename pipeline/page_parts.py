"""What the report page is made of: tables, pictures, numbers, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from pipeline.figures import themed


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def figure(pictures: Mapping[str, str], stem: str) -> str:
    return f"<figure>{themed(pictures[stem])}</figure>" if stem in pictures else ""


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], right: Iterable[int] = ()) -> str:
    """Cells are HTML already; columns in `right` are numbers."""
    marked = set(right)
    side = {True: ' class="n"', False: ""}
    top = "".join(f"<th{side[index in marked]}>{escape(text)}</th>" for index, text in enumerate(head))
    lines = "".join(
        "<tr>" + "".join(f"<td{side[index in marked]}>{cell}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{lines}</table></div>'


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

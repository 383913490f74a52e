"""The README's tables, written from the records that benchmarks leave.

    python -m tests.benchmarks.readme                 # write every table of README.md anew

A benchmark leaves its rows as a JSON list in tests/benchmarks/records/. In README.md a table stands between the lines
`<!-- records: NAME.json -->` and `<!-- end of NAME.json -->`, and no number in it is typed by hand. Columns that no row
fills are left out, and what is the same in every row stands in a line above the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import codecs, loss, reference, step, training

README = Path(__file__).parents[2] / "README.md"
RECORDS = Path(__file__).parent / "records"
WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "codecs": codecs.markdown,
    "loss": loss.markdown,
    "reference": reference.markdown,
    "step": step.table,
    "training": training.table,
}
"""What makes a table of records, by the first word of their file's name."""


def narrowed(table: str) -> str:
    """A table without its empty columns; those that say one thing in every row become a line above it."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    values = [{row[at] for row in rows} for at in range(len(head))]
    same = {head[at]: min(found) for at, found in enumerate(values) if len(rows) > 1 and len(found) == 1}
    kept = [at for at, name in enumerate(head) if name not in same and values[at] != {""}]
    lines = ["| " + " | ".join(row[at] for at in kept) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(kept))
    said = ", ".join(f"{name} {value}" for name, value in same.items() if value)
    return "\n".join([f"In every row: {said}.", "", *lines] if said else lines)


def written(text: str) -> str:
    """`text` of a README with every table made of its records."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        rows = json.loads((RECORDS / name).read_text())
        made = narrowed(WRITERS[re.split(r"\W", name)[0]](rows))
        return f"<!-- records: {name} -->\n\n{made}\n\n<!-- end of {name} -->"

    return re.sub(r"<!-- records: (?P<name>\S+) -->.*?<!-- end of (?P=name) -->", table, text, flags=re.S)


if __name__ == "__main__":
    README.write_text(written(README.read_text()))

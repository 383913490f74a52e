"""What became of the rows: rows in = kept + dropped by reason, tokens, lengths. Accounts of parts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from data.conversations import REASONS

LISTED = 1000
"""Ids that a manifest lists at most for one finding; the counts beside them are whole."""

WHOLE = ("token_ids", "text")
"""Formats without messages. Such a row is compared whole, with rows of its own format, and by line with benchmarks."""


def overlap(found: Mapping[str, list[str]]) -> dict[str, Any]:
    """Rows that ask what a benchmark asks, by its name: how many, and the first ids."""
    return {name: {"rows": len(ids), "ids": ids[:LISTED]} for name, ids in sorted(found.items())}


def compared_alone(formats: Mapping[str, int]) -> dict[str, int]:
    """Of the rows by format, those that are `WHOLE`: repeats among them and rows of messages are not seen."""
    return {name: formats[name] for name in WHOLE if formats.get(name)}


def alone_lines(found: Mapping[str, int]) -> list[str]:
    """What a person reads, given what `compared_alone` found."""
    return [
        f"repeats: {count} rows of format {name} are not compared with rows of messages, nor by their prompts with "
        "rows held out, nor with benchmark prompts of more than one line"
        for name, count in found.items()
    ]


@dataclass
class Accounting:
    """Counts of one part, or of all. `lengths[b]` counts token rows of 2**b to 2**(b+1) - 1 tokens."""

    rows_in: int = 0
    kept: int = 0
    token_rows: int = 0
    tokens: int = 0
    supervised: int = 0
    unfinished: int = 0
    validation: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    contaminated: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self.dropped[reason] += 1
            self.rows_in += 1

    def keep_conversations(self, table: pa.Table) -> None:
        """Count conversations: a table with `row_id`, `source`, `held_out` and `notes`."""
        self.rows_in += table.num_rows
        self.kept += table.num_rows
        self.validation += int(np.count_nonzero(table["held_out"].to_numpy(zero_copy_only=False)))
        self.sources.update(table["source"].to_pylist())
        for row_id, notes in zip(table["row_id"].to_pylist(), table["notes"].to_pylist(), strict=True):
            self.notes.update(notes)
            for note in notes:
                if note.startswith("in_benchmark:"):
                    self.contaminated.setdefault(note.partition(":")[2], []).append(row_id)

    def keep_tokens(self, lengths: np.ndarray, supervised: int, finished: np.ndarray) -> None:
        """Count token rows: their lengths int [n], supervised tokens in all, and whether they end in an end of turn."""
        self.token_rows += len(lengths)
        self.tokens += int(lengths.sum())
        self.supervised += supervised
        self.unfinished += int(np.count_nonzero(~finished))
        if len(lengths):
            self.longest = max(self.longest, int(lengths.max()))
            for bin_, count in enumerate(np.bincount(np.log2(lengths).astype(int)).tolist()):
                self.lengths[bin_] += count

    def add(self, other: Accounting) -> None:
        """Sum two accounts."""
        for name in ("rows_in", "kept", "token_rows", "tokens", "supervised", "unfinished", "validation"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        for name in ("dropped", "notes", "sources", "lengths"):
            getattr(self, name).update(getattr(other, name))
        for name, ids in other.contaminated.items():
            self.contaminated.setdefault(name, []).extend(ids)

    @property
    def dropped_rows(self) -> int:
        return sum(self.dropped.values())

    def body(self) -> dict[str, Any]:
        """As JSON, for manifests: `counts` and what is behind them."""
        return {
            "counts": {
                "rows_in": self.rows_in,
                "kept": self.kept,
                "dropped": self.dropped_rows,
                "rows": self.token_rows,
                "tokens": self.tokens,
                "supervised": self.supervised,
                "unfinished": self.unfinished,
                "validation": self.validation,
                "longest": self.longest,
            },
            "dropped": dict(sorted(self.dropped.items())),
            "notes": dict(sorted(self.notes.items())),
            "sources": dict(sorted(self.sources.items())),
            "lengths": [[1 << b, count] for b, count in sorted(self.lengths.items()) if count],
            "contamination": overlap(self.contaminated),
        }

    @classmethod
    def of(cls, body: dict[str, Any]) -> Accounting:
        """Inverse of `body`; ids beyond the listed ones are lost, so contamination is counted by the list."""
        counts = body["counts"]
        return cls(
            rows_in=counts["rows_in"],
            kept=counts["kept"],
            token_rows=counts["rows"],
            tokens=counts["tokens"],
            supervised=counts["supervised"],
            unfinished=counts["unfinished"],
            validation=counts["validation"],
            longest=counts["longest"],
            dropped=Counter(body["dropped"]),
            notes=Counter(body["notes"]),
            sources=Counter(body["sources"]),
            lengths=Counter({low.bit_length() - 1: count for low, count in body["lengths"]}),
            contaminated={name: list(found["ids"]) for name, found in body["contamination"].items()},
        )

    def lines(self) -> list[str]:
        """What a person reads."""
        text = [f"{self.rows_in} rows in = {self.kept} kept + {self.dropped_rows} dropped"]
        text += [f"  dropped {count}: {reason} ({REASONS[reason]})" for reason, count in self.dropped.most_common()]
        text += [f"  noted {count}: {note}" for note, count in self.notes.most_common()]
        if self.token_rows:
            share = self.supervised / max(self.tokens, 1)
            text.append(
                f"{self.token_rows} token rows, {self.tokens} tokens, {self.supervised} supervised ({share:.0%}), "
                f"longest {self.longest}, {self.validation} held out, {self.unfinished} unfinished"
            )
        return text

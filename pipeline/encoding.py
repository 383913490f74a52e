"""Text with marked spans into ids with a mask, such that what precedes a span is what the target is served."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.conversations import Rejected

TOGETHER = 64
"""Rows in one call of the tokenizer; more is slower, since their memory leaves the caches."""


@dataclass(frozen=True)
class Draft:
    """A row before it is encoded: its text, the supervised `spans` of it (start, end in characters, ascending), and ids
    that follow the text as they are, int32 [N] with their mask bool [N].

    `finished`: it ends in an end of turn; `turn`: number of the answer that it was cut for when a template rewrites
    history, None for the whole row; `notes`: what to count.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    finished: bool
    turn: int | None = None
    notes: tuple[str, ...] = ()
    tail: np.ndarray | None = None
    tail_mask: np.ndarray | None = None


@dataclass(frozen=True)
class Rendered:
    """A row: `ids` int32 [T], `supervised` bool [T], and the rest as in its `Draft`."""

    ids: np.ndarray
    supervised: np.ndarray
    finished: bool
    turn: int | None = None
    notes: tuple[str, ...] = ()


class Encoder:
    """A tokenizer at work on rendered text. Nothing is added: the template prints what it wants at the start."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        self.specials = {number: token.content for number, token in added.items() if token.special}
        if tokenizer.eos_token_id is not None:
            self.specials[tokenizer.eos_token_id] = tokenizer.eos_token
        self._tails: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if self.backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], specials: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=not specials, clean_up_tokenization_spaces=False)

    @cached_property
    def pieces_join(self) -> bool:
        """Whether text can be encoded piece by piece: true for byte-level tokenizers, false for those that put a space
        in front of what they encode. The pieces are then the ids that are served: a prompt alone, an answer alone."""
        probes = ["x", " x", "\nx", "\n", "x\n\n", "é", self.tokenizer.eos_token or "x"]
        return self.backend is not None and all(
            self.decode(self.encode(a) + self.encode(b)) == a + b for a in probes for b in probes
        )

    def rendered(self, drafts: Sequence[Draft]) -> list[Rendered | Rejected]:
        """Encode rows; all at once where the tokenizer allows it, which is faster. A row whose text cannot be cut at a
        span gives Rejected."""
        if self.pieces_join:
            groups = (drafts[first : first + TOGETHER] for first in range(0, len(drafts), TOGETHER))
            masked = [row for group in groups for row in self._joined(group)]
        else:
            masked = [self._masked(draft) for draft in drafts]
        return [
            row if isinstance(row, Rejected) else _row(draft, *row) for draft, row in zip(drafts, masked, strict=True)
        ]

    def _joined(self, drafts: Sequence[Draft]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and masks from pieces: the text up to a span, the span, the text between it and the next, ..."""
        pieces: list[str] = []
        supervised: list[bool] = []
        counts: list[int] = []
        for draft in drafts:
            before, at = len(pieces), 0
            for start, end in draft.spans:
                pieces += (draft.text[at:start], draft.text[start:end])
                supervised += (False, True)
                at = end
            pieces.append(draft.text[at:])
            supervised.append(False)
            counts.append(len(pieces) - before)
        ids = [piece.ids for piece in self.backend.encode_batch_fast(pieces, add_special_tokens=False)]
        lengths = np.array([len(piece) for piece in ids], np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
        mask = np.repeat(np.array(supervised, bool), lengths)
        ends = np.concatenate([[0], np.cumsum(lengths)])[np.cumsum([0, *counts])].tolist()
        return [(flat[a:b], mask[a:b]) for a, b in pairwise(ends)]

    def _masked(self, draft: Draft) -> tuple[np.ndarray, np.ndarray] | Rejected:
        """Ids and mask of the whole text where tokens end at the spans' edges, else of its pieces."""
        if self.backend is None:
            return self._cut(draft)
        encoding = self.backend.encode(draft.text, add_special_tokens=False)
        mask = np.zeros(len(encoding.ids), bool)
        for start, end in draft.spans:
            first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
            if first is None or last is None or not self._clean_cut(draft.text, encoding, first, start):
                return self._cut(draft)
            mask[first : last + 1] = True
        return np.asarray(encoding.ids, np.int32), mask

    def _clean_cut(self, text: str, encoding: Any, first: int, start: int) -> bool:
        """Whether token `first` begins at `start` and the tokens before it are the prompt's own.

        Special tokens are cut out before anything else is split, so only text since the last of them needs a look.
        """
        if encoding.token_to_chars(first)[0] != start:
            return False
        ids = encoding.ids
        at = first - 1
        while at >= 0 and ids[at] not in self.specials:
            at -= 1
        tail = text[encoding.token_to_chars(at)[0] if at >= 0 else 0 : start]
        known = self._tails.get(tail)
        if known is None:
            known = self.encode(tail)
            if len(self._tails) < 1000:
                self._tails[tail] = known
        return ids[max(at, 0) : first] == known

    def _cut(self, draft: Draft) -> tuple[np.ndarray, np.ndarray] | Rejected:
        """Ids and mask from pieces, if together they say the same text."""
        ids: list[int] = []
        mask: list[bool] = []
        edges = sorted({0, len(draft.text), *chain.from_iterable(draft.spans)})
        for start, end in pairwise(edges):
            piece = self.encode(draft.text[start:end])
            ids += piece
            mask += [any(a <= start and end <= b for a, b in draft.spans)] * len(piece)
        if self.decode(ids) != self.decode(self.encode(draft.text)):
            return Rejected("boundary", "encoding prompt and answer one by one gives another text")
        return np.asarray(ids, np.int32), np.asarray(mask, bool)


def _row(draft: Draft, ids: np.ndarray, mask: np.ndarray) -> Rendered:
    if draft.tail is not None and draft.tail_mask is not None:
        ids, mask = np.concatenate([ids, draft.tail]), np.concatenate([mask, draft.tail_mask])
    return Rendered(ids, mask, draft.finished, draft.turn, draft.notes)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return sha256(backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

"""Token rows as text that shows what is supervised, for manifests and for eyes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.tokens import read_tokens


def pieces(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, supervised: np.ndarray) -> list[tuple[str, bool]]:
    """Decoded runs of equal supervision of ids int [T] with mask bool [T]."""
    edges = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[a:b].tolist(), clean_up_tokenization_spaces=False), bool(supervised[a]))
        for a, b in pairwise(edges)
        if a < b
    ]


def example(path: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """The first row of a token table, as pieces of (text, supervised); None for an empty table."""
    row = next(read_tokens(path), None)
    if row is None:
        return None
    return {"row_id": row.row_id, "pieces": pieces(tokenizer, row.token_ids, row.supervised)}

"""Which token's embedding fills a block's unknown slots.

Extraction records what the target offers (`mask_record`), so that training chooses (`choose_mask`) without the
target or its tokenizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.errors import BadInput

if TYPE_CHECKING:  # training imports this module, and has no use for transformers
    from transformers import PreTrainedTokenizerBase


def mask_record(tokenizer: PreTrainedTokenizerBase, embedding_rows: int) -> dict[str, Any]:
    """What a target offers as mask tokens: `candidates` [[id, reason], ...] by rule, `reserved` ids by name, `special`
    texts to ids.

    The rule: the tokenizer's mask token, else the lowest embedding row above the tokenizer, else special tokens.
    Never pad, BOS, EOS or the unknown token.
    """
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")}
    reserved = {name: token for name, token in named.items() if token is not None}
    special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    candidates: list[tuple[int, str]] = []
    if tokenizer.mask_token_id is not None:
        candidates.append((tokenizer.mask_token_id, "the tokenizer's mask token"))
    spare = max(tokenizer.get_vocab().values()) + 1
    if spare < embedding_rows:
        candidates.append((spare, "the lowest embedding row above the tokenizer"))
    candidates += [(i, f"the special token {t}, which nothing else uses") for t, i in sorted(special.items())]
    free = [[i, reason] for i, reason in candidates if i not in reserved.values()]
    return {"candidates": free, "reserved": reserved, "special": special}


def choose_mask(
    setting: int | str,
    record: Mapping[str, Any],
    vocab_size: int,
    occurrences: Callable[[Sequence[int]], Mapping[int, int]],
) -> tuple[int, str]:
    """The mask token's id and why it was taken, from a `mask_record`.

    `occurrences` counts ids in the rows; a token that occurs there is refused.
    Raises BadInput when the setting is out of range, reserved, unknown or in the rows, or when no token is free.
    """
    if setting == "auto":
        candidates = [(int(token), str(reason)) for token, reason in record["candidates"]]
        counts = occurrences([token for token, _ in candidates])
        free = [(token, reason) for token, reason in candidates if not counts[token]]
        if not free:
            raise BadInput("mask_token: the target has no mask token, spare row or unused special token: name an id")
        return free[0]
    token, reason = (setting, "id by hand") if isinstance(setting, int) else _by_text(setting, record["special"])
    if not 0 <= token < vocab_size:
        raise BadInput(f"mask_token: id {token} is outside the target's vocabulary of {vocab_size} rows")
    for name, taken in record["reserved"].items():
        if token == taken:
            raise BadInput(f"mask_token: id {token} is the tokenizer's {name} token; name another, or `auto`")
    if seen := occurrences([token])[token]:
        raise BadInput(f"mask_token: id {token} occurs {seen} times in the rows; name one that does not, or `auto`")
    return token, reason


def _by_text(text: str, special: Mapping[str, int]) -> tuple[int, str]:
    if text in special:
        return special[text], f"{text} by hand"
    near = difflib.get_close_matches(text, special, n=1, cutoff=0.5)
    raise BadInput(
        f"mask_token: {text!r} is not a special token of the target" + (f"; near: {near[0]}" if near else "")
    )

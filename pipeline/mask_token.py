"""Which token's embedding fills a block's unknown slots."""

from __future__ import annotations

import difflib
from collections.abc import Set
from typing import Literal

from transformers import PreTrainedTokenizerBase

from data.errors import BadInput


def mask_token_id(
    setting: Literal["auto"] | int | str, tokenizer: PreTrainedTokenizerBase, embedding_rows: int, used_ids: Set[int]
) -> tuple[int, str]:
    """The mask token's id, and in a few words why it is that one.

    `auto`: the tokenizer's mask token, else the lowest embedding row above the tokenizer, else a special token that
    is not in `used_ids` (ids that the template or any row contains). Never pad, BOS or EOS.

    Raises BadInput when the setting is out of range, not a token or one of those, or when no token is free.
    """
    if setting == "auto":
        return _automatic(tokenizer, embedding_rows, used_ids)
    token = setting if isinstance(setting, int) else _by_text(setting, tokenizer)
    if not 0 <= token < embedding_rows:
        raise BadInput(f"mask_token: id {token} is outside the target's {embedding_rows} embedding rows")
    for name, taken in _reserved(tokenizer).items():
        if token == taken:
            raise BadInput(f"mask_token: id {token} is the tokenizer's {name} token; name another, or `auto`")
    return token, "named in the run file" + ("; it occurs in the data" if token in used_ids else "")


def _automatic(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, used_ids: Set[int]) -> tuple[int, str]:
    reserved = {*_reserved(tokenizer).values(), tokenizer.unk_token_id}
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in reserved:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    vocabulary = tokenizer.get_vocab()
    spare = max(vocabulary.values()) + 1
    if spare < embedding_rows:
        return spare, "the lowest embedding row above the tokenizer"
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = sorted((added | set(tokenizer.all_special_ids)) - reserved - set(used_ids))
    if not free:
        raise BadInput("mask_token: the target has no mask token, spare row or unused special token: name one by hand")
    return free[0], f"the special token {tokenizer.convert_ids_to_tokens(free[0])}, which nothing else uses"


def _by_text(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    vocabulary = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    near = difflib.get_close_matches(text, vocabulary, n=1, cutoff=0.5)
    raise BadInput(f"mask_token: {text!r} is not a token of the target" + (f"; near: {near[0]!r}" if near else ""))


def _reserved(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {name: token for name, token in named.items() if token is not None}

"""What is wrong with a run file, in one line for its writer."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

PLAIN = {
    "tuple_type": "needs a list, for example `[{path: rows.jsonl}]` or `[1, 2]`",
    "dict_type": "needs a mapping, `key: value` lines below it",
    "string_pattern_mismatch": "a name: letters, digits, `.`, `_` and `-`, the first a letter or a digit",
    "model_type": "needs a mapping, `key: value` lines below it",
}
"""Problems that the checker words for programmers, by its own names of them."""

_LENGTH, _BATCH = ("max_length", "context_tokens"), ("batch_size", "batches_per_step", "tokens_per_batch")
ELSEWHERE = {
    "bs": _BATCH,
    "eval_every": ("validate_every",),
    "eval_steps": ("validate_every",),
    "grad_accum": ("batches_per_step",),
    "grad_clip": ("clip",),
    "gradient_accumulation_steps": ("batches_per_step",),
    "logging_steps": ("log_every",),
    "max_grad_norm": ("clip",),
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "name_or_path": ("model",),
    "num_key_value_heads": ("kv_heads",),
    "num_workers": ("readers",),
    "output_dir": ("root",),
    "precision": ("compute", "dtype"),
    "save_every": ("checkpoint_every",),
    "save_steps": ("checkpoint_every",),
    "seq_len": _LENGTH,
    "sequence_length": _LENGTH,
    "target_layer_ids": ("taps", "layers"),
}
"""What other trainers call our settings, where letters and words alone would not lead there."""

WORDS_ALIKE, LETTERS_ALIKE = 0.4, 0.6
"""Least likeness that is worth a suggestion."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem in one line, with the nearest valid key for an unknown one, and how many more there are."""
    problems = [(_place(model, problem["loc"]), problem) for problem in error.errors(include_url=False)]
    begin = min(problems, key=lambda found: found[1]["type"] != "extra_forbidden")[0]
    loc = max((place for place, _ in problems if place[: len(begin)] == begin), key=len)
    wrong = [problem for place, problem in problems if place == loc]  # several where a value may be of several kinds
    where, kind, value = ".".join(map(str, loc)), wrong[0]["type"], wrong[0]["input"]
    if kind == "extra_forbidden":
        text = f"unknown key `{where}`" + _nearest(model, loc)
    elif kind == "missing":
        text = f"`{where}` is missing"
    else:
        messages = [PLAIN.get(problem["type"], problem["msg"].removeprefix("Value error, ")) for problem in wrong]
        given = "" if isinstance(value, dict | list | BaseModel) or kind == "secret" else f" (got {value!r})"
        text = (f"`{where}`: " if where else "") + ", or ".join(dict.fromkeys(messages)) + given
    more = len({place for place, _ in problems if place != loc[: len(place)]})
    return text + (f" (and {more} more)" if more else "")


def _place(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Keys and list indices of a problem's place, without the checker's names of the kinds that a value may be of."""
    schema = model.model_json_schema(by_alias=True)
    node: dict[str, Any] = schema
    place: list[int | str] = []
    for step in loc:
        kinds = [kind for kind in node.get("anyOf", ()) if kind.get("type") != "null"]
        node = _deref(node, schema)
        if len(kinds) < 2:
            place.append(step)
            node = _step(node, step, schema)
    return tuple(place)


def _nearest(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    fields = _fields_at(model, loc[:-1])
    near = nearest(str(loc[-1]), fields)
    return f"; did you mean `{near}`?" if near else f"; valid keys here: {', '.join(sorted(fields))}"


def nearest(name: str, fields: Sequence[str]) -> str | None:
    """The field that `name` is most likely meant for: another program's name of it, its initials, the most words in
    common, or the most letters; None when nothing is near."""
    meant = next((field for field in ELSEWHERE.get(name, ()) if field in fields), None)
    if meant is not None:
        return meant
    scores = {field: _likeness(name, field) for field in fields}
    best = max(scores, key=lambda field: scores[field], default=None)
    return best if best is not None and scores[best] else None


def _likeness(name: str, field: str) -> float:
    """0 (nothing alike) to 1."""
    words, others = name.split("_"), field.split("_")
    if len(others) > 1 and name == "".join(word[0] for word in others):
        return 1.0
    shared = sum(max((_beginning(word, other) for other in others), default=0) for word in words)
    of_words = 2 * shared / (sum(map(len, words)) + sum(map(len, others)))
    of_letters = difflib.SequenceMatcher(None, name, field).ratio()
    return max(of_words if of_words >= WORDS_ALIKE else 0.0, of_letters if of_letters >= LETTERS_ALIKE else 0.0)


def _beginning(word: str, other: str) -> int:
    """Letters of the shorter word when the longer begins with it (`len`, `length`): two of them say nothing."""
    short, long = sorted((word, other), key=len)
    return len(short) if len(short) > 2 and long.startswith(short) else 0


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that are valid in the section that `loc` leads to."""
    schema = model.model_json_schema(by_alias=True)
    node: dict[str, Any] = schema
    for step in loc:
        node = _step(_deref(node, schema), step, schema)
    return list(_deref(node, schema).get("properties", {}))


def _deref(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    for option in node.get("anyOf", ()) or node.get("allOf", ()):
        if "$ref" in option or option.get("type") in ("array", "object"):
            return _deref(option, schema)
    return node


def _step(node: dict[str, Any], step: int | str, schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(step, int):
        return node.get("items", {})
    if step in node.get("properties", {}):
        return node["properties"][step]
    extra = node.get("additionalProperties", {})
    if isinstance(extra, dict) and extra:
        return extra
    names = next(iter(node.get("patternProperties", {}).values()), {})
    return names or node

"""What is wrong with a run file, in one line for its writer."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

PLAIN = {
    "tuple_type": "needs a list, for example `[{path: rows.jsonl}]` or `[1, 2]`",
    "dict_type": "needs a mapping, `key: value` lines below it",
    "string_pattern_mismatch": "a name: letters, digits, `.`, `_` and `-`, the first a letter or a digit",
    "model_type": "needs a mapping, `key: value` lines below it",
}
"""Problems that the checker words for programmers, by its own names of them."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem in one line, with the nearest valid key for an unknown one, and how many more there are."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"unknown key `{where}`" + _nearest(model, first["loc"])
    elif first["type"] == "missing":
        text = f"`{where}` is missing"
    else:
        message = PLAIN.get(first["type"], first["msg"].removeprefix("Value error, "))
        value = first["input"]
        given = "" if isinstance(value, dict | list | BaseModel) or first["type"] == "secret" else f" (got {value!r})"
        text = (f"`{where}`: " if where else "") + message + given
    more = len(problems) - 1
    return text + (f" (and {more} more)" if more else "")


def _nearest(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    fields = _fields_at(model, loc[:-1])
    near = difflib.get_close_matches(str(loc[-1]), fields, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else f"; valid keys here: {', '.join(sorted(fields))}"


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

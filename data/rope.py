"""RoPE scaling of a drafter, in the forms of which trainer, exports and serving engines make the same table.

Names are Hugging Face's. `attention_factor`, `mscale` and `mscale_all_dim` of YaRN are not among them: engines do not
read them, and would serve with another table than was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow", "truncate")),
}
"""Keys that a `rope_type` needs, and those that it may have."""


def problem(scaling: Mapping[str, Any]) -> str | None:
    """Why this is none of the `FORMS`; None when it is one."""
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in FORMS:
        return f"`rope_type` is {kind!r}, which is none of {', '.join(FORMS)}"
    needed, optional = FORMS[kind]
    missing = [name for name in needed if name not in scaling]
    if missing:
        return f"`rope_type: {kind}` needs {', '.join(missing)}"
    unknown = sorted(scaling.keys() - {"rope_type", *needed, *optional})
    if unknown:
        return f"`rope_type: {kind}` has no {', '.join(unknown)}"
    wrong = [name for name in (*needed, *optional) if name in scaling and not _fits(name, scaling[name])]
    if wrong:
        expected = "true or false" if wrong[0] == "truncate" else "a number above 0"
        return f"`{wrong[0]}` is {scaling[wrong[0]]!r}, expected {expected}"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return "`high_freq_factor` must be above `low_freq_factor`"
    return None


def _fits(name: str, value: Any) -> bool:
    if name == "truncate":
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)

"""Data sets on the Hugging Face hub: their rows, and the commit that they stand at."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.errors import BadInput
from data.settings import Source

ASK_SECONDS = 5.0
"""How long the hub may take to say where a data set stands."""


def label(source: Source) -> str:
    """How a hub data set is called in tables and messages."""
    return f"{source.hub}/{source.subset or 'default'}/{source.split}"


def hub_rows(source: Source, cache: Path) -> Iterator[dict[str, Any]]:
    """Rows of a hub data set. What `datasets` makes of it lies in `cache`; the files as they came, where the hub's own
    client keeps them (`HF_HOME`).

    Raises BadInput, in one line, for a set that is missing, out of reach, gated or damaged.
    """
    from datasets import load_dataset

    where = {"split": source.split, "revision": source.revision, "streaming": source.streaming}
    try:
        yield from load_dataset(source.hub, source.subset, **where, cache_dir=str(cache))
    except Exception as error:  # what the hub's clients raise has no common base
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BadInput(f"data set {label(source)}: cannot be read to its end ({why})") from None


def commits(sources: tuple[Source, ...], known: Mapping[str, str]) -> dict[str, str]:
    """Commits of the hub's sources by `name_of`, each asked for once; where the hub does not tell, the one in `known`,
    and none where that has none."""
    found: dict[str, str | None] = {}
    for source in sources:
        if source.hub is not None and (name := name_of(source)) not in found:
            found[name] = _commit(source) or known.get(name)
    return {name: commit for name, commit in found.items() if commit is not None}


def name_of(source: Source) -> str:
    return f"{source.hub}@{source.revision or 'newest'}"


def _commit(source: Source) -> str | None:
    """What the hub says, if it may be asked and answers soon: without network nothing waits, and nothing fails."""
    from huggingface_hub import HfApi, constants

    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return source.revision
    if constants.is_offline_mode() or os.environ.get("HF_DATASETS_OFFLINE"):
        return None
    try:
        asked = HfApi().dataset_info(str(source.hub), revision=source.revision, timeout=ASK_SECONDS, expand=["sha"])
    except Exception:  # no common base either; what is wrong is said when rows are read
        return None
    return asked.sha

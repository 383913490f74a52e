"""Safetensors files that others may read.

safetensors makes its files readable by their owner alone (0.8.0: mode 0600), and servers run as somebody else.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file."""
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    share(path)


def share(path: Path) -> None:
    """Give a file the access that a new file beside it gets (the umask's)."""
    beside = path.with_name(f".{path.name}.access")
    beside.touch()
    path.chmod(stat.S_IMODE(beside.stat().st_mode))
    beside.unlink()

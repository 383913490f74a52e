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
    """Write a safetensors file with the access that any new file in its folder gets (the umask's)."""
    path.unlink(missing_ok=True)
    path.touch()  # under its own name: a kill leaves no other
    access = _access(path)
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(access)


def share(path: Path, like: Path) -> None:
    """Give a file the access of another."""
    path.chmod(_access(like))


def _access(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)

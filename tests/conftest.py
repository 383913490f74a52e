"""A tiny target, made once a session, and runs that use it."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; the cores are shared by test processes

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from data.settings import Run

if TYPE_CHECKING:
    from pipeline.target import Target


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of runs that share one `.targets` folder."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def make_run(tiny_root: Path) -> Callable[..., Run]:
    """A run over a tiny float32 target: `make_run("name", extract={...}, ...)`; sections given replace the defaults."""

    def make(name: str, **sections: Any) -> Run:
        body: dict[str, Any] = {
            "name": name,
            "root": str(tiny_root),
            "target": {"model": "tiny:2", "dtype": "float32"},
            "data": {"train": [{"path": "rows.jsonl"}], "max_length": 256},
            "extract": {"parts": 2, "codec": "float32", "tokens_per_batch": 512},
        }
        return Run.model_validate({**body, **sections})

    return make


@pytest.fixture(scope="session")
def tiny_run(make_run: Callable[..., Run]) -> Run:
    return make_run("tiny")


@pytest.fixture(scope="session")
def tiny_target(tiny_run: Run) -> Target:
    """The tiny target on the CPU, float32. Shared: do not change it."""
    from pipeline.target import load_target

    return load_target(tiny_run, "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need GPUs are skipped where there are too few; what compilers warn of a GPU fails no test."""
    wanted = {"gpu": 1, "gpu2": 2}
    if not any(item.get_closest_marker(name) for item in items for name in wanted):
        return
    import torch

    count = torch.cuda.device_count()
    for item in items:
        for name, least in wanted.items():
            if not item.get_closest_marker(name):
                continue
            item.add_marker(pytest.mark.filterwarnings("default"))
            if count < least:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} GPUs, {count} here"))

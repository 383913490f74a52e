"""CUDA graphs of fixed-shape functions over static tensors, and fused forms of the small operations inside them.

A one-token pass of a small model is a thousand tiny kernels; a graph takes away the host's share of their cost, and
fusing norms and rotary embeddings takes away most of the kernels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

ROTARY = ("apply_rotary_pos_emb", "rotate")
"""Names under which modelling code keeps its rotary embedding."""
SHAPES = 256
"""Shapes that one fused function may be compiled for; beyond it torch would silently stop compiling."""


class Graphs:
    """Functions by key: replayed as CUDA graphs, or called as they are when `enabled` is false.

    `seconds` and `count` tell what capturing cost. `fuse` names the modules whose small operations are compiled.
    """

    def __init__(self, enabled: bool, fuse: tuple[nn.Module, ...] = ()) -> None:
        self.enabled, self.fuse = enabled, fuse
        self.seconds, self.count = 0.0, 0
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Any, function: Callable[[], None], idle: Callable[[], Any]) -> None:
        """Run `function`, which reads and writes static tensors only.

        A key seen for the first time is captured; `idle()` is a context in which running it changes no row.
        """
        if not self.enabled:
            function()
            return
        if key not in self._graphs:
            started = time.perf_counter()
            with idle(), fused(*self.fuse):
                self._graphs[key] = self._capture(function)
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - started
            self.count += 1
        self._graphs[key].replay()

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph


@contextmanager
def fused(*models: nn.Module) -> Iterator[None]:
    """Within, norms and rotary embeddings of `models` are compiled, each one function for all layers."""
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES))
        for model in models:
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    stack.enter_context(_replaced(module, "forward", _compiled(type(module).forward, module)))
            for name in {type(module).__module__ for module in model.modules()}:
                for rotary in ROTARY:
                    if hasattr(sys.modules[name], rotary):
                        original = getattr(sys.modules[name], rotary)
                        stack.enter_context(_replaced(sys.modules[name], rotary, _compiled(original)))
        yield


_cache: dict[Any, Any] = {}


def _compiled(function: Callable[..., Any], bound: Any = None) -> Callable[..., Any]:
    """`function` compiled once for all who ask, bound to an object or free."""
    if function not in _cache:
        _cache[function] = torch.compile(function, dynamic=False)
    made = _cache[function]
    return made if bound is None else made.__get__(bound)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

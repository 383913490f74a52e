"""The training step: fixed shapes, one thread, replayed as CUDA graphs.

Three modes run the same functions. `eager` is the oracle. `compile` compiles the drafter layer by layer and the
element-wise parts of the loss. `whole` captures what `compile` runs: micro-steps that write gradients (*first*), add
to them (*next*) and reduce them over ranks (*last*), the optimizer, and the scoring pass of validation.

Shapes: S context states, A blocks of B slots, Q = A * B, H width, K taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.codec import Codec
from data.errors import Failure
from pipeline.attention import DenseMask, FlexMask, Mask
from pipeline.batches import BatchShape
from pipeline.drafter import Drafter, Layer, Rope
from pipeline.head import TargetHead
from pipeline.loss import ChunkedLoss, LossOutput, LossRule
from pipeline.optimizer import Optimizer
from pipeline.products import NarrowWeights

Function = TypeVar("Function", bound=Callable[..., Any])


KERNELS = 64
"""Kernels that the optimizer's function may be compiled into: it is, once for every shape of a weight."""


def compiler(mode: str, deterministic: bool = False, kernels: int | None = None) -> Callable[[Function], Function]:
    """What wraps the functions of a mode: `torch.compile` with static shapes, or nothing.

    `deterministic` keeps Inductor from choosing kernels by timing them, so that another process chooses the same.
    What one process traced the next takes from the cache, our autograd functions included: torch leaves them out unless
    told that they do nothing but what their graphs show (their code is part of the cache's key).
    A function that compiles again and again without need fails at torch's own limit, early, unless `kernels` says that
    it has so many shapes.
    """
    if mode == "eager":
        return lambda function: function
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if inductor.triton.cudagraphs:
        raise Failure("torch._inductor.config.triton.cudagraphs is on: captures never nest; unset it")
    inductor.deterministic = deterministic
    functorch.autograd_cache_allow_custom_autograd_functions = True

    def wrap(function: Function) -> Function:
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        return compiled if kernels is None else _of_many_kernels(compiled, kernels)

    return wrap


def _of_many_kernels(compiled: Function, kernels: int) -> Function:
    """A compiled function with a limit of its own (torch 2.13 takes one with `torch.compile`, 2.11 does not).

    torch looks at the limit when a call compiles, so it is set around calls; a replayed graph makes none.
    """
    limit = torch._dynamo.config.patch(recompile_limit=kernels)

    def run(*arguments: Any) -> Any:
        with limit:
            return compiled(*arguments)

    return cast(Function, run)


def context_of(drafter: Drafter, codec: Codec, taps: Sequence[int] | None, noise: float, arrays: dict[str, Tensor],
               seed: Tensor, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Encoded states -> context [1, S, H]."""
    states = codec.decode(arrays, taps).to(dtype)
    if noise:
        rms = states.float().square().mean(-1, keepdim=True).sqrt()
        states = (states.float() + noise * rms * uniform_noise(states.shape, seed)).to(dtype)
    return drafter.project(states.flatten(1)[None])


def uniform_noise(shape: torch.Size, seed: Tensor) -> Tensor:
    """float32 in [-1, 1), a hash of (seed, index): the same on every device and after every resume."""
    x = torch.arange(shape.numel(), dtype=torch.int64, device=seed.device) + seed.long() * 0x9E3779B1
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (((x ^ (x >> 16)) & 0xFFFFFF).float() / 0x800000 - 1).view(shape)


def block_inputs(head: TargetHead, mask_token: int, block_size: int, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Embedded slots [1, Q, H] and their positions [1, Q]: the anchor's token, then mask tokens."""
    ids = torch.full((len(batch["start"]), block_size), mask_token, dtype=torch.int32, device=batch["start"].device)
    ids = torch.cat((batch["anchor_token"][:, None], ids[:, 1:]), dim=1)
    slots = torch.arange(block_size, dtype=torch.int32, device=ids.device)
    positions = (batch["end"] - batch["start"])[:, None] + slots
    return head.embed(ids.flatten()[None].long()), positions.flatten()[None]


def rope_tables(drafter: Drafter, positions: Tensor, context: Tensor, dtype: torch.dtype) -> tuple[Rope, Rope]:
    """Tables of the slots [1, Q] and of the context [1, S]."""
    return drafter.rope(positions, dtype), drafter.rope(context, dtype)


def run_layer(layer: Layer, x: Tensor, rope: Rope, context: Tensor, context_rope: Rope, mask: Mask) -> Tensor:
    """One layer over packed blocks: x [1, Q, H], context [1, S, H] -> [1, Q, H]."""
    return layer(x, rope, layer.self_attn.keys_values(context, context_rope), mask.attend)


def run_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


def chunk_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """bool [A, B - 1]: where the likeliest token is the label. Logits [N, V] after no multiplier keep their order."""
    return (logits.argmax(1).view_as(labels) == labels) & (labels >= 0)


class Step:
    """Everything that one rank's device runs.

    `inputs` are static views that a batch is copied into before `micro` or `score`. `matches` int32 [A] is what
    `score` leaves: slots hit in a row from slot 1. `sums` are metrics since the host last took them.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        codec: Codec,
        taps: Sequence[int] | None,
        shape: BatchShape,
        rule: LossRule,
        optimizer: Optimizer,
        *,
        mode: str,
        dtype: torch.dtype,
        fp8: bool = False,
        noise: float = 0.0,
        dense: bool = False,
        deterministic: bool = False,
    ) -> None:
        device = next(drafter.parameters()).device
        self.drafter, self.head, self.codec, self.taps = drafter, head, codec, taps
        self.shape, self.rule, self.optimizer, self.mode, self.dtype, self.noise = (
            shape,
            rule,
            optimizer,
            mode,
            dtype,
            noise,
        )
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        wrap = compiler(mode, deterministic)
        self.run_context, self.run_blocks = wrap(context_of), wrap(block_inputs)
        self.run_rope = wrap(rope_tables)
        self.run_layer, self.run_norm, self.hits = wrap(run_layer), wrap(run_norm), wrap(chunk_hits)
        self.narrow = NarrowWeights(drafter, dtype, fp8, wrap) if dtype != torch.float32 else None
        copies = self.narrow.copies if self.narrow is not None and optimizer.muon is None else {}
        optimizer.attach(copies, compiler(mode, deterministic, KERNELS))
        self.refresh_apart = self.narrow is not None and not copies
        kernel = device.type == "cuda" and mode != "eager"
        self.loss = ChunkedLoss(head, rule, shape.blocks, fp8=fp8, compiled=wrap, kernel=kernel)
        self.buffer = torch.zeros(shape.offsets()[1], dtype=torch.uint8, device=device)
        self.inputs = shape.device_views(self.buffer)
        self.matches = torch.zeros(shape.blocks, dtype=torch.int32, device=device)
        self.sums = {
            "loss": torch.zeros((), device=device),
            "norm": torch.zeros((), device=device),
            "hits": torch.zeros(rule.block_size - 1, dtype=torch.int64, device=device),
            "counts": torch.zeros(rule.block_size - 1, dtype=torch.int64, device=device),
        }
        self.dense = dense or device.type != "cuda" or mode == "eager"
        self.reducer = torch.cuda.Stream() if self.world > 1 and device.type == "cuda" else None
        self.graphs: dict[tuple[str, bool, bool], torch.cuda.CUDAGraph] = {}

    def masks(self) -> dict[int | None, Mask]:
        kind = DenseMask if self.dense else FlexMask
        return {window: kind(self.shape.mask(window), self.inputs) for window in self.shape.windows}

    def window(self, layer: int) -> int | None:
        config = self.drafter.config
        return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None

    def forward(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Inputs -> each piece's (input leaf, output), the context and its leaf; the last output is hidden [1, Q, H].

        Pieces are cut from each other, so that the backward runs one layer at a time and finished gradients can
        leave for other ranks while it goes on.
        """
        batch = self.inputs
        states = {name.removeprefix("state."): a for name, a in batch.items() if name.startswith("state.")}
        context = self.run_context(
            self.drafter, self.codec, self.taps, self.noise, states, batch["noise_seed"], self.dtype
        )
        leaf = context.detach().requires_grad_()
        x, positions = self.run_blocks(self.head, self.drafter.config.mask_token_id, self.rule.block_size, batch)
        x = x.to(self.dtype)
        rope, context_rope = self.run_rope(self.drafter, positions, batch["position"][None], self.dtype)
        masks, pieces = self.masks(), []
        for index, layer in enumerate(self.drafter.layers):
            y = self.run_layer(layer, x, rope, leaf, context_rope, masks[self.window(index)])
            pieces.append((x, y))
            x = y.detach().requires_grad_()
        pieces.append((x, self.run_norm(self.drafter.norm, x)))
        return pieces, context, leaf

    def backward(self, pieces: list[tuple[Tensor, Tensor]], context: Tensor, leaf: Tensor, gradient: Tensor,
                 reduce: bool) -> None:  # fmt: skip
        modules = [*self.drafter.layers, self.drafter.norm]
        for module, (x, y) in zip(reversed(modules), reversed(pieces), strict=True):
            torch.autograd.backward(y, gradient)
            gradient = x.grad
            if reduce:
                self._reduce(module)
        torch.autograd.backward(context, leaf.grad)
        if reduce:
            self._reduce(self.drafter.fc, self.drafter.hidden_norm)
            if self.reducer is not None:
                torch.cuda.current_stream().wait_stream(self.reducer)

    def _reduce(self, *modules: nn.Module) -> None:
        """Sum finished gradients over ranks, beside the backward of what lies below."""
        gradients = [parameter.grad for module in modules for parameter in module.parameters()]
        if self.reducer is None:
            for gradient in gradients:
                dist.all_reduce(gradient)
            return
        self.reducer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reducer), dist._coalescing_manager(device=gradients[0].device):
            for gradient in gradients:
                dist.all_reduce(gradient)

    def run_micro(self, first: bool, last: bool) -> None:
        """Forward, loss and backward of the batch in `inputs`; gradients are written (`first`) or added."""
        if first:
            for parameter in self.drafter.parameters():
                parameter.grad = None
        pieces, context, leaf = self.forward()
        output, gradient = self.loss(pieces[-1][1].detach()[0], self.inputs)
        self.backward(pieces, context, leaf, gradient[None], reduce=last and self.world > 1)
        self._count(output)

    def _count(self, output: LossOutput) -> None:
        self.sums["loss"].add_(output.loss)
        self.sums["hits"].add_(output.hits)
        self.sums["counts"].add_(output.counts)

    def run_update(self) -> None:
        self.optimizer.update()
        self.sums["norm"].add_(self.optimizer.norm)
        if self.refresh_apart:
            self.narrow.refresh()

    @torch.no_grad()
    def run_score(self) -> None:
        """Fill `matches` for the batch in `inputs`."""
        with torch.enable_grad():
            hidden = self.forward()[0][-1][1].detach()
        blocks = hidden.view(self.shape.blocks, self.rule.block_size, -1)
        for low in range(0, len(blocks), self.loss.chunk_blocks):
            high = min(low + self.loss.chunk_blocks, len(blocks))
            logits = self.loss.logits(blocks[low:high, 1:].reshape(-1, blocks.shape[-1]))
            hits = self.hits(logits, self.inputs["labels"][low:high])
            self.matches[low:high] = hits.int().cumprod(1).sum(1).int()

    def inputs_from(self, views: dict[str, np.ndarray]) -> None:
        """Copy one batch from host views into the static inputs."""
        for name, view in views.items():
            self.inputs[name].copy_(torch.from_numpy(view))

    def micro(self, first: bool, last: bool) -> None:
        self._run("micro", first, last and self.world > 1)

    def update(self) -> None:
        self._run("update", False, False)

    def score(self) -> None:
        self._run("score", False, False)

    def _run(self, kind: str, first: bool, last: bool) -> None:
        graph = self.graphs.get((kind, first, last))
        if graph is not None:
            graph.replay()
        else:
            self._call(kind, first, last)

    def _call(self, kind: str, first: bool, last: bool) -> None:
        if kind == "micro":
            self.run_micro(first, last)
        elif kind == "update":
            self.run_update()
        else:
            self.run_score()

    def prepare(self, micro_steps: int, score: bool = True) -> None:
        """Warm up (compiles everything) and, in mode `whole`, capture. Weights and moments stay as they are.

        `micro_steps`: batches that this rank runs in one optimizer step. Call it before any reader thread starts.
        Raises Failure, naming the operation, when something cannot be captured.
        """
        if self.mode == "eager":
            return
        kinds = self._kinds(micro_steps, score)
        with self._frozen(), _side_stream(self.buffer.is_cuda):
            for _ in range(2):
                for kind in kinds:
                    self._call(*kind)
        if self.mode == "whole":
            self._capture(kinds)

    def _kinds(self, micro_steps: int, score: bool) -> list[tuple[str, bool, bool]]:
        several = self.world > 1
        ends = [("micro", i == 0, several and i == micro_steps - 1) for i in range(micro_steps)]
        return [*dict.fromkeys(ends), ("update", False, False), *([("score", False, False)] if score else [])]

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        """Run steps for their side effects on compilers only: a set `bad` keeps the optimizer still."""
        optimizer = self.optimizer
        moved = [optimizer.bad, optimizer.step_count, *self.sums.values()]
        saved = [tensor.clone() for tensor in moved]
        optimizer.bad.fill_(0)
        yield
        for tensor, before in zip(moved, saved, strict=True):
            tensor.copy_(before)

    def _capture(self, kinds: list[tuple[str, bool, bool]]) -> None:
        torch.cuda.synchronize()
        if self.world > 1:
            dist.barrier()
            torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for kind in kinds:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._call(*kind)
            except RuntimeError as error:
                cause = _first(error)
                raise Failure(
                    f"CUDA graph capture of `{kind[0]}` failed at {_own_frame(cause)}: {str(cause).splitlines()[0]}; "
                    "set train.graphs: compile to train without graphs"
                ) from error
            self.graphs[kind] = graph

    def take_sums(self) -> dict[str, Tensor]:
        """Metrics since the last call, on the device; they start again from zero."""
        taken = {name: value.clone() for name, value in self.sums.items()}
        for value in self.sums.values():
            value.zero_()
        return taken


@contextmanager
def _side_stream(cuda: bool) -> Iterator[None]:
    """Run on a stream of its own, as capture wants its warm-up, and wait for it."""
    if not cuda:
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def _first(error: BaseException) -> BaseException:
    """The error that broke a capture: to end a broken capture is an error too, and hides it."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _own_frame(error: BaseException) -> str:
    """File and line of the deepest frame of ours in an error's traceback."""
    place, trace = "an unknown place", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "pipeline" in code.co_filename or "data" in code.co_filename:
            place = f"{'/'.join(code.co_filename.split('/')[-2:])}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return place

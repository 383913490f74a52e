"""Time of the loss alone: loss and gradient of hidden states from hidden states and a frozen LM head.

    python -m tests.benchmarks.loss [--shape small,smollm2,8b] [--json FILE]

Each way to compute it runs on every shape, and one markdown table says: milliseconds (median of 20, of fewer
where one call is slow), whether that is a CUDA graph's replay or plain calls (what reads a number back to the host
cannot be captured), peak GiB beyond what was held before, relative error of the loss and relative L2 error of the
gradient of hidden states against float32. Weights are those of training, exp(-(k - 1) / 7) on valid labels, one in ten
invalid, unless the row says `unweighted`. Ours cuts slot 0 of each block out and puts it back, and counts hits; the
others are handed their rows cut, and count none.

`ours` is the product, `compiled` the same without its kernel; rows `ours, N Mi` have chunks of at most N * 2^20 logits
that divide the batch evenly. Liger (`liger-kernel`) and CCE (`cut-cross-entropy`) run where they are installed. What
fails has the reason in its row; what has not begun after `--seconds` is not run; GRACE seconds later a hanging one is
given up, and the tables come out.
Needs a CUDA device; `--shape tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.batches import decay_weights
from pipeline.graphs import compiler
from pipeline.head import TargetHead
from pipeline.loss import CHUNK_LOGITS, ChunkedLoss, LossRule
from tests.benchmarks.step import measure, memory_before, memory_peak, synchronise

BLOCK_SIZE, DECAY, IGNORED = 16, 7.0, -100
STEPS, STEP_SECONDS = 20, 2.0
"""Timed calls of a contender on a shape, and the seconds that they may take together."""
GRACE = 30.0
Run = Callable[[], tuple[Tensor, Tensor]]
"""The loss [] and the gradient of hidden states, [Q, H] or without each block's slot 0 [N, H]."""


@dataclass(frozen=True)
class Shape:
    blocks: int
    width: int
    vocab: int


SHAPES = {
    "small": Shape(256, 576, 49152),
    "smollm2": Shape(3072, 576, 49152),
    "8b": Shape(512, 4096, 151936),
    "tiny": Shape(8, 64, 512),
}


@dataclass(frozen=True)
class Case:
    """One shape's inputs and its answers in float32. A blocks, K = 15 labels each, N = A * K, Q = A * 16.

    `labels` int32 [A, K], -1 invalid; `scale` [1]. The same flat, for others: `rows` [N, H], `targets` int64 [N] with
    IGNORED, `weights` [N] with the scale. `losses` [N] and `gradients` [N, H] are of weight 1, 0 where invalid.
    """

    head: TargetHead
    hidden: Tensor
    labels: Tensor
    scale: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor
    losses: Tensor
    gradients: Tensor

    def even_blocks(self, chunk_logits: int) -> int:
        """Most blocks that keep to `chunk_logits` and divide the batch."""
        blocks = len(self.labels)
        most = max(1, min(blocks, chunk_logits // self.head.lm_head.shape[0] // BLOCK_SIZE))
        return next(count for count in range(most, 0, -1) if blocks % count == 0)

    def errors(self, loss: Tensor, gradient: Tensor, weighted: bool) -> dict[str, float]:
        """Relative errors of a run's loss and gradient."""
        weights = self.weights if weighted else torch.ones_like(self.weights)
        if len(gradient) == len(self.hidden):
            gradient = without_anchors(gradient)
        want, right = (weights * self.losses).sum(), self.gradients * weights[:, None]
        wrong = (gradient.float() - right).norm() / right.norm()
        return {"loss_error": float((loss - want).abs() / want), "gradient_error": float(wrong)}


def without_anchors(slots: Tensor) -> Tensor:
    """[Q, H] -> [N, H]: slot 0 of each block has no label."""
    return slots.view(-1, BLOCK_SIZE, slots.shape[-1])[:, 1:].reshape(-1, slots.shape[-1])


def make_case(shape: Shape, device: str) -> Case:
    """Hidden states and a head whose logits have a standard deviation of 2, and random labels."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    lm_head, slots = draw(shape.vocab, shape.width), shape.blocks * BLOCK_SIZE
    hidden = draw(slots, shape.width) * (2 / shape.width**0.5)
    sizes = (shape.blocks, BLOCK_SIZE - 1)
    labels = torch.randint(shape.vocab, sizes, generator=generator, device=device, dtype=torch.int32)
    labels[torch.rand(sizes, generator=generator, device=device) < 0.1] = -1
    weights = torch.from_numpy(decay_weights(BLOCK_SIZE, DECAY)).to(device) * (labels >= 0)
    scale, rows = 1 / weights.sum().reshape(1), without_anchors(hidden)
    weights = (weights * scale).flatten()
    targets = torch.where(labels >= 0, labels, IGNORED).flatten().long()
    answers = reference(rows, lm_head, targets)
    return Case(TargetHead(lm_head, lm_head), hidden, labels, scale, rows, targets, weights, *answers)


def reference(rows: Tensor, lm_head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """float32 losses [N] and gradients [N, H] of each row by itself."""
    wide, losses, gradients = lm_head.float(), [], []
    for x, target in zip(rows.split(2048), targets.split(2048), strict=True):
        valid, index = (target != IGNORED)[:, None], target.clamp(min=0)[:, None]
        log_q = (x.float() @ wide.t()).log_softmax(1)
        losses.append((-log_q.gather(1, index) * valid)[:, 0])
        slope = log_q.exp_().scatter_add_(1, index, torch.full_like(losses[-1], -1.0)[:, None])
        gradients.append((slope @ wide) * valid)
    return torch.cat(losses), torch.cat(gradients)


RULE = LossRule("cross_entropy", BLOCK_SIZE, DECAY, alpha=0.5, distill=1.0)


def ours(case: Case, chunk_logits: int = CHUNK_LOGITS, fp8: bool = False, kernel: bool = True) -> Run:
    """The product's loss, compiled as its step compiles it."""
    blocks, batch = len(case.labels), {"labels": case.labels, "scale": case.scale}
    sizes = {"chunk_logits": chunk_logits, "fp8": fp8, "kernel": kernel and case.hidden.is_cuda}
    loss = ChunkedLoss(case.head, RULE, blocks, compiled=compiler("compile"), **sizes)

    def run() -> tuple[Tensor, Tensor]:
        output, gradient = loss(case.hidden, batch)
        return output.loss, gradient

    return run


def ours_even(case: Case, chunk_logits: int, **options: Any) -> Run:
    """Ours with chunks of one size, so that one shape is compiled."""
    return ours(case, case.even_blocks(chunk_logits) * BLOCK_SIZE * case.head.lm_head.shape[0], **options)


def backward(case: Case, loss_of: Callable[[Tensor], Tensor]) -> Run:
    """Loss and gradient of the rows [N, H] through autograd; the head has no gradient."""

    def run() -> tuple[Tensor, Tensor]:
        rows = case.rows.detach().requires_grad_()
        loss = loss_of(rows)
        return loss.detach(), torch.autograd.grad(loss, rows)[0]

    return run


def dense_loss(rows: Tensor, lm_head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    logits = (rows @ lm_head.t()).float()
    return (weights * F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")).sum()


def dense(case: Case) -> Run:
    """The ordinary way: whole logits, cross entropy and autograd, compiled, a chunk of ours at a time."""
    loss_of, size = compiler("compile")(dense_loss), case.even_blocks(CHUNK_LOGITS) * (BLOCK_SIZE - 1)
    chunks = list(zip(case.rows.split(size), case.targets.split(size), case.weights.split(size), strict=True))

    def run() -> tuple[Tensor, Tensor]:
        losses, gradients = [], []
        for x, targets, weights in chunks:
            leaf = x.detach().requires_grad_()
            loss = loss_of(leaf, case.head.lm_head, targets, weights)
            gradients.append(torch.autograd.grad(loss, leaf)[0])
            losses.append(loss.detach())
        return torch.stack(losses).sum(), torch.cat(gradients)

    return run


def torch_own(case: Case) -> Run:
    """PyTorch's chunked linear cross entropy (2.13 has it), which computes the logits again in its backward."""
    if not hasattr(F, "linear_cross_entropy"):
        raise NotImplementedError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    wanted = {"reduction": "none", "ignore_index": IGNORED, "options": options}
    losses = partial(F.linear_cross_entropy, **wanted)
    return backward(case, lambda rows: (case.weights * losses(rows, case.head.lm_head, case.targets)).sum())


def liger(case: Case, reduction: str, budget: int = 1) -> Run:
    """Liger's fused loss. `none` takes weights, and computes the logits again in its backward; `sum` does neither.

    `budget`: its `chunk_mem_const`, logits of a chunk as a multiple of the size of the hidden states.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    options = (None, None, IGNORED, 0.0, 0.0, reduction, None, False, None, False, False, False, None, None, budget)

    def loss_of(rows: Tensor) -> Tensor:
        losses = Fused.apply(rows, case.head.lm_head, case.targets, *options)[0]
        return losses if reduction == "sum" else (case.weights * losses).sum()

    return backward(case, loss_of)


def cce(case: Case, filter_eps: str | None) -> Run:
    """Cut cross entropy, which never stores logits. `filter_eps` None computes negligible gradients too."""
    from cut_cross_entropy import linear_cross_entropy

    losses = partial(linear_cross_entropy, ignore_index=IGNORED, reduction="none", filter_eps=filter_eps, impl="cce")
    return backward(case, lambda rows: (case.weights * losses(rows, case.head.lm_head, case.targets)).sum())


def contenders() -> Mapping[str, Callable[[Case], Run]]:
    """Name -> what makes that way's run on a case; in the order of what would be missed most."""
    return {
        "ours": ours,
        "ours, compiled": partial(ours, kernel=False),
        "ours fp8": partial(ours, fp8=True),
        "ours fp8, compiled": partial(ours, fp8=True, kernel=False),
        "liger none": partial(liger, reduction="none"),
        "liger sum, unweighted": partial(liger, reduction="sum"),
        "dense, compiled": dense,
        "torch linear_cross_entropy": torch_own,
        "cce": partial(cce, filter_eps="auto"),
        "cce, exact": partial(cce, filter_eps=None),
        **{f"ours, {size} Mi": partial(ours_even, chunk_logits=size << 20) for size in (100, 50, 25)},
        "liger sum, unweighted, budget 8": partial(liger, reduction="sum", budget=8),
    }


def captured(run: Run, device: str) -> tuple[Run, str]:
    """A run's CUDA graph and `graph`, or itself and `plain`. It is asked for reads to the host before any capture:
    a capture that fails harms the allocator."""
    if device != "cuda":
        return run, "plain"
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    except RuntimeError:
        return run, "plain"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            result = run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, "plain"

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return result

    return replay, "graph"


def contend(make: Callable[[Case], Run], case: Case, weighted: bool, device: str) -> dict[str, Any]:
    """Everything measured of one way on one case."""
    before = memory_before(device)
    run = make(case)
    run()  # compiles; what tries kernels out takes memory of its own
    synchronise(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    run()
    synchronise(device)
    steps = max(3, min(STEPS, int(STEP_SECONDS / (time.perf_counter() - begun))))
    run, how = captured(run, device)
    timed = measure(run, steps, device)
    return {"run": how, "steps": steps, **timed, "gib": memory_peak(device, before), **case.errors(*run(), weighted)}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table: a line a way; milliseconds of every shape, and of the last shape memory and errors."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = [
        "| way | "
        + " | ".join(f"`{shape}` ms" for shape in shapes)
        + f" | run | `{shapes[-1]}`: peak GiB | loss error "
        "| gradient error |",
        "|" + "---|" * (len(shapes) + 5),
    ]
    for how in dict.fromkeys(row["how"] for row in rows):
        mine = {row["shape"]: row for row in rows if row["how"] == how}
        cells = [f"{mine[shape]['ms']:.3f}" if "ms" in mine.get(shape, {}) else "-" for shape in shapes]
        measured = [row for row in mine.values() if "ms" in row]
        if not measured:
            reason = next(iter(mine.values()))["failed"].replace("|", "/")
            lines.append(f"| {how} | " + " | ".join(cells) + f" | {reason} | - | - | - |")
            continue
        last = measured[-1]
        lines.append(
            f"| {how} | " + " | ".join(cells) + f" | {last['run']} | {last['gib']:.2f} | {last['loss_error']:.1e} | "
            f"{last['gradient_error']:.1e} |"
        )
    return "\n".join(lines)


def report(rows: list[dict[str, Any]], path: str | None) -> None:
    print(f"\n{markdown(rows)}", flush=True)
    if path:
        with open(path, "w") as file:
            json.dump(rows, file)


def give_up(rows: list[dict[str, Any]], path: str | None) -> None:
    """What the watch does when the last row hangs, on the device or in a compiler."""
    report(rows, path)
    os._exit(1)


def run_all(shapes: list[str], rows: list[dict[str, Any]], seconds: float, device: str) -> None:
    """Append a row for each way and shape, a way at a time so that shapes share what is compiled."""
    end, cases = time.monotonic() + seconds, {name: make_case(SHAPES[name], device) for name in shapes}
    for how, make in contenders().items():
        torch._dynamo.reset()
        for name, case in cases.items():
            begun, row = time.monotonic(), {"how": how, "shape": name, "failed": "did not come back"}
            rows.append(row)
            try:
                if begun > end:
                    raise TimeoutError(f"not run: {seconds:.0f} s were up")
                measured = contend(make, case, "unweighted" not in how, device)
                del row["failed"]
                row |= measured
            except Exception as error:  # the others' rows must come out
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            row["wall_s"] = time.monotonic() - begun
            print(row, flush=True)


def shape_names(text: str) -> list[str]:
    """Raises ArgumentTypeError, naming the shapes there are."""
    names = text.split(",")
    if not set(names) <= set(SHAPES):
        raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(SHAPES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = "comma-separated: " + ", ".join(SHAPES)
    parser.add_argument("--shape", type=shape_names, default="small,smollm2,8b", help=names)
    parser.add_argument("--seconds", type=float, default=60, help="what has not begun by then is not run")
    parser.add_argument("--json", help="write the rows here too")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    watch = threading.Timer(arguments.seconds + GRACE, give_up, (rows, arguments.json))
    watch.daemon = True
    watch.start()
    with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):  # capture wants a stream of its own
        run_all(arguments.shape, rows, arguments.seconds, device)
    watch.cancel()
    report(rows, arguments.json)


if __name__ == "__main__":
    main()

"""One kernel for what `pipeline.loss.chunk_gradient` does to cross entropy, a contender of `tests.benchmarks.loss`.

A program reads its row twice, the second time from cache, with one exponential an element each time, and writes the
gradient over the logits. Needs triton, which comes with PyTorch for CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH, WARPS = 8192, 16


@triton.jit
def row_gradient(logits_ptr, labels_ptr, weights_ptr, losses_ptr, hits_ptr, vocabulary, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    weight = tl.load(weights_ptr + row)
    # read ahead of the reductions' barriers: behind them another warp may have written here
    named = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for low in range(0, vocabulary, width):
        columns = low + tl.arange(0, width)
        z = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher))
        largest = higher
    lse = largest + tl.log(total)
    for low in range(0, vocabulary, width):
        columns = low + tl.arange(0, width)
        z = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(z - lse) - tl.where(columns == label, 1.0, 0.0)) * weight
        tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < vocabulary)
    tl.store(losses_ptr + row, weight * (lse - named))
    tl.store(hits_ptr + row, ((label >= 0) & (named >= largest)).to(tl.int32))


def write_gradient(logits: Tensor, labels: Tensor, weights: Tensor, losses: Tensor, hits: Tensor) -> None:
    """Logits [N, V] become their gradient; `losses` float32 [N] and `hits` int32 [N] are filled.

    `labels` int32 [N], -1 invalid; `weights` float32 [N], scale included, 0 where invalid.
    """
    grid = (logits.shape[0],)
    row_gradient[grid](logits, labels, weights, losses, hits, logits.shape[1], width=WIDTH, num_warps=WARPS)

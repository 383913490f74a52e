"""Cross entropy and its gradient as one kernel: what `pipeline.loss.chunk_gradient` does, with fewer trips to memory.

A program reads its row twice, the second time mostly from cache, takes one exponential an element each time, and writes
the gradient, over the logits if asked to. On an H200, before it had its place here, the loss with its products took
0.93 ms with it and 1.09 without at SmolLM2's size and 256 blocks, 30.1 and 31.3 ms at 8B's. Needs triton, which comes
with PyTorch for CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH, WARPS = 8192, 16


@triton.jit
def row_gradient(
    logits_ptr, labels_ptr, weights_ptr, gains_ptr, gradient_ptr, losses_ptr, hits_ptr, vocabulary, width: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    gradient_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    gain = tl.load(gains_ptr + row)
    # read ahead of the reductions' barriers: behind them another warp may have written here
    named = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
    largest = -3.0e38  # finite: a whole stretch of the row may be -inf
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
        gradient = (tl.exp(z - lse) - tl.where(columns == label, 1.0, 0.0)) * gain
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=columns < vocabulary)
    tl.store(losses_ptr + row, tl.load(weights_ptr + row) * (lse - named))
    tl.store(hits_ptr + row, ((label >= 0) & (named >= largest)).to(tl.int32))


def write_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, gains: Tensor, gradient: Tensor, losses: Tensor, hits: Tensor
) -> None:
    """Fill `gradient` [N, V], of any float type and perhaps `logits` itself, `losses` float32 [N] and `hits` int32 [N].

    `logits` [N, V], contiguous. N may come as [A, K]: `labels` int32, -1 invalid, all below V, or the kernel would read
    past its row (`Cache` refuses such ids); `weights` float32, scale included, 0 where invalid; `gains` float32: the
    weights in units of `gradient`.
    """
    grid = (logits.shape[0],)
    row_gradient[grid](
        logits, labels, weights, gains, gradient, losses, hits, logits.shape[1], width=WIDTH, num_warps=WARPS
    )

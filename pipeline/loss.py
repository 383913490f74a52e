"""The loss, fused with the LM head: a chunk of whole blocks at a time, logits never exist for all slots.

The gradient of the hidden states is formed in the same pass, so that nothing of size vocabulary is kept for the
backward. Shapes: A blocks, K = B - 1 predicted slots, N = A * K rows of a chunk, H width, V vocabulary.

Weights. *Cross entropy*: w_k = exp(-(k - 1) / decay) (DFlash, arXiv 2602.06036). *D-PACE* (arXiv 2605.18810, section
3): s_k = (1 - alpha) p(label_k) + alpha, 1 on invalid slots; P_k = prod_{i <= k} s_i; w_k = sum of P_m over valid
m >= k, detached. *Distillation*: KL(teacher || drafter) or total variation with decay weights. The scale is 1 / sum
of weights of the whole optimizer step, for D-PACE 1 / number of valid labels; it comes with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data import settings
from pipeline.batches import decay_weights
from pipeline.head import TargetHead
from pipeline.products import E4M3, E5M2, quantise, require_float8_sides, scaled_product

CHUNK_LOGITS = 200 << 20
"""Logits of one chunk (400 MiB in bf16): 1,380 rows of a vocabulary of 152k."""


def default_decay(block_size: int) -> float:
    """The published pairing of block size and decay (16: 7, 10: 5, 8: 4), linear in between."""
    return float(np.interp(block_size, (8, 10, 16), (4.0, 5.0, 7.0)))


@dataclass(frozen=True)
class Shape:
    """What the target does to its raw logits: a factor, then a soft cap."""

    logit_multiplier: float
    softcap: float | None


@dataclass(frozen=True)
class LossRule:
    """Resolved loss settings of a drafter."""

    kind: str
    block_size: int
    decay: float
    alpha: float
    distill: float

    @classmethod
    def of(cls, loss: settings.Loss, block_size: int) -> LossRule:
        return cls(loss.kind, block_size, loss.decay or default_decay(block_size), loss.alpha, loss.distill)

    def bound(self, head: Shape) -> float:
        """Largest magnitude of a logits gradient, as a multiple of the batch's scale."""
        return head.logit_multiplier * (self.block_size - 1 if self.kind == "dpace" else 1)

    def plan_weights(self) -> np.ndarray:
        """float32 [B - 1]: what a step's denominator sums over valid labels."""
        if self.kind == "dpace":
            return np.ones(self.block_size - 1, np.float32)
        return decay_weights(self.block_size, self.decay)


@dataclass(frozen=True)
class LossOutput:
    """Sums over a batch, on the device: `loss` [] (weighted and scaled), `hits` and `counts` [B - 1], int."""

    loss: Tensor
    hits: Tensor
    counts: Tensor


def slot_weights(rule: LossRule, decay: Tensor, probability: Tensor, valid: Tensor) -> Tensor:
    """Weight of each slot [A, K] from the label's probability [A, K] and validity [A, K]."""
    if rule.kind != "dpace":
        return decay * valid
    confidence = torch.where(valid, (1 - rule.alpha) * probability + rule.alpha, 1.0)
    reach = confidence.cumprod(1) * valid
    return reach.flip(1).cumsum(1).flip(1) * valid


def narrow(gradient: Tensor, scale: Tensor, bound: float, dtype: torch.dtype) -> Tensor:
    """A logits gradient in `dtype`; float8 is divided by its known bound, so that no largest value is looked for."""
    if dtype != E5M2:
        return gradient.to(dtype)
    return (gradient / float8_step(scale, bound)).to(dtype)


def float8_step(scale: Tensor, bound: float) -> Tensor:
    """float32 []: what one unit of a float8 logits gradient stands for; |gradient| <= bound * scale."""
    return (scale * (bound / torch.finfo(E5M2).max)).reshape(())


def row_weights(labels: Tensor, decay: Tensor, scale: Tensor, bound: float | None) -> tuple[Tensor, Tensor]:
    """Weights [A, K] of cross entropy, 0 where a label is invalid; and what they are in units of a float8 gradient
    (`bound` None: the same)."""
    weights = decay * (labels >= 0) * scale
    return weights, weights if bound is None else weights / float8_step(scale, bound)


def chunk_gradient(
    logits: Tensor, labels: Tensor, decay: Tensor, scale: Tensor, rule: LossRule, head: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss [], hits [A, K] and the gradient of the raw logits [N, V] in `dtype`, from raw logits [N, V].

    `labels` [A, K], -1 invalid. A hit is a label whose logit is the row's largest.
    """
    z, slope = shaped(logits, head)
    log_q = z.log_softmax(1)
    valid = labels >= 0
    index = labels.reshape(-1, 1).clamp(min=0).long()
    log_probability = log_q.gather(1, index).view_as(labels)
    weights = slot_weights(rule, decay, log_probability.exp(), valid) * scale
    loss = -(weights * torch.where(valid, log_probability, 0.0)).sum()
    hits = (z.gather(1, index) >= z.amax(1, keepdim=True)).view_as(labels) & valid
    columns = torch.arange(z.shape[1], device=z.device)
    gradient = log_q.exp_().sub_((columns == index).float()).mul_(weights.view(-1, 1) * slope)
    return loss, hits, narrow(gradient, scale, rule.bound(head), dtype)


def shaped(logits: Tensor, head: Shape) -> tuple[Tensor, Tensor | float]:
    """float32 logits after the target's multiplier and soft-cap, and their slope in the raw logits."""
    z = logits.float()
    if head.logit_multiplier != 1.0:
        z = z * head.logit_multiplier
    if head.softcap is None:
        return z, head.logit_multiplier
    bounded = torch.tanh(z / head.softcap)
    return head.softcap * bounded, head.logit_multiplier * (1 - bounded.square())


def teacher_gradient(logits: Tensor, teacher: Tensor, weights: Tensor, kind: str, head: Shape) -> tuple[Tensor, Tensor]:
    """Weighted distillation loss [] and float32 gradient of the raw logits [N, V] against teacher probabilities [N, V].

    `kl`: sum p (log p - log q), gradient (mass(p) q - p). `tv`: sum |p - q| / 2 with the mass that the teacher does
    not name as one more class, gradient q (s - <q, s>) with s = sign(q - p) / 2.
    """
    z, slope = shaped(logits, head)
    log_q = z.log_softmax(1)
    q, w = log_q.exp(), weights.view(-1, 1)
    if kind == "kl":
        terms = torch.where(teacher > 0, teacher * (teacher.clamp(min=1e-30).log() - log_q), 0.0).sum(1)
        return (terms * weights).sum(), (teacher.sum(1, keepdim=True) * q - teacher) * w * slope
    named = teacher > 0
    rest_p, rest_q = 1 - teacher.sum(1), torch.where(named, 0.0, q).sum(1)
    terms = 0.5 * (torch.where(named, (teacher - q).abs(), 0.0).sum(1) + (rest_p - rest_q).abs())
    sign = 0.5 * torch.where(named, (q - teacher).sign(), (rest_q - rest_p).sign()[:, None])
    return (terms * weights).sum(), q * (sign - (q * sign).sum(1, keepdim=True)) * w * slope


class ChunkedLoss:
    """Loss and its gradient for hidden states [Q, H] of a batch, `chunk_blocks` blocks at a time.

    `compiled` wraps the element-wise part (identity for eager). With `kernel` a kernel of our own takes the place of
    cross entropy's (`pipeline/loss_kernel.py`: a CUDA device), except under a multiplier or a soft-cap.
    """

    def __init__(
        self,
        head: TargetHead,
        rule: LossRule,
        blocks: int,
        *,
        chunk_logits: int = CHUNK_LOGITS,
        fp8: bool = False,
        compiled: Callable[[Callable], Callable] = lambda function: function,
        kernel: bool = False,
    ) -> None:
        self.head, self.rule, self.fp8 = head, rule, fp8
        rows = chunk_logits // head.lm_head.shape[0]
        self.chunk_blocks = max(1, min(blocks, rows // rule.block_size))
        self.decay = torch.from_numpy(decay_weights(rule.block_size, rule.decay)).to(head.lm_head.device)
        self.chunk_gradient, self.teacher_gradient = compiled(chunk_gradient), compiled(teacher_gradient)
        self.quantise, self.row_weights = compiled(quantise), compiled(row_weights)
        self.shape = Shape(head.logit_multiplier, head.softcap)
        self.kernel = kernel and rule.kind == "cross_entropy" and self.shape == Shape(1.0, None)
        if fp8:
            require_float8_sides("lm_head", head.lm_head)
            rows, self.weight_scale = quantise(head.lm_head, E4M3)
            self.rows, self.columns = rows, rows.t().contiguous()

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Raw logits [N, V] of hidden states [N, H]."""
        if not self.fp8:
            logits = hidden @ self.head.lm_head.t()
        else:
            x8, scale = self.quantise(hidden, E4M3)
            logits = scaled_product(x8, self.rows.t(), scale, self.weight_scale, hidden.dtype, fast=True)
        return logits if self.head.bias is None else logits + self.head.bias

    def hidden_gradient(self, gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of the raw logits [N, V] -> of the hidden states [N, H]."""
        if not self.fp8:
            return gradient @ self.head.lm_head
        step = float8_step(scale, self.rule.bound(self.shape))
        return scaled_product(gradient, self.columns.t(), step, self.weight_scale, dtype, fast=False)

    @torch.no_grad()
    def __call__(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> tuple[LossOutput, Tensor]:
        """hidden [Q, H] -> sums and the gradient of hidden [Q, H]; slot 0 of each block gets none."""
        B = self.rule.block_size
        blocks = hidden.view(-1, B, hidden.shape[-1])
        gradient = torch.zeros_like(blocks)
        loss = torch.zeros((), device=hidden.device)
        hits = torch.zeros(B - 1, dtype=torch.int64, device=hidden.device)
        for low in range(0, len(blocks), self.chunk_blocks):
            high = min(low + self.chunk_blocks, len(blocks))
            part, hit, drows = self._rows(blocks[low:high, 1:].reshape(-1, hidden.shape[-1]), batch, low, high)
            gradient[low:high, 1:] = drows.view(high - low, B - 1, -1)
            loss, hits = loss + part, hits + hit.sum(0)
        counts = (batch["labels"] >= 0).sum(0)
        return LossOutput(loss, hits, counts), gradient.view_as(hidden)

    def _rows(self, rows: Tensor, batch: Mapping[str, Tensor], low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        """Loss [], hits [A, K] and the gradient of the hidden states `rows` [N, H] of blocks low .. high. A chunk's
        logits are gone when it returns, before the next chunk makes its own."""
        if self.kernel:
            loss, hits, dlogits = self._by_kernel(self.logits(rows), batch["labels"][low:high], batch["scale"])
        else:
            loss, hits, dlogits = self._chunk(self.logits(rows), batch, low, high)
        return loss, hits, self.hidden_gradient(dlogits, batch["scale"], rows.dtype)

    def _by_kernel(self, logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`chunk_gradient` of cross entropy. The gradient takes the logits' place; in float8 it has one of its own."""
        from pipeline.loss_kernel import write_gradient

        weights, gains = self.row_weights(labels, self.decay, scale, self.rule.bound(self.shape) if self.fp8 else None)
        gradient = torch.empty_like(logits, dtype=E5M2) if self.fp8 else logits
        losses, hits = torch.empty_like(weights), torch.empty_like(labels)
        write_gradient(logits, labels, weights, gains, gradient, losses, hits)
        return losses.sum(), hits, gradient

    def _chunk(self, logits: Tensor, batch: Mapping[str, Tensor], low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        labels, scale, distilled = batch["labels"][low:high], batch["scale"], self.rule.kind in ("kl", "tv")
        dtype = torch.float32 if distilled else E5M2 if self.fp8 else logits.dtype
        loss, hits, gradient = self.chunk_gradient(logits, labels, self.decay, scale, self.rule, self.shape, dtype)
        if not distilled:
            return loss, hits, gradient
        share = self.rule.distill
        weights = (self.decay * (labels >= 0)).view(-1) * scale
        teacher = self._teacher(batch, low * labels.shape[1], high * labels.shape[1])
        own, own_gradient = self.teacher_gradient(logits, teacher, weights, self.rule.kind, self.shape)
        gradient = (1 - share) * gradient + share * own_gradient
        dtype = E5M2 if self.fp8 else logits.dtype
        return (1 - share) * loss + share * own, hits, narrow(gradient, scale, self.rule.bound(self.shape), dtype)

    def _teacher(self, batch: Mapping[str, Tensor], low: int, high: int) -> Tensor:
        """Teacher probabilities [N, V] of rows low .. high, from stored last states or top-k."""
        if "teacher.last_hidden" in batch:
            hidden = batch["teacher.last_hidden"][low:high].view(torch.bfloat16)
            return self.head.logits(hidden.to(self.head.lm_head.dtype)).float().softmax(1)
        ids = batch["teacher.top_k_ids"][low:high].long()
        probabilities = torch.zeros(high - low, self.head.lm_head.shape[0], device=ids.device)
        return probabilities.scatter_(1, ids, batch["teacher.top_k_logprobs"][low:high].float().exp())

"""Choosing tokens: greedy, or from a distribution with true rejection sampling (Leviathan et al. 2023).

Random numbers are hashes of (seed, prompt, position, slot, purpose), so that an answer depends neither on the batch it
shares nor on the order of work. All functions have static shapes and wait for nothing, so that CUDA graphs can hold
them. Shapes: R rows, B block slots, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from data.errors import BadInput

DRAFT, ACCEPT, FINAL, NEXT = 1, 2, 3, 4
"""Purposes of a random number: drawing a draft, accepting it, ending a block, drawing a token without drafts."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; top_p 1 and top_k 0 keep all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise BadInput(f"sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got {self}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def text_key(text: str) -> int:
    """63-bit key of a prompt's id."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP, _FIRST, _SECOND = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 bit patterns."""
    value = value + _STEP
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def uniforms(seed: int, keys: Tensor, positions: Tensor, slots: Tensor, purpose: int) -> Tensor:
    """float32 in [0, 1), 24 random bits each, for int64 arguments that broadcast together.

    `positions` is where a block starts and `slots` counts within it: a position drawn again by a later block gets a
    number of its own.
    """
    value = _mix(keys ^ _signed((seed * 0x9E3779B97F4A7C15 + purpose) & 0xFFFFFFFFFFFFFFFF))
    value = _mix(_mix(value ^ positions) ^ slots)
    return _shift(value, 40).float() * 2.0**-24


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """float32 distribution [..., V] after temperature, then top-k, then top-p (the order of vLLM and transformers)."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token a row from unnormalised weights [..., V] and uniform [...]: int64 [...]."""
    ladder = weights.cumsum(-1)
    total = ladder[..., -1]
    goal = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(ladder, goal.unsqueeze(-1), right=True).squeeze(-1)


def choose(logits: Tensor, sampling: Sampling, keys: Tensor, positions: Tensor) -> Tensor:
    """Next tokens [R] from logits [R, V], for rows with `keys` [R] whose new token takes `positions` [R]."""
    if sampling.greedy:
        return logits.argmax(-1)
    uniform = uniforms(sampling.seed, keys, positions, torch.zeros_like(positions), NEXT)
    return draw(probabilities(logits, sampling), uniform)


def propose(logits: Tensor, sampling: Sampling, keys: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor | None]:
    """Drafts [R, B - 1] from the drafter's logits [R, B - 1, V], and the distribution they were drawn from."""
    if sampling.greedy:
        return logits.argmax(-1), None
    q = probabilities(logits, sampling)
    slots = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    return draw(q, uniforms(sampling.seed, keys[:, None], anchors[:, None], slots, DRAFT)), q


def verify(
    drafts: Tensor, logits: Tensor, q: Tensor | None, sampling: Sampling, keys: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge drafts [R, B - 1] by the target's logits [R, B, V] after the anchor and after each draft.

    Returns the accepted count m [R] and the new tokens [R, B]: m drafts, then the target's own token at index m;
    what follows is meaningless.
    """
    if q is None:
        own = logits.argmax(-1)
        accepted = _leading(drafts == own[:, :-1])
        final = own.gather(1, accepted[:, None])
    else:
        accepted, final = _reject(drafts, probabilities(logits, sampling), q, sampling, keys, anchors)
    tokens = torch.cat((drafts, final), dim=1)
    return accepted, tokens.scatter(1, accepted[:, None], final)


def _leading(hits: Tensor) -> Tensor:
    """Length of the run of True that each row [R, B - 1] starts with."""
    return hits.long().cumprod(-1).sum(-1)


def _reject(
    drafts: Tensor, p: Tensor, q: Tensor, sampling: Sampling, keys: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft d with min(1, p(d) / q(d)); end with a draw from max(p - q, 0), or from p when all are accepted."""
    slots = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    uniform = uniforms(sampling.seed, keys[:, None], anchors[:, None], slots, ACCEPT)
    pick = drafts.unsqueeze(-1)
    p_of, q_of = p[:, :-1].gather(-1, pick).squeeze(-1), q.gather(-1, pick).squeeze(-1)
    accepted = _leading(uniform * q_of < p_of)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    target = p.gather(1, at).squeeze(1)
    guess = torch.nn.functional.pad(q, (0, 0, 0, 1)).gather(1, at).squeeze(1)
    residual = (target - guess).clamp_min(0)
    # p == q up to rounding leaves nothing; such a draft is all but never rejected, and p itself is then right.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    final = draw(residual, uniforms(sampling.seed, keys, anchors, torch.zeros_like(anchors), FINAL))
    return accepted, final[:, None]

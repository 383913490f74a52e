"""What drafts are worth, in numbers: from the blocks of answers to acceptance lengths, rates, buckets, intervals.

A block's acceptance length is its kept tokens: accepted drafts and the target's own *bonus* token, cut after a stop
and at the limit. *Pooled* is kept tokens over blocks; *per response* averages each response's own mean (z-lab's
number). Slot k's *conditional* rate is how often draft k was right among blocks whose drafts before k were right and
whose text reached slot k. The token that the prefill gives is in no block.

`summary` gives one JSON object:

    prompts, responses, tokens, blocks, finished_share
    pooled {value, low, high}            bootstrap over prompts, 95 %
    per_response {value, low, high}
    per_slot [B - 1]                     conditional, null where never reached
    per_slot_reached [B - 1]             blocks that reached the slot: what the rate is over
    histogram [B + 1]                    blocks by acceptance length 0..B
    by_context [{from, to, blocks, pooled}]    by context states at the block's start
    passes_per_token                     target passes, prefill counted once, a new token
    past_trained_length {tokens, prompts_share, responses_share, blocks_share}   or null
    by_prompt [[name, kept tokens, blocks]]    in the benchmark's order; what `compare` resamples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.decode import Answer, Block

RESAMPLES = 2000
"""Bootstrap samples."""
FIRST_EDGE = 256
"""First bucket of context lengths ends here; each next one is twice as long."""


def summary(
    answers: Sequence[Answer], groups: Sequence[str], block_size: int, trained_length: int | None, seed: int
) -> dict[str, Any]:
    """All numbers of a benchmark. `groups` names each answer's prompt, so that its turns are resampled together."""
    blocks = [block for answer in answers for block in answer.blocks]
    hits, reached = slot_counts(blocks, block_size)
    tokens = sum(len(answer.ids) for answer in answers)
    sums = np.array([[sum(block.length for block in a.blocks), len(a.blocks)] for a in answers]).reshape(-1, 2)
    return {
        "prompts": len(set(groups)),
        "responses": len(answers),
        "tokens": tokens,
        "blocks": len(blocks),
        "finished_share": ratio(sum(answer.finished for answer in answers), len(answers)),
        "pooled": interval(sums, groups, pooled, seed),
        "per_response": interval(sums, groups, per_response, seed),
        "per_slot": [ratio(int(hit), int(count)) for hit, count in zip(hits, reached, strict=True)],
        "per_slot_reached": reached.tolist(),
        "histogram": np.bincount([block.length for block in blocks], minlength=block_size + 1).tolist(),
        "by_context": by_context(blocks),
        "passes_per_token": ratio(len(answers) + len(blocks), tokens),
        "past_trained_length": None if trained_length is None else past_length(answers, groups, trained_length),
        "by_prompt": by_prompt(sums, groups),
    }


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None when there is nothing to divide by."""
    return part / whole if whole else None


def slot_counts(blocks: Sequence[Block], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hits and reaches of slots 1..B-1, int64 [B - 1] each.

    A block that was cut before its bonus token reached only the slots that it kept: what came after has no truth.
    """
    hits, reached = np.zeros(block_size - 1, dtype=np.int64), np.zeros(block_size - 1, dtype=np.int64)
    for block in blocks:
        hits[: block.accepted] += 1
        reached[: block.length] += 1  # a full block of B kept tokens reaches all B - 1 slots
    return hits, reached


def pooled(sums: np.ndarray) -> np.ndarray:
    """[..., n, 2] (kept tokens, blocks) of responses -> tokens a block [...]."""
    total = sums.sum(-2)
    return np.divide(total[..., 0], total[..., 1], out=np.full(total.shape[:-1], np.nan), where=total[..., 1] > 0)


def per_response(sums: np.ndarray) -> np.ndarray:
    """[..., n, 2] (kept tokens, blocks) of responses -> mean of their own means [...], if they have any."""
    means = np.divide(sums[..., 0], sums[..., 1], out=np.zeros(sums.shape[:-1]), where=sums[..., 1] > 0)
    counted = (sums[..., 1] > 0).sum(-1)
    return np.divide(means.sum(-1), counted, out=np.full(counted.shape, np.nan), where=counted > 0)


def interval(sums: np.ndarray, groups: Sequence[str], statistic: Any, seed: int) -> dict[str, float | None]:
    """The statistic over responses and its 95 % bootstrap interval over prompts (percentiles; Efron 1979)."""
    value = float(statistic(sums.astype(float))) if len(sums) else float("nan")
    if np.isnan(value):
        return {"value": None, "low": None, "high": None}
    names = sorted(set(groups))
    place = {name: index for index, name in enumerate(names)}
    members: list[list[int]] = [[] for _ in names]
    for index, name in enumerate(groups):
        members[place[name]].append(index)
    # Every prompt padded to the same number of turns with (0, 0), which no statistic counts.
    turns = max(len(rows) for rows in members)
    table = np.zeros((len(names), turns, 2))
    for index, rows in enumerate(members):
        table[index, : len(rows)] = sums[rows]
    picks = np.random.default_rng(seed).integers(len(names), size=(RESAMPLES, len(names)))
    samples = np.array([statistic(table[pick].reshape(-1, 2)) for pick in picks])
    low, high = np.nanpercentile(samples, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}


def by_prompt(sums: np.ndarray, groups: Sequence[str]) -> list[tuple[str, int, int]]:
    """Name, kept tokens and blocks of each prompt, its turns together."""
    found: dict[str, tuple[int, int]] = {}
    for name, (kept, blocks) in zip(groups, sums.tolist(), strict=True):
        before = found.get(name, (0, 0))
        found[name] = (before[0] + kept, before[1] + blocks)
    return [(name, kept, blocks) for name, (kept, blocks) in found.items()]


def compare(ours: Sequence[Sequence[Any]], base: Sequence[Sequence[Any]], seed: int) -> dict[str, Any]:
    """Pooled acceptance of one drafter over another's, on the same prompts (`by_prompt` of both): {value, low, high}.

    The interval is a paired bootstrap: each sample takes the same prompts for both (Efron 1979). Raises ValueError
    when the prompts differ.
    """
    one, other = ({name: counts for name, *counts in side} for side in (ours, base))
    if one.keys() != other.keys():
        raise ValueError(f"{len(one.keys() ^ other.keys())} prompts were answered by one of the two only")
    names = sorted(one)
    tables = [np.array([side[name] for name in names], float) for side in (one, other)]
    picks = np.random.default_rng(seed).integers(len(names), size=(RESAMPLES, len(names)))
    samples = [np.array([pooled(table[pick]) for pick in picks]) for table in tables]
    low, high = np.nanpercentile(samples[0] / samples[1], [2.5, 97.5])
    return {"value": float(pooled(tables[0]) / pooled(tables[1])), "low": float(low), "high": float(high)}


def by_context(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Pooled acceptance by the number of context states that a block starts from."""
    rows: list[dict[str, Any]] = []
    low, high = 0, FIRST_EDGE
    longest = max((block.start_position for block in blocks), default=-1)
    while low <= longest:
        inside = [block.length for block in blocks if low <= block.start_position < high]
        rows.append({"from": low, "to": high, "blocks": len(inside), "pooled": ratio(sum(inside), len(inside))})
        low, high = high, high * 2
    return rows


def past_length(answers: Sequence[Answer], groups: Sequence[str], trained: int) -> dict[str, Any]:
    """How much of a benchmark lies past the longest training row."""
    blocks = [block.start_position >= trained for answer in answers for block in answer.blocks]
    starts = [answer.prompt_tokens for answer in answers]
    ends = [answer.prompt_tokens + len(answer.ids) for answer in answers]
    prompts = {name for name, start in zip(groups, starts, strict=True) if start > trained}
    return {
        "tokens": trained,
        "prompts_share": ratio(len(prompts), len(set(groups))),
        "responses_share": ratio(sum(end > trained for end in ends), len(ends)),
        "blocks_share": ratio(sum(blocks), len(blocks)),
    }


def slot_gaps(
    served: Sequence[float | None], reached: Sequence[int], trained: Sequence[float | None], margin: float = 0.15
) -> list[dict[str, Any]]:
    """Slots whose served rate lies below the validation walk's by more than `margin` and three standard errors.

    The two are measured on other prompts, so that some gap is expected; a larger one is the commonest failure of all
    (labels or states shifted between training and serving).
    """
    gaps = []
    for slot, (have, count, want) in enumerate(zip(served, reached, trained, strict=False), start=1):
        if have is None or want is None or not count:
            continue
        error = (want * (1 - want) / count) ** 0.5
        if want - have > margin + 3 * error:
            gaps.append({"slot": slot, "served": have, "validation": want})
    return gaps

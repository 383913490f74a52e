"""Anchors: the tokens that blocks start from, and which of them an epoch takes.

A token is an *eligible* anchor when it and the next token are supervised. Which ones a row gets in an epoch depends
on (seed, epoch, row, position) alone, so that packing, order, resume and world size change nothing.
"""

from __future__ import annotations

import numpy as np

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's finaliser: uint64 in, well-spread uint64 out (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.asarray(values, dtype=np.uint64) + _STEP
        z = (z ^ (z >> np.uint64(30))) * _MIX[0]
        z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def counter_hash(seed: int, epoch: int, keys: np.ndarray) -> np.ndarray:
    """uint64 hash of (seed, epoch, key) for each key."""
    start = mix(mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) ^ np.uint64(epoch))
    return mix(start ^ mix(np.asarray(keys, dtype=np.uint64)))


def eligible(supervised: np.ndarray) -> np.ndarray:
    """Positions, int32 ascending, of a row's eligible anchors, from its bool[T] mask."""
    return np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int32)


def choose(candidates: np.ndarray, count: int, seed: int, epoch: int, row_hash: int) -> np.ndarray:
    """The `count` candidates (positions) with the smallest hash of (seed, epoch, row, position), ascending."""
    if len(candidates) <= count:
        return candidates
    order = mix(counter_hash(seed, epoch, np.uint64(row_hash)) ^ mix(candidates.astype(np.uint64)))
    return np.sort(candidates[np.argpartition(order, count)[:count]])


def label_counts(supervised: np.ndarray, anchors: np.ndarray, block_size: int) -> np.ndarray:
    """Valid labels of each anchor's block, int32: supervised tokens right after it without a gap, at most B - 1."""
    after = np.concatenate([~supervised[1:], [True]])
    gaps = np.flatnonzero(after)
    run = gaps[np.searchsorted(gaps, anchors)] - anchors
    return np.minimum(run, block_size - 1).astype(np.int32)

"""Unions of time intervals, which count work that runs at the same time only once. Times in any unit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Intervals = Floats  # [n, 2]: begin and end; disjoint and ascending where a function returns them
NONE: Intervals = np.zeros((0, 2))


def union(begins: Floats | Any, ends: Floats | Any, *, bridge: float = 0.0) -> Intervals:
    """Disjoint intervals that cover the given ones [n] -> [m, 2]; gaps of at most ``bridge`` are covered too."""
    begins, ends = np.asarray(begins, np.float64), np.asarray(ends, np.float64)
    if not len(begins):
        return NONE
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_new = np.r_[True, begins[1:] > ends[:-1] + bridge]
    first = np.flatnonzero(is_new)
    last = np.r_[first[1:] - 1, len(begins) - 1]
    return np.stack([begins[first], ends[last]], axis=1)


def length(intervals: Intervals) -> float:
    """Length of disjoint intervals together."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of two lists of disjoint, ascending intervals."""
    if not len(one) or not len(other):
        return NONE
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")  # the first that ends after each of ``one`` begins
    last = np.searchsorted(other[:, 0], one[:, 1], side="left")  # after the last that begins before it ends
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begins = np.maximum(one[mine, 0], other[theirs, 0])
    ends = np.minimum(one[mine, 1], other[theirs, 1])
    return np.stack([begins, ends], axis=1)[ends > begins]


def overlap(one: Intervals, other: Intervals) -> float:
    """Length of the intersection of two lists of disjoint, ascending intervals."""
    return length(intersection(one, other))


def without(one: Intervals, other: Intervals) -> Intervals:
    """The parts of ``one`` outside of ``other``; both disjoint and ascending."""
    if not len(one) or not len(other):
        return one
    low, high = min(one[0, 0], other[0, 0]), max(one[-1, 1], other[-1, 1])
    begins, ends = np.r_[low, other[:, 1]], np.r_[other[:, 0], high]
    gaps = np.stack([begins, ends], axis=1)
    return intersection(one, gaps[ends > begins])

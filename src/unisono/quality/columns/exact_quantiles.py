"""Exact quantiles of more numbers than fit into memory: radix selection, in four readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CHUNK: Final = 1 << 20  # numbers that are read at once, and up to which they are sorted
_DIGIT: Final = 16  # bits
_SIGN: Final = np.uint64(1 << 63)


def chunks_of(values: Floats) -> Iterator[Floats]:
    """Copies of consecutive parts."""
    for begin in range(0, len(values), CHUNK):
        yield np.array(values[begin : begin + CHUNK])


def quantiles(
    values: Floats, fractions: Sequence[float], change: Callable[[Floats], Floats] | None = None
) -> list[float]:
    """Quantiles by linear interpolation between order statistics, as NumPy's default; exact but for that.

    Args:
        values: Finite numbers, float64 [n], n > 0; mapped into memory if they are many.
        fractions: From 0 to 1.
        change: What becomes of the numbers first, such as their distance to a median.
    """
    change = change or (lambda numbers: numbers)
    if len(values) <= CHUNK:
        ordered = np.sort(change(np.array(values)))
        return [
            _between(float(ordered[low]), float(ordered[high]), part)
            for low, high, part in _ranks(len(values), fractions)
        ]
    places = list(_ranks(len(values), fractions))
    ranks = sorted({rank for low, high, _ in places for rank in (low, high)})
    chosen = dict(zip(ranks, order_statistics(lambda: map(change, chunks_of(values)), ranks), strict=True))
    return [_between(chosen[low], chosen[high], part) for low, high, part in places]


def order_statistics(chunks: Callable[[], Iterable[Floats]], ranks: Sequence[int]) -> list[float]:
    """The numbers of these ranks (0 is the smallest), in memory that does not depend on how many there are.

    The bits of a float64, turned so that they order as the number does, are fixed 16 at a time: each reading counts the next
    16 bits of the numbers that agree with what is fixed (radix selection, Knuth, TAOCP 3, 5.2.5).

    Args:
        chunks: Called for each of four readings, gives all numbers, none of them NaN.
        ranks: Sorted.
    """
    fixed = [0] * len(ranks)  # the upper bits of each
    left = list(ranks)  # rank among the numbers that agree with them
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = {prefix: np.zeros(1 << _DIGIT, np.int64) for prefix in set(fixed)}
        for chunk in chunks():
            keys = _keys(chunk)
            for prefix, count in counts.items():
                agreeing = (
                    keys if shift == 64 - _DIGIT else keys[keys >> np.uint64(shift + _DIGIT) == np.uint64(prefix)]
                )
                digits = (agreeing >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
                count += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)
        for place, prefix in enumerate(fixed.copy()):
            ends = np.cumsum(counts[prefix])
            digit = int(np.searchsorted(ends, left[place], side="right"))
            left[place] -= int(ends[digit - 1]) if digit else 0
            fixed[place] = prefix << _DIGIT | digit
    return _values(np.array(fixed, np.uint64)).tolist()


def _keys(values: Floats) -> NDArray[np.uint64]:
    bits = np.ascontiguousarray(values).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: NDArray[np.uint64]) -> Floats:
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)


def _ranks(count: int, fractions: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """The two neighbouring ranks of each fraction, and how far it lies between them."""
    for fraction in fractions:
        place = fraction * (count - 1)
        low = int(place)
        yield low, min(low + 1, count - 1), place - low


def _between(low: float, high: float, part: float) -> float:
    return low if part == 0 or low == high else low * (1 - part) + high * part

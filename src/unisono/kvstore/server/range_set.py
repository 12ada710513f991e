"""A set of integers that arrive nearly in order, stored as disjoint intervals: the applied pushes of a stream.

The set stays a few intervals, however long the run is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class RangeSet:
    """Integers from 0 up. ``spans`` are ``[first, end)`` pairs, as ``to_json`` returns them.

    >>> numbers = RangeSet()
    >>> [numbers.add(n) for n in (0, 1, 3, 1)]
    [True, True, True, False]
    >>> numbers.to_json(), numbers.prefix
    ([[0, 2], [3, 4]], 2)
    """

    def __init__(self, spans: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for first, end in spans:
            if not (self._ends[-1] if self._ends else -1) < first < end:
                raise ValueError(f"spans are sorted, disjoint and not empty; [{first}, {end}) is not")
            self._starts.append(first)
            self._ends.append(end)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def add(self, number: int) -> bool:
        """Add ``number``; returns whether it is new."""
        if number < 0:
            raise ValueError(f"numbers start at 0, not {number}")
        if number in self:
            return False
        at = bisect_right(self._starts, number)  # the first span after it
        joins_left = at > 0 and self._ends[at - 1] == number
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = number + 1
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number + 1)
        return True

    def without(self, other: RangeSet) -> RangeSet:
        """The numbers of this set that ``other`` lacks."""
        spans: list[tuple[int, int]] = []
        for first, end in zip(self._starts, self._ends, strict=True):
            at = bisect_right(other._ends, first)  # the first span of the other that reaches beyond ``first``
            while first < end and at < len(other) and other._starts[at] < end:
                if first < other._starts[at]:
                    spans.append((first, other._starts[at]))
                first = other._ends[at]
                at += 1
            if first < end:
                spans.append((first, end))
        return RangeSet(spans)

    def __len__(self) -> int:
        """The number of intervals."""
        return len(self._starts)

    @property
    def prefix(self) -> int:
        """The smallest number that is not in the set."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def to_json(self) -> list[list[int]]:
        return [list(span) for span in zip(self._starts, self._ends, strict=True)]

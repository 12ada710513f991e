"""A block of a tensor that no rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """This rank's block of a tensor that is spread over ranks: ``tensor`` are the elements of the whole from ``offset`` on.

    The whole is of ``shape``. Blocks may be cut along any dims, be uneven, and be empty (of a rank behind the end of a
    short tensor). Of equal blocks on several ranks (replicas) only number 0 is written; those of all ranks together tile
    the whole.

    Where several matrices lie side by side in one and each is cut, ``tensor`` is made of ``runs`` (offset, length) along ``dim``,
    one behind the other; without, it is one block.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0
    dim: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """The blocks that ``tensor`` is made of: where each lies in it (an index), and its offset in the whole."""
        if not self.runs:
            yield (), self.offset
        start = 0
        for offset, length in self.runs:
            index = (*(slice(None) for _ in range(self.dim)), slice(start, start + length))
            yield index, (*self.offset[: self.dim], offset, *self.offset[self.dim + 1 :])
            start += length

"""A block of a tensor that no rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """This rank's block of a tensor that is spread over ranks: ``tensor`` are the elements of the whole from ``offset`` on.

    The whole is of ``shape``. Blocks may be cut along any dims, be uneven, and be empty (of a rank behind the end of a
    short tensor). Of equal blocks on several ranks (replicas) only number 0 is written; those of all ranks together tile
    the whole.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0

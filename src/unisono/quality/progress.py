"""How far a job over a data set is: its stages, one after the other, told to whoever shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

Unit = Literal["bytes", "documents", "rows", "bands", "pairs", "columns", "pages"]
Advance = Callable[[int], None]  # receives how much more is done


class Progress(Protocol):
    """Interface of what a job tells its progress, from one thread. A stage ends where the next one begins, or the job does."""

    def begin(self, stage: str, total: int, unit: Unit, *, done: int = 0) -> None:
        """A stage begins.

        Args:
            stage: What is done, such as ``reading``.
            total: How much there is to do.
            unit: Of ``total``.
            done: Of this, what the same job had done before it was killed.
        """
        ...

    def advance(self, count: int) -> None:
        """Add ``count`` finished units to the current stage. Called often, also for a single document."""
        ...


def ignore(count: int) -> None:
    """A progress callback that does nothing."""


class _Silent:
    def begin(self, stage: str, total: int, unit: Unit, *, done: int = 0) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT: Final[Progress] = _Silent()

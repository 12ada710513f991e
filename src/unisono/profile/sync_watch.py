"""Source lines at which the host reads from tensors; on an accelerator each read waits for the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from unisono.profile.rank_profile import SyncPoint
from unisono.profile.source_files import OWN_FOLDER, shortened, torch_folder

_READS: Final = frozenset(
    {
        *("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "unique", "masked_select", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__format__", "__array__"),
    }
)
# frames that are no reader's: of Python and torch, of the watches, which call each other, and of properties of a step
_SKIPPED: Final = ("<", torch_folder(), f"{OWN_FOLDER}profile/", f"{OWN_FOLDER}train/step.py")


class SyncWatch(TorchFunctionMode):
    """Counts reads of tensors by line of the source, inside a ``with`` statement and on its thread.

    A read inside of another counts once. Calls in compiled graphs are not seen.

    Args:
        phase: Returns the phase that the thread is in.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self._phase = phase
        self._found: dict[tuple[str, str, str], list[float]] = {}
        self._inside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _READS or self._inside or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        began_s, self._inside = time.perf_counter(), True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._inside = False
            entry = self._found.setdefault((name, self._phase(), calling_line(2)), [0, 0.0])
            entry[0] += 1
            entry[1] += time.perf_counter() - began_s

    def points(self) -> list[SyncPoint]:
        """The reads by line, most calls first."""
        points = [
            SyncPoint(kind=kind, phase=phase, calls=int(calls), total_s=total, source=source)
            for (kind, phase, source), (calls, total) in self._found.items()
        ]
        return sorted(points, key=lambda point: -point.calls)


def calling_line(depth: int) -> str:
    """``file:line`` of the innermost frame that is not Python's, torch's or a watch's, from ``depth`` frames above this. Files of
    this library begin with ``unisono/``."""
    frame = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            return f"{shortened(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

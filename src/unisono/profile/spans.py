"""Spans in the trace for collectives that torch does not record, such as sums through shared memory; none outside of a window."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch.profiler import record_function

from unisono.profile.host_events import COLLECTIVE_PREFIX

_NOTHING: Final = nullcontext()
_is_recording = False


@contextmanager
def recording() -> Generator[None]:
    """Inside, spans are recorded."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


def collective_span(kind: str, axis: str, num_ranks: int, num_bytes: int) -> AbstractContextManager[Any]:
    """A context that the trace shows as a collective that does not overlap with computation."""
    if not _is_recording:
        return _NOTHING
    return record_function(f"{COLLECTIVE_PREFIX}{kind} {axis} {num_ranks} {num_bytes}")

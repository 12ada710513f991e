"""Lines of the source whose allocations stay from step to step, in a window of profiled steps.

Tensors are followed by their storages: each operator's new ones are noted with the line that called it, and counted if they still
live when the window ends. Arrays and other Python objects are those of ``tracemalloc``. Outside of a window nothing is hooked.

This module alone uses, of torch outside of its documented interface (tested with torch 2.13.0): ``TorchDispatchMode``, which sees
every operator, also those of the backward pass in autograd's threads; weak references to storages; and the
local tensor of a ``DTensor``.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.profile.rank_profile import GrowingAllocation
from unisono.profile.source_files import OWN_FOLDER, shortened, torch_folder
from unisono.profile.sync_watch import calling_line

MIN_STEPS: Final = 3  # what is allocated in one step of fewer may be a buffer that is made once
_MIN_BYTES: Final = 1024  # a step: statistics that are read every few steps are smaller
_MAX_LINES: Final = 20
_MAX_FRAMES: Final = 6  # of the stack of an object
_NOT_OF_USER: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<", OWN_FOLDER)
_WATCHES: Final = (
    *(f"{OWN_FOLDER}profile/", tracemalloc.__file__),
    *(f"{torch_folder()}profiler/", f"{torch_folder()}autograd/profiler"),
)


class _WeakStorage:
    """A reference to a storage that does not keep its memory; ``address`` is given to no other storage while it exists."""

    __slots__ = ("address",)

    def __init__(self, storage: Any) -> None:
        self.address: int = storage._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.address)

    def expired(self) -> bool:
        """Whether the storage is freed."""
        return bool(torch.UntypedStorage._expired(self.address))


@dataclass(slots=True)
class _Allocation:
    storage: _WeakStorage
    step: int
    num_bytes: int
    source: str
    phase: str


class GrowthWatch(TorchDispatchMode):
    """Notes what is allocated inside of a ``with`` statement; ``next_step`` begins each step, and ``growing`` is the result.

    Args:
        phase: Returns the phase that the thread is in.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self._phase = phase
        self._step = 0
        # by address of the storage, which no other storage gets while its entry exists
        self._allocations: dict[int, _Allocation] = {}
        self._objects: list[Mapping[str, int]] = []  # bytes by line, after each step but the last
        self._owns_trace = False

    def __enter__(self) -> GrowthWatch:
        super().__enter__()
        torch.empty(0)  # the first operator in such a mode imports torch's compiler
        self._owns_trace = not tracemalloc.is_tracing()
        if self._owns_trace:
            tracemalloc.start(_MAX_FRAMES)
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self._owns_trace:
            tracemalloc.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {storage._cdata: storage for storage in _storages(result)}
        if made:
            for storage in _storages((args, kwargs)):
                made.pop(storage._cdata, None)
        for storage in made.values():
            reference = _WeakStorage(storage)
            known = self._allocations.get(reference.address)
            if known is None and (num_bytes := storage.nbytes()):
                self._allocations[reference.address] = _Allocation(
                    reference, self._step, num_bytes, calling_line(2), self._phase()
                )
        return result

    def next_step(self) -> None:
        """Operators from here on belong to the next step."""
        self._forget()
        self._step += 1
        if self._step > 1:
            self._objects.append(_bytes_by_line())

    def _forget(self) -> None:
        self._allocations = {
            address: allocation for address, allocation in self._allocations.items() if not allocation.storage.expired()
        }

    def growing(self) -> tuple[GrowingAllocation, ...]:
        """The lines whose allocations of several steps stay, the largest first; none after fewer than ``MIN_STEPS`` steps.

        To be called before the ``with`` statement ends. What was allocated in the last step does not count: a loss, gradients and
        a batch live until the next one.
        """
        if self._step < MIN_STEPS:
            return ()
        gc.collect()
        self._forget()
        found = [*self._growing_tensors(), *self._growing_objects()]
        return tuple(sorted(found, key=lambda line: -line.bytes_per_step)[:_MAX_LINES])

    def _growing_tensors(self) -> Iterator[GrowingAllocation]:
        by_line: dict[tuple[str, str], list[_Allocation]] = {}
        for allocation in self._allocations.values():
            if 0 < allocation.step < self._step:
                by_line.setdefault((allocation.source, allocation.phase), []).append(allocation)
        steps = self._step - 1
        for (source, phase), staying in by_line.items():
            per_step = sum(allocation.num_bytes for allocation in staying) / steps
            if len({allocation.step for allocation in staying}) > 1 and per_step >= _MIN_BYTES:
                yield GrowingAllocation(kind="tensor", source=source, phase=phase, bytes_per_step=per_step)

    def _growing_objects(self) -> Iterator[GrowingAllocation]:
        after = [*self._objects, _bytes_by_line()]
        for source, num_bytes in after[-1].items():
            sizes = [each.get(source, 0) for each in after]
            per_step = (num_bytes - sizes[0]) / (len(sizes) - 1)
            # a cache that is filled grows in some steps
            if per_step >= _MIN_BYTES and all(later > earlier for earlier, later in pairwise(sizes)):
                yield GrowingAllocation(kind="object", source=source, phase="", bytes_per_step=per_step)


def _bytes_by_line() -> dict[str, int]:
    """Bytes of Python's objects by line, without those that a profile itself needs."""
    sizes: dict[str, int] = {}
    # a filter would look at every object; there are few stacks
    for found in tracemalloc.take_snapshot().statistics("traceback"):
        if source := _line_of_user(found.traceback):
            sizes[source] = sizes.get(source, 0) + found.size
    return sizes


def _line_of_user(stack: tracemalloc.Traceback) -> str:
    """The innermost line of the user's code, or of all where none is; empty for what a profile or torch needs."""
    frames = list(reversed(stack))  # a traceback begins with the outermost frame
    if frames[0].filename.startswith(torch_folder()) or any(frame.filename.startswith(_WATCHES) for frame in frames):
        return ""
    frame = next((frame for frame in frames if not any(part in frame.filename for part in _NOT_OF_USER)), frames[0])
    return f"{shortened(frame.filename)}:{frame.lineno}"


def _storages(value: Any) -> Iterator[Any]:
    """The storages of tensors in tuples, lists and mappings; of a distributed tensor, of this rank's part."""
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, tuple | list):
        for item in cast("Sequence[Any]", value):
            yield from _storages(item)
    elif isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value)
        try:
            if not local.is_meta:
                yield local.untyped_storage()
        except RuntimeError:  # a tensor without one, such as a sparse one
            return

"""Memory of a computation as the bytes of its tensors' storages, at every operation: with values, or traced without."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # has no public name; torch 2.13 tested
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The place in a computation where the most bytes were alive.

    Attributes:
        bytes: Of all storages.
        by_kind: Of the storages of each kind (``LiveStorages.kind``).
        operator: The operation, such as ``aten.mm.default``.
        kind: ``LiveStorages.kind`` then.
    """

    bytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict[str, int])
    operator: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """Operations that are alike: the same one, on results of the same size, under one ``LiveStorages.kind``.

    Attributes:
        kind: ``LiveStorages.kind`` then.
        operator: The operation.
        result_bytes: Bytes of its result; -1 of several results.
    """

    kind: str
    operator: str
    result_bytes: int


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside make, and of those that are marked, until they are freed.

    A storage counts once, however many tensors view it, and as large as it is at the time: FSDP2 frees its gathered parameters
    by ``UntypedStorage.resize_``. What a kernel or a communicator allocates for itself is not counted. Tensors on the meta device
    have no bytes. Under a ``FakeTensorMode`` that was entered before, only tensors of that mode count; without, only tensors with
    values.

    Attributes:
        kind: Kind of the storages that operations make from now on, such as the phase of a step. ``mark`` gives others.
        now_bytes: Bytes that are alive.
        peak: Where the most bytes were alive since the last ``reset_peak``.
        peaks: The same of each kind of operation.
        history: Bytes that were alive after each operation since then.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.kind = ""
        self.now_bytes, self.peak = 0, Peak()
        self.peaks: dict[Site, Peak] = {}
        self.history: list[int] = []
        self._fake = fake
        self._bytes: dict[int, int] = {}  # by address of the storage
        self._kinds: dict[int, str] = {}
        self._by_kind: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        original, note = self._resize, self._note_size

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            note(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]  # no operation tells of it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Give the storages of ``tensors`` a kind."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if tensor is None or not self._counts(tensor):
                continue
            self._see(tensor, kind)
            key = _address(tensor.untyped_storage())
            self._by_kind[self._kinds[key]] -= self._bytes[key]
            self._by_kind[kind] += self._bytes[key]
            self._kinds[key] = kind

    def reset_peak(self) -> None:
        """Begin a new peak, with what is alive now."""
        self.peak = Peak(bytes=self.now_bytes, by_kind=dict(self._by_kind))
        self.peaks, self.history = {}, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs: set[int] = set()
        for tensor in self._counted((args, kwargs)):
            inputs.add(_address(tensor.untyped_storage()))
            self._note_size(tensor.untyped_storage())
        for tensor in self._counted(result):
            if (
                _address(tensor.untyped_storage()) not in inputs
            ):  # else it is a view, perhaps of what no operation has made
                self._see(tensor, self.kind)
        self.history.append(self.now_bytes)
        site = Site(self.kind, str(func), result.nbytes if isinstance(result, Tensor) else -1)
        if site not in self.peaks or self.now_bytes > self.peaks[site].bytes:
            peak = Peak(bytes=self.now_bytes, by_kind=dict(self._by_kind), operator=site.operator, kind=site.kind)
            self.peaks[site] = peak
            if peak.bytes > self.peak.bytes:
                self.peak = peak
        return result

    def _counted(self, values: Any) -> list[Tensor]:
        return [tensor for tensor in _tensors(values) if self._counts(tensor)]

    def _counts(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):  # whose other properties are operations of their own
            return (
                tensor.fake_mode is self._fake and tensor.fake_device.type != "meta" and tensor.layout == torch.strided
            )
        if self._fake is not None or isinstance(tensor, DTensor) or tensor.is_meta:
            return False
        return tensor.layout == torch.strided

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = _address(storage)
        if key in self._bytes:
            self._note_size(storage)
            return
        self._bytes[key], self._kinds[key] = storage.nbytes(), kind
        self._add(key, storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _note_size(self, storage: Any) -> None:
        key = _address(storage)
        if key in self._bytes and (more := storage.nbytes() - self._bytes[key]):
            self._bytes[key] += more
            self._add(key, more)

    def _add(self, key: int, size: int) -> None:
        self.now_bytes += size
        self._by_kind[self._kinds[key]] += size

    def _forget(self, key: int) -> None:
        self._add(key, -self._bytes.pop(key))
        del self._kinds[key]


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operation."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in cast("Sequence[Any]", values):
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(cast("dict[str, Any]", values).values()))


def _address(storage: Any) -> int:
    return storage._cdata

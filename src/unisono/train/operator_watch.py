"""Finds the first operator of a forward and backward pass whose result is not finite though its inputs are.

``TorchDispatchMode``, which is outside of torch's documented interface (tested with torch 2.13.0), sees every operator, also in
the backward pass. Every operator is checked on the host, so that a watched pass takes several times as long as another.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.train.operator_places import (
    COLLECTIVE_NAMESPACES,
    ModuleCall,
    OperatorPlaces,
    leaves,
    local,
    num_rows,
    writes_to_inputs,
)

_FINITE, _INFINITE, _NAN = range(3)
_VALUES: Final = ("finite", "inf", "nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class NonfiniteTensor:
    """The first non-finite tensor of a pass.

    Attributes:
        where: ``input``, ``parameter``, ``forward``, ``loss`` (the objective) or ``backward``.
        layer: Name of the innermost module; empty for the root module, and outside of all modules.
        operator: The operator that made it, such as ``aten.div.Tensor``; empty for an input or a parameter.
        tensor: Name of the entry of the batch, or of the parameter; empty for a result.
        value: ``nan`` or ``inf``.
        input_value: The worst value among the operator's inputs, ``finite`` or ``inf``; empty without an operator.
        micro_batch: Number of the micro-batch, from 0.
        rows: Rows of the micro-batch in which it is not finite; empty where the tensor has no dim of samples.
    """

    where: str
    layer: str = ""
    operator: str = ""
    tensor: str = ""
    value: str
    input_value: str = ""
    micro_batch: int = 0
    rows: tuple[int, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether an operator, a parameter or an entry of the batch is known to be the origin."""
        return bool(self.operator or self.tensor)


@dataclass(frozen=True, slots=True)
class _Start:
    """The beginning of a module's call: the number of suspects before it, and whether its arguments are finite."""

    first: int
    is_finite: bool


class OperatorWatch(TorchDispatchMode):
    """Watches the operators of passes inside of ``watching``; ``found`` is the result.

    A suspect is an operator that makes a non-finite result from finite inputs, or NaN from infinite ones; a number among its
    arguments is an input. A suspect is dropped if the module in which it ran returns finite values alone: what it made was
    masked out. The origin is the first suspect in the first module, or loss, whose output is non-finite. Without a suspect it is
    the first module with finite inputs and a non-finite output.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origin: NonfiniteTensor | None = None
        self._infinite_input: NonfiniteTensor | None = None
        self._module: NonfiniteTensor | None = None
        self._suspects: list[NonfiniteTensor] = []
        self._in_backward: list[NonfiniteTensor] = []
        self._places = OperatorPlaces(self._entering, self._leaving)
        self._num_rows, self._lengths = 0, frozenset[int]()

    @property
    def found(self) -> NonfiniteTensor | None:
        """The first non-finite tensor, after the passes; None if all were finite."""
        # a non-finite loss has no origin in the backward pass
        return self._origin or self._module or next(iter(self._in_backward), None) or self._infinite_input

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        """Inside, operators and the modules of ``model`` are watched."""
        with self._places.following(model), self:
            yield

    # --- what is known before the passes, and between them ----------------------------------------------------------------

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Parameters that are not finite are the origin."""
        for name, parameter in parameters.items():
            if self._origin is None and (level := _level(parameter.detach())):
                layer = name.rpartition(".")[0]
                self._origin = NonfiniteTensor(where="parameter", layer=layer, tensor=name, value=_VALUES[level])

    def check_inputs(self, number: int, micro_batch: Mapping[str, Any]) -> None:
        """An entry of a micro-batch with NaN is the origin; one with infinities is, if nothing else is found."""
        for name, entry in micro_batch.items():
            level = _level(entry) if isinstance(entry, Tensor) else _FINITE
            if level == _FINITE or self._origin is not None:
                continue
            rows = _bad_rows(cast(Tensor, entry), len(entry)) if entry.dim() else ()
            origin = NonfiniteTensor(where="input", tensor=name, value=_VALUES[level], micro_batch=number, rows=rows)
            if level == _NAN:
                self._origin = origin
            elif self._infinite_input is None:
                self._infinite_input = origin

    def begin_micro_batch(self, number: int, micro_batch: Mapping[str, Any]) -> None:
        """The next operators are of this micro-batch."""
        entries = [entry for entry in micro_batch.values() if isinstance(entry, Tensor) and entry.dim()]
        self._places.micro_batch, self._num_rows = number, num_rows(micro_batch)
        self._lengths = frozenset(entry.shape[1] for entry in entries if entry.dim() > 1)

    def check_loss(self, loss: Tensor) -> None:
        """The first suspect after the modules is the origin of a non-finite ``loss``; a finite loss clears the modules."""
        if _level(loss.detach()):
            if self._origin is None and self._suspects:
                self._origin = self._suspects[0]
        else:
            self._origin, self._module = (
                None
                if one is not None and (one.where, one.micro_batch) == ("forward", self._places.micro_batch)
                else one
                for one in (self._origin, self._module)
            )
        self._suspects.clear()

    # --- operators and modules --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if self._origin is not None or func.namespace in COLLECTIVE_NAMESPACES or "empty" in name:
            return func(*args, **kwargs)
        before = _worst(leaves((args, kwargs))) if writes_to_inputs(func) else None
        result = func(*args, **kwargs)
        is_backward = self._places.is_backward
        results = list(leaves(result))
        level = _worst(results if is_backward else results[:1])  # others of a forward operator are statistics
        if level and level > (worst_input := _worst(leaves((args, kwargs))) if before is None else before):
            bad = next(tensor for tensor in results if isinstance(tensor, Tensor) and _level(tensor) == level)
            self._suspect(name, bad, (worst_input, level), is_backward=is_backward)
        return result

    def _suspect(self, operator: str, tensor: Tensor, levels: tuple[int, int], *, is_backward: bool) -> None:
        """Note the result of an operator; ``levels`` are of its inputs and of itself."""
        call = self._places.current()
        (input_value, value), layer = (_VALUES[level] for level in levels), "" if call is None else call.path
        if not is_backward:
            self._suspects.append(
                NonfiniteTensor(
                    where="loss" if call is None else "forward",
                    layer=layer,
                    operator=operator,
                    value=value,
                    input_value=input_value,
                    micro_batch=self._places.micro_batch,
                    rows=self._rows_of(tensor),
                )
            )
            return
        self._in_backward.append(
            NonfiniteTensor(
                where="backward",
                layer=layer,
                operator=operator,
                value=value,
                input_value=input_value,
                micro_batch=self._places.micro_batch if call is None else call.micro_batch,
                rows=self._rows_of(tensor) if tensor.dim() > 2 else (),  # gradients of parameters have no rows
            )
        )

    def _rows_of(self, tensor: Tensor) -> tuple[int, ...]:
        """The rows of the micro-batch with non-finite elements, where ``tensor`` [B, …] or [B · T, …] has them."""
        part = local(tensor)
        if not part.dim() or not self._num_rows:
            return ()
        if len(part) == self._num_rows or len(part) in {self._num_rows * length for length in self._lengths}:
            return _bad_rows(part, self._num_rows)
        return ()

    def _entering(self, _call: ModuleCall, args: Any, kwargs: Any) -> _Start:
        return _Start(len(self._suspects), is_finite=not _worst(leaves((args, kwargs))))

    def _leaving(self, call: ModuleCall, output: Any) -> None:
        if self._origin is not None:
            return
        start: _Start = call.note
        inside = self._suspects[start.first :]
        bad = next((t for t in leaves(output) if isinstance(t, Tensor) and _level(t.detach())), None)
        if bad is None:
            del self._suspects[start.first :]
        elif inside:
            self._origin = inside[0] if inside[0].rows else replace(inside[0], rows=self._rows_of(bad.detach()))
        elif start.is_finite and self._module is None:
            self._module = NonfiniteTensor(
                where="forward",
                layer=call.path,
                value=_VALUES[_level(bad.detach())],
                micro_batch=call.micro_batch,
                rows=self._rows_of(bad.detach()),
            )


def _worst(values: Iterable[Any]) -> int:
    return max((_level(value) for value in values), default=_FINITE)


def _level(value: Tensor | float) -> int:
    if not isinstance(value, Tensor):
        return _NAN if math.isnan(value) else _INFINITE if math.isinf(value) else _FINITE
    tensor = local(value)
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.is_meta:
        return _FINITE
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if bool(tensor.isfinite().all()):
        return _FINITE
    return _NAN if bool(tensor.isnan().any()) else _INFINITE


def _bad_rows(tensor: Tensor, num_rows: int) -> tuple[int, ...]:
    """Which of ``num_rows`` equal runs along the first dim have a non-finite element."""
    bad = ~tensor.detach().isfinite()
    return tuple(bad.reshape(num_rows, -1).any(1).nonzero().flatten().tolist())

"""Attributes operators to calls of modules, in forward and backward passes.

This module alone uses, of torch outside of its documented interface (tested with torch 2.13.0): the sequence numbers of autograd
nodes, by which a backward operator is attributed to the module whose forward pass created its node; and the schema of an
operator, which says what it writes to and which of its results are views.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# namespaces of operators whose results come from other ranks
COLLECTIVE_NAMESPACES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional", "fsdp"})


@dataclass(kw_only=True, slots=True)
class ModuleCall:
    """A call of a module in a forward pass.

    Attributes:
        path: Name of the module.
        number: Number of earlier calls of it with this micro-batch.
        micro_batch: Number of the micro-batch.
        start: The next autograd sequence number when it began.
        stop: The next one when it ended.
        note: What the function that was called when it began has returned.
    """

    path: str
    number: int
    micro_batch: int
    start: int
    stop: int = 0
    note: Any = None


class OperatorPlaces:
    """Follows the calls of a model's modules; ``current`` tells where an operator that runs now belongs.

    Attributes:
        micro_batch: Number of the micro-batch whose passes are under way; whoever runs the passes sets it.
    """

    def __init__(
        self,
        entering: Callable[[ModuleCall, Any, Any], Any],
        leaving: Callable[[ModuleCall, Any], None],
    ) -> None:
        """``entering(call, args, kwargs)`` is called before a module's forward pass, ``leaving(call, output)`` after it."""
        self.micro_batch = 0
        self._entering, self._leaving = entering, leaving
        self._calls: list[ModuleCall] = []
        self._ended: list[ModuleCall] = []
        self._numbers: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def following(self, model: nn.Module) -> Generator[None]:
        """Inside, the calls of the modules of ``model`` are followed."""
        hooks: list[Any] = []
        for path, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._before(path), prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after(path)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def innermost(self) -> ModuleCall | None:
        """The innermost call under way; None outside of all modules."""
        return self._calls[-1] if self._calls else None

    @property
    def is_backward(self) -> bool:
        """Whether an operator that runs now is one of a backward pass."""
        node: Any = torch._C._current_autograd_node()
        return node is not None

    def current(self) -> ModuleCall | None:
        """The innermost call to which an operator belongs that runs now; None where it belongs to none."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self.innermost
        number = node._sequence_nr()
        around = [call for call in self._ended if call.start <= number < call.stop]
        return max(around, key=lambda call: call.start, default=None)

    def _before(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not path:
                self._calls.clear()  # the last call may have ended early, as a pipeline stage does
            place = path, self.micro_batch
            call = ModuleCall(
                path=path,
                number=self._numbers[place],
                micro_batch=self.micro_batch,
                start=torch.autograd._get_sequence_nr(),
            )
            self._numbers[place] += 1
            call.note = self._entering(call, args, kwargs)
            self._calls.append(call)

        return enter

    def _after(self, path: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            while self._calls and self._calls[-1].path != path:
                self._calls.pop()
            if not self._calls:
                return
            call = self._calls.pop()
            call.stop = torch.autograd._get_sequence_nr()
            self._ended.append(call)
            self._leaving(call, output)

        return leave


def writes_to_inputs(operator: Any) -> bool:
    """Whether the operator changes a tensor among its arguments."""
    return bool(operator._schema.is_mutable)


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that the operator writes to."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if place < len(args):
                yield args[place]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


def is_view(operator: Any) -> bool:
    """Whether the operator computes nothing, and returns its argument in another shape."""
    returned = [value.alias_info for value in operator._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def leaves(value: Any) -> Iterator[Any]:
    """Tensors and plain numbers in tuples, lists and mappings."""
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, tuple | list):
        for item in cast("Sequence[Any]", value):
            yield from leaves(item)
    elif isinstance(value, Tensor | float):
        yield value


def num_rows(micro_batch: Mapping[str, Any]) -> int:
    """The number of samples of a micro-batch; 0 where it has no tensor with a dim of samples."""
    return max((len(entry) for entry in micro_batch.values() if isinstance(entry, Tensor) and entry.dim()), default=0)


def micro_batch_number(micro_batch: Any, seen: list[Any]) -> int:
    """Number of a micro-batch, from 0, in the order of first passes. A new one is appended to ``seen``."""
    number = next((n for n, other in enumerate(seen) if other is micro_batch), len(seen))
    if number == len(seen):
        seen.append(micro_batch)
    return number


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

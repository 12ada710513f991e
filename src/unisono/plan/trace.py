"""What a model computes, seen once: its operations, the parameters they read, the modules they are in.

The model's own forward runs on fake tensors (shapes and dtypes, no values), so it costs no memory and next to no time.
Where a pipeline may be cut, or which layers form a pair, is read from what is recorded, not from names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # has no public name; torch 2.13 tested
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # the same: it goes through whatever a module returns

from unisono.models.moe import balanced_routing


class Operand(NamedTuple):
    """A tensor among an operation's arguments: the number of a value, or the name of a parameter and -1."""

    value: int
    parameter: str
    shape: tuple[int, ...]


class TracedOp(NamedTuple):
    """One call of a torch function. ``module`` is the innermost module it is in, "" the model itself; ``parameters`` are those
    among its arguments, ``inputs`` and ``outputs`` numbers of values, ``shapes`` those of the outputs. ``arguments`` and
    ``keywords`` are all it was given, with an ``Operand`` in place of each tensor."""

    name: str
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def operands(self) -> list[Operand]:
        """All of them, in order."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords), is_leaf=lambda each: isinstance(each, Operand))
        return [each for each in leaves if isinstance(each, Operand)]


class TracedCall(NamedTuple):
    """One call of a module. ``arguments`` by position or name, in order, each with the numbers of the values in it; ``outputs``
    likewise of what it returned, one for each member where that is a tuple; ``first`` and ``end`` bound its operations."""

    module: str
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[int, ...], ...]
    returns_tuple: bool
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Operations in order; calls in the order in which they ended; the values and the parameters that the model returned.
    ``inputs`` are the values that it was given."""

    inputs: tuple[int, ...]
    ops: tuple[TracedOp, ...]
    calls: tuple[TracedCall, ...]
    outputs: tuple[int, ...]
    returned: tuple[str, ...]

    def parameter_dependent(self) -> frozenset[int]:
        """The values that depend on any parameter."""
        found: set[int] = set()
        for op in self.ops:
            if op.parameters or not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return frozenset(found)


def trace(model: nn.Module, inputs: Mapping[str, Tensor]) -> Trace:
    """Run ``model(**inputs)`` once on fake tensors like ``inputs`` and record what it does. No state of it changes. What
    the model has on another device, also on the meta device, is as if it were where the inputs are."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
    moved = _elsewhere(model, {tensor.device for tensor in given.values()}, fake)
    recorder = _Recorder({name: moved.get(name, parameter) for name, parameter in model.named_parameters()})
    handles = recorder.watch(model)
    try:
        with balanced_routing(model), fake, torch.no_grad(), recorder:
            recorder.given(given.values())
            returned = functional_call(model, moved, (), given)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.result(returned)


def _elsewhere(model: nn.Module, devices: set[torch.device], fake: FakeTensorMode) -> dict[str, Tensor]:
    """Parameters and buffers that are not where the inputs are, made up there."""
    if len(devices) != 1:
        return {}
    (device,) = devices
    found: dict[str, Tensor] = {}
    with fake:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device != device:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                found[name] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return found


class _Recorder(TorchFunctionMode):
    """Numbers values as they appear and keeps them, as an address may only be used again once its value is gone."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._within = [""]
        self._ops: list[TracedOp] = []
        self._calls: list[TracedCall] = []
        self._inputs: tuple[int, ...] = ()

    def given(self, tensors: Iterable[Tensor]) -> None:
        """What the model is about to be called with."""
        self._inputs = tuple(self._number(each) for each in tensors)

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks that tell which module is running."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            if module is not model:
                before, after = self._hooks(name)
                handles.append(module.register_forward_pre_hook(before, prepend=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        return handles

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        starts: list[int] = []

        def before(_module: nn.Module, _args: Any) -> None:
            self._within.append(name)
            starts.append(len(self._ops))

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._within.pop()
            named = [*((str(place), each) for place, each in enumerate(args)), *kwargs.items()]
            arguments = tuple((argument, self._values(each)) for argument, each in named)
            several = isinstance(output, tuple)
            outputs = tuple(self._values(each) for each in (output if several else (output,)))
            self._calls.append(TracedCall(name, arguments, outputs, several, starts.pop(), len(self._ops)))

        return before, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's rule for fake tensors takes bfloat16 only
        result = _grouped(*args[:2]) if _name(func) == "_grouped_mm" else func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        if outputs:
            given = _tensors((args, kwargs))
            parameters = dict.fromkeys(self._names[id(each)] for each in given if id(each) in self._names)
            inputs = tuple(self._number(each) for each in given if id(each) not in self._names)
            made = tuple(self._number(each) for each in outputs)
            shapes = tuple(tuple(each.shape) for each in outputs)
            arguments, keywords = pytree.tree_map_only(Tensor, self._operand, (tuple(args), dict(kwargs or {})))
            op = TracedOp(_name(func), self._within[-1], tuple(parameters), inputs, made, shapes, arguments, keywords)
            self._ops.append(op)
        return result

    def _operand(self, tensor: Tensor) -> Operand:
        name = self._names.get(id(tensor), "")
        return Operand(-1 if name else self._number(tensor), name, tuple(tensor.shape))

    def _number(self, value: Tensor) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._alive)
            self._alive.append(value)
        return self._numbers[id(value)]

    def _values(self, tree: Any) -> tuple[int, ...]:
        return tuple(self._number(each) for each in _tensors(tree) if id(each) not in self._names)

    def result(self, returned: Any) -> Trace:
        """What was recorded of a run that returned ``returned``."""
        parameters = dict.fromkeys(self._names[id(each)] for each in _tensors(returned) if id(each) in self._names)
        return Trace(
            inputs=self._inputs,
            ops=tuple(self._ops),
            calls=tuple(self._calls),
            outputs=self._values(returned),
            returned=tuple(parameters),
        )


def _grouped(rows: Tensor, stack: Tensor) -> Tensor:
    """A result of the shape of rows [M, I] times matrices of a stack [E, I, O]."""
    return rows.new_empty(rows.shape[0], stack.shape[-1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name

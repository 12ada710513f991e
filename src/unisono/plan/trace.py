"""Traces a model: the operations of one forward pass, the parameters they read, and the modules that they are in.

The forward pass runs on fake tensors (shapes and dtypes, no values), so it costs no memory and little time. Pipeline partition
and tensor-parallel rules are inferred from the trace, not from names of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # has no public name; torch 2.13 tested
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # has no public name either

from unisono.models.moe import balanced_routing


class Operand(NamedTuple):
    """A tensor among an operation's arguments: the number of a value, or -1 and the name of a parameter."""

    value: int
    parameter: str
    shape: tuple[int, ...]


class TracedOp(NamedTuple):
    """One call of a torch function.

    ``module`` is the innermost module around it, "" the model itself. ``inputs`` and ``outputs`` are numbers of values,
    ``parameters`` the parameters among the arguments, ``shapes`` those of the outputs. ``arguments`` and ``keywords`` have an
    ``Operand`` in place of each tensor.
    """

    name: str
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def operands(self) -> list[Operand]:
        """The tensors among the arguments, in order."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords), is_leaf=lambda leaf: isinstance(leaf, Operand))
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]


class TracedCall(NamedTuple):
    """One call of a module.

    ``arguments`` are (position or name, numbers of the values in it), in order; ``outputs`` has the values of each member of the
    returned tuple, or of the single output. Its operations are ``ops[first:end]``.
    """

    module: str
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[int, ...], ...]
    returns_tuple: bool
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Operations in order, module calls in the order of their ends; ``inputs`` are the values given to the model, ``outputs`` and
    ``returned`` the values and parameters that it returned."""

    inputs: tuple[int, ...]
    ops: tuple[TracedOp, ...]
    calls: tuple[TracedCall, ...]
    outputs: tuple[int, ...]
    returned: tuple[str, ...]

    def parameter_dependent(self) -> frozenset[int]:
        """The values that depend on any parameter."""
        dependent: set[int] = set()
        for op in self.ops:
            if op.parameters or not dependent.isdisjoint(op.inputs):
                dependent.update(op.outputs)
        return frozenset(dependent)


def trace(model: nn.Module, inputs: Mapping[str, Tensor]) -> Trace:
    """Run ``model(**inputs)`` once on fake tensors like ``inputs`` and record its operations. The model's state does not change.
    Parameters and buffers on another device, also the meta device, are treated as if on the device of the inputs."""
    fake, fakes, moved = without_values(model, inputs)
    recorder = _OpRecorder({name: moved.get(name, parameter) for name, parameter in model.named_parameters()})
    handles = recorder.watch(model)
    try:
        with balanced_routing(model), fake, torch.no_grad(), recorder:
            input_values = recorder.values(fakes)
            returned = functional_call(model, moved, (), fakes)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(
        inputs=input_values,
        ops=tuple(recorder.ops),
        calls=tuple(recorder.calls),
        outputs=recorder.values(returned),
        returned=recorder.parameters(returned),
    )


def without_values(
    model: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[FakeTensorMode, dict[str, Tensor], dict[str, Tensor]]:
    """A mode of fake tensors, ``inputs`` in it, and those parameters and buffers of ``model`` by name that are on another device
    than the inputs, as if they were on that one."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
    return fake, fakes, _fakes_on_device(model, {tensor.device for tensor in fakes.values()}, fake)


def _fakes_on_device(model: nn.Module, devices: set[torch.device], fake: FakeTensorMode) -> dict[str, Tensor]:
    """Fake tensors on the single device of the inputs, for parameters and buffers on other devices."""
    if len(devices) != 1:
        return {}
    (device,) = devices
    fakes: dict[str, Tensor] = {}
    with fake:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device != device:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                fakes[name] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return fakes


class _OpRecorder(TorchFunctionMode):
    """Records operations and module calls. Values are numbered as they appear, and kept so that no address is reused."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._within = [""]
        self.ops: list[TracedOp] = []
        self.calls: list[TracedCall] = []

    def watch(self, model: nn.Module) -> list[Any]:
        """Register hooks that record the calls of modules; returns their handles."""
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
            starts.append(len(self.ops))

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._within.pop()
            named = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
            arguments = tuple((argument, self.values(value)) for argument, value in named)
            is_tuple = isinstance(output, tuple)
            outputs = tuple(self.values(member) for member in (output if is_tuple else (output,)))
            self.calls.append(TracedCall(name, arguments, outputs, is_tuple, starts.pop(), len(self.ops)))

        return before, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's rule for fake tensors takes bfloat16 only
        result = _grouped(*args[:2]) if _name(func) == "_grouped_mm" else func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        if outputs:
            call_args = tuple(args), dict(kwargs or {})
            arguments, keywords = pytree.tree_map_only(Tensor, self._operand, call_args)
            op = TracedOp(
                name=_name(func),
                module=self._within[-1],
                parameters=self.parameters(call_args),
                inputs=self.values(call_args),
                outputs=tuple(map(self._number, outputs)),
                shapes=tuple(tuple(output.shape) for output in outputs),
                arguments=arguments,
                keywords=keywords,
            )
            self.ops.append(op)
        return result

    def _operand(self, tensor: Tensor) -> Operand:
        name = self._names.get(id(tensor), "")
        return Operand(-1 if name else self._number(tensor), name, tuple(tensor.shape))

    def _number(self, value: Tensor) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._alive)
            self._alive.append(value)
        return self._numbers[id(value)]

    def values(self, tree: Any) -> tuple[int, ...]:
        """Numbers of the tensors in ``tree`` that are no parameters."""
        return tuple(self._number(tensor) for tensor in _tensors(tree) if id(tensor) not in self._names)

    def parameters(self, tree: Any) -> tuple[str, ...]:
        """Names of the parameters in ``tree``, each once."""
        return tuple(dict.fromkeys(self._names[id(leaf)] for leaf in _tensors(tree) if id(leaf) in self._names))


def _grouped(rows: Tensor, stack: Tensor) -> Tensor:
    """A tensor of the shape of rows [M, I] times matrices of a stack [E, I, O]."""
    return rows.new_empty(rows.shape[0], stack.shape[-1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name

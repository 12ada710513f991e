"""Builds a model without values, so that no rank holds the whole model; values are drawn later, one tensor at a time.

While the factory runs, its tensors are fake, and every operation on them is recorded: arguments, the storages that it reads and
writes, the generator that it draws from. ``DeferredModel.values`` replays the operations on the CPU, one parameter after the
other, and frees each parameter once its shard has been copied. Every draw keeps its place in the random stream, also if it is
overwritten later or belongs to another stage, so values and generator states equal those of a plain construction, bit for bit.
Peak memory is the largest parameter and the temporaries of its operations; a parameter that is drawn twice, with others in
between, is held until its second draw.

Tensors with values from the start (``torch.tensor``, ``arange``, ``linspace``, numpy) stay real, because constructors read them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # has no public name
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.errors import PlanError
from unisono.parallel.sharding import ShardedParameters

# prefixes of factories that are deferred; the results of others are read by constructors
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "normal")
# operations that overwrite their first argument without reading it
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "random_", "log_normal_", "trunc_normal_"}
_MARK = 1 << 62  # while recording, the seed of a generator after its n-th draw is _MARK + n
_init: Any = torch.nn.init
_truncated_normal = _init._no_grad_trunc_normal_


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor as a view of the storage number ``cell``."""

    cell: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: Any) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor with values, and its ``_version`` when it was recorded."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False, slots=True)
class _Operation:
    """A recorded operation.

    ``reads`` and ``writes`` are storage numbers, ``makes`` are the new outputs. ``generator`` is None if it draws nothing;
    ``state`` is the generator's state before it, if that was set by code outside of the recorded operations.
    """

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[_Place, ...]
    generator: torch.Generator | None
    state: Tensor | None

    @property
    def cells(self) -> frozenset[int]:
        return self.reads | self.writes


@dataclass(slots=True)
class _Stream:
    """A generator while recording: its first state, and digests of its states after draws."""

    generator: torch.Generator
    began: Tensor
    seen: set[str]
    last: str = ""


class _InitRecorder(TorchDispatchMode):
    """Runs operations on fake tensors and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.operations: list[_Operation] = []
        self.storages: list[Any] = []  # held, so that no address is reused
        self._numbers: dict[int, int] = {}
        self.streams: dict[int, _Stream] = {}  # by address, because Python objects of one generator come and go

    def place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return _Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func.overloadpacket.__name__)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        inputs = _leaves((args, kwargs), Tensor)
        factory = not inputs and name.startswith(_FACTORIES)
        if not (factory or draws or any(isinstance(tensor, FakeTensor) for tensor in inputs)):
            return func(*args, **kwargs)
        written = [
            tensor
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _leaves(args[number] if number < len(args) else kwargs.get(argument.name), Tensor)
        ]
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise _refused(name, written[0], "a tensor that was made with its values is not drawn or computed into")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise _refused(name, None, f"values are drawn on the CPU, not on {device}")
        try:
            with self.fake:
                result = func(*args, **kwargs)
        # torch raises this or a subclass for an operation that fake tensors cannot run
        except RuntimeError as error:
            raise _refused(name, inputs[0] if inputs else None, "it needs values, and there are none yet") from error
        # its weak references to results would forbid a conversion of modules (.to, .half); it has none where torch's cache of
        # fake results, which is shared by all of the process, knows the operation
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        if factory:
            kwargs["dtype"] = result.dtype  # the default may differ when it is replayed
        self._record(func, name, args, kwargs, written, result, draws=draws)
        return result

    def truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces torch's function, which draws until all values are in range, so that it is one recorded operation."""
        if not isinstance(tensor, FakeTensor):
            return _truncated_normal(tensor, *args, **kwargs)
        self._record(_truncated_normal, "trunc_normal_", (tensor, *args), kwargs, [tensor], tensor, draws=True)
        return tensor

    def _record(
        self, func: Any, name: str, args: Any, kwargs: Any, written: list[Tensor], result: Any, *, draws: bool
    ) -> None:
        args, kwargs = pytree.tree_map_only(Tensor, self._noted, (tuple(args), kwargs))
        inputs = frozenset(place.cell for place in _leaves((args, kwargs), _Place))
        outputs = tuple(self.place(tensor) for tensor in _leaves(result, Tensor))
        makes = tuple(place for place in outputs if place.cell not in inputs)
        writes = frozenset(self.place(tensor).cell for tensor in written)
        if not (writes or makes):
            return  # a view, which its place describes
        generator = (kwargs.get("generator") or torch.default_generator) if draws else None
        self.operations.append(
            _Operation(
                function=func,
                args=args,
                kwargs=kwargs,
                reads=inputs - writes if self._fills(name, args, writes) else inputs,
                writes=writes | {place.cell for place in makes},
                makes=makes,
                generator=generator,
                state=self._set_by_others(generator) if generator else None,
            )
        )

    def _noted(self, tensor: Tensor) -> _Place | _Constant:
        return self.place(tensor) if isinstance(tensor, FakeTensor) else _Constant(tensor, tensor._version)

    def _fills(self, name: str, args: Any, writes: frozenset[int]) -> bool:
        """Whether the operation overwrites the whole storage of its first argument without reading it."""
        if name not in _FILLS:
            return False
        target = args[0]
        others = {place.cell for place in _leaves(args[1:], _Place)}
        covered = target.dtype.itemsize * math.prod(target.size)
        return covered == self.storages[target.cell].nbytes() and not others & writes

    def _set_by_others(self, generator: torch.Generator) -> Tensor | None:
        """The generator's state, if it differs from that after the last draw here, else None. Recording draws nothing; instead
        the generator is put into a state of its own for each draw, so that a repeated seed is noticed."""
        state = generator.get_state()
        address: int = cast(Any, generator)._cdata
        stream = self.streams.setdefault(address, _Stream(generator, state, set()))
        same = _digest(state) == stream.last
        if not same and _digest(state) in stream.seen:
            raise _refused("set_state", None, "a generator is not put back to where it was between two draws")
        generator.manual_seed(_MARK + len(stream.seen))
        stream.last = _digest(generator.get_state())
        stream.seen.add(stream.last)
        return None if same else state


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredModel:
    """A model on the meta device, and the operations that draw its values. Equal values have an equal ``fingerprint``."""

    model: nn.Module
    fingerprint: str
    _operations: tuple[_Operation, ...]
    _bytes: tuple[int, ...]  # of each storage
    _places: dict[str, _Place]
    _last: tuple[tuple[torch.Generator, Tensor], ...]  # states of generators that were set after their last draw

    def values(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (first name, value on the CPU) of each deferred parameter and buffer among ``names``.

        A value is dropped when the next is requested. The caller must not draw random numbers in between. At the end the
        generators are in the state that a plain construction leaves. Raises PlanError if a tensor that the factory read has
        changed since.
        """
        wanted: dict[int, list[str]] = {}
        for name, place in self._places.items():
            if name in names:
                wanted.setdefault(place.cell, []).append(name)
        yield from _Replay(self._operations, self._bytes, self._places, wanted).values()
        for generator, state in self._last:
            generator.set_state(state)


class _Replay:
    """One replay of recorded operations. An operation may run when it is first in the queue of every storage it touches."""

    def __init__(
        self,
        operations: Iterable[_Operation],
        sizes: tuple[int, ...],
        places: dict[str, _Place],
        wanted: dict[int, list[str]],
    ) -> None:
        self._operations, self._bytes, self._places, self._wanted = tuple(operations), sizes, places, wanted
        self._storages: dict[int, Any] = {}
        self._queues: dict[int, deque[_Operation]] = {}
        self._done: list[int] = []
        alive = set(wanted)
        self._needed: set[_Operation] = set()
        for operation in reversed(self._operations):
            if operation.writes & alive or (operation.generator and operation.reads - operation.writes):
                self._needed.add(operation)
                alive = (alive - operation.writes) | operation.reads
                for cell in operation.cells:
                    self._queues.setdefault(cell, deque()).appendleft(operation)

    @torch.no_grad()
    def values(self) -> Iterator[tuple[str, Tensor]]:
        for operation in self._operations:
            if operation.generator is None:
                continue
            if operation.state is not None:
                operation.generator.set_state(operation.state)
            if operation in self._needed:
                self._demand(operation)
                yield from self._follow(operation.writes)
            else:
                self._call(operation, {})
        for cell in self._wanted:
            while self._queues[cell]:
                self._demand(self._queues[cell][-1])
                yield from self._finished()

    def _follow(self, cells: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
        """Run the operations on ``cells`` that need no further draw, and yield the values that are finished."""
        yield from self._finished()
        for cell in cells:
            while self._queues[cell] and self._drawn(self._queues[cell][0]):
                after = self._queues[cell][0]
                self._demand(after)
                yield from self._follow(after.writes)

    def _drawn(self, operation: _Operation) -> bool:
        before = (p for cell in operation.cells for p in takewhile(lambda p: p is not operation, self._queues[cell]))
        return operation.generator is None and all(self._drawn(earlier) for earlier in before)

    def _finished(self) -> Iterator[tuple[str, Tensor]]:
        for cell in self._done:
            storage = self._storages.pop(cell)
            for name in self._wanted.get(cell, ()):
                yield name, self._places[name].of(storage)
        self._done.clear()

    def _demand(self, operation: _Operation) -> None:
        for cell in operation.cells:
            while self._queues[cell][0] is not operation:
                self._demand(self._queues[cell][0])
        self._call(operation, self._storages)
        for cell in operation.cells:
            self._queues[cell].popleft()
            if not self._queues[cell]:
                self._done.append(cell)

    def _call(self, operation: _Operation, storages: dict[int, Any]) -> None:
        def real(noted: _Place | _Constant) -> Tensor:
            if isinstance(noted, _Constant):
                if noted.tensor._version != noted.version:
                    raise _refused(str(operation.function), noted.tensor, "what it reads has been changed since")
                return noted.tensor
            if noted.cell not in storages:
                storages[noted.cell] = torch.UntypedStorage(self._bytes[noted.cell])
            return noted.of(storages[noted.cell])

        args, kwargs = pytree.tree_map_only((_Place, _Constant), real, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        outputs = _leaves(result, Tensor)[: len(operation.makes)]
        for place, tensor in zip(operation.makes, outputs, strict=True):
            storages[place.cell] = tensor.untyped_storage()
            if tensor.stride() != place.stride or tensor.storage_offset() != place.offset:
                storages[place.cell] = torch.UntypedStorage(self._bytes[place.cell])
                place.of(storages[place.cell]).copy_(tensor)


def deferred_init(factory: Callable[[], nn.Module]) -> DeferredModel:
    """Build the model of ``factory`` without its values. The states of generators do not change.

    Raises PlanError for operations that cannot be replayed: reading a value that is not drawn yet (``.item()``), devices other
    than the CPU, resetting a generator to an earlier state, and tensors that are neither parameter nor buffer.
    """
    recorder, began = _InitRecorder(), torch.get_rng_state()
    _init._no_grad_trunc_normal_ = recorder.truncated_normal
    try:
        with recorder, warnings.catch_warnings():
            # the warning of copying a module; the copy is recorded like any other operation
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            try:
                model = factory()
            except RuntimeError as error:
                if "Couldn't swap" not in str(error):
                    raise
                rule = "a module is converted (.to, .half) only while nothing holds a weak reference to its parameters"
                raise _refused("module.to()", None, rule) from error
        ends = [(item.generator, item.generator.get_state(), item.last) for item in recorder.streams.values()]
    finally:
        _init._no_grad_trunc_normal_ = _truncated_normal
        for stream in recorder.streams.values():
            stream.generator.set_state(stream.began)
        torch.set_rng_state(began)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {name: recorder.place(tensor) for name, tensor in named.items() if isinstance(tensor, FakeTensor)}
    with recorder.fake:
        torchs_own = {*vars(torch.empty(())), "_is_param"}
    _to_meta(model, torchs_own)
    hasher = xxhash.xxh3_128()
    for operation in recorder.operations:
        hasher.update(f"{operation.function.__name__}{operation.state is None}".encode())
        _update_digest(hasher, (operation.args, operation.kwargs, operation.state))
    _update_digest(hasher, [(name, places.get(name, tensor)) for name, tensor in named.items()])
    return DeferredModel(
        model=model,
        fingerprint=hasher.hexdigest(),
        _operations=tuple(recorder.operations),
        _bytes=tuple(storage.nbytes() for storage in recorder.storages),
        _places=places,
        _last=tuple((generator, state) for generator, state, last in ends if _digest(state) != last),
    )


def _to_meta(model: nn.Module, torchs_own: Collection[str]) -> None:
    """Replace fake tensors by plain ones on the meta device; tied tensors stay tied."""
    replacements: dict[int, Tensor] = {}

    def plain(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                vars(new).update({name: mark for name, mark in vars(tensor).items() if name not in torchs_own})
            replacements[id(tensor)] = new
        return replacements[id(tensor)]

    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, FakeTensor):
                    tensors[name] = cast(Any, plain(tensor))
        for name, value in vars(module).items():
            if isinstance(value, FakeTensor):
                where = f"{path}.{name}".lstrip(".")
                raise _refused(where, value, "a tensor of a module is a parameter or a registered buffer")


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Allocate the meta tensors of ``model``, which is this rank's part already, on ``device``, uninitialised, and move its other
    tensors there. The placeholders of other stages' parameters (``pipeline.stages``) become zeros."""

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        # not empty_like: where a step is traced, the mode of fake tensors would keep the old one, which is then not replaced
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, torch.zeros((), dtype=value.dtype, device=device).expand(value.shape))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    # ``to_empty`` would also empty buffers with values; FSDP2 supports this call
    model._apply(real)
    for first, *others in names.values():  # tie again
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))


@torch.no_grad()
def materialize(deferred: DeferredModel, model: nn.Module, sharded: ShardedParameters) -> None:
    """Draw the values of an allocated model, and copy this rank's shard of each."""
    buffers = dict(model.named_buffers())
    targets = {**buffers, **sharded.parameters}
    for name, value in deferred.values(targets.keys()):
        target = targets[name]
        shard = sharded.shard_of(name, target) if name in sharded.parameters else None
        if shard is None:
            target.copy_(value)
            continue
        for index, offset in shard.blocks():
            local, block = target[index], value
            for dim, (begin, extent) in enumerate(zip(offset, local.shape, strict=True)):
                block = block.narrow(dim, begin, extent)
            local.copy_(block)


def _leaves(tree: Any, kind: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def _digest(state: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(state.numpy().tobytes())


def _update_digest(hasher: Any, tree: Any) -> None:
    """Add ``tree`` to a digest that is equal in every process."""
    leaves, spec = pytree.tree_flatten(tree)
    hasher.update(str(spec).encode())
    for leaf in leaves:
        value = leaf.tensor if isinstance(leaf, _Constant) else leaf
        if isinstance(value, Tensor):
            hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif not isinstance(value, torch.Generator):
            hasher.update(f"{value!r};".encode())


def _refused(what: str, tensor: Tensor | None, rule: str) -> PlanError:
    of = "" if tensor is None else f" of {list(tensor.shape)} {tensor.dtype}"
    return PlanError(
        given=f"{what}{of} while a model is built without its values",
        rule=rule,
        consequence="its values could not be drawn later, a tensor at a time",
        nearest="give the trainer (or return from components.model) a module that was built before; each rank then holds all "
        "of it once, at the start",
    )

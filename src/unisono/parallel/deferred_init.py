"""Builds a model without values, so that no rank ever holds all of it; values are drawn later, one tensor at a time.

While the factory runs, its tensors are made on the meta device and every operation on them is recorded: arguments, the storages
it reads and writes, the generator it draws from. ``DeferredModel.values`` replays the operations on the CPU, one parameter after
the other, and frees each parameter once its shard has been copied. Every draw keeps its place in the random stream, also one
that is overwritten later or belongs to another stage. So values and generators are those of a plain construction, bit for bit.
Peak memory is the largest parameter and the temporaries of its operations; a parameter that is drawn twice, with others in
between, is held meanwhile.

Tensors that have values from the start (``torch.tensor``, ``arange``, ``linspace``, numpy) stay real: constructors compute with
them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

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
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.errors import PlanError
from unisono.parallel.sharding import ShardedParameters

# factories whose names begin so are deferred; others give values that constructors read
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "normal")
# they overwrite their first argument and do not read it
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "random_", "log_normal_", "trunc_normal_"}
_MARK = 1 << 62  # seeds that stand for "after this draw" while recording
_init: Any = torch.nn.init
_truncated_normal = _init._no_grad_trunc_normal_


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor as a window of the storage number ``cell``."""

    cell: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: Any) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor that had its values, as often written to as ``version`` says."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False, slots=True)
class _Operation:
    """``makes``: places of its outputs. ``generator`` is None where it draws nothing; ``state`` is what others set it to."""

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
    """A generator while recording: where it began, and digests of where draws left it."""

    generator: torch.Generator
    began: Tensor
    seen: set[str]
    last: str = ""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.operations: list[_Operation] = []
        self.storages: list[Any] = []  # held, so that addresses stay theirs
        self._numbers: dict[int, int] = {}
        self.streams: dict[int, _Stream] = {}  # by address: the objects in Python come and go

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
        inputs = list(_tensors((args, kwargs)))
        factory = not inputs and name.startswith(_FACTORIES)
        if not (factory or draws or any(isinstance(tensor, FakeTensor) for tensor in inputs)):
            return func(*args, **kwargs)
        written = [
            tensor
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
        ]
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise _refused(name, written[0], "a tensor that was made with its values is not drawn or computed into")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise _refused(name, None, f"values are drawn on the CPU, not on {device}")
        try:
            with self.fake:
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _refused(name, inputs[0] if inputs else None, "it needs values, and there are none yet") from error
        if factory:
            kwargs["dtype"] = result.dtype  # the default may be another one later
        self._record(func, name, args, kwargs, written, result, draws=draws)
        return result

    def truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of torch's, which draws until all values are in their range, and so is one operation here."""
        if not isinstance(tensor, FakeTensor):
            return _truncated_normal(tensor, *args, **kwargs)
        self._record(_truncated_normal, "trunc_normal_", (tensor, *args), kwargs, [tensor], tensor, draws=True)
        return tensor

    def _record(
        self, func: Any, name: str, args: Any, kwargs: Any, written: list[Tensor], result: Any, *, draws: bool
    ) -> None:
        args, kwargs = _mapped(self._noted, args), _mapped(self._noted, kwargs)
        inputs = frozenset(place.cell for place in _places((args, kwargs)))
        outputs = tuple(self.place(tensor) for tensor in _tensors(result))
        makes = tuple(place for place in outputs if place.cell not in inputs)
        writes = frozenset(self.place(tensor).cell for tensor in written)
        if not (writes or makes):
            return  # a view: places say what it is
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
        """Whether nothing of what it writes to stays, or is read."""
        if name not in _FILLS:
            return False
        target = args[0]
        covered = target.dtype.itemsize
        for extent in target.size:
            covered *= extent
        others = {place.cell for place in _places(args[1:])}
        return covered == self.storages[target.cell].nbytes() and not others & writes

    def _set_by_others(self, generator: torch.Generator) -> Tensor | None:
        """The generator's state, where it is not as the last draw here left it. Nothing is drawn yet: the
        generator is put elsewhere instead, so that setting it to the same seed again is noticed."""
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
    """A model on the meta device and how to make its values. ``fingerprint`` is equal where all values will be."""

    model: nn.Module
    fingerprint: str
    _operations: tuple[_Operation, ...]
    _bytes: tuple[int, ...]  # of each storage
    _places: dict[str, _Place]
    _last: tuple[tuple[torch.Generator, Tensor], ...]  # what generators were set to after their last draw

    def values(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and buffer of ``names`` that was deferred, by its first name, whole, on the CPU.

        A tensor is dropped when the next is asked for. Draw nothing meanwhile. At the end the generators are where a plain
        construction leaves them. Raises PlanError where a tensor the factory computed with has changed since.
        """
        wanted: dict[int, list[str]] = {}
        for name, place in self._places.items():
            if name in names:
                wanted.setdefault(place.cell, []).append(name)
        yield from _Run(self._operations, self._bytes, self._places, wanted).values()
        for generator, state in self._last:
            generator.set_state(state)


class _Run:
    """One carrying out. An operation may run when it is first in the queue of every storage it touches."""

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
        """What can be computed from what is here without a further draw."""
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

        result = operation.function(*_mapped(real, operation.args), **_mapped(real, operation.kwargs))
        outputs = [tensor for tensor in _tensors(result)][: len(operation.makes)] if operation.makes else []
        for place, tensor in zip(operation.makes, outputs, strict=True):
            storages[place.cell] = tensor.untyped_storage()
            if tensor.stride() != place.stride or tensor.storage_offset() != place.offset:
                storages[place.cell] = torch.UntypedStorage(self._bytes[place.cell])
                place.of(storages[place.cell]).copy_(tensor)


def deferred_init(factory: Callable[[], nn.Module]) -> DeferredModel:
    """The model of ``factory`` without its values. Generators are left as they are.

    Raises PlanError for what cannot be done later: reading a value of a tensor that is not drawn yet (``.item()``), devices
    other than the CPU, a generator put back, and tensors that are neither parameter nor buffer.
    """
    recorder, began = _Recorder(), torch.get_rng_state()
    _init._no_grad_trunc_normal_ = recorder.truncated_normal
    try:
        with recorder, warnings.catch_warnings():
            # said when a module is copied; copying is recorded as any other operation
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            model = factory()
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
        for item in (operation.args, operation.kwargs, operation.state):
            _update_digest(hasher, item)
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
    """Put plain tensors on the meta device in place of those that were used to record; what is tied stays tied."""
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
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if isinstance(tensor, FakeTensor):
                    own[name] = cast(Any, plain(tensor))
        for name, value in vars(module).items():
            if isinstance(value, FakeTensor):
                where = f"{path}.{name}".lstrip(".")
                raise _refused(where, value, "a tensor of a module is a parameter or a registered buffer")


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on ``device``, uninitialised, and move the others there. ``model`` is this rank's part already; the
    placeholders of other stages' parameters (``pipeline.stages``) become zeros."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, torch.zeros((), dtype=value.dtype, device=device).expand(value.shape))
    tied = [list(names) for names in _names_of_tied(model)]
    # ``to_empty`` would empty buffers that have their values; FSDP2 follows this same call
    model._apply(real)
    for first, *others in tied:
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))


@torch.no_grad()
def materialize(recipe: DeferredModel, model: nn.Module, pieces: ShardedParameters) -> None:
    """Draw the values of an allocated model, and copy this rank's shard of each."""
    buffers = dict(model.named_buffers())
    targets = {**buffers, **pieces.parameters}
    for name, whole in recipe.values(targets.keys()):
        target = targets[name]
        part = pieces.shard_of(name, target) if name in pieces.parameters else None
        if part is None:
            target.copy_(whole)
            continue
        for index, offset in part.blocks():
            mine, block = target[index], whole
            for dim, (begin, extent) in enumerate(zip(offset, mine.shape, strict=True)):
                block = block.narrow(dim, begin, extent)
            mine.copy_(block)


def _names_of_tied(model: nn.Module) -> Iterator[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return (aliases for aliases in names.values() if len(aliases) > 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    return _leaves(value, Tensor)


def _places(value: Any) -> Iterator[_Place]:
    return _leaves(value, _Place)


def _leaves(value: Any, kind: Any) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        yield from _leaves(list(cast("dict[str, Any]", value).values()), kind)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _leaves(item, kind)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Tensor | _Place | _Constant):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return type(cast(Any, value))(_mapped(function, item) for item in cast("list[Any]", value))
    return value


def _digest(state: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(state.numpy().tobytes())


def _update_digest(hasher: Any, value: Any) -> None:
    """Add ``value`` to a digest that is equal in every process."""
    if isinstance(value, _Constant):
        value = value.tensor
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        _update_digest(hasher, list(cast("dict[str, Any]", value).items()))
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            _update_digest(hasher, item)
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

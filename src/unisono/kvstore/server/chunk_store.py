"""The chunks that a server holds: values, optimizer state, and the applied pushes.

Exactly once: a push has a number in its stream, and a chunk keeps the applied numbers with its value. A push that is
sent again, by the network, by a worker that saw no answer, or by another worker that claimed the same batch shard, is
acknowledged and changes nothing. Each chunk has its own lock; a push of several chunks takes their locks in order.

A push with a NaN or an infinity is refused whole, before it changes anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import CommError
from unisono.kvstore.server.chunk_optimizer import (
    LAYERWISE_OPTIMIZERS,
    ChunkOptimizer,
    ServerOptimizerSpec,
    effective_learning_rate,
    refused,
)
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.server.range_set import RangeSet

# credits bound the pushes in flight far below this
_MOST_GAPS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PushHeader:
    """A push without its gradients. ``base_version``: the version of the values that the gradient was computed from, 0
    if unknown."""

    worker: int
    stream: int
    sequence_number: int
    lr: float = float("nan")
    base_version: int = 0


@dataclass(frozen=True, slots=True)
class ChunkGradient:
    """A gradient of a chunk, [elements], or of some ``rows`` [n] of it, [n, row elements]."""

    chunk: int
    gradient: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PushOutcome:
    """Chunks changed, chunks that had the push already, the reason of a refusal, the lowest version, the largest lag."""

    applied: int = 0
    duplicates: int = 0
    refused: str = ""
    version: int = 0
    lag: int = 0


@dataclass(slots=True)
class _ChunkState:
    chunk: Chunk
    lock: threading.RLock = field(default_factory=threading.RLock)
    value: nn.Parameter | None = None
    version: int = 0  # pushes applied
    applied: dict[int, RangeSet] = field(default_factory=dict[int, RangeSet])  # by stream
    optimizer: ChunkOptimizer | None = None
    # by worker: the versions that its pushes made
    own_versions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def lag(self, worker: int, base_version: int) -> int:
        """The number of other workers' pushes since ``base_version``."""
        own_versions = [version for version in self.own_versions.get(worker, ()) if version > base_version]
        self.own_versions[worker] = own_versions
        return max(self.version - base_version - len(own_versions), 0)


class ChunkStore:
    """The chunks of one server. Thread-safe."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunk_states = {chunk.number: _ChunkState(chunk) for chunk in chunks}
        self.optimizer_spec: ServerOptimizerSpec | None = None

    @property
    def initialised_chunks(self) -> list[int]:
        """The numbers of chunks that have a value, in order."""
        return sorted(number for number, chunk_state in self._chunk_states.items() if chunk_state.value is not None)

    def next_seq(self, stream: int) -> int:
        """A number above all that any chunk has applied of this stream."""
        ends = [0]
        for chunk_state in self._chunk_states.values():
            with chunk_state.lock:
                ends += [end for _, end in chunk_state.applied.get(stream, RangeSet()).to_json()[-1:]]
        return max(ends)

    def applied_ranges(self, stream: int) -> list[list[list[list[int]]]]:
        """The numbers of this stream that each chunk has applied: pairs [numbers of chunks, what they have applied], both
        as ``RangeSet.to_json``. Chunks that have applied the same share a pair, which keeps it short."""
        chunks: dict[str, RangeSet] = {}
        applied: dict[str, list[list[int]]] = {}
        for number, chunk_state in self._chunk_states.items():
            with chunk_state.lock:
                spans = chunk_state.applied.get(stream, RangeSet()).to_json()
            applied[str(spans)] = spans
            chunks.setdefault(str(spans), RangeSet()).add(number)
        return [[chunks[same].to_json(), spans] for same, spans in applied.items()]

    def chunk(self, number: int) -> Chunk:
        """Raises CommError for a chunk of another server."""
        return self._chunk_state(number).chunk

    def init(self, number: int, value: Tensor) -> bool:
        """Set the first value [elements] of a chunk and ignore later ones; returns whether it was set."""
        chunk_state = self._chunk_state(number)
        _fits(chunk_state.chunk, value.numel(), value.dtype)
        with chunk_state.lock:
            if chunk_state.value is not None:
                return False
            chunk_state.value = nn.Parameter(value.detach().clone().flatten(), requires_grad=value.is_floating_point())
            return True

    def set_optimizer_spec(self, spec: ServerOptimizerSpec) -> None:
        """Set the optimizer. The same again changes nothing; a different one raises CommError."""
        if self.optimizer_spec is not None and self.optimizer_spec != spec:
            kind = self.optimizer_spec.options.kind
            raise refused(
                f"optimizer {spec.options.kind!r} for servers that have {kind!r}, or with other options or keys",
                "all workers name one optimizer, and it stays: its state belongs to it",
                "send learning rates with the pushes; for another optimizer start a new run from the weights",
            )
        self.optimizer_spec = spec

    def push(
        self, entries: Sequence[ChunkGradient], push: PushHeader, before_unlock: Callable[[], None] | None = None
    ) -> PushOutcome:
        """Apply gradients, each once. ``before_unlock`` runs before the locks are released, also for a duplicate: a replica
        sees pushes of a chunk in the order in which they were applied here.

        Raises CommError for invalid gradients, before anything is changed.
        """
        states = [self._chunk_state(entry.chunk) for entry in entries]
        if any(left.chunk >= right.chunk for left, right in pairwise(entries)):
            raise _unsorted("chunks")
        for chunk_state, entry in zip(states, entries, strict=True):
            self._check(chunk_state, entry)
        if not all(is_finite(entry.gradient) for entry in entries):
            return PushOutcome(refused="non-finite")
        applied = duplicates = largest_lag = 0
        with ExitStack() as locks:
            for chunk_state in states:
                locks.enter_context(chunk_state.lock)
            for chunk_state in states:
                if len(chunk_state.applied.get(push.stream, ())) >= _MOST_GAPS:  # memory for gaps is bounded
                    raise refused(
                        f"push {push.sequence_number} of stream {push.stream}, which has {_MOST_GAPS:,} gaps before it",
                        "a stream counts its pushes one by one, and lost pushes are sent again",
                        "use the same release of unisono everywhere, and end other processes with the job's secret",
                    )
            updates = [
                (chunk_state, self._optimizer(chunk_state), chunk_state.lag(push.worker, push.base_version))
                for chunk_state in states
            ]
            rates = [effective_learning_rate(optimizer.spec, push.lr, lag) for _, optimizer, lag in updates]
            for (chunk_state, optimizer, lag), entry, rate in zip(updates, entries, rates, strict=True):
                numbers = chunk_state.applied.setdefault(push.stream, RangeSet())
                if push.sequence_number in numbers:
                    duplicates += 1
                    continue
                optimizer.step(entry.gradient, rate, entry.rows)
                numbers.add(push.sequence_number)
                chunk_state.version += 1
                chunk_state.own_versions[push.worker].append(chunk_state.version)
                applied, largest_lag = applied + 1, max(largest_lag, lag)
            version = min(chunk_state.version for chunk_state in states) if states else 0
            if before_unlock is not None:
                before_unlock()
        return PushOutcome(applied=applied, duplicates=duplicates, version=version, lag=largest_lag)

    def pull(self, number: int, rows: Tensor | None = None, into: Tensor | None = None) -> tuple[Tensor, int]:
        """A copy of a chunk's value [elements], in ``into`` if given, or of some rows [n, row elements], and its
        version."""
        chunk_state = self._chunk_state(number)
        with chunk_state.lock:
            value = self._value(chunk_state).detach()
            if rows is None:
                return (value.clone() if into is None else into.copy_(value)), chunk_state.version
            _check_rows(chunk_state.chunk, rows)
            return value.view(-1, chunk_state.chunk.row_elements)[rows], chunk_state.version

    def state(self, numbers: Iterable[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The optimizer spec and the full state of chunks, each as of one moment: facts as JSON (``recipe``; ``chunks``
        by number), tensors as ``<number>/value`` and ``<number>/<state>``. Chunks without a value are left out."""
        chunks: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for number in numbers:
            chunk_state = self._chunk_state(number)
            with chunk_state.lock:
                if chunk_state.value is None:
                    continue
                applied = {str(stream): numbers.to_json() for stream, numbers in chunk_state.applied.items()}
                chunks[str(number)] = {"version": chunk_state.version, "applied": applied}
                tensors[f"{number}/value"] = chunk_state.value.detach().clone()
                state = chunk_state.optimizer.state if chunk_state.optimizer is not None else {}
                tensors |= {f"{number}/{name}": tensor.clone() for name, tensor in state.items()}
        recipe = None if self.optimizer_spec is None else self.optimizer_spec.to_json()
        # sent and stored names of the first release
        return {"recipe": recipe, "chunks": chunks}, tensors

    def load_state(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the result of ``state``. Raises CommError for an invalid state, before any chunk is changed."""
        if facts.get("recipe") is not None:
            self.set_optimizer_spec(ServerOptimizerSpec.from_json(facts["recipe"]))
        chunks = facts["chunks"]
        named: dict[int, dict[str, Tensor]] = {int(number): {} for number in chunks}
        for name, tensor in tensors.items():
            number, _, state = name.partition("/")
            named.setdefault(int(number), {})[state] = tensor
        if without_facts := named.keys() - {int(number) for number in chunks}:
            raise _unlike(self.chunk(min(without_facts)), "tensors without facts")
        restored = [self._restored(number, parts) for number, parts in named.items()]
        counts = [_history(chunks[str(number)]) for number in named]
        for (number, parts), (value, optimizer), (version, applied) in zip(
            named.items(), restored, counts, strict=True
        ):
            chunk_state = self._chunk_states[number]
            with chunk_state.lock, torch.no_grad():
                for name, tensor in optimizer.state.items() if optimizer is not None else ():
                    tensor.copy_(parts[name])
                chunk_state.value, chunk_state.optimizer, chunk_state.own_versions = value, optimizer, {}
                chunk_state.version, chunk_state.applied = version, applied

    def _restored(self, number: int, parts: Mapping[str, Tensor]) -> tuple[nn.Parameter, ChunkOptimizer | None]:
        """Value and empty optimizer for a chunk's saved state."""
        chunk = self._chunk_state(number).chunk
        saved = parts.get("value")
        if saved is None:
            raise _unlike(chunk, "no value")
        _fits(chunk, saved.numel(), saved.dtype)
        value = nn.Parameter(saved.clone().flatten(), requires_grad=saved.is_floating_point())
        states = parts.keys() - {"value"}
        if not states:
            return value, None
        optimizer = self._new_optimizer(chunk.key, value)
        if states != optimizer.state.keys():
            raise _unlike(chunk, f"the state {sorted(states)} where the optimizer keeps {sorted(optimizer.state)}")
        for name, tensor in optimizer.state.items():
            if (parts[name].shape, parts[name].dtype) != (tensor.shape, tensor.dtype):
                raise _unlike(chunk, f"{name} as {parts[name].dtype} {list(parts[name].shape)}")
        return value, optimizer

    def _check(self, chunk_state: _ChunkState, entry: ChunkGradient) -> None:
        chunk = chunk_state.chunk
        if not chunk.dtype.is_floating_point:
            nearest = "push parameters only; buffers are set by init"
            raise refused(
                f"a push of {chunk.key!r}, which is {chunk.dtype}", "gradients are of floating dtypes", nearest
            )
        if entry.rows is None:
            _fits(chunk, entry.gradient.numel(), entry.gradient.dtype)
            return
        _check_rows(chunk, entry.rows)
        if self.optimizer_spec is not None and self.optimizer_spec.options.kind in LAYERWISE_OPTIMIZERS:
            given = f"rows of {chunk.key!r} with optimizer kind {self.optimizer_spec.options.kind!r}"
            rule = f"{' and '.join(LAYERWISE_OPTIMIZERS)} need the norm of the whole gradient"
            raise refused(given, rule, "push the whole gradient, or choose adamw or sgd")
        if entry.gradient.shape != (len(entry.rows), chunk.row_elements) or entry.gradient.dtype != chunk.dtype:
            raise _unlike(chunk, f"{len(entry.rows)} rows as {entry.gradient.dtype} {list(entry.gradient.shape)}")

    def _optimizer(self, chunk_state: _ChunkState) -> ChunkOptimizer:
        if chunk_state.optimizer is None:
            chunk_state.optimizer = self._new_optimizer(chunk_state.chunk.key, self._value(chunk_state))
        return chunk_state.optimizer

    def _new_optimizer(self, key: str, value: nn.Parameter) -> ChunkOptimizer:
        if self.optimizer_spec is None:
            given = f"a push of {key!r} to servers without an optimizer"
            rule = "in dist_async the servers apply gradients, so their optimizer is set before the first push"
            raise refused(given, rule, "store.set_optimizer(OptimOptions(...)) on any worker, after init")
        return ChunkOptimizer(self.optimizer_spec, key, value)

    def _value(self, chunk_state: _ChunkState) -> nn.Parameter:
        if chunk_state.value is None:
            given = f"chunk {chunk_state.chunk.number} of {chunk_state.chunk.key!r}, which has no value yet"
            rule = "a key is initialised before it is pushed or pulled"
            raise refused(given, rule, "store.init with all parameters, on any worker")
        return chunk_state.value

    def _chunk_state(self, number: int) -> _ChunkState:
        chunk_state = self._chunk_states.get(number)
        if chunk_state is None:
            rule = f"this server holds {len(self._chunk_states)} chunks, and that is none of them"
            raise refused(f"chunk {number}", rule, "send it where the placement puts it")
        return chunk_state


def _history(fact: Mapping[str, Any]) -> tuple[int, dict[int, RangeSet]]:
    """Version and applied numbers. Raises ValueError for a version that no frame could carry."""
    version = int(fact["version"])
    if not 0 <= version < 1 << 64:
        raise ValueError(f"version {version} is no number of pushes")
    return version, {int(stream): RangeSet(spans) for stream, spans in fact["applied"].items()}


def is_finite(gradient: Tensor) -> bool:
    """Whether all elements are finite: both extremes are NaN where any element is. One pass without memory;
    ``isfinite().all()`` takes 50 times as long."""
    if not gradient.numel():
        return True
    low, high = gradient.aminmax()
    return bool(low.isfinite()) and bool(high.isfinite())


def _fits(chunk: Chunk, elements: int, dtype: torch.dtype) -> None:
    if (elements, dtype) != (chunk.num_elements, chunk.dtype):
        raise _unlike(chunk, f"{elements} elements of {dtype}")


def _check_rows(chunk: Chunk, rows: Tensor) -> None:
    if not chunk.row_elements:
        rule = "rows of a key are pushed and pulled where 1024 of them, or fewer, fill a chunk evenly"
        nearest = "name the key in whole, or push and pull all of it"
        raise refused(f"rows of {chunk.key!r}, whose chunks are no whole rows", rule, nearest)
    count = chunk.num_elements // chunk.row_elements
    if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= count or not bool((rows[1:] > rows[:-1]).all())):
        raise _unsorted(f"rows of {chunk.key!r}, chunk {chunk.number} with {count} rows,")


def _unsorted(name: str) -> CommError:
    given = f"{name} that are not in strictly rising order, or out of range"
    return refused(given, "each is named once, in order, counted from 0", "sort, and add up repeated ones")


def _unlike(chunk: Chunk, given: str) -> CommError:
    rule = f"it is {chunk.num_elements} elements of {chunk.dtype}, of {chunk.key!r} from element {chunk.start} on"
    return refused(f"{given} for chunk {chunk.number}", rule, "start all workers with one model and one precision")

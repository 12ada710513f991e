"""The kind ``dist_sync``: every worker holds the values and the optimizer, bit-identical because all apply the same
sums.

Pushes queue. The queue is sent when a caller waits for one of its keys, at a barrier, when one of its keys is pushed
again, and when it holds ``QUEUE_BYTES``: higher priority first, then in call order, with small tensors of one dtype and
device in one flat buffer. All of this is a function of the calls, so workers that make the same calls send the same
collectives. Workers first compare a hash of all calls so far, with one 16-byte all-reduce per queue: workers that
pushed in different orders get an error that names the keys, instead of each other's tensors.

With a codec, dense floating-point tensors are summed by ``compression``, one buffer at a time; rows and integer tensors
are sent uncompressed.

Where all workers share a host, host tensors are summed through shared memory instead of the queue: a push copies into
it, and a full buffer is summed (``allreduce.shared_memory``). With several workers on several hosts the sum is
hierarchical (``allreduce.network``): only 1 of k workers' tensors crosses the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup

from unisono.dist import World, agree
from unisono.errors import ConfigError
from unisono.kvstore.allreduce.network import network_all_reduce
from unisono.kvstore.allreduce.shared_memory import PushStaging, SharedMemoryAllReduce
from unisono.kvstore.compression import CompressedSum, compressed_sum, find_codec
from unisono.kvstore.compression.registry import codec_is_fixed, no_traffic_to_compress
from unisono.kvstore.keys import Future, PushValue, SparseRows, sum_rows
from unisono.kvstore.value_store import Updater, ValueStore
from unisono.optim.options import OptimOptions

# Measured with 2 workers on gloo over loopback, 400 keys of 16 KiB: 46 ms with queues of 1 MiB, 32 with 4, 68 with 16 and
# more; 40 keys of 1 MiB: 121, 90, 145.
QUEUE_BYTES = 4 * 2**20
_LARGE_BYTES = QUEUE_BYTES // 4


@dataclass(slots=True, eq=False)
class _Entry:
    """A pending push, and the pulls that wait for it."""

    key: str
    value: PushValue
    priority: int
    batch: _Batch | None = None
    applied: bool = False
    targets: list[Tensor] = field(default_factory=list[Tensor])

    def ready(self) -> bool:
        return self.applied or (self.batch is not None and self.batch.work.done())


@dataclass(slots=True, eq=False)
class _Batch:
    """Pushes in one buffer; ``totals`` are their sums, valid after ``work``."""

    entries: list[_Entry]
    work: Future[None]
    totals: list[PushValue]


class AllReduceBackend:
    """Values replicated on the workers of ``world``."""

    def __init__(
        self,
        world: World,
        *,
        hierarchical: Literal["auto"] | bool = "auto",
        shared_memory: Literal["auto"] | bool = "auto",
    ) -> None:
        self._values = ValueStore()
        self._world = world
        self._staging = _staging(world, hierarchical, shared_memory)
        self._requires_uncompressed = shared_memory is True or hierarchical is True
        self._queue: list[_Entry] = []
        self._queued_bytes = 0
        self._pending: dict[str, _Entry] = {}
        # by key the memory of its last large push: fresh memory costs more than the copy into it, page by page
        self._spare: dict[str, Tensor] = {}
        self._batches: deque[_Batch] = deque()
        self._calls: dict[str, str] = {}
        self._number, self._hash = 0, 0
        self._over_network = network_all_reduce(world, hierarchical)
        self._codec: str | None = None
        self._exchange: CompressedSum | None = None
        self._pushed = False

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Store these tensors. Raises ConfigError once compressed data was sent."""
        if self._exchange is not None:
            raise ConfigError(
                given=f"init of {', '.join(map(repr, list(values)[:5]))} after the first push with compression",
                rule="with compression all keys are there before the first push, as residuals are",
                consequence="nothing was changed",
                nearest="init of all keys, then push",
            )
        self._values.init(values)

    def reduce_device(self, key: str, first: Tensor) -> torch.device:
        return first.device

    # --- calls -----------------------------------------------------------------------------------------------------

    def push(self, items: Sequence[tuple[str, PushValue]], priority: int) -> Future[None]:
        """Queue the items; the future's ``wait`` sends them."""
        entries: list[_Entry] = []
        self._pushed = True
        for key, value in items:
            if key in self._pending:  # pushes of one key take effect in the order of the calls
                self._apply_until(self._pending[key])
            self._record_call(f"push {key!r} priority {priority} {'dense' if isinstance(value, Tensor) else 'rows'}")
            entry = self._pending[key] = _Entry(key, value, priority)
            entries.append(entry)
            # the caller may change its tensor, and all-reduce works in place
            if isinstance(value, Tensor) and self._staging is not None and value.device.type == "cpu":
                self._staging.put(key, value, self._send)
                continue
            entry.value = (
                self._copied(key, value) if isinstance(value, Tensor) else (value[0].clone(), value[1].clone())
            )
            self._queue.append(entry)
            self._queued_bytes += _nbytes(value)
            if self._queued_bytes >= QUEUE_BYTES:
                self._send()
        return self._when_applied(entries)

    def pull(self, items: Sequence[tuple[str, list[Tensor]]], priority: int) -> Future[None]:
        """Copy now, or, where pushes of the key are pending, after they are applied."""
        awaited: list[_Entry] = []
        for key, targets in items:
            entry = self._pending.get(key)
            if entry is None:
                for target in targets:
                    target.copy_(self._values.tensors[key])
            else:
                entry.targets += targets
                awaited.append(entry)
        return self._when_applied(awaited)

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        """Rows of the value after all pending pushes of the key."""
        if key in self._pending:
            self._apply_until(self._pending[key])
        return self._values.pull_rows(key, ids)

    def barrier(self) -> None:
        """Send and apply all pushes, then compare the calls once more; no worker returns before the last one has come."""
        self.apply_all()
        self._record_call("barrier")
        self._compare()

    def set_optimizer(self, options: OptimOptions) -> None:
        """Pending pushes still replace."""
        self.apply_all()
        self._values.set_optimizer(options)

    def set_updater(self, updater: Updater) -> None:
        """Pending pushes are applied as before."""
        self.apply_all()
        self._values.set_updater(updater)

    def set_learning_rate(self, lr: float) -> None:
        """Pending pushes are applied with the previous rate."""
        self.apply_all()
        self._record_call(f"set_learning_rate {lr!r}")
        self._values.set_learning_rate(lr)

    def set_compression(self, codec: str | None) -> None:
        """Compress dense floating-point sums instead of plain all-reduces."""
        if self._pushed:
            raise codec_is_fixed(codec)
        if codec is not None:
            find_codec(codec)
            if self._world.group is None:
                raise no_traffic_to_compress(codec, "with one worker")
            if self._requires_uncompressed:
                raise no_traffic_to_compress(
                    codec, "together with sums through shared memory or host by host, which are uncompressed"
                )
            self._close_staging()
        self._codec = codec

    def stats(self) -> dict[str, dict[str, float]]:
        return {} if self._exchange is None else self._exchange.stats()

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        """State after all pending pushes; residuals are this worker's own."""
        self.apply_all()
        coder = self._coder()
        residuals = {} if coder is None else coder.state_dict()
        return self._values.state_dict() | {f"{_RESIDUAL}{name}": tensor for name, tensor in residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Apply all pending pushes, then overwrite."""
        self.apply_all()
        coder = self._coder()
        if coder is not None:
            prefixed = {name for name in state if name.startswith(_RESIDUAL)}
            coder.load_state_dict({name.removeprefix(_RESIDUAL): state[name] for name in prefixed})
            state = {name: state[name] for name in state.keys() - prefixed}
        self._values.load_state_dict(state)

    def close(self) -> None:
        """Drop unsent pushes and the values."""
        self._queue.clear()
        self._pending.clear()
        self._batches.clear()
        self._spare.clear()
        self._values = ValueStore()
        self._close_staging()

    # --- sending and applying --------------------------------------------------------------------------------------

    def apply_all(self) -> None:
        """Send and apply all pending pushes."""
        for entry in list(self._pending.values()):
            self._apply_until(entry)

    def _when_applied(self, entries: list[_Entry]) -> Future[None]:
        def wait() -> None:
            for entry in entries:
                self._apply_until(entry)

        return Future(wait, lambda: all(entry.ready() for entry in entries))

    def _apply_until(self, entry: _Entry) -> None:
        if entry.applied:
            return
        if entry.batch is None:
            self._send()
        while not entry.applied:
            self._apply(self._batches.popleft())

    def _apply(self, batch: _Batch) -> None:
        with self._world.explain_errors(f"push of {batch.entries[0].key!r}"):
            batch.work.wait()
        for entry, total in zip(batch.entries, batch.totals, strict=True):
            self._apply_one(entry, total)
            if isinstance(entry.value, Tensor) and entry.value.nbytes >= _LARGE_BYTES:
                self._spare[entry.key] = entry.value

    def _apply_one(self, entry: _Entry, total: PushValue) -> None:
        self._values.apply(entry.key, total)
        for target in entry.targets:
            target.copy_(self._values.tensors[entry.key])
        entry.applied = True
        del self._pending[entry.key]

    def _copied(self, key: str, value: Tensor) -> Tensor:
        spare = self._spare.pop(key, None)
        if spare is None or spare.device != value.device:
            return value.clone(memory_format=torch.contiguous_format)
        return spare.copy_(value)

    def _record_call(self, call: str) -> None:
        self._number += 1
        self._hash = xxhash.xxh3_64_intdigest(call.encode(), seed=self._hash)
        self._calls[f"call {self._number}"] = call

    def _compare(self) -> None:
        """Raise CommError on all workers unless all have made the same calls."""
        call_hash = self._hash >> 1  # fits int64, and so does its negative
        if self._staging is not None:
            alike = self._staging.all_equal(call_hash)
        else:
            ends = self._world.all_reduce(torch.tensor([call_hash, -call_hash], device="cpu"), "max")
            alike = int(ends[0]) == -int(ends[1])
        if not alike:
            agree(self._world, "the order of store calls", self._calls)
        self._calls.clear()

    def _send(self) -> None:
        """Launch the queue, highest priority first; tensors in shared memory are summed and applied here."""
        self._compare()
        if self._staging is not None:
            for key, total in self._staging.drain():
                self._apply_one(self._pending[key], total)
        queue = sorted(self._queue, key=lambda entry: -entry.priority)  # stable: then in the order of the calls
        self._queue, self._queued_bytes = [], 0
        for kind, run in groupby(queue, key=_buffer_kind):
            for entries in [[entry] for entry in run] if kind in (_ROWS, _LARGE) else [list(run)]:
                with self._world.explain_errors(f"push of {', '.join(repr(entry.key) for entry in entries[:3])}"):
                    batch = self._launch(entries)
                for entry in entries:
                    entry.batch = batch
                self._batches.append(batch)

    def _launch(self, entries: list[_Entry]) -> _Batch:
        values = [entry.value for entry in entries]
        dense = [value for value in values if isinstance(value, Tensor)]
        if not dense:
            totals = [self._sum_rows(*value) for value in values if not isinstance(value, Tensor)]
            return _Batch(entries, Future(lambda: None), totals)
        coder = self._coder()
        if coder is not None and dense[0].is_floating_point():
            # residuals of one buffer are committed before those of the next are read
            while self._batches:
                self._apply(self._batches.popleft())
            sums = dict(zip([entry.key for entry in entries], dense, strict=True))
            return _Batch(entries, _compressed_all_reduce(coder, sums), values)
        if len(dense) == 1:
            tensor = dense[0]
            return _Batch(entries, self._over_network(tensor.view(-1)), [tensor])
        flat = torch.cat([value.reshape(-1) for value in dense])
        parts = flat.split([value.numel() for value in dense])
        totals: list[PushValue] = [part.view_as(value) for part, value in zip(parts, dense, strict=True)]
        return _Batch(entries, self._over_network(flat), totals)

    def _coder(self) -> CompressedSum | None:
        """The compressed sum over all keys; created at first use."""
        if self._codec is not None and self._exchange is None:
            coded = {key: value for key, value in self._values.tensors.items() if value.is_floating_point()}
            self._exchange = compressed_sum(find_codec(self._codec), coded, self._world.group)
        return self._exchange

    def _close_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _sum_rows(self, ids: Tensor, rows: Tensor) -> SparseRows:
        """All workers' rows, sorted by id and distinct, added in rank order and then in each worker's own order."""
        group = self._world.group
        ids = ids.to(rows.device, torch.int64)
        if group is not None:
            counts = [ids.new_zeros(1) for _ in range(self._world.world_size)]
            dist.all_gather(counts, ids.new_tensor([len(ids)]), group=group)
            lengths = [int(count) for count in counts]
            ids, rows = _gather(ids, lengths, group), _gather(rows, lengths, group)
        return sum_rows(ids, rows)


_ROWS, _LARGE = "rows", "large"
_RESIDUAL = "compression/"


def _nbytes(value: PushValue) -> int:
    return value.nbytes if isinstance(value, Tensor) else value[0].nbytes + value[1].nbytes


def _buffer_kind(entry: _Entry) -> object:
    """A grouping key: neighbours with equal keys may share a buffer."""
    if not isinstance(entry.value, Tensor):
        return _ROWS
    return _LARGE if entry.value.nbytes >= _LARGE_BYTES else (entry.value.dtype, entry.value.device)


def _gather(part: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """All workers' parts [sum(lengths), ...], in rank order."""
    padded = part.new_zeros(max(lengths), *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _compressed_all_reduce(coder: CompressedSum, tensors: Mapping[str, Tensor]) -> Future[None]:
    """Start a compressed sum, in place, which ``wait`` finishes; all workers call it in the same order."""
    pending = coder.launch(tensors)

    def finish() -> None:
        pending.wait()
        coder.commit(torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).all())

    return Future(finish, lambda: False)


def _staging(
    world: World, hierarchical: Literal["auto"] | bool, shared_memory: Literal["auto"] | bool
) -> PushStaging | None:
    """Staging in shared memory; None where it is not wanted, or 'auto' and unavailable. A collective."""
    several_hosts = world.is_simulated and not world.job.is_local  # real ranks find out for themselves
    by_gloo = world.backends["cpu"] == "gloo"  # another back end was chosen to carry the sums
    if shared_memory is not True and (
        not shared_memory or hierarchical is True or world.group is None or several_hosts or not by_gloo
    ):
        return None
    try:
        return PushStaging(SharedMemoryAllReduce(world))
    except ConfigError:
        if shared_memory is True:
            raise
        return None

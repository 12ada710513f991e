"""The ranks of a job and the few collectives everyone needs, with errors that name the culprit.

``join`` makes torch's default process group out of a JobSpec; a job of one process gets a World without any group, in
which every operation is the identity. Structured data travels as JSON in byte tensors: torch's object collectives
would unpickle what another rank sends. Overlapped gradient reduction is not here (``unisono.kvstore`` does it on
``World.group``, under ``guard``).

Gloo never frees a blocked collective before its timeout, not even on abort: a hang ends by ``timeout_s`` here, or by
the launcher's kill. A pair that timed out stays closed, so after a CommError this World is of no further use.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from unisono.dist.gloo_shutdown import wait_for_gloo_threads
from unisono.dist.jobspec import JobSpec
from unisono.dist.roll_call import identity, roll_call, missing_ranks
from unisono.dist.rendezvous import fresh_prefix, open_store
from unisono.errors import CommError, LaunchError, Problem

Reduction = Literal["sum", "max", "min"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# JSON between ranks is control data; more than this is a mistake, and is refused before memory is taken for it
_MAX_JSON_BYTES = 64 * 2**20

_MEET_S = 60.0

# what errors of torch's collectives that are plain RuntimeErrors begin or go on with
_TRANSPORTS = ("gloo/", "ProcessGroup", "Connection closed by peer")


class World:
    """This process among its peers. Made by ``join``; ``group`` is None when there is one process only.

    Every method but ``guard`` and ``close`` is a collective: all ranks call it, in the same order. On failure each
    raises CommError with the operation, the time waited and, where it can be found out, the rank that is missing.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        group: ProcessGroup | None = None,
        store: Store | None = None,
        timeout_s: float = 0.0,
        name: str = "default",
        peers: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.job = job
        self.rank = job.rank
        self.world_size = job.world_size
        self.group = group
        self.timeout_s = timeout_s
        self.name = name
        self._store = store
        self._peers = peers
        self._operations = 0

    @classmethod
    def alone(cls, job: JobSpec) -> World:
        """This process by itself, whatever the number of others in ``job``: it keeps its place there, and is rank 0 of one."""
        made = cls(job)
        made.rank, made.world_size = 0, 1
        return made

    # --- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduces ``tensor`` over all ranks in place and returns it."""
        if self.group is not None:
            with self.guard(f"all_reduce({op})", tensor.nbytes):
                dist.all_reduce(tensor, op=_REDUCTIONS[op], group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites ``tensor`` with that of rank ``src`` and returns it."""
        if self.group is not None:
            with self.guard(f"broadcast from rank {src}", tensor.nbytes):
                dist.broadcast(tensor, src=src, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        if self.group is not None:
            # one element on the host: torch's barrier would pick the accelerator and wait for its whole stream
            with self.guard("barrier"):
                dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=self.group)

    # --- structured data -------------------------------------------------------------------------------------------

    def broadcast_json(self, value: Any = None, src: int = 0) -> Any:
        """Rank ``src``'s value on every rank; the others' argument is ignored. JSON types only, tuples become lists."""
        if self.group is None:
            return json.loads(json.dumps(value))
        payload = self._encode(value) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        with self.guard(f"broadcast_json from rank {src}"):
            dist.broadcast(size, src=src, group=self.group)
            if self.rank != src:
                payload = torch.empty(int(size.item()), dtype=torch.uint8)
            dist.broadcast(payload, src=src, group=self.group)
        return json.loads(payload.numpy().tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks. JSON types only, tuples become lists."""
        if self.group is None:
            return [json.loads(json.dumps(value))]
        payload = self._encode(value)
        with self.guard("gather_json", payload.numel()):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.group)
            longest = max(int(size.item()) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: payload.numel()] = payload
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=self.group)
        return [json.loads(part[: int(size.item())].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _encode(self, value: Any) -> torch.Tensor:
        data = bytearray(json.dumps(value, separators=(",", ":")).encode())
        if len(data) > _MAX_JSON_BYTES:
            raise ValueError(f"{len(data)} bytes of JSON; at most {_MAX_JSON_BYTES} are exchanged between ranks")
        return torch.frombuffer(data, dtype=torch.uint8)

    # --- groups, errors, end ---------------------------------------------------------------------------------------

    def new_group(self, name: str) -> World:
        """The same ranks with a gloo group of their own, so that its collectives never mix with the others'.

        For work beside the training loop, such as writing checkpoints: collectives of one group must be issued in one
        order on all ranks, which two threads cannot promise.
        """
        if self.group is None or self._store is None:
            made = World(self.job, name=name)
            made.rank, made.world_size = self.rank, self.world_size
            return made
        with self.guard(f"new_group({name!r})"), _gloo_interface(self.job):
            group = cast(
                ProcessGroup,
                dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s), group_desc=name),
            )
            made = World(
                self.job,
                group=group,
                store=PrefixStore(f"group/{name}", self._store),
                timeout_s=self.timeout_s,
                name=name,
                peers=self._peers,
            )
            # after this no rank needs the store any more, so that its host may leave when it likes
            made.barrier()
        return made

    def groups(self, lines: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, ProcessGroup]:
        """For each name the group this rank is in, if any, of the groups of ranks that ``lines`` gives; all ranks call it alike.

        They have this World's time-out, which torch's own ``init_device_mesh`` would not give them.
        """
        own: dict[str, ProcessGroup] = {}
        with self.guard(f"groups({', '.join(lines)})"), _gloo_interface(self.job):
            for name, each in lines.items():
                for line in map(list, each):
                    group = dist.new_group(line, timeout=timedelta(seconds=self.timeout_s), group_desc=name)
                    if self.rank in line:
                        own[name] = cast(ProcessGroup, group)
        self.barrier()  # as in new_group
        return own

    @contextmanager
    def guard_collectives(self, operation: str) -> Generator[None]:
        """``guard`` for code that computes as well: only what a collective raised becomes a CommError."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(word in str(error) for word in _TRANSPORTS):
                with self.guard(operation):
                    raise
            raise

    @contextmanager
    def guard(self, operation: str, num_bytes: int = 0) -> Generator[None]:
        """Turns a failure of the collectives inside into a CommError that names operation, wait and missing rank."""
        self._operations += 1
        number = self._operations
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, f"{operation} #{number}", num_bytes, time.monotonic() - started) from error

    def _explained(self, error: RuntimeError, operation: str, num_bytes: int, waited_s: float) -> CommError:
        text = " ".join(str(error).split())
        timed_out = "imed out" in text or "imeout" in text
        culprits = missing_ranks(self._peers, self.rank, settle=not timed_out)
        if not culprits and timed_out and self._store is not None:
            culprits = roll_call(self._store, self.rank, self.world_size, operation)
        size = f" of {num_bytes} bytes" if num_bytes else ""
        return CommError(
            given=f"{operation}{size} in group {self.name!r} failed on rank {self.rank} of {self.world_size} after "
                f"{waited_s:.1f} s: {'; '.join(culprits) if culprits else text[:300]}",
                rule=f"every rank takes part in every collective within {self.timeout_s:g} s",
                consequence="the ranks are no longer in step, and this process cannot go on",
                nearest="start again from the newest checkpoint (the local launcher does so by itself); "
                "the log of the missing rank says why it left"
        )

    def close(self) -> None:
        """Leaves the group. Its threads, sockets and port go with the last one who holds the group, and none of them is at work
        any more. Not a collective; calling it twice is fine.
        """
        if self.group is not None:
            group, self.group = self.group, None
            # the end of the default group is the end of all others, which then have nothing left to destroy
            if dist.is_initialized():
                dist.destroy_process_group(group)
            wait_for_gloo_threads()
        self._store = None


def join_world(job: JobSpec, *, device_type: str, timeout_s: float, meet_timeout_s: float | None = None) -> World:
    """Meets the other ranks of ``job`` and returns once all are connected.

    Collectives on ``device_type`` tensors use torch's default backend for it (gloo for cpu); those on host tensors use
    gloo always. ``timeout_s`` bounds every later collective, ``meet_timeout_s`` the meeting (None: the same, but at
    least a minute, as hosts differ in how long they take to start Python and import torch).

    Raises LaunchError (port taken, no such address, no such device) and CommError (a rank did not arrive).
    """
    if job.world_size == 1:
        return World(job, timeout_s=timeout_s)
    if timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}; a collective needs some time above 0")
    if job.server_addresses and not job.master_port:
        raise LaunchError(
            given=f"rank {job.rank} of {job.world_size} was to meet the others in a job with parameter servers",
                rule="a launcher that starts servers restarts each worker alone, so workers share the servers and no meeting point",
                consequence="there is nobody to all-reduce with, so nothing was started",
                nearest="a launch without --servers; or dist_async (plan.sync=dist_async, kvstore.create('dist_async', ...))"
        )
    meet_timeout_s = max(timeout_s, _MEET_S) if meet_timeout_s is None else meet_timeout_s
    store = open_store(job, meet_timeout_s)
    prefix, epoch = fresh_prefix(store, job, meet_timeout_s)
    job = replace(job, restart_count=epoch)
    with _gloo_interface(job):
        dist.init_process_group(
            _backend(job, device_type),
            store=prefix,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=None if device_type == "cpu" else torch.device(device_type, job.local_rank),
        )
    group = cast(ProcessGroup, dist.group.WORLD)
    # tells everyone who is who, and after this no rank needs the store any more: its host may leave when it likes
    peers = World(job, group=group, store=prefix, timeout_s=timeout_s).gather_json(identity())
    return World(job, group=group, store=prefix, timeout_s=timeout_s, peers=peers)


def _backend(job: JobSpec, device_type: str) -> str:
    if device_type == "cpu":
        return "gloo"
    count = torch.accelerator.device_count()
    if job.local_rank >= count:
        raise LaunchError(
            given=f"local rank {job.local_rank} wants {device_type}:{job.local_rank}, this host shows {count}",
                rule="every rank of a host has a device of its own",
                consequence="two ranks would share a device, so nothing was started",
                nearest=f"start {max(count, 1)} processes on this host, or train on the cpu"
        )
    # host tensors (JSON, barriers) keep a backend of their own, so control traffic never waits for a stream
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


@contextmanager
def _gloo_interface(job: JobSpec) -> Generator[None]:
    """Gloo listens on the interface of the host's name by default; a job of one host stays on loopback."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    if not job.is_local or loopback is None or name in os.environ:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        os.environ.pop(name, None)

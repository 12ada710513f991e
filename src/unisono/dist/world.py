"""``World``: the ranks of a job and their basic collectives, with errors that name the missing rank.

``join_world`` creates torch's default process group from a JobSpec. A job of one process gets a World without a
group, in which every operation is the identity. Structured data is exchanged as JSON in byte tensors, because torch's
object collectives unpickle what another rank sends. ``unisono.kvstore`` reduces gradients on ``World.group``, under
``explain_errors``.

Gloo never frees a blocked collective before its time-out, not even on abort: a hang ends after ``timeout_s`` seconds
or when the launcher kills the process. A connection that timed out stays closed, so after a CommError this World
cannot be used again.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from unisono import errors
from unisono.device.torch_adapters import adapter_for
from unisono.dist import flight_recorder
from unisono.dist.address import address_of, interface_of, require_private_ranks
from unisono.dist.backends import AUTO, collective_backend, explain_creation, lacks_operation
from unisono.dist.dmlc import take_role
from unisono.dist.job_store import JobStore
from unisono.dist.jobspec import JobSpec
from unisono.dist.progress import note_progress
from unisono.dist.rank_dump import use_collectives_of, write_dump
from unisono.dist.rendezvous import Rendezvous, join_ranks, wait_until_resolved
from unisono.dist.roll_call import identity, missing_ranks, roll_call
from unisono.dist.terminate import call_before_abort
from unisono.dist.watchdog import Watchdog
from unisono.errors import CommError, LaunchError, Problem, UnisonoError
from unisono.sanitize import shorten

Reduction = Literal["sum", "max", "min"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# JSON between ranks is control data; a larger value is refused before memory is allocated for it
_MAX_JSON_BYTES = 64 * 2**20

MIN_MEET_S = 60.0  # shortest time to wait for the other ranks
_MEET_POLL_S = 0.1
_SHOWN_CHARS = 120
_SHOWN_VALUES = 3  # of ranks that disagree, besides the most frequent one

# texts by which a plain RuntimeError is recognised as a failed collective
_TRANSPORTS = ("gloo/", "ProcessGroup", "Connection closed by peer")


class World:
    """This process and its peers, created by ``join_world``.

    Every method except ``explain_errors``, ``explain_collective_errors`` and ``close`` is a collective: all ranks call it in the
    same order. A failed one raises CommError with the operation, the time waited and, if it can be found out, the missing
    rank. ``watchdog`` watches a rank of a launched job; after an error its files are kept.

    Args:
        job: This process's place in the job; its rank and world size become attributes.
        group: The process group of the collectives; None for a single process, whose collectives change nothing.
        rendezvous: How the ranks met: the store in which they look for the missing one after a time-out, and the key with which
            those of a new group prove their connections. None: they do neither.
        store: A connection to the job's store that is closed with this World.
        timeout_s: Seconds after which a collective fails.
        name: Name of the group in errors.
        peers: Host, pid and creation time of each rank's process, in rank order; empty if unknown.
        is_simulated: Whether the other ranks do not exist (``simulated_world``): each is taken to answer as this one does.
        backends: Name of the back end of collectives, by type of device; default: Gloo on the host.
    """

    def __init__(
        self,
        job: JobSpec,
        *,
        group: ProcessGroup | None = None,
        rendezvous: Rendezvous | None = None,
        store: JobStore | None = None,
        timeout_s: float = 0.0,
        name: str = "default",
        peers: Sequence[dict[str, Any]] = (),
        is_simulated: bool = False,
        backends: Mapping[str, str] | None = None,
    ) -> None:
        self.is_simulated = is_simulated
        self.backends = {"cpu": "gloo"} | dict(backends or {})
        self.job = job
        self.rank = job.rank
        self.world_size = job.world_size
        self.group = group
        self.timeout_s = timeout_s
        self.name = name
        self._rendezvous = rendezvous
        self._store = store
        self._peers = peers
        self._operations = 0
        self._meetings = 0
        self.watchdog: Watchdog | None = None
        self._failed = False

    @classmethod
    def alone(cls, job: JobSpec) -> World:
        """A World of this process only, whatever the size of ``job``: rank 0 of 1."""
        world = cls(job)
        world.rank, world.world_size = 0, 1
        return world

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.world_size})"

    # --- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce ``tensor`` over all ranks in place; returns it."""
        if self.group is not None:
            with self.explain_errors(f"all_reduce({op})", tensor.nbytes):
                dist.all_reduce(tensor, op=_REDUCTIONS[op], group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of rank ``src``; returns it."""
        if self.group is not None:
            with self.explain_errors(f"broadcast from rank {src}", tensor.nbytes):
                dist.broadcast(tensor, src=src, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Return once every rank has called it."""
        if self.group is not None:
            # one element on the host: torch's own barrier would use the accelerator and wait for its whole stream
            with self.explain_errors("barrier"):
                dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=self.group)

    def meet(self, limit_s: float) -> None:
        """A barrier after work that takes the ranks unequally long, maybe longer than a collective may wait.

        Until all have come, a rank asks the job's store and counts heartbeats (``dist.progress``), for ``limit_s`` seconds at
        most, and not where a rank of this host has ended.
        """
        if self._rendezvous is not None:
            self._meetings += 1
            with suppress(RuntimeError):  # the store may be gone: the barrier below waits, and says who is missing
                self._await_arrivals(self._rendezvous.store, f"meet/{self.name}/{self._meetings}", limit_s)
        self.barrier()

    def _await_arrivals(self, store: Store, key: str, limit_s: float) -> None:
        if store.add(key, 1) == self.world_size:
            store.set(f"{key}/all", "")
            return
        deadline_s = time.monotonic() + limit_s
        while (
            not store.check([f"{key}/all"])
            and time.monotonic() < deadline_s
            and not missing_ranks(self._peers, self.rank, settle=False)
        ):
            note_progress()
            time.sleep(_MEET_POLL_S)

    # --- structured data -------------------------------------------------------------------------------------------

    def broadcast_json(self, value: Any = None, src: int = 0) -> Any:
        """Rank ``src``'s value on every rank; ignored on the others. JSON types only; tuples become lists."""
        if self.group is None or self.is_simulated:
            return json.loads(json.dumps(value))
        payload = self._encode(value) if self.rank == src else torch.empty(0, dtype=torch.uint8, device="cpu")
        size = torch.tensor([payload.numel()], device="cpu")
        with self.explain_errors(f"broadcast_json from rank {src}"):
            dist.broadcast(size, src=src, group=self.group)
            _check_announced(size)
            if self.rank != src:
                payload = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
            dist.broadcast(payload, src=src, group=self.group)
        return json.loads(payload.numpy().tobytes())

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks. JSON types only; tuples become lists."""
        if self.group is None or self.is_simulated:
            return [json.loads(json.dumps(value))] * self.world_size  # of thousands of ranks
        payload = self._encode(value)
        with self.explain_errors("all_gather_json", payload.numel()):
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([payload.numel()], device="cpu"), group=self.group)
            _check_announced(*sizes)
            longest = max(int(size.item()) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: payload.numel()] = payload
            parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=self.group)
        return [json.loads(part[: int(size.item())].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _encode(self, value: Any) -> torch.Tensor:
        data = bytearray(json.dumps(value, separators=(",", ":")).encode())
        if len(data) > _MAX_JSON_BYTES:
            raise ValueError(f"{len(data)} bytes of JSON; at most {_MAX_JSON_BYTES} are exchanged between ranks")
        return torch.frombuffer(data, dtype=torch.uint8)

    # --- groups, errors, end ---------------------------------------------------------------------------------------

    def with_own_group(self, name: str) -> World:
        """The same ranks with a separate Gloo group, for a background thread such as the checkpoint writer.

        Collectives of one group must be issued in the same order on all ranks, which two threads cannot guarantee.
        """
        if self.group is None or self._rendezvous is None:
            world = World(self.job, name=name)
            world.rank, world.world_size = self.rank, self.world_size
            return world
        rendezvous = self._rendezvous.of_group(name)
        with self.explain_errors(f"with_own_group({name!r})"), _gloo_interface(self.job, rendezvous):
            group = cast(
                ProcessGroup,
                dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s), group_desc=name),
            )
            _prove_connections(group, list(range(self.world_size)), self.rank, rendezvous)
            world = World(
                self.job,
                group=group,
                rendezvous=rendezvous,
                timeout_s=self.timeout_s,
                name=name,
                peers=self._peers,
            )
            world.barrier()  # so that the store's host can leave at any time: ``roll_call`` copes without the store
        return world

    def groups(self, rank_lists: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, ProcessGroup]:
        """Create process groups: for each name several lists of ranks; returns, by name, the group that contains this rank.

        The groups have this World's time-out, which torch's ``init_device_mesh`` would not set. All ranks pass the
        same lists.
        """
        own_groups: dict[str, ProcessGroup] = {}
        with self.explain_errors(f"groups({', '.join(rank_lists)})"), _gloo_interface(self.job, self._rendezvous):
            for name, lists in rank_lists.items():
                for ranks in map(sorted, lists):  # as torch numbers the ranks of a group
                    group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout_s), group_desc=name)
                    if self.rank in ranks:
                        own_groups[name] = cast(ProcessGroup, group)
                        if self._rendezvous is not None:
                            _prove_connections(own_groups[name], ranks, self.rank, self._rendezvous.of_group(name))
        self.barrier()  # as in with_own_group
        return own_groups

    @contextmanager
    def explain_collective_errors(self, operation: str) -> Generator[None]:
        """``explain_errors`` for code that also computes: only an error raised by a collective becomes a CommError."""
        try:
            yield
        except RuntimeError as error:
            foreign = lacks_operation(self.backends.values(), error)
            if foreign or isinstance(error, dist.DistError) or any(word in str(error) for word in _TRANSPORTS):
                with self.explain_errors(operation):
                    raise
            raise

    @contextmanager
    def explain_errors(self, operation: str, num_bytes: int = 0) -> Generator[None]:
        """Turn a RuntimeError inside into a CommError with the operation, the time waited and the missing rank."""
        self._operations += 1
        number = self._operations
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, f"{operation} #{number}", num_bytes, time.monotonic() - started) from error

    def _explained(self, error: RuntimeError, operation: str, num_bytes: int, waited_s: float) -> CommError:
        if (logs := _launcher_logs()) is not None:
            # at once: the launcher ends the ranks of a job soon after the first has ended
            write_dump(logs, self.job, "CommError", error=error, in_collective=True)
        self._failed = True
        text = " ".join(str(error).split())
        timed_out = "imed out" in text or "imeout" in text
        culprits = missing_ranks(self._peers, self.rank, settle=not timed_out)
        if not culprits and timed_out and self._rendezvous is not None:
            culprits = roll_call(self._rendezvous.store, self.rank, self.world_size, operation)
        size = f" of {num_bytes} bytes" if num_bytes else ""
        if not culprits and (foreign := lacks_operation(self.backends.values(), error)):
            return CommError(
                given=f"{operation}{size} in group {self.name!r} by the collective back end {foreign!r}: {text[:300]}",
                rule="a back end does each operation of the job, on the device it was chosen for",
                consequence="the ranks cannot exchange these data, and this process cannot continue",
                nearest="launch.collective_backend=auto, the back end of the device; or a plan that needs other operations",
            )
        return CommError(
            given=f"{operation}{size} in group {self.name!r} failed on rank {self.rank} of {self.world_size} after "
            f"{waited_s:.1f} s: {'; '.join(culprits) if culprits else text[:300]}",
            rule=f"every rank takes part in every collective within {self.timeout_s:g} s",
            consequence="the ranks are no longer in step, and this process cannot continue",
            nearest="start again from the newest checkpoint (the local launcher does so by itself); "
            "the log of the missing rank says why it left",
        )

    def close(self) -> None:
        """Leave the group and wait until its threads are idle. Not a collective; may be called twice."""
        if self.watchdog is not None:
            self.watchdog.close(failed=self._failed)
            self.watchdog = None
        if self.group is not None:
            group, self.group = self.group, None
            # destroying the default group destroys all others
            if dist.is_initialized():
                dist.destroy_process_group(group)
            if not dist.is_initialized():
                use_collectives_of(None, None)
            wait_for_gloo_threads()
        self._rendezvous = None
        if self._store is not None:
            self._store.close()


def join_world(
    job: JobSpec,
    *,
    device_type: str,
    timeout_s: float,
    meet_timeout_s: float | None = None,
    store: JobStore | None = None,
    backend: str = AUTO,
) -> World:
    """Connect to the other ranks of ``job``; returns once all are connected.

    A server or scheduler that MXNet's tracker started serves here instead, and ends with the job.

    Args:
        job: This process's place in the job.
        device_type: Type of the tensors in collectives.
        timeout_s: Seconds after which a later collective fails.
        meet_timeout_s: Seconds to wait for the other ranks; None means ``timeout_s``, at least 60 s, because hosts differ in
            how long Python and torch take to start.
        store: The job's store, for a process that joins its job more than once (``rendezvous.open_store``). Default: a store of
            this world.
        backend: Name of the back end for these tensors, of torch or of another package (``dist.backends``); ``auto`` is the
            device's own (Gloo for cpu). Collectives on host tensors use Gloo where the device is another one.

    Raises:
        LaunchError: The port is taken, the address is unknown, the ranks do not hold the same secret, or there is no such device
            or back end.
        ConfigError: Ranks would talk over a public address.
        CommError: A rank did not arrive, or a connection of the group is not a rank's.
        ValueError: ``timeout_s`` is not above 0.
    """
    take_role(job)
    if job.world_size == 1:
        return World(job, timeout_s=timeout_s)
    if timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}; a collective needs some time above 0")
    if job.server_addresses and not job.master_port:
        raise LaunchError(
            given=f"rank {job.rank} of {job.world_size} was to meet the others in a job with parameter servers",
            rule="a launcher that starts servers restarts each worker alone, so workers share the servers and do not meet",
            consequence="there is nobody to all-reduce with, so nothing was started",
            nearest="a launch without --servers; or dist_async (plan.sync=dist_async, create_kvstore('dist_async'))",
        )
    name = _backend(job, device_type, backend)
    # host tensors (JSON, barriers) have a separate back end, so control traffic never waits for a stream
    backends = {"cpu": "gloo"} | {device_type: name}
    meet_timeout_s = max(timeout_s, MIN_MEET_S) if meet_timeout_s is None else meet_timeout_s
    if store is None:
        wait_until_resolved(job, min(timeout_s, meet_timeout_s))
    rendezvous, owned = join_ranks(job, meet_timeout_s, store)
    job = replace(job, restart_count=rendezvous.restart_count)
    try:
        with _gloo_interface(job, rendezvous), explain_creation(name, device_type):
            dist.init_process_group(
                name if device_type == "cpu" else ",".join(f"{kind}:{each}" for kind, each in backends.items()),
                store=rendezvous.store,
                rank=job.rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=None if device_type == "cpu" else torch.device(device_type, job.local_rank),
            )
        group = cast(ProcessGroup, dist.group.WORLD)
        first = World(job, group=group, rendezvous=rendezvous, timeout_s=timeout_s, backends=backends)
        with first.explain_errors("the proof of the connections"):
            _prove_connections(group, list(range(job.world_size)), job.rank, rendezvous)
        # afterwards the store is read by new groups and by ``roll_call`` only, which copes without it: its host may leave
        peers = first.all_gather_json(identity())
    except BaseException:
        if owned is not None:
            owned.close()
        raise
    world = World(
        job, group=group, rendezvous=rendezvous, store=owned, timeout_s=timeout_s, peers=peers, backends=backends
    )
    use_collectives_of(flight_recorder.group_states, flight_recorder.num_issued)
    if (logs := _launcher_logs()) is not None:
        call_before_abort(lambda: write_dump(logs, job, "abort"))
        world.watchdog = Watchdog(job, logs, deadline_s=timeout_s)
    return world


def _launcher_logs() -> Path | None:
    """The folder in which the launcher looks for what a rank leaves; None without our launcher."""
    logs = os.environ.get("UNISONO_LOGS")
    return None if logs is None else Path(logs)


def _prove_connections(group: ProcessGroup, ranks: Sequence[int], rank: int, rendezvous: Rendezvous) -> None:
    """Every two ranks of a new group prove to each other, over the very connection, that they belong to the job.

    Gloo takes whoever connects first for a rank. No proof is the same in both directions, or in two groups. Raises CommError.
    """
    if rendezvous.key is None or len(ranks) == 1:
        return
    key = rendezvous.key

    def proof(source: int, target: int) -> bytes:
        return hmac.digest(key, f"{rendezvous.label} {list(ranks)} {source} to {target}".encode(), "sha256")

    mine = torch.frombuffer(bytearray(b"".join(proof(rank, other) for other in ranks)), dtype=torch.uint8)
    theirs = torch.zeros_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    given = theirs.view(len(ranks), -1)
    wrong = [
        other
        for other, row in zip(ranks, given, strict=True)
        if not hmac.compare_digest(row.numpy().tobytes(), proof(other, rank))
    ]
    if wrong:
        raise CommError(
            given=f"the connection to rank {_joined(wrong)} in a new process group made no proof of the job's secret "
            f"(seen from rank {rank})",
            rule="the ranks of a group prove their connections to each other before they exchange data",
            consequence="another process has taken that rank's place; nothing was sent to it, and this process cannot continue",
            nearest="see which processes of other users run on the hosts of this job; a restart meets afresh",
        )


def _check_announced(*sizes: torch.Tensor) -> None:
    for size in sizes:
        if not 0 <= size.item() <= _MAX_JSON_BYTES:
            raise CommError(
                given=f"another rank announces {int(size.item())} bytes of JSON",
                rule=f"at most {_MAX_JSON_BYTES} are exchanged between ranks",
                consequence="no memory was allocated for it, the ranks are no longer in step, and this process cannot continue",
                nearest="start all ranks with the same code",
            )


def _backend(job: JobSpec, device_type: str, chosen: str) -> str:
    """The back end for tensors of this rank's device. Raises LaunchError where the host has no such device for this rank."""
    count = adapter_for(device_type).count()
    if device_type != "cpu" and job.local_rank >= count:
        raise LaunchError(
            given=f"local rank {job.local_rank} wants {device_type}:{job.local_rank}, this host shows {count}",
            rule="every rank of a host has a device of its own",
            consequence="two ranks would share a device, so nothing was started",
            nearest=f"start {max(count, 1)} processes on this host, or train on the cpu",
        )
    return collective_backend(device_type, chosen)


@contextmanager
def _gloo_interface(job: JobSpec, rendezvous: Rendezvous | None) -> Generator[None]:
    """Make Gloo listen on loopback for a job of one host, else on the interface towards the other ranks; by default it takes
    that of the host's name. Raises ConfigError where that has a public address."""
    variable = "GLOO_SOCKET_IFNAME"
    name = os.environ.get(variable)
    if name is not None or rendezvous is None:
        if name is not None and (address := address_of(name.partition(",")[0])) is not None:
            require_private_ranks(address)
        yield
        return
    if job.is_local:
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    else:
        require_private_ranks(rendezvous.address)
        name = interface_of(rendezvous.address)
    if name is None:
        yield
        return
    os.environ[variable] = name
    try:
        yield
    finally:
        os.environ.pop(variable, None)


def on_first_rank(world: World, function: Callable[[], Any]) -> Any:
    """The result of ``function`` (JSON types), which rank 0 calls, on every rank; its UnisonoError is raised on every rank."""
    answer: dict[str, Any] = {}
    error: UnisonoError | None = None
    if world.rank == 0 or world.is_simulated:
        try:
            answer = {"value": function()}
        except UnisonoError as raised:
            error = raised
            answer = {"error": type(raised).__name__, "problems": [asdict(problem) for problem in raised.problems]}
    answer = world.broadcast_json(answer)
    if error is not None:
        raise error
    if "error" in answer:
        raise getattr(errors, answer["error"])(*(Problem(**problem) for problem in answer["problems"]))
    return answer["value"]


def agree(world: World, name: str, value: Any) -> None:
    """Check that ``value`` (JSON types) is equal on all ranks. A collective; pass a hash of a large value.

    Raises CommError with the values and their ranks; of objects, with the entries that differ.
    """
    ranks: dict[str, list[int]] = {}
    for rank, rank_value in enumerate(world.all_gather_json(value)):
        ranks.setdefault(json.dumps(rank_value, sort_keys=True), []).append(rank)
    if len(ranks) == 1:
        return
    # in a tie the value of the lowest rank counts as usual, so that all ranks report the same
    usual = max(ranks, key=lambda text: len(ranks[text]))
    odd = [text for text in ranks if text != usual]
    shown = [*odd[:_SHOWN_VALUES], usual]
    *others, last = (
        f"{shorten(entries, _SHOWN_CHARS)} on rank {_joined(ranks[text])}"
        for text, entries in zip(shown, _differing_entries(shown), strict=True)
    )
    if hidden := [rank for text in odd[_SHOWN_VALUES:] for rank in ranks[text]]:
        others.append(f"something else on rank {_joined(hidden)}")
    odd_ranks = _joined(rank for text in odd for rank in ranks[text])
    raise CommError(
        given=f"{name} is {', '.join(others)} and {last}",
        rule=f"{name} is the same on all {world.world_size} ranks",
        consequence="the ranks would train different things, so no step was made",
        nearest=f"start rank {odd_ranks} with the same code, configuration and environment as the others",
    )


def _joined(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _differing_entries(texts: Sequence[str]) -> Sequence[str]:
    """JSON texts, reduced to the entries that differ if all are objects."""
    values = [json.loads(text) for text in texts]
    if not all(isinstance(value, dict) for value in values):
        return texts
    objects = cast("list[dict[str, Any]]", values)
    equal = [name for name in objects[0] if all(name in each and each[name] == objects[0][name] for each in objects)]
    return [json.dumps({name: value for name, value in each.items() if name not in equal}) for each in objects]


def wait_for_gloo_threads(longest_s: float = 5.0) -> None:
    """Return when no Gloo thread is running, or after ``longest_s`` seconds. Returns immediately without /proc.

    A Gloo thread reports a collective as done before it releases its tensors. If it is preempted in between and
    continues while the interpreter shuts down, the process aborts ("terminate called without an active exception";
    torch pull request 179291).
    """
    until = time.monotonic() + longest_s
    idle = 0  # looks in a row, because a thread may be between two states
    while idle < 2 and time.monotonic() < until:
        idle = 0 if _gloo_runs() else idle + 1
        time.sleep(0.001)  # releases the GIL, which such a thread may be waiting for


def _gloo_runs() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith("pt_gloo_runloop") and rest.split()[0] == "R":
            return True
    return False

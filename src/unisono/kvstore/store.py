"""The key-value store: ``create``, ``KVStore``, and the interface that each kind implements.

    local       one process; the values pushed under a key are added on the host
    device      one process; they are added on the accelerator that holds the first value
    dist_sync   every worker holds the values and the optimizer, bit-identical; a push is an all-reduce
    dist_async  parameter servers hold the values and the optimizer; every worker's push is an update of its own
    dist_local  every worker updates its own copy; the copies are averaged periodically (LocalSGD, DiLoCo)

``push`` sums over a worker's devices and over workers. Without an optimizer the sum replaces the stored value, as in
MXNet; with an optimizer the sum is the gradient of an update. ``pull`` returns the stored value after all earlier
pushes. Sums are never averages: a trainer divides by the global number of tokens, which it reduces together with its
gradients.

``KVStore`` validates its arguments and calls a ``Backend``, which each kind implements. The trainer calls ``broadcast``
and ``gradients`` only: it owns its parameters, and its own optimizer updates them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.device.torch_adapters import present_adapter
from unisono.dist import World, agree, job_from_environ, join_world
from unisono.dist.dmlc import take_role
from unisono.dist.jobspec import idle_role
from unisono.errors import ConfigError, nearest_name
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.kvstore.backends.allreduce import AllReduceBackend
from unisono.kvstore.backends.local import LocalBackend, LocalGradientSync
from unisono.kvstore.backends.local_sgd import LocalSGDBackend, LocalSGDConfig
from unisono.kvstore.backends.parameter_server import ParameterServerBackend
from unisono.kvstore.backends.server_client import ServerConfig
from unisono.kvstore.compression import find_codec
from unisono.kvstore.keys import (
    Future,
    Key,
    KeyTable,
    PushValue,
    PushValues,
    SparseRows,
    as_sparse_rows,
    describe_tensors,
    hash_tensors,
    nothing_sent,
    to_dense,
)
from unisono.kvstore.optimizer_file import OPTIMIZER, read_optimizer_file, write_optimizer_file
from unisono.kvstore.value_store import optimizer_options
from unisono.optim.options import OptimOptions
from unisono.plan.plan import BUCKET_BYTES

# after which a collective of a store that has joined the job by itself fails
_COLLECTIVE_S = 300.0

Kind = Literal["local", "device", "dist_sync", "dist_async", "dist_local"]
Names = list[str] | list[int] | list[Key] | tuple[Key, ...]
Out = Tensor | Sequence[Tensor]


class GradientSync(Protocol):
    """Sums the gradients of a step's micro-batches over all workers."""

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """Declare the next backward pass to be the step's last one, through the whole model or through ``part`` of it.
        Gradients may be sent as soon as they are complete; without this call ``wait`` sends them."""
        ...

    def wait(self, totals: Tensor) -> None:
        """Sum ``totals`` [k] over workers, and block until it and all gradients hold their sums. Raises CommError if a
        peer is lost."""
        ...

    def gradients(self) -> list[Tensor]:
        """The reduced gradients in parameter order; zeros for a parameter that no sample used."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients before the next step."""
        ...

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        ...


class Backend(Protocol):
    """The interface that each kind of store implements. ``KVStore`` has checked keys, shapes and dtypes, and has summed
    the values of several devices."""

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Store ``values`` under new keys. They are equal on all workers, and the backend owns them."""
        ...

    def reduce_device(self, key: str, first: Tensor) -> torch.device:
        """The device on which several values of one push are added."""
        ...

    def push(self, items: Sequence[tuple[str, PushValue]], priority: int) -> Future[None]:
        """Sum over workers. The caller may change or reuse a value at once: the backend copies what it still needs."""
        ...

    def pull(self, items: Sequence[tuple[str, list[Tensor]]], priority: int) -> Future[None]:
        """Write the stored value into each of the key's tensors."""
        ...

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        """Rows of the stored value; ``ids`` are sorted and distinct."""
        ...

    def barrier(self) -> None:
        """Return once every worker has called it and all pushes are applied."""
        ...

    def set_optimizer(self, options: OptimOptions) -> None:
        """Treat later sums as gradients."""
        ...

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all later updates."""
        ...

    def set_compression(self, codec: str | None) -> None:
        """Set the codec of later pushes. Raises ConfigError if this backend sends nothing or has already sent data."""
        ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Compression statistics by key."""
        ...

    def step(self) -> None:
        """Return when this worker may begin its next step."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All state that a later process needs to continue, by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None:
        """Release memory and connections. Not a collective."""
        ...


class KVStore:
    """A store shared by the workers of ``world``; made by ``create_kvstore``.

    With 'dist_sync' and 'dist_local' all workers call ``init``, ``push``, ``pushpull``, ``barrier``, ``broadcast`` and
    the ``set_*`` methods in the same order, and also ``wait`` of a push, or of a pull of keys that were pushed. Workers
    of 'dist_async' meet only in the first ``init``, in ``barrier`` and in ``load_state_dict``.

    Args:
        kind: Its kind.
        world: Its workers.
        backend: Where and how it keeps values.
        owns_world: Whether ``close`` closes ``world`` too.
    """

    def __init__(self, kind: Kind, world: World, backend: Backend, *, owns_world: bool = False) -> None:
        self.kind: Kind = kind
        self.world = world
        self._backend = backend
        self._keys = KeyTable()
        self._devices: dict[str, torch.device] = {}
        self._codec: str | None = None
        self._optimizer: str | None = None
        self._owns_world = owns_world

    def __repr__(self) -> str:
        return f"KVStore({self.kind!r}, {len(self._devices)} keys, {self.world})"

    @property
    def type(self) -> Kind:
        """The kind, under MXNet's name."""
        return self.kind

    @property
    def rank(self) -> int:
        """The rank of this worker among ``num_workers``."""
        return self.world.rank

    @property
    def num_workers(self) -> int:
        """The number of workers that share the store."""
        return self.world.world_size

    # --- values ----------------------------------------------------------------------------------------------------

    def init(self, key: Key | Mapping[Any, Tensor], value: Tensor | None = None) -> None:
        """``broadcast``, then store a copy of each value under its key.

        'dist_async' takes one ``init`` of all keys and overwrites ``value`` with the servers' current values. Raises
        ConfigError for a key that already has a value, CommError naming the worker whose table differs, and where.
        """
        values: dict[str, Tensor] = dict(self._keys.pairs(key, value))
        self._keys.add(values)
        if self.kind != "dist_async":
            self._broadcast(values)
        self._devices |= {name: value.device for name, value in values.items()}
        self._backend.init({name: value.detach().clone() for name, value in values.items()})
        if self.kind == "dist_async":  # servers compare the table, and have rank 0's values or later ones
            self.pull([self._keys.given(name) for name in values], list(values.values())).wait()

    def broadcast(self, key: Key | Mapping[Any, Tensor], value: Tensor | None = None) -> None:
        """Compare names, shapes and dtypes over workers, then overwrite every worker's tensors with rank 0's. Stores
        nothing.

        Raises CommError naming the worker whose table differs, and where; ConfigError for 'dist_async', whose workers
        share only the servers.
        """
        if self.kind == "dist_async":
            given = "broadcast on a store of kind 'dist_async'"
            rule = "its workers share only the keys on the servers"
            raise nothing_sent(given, rule, "init, which writes the servers' values into every worker's tensors")
        self._broadcast(dict(self._keys.pairs(key, value)))

    def _broadcast(self, values: Mapping[str, Tensor]) -> None:
        if len(set(self.world.all_gather_json(hash_tensors(values)))) > 1:  # the tables themselves may be long
            agree(self.world, "parameter table", describe_tensors(values))
        for name in sorted(values):
            self.world.broadcast(values[name].detach())

    def push(
        self,
        key: Key | Sequence[Key] | Mapping[Any, Any],
        value: PushValues | Sequence[PushValues] | None = None,
        priority: int = 0,
    ) -> Future[None]:
        """Add one value, or the sum of a list of values, to what the other workers push under ``key``.

        A tuple (row ids [n], rows [n, ...]) stands for the tensor with zeros in all other rows. Of the pushes waiting
        to be sent, the highest ``priority`` goes first. The values may be changed as soon as this returns. Raises
        ConfigError for an unknown key and a wrong shape or dtype.
        """
        return self._backend.push(
            [(name, self._sum(name, part)) for name, part in self._keys.pairs(key, value)], priority
        )

    @overload
    def pull(self, key: Key, out: Out | None = None, priority: int = 0) -> Future[Tensor]: ...
    @overload
    def pull(self, key: Names, out: Sequence[Out] | None = None, priority: int = 0) -> Future[list[Tensor]]: ...
    def pull(self, key: Key | Names, out: Any = None, priority: int = 0) -> Future[Any]:
        """The stored value after all earlier pushes, as a copy on the device of ``init``'s value, or written to
        ``out``: one tensor, or several, per key."""
        names: list[Key] = [key] if isinstance(key, str | int) else list(key)
        outs = [out] if isinstance(key, str | int) else [None] * len(names) if out is None else list(out)
        items = [
            (name, self._targets(name, target))
            for (name, _), target in zip(self._keys.pairs(names, names), outs, strict=True)
        ]
        written = self._backend.pull(items, priority)

        def result() -> Any:
            written.wait()
            pulled = [targets[0] for _, targets in items]
            return pulled[0] if isinstance(key, str | int) else pulled

        return Future(result, written.done)

    @overload
    def pushpull(self, key: Key, value: PushValues, out: Out | None = None, priority: int = 0) -> Future[Tensor]: ...
    @overload
    def pushpull(
        self,
        key: Sequence[Key] | Mapping[Any, Any],
        value: Sequence[PushValues] | None = None,
        out: Sequence[Out] | None = None,
        priority: int = 0,
    ) -> Future[list[Tensor]]: ...
    def pushpull(
        self,
        key: Key | Sequence[Key] | Mapping[Any, Any],
        value: Any = None,
        out: Any = None,
        priority: int = 0,
    ) -> Future[Any]:
        """``push`` the values, then ``pull`` the results."""
        self.push(key, value, priority)
        return self.pull(key if isinstance(key, str | int) else list(key), out, priority)

    def row_sparse_pull(self, key: Key, rows: Tensor, out: Tensor | None = None) -> Future[SparseRows]:
        """The rows with these ids, sorted and distinct. ``out`` gets them at their positions and zeros elsewhere."""
        ((key, _),) = self._keys.pairs(key, None)
        shape, _ = self._keys.lookup(key)
        ids = as_sparse_rows(key, (rows, rows), shape).ids.unique()
        if out is not None:
            self._keys.check_value(key, out)
        pulled = self._backend.pull_rows(key, ids)

        def result() -> SparseRows:
            some = pulled.wait()
            if out is not None:
                out.copy_(to_dense(some, shape))
            return some

        return Future(result, pulled.done)

    def barrier(self) -> None:
        """Return once every worker has called it and all earlier pushes are applied. With 'dist_async': every live
        worker."""
        self._backend.barrier()

    def step(self) -> None:
        """Count a finished step whose pushes are all applied; return when this worker may begin the next one.

        With 'dist_async' and ``staleness=s`` it waits until the slowest live worker is at most s steps behind (stale
        synchronous parallel, Ho et al. 2013). For the other kinds it returns at once.
        """
        self._backend.step()

    # --- updates ---------------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: OptimOptions | str, **hyper: Any) -> None:
        """Treat later pushes as gradients: ``set_optimizer("sgd", lr=0.1, momentum=0.0)``, or options with
        ``clip_norm=0``.

        Matrices decay, vectors do not; see ``value_store``. Raises ConfigError for invalid options and for options
        without effect.
        """
        options = optimizer_options(optimizer, hyper)
        agree(self.world, "the store's optimizer", repr(options))
        self._backend.set_optimizer(options)
        self._optimizer = options.kind

    def set_updater(self, updater: Callable[[Any, Tensor, Tensor], object]) -> None:
        """Apply later sums with ``updater(key, sum, stored)``, which changes the tensor ``stored`` in place.

        All workers of 'dist_sync' give the same function. State that it keeps is its own: the store saves values only.
        A later ``set_optimizer`` replaces it. Raises ConfigError for 'dist_async', to whose servers no code is sent, and
        for 'dist_local', whose rounds need the store's optimizer.
        """
        if not isinstance(self._backend, LocalBackend | AllReduceBackend):
            reasons = {
                "dist_async": "servers run no code that is sent to them",
                "dist_local": "its rounds are averages of what the store's optimizer has done",
            }
            given = f"set_updater on a store of kind {self.kind!r}"
            raise nothing_sent(given, reasons[self.kind], "set_optimizer, or kind 'dist_sync'")
        agree(self.world, "the store's updater", getattr(updater, "__qualname__", type(updater).__qualname__))
        self._backend.set_updater(lambda key, total, stored: updater(self._keys.given(key), total, stored))
        self._optimizer = None

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all later updates. Raises ConfigError without an optimizer."""
        self._backend.set_learning_rate(lr)

    def set_compression(self, codec: str) -> None:
        """Send dense floating-point tensors through ``codec`` ("int8", "2bit:0.5", ...; see docs/compression.md;
        "none": uncompressed), with error feedback.

        'dist_sync' and 'dist_async' compress gradients, 'dist_local' the parameter change of a round. 'dist_async' with
        a scale-following codec also compresses pulls: a pull then approaches the stored value and the next one comes
        closer; the first pull, and the first after a state was loaded or saved, is exact. May be changed until data was
        sent: before the first push, with 'dist_async' before ``init``. Raises ConfigError after that, for an unknown
        codec, and where nothing is sent; CommError naming the workers that set another codec.
        """
        agree(self.world, "the store's compression", codec)
        chosen = None if codec == "none" else codec
        self._backend.set_compression(chosen)
        self._codec = chosen

    def stats(self) -> dict[str, dict[str, float]]:
        """Compression statistics by key (by fragment and dtype with 'dist_local'): ``bytes_in``, the size of the last
        tensor sent; ``bytes_out``, the size of its code; ``residual``, the norm of the residual over that of the last
        gradient. 'dist_async' with compressed pulls adds ``pull_bytes_in`` and ``pull_bytes_out`` of the last pull."""
        return self._backend.stats()

    def state_dict(self) -> dict[str, Tensor]:
        """Values and optimizer state by name, the store's own tensors. Read them before the next push."""
        return self._backend.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of ``state_dict`` into a store with the same keys and optimizer. Raises CheckpointError for
        any difference."""
        self._backend.load_state_dict(state)

    def save_optimizer_states(self, file: str | Path) -> None:
        """Write the optimizer's state to ``file`` as safetensors: the tensors ``optim/…`` of ``state_dict``.

        Call it on one worker, after ``barrier``. Raises ConfigError without an optimizer.
        """
        write_optimizer_file(Path(file), self._set_optimizer("save_optimizer_states"), self.state_dict())

    def load_optimizer_states(self, file: str | Path) -> None:
        """Load a file of ``save_optimizer_states`` on every worker; values stay as they are.

        Raises ConfigError without an optimizer; CheckpointError for another optimizer, other keys or another file.
        """
        kind = self._set_optimizer("load_optimizer_states")
        tensors = read_optimizer_file(Path(file), kind)
        self.barrier()
        kept = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(OPTIMIZER)}
        self.load_state_dict(kept | tensors)

    def _set_optimizer(self, call: str) -> str:
        if self._optimizer is None:
            raise ConfigError(
                given=f"{call} on a store without an optimizer",
                rule="the state is that of the store's optimizer; an updater keeps its own",
                consequence="nothing was read or written",
                nearest="set_optimizer('sgd', lr=...) first",
            )
        return self._optimizer

    # --- gradients of a trainer, and the end -----------------------------------------------------------------------

    def gradients(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: ProcessGroup | None = None,
        reduce_dtypes: Mapping[str, torch.dtype] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> GradientSync:
        """Create the gradient synchronisation of the ``parameters`` that require gradients, over ``group`` or all
        workers.

        ``reduce_dtypes``: by name the dtype in which a gradient is sent and added, if not its own. Gradients are sent in
        buckets of ``bucket_bytes``, through the codec of ``set_compression``. Raises ConfigError for a codec together
        with ``reduce_dtypes``.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        codec = None if self._codec is None else find_codec(self._codec)
        if self.kind != "dist_sync" or (self.num_workers == 1 and codec is None):
            return LocalGradientSync(trained)
        return BucketedAllReduce(
            trained, self.world, bucket_bytes, group=group, reduce_dtypes=reduce_dtypes, codec=codec
        )

    def close(self) -> None:
        """Release the values. Not a collective; a World that the caller gave stays open."""
        self._backend.close()
        if self._owns_world:
            self.world.close()

    def _sum(self, key: str, value: Any) -> PushValue:
        parts = cast("list[PushValue]", value if isinstance(value, list) else [value])
        if not parts:
            rule = "a push has one value for each device of this worker, at least one"
            raise nothing_sent(f"an empty list for key {key!r}", rule, "zeros, where this worker has nothing to add")
        for part in parts:
            self._keys.check_value(key, part)
        first = parts[0]
        home = self._backend.reduce_device(key, first if isinstance(first, Tensor) else first[1])
        if len(parts) == 1 and not isinstance(first, Tensor):
            return first
        shape, _ = self._keys.lookup(key)
        with torch.no_grad():
            dense = [
                part.detach() if isinstance(part, Tensor) else to_dense(as_sparse_rows(key, part, shape), shape)
                for part in parts
            ]
            total = dense[0].to(home)
            for part in dense[1:]:
                total = total + part.to(home)
        return total

    def _targets(self, key: str, out: Any) -> list[Tensor]:
        shape, dtype = self._keys.lookup(key)
        if out is None:
            return [torch.empty(shape, dtype=dtype, device=self._devices[key])]
        targets = [out] if isinstance(out, Tensor) else list(out)
        for target in targets:
            self._keys.check_value(key, target)
        return [target.detach() for target in targets]


def create_kvstore(
    kind: Kind,
    world: World | None = None,
    *,
    local_sgd: LocalSGDConfig | None = None,
    hierarchical: Literal["auto"] | bool = "auto",
    shared_memory: Literal["auto"] | bool = "auto",
    servers: ServerConfig | None = None,
    staleness: int | None = None,
    staleness_lr_decay: bool = False,
) -> KVStore:
    """Make a store of a kind, shared by the workers of ``world``. A collective on the distributed kinds.

    Args:
        kind: 'local' and 'device' add values within one process, on the host or on the accelerator. 'dist_sync' all-reduces
            over workers, 'dist_async' updates values on parameter servers, 'dist_local' averages the workers' copies
            periodically.
        world: The workers. 'local' and 'device' take a single one; 'dist_async' uses only rank, number of workers and run id,
            and needs no process group. None: this process for 'local' and 'device', else the job that a launcher started
            this process for; the store joins it, and leaves it in ``close``.
        local_sgd: When and how 'dist_local' averages; required there.
        hierarchical: Whether 'dist_sync' sums through one worker of each host; 'auto': if there are several hosts with several
            workers each.
        shared_memory: Whether 'dist_sync' sums host tensors through memory shared by the workers of one host; 'auto': where
            possible, and nothing is compressed.
        servers: The parameter servers of 'dist_async'; None: those of the launcher.
        staleness: Largest number of steps that a worker of 'dist_async' is ahead of the slowest, see ``KVStore.step``; None for
            any number.
        staleness_lr_decay: Whether servers apply a gradient, computed before tau pushes of other workers, with lr / (1 + tau).

    Raises:
        ConfigError: Options do not fit the kind or the workers.
        LaunchError, CommError: Without ``world``, as ``join_world``.
    """
    options = {  # its kind, and whether it is given
        "local_sgd": ("dist_local", local_sgd is not None),
        "hierarchical": ("dist_sync", hierarchical != "auto"),
        "shared_memory": ("dist_sync", shared_memory != "auto"),
        "servers": ("dist_async", servers is not None),
        "staleness": ("dist_async", staleness is not None),
        "staleness_lr_decay": ("dist_async", staleness_lr_decay),
    }
    inert = [name for name, (owner, is_given) in options.items() if is_given and owner != kind]
    if inert:
        rule = ", ".join(f"{name} is for {owner!r}" for name, (owner, _) in options.items())
        raise _no_store(kind, ", ".join(inert), rule, f"leave out {', '.join(inert)}")
    owns_world = world is None
    if world is None:
        world = _launched_world(kind)
        job = world.job
        if (
            kind == "dist_async"
            and servers is None
            and (job.server_addresses or (job.source == "dmlc" and job.servers))
        ):
            servers = ServerConfig.from_environ(os.environ, worker_restart_count=job.restart_count)
    match kind:
        case "local" | "device":
            if world.world_size > 1:
                num_workers = f"{world.world_size} workers"
                raise _no_store(kind, num_workers, f"{kind!r} is a store of one process", "'dist_sync'")
            backend = LocalBackend(on_host=kind == "local")
        case "dist_sync":
            backend = AllReduceBackend(world, hierarchical=hierarchical, shared_memory=shared_memory)
        case "dist_async":
            if servers is None:
                nearest = "servers=ServerConfig.from_environ(os.environ)"
                raise _no_store(kind, "no servers", "servers that know the secret hold its values", nearest)
            if staleness is not None and staleness < 0:
                raise _no_store(kind, f"staleness {staleness}", "it is 0 or more, or None", "staleness=4")
            backend = ParameterServerBackend(world, servers, staleness=staleness, staleness_lr_decay=staleness_lr_decay)
        case "dist_local":
            if local_sgd is None:
                nearest = "local_sgd=LocalSGDConfig(local_steps=16)"
                raise _no_store(kind, "no local_sgd", "the interval between averages is given", nearest)
            backend = LocalSGDBackend(world, local_sgd)
        case _:
            kinds = get_args(Kind)
            rule = f"kinds are {', '.join(kinds)}"
            raise _no_store(kind, f"{world.world_size} workers", rule, nearest_name(kind, kinds))
    return KVStore(kind, world, backend, owns_world=owns_world)


def _launched_world(kind: str) -> World:
    """The workers of a store of ``kind`` in the job that a launcher started this process for. A process of MXNet's tracker
    that is no worker ends here."""
    job = job_from_environ(os.environ)
    if job.role == "server" and (leaves := idle_role(job, kind)) is not None and kind != "dist_async":
        print(leaves)
        sys.exit(0)
    take_role(job)
    if kind in ("local", "device"):
        return World.alone(job)
    if kind == "dist_async":
        return World(job)
    return join_world(job, device_type=present_adapter().name, timeout_s=_COLLECTIVE_S)


def _no_store(kind: str, given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=f"a store of kind {kind!r} with {given}", rule=rule, consequence="no store was made", nearest=nearest
    )

"""The kind ``dist_async``: servers hold values and optimizer, and every worker's push is an update of its own.

A worker needs no other worker: it is a world of one (docs/adr/0010), and its rank is its number at the servers. The
differences from the other kinds follow from that. Values can only be updated, not replaced, so an optimizer is set
before the first push. All keys come in one ``init``, because their table determines the placement. Rank 0's values are
stored, and ``init`` overwrites every worker's own with the servers' current values, so a worker that joins later starts
from the current values.

Every push carries the learning rate. With a codec, gradients are compressed chunk by chunk with error feedback, and
pulls as deltas if the codec supports it (``server.pull_compression``). Rows are sent uncompressed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.dist import World
from unisono.errors import CommError, ConfigError
from unisono.kvstore.backends.server_client import PushResult, ServerClient, ServerConfig, host_copy
from unisono.kvstore.compression import Codec
from unisono.kvstore.keys import Future, PushValue, SparseRows, nothing_sent, sum_rows
from unisono.kvstore.server.chunk_optimizer import LAYERWISE_OPTIMIZERS, ServerOptimizerSpec
from unisono.kvstore.server.parameter_server import server_codec
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.value_store import ValueStore, learning_rate_without_optimizer, require_floating, role_of
from unisono.optim.options import OptimOptions

_HOST = torch.device("cpu")
_MEETING_S = 60.0
_CHECK_S = 0.05


class ParameterServerBackend:
    """Values on the servers of ``config``; this worker is ``world.rank``.

    Connects at ``init``. Raises CommError where another worker's settings differ.
    """

    def __init__(
        self, world: World, config: ServerConfig, *, staleness: int | None = None, staleness_lr_decay: bool = False
    ) -> None:
        self._world, self._config = world, config
        self._staleness, self._staleness_lr_decay = staleness, staleness_lr_decay
        self._codec: Codec | None = None
        self._options: OptimOptions | None = None
        self._lr = math.nan
        self._specs: dict[str, Tensor] = {}  # shape and dtype by key, without memory
        self._last_push: dict[str, tuple[Future[None], int]] = {}  # push of a key, and its priority
        self._unchecked: list[Future[None]] = []  # pushes whose result nobody has seen
        self._meetings = itertools.count()
        self._clock = 0
        self._client: ServerClient | None = None

    # --- values ----------------------------------------------------------------------------------------------------

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Connect, and store rank 0's values unless the servers have values. Returns when the servers have all values
        and, at the first start, all workers have connected."""
        if self._client is not None:
            raise _refused(
                f"a second init, of {', '.join(map(repr, list(values)[:5]))}",
                "the table of all keys says which server holds what",
                "one init of all keys",
            )
        self._specs = {key: value.to("meta") for key, value in values.items()}
        if self._options is not None:
            require_floating(values)
        layerwise = self._options is not None and self._options.kind in LAYERWISE_OPTIMIZERS
        run_spec = RunSpec(
            table={key: (tuple(value.shape), value.dtype) for key, value in values.items()},
            num_servers=len(self._config.addresses),
            uncut_keys=tuple(sorted(values)) if layerwise else (),
            staleness=self._staleness,
            codec=self._codec.name if self._codec is not None else "none",
            labels={"run": self._world.job.run_id},
        )
        client = ServerClient(self._config, run_spec, worker=self._world.rank, codec=self._codec)
        try:
            if not client.is_initialised:
                if self._world.rank == 0:
                    client.init(values)
                self._wait_for_workers(client)
            if self._options is not None:
                client.set_optimizer(self._recipe(self._options))
        except BaseException:
            client.close()
            raise
        self._client, self._clock = client, client.clock

    def reduce_device(self, key: str, first: Tensor) -> torch.device:
        return first.device

    @torch.no_grad()
    def push(self, items: Sequence[tuple[str, PushValue]], priority: int) -> Future[None]:
        """Send now. The future's ``wait`` raises CommError for non-finite values, which change nothing."""
        client = self._connected_client("push")
        if self._options is None:
            raise _refused("a push without an optimizer", "servers of 'dist_async' update values", "set_optimizer")
        self._raise_errors(only_done=True)
        futures: list[Future[None]] = []
        for run in _runs_of_distinct_keys(items):
            priority = self._ordered_priority(run, priority)
            dense = {key: host_copy(value) for key, value in run.items() if isinstance(value, Tensor)}
            sent = client.push(dense, lr=self._lr, priority=priority)
            if self._codec is not None:
                client.commit(all(bool(value.isfinite().all()) for value in dense.values()))
            self._remember(futures, list(dense), sent, priority)
            for key, value in run.items():
                if not isinstance(value, Tensor):
                    ids, rows = sum_rows(value[0].to(_HOST, torch.int64), host_copy(value[1]))
                    sent = client.push_rows(key, ids, rows, lr=self._lr, priority=priority)
                    self._remember(futures, [key], sent, priority)

        def wait() -> None:
            for future in futures:
                future.wait()

        return Future(wait, lambda: all(future.done() for future in futures))

    @torch.no_grad()
    def pull(self, items: Sequence[tuple[str, list[Tensor]]], priority: int) -> Future[None]:
        """Receive into the first tensor of each key, and copy it to the others."""
        first: dict[str, Tensor] = {}
        for key, targets in items:
            first.setdefault(key, targets[0])
        pulled = self._connected_client("pull").pull(first, priority=self._ordered_priority(first, priority))

        @torch.no_grad()
        def finish() -> None:
            pulled.wait()
            for key, targets in items:
                for target in targets:
                    if target is not first[key]:
                        target.copy_(first[key])

        return Future(finish, pulled.done)

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        ids = ids.to(_HOST)
        pulled = self._connected_client("row_sparse_pull").pull_rows(
            key, ids, priority=self._ordered_priority([key], 0)
        )
        return Future(lambda: SparseRows(ids, pulled.wait()), pulled.done)

    # --- meetings and clocks ---------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return once every live worker has called it and all pushes are applied."""
        client = self._connected_client("barrier")
        self._raise_errors()
        client.barrier(next(self._meetings))

    def step(self) -> None:
        """Count a step; return when the slowest live worker is at most ``staleness`` steps behind."""
        client = self._connected_client("step")
        self._raise_errors()
        self._clock += 1
        client.tick(self._clock)

    # --- updates ---------------------------------------------------------------------------------------------------

    def set_optimizer(self, options: OptimOptions) -> None:
        """Set the optimizer on the servers, which keep the first one. Raises CommError for a different one, ConfigError
        where LAMB or LARS would see parts of keys."""
        client = self._client
        if client is not None:
            require_floating(self._specs)
            cut = [key for key in self._specs if len(client.placement.chunks_of(key)) > 1]
            if options.kind in LAYERWISE_OPTIMIZERS and cut:
                raise _refused(
                    f"set_optimizer({options.kind!r}) after init, which has cut {', '.join(map(repr, cut[:5]))}",
                    "it needs the norms of whole keys, and keys are placed at init",
                    "set_optimizer, then init",
                )
            client.set_optimizer(self._recipe(options))
        self._options = options

    def set_learning_rate(self, lr: float) -> None:
        """Later pushes carry it."""
        if self._options is None:
            raise learning_rate_without_optimizer(lr)
        self._lr = lr

    def set_compression(self, codec: str | None) -> None:
        """Set the codec before ``init``, which sends its name to the servers."""
        if self._client is not None:
            raise _refused(
                f"compression {codec!r} after init", "init sends the codec to the servers", "set_compression"
            )
        self._codec = None if codec is None else server_codec(codec)

    def stats(self) -> dict[str, dict[str, float]]:
        return {} if self._client is None else self._client.compression_stats()

    # --- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The servers' state after this worker's pushes so far, and this worker's residuals. Other workers may be
        pushing: call ``barrier`` before and after for a state between steps. With compressed pulls, this worker's next
        pull is exact, as it is for a worker that loads the state."""
        client = self._connected_client("state_dict")
        self._raise_errors()
        tensors = client.state()
        state = {name if name.startswith("optim/") else f"value/{name}": tensor for name, tensor in tensors.items()}
        state = self._template().state_dict() | state  # servers have no optimizer state of keys without pushes
        return dict(sorted(state.items())) | {
            f"{_RESIDUAL}{name}": tensor for name, tensor in client.residuals().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load values and optimizer of one state on all workers; residuals are each worker's own."""
        client = self._connected_client("load_state_dict")
        residuals = {
            name.removeprefix(_RESIDUAL): tensor for name, tensor in state.items() if name.startswith(_RESIDUAL)
        }
        store_state = {
            name: tensor for name, tensor in state.items() if self._codec is None or not name.startswith(_RESIDUAL)
        }
        template = self._template()
        template.load_state_dict(store_state)
        client.load_residuals(residuals)
        self.barrier()
        # all workers load the same state
        client.load_state({name.removeprefix("value/"): tensor for name, tensor in store_state.items()})
        self.barrier()

    def close(self) -> None:
        """Disconnect. Pushes that were not waited for may or may not have arrived."""
        self._unchecked.clear()
        self._last_push.clear()
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- how -------------------------------------------------------------------------------------------------------

    def _connected_client(self, call: str) -> ServerClient:
        if self._client is None:
            raise _refused(f"{call} before init", "init connects to the servers", "init of all keys")
        return self._client

    def _recipe(self, options: OptimOptions) -> ServerOptimizerSpec:
        roles = {key: role_of(key, spec.shape, options) for key, spec in self._specs.items()}
        return ServerOptimizerSpec(options=options, roles=roles, staleness_lr_decay=self._staleness_lr_decay)

    def _wait_for_workers(self, client: ServerClient) -> None:
        """At the first start wait for all workers, so that they share the first barrier; a worker that joins later
        finds values and continues."""
        deadline = time.monotonic() + _MEETING_S
        while True:
            stats = client.stats()
            num_workers, chunks = (
                int(stats[0].get("workers_ever", 0)),
                sum(int(counts.get("chunks", 0)) for counts in stats),
            )
            if num_workers >= self._world.world_size and chunks == len(client.placement.chunks):
                return
            if time.monotonic() > deadline:
                raise CommError(
                    given=f"{num_workers} of {self._world.world_size} workers, and values for {chunks} of "
                    f"{len(client.placement.chunks)} chunks, after {_MEETING_S:.0f} s",
                    rule="at the first start all workers come, and rank 0 gives the values",
                    consequence="no step was made",
                    nearest="look why a worker did not start",
                )
            time.sleep(_CHECK_S)

    def _ordered_priority(self, keys: Mapping[str, object] | Sequence[str], priority: int) -> int:
        """A priority with which a request does not overtake pushes of the same keys."""
        pushes = [self._last_push[key] for key in keys if key in self._last_push]
        return min([priority, *(earlier for push, earlier in pushes if not push.done())])

    def _remember(
        self, futures: list[Future[None]], keys: Sequence[str], sent: Future[PushResult], priority: int
    ) -> None:
        def finish() -> None:
            refused = sent.wait().refused
            self._unchecked = [
                push for push in self._unchecked if push is not future
            ]  # the waiting caller gets the error, once
            if refused:
                raise CommError(
                    given=f"a push of {', '.join(map(repr, keys[:5]))} with a NaN or an infinity",
                    rule="servers apply finite gradients only",
                    consequence="the chunks that it was in were not changed",
                    nearest="leave out the steps whose gradients are not finite",
                )

        future = Future(finish, sent.done)
        futures.append(future)
        self._unchecked.append(future)
        self._last_push |= dict.fromkeys(keys, (future, priority))

    def _raise_errors(self, *, only_done: bool = False) -> None:
        """Raise the errors of pushes that nobody waited for."""
        over = [push for push in self._unchecked if push.done() or not only_done]
        self._unchecked = [push for push in self._unchecked if push not in over]
        for push in over:
            push.wait()

    def _template(self) -> ValueStore:
        """Values and optimizer state of one process, all zeros."""
        template = ValueStore()
        template.init(
            {key: torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for key, spec in self._specs.items()}
        )
        if self._options is not None:
            template.set_optimizer(self._options)
        return template


_RESIDUAL = "compression/"


def _runs_of_distinct_keys(items: Sequence[tuple[str, PushValue]]) -> list[dict[str, PushValue]]:
    """The items in order, in runs without a repeated key."""
    runs: list[dict[str, PushValue]] = [{}]
    for key, value in items:
        if key in runs[-1]:
            runs.append({})
        runs[-1][key] = value
    return runs


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return nothing_sent(f"{given} on a store of kind 'dist_async'", rule, nearest)

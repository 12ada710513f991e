"""A worker of ``dist_async`` and the servers that hold its parameters (docs/adr/0010).

It trains as one process does: its plan is that of one worker, and its optimizer has the servers make the update.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from unisono.data.loading.loader import Loader, StepBatch
from unisono.data.loading.stream_loader import StreamLoader
from unisono.dist import JobSpec
from unisono.dist.secret import read_or_create_secret
from unisono.errors import CommError, ConfigError
from unisono.kvstore.backends.server_client import Claim, ServerClient, ServerConfig, as_host_memory
from unisono.kvstore.server.chunk_optimizer import LAYERWISE_OPTIMIZERS, ServerOptimizerSpec
from unisono.kvstore.server.parameter_server import server_codec
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.work_queue import WAIT, WorkItem
from unisono.kvstore.wire.tls import read_tls
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.optim import OptimOptions
from unisono.optim.groups import Role
from unisono.optim.run_optimizer import RunOptimizer
from unisono.plan.plan import Plan
from unisono.train.comm_stats import PeerTraffic
from unisono.train.gradient_sync import compression_reason
from unisono.train.options import is_due
from unisono.train.parameter_servers import server_addresses
from unisono.train.state import SyncState, TrainState

_EVENT_EVERY_SHARDS = 100
_BYTE_FIELDS = ("bytes_in", "bytes_out", "pull_bytes_in", "pull_bytes_out")


class RemoteOptimizer:
    """Used in place of an optimizer: ``step`` pushes gradients to the servers, which update, once per ``batch_shard``.

    ``local`` has the parameter groups; its state is empty except while a checkpoint is saved or loaded. New values come with the
    answer to a push, or with ``late_pull`` when ``pull`` is called.
    """

    def __init__(
        self,
        local: RunOptimizer,
        servers: ServerClient,
        parameters: Mapping[str, nn.Parameter],
        *,
        late_pull: bool,
        timers: StepTimers,
    ) -> None:
        self.param_groups, self.state = local.param_groups, local.members[0].state
        self.state_tensors, self.create_state, self.frozen = local.state_tensors, local.create_state, local.frozen
        self.batch_shard = 0
        self._servers, self._late_pull, self._timers = servers, late_pull, timers
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}

    @torch.no_grad()
    def step(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Push gradients, divided by ``grad_scale``, and load the new values; do nothing where ``found_inf`` is set."""
        if bool(found_inf):
            return
        sent: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            gradient = cast(Tensor, parameter.grad)
            sent[name] = as_host_memory((gradient / grad_scale).to(parameter.dtype))
        lr = float(self.param_groups[0]["lr"])
        into = None if self._late_pull else self._trained
        with self._timers.comm_exposed("dp"):
            self._servers.push(sent, into, lr=lr, batch_shard=self.batch_shard).wait()
        self._servers.commit()

    def pull(self) -> None:
        """Load the current values."""
        with self._timers.comm_exposed("dp"):
            self._servers.pull(self._trained).wait()


def async_run_spec(
    plan: Plan,
    job: JobSpec,
    state: TrainState,
    *,
    optimizer: str,
    steps: int,
    save_every: int,
    labels: Mapping[str, str],
) -> RunSpec:
    """The run description that all workers send to the servers; there is a save every ``save_every`` of ``steps`` steps."""
    workers = plan.mesh.dp_replicate
    return RunSpec(
        table={name: (tuple(value.shape), value.dtype) for name, value in _model_tensors(state).items()},
        num_servers=len(job.server_addresses),
        uncut_keys=tuple(state.sharded.parameters) if optimizer in LAYERWISE_OPTIMIZERS else (),
        staleness=plan.sync.staleness,
        num_batch_shards=steps * workers,
        batch_shards_per_step=workers,
        batch_shards_per_save=save_every * workers,
        codec=plan.sync.compression,
        labels={"run": job.run_id, **labels},
    )


def open_async_worker(
    plan: Plan,
    job: JobSpec,
    state: TrainState,
    *,
    optimizer: OptimOptions,
    roles: Mapping[str, Role],
    steps: int,
    save_every: int,
    configuration: str,
    events: EventLog,
    timers: StepTimers,
) -> AsyncWorker:
    """This worker of a run of ``steps`` steps, whose servers update by ``optimizer``; ``configuration`` is the settings' hash.

    Raises LaunchError where there are no servers, CommError when they cannot be reached or serve another run.
    """
    return AsyncWorker(
        plan,
        job,
        state,
        run_spec=async_run_spec(
            plan,
            job,
            state,
            optimizer=optimizer.kind,
            steps=steps,
            save_every=save_every,
            labels={"plan": plan.hash, "configuration": configuration},
        ),
        # a push brings its learning rate, and gradients are clipped here
        optimizer_spec=ServerOptimizerSpec(
            options=replace(optimizer, clip_norm=0.0),
            roles=dict(roles),
            staleness_lr_decay=plan.sync.staleness_lr_decay,
        ),
        events=events,
        timers=timers,
    )


class AsyncWorker(SyncState):
    """This worker's side of a ``dist_async`` run: claims work from the servers, and keeps parameters and state there.

    It puts a ``RemoteOptimizer`` into ``state``, and itself as the ``SyncState`` of a codec's residuals: at a save the model and
    the optimizer have the servers' values. ``run_spec`` and ``optimizer_spec`` are the same for all workers. Raises LaunchError
    where there are no servers, CommError when they cannot be reached or serve another run.
    """

    def __init__(
        self,
        plan: Plan,
        job: JobSpec,
        state: TrainState,
        *,
        run_spec: RunSpec,
        optimizer_spec: ServerOptimizerSpec,
        events: EventLog,
        timers: StepTimers,
    ) -> None:
        self._plan, self._state, self._events = plan, state, events
        self._optimizer_spec = optimizer_spec
        self._values, self._parameters = _model_tensors(state), state.sharded.parameters
        self._addresses = job.server_addresses
        codec = plan.sync.compression
        self._servers = ServerClient(
            ServerConfig(
                addresses=server_addresses(job),
                secret=read_or_create_secret(os.environ),
                tls=read_tls(os.environ),
                worker_restart_count=job.restart_count,
            ),
            run_spec,
            worker=job.rank,
            codec=None if codec == "none" else server_codec(codec),
            report=lambda text: events.emit("servers", message=text),
        )
        if codec != "none":
            why = compression_reason(codec, optimizer_spec.options.kind)
            events.emit("compression", asked=codec, codec=codec, why=why)
        # with a bound on staleness, values are pulled when a shard begins, not when its gradients are pushed
        self._bounded = plan.sync.staleness is not None
        self._optimizer = RemoteOptimizer(
            state.optimizer, self._servers, self._parameters, late_pull=self._bounded, timers=timers
        )
        self._optimizer.state.clear()  # the servers have it
        state.optimizer, state.sync_state = cast(RunOptimizer, self._optimizer), self
        self._num_shards = 0
        self._unused_item: WorkItem | None = None
        self._claim = Claim(item=WAIT, weight=0.0, is_last=False)  # the latest
        self._asked_to_stop = False
        self._saved_step = -1
        self.work_item = WAIT  # the save, end or stopped item that ended the last batches

    # --- the start of a run ----------------------------------------------------------------------------------------

    def start(self, restore: Callable[[], bool]) -> None:
        """Take the servers' values; or, if this worker is the one to bring them, publish the model, after ``restore()`` if that
        finds a checkpoint."""
        first = self._claim_work()
        if first.kind == "begin":
            self._publish(resumed=restore())
        else:
            self._unused_item = first
            self.pull_model()

    def _publish(self, *, resumed: bool) -> None:
        state = self._state
        self._servers.init(self._values)
        self._servers.set_optimizer(self._optimizer_spec)
        if resumed:
            moments = {path: t for path, t in state.local_state().items() if path.startswith("optim/")}
            self._servers.load_state({**self._values, **moments})
        self._optimizer.state.clear()
        self._servers.snapshot()
        self._servers.mark_done(WorkItem("begin", state.step * self._plan.mesh.dp_replicate), float(state.weight_total))

    # --- batch shards and saves ------------------------------------------------------------------------------------

    def batches(self, loader: Loader) -> Generator[StepBatch]:
        """The batch shards that this worker claims, up to a save or the end of the run, which is then ``work_item``."""
        return loader.iterate_claimed(self._claim_shard)

    def start_batch_shard(self, batch: StepBatch) -> None:
        """Prepare for the shard whose gradients are pushed next."""
        self._state.step, self._optimizer.batch_shard = batch.step, batch.batch_shard
        if self._bounded:
            self._optimizer.pull()

    def finish_batch_shard(self, batch_shard: int, weight: float) -> None:
        """Tell the servers that its gradients were pushed, or that the guard refused it."""
        self._servers.mark_done(WorkItem("unit", batch_shard), weight)
        self._num_shards += 1
        if is_due(_EVENT_EVERY_SHARDS, self._num_shards) and (stats := self._servers.compression_stats()):
            self._events.emit(
                "compressed",
                step=self._state.step,
                **{name: sum(key.get(name, 0) for key in stats.values()) for name in _BYTE_FIELDS},
                residual_norms={name: key["residual"] for name, key in stats.items() if "residual" in key},
            )

    def peer_traffic(self) -> list[PeerTraffic]:
        """Traffic with each server; the fact ``apart`` is the reason why no shared memory is used, or empty.

        Its counters are of all workers (``_server_counters``).
        """
        return [
            PeerTraffic(
                peer=peer,
                sent_bytes=traffic.sent_bytes + traffic.shared_sent_bytes,
                received_bytes=traffic.received_bytes + traffic.shared_received_bytes,
                facts={
                    "apart": traffic.no_shared_memory_reason,
                    "reconnects": traffic.num_reconnects,
                },
                counters=counters,
            )
            for peer, traffic, counters in zip(
                self._addresses, self._servers.traffic(), self._server_counters(), strict=True
            )
        ]

    def _server_counters(self) -> list[dict[str, float]]:
        """Pushes to each server, the sum of the squares of their lags, and its load; nothing where a server does not answer."""
        try:
            all_stats = self._servers.stats()
        except (CommError, TimeoutError):
            return [{} for _ in self._addresses]
        return [
            {
                "pushes": stats["counts"].get("push", 0) + stats["counts"].get("pushpull", 0),
                "lag_square_total": stats["lag_square_total"],
                **stats["load"],
            }
            for stats in all_stats
        ]

    def ask_to_stop(self, *, finished: bool = False) -> None:
        """End the run of all workers at the next step that no worker has begun. ``finished``: the run is complete."""
        if not self._asked_to_stop:
            self._servers.stop(finished=finished)
        self._asked_to_stop = True

    @torch.no_grad()
    def pull_model(self) -> None:
        """Copy the servers' parameters into the model, exactly; at a save or the end, take their step too.

        Only at the start are buffers copied too: no gradient changes those of the servers, and statistics, such as a batch
        norm's, are then those of the samples that this worker has seen.
        """
        if self.work_item.kind == "wait":
            self._servers.pull(self._values, exact=True).wait()
        else:
            self._servers.pull({name: self._values[name] for name in self._parameters}, exact=True).wait()
            self._state.step = self.step
            self._state.weight_total.fill_(self._claim.weight)

    @property
    def step(self) -> int:
        """The step that the servers stand at, at a save or the end."""
        return self.work_item.number // self._plan.mesh.dp_replicate

    def finish_save(self) -> None:
        """Tell the servers that evaluation and save of this step are done."""
        self._saved_step = self.step
        self._servers.mark_done(self.work_item)

    @property
    def owns_save(self) -> bool:
        """Whether this worker did the save that the run stands at."""
        return self._saved_step == self.step and self.work_item.kind != "wait"

    @property
    def is_final_save(self) -> bool:
        """Whether no work follows the save that the run stands at, as far as is known."""
        return self._claim.is_last

    def _claim_shard(self, wait: bool) -> int | None:
        """The next batch shard for the loader; None for other work, and for none at once without ``wait``."""
        if self._bounded and not wait:
            return None  # other workers wait for a shard that is claimed ahead
        item, self._unused_item = self._unused_item or self._claim_work(wait=wait), None
        if item.kind == "unit":
            return item.number
        if not wait and item.kind != "wait":
            # claimed ahead, while shards of this worker are under way that others have done too; it is handed out once
            self._unused_item = item
        elif item.kind != "wait":
            self.work_item = item
        return None

    def _claim_work(self, *, wait: bool = True) -> WorkItem:
        """The next item; ``WAIT`` only without ``wait``."""
        while True:
            self._claim = self._servers.claim(wait=wait)
            if self._claim.item.kind != "wait" or not wait:
                return self._claim.item

    # --- state -----------------------------------------------------------------------------------------------------

    @contextmanager
    def optimizer_state(self) -> Generator[None]:
        """Inside, the optimizer has its state, which the servers send."""
        for path, tensor in self._servers.state().items():
            if path.startswith("optim/"):
                _, name, key = path.split("/", 2)
                self._optimizer.state[self._parameters[key]][name] = tensor
        try:
            yield
        finally:
            self._optimizer.state.clear()

    def after_step(self, step: int, good: Tensor) -> None:
        """See ``SyncState``: a push that did not count was not made."""

    def rank_state(self) -> dict[str, Tensor]:
        """See ``SyncState``: the residuals of this worker's codec."""
        return self._servers.residuals()

    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """See ``SyncState``: residuals start at zero, because ranks do not stay with workers."""

    def close(self) -> None:
        """Leave the servers, which hand this worker's unfinished shards to others."""
        self._servers.close()


def _model_tensors(state: TrainState) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {
        path.removeprefix("model/"): tensor for path, tensor in state.local_state().items() if path.startswith("model/")
    }


def require_random_access(loader: Loader | StreamLoader) -> Loader:
    """Return ``loader``. Raises ConfigError for a stream, whose batch shards cannot be read in any order."""
    if isinstance(loader, StreamLoader):
        raise ConfigError(
            given=f"plan.sync 'dist_async' with a stream ({type(loader).__name__})",
            rule="any free worker claims the next batch shard, so samples are read in any order",
            consequence="a worker could not read the shard it claims",
            nearest="a data set with a length, or plan.sync='dist_sync'",
        )
    return loader

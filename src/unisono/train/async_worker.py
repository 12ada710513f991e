"""A worker of ``dist_async``: it computes what it is dealt, gradients go to servers, values come back (docs/adr/0010).

    begin    bring the checkpoint, or the model as built, to the servers
    unit     one rank's share of a step: forward, backward, push, pull
    save     all units before a step are done: what the servers hold is that step, to be evaluated and saved

The trainer runs as it does in one process: its plan is that of one worker, its optimizer has the servers make the step.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.data.loading.loader import Loader, StepBatch
from unisono.dist import JobSpec
from unisono.errors import ConfigError, LaunchError
from unisono.kvstore.backends.server_client import ServerClient
from unisono.kvstore.server.chunk_optimizer import LAYERWISE_OPTIMIZERS, ServerOptimizerSpec
from unisono.kvstore.server.parameter_server import server_codec
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.work_queue import WorkItem
from unisono.kvstore.wire.secret import read_secret
from unisono.kvstore.wire.tls import read_tls
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.optim import OptimOptions
from unisono.optim.groups import Role
from unisono.plan.plan import Plan
from unisono.train.comm_stats import PeerTraffic
from unisono.train.gradient_sync import compression_reason
from unisono.train.options import is_due
from unisono.train.state import TrainState

_EVENT_EVERY_SHARDS = 100
_BYTE_FIELDS = ("bytes_in", "bytes_out", "pull_bytes_in", "pull_bytes_out")


def worker_plan(plan: Plan) -> Plan:
    """What one worker of an asynchronous plan computes by itself: a unit. Other plans stay what they are."""
    if plan.sync.kind != "dist_async":
        return plan
    share = plan.batch.global_batch // plan.mesh.dp_replicate
    return plan.updated(
        mesh={"dp_replicate": 1},
        batch={"global_batch": share},
        sync={"kind": "local", "compression": "none", "staleness": None, "staleness_lr_decay": False},
    )


class RemoteOptimizer:
    """Stands where an optimizer stands: ``step`` has the servers make it, once for the ``unit`` at hand.

    ``local`` has the parameter groups; its state is empty but while a checkpoint is saved or loaded. New values come with the
    answer to a push, or with ``late_pull`` when they are asked for.
    """

    def __init__(
        self,
        local: torch.optim.Optimizer,
        servers: ServerClient,
        parameters: Mapping[str, nn.Parameter],
        *,
        late_pull: bool,
        timers: StepTimers,
    ) -> None:
        self.param_groups, self.state = local.param_groups, local.state
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.batch_shard = 0
        self._servers, self._late_pull, self._timers = servers, late_pull, timers
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._sent = {name: _empty_host_like(p) for name, p in self._trained.items()}
        # straight into the parameters where they are plain host memory
        self._got = {
            name: p.detach() if _is_host_memory(p) else _empty_host_like(p) for name, p in self._trained.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Push gradients, divided by ``grad_scale``, and take over what came of them; nothing where ``found_inf`` is set."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        for name, parameter in self._trained.items():
            gradient = cast(Tensor, parameter.grad)
            self._sent[name].copy_(gradient if self.grad_scale is None else gradient / self.grad_scale)
        lr = float(self.param_groups[0]["lr"])
        with self._timers.phase("comm_exposed"):
            if self._late_pull:
                self._servers.push(self._sent, lr=lr, unit=self.batch_shard).wait()
            else:
                self._servers.pushpull(self._sent, self._got, lr=lr, unit=self.batch_shard).wait()
        if not self._late_pull:
            self._take()
        self._servers.commit()

    @torch.no_grad()
    def pull(self) -> None:
        """Take over the values of now."""
        with self._timers.phase("comm_exposed"):
            self._servers.pull(self._got).wait()
        self._take()

    def _take(self) -> None:
        for name, parameter in self._trained.items():
            if not _is_host_memory(parameter):
                parameter.copy_(self._got[name])


class AsyncWorker:
    """What the servers deal this worker, and what they keep for it; the run's ``Memory`` of what a codec holds back.

    Raises LaunchError where there are no servers, CommError when they cannot be reached or know another run.
    """

    params_diverge = False

    def __init__(
        self,
        plan: Plan,
        job: JobSpec,
        state: TrainState,
        local: torch.optim.Optimizer,
        *,
        options: OptimOptions,
        roles: Mapping[str, Role],
        steps: int,
        save_every: int,
        about: Mapping[str, str],
        events: EventLog,
        timers: StepTimers,
    ) -> None:
        self._events, self._units = events, 0
        self._plan, self._state = plan, state
        # each update's rate comes with its push; clipping is done here
        self._recipe = ServerOptimizerSpec(
            options=replace(options, clip_norm=0.0), roles=dict(roles), staleness_lr_decay=plan.sync.staleness_lr_decay
        )
        held = state.local_state()
        self._values = {path[6:]: cast(Tensor, each) for path, each in held.items() if path.startswith("model/")}
        self._parameters = state.sharded.parameters
        workers = plan.mesh.dp_replicate
        agreed = RunSpec(
            table={name: (tuple(value.shape), value.dtype) for name, value in self._values.items()},
            num_servers=len(job.server_addresses),
            uncut_keys=tuple(self._parameters) if options.kind in LAYERWISE_OPTIMIZERS else (),
            staleness=plan.sync.staleness,
            num_batch_shards=steps * workers,
            batch_shards_per_step=workers,
            batch_shards_per_save=save_every * workers,
            codec=plan.sync.compression,
            labels={"run": job.run_id, **about},
        )
        self._addresses = job.server_addresses
        self._servers = ServerClient(
            _server_addresses(job),
            read_secret(os.environ),
            agreed,
            worker=job.rank,
            incarnation=job.restart_count,
            codec=None if plan.sync.compression == "none" else server_codec(plan.sync.compression),
            tls=read_tls(os.environ),
            say=lambda text: events.emit("servers", message=text),
        )
        if (codec := plan.sync.compression) != "none":
            events.emit("compression", asked=codec, codec=codec, why=compression_reason(codec, options.kind))
        # under a bound, values are as new as what was dealt
        self._bounded = plan.sync.staleness is not None
        self._optimizer = RemoteOptimizer(
            local, self._servers, self._parameters, late_pull=self._bounded, timers=timers
        )
        state.optimizer = cast(torch.optim.Optimizer, self._optimizer)
        self.drop_optimizer_state()
        self._kept: WorkItem | None = None
        self._weight = 0.0
        self._asked_to_stop = False
        self._saved_at = -1
        self.work_item = WorkItem("wait")  # what ended the last stretch of units: save, end or stopped
        self.is_final_save = False  # whether that is the run's last save

    # --- the start of a run ----------------------------------------------------------------------------------------

    def claim_start(self) -> bool:
        """Whether it is this worker that brings in what the run starts from; else waits until another has."""
        self._kept = self._claimed()
        if self._kept.kind != "begin":
            return False
        self._kept = None
        return True

    def publish(self, state: TrainState, *, resumed: bool) -> None:
        """Give the servers the model as it is here, and of a run that goes on the optimizer's state; work begins at its step."""
        self._servers.init(self._values)
        self._servers.set_optimizer(self._recipe)
        if resumed:
            moments = {
                path: cast(Tensor, each) for path, each in state.local_state().items() if path.startswith("optim/")
            }
            self._servers.load_state({**self._values, **moments})
        self.drop_optimizer_state()
        self._servers.snapshot()
        self._servers.mark_done(WorkItem("begin", state.step * self._plan.mesh.dp_replicate), float(state.weight_total))

    # --- its course ------------------------------------------------------------------------------------------------

    def batches(self, loader: Loader) -> Generator[StepBatch]:
        """The units that this worker is dealt, up to a save that falls to it or the end (then ``work`` says which)."""
        return loader.iterate_claimed(self._claim)

    def start_shard(self, batch: StepBatch) -> None:
        """Its gradients are the next to be pushed."""
        self._state.step, self._optimizer.batch_shard = batch.step, batch.batch_shard
        if self._bounded:
            self._optimizer.pull()

    def finish_shard(self, unit: int, weight: float) -> None:
        """Its gradients are applied, or it did not count."""
        self._servers.mark_done(WorkItem("unit", unit), weight)
        self._units += 1
        if is_due(_EVENT_EVERY_SHARDS, self._units) and (told := self._servers.compression_stats()):
            self._events.emit(
                "compressed",
                step=self._state.step,
                **{name: sum(each.get(name, 0) for each in told.values()) for name in _BYTE_FIELDS},
                residual_norms={name: each["residual"] for name, each in told.items() if "residual" in each},
            )

    def peer_traffic(self) -> list[PeerTraffic]:
        """One to each server; ``apart`` says why nothing goes through memory, empty where it does."""
        return [
            PeerTraffic(
                peer=peer,
                sent_bytes=each.sent_bytes + each.shared_sent_bytes,
                received_bytes=each.received_bytes + each.shared_received_bytes,
                facts={
                    "apart": each.no_shared_memory_reason,
                    "reconnects": each.num_reconnects,
                },
            )
            for peer, each in zip(self._addresses, self._servers.traffic(), strict=True)
        ]

    def ask_to_stop(self, *, finished: bool = False) -> None:
        """All workers end at the next step that nobody has begun."""
        if not self._asked_to_stop:
            self._servers.stop(finished=finished)
        self._asked_to_stop = True

    @torch.no_grad()
    def pull_model(self) -> None:
        """Take over all values of now, those that are not trained too, exactly, and the step that the servers stand at."""
        got = {name: _empty_host_like(value) for name, value in self._values.items()}
        self._servers.pull(got, exact=True).wait()
        for name, value in self._values.items():
            value.copy_(got[name])
        if self.work_item.kind != "wait":
            self._state.step = self.step
            self._state.weight_total.fill_(self._weight)

    @property
    def step(self) -> int:
        """Where the servers stand, at a save or the end."""
        return self.work_item.number // self._plan.mesh.dp_replicate

    def finish_save(self) -> None:
        """What was to be done at this step is done."""
        self._saved_at = self.step
        self._servers.mark_done(self.work_item)

    @property
    def owns_save(self) -> bool:
        """Whether the save at which the run stands is this worker's."""
        return self._saved_at == self.step and self.work_item.kind != "wait"

    # --- state -----------------------------------------------------------------------------------------------------

    def fetch_optimizer_state(self) -> None:
        """Have the optimizer's state here, until ``drop``."""
        for path, tensor in self._servers.state().items():
            if path.startswith("optim/"):
                _, name, key = path.split("/", 2)
                self._optimizer.state[self._parameters[key]][name] = tensor

    def drop_optimizer_state(self) -> None:
        """Let the optimizer's state go: the servers have it."""
        self._optimizer.state.clear()

    def after_step(self, step: int, good: Tensor) -> None:
        """Pushes settle themselves: one that did not count was not made."""

    def global_state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """What the codec holds back of this worker's gradients."""
        return self._servers.residuals()

    def load_rank_state(self, own: Mapping[str, Tensor] | None) -> None:
        """Workers come and go: what one held back is not another's, and starts at zero."""

    def close(self) -> None:
        """Leave; what this worker was dealt and has not done is dealt to others."""
        self._servers.close()

    # --- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, wait: bool) -> int | None:
        if self._bounded and not wait:
            return None  # what is taken ahead, others wait for
        work, self._kept = self._kept or (self._claimed() if wait else self._ask(wait=False)), None
        if work.kind == "unit":
            return work.number
        if work.kind != "wait":
            self.work_item = work
        return None

    def _claimed(self) -> WorkItem:
        while (work := self._ask(wait=True)).kind == "wait":
            pass
        return work

    def _ask(self, *, wait: bool) -> WorkItem:
        claimed = self._servers.claim(wait=wait)
        self._weight, self.is_final_save = claimed.weight, claimed.is_last
        return claimed.item


def check_async_data(data: Any) -> None:
    """Raises ConfigError for what cannot be dealt."""
    if not isinstance(data, Loader):
        raise ConfigError(
            given=f"plan.sync 'dist_async' with a stream ({type(data).__name__})",
            rule="shares of steps are dealt to whoever is free, so any sample can be read at any time",
            consequence="a worker could not read the share it was dealt",
            nearest="a data set with a length, or plan.sync='dist_sync'",
        )


def _server_addresses(job: JobSpec) -> list[tuple[str, int]]:
    if not job.server_addresses:
        raise LaunchError(
            given=f"plan.sync 'dist_async' in a job that {job.source} started without parameter servers",
            rule="asynchronous workers meet at servers",
            consequence="there is nobody to push gradients to, so nothing was started",
            nearest="unisono train (it starts launch.num_servers of them), or unisono launch --servers 1 -- unisono train",
        )
    found: list[tuple[str, int]] = []
    for text in job.server_addresses:
        host, _, port = text.rpartition(":")
        found.append((host, int(port)))
    return found


def _is_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _empty_host_like(tensor: Tensor) -> Tensor:
    """Empty host memory for it, pinned where copies from and to its device are faster then."""
    pin = tensor.device.type not in ("cpu", "mps", "meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)

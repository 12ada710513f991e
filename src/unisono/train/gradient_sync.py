"""How the ranks of a plan are kept in step: who sums gradients, and what is remembered from step to step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from unisono.dist import JobSpec, World, join_world
from unisono.errors import ConfigError
from unisono.kvstore import GradientSync, KVStore, LocalSGD, LocalSGDConfig, create_kvstore
from unisono.kvstore.allreduce.buckets import BucketedAllReduce, transport_name
from unisono.kvstore.backends.local import LocalGradientSync
from unisono.kvstore.compression import Codec, auto_codec, find_codec
from unisono.kvstore.compression.registry import COARSE_CODEC_WITH_ADAM
from unisono.observe.events import EventLog
from unisono.parallel.fsdp import FSDPGradients
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.tensor.dtensor_placements import DTensorGradients
from unisono.plan.plan import Plan
from unisono.train.comm_stats import CommStats, PeerTraffic, ReportsTraffic
from unisono.train.options import TrainOptions, is_due
from unisono.train.state import SyncState

_EVENT_EVERY_STEPS = 100  # it waits for the device
_COARSE, _ADAPTIVE = ("1bit", "2bit"), ("adam", "adamw", "lamb")


def check_sync_options(plan: Plan, options: TrainOptions) -> None:
    """Raises ConfigError for what ranks that are apart cannot do."""
    if options.ema_decay and plan.sync.kind in ("dist_async", "dist_local"):
        raise ConfigError(
            given=f"train.ema_decay {options.ema_decay} with plan.sync.kind {plan.sync.kind!r}",
            rule="a moving average is of weights that all ranks have in every step",
            consequence="each rank would have an average of its own",
            nearest="train.ema_decay=0, or plan.sync='dist_sync'",
        )


def open_store(plan: Plan, world: World) -> KVStore:
    """The store of the plan's kind; of asynchronous workers each has one of its own, beside the servers."""
    if plan.sync.kind == "dist_async":
        return create_kvstore("local", world)
    if plan.sync.kind == "dist_local":
        return create_kvstore(plan.sync.kind, world, local_sgd=local_sgd_config(plan))
    return create_kvstore(plan.sync.kind, world)


def init_distributed(plan: Plan, job: JobSpec, device_type: str, timeout_s: float) -> World:
    """The ranks that keep step with this one: all of the job, or, asynchronously, none (docs/adr/0010)."""
    return (
        World.alone(job)
        if plan.sync.kind == "dist_async"
        else join_world(job, device_type=device_type, timeout_s=timeout_s)
    )


def local_sgd_config(plan: Plan) -> LocalSGDConfig:
    """When ``dist_local`` averages."""
    return LocalSGDConfig(
        local_steps=plan.sync.local_steps,
        outer_lr=plan.sync.outer_lr,
        outer_momentum=plan.sync.outer_momentum,
        num_fragments=plan.sync.num_fragments,
        outer_delay_steps=plan.sync.outer_delay_steps,
    )


def build_gradient_sync(
    plan: Plan,
    store: KVStore,
    model: nn.Module,
    pieces: ShardedParameters,
    grid: ParallelDims,
    *,
    optimizer: str,
    step: Callable[[], int],
    events: EventLog,
) -> tuple[GradientSync, SyncState | None]:
    """What sums the gradients of ``pieces``, and what it has to remember. ``step()``: finished steps of the run."""
    device = next(iter(pieces.parameters.values())).device
    if plan.uses_fsdp:
        return FSDPGradients(model, pieces, grid), None
    if plan.tensor_parallel.placements:
        return DTensorGradients(model, pieces, grid), None
    codec = _choose_codec(plan, grid, device, optimizer, events)
    if plan.sync.kind == "dist_local":
        found = None if codec == "none" else cast(Codec, find_codec(codec))  # the plan has no factors here
        rounds = LocalSGDSync(plan, pieces.parameters, grid.world, step, found)
        return rounds, rounds
    group = grid.group("dp_replicate") if plan.is_model_sharded else None
    if codec != "none":
        store.set_compression(codec)
    travels = pieces.grad_reduce_dtypes if codec == "none" else None
    sync = store.gradients(pieces.parameters, group, travels, plan.sync.bucket_bytes)
    if not isinstance(sync, BucketedAllReduce):
        return sync, None
    events.emit("gradients", path=sync.path)
    return sync, CompressionState(sync, events) if codec != "none" else None


def _choose_codec(plan: Plan, grid: ParallelDims, device: torch.device, optimizer: str, events: EventLog) -> str:
    """The codec of gradients, with ``auto`` measured here; what was chosen, and why, is an event."""
    chosen = plan.sync.compression
    if chosen == "none":
        return chosen
    why = compression_reason(chosen, optimizer)
    if chosen == "auto":
        choice = auto_codec(grid.world, device, group=grid.group("dp_replicate") if plan.is_model_sharded else None)
        chosen, why = choice.codec or "none", choice.reason
    events.emit("compression", asked=plan.sync.compression, codec=chosen, why=why)
    return chosen


def compression_reason(codec: str, optimizer: str) -> str:
    """What the event of a codec that was asked for says: that, or what is doubtful about it with this optimizer."""
    return COARSE_CODEC_WITH_ADAM if codec.startswith(_COARSE) and optimizer in _ADAPTIVE else "as asked"


@dataclass(frozen=True, slots=True)
class CompressionState:
    """What a codec holds back of this rank's gradients."""

    sync: BucketedAllReduce
    events: EventLog
    params_diverge: bool = False

    def after_step(self, step: int, good: Tensor) -> None:
        """A step that did not count leaves no trace. Now and then an event tells bytes and what is held back."""
        self.sync.commit(good)
        if is_due(_EVENT_EVERY_STEPS, step):
            told = self.sync.stats()
            self.events.emit(
                "compressed",
                step=step,
                bytes_in=sum(each["bytes_in"] for each in told.values()),
                bytes_out=sum(each["bytes_out"] for each in told.values()),
                residual_norms={name: each["residual"] for name, each in told.items()},
            )

    def global_state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """Residuals and factors."""
        return self.sync.state_dict()

    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """With other ranks or from a run without a codec, what was held back starts at zero."""
        if tensors:
            self.sync.load_state_dict(tensors)

    def consensus_parameters(self) -> AbstractContextManager[None]:
        """See ``SyncState``: parameters do not diverge."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _AllReduceTraffic:
    """What ``sync`` counts, for the one link to all other ranks."""

    sync: BucketedAllReduce

    def peer_traffic(self) -> list[PeerTraffic]:
        """See ``Counts``."""
        sync = self.sync
        return [PeerTraffic(peer=sync.path, sent_bytes=sync.sent_bytes, received_bytes=sync.received_bytes)]


def build_comm_stats(events: EventLog, keeps: GradientSync | ReportsTraffic) -> CommStats | None:
    """The events of what ``keeps`` this rank in step; None where torch sends the gradients, or nothing is sent."""
    if isinstance(keeps, BucketedAllReduce):
        if keeps.num_workers == 1:
            return None
        keeps = _AllReduceTraffic(keeps)
    return CommStats(events, keeps.peer_traffic) if isinstance(keeps, ReportsTraffic) else None


class LocalSGDSync:
    """``dist_local``: every rank makes steps of its own, and what they come to is averaged (see ``kvstore.periodic``).

    Loss, norm and clip are then this rank's. Ranks agree to stop where a round of averages begins.
    """

    params_diverge = True

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        step: Callable[[], int],
        codec: Codec | None = None,
    ) -> None:
        self._world, self._step = world, step
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._gradients = LocalGradientSync(self._parameters)
        self._rounds = LocalSGD(self._parameters, world, local_sgd_config(plan), codec)
        self.prepare_last_backward, self.gradients, self.zero_grad = (
            self._gradients.prepare_last_backward,
            self._gradients.gradients,
            self._gradients.zero_grad,
        )
        self.close = self._gradients.close

    def wait(self, totals: Tensor) -> None:
        """This rank's own totals; the last one, requests to stop, summed over ranks where they meet, else 0."""
        self._gradients.wait(totals)
        asked = totals[-1:].clone()
        totals[-1] = 0
        if self._rounds.due_fragments(self._step()):
            totals[-1:] = self._world.all_reduce(asked)

    def after_step(self, step: int, good: Tensor) -> None:
        """Average what is due behind ``step``, also where this rank's own step did not count."""
        self._rounds.after_step(step - 1)

    def peer_traffic(self) -> list[PeerTraffic]:
        """One, to all other ranks."""
        sent_bytes, received_bytes = self._rounds.sent_bytes, self._rounds.received_bytes
        return [
            PeerTraffic(peer=transport_name(self._world.group), sent_bytes=sent_bytes, received_bytes=received_bytes)
        ]

    def global_state(self) -> dict[str, Tensor]:
        """What ranks agree on, in place of their own parameters, and the outer momentum."""
        outer = self._rounds.outer_state()
        names = self._parameters
        return {f"model/{name}": outer[name] for name in names} | {
            f"outer/momentum/{name}": outer[f"momentum/{name}"] for name in names
        }

    def rank_state(self) -> dict[str, Tensor]:
        """Averages under way, and what a codec holds back."""
        return self._rounds.in_flight_state()

    @torch.no_grad()
    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Without what this rank had, it starts where all agree, with the optimizer state of whichever rank saved it."""
        if tensors is not None:
            self._rounds.load_in_flight_state(tensors)
        else:
            outer = self._rounds.outer_state()
            for name, parameter in self._parameters.items():
                parameter.copy_(outer[name])

    @contextmanager
    def consensus_parameters(self) -> Generator[None]:
        """Inside, the model's parameters are those that all ranks agree on."""
        outer = self._rounds.outer_state()
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self._parameters.items()}
            for name, p in self._parameters.items():
                p.copy_(outer[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self._parameters.items():
                    p.copy_(kept[name])

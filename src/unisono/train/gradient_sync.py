"""Gradient synchronisation by plan.sync, and the state that it keeps from step to step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.data.options import default_cache_dir
from unisono.dist import World
from unisono.errors import ConfigError, inert_problem
from unisono.kvstore import GradientSync, KVStore, LocalSGD, LocalSGDConfig
from unisono.kvstore.allreduce.buckets import COMPRESSED, BucketedAllReduce, transport_name
from unisono.kvstore.backends.local import LocalGradientSync
from unisono.kvstore.compression import Codec, auto_codec, find_codec
from unisono.kvstore.compression.registry import COARSE_CODEC_WITH_ADAM
from unisono.measure.calibration import CALIBRATION_FILE, read_calibration
from unisono.observe.events import EventLog
from unisono.parallel.fsdp import FSDPGradients
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.tensor.dtensor_traffic import DTensorCollectives
from unisono.parallel.traffic import Traffic
from unisono.plan.plan import Plan
from unisono.train.comm_stats import CommStats, GradientTraffic, PeerTraffic, ReportsTraffic, measured_link
from unisono.train.ema import swapped_values
from unisono.train.options import TrainOptions, is_due
from unisono.train.state import SyncState

_EVENT_EVERY_STEPS = 100  # it waits for the device
_COARSE, _ADAPTIVE = ("1bit", "2bit"), ("adam", "adamw", "lamb")


def check_train_options(plan: Plan, options: TrainOptions) -> None:
    """Raise ConfigError for options that the plan makes impossible or leaves without effect."""
    if not plan.precision.uses_loss_scale and options.loss_scale != TrainOptions().loss_scale:
        raise ConfigError(
            inert_problem(
                f"train.loss_scale {options.loss_scale:g} with precision {plan.precision.compute!r}",
                "only fp16 needs a loss scale: its gradients underflow",
                "plan.precision=fp16, or leave train.loss_scale out",
            )
        )
    if options.ema_decay and plan.sync.kind in ("dist_async", "dist_local"):
        raise ConfigError(
            given=f"train.ema_decay {options.ema_decay} with plan.sync {plan.sync.kind!r}",
            rule="a moving average is of weights that all ranks have in every step",
            consequence="each rank would have an average of its own",
            nearest="train.ema_decay=0, or plan.sync='dist_sync'",
        )


def local_sgd_config(plan: Plan) -> LocalSGDConfig:
    """Settings of ``dist_local``: when and how ranks average their parameters."""
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
    sharded: ShardedParameters,
    dims: ParallelDims,
    *,
    optimizer: str,
    step: Callable[[], int],
    events: EventLog,
) -> tuple[GradientSync, SyncState | None]:
    """Create the synchronisation of gradients of ``sharded`` over data ranks, and the state it keeps, if any.

    ``optimizer`` is its kind; ``step()`` returns the number of finished steps.
    """
    device = next(iter(sharded.parameters.values())).device
    if plan.uses_fsdp:
        return FSDPGradients(model, sharded, dims), None
    codec = _choose_codec(plan, dims, device, optimizer, events)
    if plan.sync.kind == "dist_local":
        # the plan allows no low-rank codec here
        delta_codec = None if codec == "none" else cast(Codec, find_codec(codec))
        local_sgd = LocalSGDSync(plan, sharded.parameters, dims.world, step, delta_codec)
        return local_sgd, local_sgd
    group = dims.group("dp_replicate") if plan.is_model_sharded else None
    if codec != "none":
        store.set_compression(codec)
    reduce_dtypes = sharded.grad_reduce_dtypes if codec == "none" else None
    sync = store.gradients(sharded.parameters, group, reduce_dtypes, plan.sync.bucket_bytes)
    if not isinstance(sync, BucketedAllReduce):
        return sync, None
    events.emit("gradients", path=sync.transport)
    return sync, CompressionState(sync, events) if codec != "none" else None


def _choose_codec(plan: Plan, dims: ParallelDims, device: torch.device, optimizer: str, events: EventLog) -> str:
    """Return the codec of gradients, measuring which one pays for ``auto``, and emit the choice with its reason."""
    chosen = plan.sync.compression
    if chosen == "none":
        return chosen
    why = compression_reason(chosen, optimizer)
    if chosen == "auto":
        choice = auto_codec(dims.world, device, group=dims.group("dp_replicate") if plan.is_model_sharded else None)
        chosen, why = choice.codec or "none", choice.reason
    events.emit("compression", asked=plan.sync.compression, codec=chosen, why=why)
    return chosen


def compression_reason(codec: str, optimizer: str) -> str:
    """The reason given for a codec that the user chose; it warns of a coarse codec with an adaptive optimizer."""
    return COARSE_CODEC_WITH_ADAM if codec.startswith(_COARSE) and optimizer in _ADAPTIVE else "as asked"


@dataclass(frozen=True, slots=True)
class CompressionState(SyncState):
    """The part of this rank's gradients that a codec has not sent yet (error feedback), and factors of low-rank codecs."""

    sync: BucketedAllReduce
    events: EventLog

    def after_step(self, step: int, good: Tensor) -> None:
        """Keep the residuals of this step if it counted. Every hundred steps emit bytes and residual norms."""
        self.sync.commit(good)
        if is_due(_EVENT_EVERY_STEPS, step):
            stats = self.sync.stats()
            self.events.emit(
                "compressed",
                step=step,
                bytes_in=sum(key["bytes_in"] for key in stats.values()),
                bytes_out=sum(key["bytes_out"] for key in stats.values()),
                residual_norms={name: key["residual"] for name, key in stats.items()},
            )

    def rank_state(self) -> dict[str, Tensor]:
        """See ``SyncState``: residuals and factors."""
        return self.sync.state_dict()

    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """See ``SyncState``: residuals start at zero for a new rank, or after a run without a codec."""
        if tensors:
            self.sync.load_state_dict(tensors)


def build_comm_stats(events: EventLog, sync: GradientSync | ReportsTraffic, dims: ParallelDims) -> CommStats | None:
    """The statistics of the ranks of ``dims``, which ``sync`` synchronises; None where nothing is exchanged."""
    plan, world = dims.plan, dims.world
    if isinstance(sync, ReportsTraffic) and not isinstance(sync, LocalSGDSync):
        return CommStats(events, sync.peer_traffic)  # with servers
    if world.world_size == 1:
        return None
    known = read_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE)
    traffic = Traffic(world, compiled=plan.backend.compile != "off")
    num_hosts = -(-world.world_size // world.job.local_world)
    if isinstance(sync, LocalSGDSync):
        counted = GradientTraffic(
            sync.local_sgd,
            sync.peer_traffic()[0].peer,
            ranks=world.world_size,
            hosts=num_hosts,
            compressed=sync.compressed,
        )
        return CommStats(events, sync.peer_traffic, traffic=traffic, sums=counted, measured=known)
    of_dtensor: dict[str, Any] = {}
    if plan.tensor_parallel.dtensor_placements:
        sampled = Traffic(world)
        of_dtensor = {"sample": DTensorCollectives(sampled, dims.group("tp")), "sampled": sampled}
    if not isinstance(sync, BucketedAllReduce) or sync.num_workers == 1:
        return CommStats(events, tuple, traffic=traffic, measured=known, **of_dtensor)
    facts: dict[str, Any] = {}
    compressed = sync.transport.endswith(COMPRESSED)
    if sync.num_workers == world.world_size and not compressed:
        facts = measured_link(known, sync.transport, sync.bucket_nbytes, ranks=world.world_size, num_hosts=num_hosts)
    counted = GradientTraffic(
        sync,
        sync.transport,
        ranks=sync.num_workers,
        hosts=len({rank // world.job.local_world for rank in dims.ranks_along("dp_replicate")}),
        sizes=() if compressed else sync.bucket_nbytes,
        compressed=compressed,
    )

    def peers() -> list[PeerTraffic]:
        return [PeerTraffic(sync.transport, sync.sent_bytes, sync.received_bytes, facts)]

    return CommStats(events, peers, traffic=traffic, sums=counted, measured=known, **of_dtensor)


class LocalSGDSync(SyncState):
    """``dist_local``: every rank makes its own steps, and parameters are averaged periodically (``kvstore.LocalSGD``).

    Loss, gradient norm and clipping are per rank. A rank that was asked to stop tells the others when they next average.
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
        self.compressed = codec is not None
        self.local_sgd = LocalSGD(self._parameters, world, local_sgd_config(plan), codec)

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """See ``GradientSync``."""
        self._gradients.prepare_last_backward(part)

    def wait(self, totals: Tensor) -> None:
        """Leave ``totals`` this rank's own, except requests to stop, the last: their sum where ranks average next, else 0."""
        self._gradients.wait(totals)
        stop_requests = totals[-1:].clone()
        totals[-1] = 0
        if self.local_sgd.due_fragments(self._step()):
            totals[-1:] = self._world.all_reduce(stop_requests)

    def gradients(self) -> list[Tensor]:
        """See ``GradientSync``."""
        return self._gradients.gradients()

    def zero_grad(self) -> None:
        """See ``GradientSync``."""
        self._gradients.zero_grad()

    def close(self) -> None:
        """See ``GradientSync``."""
        self._gradients.close()

    def after_step(self, step: int, good: Tensor) -> None:
        """Average the fragments that are due after ``step``, also if this rank's own step did not count."""
        self.local_sgd.after_step(step - 1)

    def peer_traffic(self) -> list[PeerTraffic]:
        """See ``ReportsTraffic``: all other ranks are one peer."""
        sent_bytes, received_bytes = self.local_sgd.sent_bytes, self.local_sgd.received_bytes
        return [PeerTraffic(transport_name(self._world.group), sent_bytes, received_bytes)]

    def global_state(self) -> dict[str, Tensor]:
        """See ``SyncState``: the averaged parameters, in place of this rank's, and the outer momentum."""
        outer = self.local_sgd.outer_state()
        names = self._parameters
        return {f"model/{name}": outer[name] for name in names} | {
            f"outer/momentum/{name}": outer[f"momentum/{name}"] for name in names
        }

    def rank_state(self) -> dict[str, Tensor]:
        """See ``SyncState``: averages in flight, and residuals of a codec."""
        return self.local_sgd.in_flight_state()

    @torch.no_grad()
    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """See ``SyncState``: a new rank starts from the averaged parameters, with the optimizer state that one rank saved."""
        if tensors is not None:
            self.local_sgd.load_in_flight_state(tensors)
        else:
            outer = self.local_sgd.outer_state()
            for name, parameter in self._parameters.items():
                parameter.copy_(outer[name])

    def consensus_parameters(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged parameters."""
        return swapped_values(self._parameters, self.local_sgd.outer_state())

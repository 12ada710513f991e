"""One optimizer step, from micro-batches on the device to updated parameters. It is the hot path.

A plain step never waits for the device; experts, gradient statistics, taps, the statistics of a codec and ``dist_async`` do.

forward, backward   per micro-batch; gradients of the summed loss accumulate
reduce              sum gradients and totals over data ranks, overlapped with the last backward pass
guard, clip         by factors on the device: gradients are read once
update              or leave every tensor bit-equal, by the same device flag on every rank
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unisono.data.loading.loader import StepBatch
from unisono.dist import StopNotice, World, fault_point
from unisono.errors import PlanError
from unisono.kvstore import GradientSync
from unisono.models.moe import set_balance_loss_scale, update_router_biases
from unisono.observe.meters import StepTimers
from unisono.optim import clip_coefficient
from unisono.parallel.context import ContextParallel
from unisono.parallel.device import autocast, shared_casts
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.sharding import GradGroups
from unisono.parallel.timed_collectives import count_in_backward
from unisono.plan.plan import Plan
from unisono.train.named_losses import NamedLosses
from unisono.train.objectives import Batch, Objective, counted_labels
from unisono.train.profiling import ProfileScheduler
from unisono.train.state import TrainState
from unisono.train.taps import TapReading, Taps

# Places in ``Step.stats``
LOSS, NORM, GOOD, WEIGHT, COUNTED, STOP, RANK_LOSS, NAMED = range(8)
# added by rank 0 to the number of ranks asked to stop: the same sum then tells all ranks that a profile was requested
PROFILE_REQUESTED = 2.0**-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One finished optimizer step. ``index`` counts from 1; ``sample_ids`` are this rank's, in order; ``lr`` was used.

    ``epoch`` is the epoch that it belongs to, counted from 1; that of its first sample, where it spans two.

    ``stats`` [7 + n] is on the device: loss, gradient norm, 1 if the step counted, weight, the number of tokens or samples that
    throughput counts, number of ranks asked to stop, the sum of this rank's losses, and the n losses of ``loss_names``.
    """

    index: int
    epoch: int
    sample_ids: NDArray[np.int64]
    lr: float
    stats: Tensor
    loss_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        return f"Step({self.index}, loss={self.loss:.4g}, grad_norm={self.grad_norm:.4g}, lr={self.lr:.4g}{skipped})"

    @property
    def loss(self) -> float:
        """Mean loss over the step's global batch; reading it waits for the device."""
        return float(self.stats[LOSS])

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss over the whole model, before clipping; reading it waits for the device."""
        return float(self.stats[NORM])

    @property
    def weight(self) -> float:
        """Sum of the weights that the loss was divided by, such as tokens or samples; reading it waits for the device."""
        return float(self.stats[WEIGHT])

    @property
    def stopping(self) -> bool:
        """Whether a signal asked any rank to stop; reading it waits for the device."""
        return bool(self.stats[STOP] >= 1)

    @property
    def rank_loss(self) -> float:
        """Sum of the losses of this rank's samples alone; reading it waits for the device."""
        return float(self.stats[RANK_LOSS])

    @property
    def losses(self) -> dict[str, float]:
        """The losses that the objective returned by name, means over the global batch; reading them waits for the device."""
        return dict(zip(self.loss_names, self.stats[NAMED:].tolist(), strict=True))

    @property
    def skipped(self) -> bool:
        """Whether the guard refused the step, which then changed nothing; reading it waits for the device."""
        return not bool(self.stats[GOOD])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """Makes one optimizer step of a batch whose micro-batches are on the device.

    ``count_units`` gives the number [] of tokens or samples in a micro-batch that throughput counts; None takes the weight.
    """

    forward_backward: ForwardBackward
    objective: Objective
    named_losses: NamedLosses
    clip_norm: float
    plan: Plan
    state: TrainState
    sync: GradientSync
    partial_grad_groups: GradGroups
    timers: StepTimers
    stop_notice: StopNotice | None
    profiler: ProfileScheduler
    observe_gradients: Callable[[int, list[Tensor], Tensor], None]
    taps: Taps
    count_units: Callable[[Batch], Tensor] | None = None

    def run(self, batch: StepBatch) -> Step:
        """Consume one step's micro-batches; ``state.step`` is one higher afterwards."""
        state, timers = self.state, self.timers
        loss_factor = state.loss_scaler.value / self.plan.batch.global_batch
        set_balance_loss_scale(self.forward_backward.model, loss_factor)
        # loss sum, weight, counted units, number of ranks asked to stop
        totals = torch.zeros(4, dtype=state.weight_total.dtype, device=state.weight_total.device)

        def scaled_loss(outputs: Any, micro_batch: Batch) -> Tensor:
            losses, weight = self.objective(outputs, micro_batch)
            loss_sum = self.named_losses.add(losses)
            totals[0] += loss_sum.detach()
            totals[1] += weight
            totals[2] += weight if self.count_units is None else self.count_units(micro_batch)
            return loss_sum * loss_factor

        frozen = state.optimizer.frozen(state.step)
        tap = self.taps.reading(state.step)
        with self.without_gradients(frozen), tap or nullcontext():
            self.forward_backward.train(batch.micro_batches, scaled_loss, self.sync, timers, state.step)
        totals[3] = float(self.stop_notice is not None and self.stop_notice.requested)
        if self.profiler.is_requested(time.monotonic()):
            totals[3] += PROFILE_REQUESTED
        rank_loss = totals[0].clone()  # which rank's samples made a loss that is no number
        with timers.comm_exposed("dp"):
            self.sync.wait(totals)
            state.sharded.sum_partial_grads(self.partial_grad_groups)
            named = self.named_losses.take(totals) / totals[1]
        fault_point("all_reduce", state.step)
        with timers.phase("optimizer"):
            lr, stats = self._update(totals, rank_loss, frozen, tap)
        state.step += 1
        fault_point("optimizer", state.step - 1)
        names = self.named_losses.names or ()
        return Step(
            index=state.step,
            epoch=batch.epoch + 1,
            sample_ids=batch.sample_ids,
            lr=lr,
            stats=torch.cat([stats, named]) if names else stats,
            loss_names=names,
        )

    @contextmanager
    def without_gradients(self, frozen: Sequence[nn.Parameter]) -> Generator[None]:
        """Inside, ``frozen`` require no gradient, where this rank has the whole model; shards drop theirs in ``_update``."""
        self.state.sharded.require_same_trained()
        switched = [] if self.plan.is_model_sharded else frozen
        for parameter in switched:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in switched:
                parameter.requires_grad_(True)

    @torch.no_grad()
    def _update(
        self, totals: Tensor, rank_loss: Tensor, frozen: Sequence[nn.Parameter], tap: TapReading | None
    ) -> tuple[float, Tensor]:
        """Guard, clip and update all but ``frozen``; returns the learning rate and ``Step.stats``."""
        state = self.state
        for parameter in frozen if self.plan.is_model_sharded else ():
            cast(Tensor, parameter.grad).zero_()  # no part of the norm
        # totals hold each weight tp times: tensor-parallel ranks see the same samples
        loss, weight = totals[0] / totals[1], totals[1] / self.plan.mesh.tp
        gradients = self.sync.gradients()
        # gradients are d(loss_sum · scale / global_batch); dividing by this makes them d(loss_sum / weight), or d(loss_sum)
        normalizer = weight if self.plan.sync.reduction == "mean" else torch.ones_like(weight)
        divisor = (state.loss_scaler.value * normalizer / self.plan.batch.global_batch).float()
        norm = state.sharded.global_norm(gradients) / divisor
        good = state.guard.accept(loss, norm)
        self.observe_gradients(state.step, gradients, divisor)
        if tap is not None:
            tap.before_update(gradients, divisor)
        lr = state.learning_rates.apply(state.step)
        grad_scale = divisor / clip_coefficient(norm, self.clip_norm) if self.clip_norm else divisor
        for parameter in frozen:
            parameter.grad = None  # an optimizer passes over it, without decay or momentum
        state.optimizer.step(grad_scale, (~good).float())
        if tap is not None:
            tap.emit(state.step + 1, good)
        state.learning_rates.after_step()
        update_router_biases(self.forward_backward.model, state.sharded.sum_over_data_ranks, good)
        state.loss_scaler.update(~norm.isfinite())
        if state.average is not None:
            state.average.update(good)
        weight_and_units = torch.stack([weight, totals[2] / self.plan.mesh.tp])
        counted = weight_and_units.nan_to_num(nan=0.0, posinf=0.0)  # a poisoned weight must not outlive its step
        if state.sync_state is not None and state.sync_state.params_diverge:
            # the other ranks made as large a step and did not send its weight
            counted = counted * self.plan.mesh.dp_world_size
        state.weight_total += counted[1]
        self.sync.zero_grad()
        if state.sync_state is not None:
            state.sync_state.after_step(state.step + 1, good)
        return lr, torch.stack([loss, norm.to(loss.dtype), good.to(loss.dtype), *counted, totals[3], rank_loss])


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward:
    """Passes of micro-batches through the model as the plan has it: whole on this rank, or as stages of a pipeline.

    ``inputs(batch)`` selects what ``model.forward`` takes. ``context`` shards sequences where ranks share them. ``before_loss``
    is called with each whole micro-batch that is trained on, after its forward pass.
    """

    model: nn.Module
    inputs: Callable[[Batch], dict[str, Tensor]]
    plan: Plan
    world: World
    context: ContextParallel | None = None
    pipeline: PipelineExecutor | None = None
    before_loss: Callable[[Batch], None] | None = None

    def train(
        self,
        micro_batches: Sequence[Batch],
        loss: Callable[[Any, Batch], Tensor],
        sync: GradientSync,
        timers: StepTimers,
        step: int,
    ) -> None:
        """Accumulate the gradients of ``loss(outputs, micro_batch)`` []; ``sync`` is prepared before the last backward pass."""
        if self.pipeline is not None:
            stages = _StagePasses(self, micro_batches)
            phase = partial(stages.phase, timers, step)
            casts = shared_casts(self.plan.precision.compute, self.plan.mesh.device)
            with timers.phase("bubble"), casts:  # time outside the passes is spent waiting for other stages
                self.pipeline.forward_backward(stages.sharded, stages.forward, loss, sync.prepare_last_backward, phase)
            return
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.whole_sequences(micro_batch):
                with timers.phase("forward"):
                    sharded = self.shard_sequences(micro_batch)
                    with self.world.explain_collective_errors("forward pass"), self.autocast():
                        outputs = self.model(**self.inputs(sharded))
                        if self.before_loss is not None:
                            self.before_loss(micro_batch)
                        value = loss(outputs, sharded)
                        del outputs
                fault_point("forward", step)
                if number == len(micro_batches):
                    sync.prepare_last_backward()
                with timers.phase("backward"), self.world.explain_collective_errors("backward pass"):
                    count_in_backward(value)
                    value.backward()
            fault_point("backward", step)

    def evaluate(self, micro_batches: Sequence[Batch], consume: Callable[[int, Any, Batch], None]) -> None:
        """Call ``consume(number, outputs, micro_batch)`` for each of ``micro_batches``; in a pipeline on its last stage only."""
        if self.pipeline is not None:
            stages = _StagePasses(self, micro_batches)
            returned = self.pipeline.evaluate(stages.sharded, stages.forward)
            if self.pipeline.has_last_stage:
                with self.autocast():
                    for number, (outputs, sharded) in enumerate(zip(returned, stages.sharded, strict=True)):
                        consume(number, outputs, sharded)
            return
        for number, micro_batch in enumerate(micro_batches):
            sharded = self.shard_sequences(micro_batch)
            with (
                self.whole_sequences(micro_batch),
                self.world.explain_collective_errors("forward pass of an evaluation"),
                self.autocast(),
            ):
                consume(number, self.model(**self.inputs(sharded)), sharded)

    def autocast(self, *, shares_casts: bool = True) -> AbstractContextManager[Any]:
        """The context of a forward pass; ``shares_casts`` as that of ``autocast``, where the plan lets weights stay."""
        plan, recompute = self.plan, self.plan.recompute
        # in a pipeline that recomputes some blocks, copies of the others are there anyway
        keeps_some = self.pipeline is not None and bool(recompute.blocks_per_stage)
        frees_weights = plan.uses_fsdp or (recompute.mode != "none" and not keeps_some)
        return autocast(plan.precision.compute, plan.mesh.device, keeps_casts=shares_casts and not frees_weights)

    def shard_sequences(self, micro_batch: Batch) -> Batch:
        """This rank's part of each sequence; the full sequence without context parallelism."""
        return micro_batch if self.context is None else self.context.shard_batch(micro_batch)

    def whole_sequences(self, micro_batch: Batch) -> AbstractContextManager[Any]:
        """A context in which ranks that share sequences attend over the full sequences of ``micro_batch``."""
        return nullcontext() if self.context is None else self.context.micro_batch(micro_batch)


class _StagePasses:
    """Passes of one step or evaluation that a pipeline calls, by this rank's part of each micro-batch."""

    def __init__(self, forward_backward: ForwardBackward, micro_batches: Sequence[Batch]) -> None:
        self.sharded = [forward_backward.shard_sequences(micro_batch) for micro_batch in micro_batches]
        self._forward_backward = forward_backward
        self._whole = {id(sharded): whole for sharded, whole in zip(self.sharded, micro_batches, strict=True)}

    def _autocast(self, sharded: Batch) -> AbstractContextManager[Any]:
        """Weights are converted once for all micro-batches but the last: autograd runs a shared one at the end of a backward
        pass, and the sums of gradients start in the last one."""
        return self._forward_backward.autocast(shares_casts=sharded is not self.sharded[-1])

    def forward(self, sharded: Batch) -> Any:
        """Run the model, of which the pipeline has activated one stage."""
        forward_backward = self._forward_backward
        with (
            forward_backward.whole_sequences(self._whole[id(sharded)]),
            forward_backward.world.explain_collective_errors("forward pass"),
            self._autocast(sharded),
        ):
            return forward_backward.model(**forward_backward.inputs(sharded))

    @contextmanager
    def phase(self, timers: StepTimers, step: int, kind: str, sharded: Batch) -> Generator[None]:
        """Time one pass; ``kind`` is forward (with its loss) or backward, which recompute may run forward passes in."""
        precision = self._autocast(sharded) if kind == "forward" else nullcontext()
        with timers.phase(kind), self._forward_backward.whole_sequences(self._whole[id(sharded)]), precision:
            yield
        fault_point(kind, step)


def input_selector(model: nn.Module) -> Callable[[Batch], dict[str, Tensor]]:
    """Return a function that picks the batch entries named like parameters of ``model.forward``.

    ``tokens`` and ``input_ids`` are the same entry, and models of transformers find our entries under their names. A forward
    with one required parameter takes ``inputs``, whatever the parameter is called. A forward with ``**kwargs`` gets all entries,
    unless the class is of transformers or peft. ``labels`` of weight 0 are -100.

    The function raises PlanError for a batch without an entry for a parameter that has no default, or without any for forward.
    """
    parameters = list(_forward_signature(model).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters) and not _is_of(model, "transformers", "peft")

    def source(name: str, batch: Batch) -> str:
        """The entry for the parameter ``name``; itself where there is none."""
        if name in batch:
            return name
        others = [_TOKEN_NAMES[name]] if name in _TOKEN_NAMES else []
        if needed == {name}:
            others.append("inputs")
        return next((other for other in others if other in batch and other not in names), name)

    def select(batch: Batch) -> dict[str, Tensor]:
        sources = {name: source(name, batch) for name in names}
        absent = sorted(name for name in needed if sources[name] not in batch)
        chosen = {name: batch[entry] for name, entry in sources.items() if entry in batch}
        if takes_all:
            chosen |= {name: entry for name, entry in batch.items() if name not in sources.values()}
        if absent or not chosen:
            raise PlanError(
                given=f"a batch with {', '.join(sorted(batch))} for {type(model).__name__}.forward({', '.join(names)})",
                rule="batch entries are passed to the parameters of the same name",
                consequence=f"forward would miss {', '.join(absent)}"
                if absent
                else "forward would get nothing of the batch",
                nearest="rename the parameter, or give the data set (or a transform) that entry",
            )
        labels = counted_labels(batch) if "labels" in chosen else None
        return chosen if labels is None else {**chosen, "labels": labels}

    return select


# names of the same entry: of our token data sets and models, and of transformers
_TOKEN_NAMES = {
    "tokens": "input_ids",
    "input_ids": "tokens",
    "token_type_ids": "segments",
    "pixel_values": "image",
}


def _forward_signature(model: nn.Module) -> inspect.Signature:
    """The signature of ``model.forward``; of an adapter's base model, where the adapter's takes anything."""
    signature = inspect.signature(model.forward)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if _is_of(model, "peft") and kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        base: nn.Module = cast(Any, model).get_base_model()
        return inspect.signature(base.forward)
    return signature


def _is_of(model: nn.Module, *packages: str) -> bool:
    """Whether a class of ``model`` is of one of ``packages``."""
    return any(kind.__module__.partition(".")[0] in packages for kind in type(model).__mro__)

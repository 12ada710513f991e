"""One step of training, start to end: the part that must be fast and must be right.

for each micro-batch: forward, backward        gradients of the summed loss pile up
sum gradients and totals over workers          overlapped with the last backward
divide by the global weight, guard, clip       all on the device, as factors: gradients are read once
update, or keep everything bit-equal           on the same device flag on every rank
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
from unisono.parallel.replicated_grads import ReplicatedGradients
from unisono.parallel.sharded_parameters import ShardedParameters
from unisono.plan.plan import Plan
from unisono.train.forward_backward import ForwardBackward
from unisono.train.objectives import Objective
from unisono.train.state import TrainState

# Places in ``Step.stats``
LOSS, NORM, GOOD, WEIGHT, STOP = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One finished optimizer update. ``index`` counts from 1; ``sample_ids`` are this rank's, in order; ``lr`` was used.

    ``stats`` [5] is on the device: loss, gradient norm, 1 if the step counted, weight, ranks that were asked to stop.
    """

    index: int
    sample_ids: NDArray[np.int64]
    lr: float
    stats: Tensor

    @property
    def loss(self) -> float:
        """Mean loss over the step's global batch; reading it waits for the device."""
        return float(self.stats[LOSS])

    @property
    def skipped(self) -> bool:
        """Whether the guard kept this step from changing anything; reading it waits for the device."""
        return not bool(self.stats[GOOD])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """The pieces of a step. ``run`` is the hot path: no host synchronisation in it."""

    forward_backward: ForwardBackward
    objective: Objective
    schedule: Callable[[int], float]
    clip_norm: float
    plan: Plan
    world: World
    device: torch.device
    state: TrainState
    sharded: ShardedParameters
    sync: GradientSync
    replicated_grads: ReplicatedGradients
    timers: StepTimers
    stop: StopNotice | None
    observe_gradients: Callable[[int, list[Tensor], Tensor], None]

    def run(self, batch: StepBatch) -> Step:
        """Consume one step's micro-batches; returns with ``state.step`` one higher."""
        state, timers = self.state, self.timers
        set_balance_loss_scale(self.forward_backward.model, state.loss_scale.scale / self.plan.batch.global_batch)
        totals = torch.zeros(3, dtype=torch.float64 if self.device.type != "mps" else torch.float32, device=self.device)

        def copied(micro: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with timers.phase("h2d"):
                return {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro.items()}

        def loss(outputs: Any, micro: Mapping[str, Tensor]) -> Tensor:
            loss_sum, weight = self.objective(outputs, micro)
            totals[0] += loss_sum.detach()
            totals[1] += weight
            return loss_sum * (state.loss_scale.scale / self.plan.batch.global_batch)

        self.forward_backward.train(
            batch.micro_batches, copied, loss, self.sync.prepare_last_backward, timers, state.step
        )
        totals[2] = float(self.stop is not None and self.stop.requested)
        with timers.phase("comm_exposed"):
            self.sync.wait(totals)
            self.replicated_grads.reduce(self.sharded)
        fault_point("all_reduce", state.step)
        with timers.phase("optimizer"):
            lr, stats = self._update(totals)
        state.step += 1
        fault_point("optimizer", state.step - 1)
        return Step(index=state.step, sample_ids=batch.sample_ids, lr=lr, stats=stats)

    @torch.no_grad()
    def _update(self, totals: Tensor) -> tuple[float, Tensor]:
        state = self.state
        loss, weight = totals[0] / totals[1], totals[1] / self.plan.mesh.tp  # the ranks of a layer saw the same samples
        gradients = self.sync.gradients()
        # gradients hold d(loss_sum · scale / global_batch); dividing by this makes them d(loss_sum / weight), or d(loss_sum)
        share = weight if self.plan.sync.reduction == "mean" else torch.ones_like(weight)
        divisor = (state.loss_scale.scale * share / self.plan.batch.global_batch).float()
        norm = self.sharded.global_norm(gradients) / divisor
        good = state.guard.accept(loss, norm)
        self.observe_gradients(state.step, gradients, divisor)
        lr = self.schedule(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        scale: Any = divisor / clip_coefficient(norm, self.clip_norm) if self.clip_norm else divisor
        state.optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        state.optimizer.found_inf = (~good).float()  # pyright: ignore[reportAttributeAccessIssue]
        state.optimizer.step()
        update_router_biases(self.forward_backward.model, self.sharded.sum_over_data_ranks, good)
        state.loss_scale.update(~norm.isfinite())
        if state.average is not None:
            state.average.update(good)
        counted = weight.nan_to_num(nan=0.0, posinf=0.0)  # a poisoned weight must not outlive its step
        if state.sync_state is not None and state.sync_state.params_diverge:
            counted = (
                counted * self.plan.mesh.dp_world_size
            )  # the others have as many samples, and have not told their weight
        state.weight_total += counted
        self.sync.zero_grad()
        if state.sync_state is not None:
            state.sync_state.after_step(state.step + 1, good)
        return lr, torch.stack([loss, norm.to(loss.dtype), good.to(loss.dtype), counted, totals[2]])


def input_selector(model: nn.Module) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Picks from a batch the entries that ``model.forward`` names.

    Raises PlanError at the first batch when a parameter without default has no entry.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}

    def select(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        absent = sorted(needed - batch.keys())
        if absent:
            raise PlanError(
                given=f"a batch with {', '.join(sorted(batch))} for {type(model).__name__}.forward({', '.join(names)})",
                rule="batch entries are passed to the parameters of the same name",
                consequence=f"forward would miss {', '.join(absent)}",
                nearest="rename the parameter, or give the data set (or a transform) that entry",
            )
        return {name: batch[name] for name in names if name in batch}

    return select

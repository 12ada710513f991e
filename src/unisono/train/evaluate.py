"""Evaluation: one pass over held-out samples, exact for any number of ranks and any uneven split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from unisono.data.dataset import Dataset
from unisono.data.loading.loader import eval_batches, rank_range, to_device
from unisono.dist.progress import at_work, note_progress
from unisono.errors import ConfigError
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter, StepTimers
from unisono.parallel.fsdp import reshard
from unisono.plan.plan import Plan
from unisono.train.callbacks import restored
from unisono.train.metrics import LOSS, Metric
from unisono.train.named_losses import sum_losses
from unisono.train.objectives import Batch, Objective
from unisono.train.options import TrainOptions
from unisono.train.state import TrainState
from unisono.train.step import ForwardBackward


def evaluate(
    forward_backward: ForwardBackward,
    data: Dataset,
    *,
    objective: Objective,
    metrics: Mapping[str, Metric],
    device: torch.device,
    data_rank: int,
    limit: int,
) -> dict[str, float]:
    """Return ``loss`` and each metric, the same on every rank, of ``limit`` samples spread evenly over the data (0 = all)."""
    all_metrics = {"loss": LOSS, **metrics}
    total = torch.zeros(sum(m.size for m in all_metrics.values()), dtype=torch.float64, device=device)
    model, plan = forward_backward.model, forward_backward.plan
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            samples = min(limit or len(data), len(data))
            batches = _rank_batches(data, plan, data_rank, samples)
            # a pipeline is filled with several at a time
            while group := list(islice(batches, 2 * plan.mesh.pp if plan.mesh.pp > 1 else 1)):
                counts = [counted for _, counted in group]

                def add(number: int, outputs: Any, batch: Batch, counts: Sequence[bool] = counts) -> None:
                    losses, weight = objective(outputs, batch)
                    loss_sum = sum_losses(losses)
                    if counts[number]:
                        sums = [metric.sums(outputs, batch, loss_sum, weight) for metric in all_metrics.values()]
                        total.add_(torch.cat(sums))

                forward_backward.evaluate([to_device(batch, device) for batch, _ in group], add)
                note_progress()
        forward_backward.world.all_reduce(total).div_(plan.mesh.tp)  # tensor-parallel ranks saw the same samples
    finally:
        reshard(model)
        model.train(was_training)
    values = iter(total.tolist())
    results: dict[str, float] = {}
    for name, metric in all_metrics.items():
        value = metric.value([next(values) for _ in range(metric.size)])
        results |= {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return results


def _rank_batches(data: Dataset, plan: Plan, rank: int, samples: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """This rank's batches, and whether they count.

    Under FSDP all ranks make equally many passes, so a rank with fewer batches adds one that does not count.
    """
    ranks = plan.mesh.dp_world_size
    yield from ((batch, True) for batch in eval_batches(data, plan.batch.micro_batch, rank, ranks, samples))
    num_batches, longest = (-(-len(rank_range(samples, r, ranks)) // plan.batch.micro_batch) for r in (rank, 0))
    if plan.uses_fsdp and num_batches < longest:
        yield next(eval_batches(data, 1, 0, 1, 1)), False


@dataclass(kw_only=True, slots=True)
class Evaluator:
    """Evaluates a run's model, reports the values, and decides about early stopping on the held-out set."""

    forward_backward: ForwardBackward
    objective: Objective
    metrics: Mapping[str, Metric]
    held_out: Dataset | None
    options: TrainOptions
    state: TrainState
    device: torch.device
    data_rank: int
    rates: RateMeter
    timers: StepTimers
    events: EventLog
    values: dict[str, float] = field(default_factory=dict[str, float])
    evaluated_step: int = -1
    stopped_early: bool = False

    def run(self, data: Dataset | None = None) -> dict[str, float]:
        """Loss and metrics on ``data`` (None: the held-out set), with averaged weights where there are any. A collective."""
        chosen = self.held_out if data is None else data
        if chosen is None:
            raise ConfigError(
                given="evaluate() of a Trainer without eval_data",
                rule="it evaluates the data that it is given, or eval_data",
                consequence="nothing was evaluated",
                nearest="run.evaluate(data), or Trainer(…, eval_data=data)",
            )
        with at_work("an evaluation"), self.timers.phase("eval"), self.rates.paused(), self.state.averaged_weights():
            values = evaluate(
                self.forward_backward,
                chosen,
                objective=self.objective,
                metrics=self.metrics,
                device=self.device,
                data_rank=self.data_rank,
                limit=self.options.num_eval_samples,
            )
        limit, total = self.options.num_eval_samples, len(chosen)
        part = {"samples": limit, "samples_total": total} if 0 < limit < total else {}
        numbers = {f"eval/{name}": value for name, value in values.items()}
        self.events.emit("eval", step=self.state.step, **part, **numbers)
        if data is None:
            self.values, self.evaluated_step = values, self.state.step
            self.state.learning_rates.after_evaluation(values["loss"])
            self._count_without_gain(values["loss"])
        return values

    def try_metrics(self) -> None:
        """Compute the metrics of the first held-out micro-batch, so that those that cannot be computed end a run at its start.

        A collective. No generator and no mode is changed. Compiled models are left out: they would be compiled once more.
        """
        plan = self.forward_backward.plan
        if self.held_out is None or not self.metrics or plan.backend.compile != "off":
            return
        with at_work("a trial of the metrics", silent=True), restored(self.forward_backward.model):
            evaluate(
                self.forward_backward,
                self.held_out,
                objective=self.objective,
                metrics=self.metrics,
                device=self.device,
                data_rank=self.data_rank,
                limit=plan.batch.micro_batch * plan.mesh.dp_world_size,
            )

    @property
    def current_loss(self) -> float | None:
        """Held-out loss of the model as it is; None where this step was not evaluated."""
        return self.values.get("loss") if self.evaluated_step == self.state.step else None

    def _count_without_gain(self, loss: float) -> None:
        state, patience = self.state, self.options.early_stop_patience
        if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
            state.best_loss, state.evaluations_without_gain = loss, 0
            return
        state.evaluations_without_gain += 1
        if patience and state.evaluations_without_gain >= patience:
            self.stopped_early = True
            self.events.emit("early_stop", step=state.step, best_loss=state.best_loss, loss=loss, patience=patience)

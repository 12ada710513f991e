"""Finds what made a skipped step non-finite: computes the step once more, with every operator watched.

The guard has skipped the step, so the parameters are those of before it; batch and random numbers of dropout are those of the
step. The passes leave nothing behind: gradients are dropped, buffers, generators and training modes are restored, and nothing
is sent to the gradient synchronisation. Only what a model's forward pass changes elsewhere, such as a counter in plain Python,
changes twice.

All ranks compute together, because layers and stages may communicate: whether a step was skipped is the same on all of them. The
first, second, fourth, eighth … non-finite step of an attempt is searched. An accelerator is read after several steps; then the
parameters may have had ``updates_since`` updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from unisono.data.loading.loader import StepBatch
from unisono.errors import CommError
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.train.callbacks import restored
from unisono.train.named_losses import sum_losses
from unisono.train.objectives import Batch
from unisono.train.operator_places import micro_batch_number, num_rows
from unisono.train.operator_watch import NonfiniteTensor, OperatorWatch
from unisono.train.state_snapshot import GeneratorStates
from unisono.train.step import Step, TrainStep

_MAX_SAMPLES: Final = 64  # in an event


class _NoSync:
    """A gradient synchronisation that sends nothing."""

    def prepare_last_backward(self, part: Any = None) -> None:
        """See ``GradientSync``."""


@dataclass(kw_only=True, slots=True)
class NonfiniteSearch:
    """Searches skipped steps, and emits a ``nonfinite`` event on each rank that has an origin.

    Attributes:
        train_step: The step of the run.
        load: Builds the batch of a step, from 0, again; None if the data cannot.
        events: Event log of this rank.
        device: Device of the model.
    """

    train_step: TrainStep
    load: Callable[[int], StepBatch] | None
    events: EventLog
    device: torch.device
    _newest: StepBatch | None = None
    _generators: dict[int, GeneratorStates] = field(default_factory=dict[int, GeneratorStates])
    _num_steps: int = 0
    _failed: bool = False

    def remember(self, batch: StepBatch) -> None:
        """Take the batch of a step that is about to be made, and the states of the generators. Does not wait for the device."""
        self._newest, self._generators[batch.step] = batch, GeneratorStates.now(self.device)

    def forget(self) -> None:
        """All steps so far were read."""
        self._generators.clear()

    def search(self, step: Step, loss: float, grad_norm: float, *, updates_since: int) -> None:
        """Search a step that was skipped with these values, if it is one to be searched. All ranks call it together."""
        plan = self.train_step.plan
        overflow = plan.precision.uses_loss_scale and math.isfinite(loss)  # how fp16 finds its loss scale
        if (math.isfinite(loss) and math.isfinite(grad_norm)) or overflow:
            return
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) or self._failed:
            return
        number = step.index - 1
        batch = self._newest if self._newest is not None and self._newest.step == number else None
        if number not in self._generators or (batch is None and self.load is None):
            return
        found, problem = None, ""
        try:
            batch = cast(Any, self.load)(number) if batch is None else batch
            found = self._compute_again(batch)
        except CommError:
            raise
        except Exception as error:  # a search must not end a run that goes on without it
            problem = f"{type(error).__name__}: {error}"
        world = self.train_step.forward_backward.world
        certainty = 0 if found is None else 2 if found.is_certain else 1
        outcomes = world.all_gather_json([certainty, problem])
        self._failed = any(text for _, text in outcomes)
        most_certain = max(other for other, _ in outcomes)
        fields = {"step": step.index, "updates_since": updates_since}
        if found is not None and batch is not None and certainty == most_certain:  # others got it from these ranks
            samples = _samples_of(found, batch)
            self.events.emit(
                "nonfinite",
                **fields,
                reproduced=True,
                where=found.where,
                layer=found.layer,
                operator=found.operator,
                tensor=found.tensor,
                value=found.value,
                input_value=found.input_value,
                micro_batch=found.micro_batch,
                samples=samples[:_MAX_SAMPLES],
                num_samples=len(samples),
            )
        elif world.rank == 0 and not most_certain:
            reason = next(
                (text for _, text in outcomes if text), "every tensor was finite when the step was computed again"
            )
            self.events.emit("nonfinite", **fields, reproduced=False, reason=reason)

    def _compute_again(self, batch: StepBatch) -> NonfiniteTensor | None:
        train_step = self.train_step
        model, plan, state = train_step.forward_backward.model, train_step.plan, train_step.state
        factor = state.loss_scaler.value / plan.batch.global_batch
        watch = OperatorWatch()
        watch.check_parameters(state.sharded.parameters)
        for number, micro_batch in enumerate(batch.micro_batches):
            watch.check_inputs(number, micro_batch)
        seen: list[Batch] = []

        def begin(micro_batch: Batch) -> None:
            watch.begin_micro_batch(micro_batch_number(micro_batch, seen), micro_batch)

        def inputs(micro_batch: Batch) -> dict[str, Tensor]:
            begin(micro_batch)
            return train_step.forward_backward.inputs(micro_batch)

        def scaled_loss(outputs: Any, micro_batch: Batch) -> Tensor:
            begin(micro_batch)
            losses, _ = train_step.objective(outputs, micro_batch)
            loss = sum_losses(losses)
            watch.check_loss(loss)
            return loss * factor

        compiles = plan.backend.compile != "off"
        with (
            restored(model),
            self._restored_afterwards(),
            torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
            train_step.without_gradients(state.optimizer.frozen(batch.step)),
        ):
            state.step = batch.step  # a forward pass may read it
            self._generators[batch.step].restore(self.device)
            try:
                with watch.watching(model):
                    # FSDP2 reduces in its backward pass, and must know which is the last; others would begin to send
                    sync = train_step.sync if plan.uses_fsdp else cast(Any, _NoSync())
                    passes = replace(train_step.forward_backward, inputs=inputs)
                    passes.train(batch.micro_batches, scaled_loss, sync, StepTimers(), batch.step)
            finally:
                train_step.sync.zero_grad()
        return watch.found

    @contextmanager
    def _restored_afterwards(self) -> Generator[None]:
        """Afterwards, the step number and the model's buffers (batch norm statistics, expert loads) are restored."""
        state, number = self.train_step.state, self.train_step.state.step
        saved = [(buffer, buffer.detach().clone()) for buffer in self.train_step.forward_backward.model.buffers()]
        try:
            yield
        finally:
            state.step = number
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)


def _samples_of(found: NonfiniteTensor, batch: StepBatch) -> list[int]:
    """Ids of the samples in whose rows the tensor is not finite."""
    before = sum(num_rows(part) for part in batch.micro_batches[: found.micro_batch])
    return [int(batch.sample_ids[before + row]) for row in found.rows if before + row < len(batch.sample_ids)]

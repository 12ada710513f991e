"""Forward and backward passes of micro-batches, on whatever the plan has made of the model: whole, or a stage of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unisono.dist import World, fault_point
from unisono.observe.meters import StepTimers
from unisono.parallel.context import ContextParallel
from unisono.parallel.device import autocast
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.plan.plan import Plan

Micro = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackward:
    """``inputs(micro)`` picks what the model takes. ``context`` cuts sequences, ``pipeline`` runs stages, where the plan asks."""

    model: nn.Module
    inputs: Callable[[Micro], dict[str, Tensor]]
    plan: Plan
    world: World
    context: ContextParallel | None = None
    pipeline: PipelineExecutor | None = None

    def train(
        self,
        micros: Sequence[Micro],
        copied: Callable[[Micro], Micro],
        loss: Callable[[Any, Micro], Tensor],
        last: Callable[..., None],
        timers: StepTimers,
        step: int,
    ) -> None:
        """Gradients of ``loss(outputs, micro)`` [] pile up over ``micros``, each ``copied`` to the device first.

        ``last()`` is called before the last backward pass, ``last(modules)`` before the last one through a part of the model.
        """
        if self.pipeline is not None:
            self._train_stages(self.pipeline, [copied(micro) for micro in micros], loss, last, timers, step)
            return
        for number, host in enumerate(micros, start=1):
            micro = copied(host)
            with self._context_parallel(micro):
                with timers.phase("forward"):
                    part = self._shard_sequence(micro)
                    with self.world.guard_collectives("forward pass"), autocast(self.plan):
                        value = loss(self.model(**self.inputs(part)), part)
                fault_point("forward", step)
                if number == len(micros):
                    last()
                with timers.phase("backward"), self.world.guard_collectives("backward pass"):
                    value.backward()
            fault_point("backward", step)

    def evaluate(self, micros: Sequence[Micro], use: Callable[[int, Any, Micro], None]) -> None:
        """``use(number, outputs, micro)`` for each of ``micros``; in a pipeline on its last stage only."""
        if self.pipeline is not None:
            parts, wholes = self._shard_sequences(micros)
            returned = self.pipeline.evaluate(parts, self._forward(wholes))
            if self.pipeline.has_last_stage:
                with autocast(self.plan):
                    for number, (outputs, part) in enumerate(zip(returned, parts, strict=True)):
                        use(number, outputs, part)
            return
        for number, micro in enumerate(micros):
            part = self._shard_sequence(micro)
            with (
                self._context_parallel(micro),
                self.world.guard_collectives("forward pass of an evaluation"),
                autocast(self.plan),
            ):
                use(number, self.model(**self.inputs(part)), part)

    def _train_stages(
        self,
        pipeline: PipelineExecutor,
        micros: list[Micro],
        loss: Callable[[Any, Micro], Tensor],
        last: Callable[..., None],
        timers: StepTimers,
        step: int,
    ) -> None:
        parts, wholes = self._shard_sequences(micros)

        @contextmanager
        def around(kind: str, part: Micro) -> Generator[None]:
            with (
                timers.phase(kind),
                self._context_parallel(wholes[id(part)]),
                autocast(self.plan) if kind == "forward" else nullcontext(),
            ):
                yield
            fault_point(kind, step)

        with timers.phase("comm_exposed"):  # what is not a pass is waiting for other stages
            pipeline.forward_backward(parts, self._forward(wholes), loss, last, around)

    def _forward(self, wholes: Mapping[int, Micro]) -> Callable[[Micro], Any]:
        def forward(part: Micro) -> Any:
            with (
                self._context_parallel(wholes[id(part)]),
                self.world.guard_collectives("forward pass"),
                autocast(self.plan),
            ):
                return self.model(**self.inputs(part))

        return forward

    def _shard_sequences(self, micros: Sequence[Micro]) -> tuple[list[Micro], dict[int, Micro]]:
        """This rank's parts of the micro-batches, and the whole ones by them."""
        parts = [self._shard_sequence(micro) for micro in micros]
        return parts, {id(part): micro for part, micro in zip(parts, micros, strict=True)}

    def _shard_sequence(self, micro: Micro) -> Micro:
        return micro if self.context is None else self.context.shard_batch(micro)

    def _context_parallel(self, micro: Micro) -> Any:
        return nullcontext() if self.context is None else self.context.micro_batch(micro)

"""Splits a model into pipeline stages; the model's own forward pass runs on every stage, with the same inputs.

- A block of another stage is replaced by a pass-through without parameters. The one before the stage's first block returns the
  received hidden state; the one after its last block ends the forward pass with the hidden state to send.
- A parameter that the stage does not use is replaced by a zero that takes no memory; results computed with it are dropped.

The model itself computes a block's other arguments (angles, masks) on every stage; ``partition`` has checked that this is
right. Parameter names do not change. A parameter that several stages use (a tied embedding) is on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.hooks import wrap_forward
from unisono.parallel.pipeline.partition import PipelinePartition


class PipelineStages:
    """This rank's stages of a model, which is split in place: ``stage_ids`` in ascending order, of ``num_stages`` in all.

    A call of the model runs the stage that ``activate`` named last. It returns the hidden state, or on the last stage the output
    of the model.
    """

    def __init__(self, model: nn.Module, layout: PipelinePartition, numbers: Sequence[int]) -> None:
        self.model, self.partition, self.stage_ids = model, layout, tuple(sorted(numbers))
        self.num_stages = len(layout.layers_per_stage)
        self._active = -1
        self._received: Tensor | None = None
        local = {number for stage in self.stage_ids for number in layout.blocks_of_stage(stage)}
        self._homes = [_home(model, path) for path in layout.blocks]
        self._own = {number: self._homes[number][0][self._homes[number][1]] for number in sorted(local)}
        self._passes = [_Pass(self._skip(number), parent[key]) for number, (parent, key) in enumerate(self._homes)]
        for number, (parent, key) in enumerate(self._homes):
            if number not in local:
                parent[key] = self._passes[number]
        _drop(
            model,
            {name for name, stages in layout.stages_of_parameter.items() if set(stages).isdisjoint(self.stage_ids)},
        )
        wrap_forward(model, self._run_stage)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stages on this rank."""
        return list(self._own.values())

    @property
    def duplicated_parameters(self) -> list[str]:
        """Names of this rank's parameters that an earlier rank has too."""
        homes = self.partition.stages_of_parameter.items()
        return [name for name, stages in homes if set(stages) & set(self.stage_ids) and stages[0] not in self.stage_ids]

    def blocks_of(self, stage: int) -> list[nn.Module]:
        """The blocks of ``stage``, one of this rank's."""
        return [self._own[number] for number in self.partition.blocks_of_stage(stage)]

    def activate(self, stage: int, received: Tensor | None) -> None:
        """Let the next call of the model run ``stage`` on the hidden state ``received``; None for the first stage."""
        self._active, self._received = stage, received

    def _run_stage(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._active < 0:
            raise RuntimeError("a model in stages runs one stage per call: activate(stage, received) says which")
        try:
            with self._only_active():
                return forward(*args, **kwargs)
        except _Leave as leave:
            return leave.hidden
        finally:
            self._active, self._received = -1, None

    @contextmanager
    def _only_active(self) -> Generator[None]:
        """Passes in place of this rank's other stages' blocks."""
        span = self.partition.blocks_of_stage(self._active)
        aside = [number for number in self._own if number not in span]
        try:
            for number in aside:
                parent, key = self._homes[number]
                parent[key] = self._passes[number]
            yield
        finally:
            for number in aside:
                parent, key = self._homes[number]
                parent[key] = self._own[number]

    def _skip(self, number: int) -> Callable[[Tensor], Any]:
        def skip(hidden: Tensor) -> Any:
            span = self.partition.blocks_of_stage(self._active)
            if number == span.stop:
                raise _Leave(hidden)
            if number == span.start - 1:
                assert self._received is not None
                hidden = self._received
            return (
                (hidden, *[None] * (self.partition.num_block_outputs - 1))
                if self.partition.num_block_outputs
                else hidden
            )

        return skip


class _Leave(BaseException):
    """Carries the hidden state out of a forward pass whose rest is another stage's. No error: models must not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Pass(nn.Module):
    """Stands where a block of another stage was. Forwards look at plain attributes of blocks (a kind of attention, say)."""

    def __init__(self, skip: Callable[[Tensor], Any], block: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if isinstance(value, (str, int, float))}
        self.__dict__.update(plain | vars(self))
        self._skip = skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever it is called with, the hidden state comes first."""
        return self._skip(args[0] if args else next(iter(kwargs.values())))


def _home(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Where a module is kept: the children of its parent, and its name there."""
    parent, _, key = path.rpartition(".")
    return model.get_submodule(parent)._modules, key  # pyright: ignore[reportPrivateUsage]


def _drop(model: nn.Module, names: set[str]) -> None:
    """Make zeros without memory of these parameters, under every name they have."""
    gone = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in gone:
                zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                delattr(module, key)
                setattr(module, key, zero.expand(parameter.shape))

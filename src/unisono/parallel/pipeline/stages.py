"""Splits a model into pipeline stages; every stage runs the model's own forward pass, with the same inputs.

- A block of another stage is replaced by a placeholder without parameters. The one before the stage's first block returns the
  received hidden state; the one after its last block ends the forward pass with the hidden state to send.
- A parameter that the stage does not use is replaced by a zero that takes no memory; results computed with it are dropped.

The model computes a block's other arguments (angles, masks) on every stage; ``partition`` has checked that this is correct.
Parameter names do not change. A parameter that several stages use (a tied embedding) is on each of them.
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
    """This rank's stages of a model, which is split in place: ``stage_ids`` in ascending order, of ``num_stages`` in total.

    A call of the model runs the stage set by ``activate``. It returns the hidden state, or on the last stage the model's output.
    """

    def __init__(self, model: nn.Module, layout: PipelinePartition, numbers: Sequence[int]) -> None:
        self.model, self.partition, self.stage_ids = model, layout, tuple(sorted(numbers))
        self.num_stages = len(layout.layers_per_stage)
        self._active = -1
        self._received: Tensor | None = None
        local = {number for stage in self.stage_ids for number in layout.blocks_of_stage(stage)}
        self._homes = [_home(model, path) for path in layout.blocks]
        self._own = {number: self._homes[number][0][self._homes[number][1]] for number in sorted(local)}
        self._placeholders = [_Placeholder(self._skip(n), parent[key]) for n, (parent, key) in enumerate(self._homes)]
        for number, (parent, key) in enumerate(self._homes):
            if number not in local:
                parent[key] = self._placeholders[number]
        parameters = layout.stages_of_parameter.items()
        _drop_parameters(model, {name for name, stages in parameters if set(stages).isdisjoint(self.stage_ids)})
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

    @property
    def active_stage(self) -> int:
        """The stage that a call of the model runs; -1 outside of a call."""
        return self._active

    def activate(self, stage: int, received: Tensor | None) -> None:
        """Let the next call of the model run ``stage`` on the hidden state ``received``; None for the first stage."""
        self._active, self._received = stage, received

    def _run_stage(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._active < 0:
            raise RuntimeError("a model in stages runs one stage per call: activate(stage, received) says which")
        try:
            with self._only_active():
                return forward(*args, **kwargs)
        except _EndOfStage as end:
            return end.hidden
        finally:
            self._active, self._received = -1, None

    @contextmanager
    def _only_active(self) -> Generator[None]:
        """Inside, the blocks of this rank's other stages are replaced by placeholders."""
        span = self.partition.blocks_of_stage(self._active)
        homes = {number: self._homes[number] for number in self._own if number not in span}
        try:
            for number, (parent, key) in homes.items():
                parent[key] = self._placeholders[number]
            yield
        finally:
            for number, (parent, key) in homes.items():
                parent[key] = self._own[number]

    def _skip(self, number: int) -> Callable[[Tensor], Any]:
        def skip(hidden: Tensor) -> Any:
            span = self.partition.blocks_of_stage(self._active)
            if number == span.stop:
                raise _EndOfStage(hidden)
            if number == span.start - 1:
                assert self._received is not None
                hidden = self._received
            num_outputs = self.partition.num_block_outputs
            return (hidden, *[None] * (num_outputs - 1)) if num_outputs else hidden

        return skip


class _EndOfStage(BaseException):
    """Ends the forward pass after the stage's last block. It is no error, and models must not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Placeholder(nn.Module):
    """Replaces a block of another stage. It has the plain attributes of the block (kind of attention), which some models read."""

    def __init__(self, skip: Callable[[Tensor], Any], block: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if isinstance(value, (str, int, float))}
        self.__dict__.update(plain | vars(self))
        self._skip = skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument is the hidden state; the others are ignored."""
        return self._skip(args[0] if args else next(iter(kwargs.values())))


def _home(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The children of a module's parent, and the module's name there."""
    parent, _, key = path.rpartition(".")
    return model.get_submodule(parent)._modules, key  # pyright: ignore[reportPrivateUsage]


def _drop_parameters(model: nn.Module, names: set[str]) -> None:
    """Replace these parameters, under every name they have, by zeros that take no memory."""
    dropped = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in dropped:
                zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                delattr(module, key)
                setattr(module, key, zero.expand(parameter.shape))

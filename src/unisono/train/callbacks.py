"""Callbacks that observe a run at a cadence: results are bit-identical with and without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unisono.device.torch_adapters import adapter_of
from unisono.errors import ConfigError
from unisono.parallel.fsdp import reshard
from unisono.train.settings import function_name
from unisono.train.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """Calls ``call(step, model)`` on every rank after each ``steps``-th step, counted from the beginning of the run.

    It reads: gradients are off, ``model`` is this rank's part of the model, and random generators and training modes are
    restored after it. Reading a number of ``step`` waits for the device. An exception ends the run. Raises ConfigError; in the
    run, for a callback that changed a parameter or buffer.
    """

    steps: int
    call: Callable[[Step, nn.Module], object]

    def __post_init__(self) -> None:
        given = "" if callable(self.call) else f"Every(call={self.call!r}), a {type(self.call).__name__}"
        if not isinstance(self.steps, int) or self.steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            given = f"Every(steps={self.steps!r}, …)"
        if given:
            raise ConfigError(
                given=given,
                rule="Every takes steps, a whole number of at least 1, and a function call(step, model)",
                consequence="nothing was started",
                nearest="Every(steps=100, call=lambda step, model: print(step.index, step.loss))",
            )

    def observe(self, step: Step, model: nn.Module) -> None:
        """Make the call if it is due."""
        if step.index % self.steps:
            return
        before = {name: tensor._version for name, tensor in _tensors(model)}
        with restored(model), torch.no_grad():
            self.call(step, model)
        changed = [name for name, tensor in _tensors(model) if tensor._version != before.get(name)]
        if changed:
            raise ConfigError(
                given=f"the callback {function_name(self.call)} changed {changed[0]!r} of the model",
                rule="callbacks only read: results are the same with and without them",
                consequence="the run ends, and the newest checkpoint is that of an earlier step",
                nearest="a loop of your own around the steps (for step in run: …); model.eval() before a forward pass",
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def restored(model: nn.Module) -> Generator[None]:
    """Afterwards, generators and training modes are as they were, and parameters are sharded."""
    modes = {module: module.training for module in model.modules()}
    python, numpy = random.getstate(), np.random.get_state()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    adapter, index = adapter_of(device)
    with adapter.fork_random(index):
        try:
            yield
        finally:
            reshard(model)
            for module, mode in modes.items():
                module.training = mode
            random.setstate(python)
            np.random.set_state(numpy)

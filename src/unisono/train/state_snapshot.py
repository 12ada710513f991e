"""Snapshots of the random generators and of the whole state of a run, from which a step can be computed again."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.device.torch_adapters import adapter_for
from unisono.parallel.fsdp import reshard
from unisono.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorStates:
    """States of the random generators of this process.

    Attributes:
        host: State of torch's generator of the host.
        accelerator: State of the device's generator; None on the CPU.
        python: State of Python's generator.
        numpy: State of numpy's generator.
    """

    host: Tensor
    accelerator: Tensor | None
    python: Any
    numpy: Any

    @staticmethod
    def now(device: torch.device) -> GeneratorStates:
        """The states as they are. Does not wait for the device."""
        own = adapter_for(device.type).random
        return GeneratorStates(
            host=torch.get_rng_state(),
            accelerator=None if own is None else own.state(),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.host)
        own = adapter_for(device.type).random
        if own is not None and self.accelerator is not None:
            own.set_state(self.accelerator)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class StateSnapshot:
    """A copy of the state of a run before a step.

    It has parameters, buffers, optimizer state, averages, statistics, the schedule and the random generators: everything that a
    step changes, except state that a model or an objective keeps in plain Python. Copies of tensors are in host memory.
    """

    def __init__(self, state: TrainState, device: torch.device) -> None:
        self._state, self._device = state, device
        self._step, self._schedule = state.step, deepcopy(state.learning_rates.state())
        self._generators = GeneratorStates.now(device)
        tensors = [*state.mutable_state().values(), *(buffer.detach() for buffer in state.model.buffers())]
        self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
        # an optimizer may create state in its first step, or replace a tensor
        self._entries = [
            {parameter: dict(entries) for parameter, entries in member.state.items()}
            for member in state.optimizer.members
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; may be called several times."""
        state = self._state
        for member, entries in zip(state.optimizer.members, self._entries, strict=True):
            member.state.clear()
            for parameter, values in entries.items():
                member.state[parameter] = dict(values)
        for tensor, value in self._copies:
            tensor.copy_(value)
        reshard(state.model)
        state.step = self._step
        state.learning_rates.load_state(deepcopy(self._schedule))
        self._generators.restore(self._device)

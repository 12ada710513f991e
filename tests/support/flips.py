"""Flips of single bits in a live training run: in weights and moments, at rest or during a step, gradients and activations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("weight", "moment", "gradient", "activation")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit that flips on ``rank``.

    ``step`` counts from 1. ``when`` is ``rest`` (before the step begins), ``forward`` (during its forward pass), ``backward`` or
    ``update`` (a gradient that was summed, before the optimizer reads it). ``pick`` and ``bit`` choose tensor, element and bit.
    """

    kind: str
    when: str
    step: int
    rank: int
    pick: int
    bit: int


def seeded(count: int, *, step: int, ranks: int, seed: int) -> Iterator[Flip]:
    """``count`` flips, as many of each kind."""
    rng = random.Random(seed)
    times = {
        "weight": ("rest", "forward"),
        "moment": ("rest", "forward"),
        "gradient": ("backward", "update"),
        "activation": ("forward",),
    }
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield Flip(
            kind=kind,
            when=rng.choice(times[kind]),
            step=step,
            rank=rng.randrange(ranks),
            pick=rng.randrange(1 << 30),
            bit=rng.randrange(32),
        )


def flip_bit(tensor: Tensor, pick: int, bit: int) -> None:
    """Flip a bit of ``tensor`` in place, unseen by torch: its count of writes stays as it is."""
    flat = tensor.data.view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    place, size = pick % flat.numel(), 8 * flat.element_size()
    value = 1 << (bit % size)
    bits[place] ^= value - (1 << size) if value >> (size - 1) and bits.dtype != torch.uint8 else value


def flipped(tensor: Tensor, pick: int, bit: int) -> Tensor:
    """A copy of ``tensor`` with a flipped bit, through which gradients flow as through ``tensor``."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flip_bit(copy, pick, bit)
    return copy if not tensor.requires_grad else _Replaced.apply(tensor, copy)


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Injector:
    """Flips a bit once in a run (a ``Trainer`` that is entered); ``at_rest`` is called in the loop's body, after each step."""

    def __init__(self, run: Any, flip: Flip) -> None:
        self._run, self._flip = run, flip
        self.target = ""  # what was flipped
        parameters = dict(run.model.named_parameters())
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._name = names[flip.pick % len(names)]
        self._parameter = parameters[self._name]
        if flip.kind == "gradient" and flip.when == "backward":
            self._parameter.register_hook(self._gradient)
        elif flip.kind == "gradient":
            run.state.optimizer.members[0].register_step_pre_hook(self._before_update)
        elif flip.kind == "activation":
            leaves = [(path, module) for path, module in run.model.named_modules() if not list(module.children())]
            path, module = leaves[flip.pick % len(leaves)]
            module.register_forward_hook(lambda layer, args, output: self._activation(path, output))
        elif flip.when == "forward":
            leaves = [module for module in run.model.modules() if not list(module.children())]
            leaves[flip.pick % len(leaves)].register_forward_hook(lambda layer, args, output: self._state("forward"))

    def at_rest(self) -> None:
        self._state("rest", steps_made=self._flip.step - 1)

    def _is_now(self, steps_made: int | None = None) -> bool:
        made = self._flip.step - 1
        return not self.target and self._run.state.step == made and self._run.world.rank == self._flip.rank

    def _state(self, when: str, steps_made: int | None = None) -> None:
        if not self._is_now() or self._flip.when != when or self._flip.kind not in ("weight", "moment"):
            return
        tensor, self.target = self._parameter, f"model/{self._name}"
        if self._flip.kind == "moment":
            member = self._run.state.optimizer.members[0]
            entries = member.state[self._parameter]
            name = sorted(name for name, entry in entries.items() if entry.shape == self._parameter.shape)[
                self._flip.pick % 2
            ]
            tensor, self.target = entries[name], f"optim/{name}/{self._name}"
        flip_bit(tensor, self._flip.pick, self._flip.bit)

    def _gradient(self, gradient: Tensor) -> Tensor | None:
        if not self._is_now():
            return None
        self.target = f"gradient of {self._name}"
        return flipped(gradient, self._flip.pick, self._flip.bit)

    def _before_update(self, *_: Any) -> None:
        if self._is_now():
            self.target = f"gradient of {self._name}"
            assert self._parameter.grad is not None
            flip_bit(self._parameter.grad, self._flip.pick, self._flip.bit)

    def _activation(self, path: str, output: Any) -> Any:
        if not self._is_now() or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        self.target = f"output of {path}"
        return flipped(output, self._flip.pick, self._flip.bit)

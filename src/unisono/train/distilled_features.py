"""Outputs of modules of a student that are compared with those of its teacher (Romero et al. 2015, "FitNets", §3.1).

Where the widths differ, a linear layer projects the student's. These layers are trained with the model, as its submodule
``distill_projections``: the optimizer, the synchronisation of gradients and checkpoints have them. Exports and loaded models do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError, DataError, nearest_name
from unisono.plan.rules import match_modules
from unisono.plan.trace import trace
from unisono.train.distill_options import PROJECTIONS
from unisono.train.objectives import Batch
from unisono.train.step import input_selector
from unisono.train.taps import first_floating


def paired_modules(student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names of the modules that pairs of patterns match, in order. Raises ConfigError."""
    found: list[tuple[str, str]] = []
    for patterns in pairs:
        names: list[list[str]] = []
        for pattern, model, whose in zip(patterns, (student, teacher), ("student", "teacher"), strict=True):
            paths = [path for path, _ in model.named_modules() if path and not path.startswith(PROJECTIONS)]
            names.append(match_modules(pattern, paths))
            if not names[-1]:
                raise ConfigError(
                    given=f"distill.features {'='.join(patterns)}: no module of the {whose} is {pattern!r}",
                    rule="each side names modules; * is one part of a name, and ** any number of them",
                    consequence="nothing would be compared; nothing was started",
                    nearest=nearest_name(pattern, paths),
                )
        if len(names[0]) != len(names[1]):
            raise ConfigError(
                given=f"distill.features {'='.join(patterns)}, which names {len(names[0])} modules of the student and "
                f"{len(names[1])} of the teacher",
                rule="the first module of one side is compared with the first of the other, and so on",
                consequence="some would have no other one; nothing was started",
                nearest=f"{names[0][-1]}={names[1][-1]}",
            )
        found += zip(*names, strict=True)
    return found


def find_projections(
    student: nn.Module, teacher: nn.Module, names: Sequence[tuple[str, str]], batch: Batch
) -> list[tuple[int, int] | None]:
    """Widths of the projection that each pair of modules needs, None where theirs are equal; from a pass without values.

    Args:
        student: The student, which may be on the meta device.
        teacher: The teacher, likewise.
        names: Pairs of names of modules.
        batch: Any micro-batch.

    Raises:
        ConfigError: A module returns no tensor of floats, or those of a pair differ in more than their width.
    """
    student_shapes = _output_shapes(student, [name for name, _ in names], batch)
    teacher_shapes = _output_shapes(teacher, [name for _, name in names], batch)
    found: list[tuple[int, int] | None] = []
    for name, other in names:
        first, second = student_shapes.get(name), teacher_shapes.get(other)
        if first is None or second is None or first[:-1] != second[:-1]:
            shown = [list(shape) if shape else "no tensor of floats" for shape in (first, second)]
            raise ConfigError(
                given=f"distill.features {name}={other}: the outputs are {shown[0]} and {shown[1]}, the width last",
                rule="outputs of both modules are tensors of floats that differ in their width alone",
                consequence="they cannot be compared; nothing was started",
                nearest="blocks of both models, after as many tokens or pixels",
            )
        found.append(None if first == second else (first[-1], second[-1]))
    return found


def _output_shapes(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, tuple[int, ...]]:
    """The shape of the output of each module, the width last."""
    shapes: dict[str, tuple[int, ...]] = {}

    def watch(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if (tensor := first_floating(output)) is not None:
                shapes[name] = tuple(_width_last(tensor).shape)

        return model.get_submodule(name).register_forward_hook(keep)

    hooks = [watch(name) for name in names]
    try:
        trace(model, input_selector(model)(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def with_projections(
    model: nn.Module | Callable[[], nn.Module], widths: Sequence[tuple[int, int] | None], seed: int
) -> nn.Module | Callable[[], nn.Module]:
    """``model`` with the projections as a submodule; what builds a model is returned as what builds it with them."""
    if not any(widths):
        return model

    def add(to: nn.Module) -> nn.Module:
        if not hasattr(to, PROJECTIONS):  # a module may be trained again
            with torch.random.fork_rng(devices=[]):  # the same values whatever was drawn before
                cast(Any, torch).manual_seed(seed)
                layers = [nn.Identity() if pair is None else nn.Linear(*pair) for pair in widths]
            to.add_module(PROJECTIONS, _Projections(layers))
        return to

    return add(model) if isinstance(model, nn.Module) else lambda: add(model())


@contextmanager
def without_projections(model: nn.Module) -> Generator[None]:
    """Inside, the model is the one that was given: without the projections of features."""
    layers = model._modules.pop(PROJECTIONS, None)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        if layers is not None:
            model.add_module(PROJECTIONS, layers)


class _Projections(nn.Module):
    """The projections of a student, one for each pair. Called by an ``nn.Sequential`` as its last member, it changes nothing."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        return x


class FeatureOutputs:
    """Hooks that keep the outputs of pairs of modules during a forward pass in training, and the errors between them."""

    def __init__(self, student: nn.Module, teacher: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        self._student, self._in_forward = student, False
        self._projections: _Projections | None = getattr(student, PROJECTIONS, None)
        self._of_student: dict[int, Tensor] = {}
        self._of_teacher: dict[int, Tensor] = {}
        self._hooks = [student.register_forward_pre_hook(self._begin, prepend=True)]
        for number, (name, other) in enumerate(names):
            self._hooks.append(
                student.get_submodule(name).register_forward_hook(self._keeper(number, self._of_student))
            )
            self._hooks.append(
                teacher.get_submodule(other).register_forward_hook(self._keeper(number, self._of_teacher))
            )
        self._hooks.append(student.register_forward_hook(self._end, always_call=True))

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._in_forward = self._student.training

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._in_forward = False  # recompute calls modules again, in the backward pass

    def _keeper(self, number: int, kept: dict[int, Tensor]) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = first_floating(output) if self._in_forward or kept is self._of_teacher else None
            if tensor is not None:
                kept[number] = tensor

        return keep

    def errors(self, weights: Tensor) -> Tensor:
        """Sum over pairs and rows of the mean squared error of a row, times its weight; forgets the outputs.

        Outputs that have not the rows of ``weights`` [B, …] count by sample: its mean over all places, times its whole weight.
        """
        total = torch.zeros((), device=weights.device)
        for number in sorted(self._of_student):
            student, teacher = _width_last(self._of_student[number]), _width_last(self._of_teacher[number])
            if self._projections is not None:
                student = self._projections.layers[number](student)
            if student.shape != teacher.shape:
                raise DataError(
                    given=f"outputs {list(student.shape)} of a student's module and {list(teacher.shape)} of its teacher's",
                    rule="they are of the same places of the same samples",
                    consequence="they cannot be compared; the step was not made",
                    nearest="modules of both models after as many tokens or pixels, in distill.features",
                )
            errors = F.mse_loss(student.float(), teacher.float(), reduction="none").mean(-1)  # [B, …]
            if errors.shape == weights.shape:
                total = total + (errors * weights).sum()
            else:
                by_sample = errors.reshape(len(errors), -1).mean(1)  # [B]
                total = total + (by_sample * weights.reshape(len(errors), -1).sum(1)).sum()
        self._of_student.clear()
        self._of_teacher.clear()
        return total

    def close(self) -> None:
        """Remove the hooks, and the projections from the model."""
        for hook in self._hooks:
            hook.remove()
        self._student._modules.pop(PROJECTIONS, None)  # pyright: ignore[reportPrivateUsage]


def _width_last(tensor: Tensor) -> Tensor:
    """With the channels last: dim 1 of images [B, C, H, W], else the last one."""
    return tensor.movedim(1, -1) if tensor.dim() > 3 else tensor

"""A run configuration as rooms declare them, with one field of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from unisono.config import option
from unisono.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    kind: Literal["cosine", "linear"] = option("cosine", "Shape of the decay.")
    warmup_steps: int = option(100, "Steps of linear warm-up.", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """How parameters move."""

    lr: float = option(0.001, "Peak learning rate.", gt=0, lt=10)
    betas: tuple[float, float] = option((0.9, 0.999), "Decay of the moments.", ge=0, lt=1)
    name: str = option("adamw", "Update rule.", choices=("adamw", "lamb", "sgd"))
    clip: float | None = option(1.0, "Largest global norm of the gradient.", ge=0)
    schedule: Schedule = Schedule()


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained."""

    build: str | Callable[..., Any] = option("gpt", "Model by name.", python_only=True)
    loss: str | Callable[..., Any] | None = option(None, "Objective by name.", python_only=True)
    heads: int = option(4, "Attention heads.", ge=1)
    width: int = option(64, "Width of the residual stream.", ge=1)
    micro_batch: int | Literal["auto"] = option("auto", "Sequences per forward pass.", ge=1)
    tied: bool = option(True, "One matrix for embedding and head.")

    def problems(self) -> Iterator[tuple[str, Problem]]:
        if self.width % self.heads:
            yield (
                "heads",
                Problem(
                    given=f"{self.heads} heads for a width of {self.width}",
                    rule="the width is a multiple of the heads",
                    consequence="nothing was started",
                    nearest="heads = 4",
                ),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything about one run."""

    seed: int = option(1, "Seed of everything random.", ge=0)
    name: str = option("run", "Name of the run.")
    note: str | None = option(None, "Free text.")
    tags: tuple[str, ...] = option((), "Labels.")
    layers: list[int] = option([1, 2], "Layers to log.", choices=(1, 2, 3))
    weights: dict[str, float] = option({"code": 1.0}, "Share of each corpus.", ge=0)
    optim: Optim = Optim()
    model: Model = Model(width=128)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        if self.seed > self.model.width:
            yield (
                "optim.schedule.warmup_steps",
                Problem(given="seed above width", rule="none", consequence="none", nearest="none"),
            )


def texts(error: ConfigError) -> list[tuple[str, str, str]]:
    """The parts that differ from one problem to the next: given, rule, nearest."""
    return [(problem.given, problem.rule, problem.nearest) for problem in error.problems]

"""The configuration of a run: the options of all packages, as sections. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unisono.checkpoint.options import CheckpointOptions
from unisono.config import option
from unisono.config.renames import OPTION_VALUES, OPTIONS, OptionRenames
from unisono.data.options import DataOptions, LoaderOptions
from unisono.errors import Problem
from unisono.launch.options import LaunchOptions
from unisono.models.options import ModelOptions
from unisono.observe.options import ObserveOptions
from unisono.optim.options import OptimOptions, ScheduleOptions, schedule_problems
from unisono.plan.options import PlanOptions
from unisono.train.options import RunOptions, TrainOptions

Component = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The components of a run: each a built-in name, the name of an installed entry point, or your own callable.

    Callables come from a Python configuration file only; text can name code, never load it.
    """

    model: Component = option("gpt", "gpt, an entry point, or config -> torch.nn.Module.", python_only=True)
    objective: Component = option(
        "next_token",
        "next_token, masked_token, cross_entropy, mean_squared_error, model_loss (the model's own), a loss of torch.nn, or "
        "(outputs, batch) -> (loss_sum, weight).",
        python_only=True,
    )
    data: Component = option(
        "tokens", "tokens, an entry point, or config -> (train, held_out) data sets.", python_only=True
    )
    transform: Component = option("", "Nothing, an entry point, or (sample, rng) -> sample.", python_only=True)
    metrics: tuple[str, ...] = option(
        (),
        "bits_per_byte, perplexity, accuracy, token_accuracy, top<k>, f1 (of class 1), f1:<classes> (macro), mcc, "
        "mcc:<classes>, auc, confusion:<classes>, spearman:<low>:<high>, or entry points; none = the first and third on tokens.",
    )
    own_metrics: Component = option("", "Nothing, an entry point, or config -> {name: Metric}.", python_only=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The configuration of one run. ``unisono config explain KEY`` describes each option of a section.

    Attributes:
        run: Folder, seed and resume mode.
        components: Model, objective, data, transform and metrics: built in, installed or your own.
        model: Architecture of the built-in model.
        data: Corpus, tokenizer and windows of the built-in data.
        loader: Workers, prefetching and last batches.
        plan: Layout of model and batch on the ranks.
        optim: Optimizer, learning rate, decay and clipping.
        schedule: Learning rate over the steps.
        train: Length of the run, evaluations and the numerical guard.
        checkpoint: When checkpoints are written and how many are kept.
        observe: Console, trackers and report.
        launch: Processes, threads, restarts and time-outs of ``unisono train`` and ``unisono launch``.
    """

    run: RunOptions = field(default_factory=RunOptions)
    components: Components = field(default_factory=Components)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)

    RENAMES: ClassVar = OptionRenames(keys=OPTIONS, values=OPTION_VALUES)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Rules that tie sections together."""
        for name, problem in schedule_problems(self.schedule, self.train.steps):
            yield f"schedule.{name}", problem

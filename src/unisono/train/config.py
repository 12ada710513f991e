"""The configuration of a run: the options of all packages, as sections. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unisono.checkpoint.options import CheckpointOptions
from unisono.config import option
from unisono.config.fields import options_repr
from unisono.config.renames import OPTION_VALUES, OPTIONS, OptionRenames
from unisono.data.options import EVAL_STRATIFIED, DataOptions, LoaderOptions
from unisono.errors import Problem
from unisono.launch.options import LaunchOptions
from unisono.models.init_rules import rule_problems
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions
from unisono.observe.options import ObserveOptions
from unisono.optim.options import OptimOptions, ScheduleOptions, schedule_problems
from unisono.optim.width_scaling import width_problems
from unisono.plan.options import PlanOptions
from unisono.tasks.model_names import MODELS, default_model, unread_settings
from unisono.tasks.options import (
    LANGUAGE_MODELS,
    PREDICTORS,
    ImageOptions,
    LoraOptions,
    TaskOptions,
    TextOptions,
    inert_settings,
)
from unisono.train.distill_options import DistillOptions
from unisono.train.metric_kinds import CLASSES, NUMBERS, kind_problems, objective_kind
from unisono.train.options import RunOptions, TrainOptions

Component = str | Callable[..., Any]
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The components of a run: each a built-in name, the name of an installed entry point, or your own callable.

    Callables come from a Python configuration file only; text can name code, never load it.
    """

    __repr__ = options_repr

    model: Component = option(
        AUTO,
        "auto = by task; gpt, moe, bert, resnet14 to resnet152, mlp, an entry point, or config -> torch.nn.Module.",
        python_only=True,
    )
    init: tuple[dict[str, str | float], ...] = option(
        (),
        "Initial values of the model's parameters, the first match wins: tables of match (a pattern of names), kind (xavier, "
        "msra_prelu, orthogonal, normal, uniform, constant, zeros, ones) and its constants.",
    )
    objective: Component = option(
        AUTO,
        "auto = by task; next_token, masked_token, cross_entropy, mean_squared_error, model_loss (the model's own), a loss of "
        "torch.nn, or (outputs, batch) -> (loss_sum, weight).",
        python_only=True,
    )
    data: Component = option(
        AUTO,
        "auto = data.train, or else data.corpus; an entry point, or config -> (train, held_out) data sets.",
        python_only=True,
    )
    transform: Component = option("", "Nothing, an entry point, or (sample, rng) -> sample.", python_only=True)
    pair_transform: Component = option("", "Nothing, an entry point, or (a, b, rng) -> (a, b).", python_only=True)
    batch_transform: Component = option("", "Nothing, an entry point, or (batch) -> batch.", python_only=True)
    collate_fn: Component = option(
        "", "Nothing = by task or stacked; an entry point, or (list of samples) -> batch.", python_only=True
    )
    optimizer: Component | Mapping[str, Callable[..., Any]] = option(
        "",
        "Nothing = section optim; an entry point, a torch.optim class or (parameters) -> optimizer, or several by name pattern.",
        python_only=True,
    )
    schedule: Component = option(
        "",
        "Nothing = section schedule; an entry point, step -> learning rate, or a torch.optim.lr_scheduler class or "
        "(optimizer) -> scheduler.",
        python_only=True,
    )
    metrics: tuple[str, ...] = option(
        (),
        "bits_per_byte, perplexity, accuracy, token_accuracy, top<k>, f1 (of class 1), f1:<classes> (macro), mcc, "
        "mcc:<classes>, auc, confusion:<classes>, mae, rmse, r2, spearman:<low>:<high>, or entry points; none = by task.",
    )
    own_metrics: Component = option("", "Nothing, an entry point, or config -> {name: Metric}.", python_only=True)
    callbacks: Component = option("", "Nothing, an entry point, or config -> list of Every.", python_only=True)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Problems of the initial values, by field name."""
        yield from (("init", problem) for problem in rule_problems(self.init))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The configuration of one run. ``unisono config explain KEY`` describes each option of a section.

    Attributes:
        run: Folder, seed and resume mode.
        components: Model, objective, data, optimizer, metrics and more: built in, installed or your own.
        task: What is predicted from what.
        model: Sizes of the built-in model, or a pretrained one.
        lora: Adapters of a pretrained model.
        quantize: Layers whose weights have few bits.
        data: Sources of samples, or corpus, tokenizer and windows.
        image: Decoding and augmentation of images.
        text: Augmentation of texts.
        loader: Workers, prefetching and last batches.
        plan: Layout of model and batch on the ranks.
        optim: Optimizer, learning rate, decay and clipping.
        schedule: Learning rate over the steps.
        distill: A teacher, whose outputs the model learns from.
        train: Length of the run, evaluations and the numerical guard.
        checkpoint: When checkpoints are written and how many are kept.
        observe: Console, trackers and report.
        launch: Processes, threads, restarts and time-outs of ``unisono train`` and ``unisono launch``.
    """

    __repr__ = options_repr

    run: RunOptions = field(default_factory=RunOptions)
    components: Components = field(default_factory=Components)
    task: TaskOptions = field(default_factory=TaskOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    quantize: QuantizeOptions = field(default_factory=QuantizeOptions)
    data: DataOptions = field(default_factory=DataOptions)
    image: ImageOptions = field(default_factory=ImageOptions)
    text: TextOptions = field(default_factory=TextOptions)
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    distill: DistillOptions = field(default_factory=DistillOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)

    RENAMES: ClassVar = OptionRenames(keys=OPTIONS, values=OPTION_VALUES)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Rules that tie sections together."""
        yield from self._optimization_problems()
        yield from self._task_problems()
        yield from self._distill_problems()
        yield from (("components.metrics", problem) for problem in self._metric_problems())

    def _distill_problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of a teacher where there is none, or none of features."""
        given, unset = self.distill, DistillOptions()
        acts = {name: bool(given.teacher) for name in ("teacher_frac", "temperature", "features")}
        yield from (
            (f"distill.{name}", each) for name, each in inert_settings(given, unset, acts, "no distill.teacher")
        )
        acts = {"features_weight": bool(given.teacher and given.features)}
        yield from (
            (f"distill.{name}", each) for name, each in inert_settings(given, unset, acts, "no distill.features")
        )

    def _metric_problems(self) -> Iterator[Problem]:
        """Metrics of classes for a task that predicts numbers, and the reverse."""
        objective, task = self.components.objective, self.task
        if objective != AUTO:
            kind = objective_kind(objective) if isinstance(objective, str) else ""
            beside = f"components.objective {objective!r}"
        elif task.has_numbers:
            kind, beside = NUMBERS, "task.predicts 'number'"
        else:
            kind, beside = CLASSES, f"task.kind {task.kind!r}"
        yield from kind_problems(self.components.metrics, kind, beside)

    def _optimization_problems(self) -> Iterator[tuple[str, Problem]]:
        """A schedule that does not fit the run, and settings beside an optimizer or schedule of the user's own."""
        if self.components.optimizer:
            names = self.optim.__dataclass_fields__.keys() - {"clip_norm"}  # the trainer clips for any optimizer
            acts = dict.fromkeys(sorted(names), False)
            for name, problem in inert_settings(self.optim, OptimOptions(), acts, "components.optimizer"):
                yield f"optim.{name}", problem
        if not self.components.schedule:
            if not self.train.epochs:  # else the number of steps is not known before the data are read
                for name, problem in schedule_problems(self.schedule, self.train.steps):
                    yield f"schedule.{name}", problem
            return
        acts = dict.fromkeys(self.schedule.__dataclass_fields__, False)
        for name, problem in inert_settings(self.schedule, ScheduleOptions(), acts, "components.schedule"):
            yield f"schedule.{name}", problem

    def _task_problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of one task or model beside another."""
        kind, own_data = self.task.kind, self.components.data not in (AUTO, "tokens")
        for section in ("image", "text"):
            if kind != section:
                options = getattr(self, section)
                acts = dict.fromkeys(type(options).__dataclass_fields__, False)
                for name, problem in inert_settings(options, type(options)(), acts, f"task.kind {kind!r}"):
                    yield f"{section}.{name}", problem
        if kind == "image" and self.task.predicts == "number":
            acts = {"mixup_alpha": False, "cutmix_alpha": False}
            for name, problem in inert_settings(self.image, ImageOptions(), acts, "task.predicts 'number'"):
                yield f"image.{name}", problem
        elif kind == "image" and self.components.pair_transform:
            acts = {"mixup_alpha": False, "cutmix_alpha": False}
            for name, problem in inert_settings(self.image, ImageOptions(), acts, "components.pair_transform"):
                yield f"image.{name}", problem
        of_text = kind in (*LANGUAGE_MODELS, "text", "sequence_labelling")
        acts = {
            "corpus": kind in LANGUAGE_MODELS,
            "text_column": kind in LANGUAGE_MODELS,
            "packing": kind in LANGUAGE_MODELS,
            "boundaries": kind == "language_model",
            "tokenizer": of_text,
            "seq_len": of_text,
            "bucket_batches": of_text,
        }
        for name, problem in inert_settings(self.data, DataOptions(), acts, f"task.kind {kind!r}"):
            yield f"data.{name}", problem
        acts = {name: not self.data.eval for name in ("eval_frac", "eval_fold", "eval_split")}
        for name, problem in inert_settings(self.data, DataOptions(), acts, "data.eval"):
            yield f"data.{name}", problem
        yield from self._model_problems()
        if own_data:
            for name, problem in inert_settings(
                self.data, DataOptions(), dict.fromkeys(_SOURCES, False), "components.data of your own"
            ):
                yield f"data.{name}", problem
        elif not self.data.train and kind not in LANGUAGE_MODELS:
            yield (
                "data.train",
                Problem(
                    given=f"task.kind {kind!r} without data.train",
                    rule="samples are read from files, folders or addresses",
                    consequence="there is nothing to train on",
                    nearest="data.train=ADDRESS, or components.data of your own",
                ),
            )
        elif not self.data.train:
            for name, problem in inert_settings(self.task, TaskOptions(), {"inputs": False}, "data.corpus"):
                yield f"task.{name}", problem
        if self.data.eval_split == EVAL_STRATIFIED and not (kind in PREDICTORS and self.task.predicts == "class"):
            yield (
                "data.eval_split",
                _conflict(f"data.eval_split {EVAL_STRATIFIED!r}", "a task whose samples have no class each"),
            )
        if self.data.sample_weights and self.task.balance:
            yield (
                "data.sample_weights",
                _conflict("data.sample_weights", "task.balance, which gives weights of its own"),
            )
        if self.data.bucket_batches and (self.plan.pp > 1 or self.plan.cp > 1):
            yield (
                "data.bucket_batches",
                _conflict("data.bucket_batches", "plan.pp or plan.cp, which take texts of one length"),
            )

    def _model_problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings that the model does not read."""
        kind, model = self.task.kind, self.components.model
        if self.model.pretrained:
            if model != AUTO:
                yield (
                    "components.model",
                    _conflict(f"components.model {model!r}", f"model.pretrained {self.model.pretrained!r}"),
                )
            acts = {name: name == "pretrained" for name in type(self.model).__dataclass_fields__}
            for name, problem in inert_settings(self.model, ModelOptions(), acts, "model.pretrained"):
                yield f"model.{name}", problem
        else:
            name = default_model(kind) if model == AUTO else model
            if isinstance(name, str) and name in MODELS:
                for field_name, problem in unread_settings(name, self.model):
                    yield f"model.{field_name}", problem
            for name, problem in inert_settings(self.lora, LoraOptions(), {"rank": False}, "no model.pretrained"):
                yield f"lora.{name}", problem
        if self.lora.rank and self.quantize.scheme != "none":
            yield (
                "quantize.scheme",
                _conflict(
                    f"quantize.scheme {self.quantize.scheme!r}",
                    f"lora.rank {self.lora.rank}: adapters are no whole model",
                ),
            )
        if self.model.mup_base_dim:
            yield from self._width_problems()

    def _width_problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings that take the place of what follows from the width of the model."""
        if self.components.optimizer:
            yield "components.optimizer", _conflict("components.optimizer", "model.mup_base_dim")
        else:
            yield from ((f"optim.{name}", problem) for name, problem in width_problems(self.optim))
        if self.components.init:
            yield (
                "components.init",
                _conflict("components.init", "model.mup_base_dim, which decides the initial values"),
            )
        if self.plan.sync == "dist_async":
            yield "plan.sync", _conflict("plan.sync 'dist_async'", "model.mup_base_dim: servers have one learning rate")


# settings of data that the run opens itself
_SOURCES = (
    *(
        "train",
        "eval",
        "weights",
        "sample_weights",
        "kept_rows",
        "cache_gib",
        "bucket_batches",
        "eval_fold",
        "eval_split",
    ),
)


def _conflict(one: str, other: str) -> Problem:
    return Problem(
        given=f"{one} with {other}",
        rule="they exclude each other",
        consequence="it is unclear which of them is meant",
        nearest="leave one of them out",
    )

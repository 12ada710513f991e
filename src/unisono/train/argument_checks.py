"""A table of what each argument of a trainer accepts, and its check at construction. ``check_options`` looks into options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from os import PathLike
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint import CheckpointOptions
from unisono.data.options import LoaderOptions
from unisono.dist import World
from unisono.errors import ConfigError, Problem, inert_problem, nearest_name
from unisono.observe.events import EventLog
from unisono.observe.options import ObserveOptions
from unisono.optim import OptimOptions, ScheduleOptions
from unisono.optim.options import OPTIMIZER_FIELDS, SCHEDULE_FIELDS
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.train.callbacks import Every
from unisono.train.distillation import Distillation
from unisono.train.options import TrainOptions, resume_problem
from unisono.train.settings import function_name

_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Argument:
    """What an argument accepts besides its default None. ``nearest`` may depend on the value that is not accepted."""

    accepts: Callable[[Any], bool]
    rule: str
    nearest: str | Callable[[Any], str]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError with a problem for each argument of ``Trainer`` that has a wrong type or value."""
    problems = [
        Problem(
            given=f"{name}={_shown(value)}",
            rule=argument.rule,
            consequence="nothing was started",
            nearest=argument.nearest if isinstance(argument.nearest, str) else argument.nearest(value),
        )
        for name, argument in _ARGUMENTS.items()
        if (value := arguments[name]) is not None and not argument.accepts(value)
    ]
    resume = arguments["resume"]
    if isinstance(resume, str) and (problem := resume_problem(resume, "resume")):
        problems.append(problem)
    if problems:
        raise ConfigError(*problems)


def check_without_eval_data(options: TrainOptions, checkpoint: CheckpointOptions) -> None:
    """Raise ConfigError for settings that only evaluations of ``eval_data`` read, for a trainer that has none."""
    default = TrainOptions()
    settings = {
        "early_stop_patience": (options.early_stop_patience, 0, "it counts evaluations of eval_data"),
        "eval_every_steps": (options.eval_every_steps, default.eval_every_steps, "fit() evaluates eval_data"),
        "keep_best": (
            checkpoint.keep_best,
            CheckpointOptions().keep_best,
            "it counts checkpoints with a loss on eval_data",
        ),
    }
    problems = [
        inert_problem(f"{name} {value} without eval_data", rule, f"eval_data=…, or leave {name} out")
        for name, (value, unset, rule) in settings.items()
        if value not in (0, unset)  # 0 asks for nothing
    ]
    if problems:
        raise ConfigError(*problems)


def inert_metrics_notice(names: Sequence[str]) -> dict[str, str]:
    """Fields of the ``notice`` event of ``fit`` with metrics and without ``eval_data``."""
    return {
        "code": "inert_metrics",
        "what": f"metrics {', '.join(names)} have no effect on fit()",
        "why": "they are computed in evaluations, and there is no eval_data",
        "cost": "none",
        "fix": "eval_data=…, or run.evaluate(data) in a loop of your own",
    }


def _shown(value: Any) -> str:
    if isinstance(value, type) or (callable(value) and not isinstance(value, nn.Module)):
        return function_name(value)
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS and "\n" not in text else f"a {type(value).__name__}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _names(value: Any) -> bool:
    """Whether ``value`` is text, a list of texts or a mapping with texts as keys."""
    return isinstance(value, str) or (
        isinstance(value, Mapping | Sequence) and all(isinstance(name, str) for name in cast("Sequence[Any]", value))
    )


def _observers(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(call, Every) for call in cast("Sequence[Any]", value))


def _nearest_callbacks(value: Any) -> str:
    first = value[0] if isinstance(value, Sequence) and value else value
    if isinstance(first, Every):
        return "callbacks=[Every(…)], a list"
    name = function_name(first) if callable(first) else ""
    return f"callbacks=[Every(steps=100, call={name if name.isidentifier() else '…'})]"


def _is_optimizer(value: Any) -> bool:
    factories = list(cast("Mapping[Any, Any]", value).values()) if isinstance(value, Mapping) else [value]
    if isinstance(value, Mapping | Optimizer | OptimOptions):
        return isinstance(value, Optimizer | OptimOptions) or (bool(factories) and all(map(callable, factories)))
    return callable(value)


def _nearest_optimizer(value: Any) -> str:
    if not isinstance(value, str):
        return 'OptimOptions(kind="adamw"), or torch.optim.AdamW'
    kinds = {kind.lower(): kind for kind in OPTIMIZER_FIELDS}
    if value.lower() not in kinds:
        return f"OptimOptions(kind=…), {nearest_name(value, kinds)}"
    torch_name = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}.get(value.lower())
    return f'OptimOptions(kind="{value.lower()}")' + (f", or torch.optim.{torch_name}" if torch_name else "")


def _nearest_schedule(value: Any) -> str:
    if isinstance(value, str) and value not in SCHEDULE_FIELDS:
        return f"ScheduleOptions(kind=…), {nearest_name(value, SCHEDULE_FIELDS)}"
    return f'ScheduleOptions(kind="{value if isinstance(value, str) else "cosine"}"), or lambda step: 0.1'


def _options(*types: type) -> _Argument:
    """An argument that is an object of the first of ``types``, or of another of them."""
    names = [kind.__name__ for kind in types]

    def nearest(value: Any) -> str:
        known = {each.name for each in fields(types[0])}
        items = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
        shown = ", ".join(f"{name}={item!r}" for name, item in items.items())
        return f"{names[0]}({shown if items.keys() <= known and shown else '…'})"

    return _Argument(lambda value: isinstance(value, types), f"it is an object of {' or '.join(names)}", nearest)


def _function(name: str, signature: str) -> _Argument:
    return _Argument(callable, f"it is a function {signature}", f"{name}=function, or leave it out")


_ARGUMENTS: Mapping[str, _Argument] = {
    "model": _Argument(
        callable, "it is a torch.nn.Module, or a function that builds one", "Trainer(torch.nn.Linear(3, 1), …)"
    ),
    "plan": _options(PlanOptions, Plan),
    "distill": _options(Distillation),
    "optimizer": _Argument(
        _is_optimizer,
        "it is OptimOptions, an optimizer of torch, a class or function that builds one, or several by pattern of names",
        _nearest_optimizer,
    ),
    "schedule": _Argument(
        # OptimizerSetup says how to pass a scheduler of torch
        lambda value: isinstance(value, ScheduleOptions | LRScheduler) or callable(value),
        "it is ScheduleOptions, a function of the step, or a class or function that builds a scheduler of torch",
        _nearest_schedule,
    ),
    "clip_norm": _Argument(_number, "it is the largest global gradient norm; 0 does not clip", "clip_norm=1.0"),
    "options": _options(TrainOptions),
    "checkpoint": _options(CheckpointOptions),
    "run_dir": _Argument(
        lambda value: isinstance(value, str | PathLike) and "://" not in str(value),
        "it is the path of a local or mounted folder",
        lambda value: (
            f"CheckpointOptions(upload_to={value!r}), which copies each checkpoint there and resumes from there"
            if isinstance(value, str)
            else 'run_dir="runs/first"'
        ),
    ),
    "seed": _Argument(_whole, "it is a whole number, at least 0", "seed=0"),
    "resume": _Argument(
        lambda value: isinstance(value, str | PathLike), "it is auto, strict, never, or a path", 'resume="auto"'
    ),
    "metrics": _Argument(
        _names,
        "it is a list of names of built-in metrics, or has metrics by name",
        'metrics=["accuracy"], or metrics={"name": metric}',
    ),
    "callbacks": _Argument(_observers, "it is a list of observers Every(…)", _nearest_callbacks),
    "transform": _function("transform", "(sample, rng) -> sample"),
    "pair_transform": _function("pair_transform", "(a, b, rng) -> sample"),
    "batch_transform": _function("batch_transform", "(batch) -> batch"),
    "collate_fn": _function("collate_fn", "(list of samples) -> batch"),
    "loader": _options(LoaderOptions),
    "shuffle_block": _Argument(
        _whole, "it is a number of samples, and 0 shuffles single samples", "shuffle_block=0, or leave it out"
    ),
    "flops_per_token": _Argument(
        lambda value: callable(value) or (_number(value) and value >= 0),
        "it is a number of FLOPs, at least 0, or a function of the model",
        "leave it out, which reports no TFLOP/s",
    ),
    "world": _Argument(
        lambda value: isinstance(value, World),
        "it is the World that join_world returns; the environment of the process says how many ranks there are",
        lambda value: (
            f"leave it out, and start the script with unisono launch -n {value}"
            if isinstance(value, int)
            else "leave it out"
        ),
    ),
    "observe": _options(ObserveOptions),
    "events": _Argument(lambda value: isinstance(value, EventLog), "it is an EventLog", "leave it out"),
    "provenance": _Argument(
        lambda value: isinstance(value, Mapping) and _names(value), "it has JSON types by name", "leave it out"
    ),
}

"""The optimizer and schedule that a trainer was given: options of ours, or torch's and the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.config import check_options
from unisono.errors import ConfigError, nearest_name
from unisono.models.gpt import GPT
from unisono.models.mup import width_ratio
from unisono.observe.events import EventLog
from unisono.optim import OptimOptions, ScheduleOptions, build_optimizer, state_names
from unisono.optim.groups import Role, parameter_roles
from unisono.optim.learning_rate import (
    GivenSchedule,
    LearningRates,
    ScheduledRates,
    TorchRates,
    is_scheduler_factory,
)
from unisono.optim.options import describe_rate
from unisono.optim.run_optimizer import (
    GivenOptimizer,
    OptimizerFactory,
    RunOptimizer,
    Trial,
    adopt_optimizer,
    assign_by_pattern,
    build_user_optimizer,
    merge_trials,
    optimizer_name,
    require_elementwise,
    try_optimizer,
)
from unisono.optim.width_scaling import lr_scales, width_problems
from unisono.parallel.sharding import ShardedParameters
from unisono.plan.plan import Plan

# values of parameter groups that choose an implementation, or that a scheduler sets
_NO_MATHEMATICS = ("foreach", "fused", "capturable", "differentiable", "state", "initial_lr", "min_lr", "max_lr")
_CONSTANT = ScheduleOptions(kind="constant")


@dataclass(kw_only=True)
class OptimizerSetup:
    """Builds the optimizer and learning rates of a run, in the order of the methods.

    Attributes:
        given: Options, or an optimizer of the user's (see ``Trainer``).
        schedule: The schedule; None is that of ``ScheduleOptions()`` with options, and a constant rate otherwise.
        clip_norm: Largest global gradient norm; None takes that of the options, and does not clip otherwise.
    """

    given: OptimOptions | GivenOptimizer
    schedule: GivenSchedule | None
    clip_norm: float | None
    roles: Mapping[str, Role] = field(default_factory=dict[str, Role])
    _lr_scales: Mapping[str, float] = field(default_factory=dict[str, float])
    _is_on_servers: bool = False
    _trials: list[Trial] = field(default_factory=list[Trial])
    _factories: list[tuple[OptimizerFactory, list[str]]] = field(
        default_factory=list[tuple[OptimizerFactory, list[str]]]
    )
    _names: dict[nn.Parameter, str] = field(default_factory=dict[nn.Parameter, str])

    def __post_init__(self) -> None:
        check_options(
            *(given for given in (self.given, self.schedule) if isinstance(given, OptimOptions | ScheduleOptions))
        )
        if isinstance(self.given, OptimOptions) and self.clip_norm is not None:
            raise ConfigError(
                given=f"clip_norm={self.clip_norm} together with OptimOptions",
                rule="OptimOptions has clip_norm; the argument is for an optimizer of your own",
                consequence="it would be unclear which of the two holds",
                nearest=f"OptimOptions(clip_norm={self.clip_norm})",
            )
        if isinstance(self.schedule, LRScheduler):
            kind = type(self.schedule).__name__
            raise ConfigError(
                given=f"schedule={kind}(…), a scheduler that has an optimizer already",
                rule="the trainer makes the scheduler, of the optimizer of this rank's parameters",
                consequence="its learning rates might belong to other parameters; nothing was started",
                nearest=f"schedule=partial({kind}, …) with all its arguments but the optimizer",
            )
        if self.clip_norm is not None and not 0 <= self.clip_norm < float("inf"):
            raise ConfigError(
                given=f"clip_norm={self.clip_norm}",
                rule="it is the largest global gradient norm; 0 does not clip",
                consequence="nothing was started",
                nearest="clip_norm=1.0",
            )

    @property
    def options(self) -> OptimOptions | None:
        """The options; None for an optimizer of the user's."""
        return self.given if isinstance(self.given, OptimOptions) else None

    @property
    def name(self) -> str:
        """The kind of the options, or the names of the user's optimizers in lower case."""
        return self.given.kind if isinstance(self.given, OptimOptions) else optimizer_name(self.given).lower()

    @property
    def used_schedule(self) -> GivenSchedule:
        """The schedule, or the default one of this kind of optimizer."""
        if self.schedule is not None:
            return self.schedule
        return ScheduleOptions() if isinstance(self.given, OptimOptions) else _CONSTANT

    @property
    def norm_limit(self) -> float:
        """Largest global gradient norm; 0 does not clip."""
        return self.given.clip_norm if isinstance(self.given, OptimOptions) else self.clip_norm or 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors of a parameter: those of its shape and step counts."""
        if isinstance(self.given, OptimOptions):
            return state_names(self.given)
        trial = merge_trials(self._trials)
        return trial.state + tuple(name for name in trial.others if name == "step")

    def check(self, plan: Plan) -> None:
        """Raise ConfigError for an optimizer or schedule that cannot be used under ``plan``."""
        self._is_on_servers = plan.sync.kind == "dist_async"
        if self._is_on_servers:
            _refuse_on_servers(self)
        if isinstance(self.given, OptimOptions):
            return
        given = self.given.values() if isinstance(self.given, Mapping) else [self.given]
        self._trials = [try_optimizer(optimizer) for optimizer in given]
        if plan.is_model_sharded and (plan.uses_fsdp or plan.mesh.tp > 1):
            layout = "dp_shard" if plan.uses_fsdp else "tp"
            require_elementwise(merge_trials(self._trials), optimizer_name(self.given), layout)
        if plan.is_model_sharded and isinstance(self.given, Optimizer) and self.given.state:
            raise ConfigError(
                given="an optimizer that has made steps already, under a plan that shards the model",
                rule="its state becomes that of shards, which only a checkpoint's reader can split",
                consequence="the state would not fit the parameters",
                nearest="a new optimizer, or a class or function that builds one",
            )

    def prepare_model(self, model: nn.Module, events: EventLog) -> None:
        """Freeze what is not to be trained, and note which parameters the user's optimizer has. Before sharding."""
        names = {name: p for name, p in model.named_parameters()}
        if isinstance(model, GPT) and model.options.mup_base_dim:
            self._lr_scales = self._scales_of_width(model)
        if isinstance(self.given, OptimOptions):
            freeze_by_pattern(names, self.given.freeze)
            self.roles = parameter_roles(model, self.given.decay_exclude)
            return
        trained = [name for name, p in names.items() if p.requires_grad]
        if isinstance(self.given, Mapping):
            by_pattern = assign_by_pattern(trained, tuple(self.given), "optimizer")
            self._factories = [(self.given[pattern], members) for pattern, members in by_pattern.items()]
        elif isinstance(self.given, Optimizer):
            self._names = {p: name for name, p in names.items()}
            held = {p for group in self.given.param_groups for p in group["params"]}
            without = [name for name, p in names.items() if p.requires_grad and p not in held]
            for name in without:
                names[name].requires_grad_(False)
            if without:
                events.emit(
                    "notice",
                    step=0,
                    code="not_in_optimizer",
                    what=f"{len(without)} parameters are not in the optimizer, the first {without[0]!r}",
                    why="they would never change; no gradient of theirs is computed",
                    cost="none",
                    fix="add them to the optimizer if they are to be trained",
                )
        else:
            self._factories = [(self.given, trained)]

    def _scales_of_width(self, model: GPT) -> dict[str, float]:
        """Factors of the learning rates by parameter name. Raises ConfigError for what does not follow the width."""
        check_options(model.options)
        wrong = ""
        if not isinstance(self.given, OptimOptions):
            wrong = f"optimizer {optimizer_name(self.given)}"
        elif self.schedule is not None and is_scheduler_factory(self.schedule):
            wrong = "a torch scheduler"
        elif self._is_on_servers:
            wrong = "plan.sync 'dist_async'"
        if wrong or not isinstance(self.given, OptimOptions):
            raise ConfigError(
                given=f"{wrong} with a model of mup_base_dim {model.options.mup_base_dim}",
                rule="each parameter has a learning rate by the width, which OptimOptions and our schedules keep on the ranks",
                consequence="all parameters would have one learning rate; nothing was started",
                nearest="OptimOptions with ScheduleOptions or a function of the step, plan.sync='dist_sync', or mup_base_dim=0",
            )
        if problems := [problem for _, problem in width_problems(self.given)]:
            raise ConfigError(*problems)
        return lr_scales(model.width_kinds(), width_ratio(model.options), self.given.kind)

    def build(self, model: nn.Module, sharded: ShardedParameters) -> RunOptimizer:
        """The optimizer of this rank's shards."""
        if isinstance(self.given, OptimOptions):
            optimizer = build_optimizer(
                model,
                self.given,
                sharded_params=sharded.parameters,
                named_roles=self.roles,
                lr_scales=self._lr_scales,
                global_norms=sharded.global_norms if sharded.is_sharded else None,
            )
            return RunOptimizer([optimizer])
        if isinstance(self.given, Optimizer):
            return adopt_optimizer(self.given, self._names, sharded.parameters, self._trials[0].names)
        return build_user_optimizer(self._factories, sharded.parameters, [trial.names for trial in self._trials])

    def learning_rates(self, optimizer: RunOptimizer, total_steps: int, *, has_evaluations: bool) -> LearningRates:
        """The learning rates of the run. Raises ConfigError for a schedule that does not fit its steps or evaluations."""
        schedule = self.used_schedule
        if is_scheduler_factory(schedule):
            return TorchRates(  # pyright: ignore[reportArgumentType]
                optimizer, schedule, total_steps, has_evaluations=has_evaluations
            )
        groups = optimizer.param_groups
        base = self.given.lr if isinstance(self.given, OptimOptions) else float(groups[0]["lr"])
        return ScheduledRates(groups, schedule, total_steps, base)  # pyright: ignore[reportArgumentType]

    def in_words(self, optimizer: RunOptimizer, total_steps: int) -> str:
        """Optimizer, learning rate over the run and weight decay in one line. Before the first step."""
        base = self.given.lr if isinstance(self.given, OptimOptions) else float(optimizer.param_groups[0]["lr"])
        rate = describe_rate(base, self.used_schedule, total_steps)
        if not isinstance(self.given, OptimOptions):
            return f"{optimizer_name(self.given)}, {rate}"
        by_width = ", times a factor of the width (muP)" if set(self._lr_scales.values()) - {1.0} else ""
        return f"{self.given.kind}, {rate}{by_width}, weight decay {self.given.effective_weight_decay:g}"

    def describe(self, optimizer: RunOptimizer) -> dict[str, Any]:
        """Everything about the optimizer that changes the mathematics, as JSON by name. Before the first step."""
        groups = [
            {
                name: value
                for name, value in group.items()
                if isinstance(value, bool | int | float | str | tuple) and name not in _NO_MATHEMATICS
            }
            for group in optimizer.param_groups
        ]
        return {"kind": self.name, "groups": groups, "clip_norm": self.norm_limit}


def freeze_by_pattern(parameters: Mapping[str, nn.Parameter], patterns: Iterable[str]) -> None:
    """Set ``requires_grad`` to False for parameters whose name matches a pattern. Raises ConfigError for one without a match."""
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                given=f"optim.freeze has {pattern!r}",
                rule="each pattern names at least one parameter",
                consequence="it would freeze nothing",
                nearest=nearest_name(pattern, parameters),
            )
        for name in names:
            parameters[name].requires_grad_(False)


def _refuse_on_servers(setup: OptimizerSetup) -> None:
    given = setup.given
    wrong = ""
    if not isinstance(given, OptimOptions):
        wrong = f"optimizer {optimizer_name(given)}"
    elif given.groups:
        wrong = "optim.groups"
    elif setup.schedule is not None and is_scheduler_factory(setup.schedule):
        wrong = "a torch scheduler"
    if wrong:
        raise ConfigError(
            given=f"{wrong} with plan.sync 'dist_async'",
            rule="servers make the update, from options that are sent to them; no code is sent",
            consequence="nothing was started",
            nearest="OptimOptions without groups and ScheduleOptions, or plan.sync='dist_sync'",
        )

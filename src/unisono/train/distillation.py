"""Knowledge distillation: a model learns from the outputs of a trained one as well as from the targets (Hinton et al. 2015).

The teacher sees the same micro-batches, in evaluation mode and without gradients. It is no part of the trained model: neither
checkpoints nor the optimizer nor the synchronisation of gradients have it. Where the plan shards the student, it shards the
teacher too. Evaluations have the task's own loss alone, so that a student can be compared with a model that had no teacher.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode  # has no public name; torch 2.13 tested

from unisono.dist import agree
from unisono.errors import ConfigError, DataError, PlanError
from unisono.kvstore import KVStore
from unisono.models.distillation_loss import divergence_sum
from unisono.models.loss import IGNORED, LazyLogits
from unisono.observe.events import EventLog
from unisono.parallel.context import ContextParallel
from unisono.parallel.expert import expert_layers
from unisono.parallel.fsdp import reshard
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.transforms import TRANSFORMS, check_transforms, parallelize
from unisono.plan.plan import Plan
from unisono.train.distill_options import DistillOptions
from unisono.train.distilled_features import FeatureOutputs
from unisono.train.metric_kinds import CLASSES, NUMBERS, objective_kind
from unisono.train.named_losses import check_losses
from unisono.train.objectives import (
    Batch,
    Objective,
    dense_logits,
    find_logits,
    flat_weights,
    mean_squared_error,
    model_loss,
    row_weights,
)
from unisono.train.settings import function_name
from unisono.train.setup import find_parameters_to_cast, infer_tp_rules
from unisono.train.step import ForwardBackward, input_selector
from unisono.train.tensor_digest import tensor_digest

# what shards a model, and lays it out; the others act on a backward pass, or on names of the student's modules
_TRANSFORMS: Final = ("channels_last", "placements", "tensor_parallel", "expert_parallel", "context_parallel", "fsdp")
_LABEL_LOSSES: Final = (nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss)


@dataclass(frozen=True, slots=True)
class Distillation:
    """A teacher for ``Trainer(…, distill=…)``, and how the student learns from it.

    Example::

        Trainer(small, data, objective="cross_entropy", distill=Distillation(large, DistillOptions(temperature=4.0)))

    Args:
        teacher: A trained module, or a function that builds it with its values, the same on all ranks. A module is put into
            evaluation mode, without gradients, on the device of the rank; the values on rank 0 count.
        options: Weights, temperature and features; their ``teacher``, the path of a folder, is for configurations.
    """

    teacher: nn.Module | Callable[[], nn.Module]
    options: DistillOptions = field(default_factory=DistillOptions)

    def build(self) -> nn.Module:
        """The teacher, without gradients and in evaluation mode."""
        teacher = self.teacher if isinstance(self.teacher, nn.Module) else self.teacher()
        return teacher.requires_grad_(False).eval()


def check_distillation(given: Distillation, objective: Callable[..., Any], plan: Plan) -> None:
    """Raises PlanError or ConfigError for a plan or objective that a teacher cannot be used with."""
    features = bool(given.options.features)
    refused = [
        (
            f"a teacher with plan.pp={plan.mesh.pp}",
            plan.mesh.pp > 1,
            "the outputs of both models are compared where they are computed, and a pipeline has them on its last stage",
            "plan.pp=1 with plan.dp_shard or plan.tp, which share the state of both models",
        ),
        (
            "a teacher with plan.sync 'dist_async'",
            plan.sync.kind == "dist_async",
            "the workers of parameter servers begin with what the servers hold, and those hold no teacher",
            "plan.sync=dist_sync",
        ),
        (
            f"distill.features with plan.tp={plan.mesh.tp}",
            features and plan.mesh.tp > 1,
            "outputs of modules are compared whole, and tensor-parallel ranks have parts of them",
            "plan.dp_shard in place of plan.tp, or no distill.features",
        ),
        (
            f"distill.features with plan.compile {plan.backend.compile!r}",
            features and plan.backend.compile != "off",
            "outputs of modules are read by hooks, which do not act inside of compiled code",
            "plan.compile=off, or no distill.features",
        ),
    ]
    for what, is_refused, rule, nearest in refused:
        if is_refused:
            raise PlanError(given=what, rule=rule, consequence="nothing was started", nearest=nearest)
    if isinstance(objective, _LABEL_LOSSES):
        raise ConfigError(
            given=f"a teacher with the objective {type(objective).__name__}",
            rule="a teacher's term compares one class per row, or numbers; losses of several labels per sample have none",
            consequence="nothing was started",
            nearest="nn.CrossEntropyLoss with one class per sample, or an objective of your own that calls the teacher itself",
        )
    if objective is model_loss:
        raise ConfigError(
            given="a teacher with the objective model_loss",
            rule="the teacher's term counts the rows whose batch['targets'] count; a model that computes its own loss shifts its "
            "labels itself",
            consequence="the two terms could count other rows; nothing was started",
            nearest="the objective next_token or cross_entropy with 'targets'",
        )


def prepare_teacher(given: Distillation, plan: Plan, device: torch.device, store: KVStore) -> tuple[nn.Module, str]:
    """The whole teacher on ``device`` with the values of rank 0, and a digest of them; empty where a step is only traced."""
    teacher = given.build()
    if isinstance(given.teacher, nn.Module) and plan.is_model_sharded and active_fake_mode() is None:
        teacher = copy.deepcopy(teacher)  # the caller's stays whole
    if any(tensor.device != device for tensor in (*teacher.parameters(), *teacher.buffers())):
        teacher.to(device)
    store.broadcast(teacher.state_dict())
    return teacher, "" if active_fake_mode() is not None else _digest(teacher)


def _digest(teacher: nn.Module) -> str:
    """A digest of the names and bits of all values."""
    hasher = blake2b(digest_size=8)
    for name, tensor in sorted(teacher.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)} {int(tensor_digest(tensor))} ".encode())
    return hasher.hexdigest()


def shard_teacher(
    teacher: nn.Module, plan: Plan, dims: ParallelDims, first: Callable[[], Batch], events: EventLog
) -> ForwardBackward:
    """The passes of a teacher that is sharded as the plan shards the student; its parameters are freed after use.

    Args:
        teacher: The whole teacher, which is changed in place.
        plan: The plan before it was completed for the student.
        dims: The mesh, after the student was sharded.
        first: Returns a micro-batch of the first step.
        events: Event log of this rank.

    Raises:
        PlanError: The plan does not fit the teacher.
    """
    plan = plan.updated(
        fsdp={"zero": 3, "ignored_modules": ()},
        recompute={"mode": "none", "offload": False, "modules": (), "blocks_per_stage": (), "saved_ops": ()},
        backend={"compile": "off"},
        precision={"dtype_rules": ()},
        tensor_parallel={
            "placements": plan.tensor_parallel.dtensor_placements
        },  # the others are of the student's parameters
    )
    own_dims = copy.copy(dims)
    own_dims.plan = plan
    inputs = input_selector(teacher)
    transforms = [
        transform
        for transform in TRANSFORMS
        if transform.name in _TRANSFORMS and (transform.name != "expert_parallel" or any(expert_layers(teacher)))
    ]
    try:
        if plan.mesh.tp > 1 and not (plan.tensor_parallel.rules or plan.tensor_parallel.placements):
            plan = own_dims.plan = infer_tp_rules(plan, teacher, lambda: inputs(first()), events)
            agree(dims.world, "inferred rules of the teacher", plan.decisions())
        context = ContextParallel(own_dims, teacher) if plan.mesh.cp > 1 else None
        if problems := check_transforms(teacher, plan, transforms):
            raise PlanError(*problems)
        cast = find_parameters_to_cast(plan, teacher, lambda: inputs(first()), events)
    except PlanError as error:
        raise PlanError(*(replace(each, given=f"the teacher: {each.given}") for each in error.problems)) from error
    parallelize(plan, teacher, own_dims, context, None, transforms, cast)
    return ForwardBackward(model=teacher, inputs=inputs, plan=plan, world=dims.world, context=context)


@dataclass(kw_only=True, slots=True)
class DistilledObjective:
    """The objective of a student: ``ForwardBackward`` calls ``observe`` with a micro-batch, then the step its loss.

    Attributes:
        teacher: Passes of the teacher.
        task: The task's own objective.
        given: The same as it was given, such as a loss of ``torch.nn``.
        options: Weights and temperature.
        digest: Digest of the teacher's values.
        features: The modules whose outputs are compared; None if there are none.
    """

    teacher: ForwardBackward
    task: Objective
    given: Callable[..., Any]
    options: DistillOptions
    digest: str
    features: FeatureOutputs | None = None
    _teacher_outputs: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the teacher does to the mathematics of a step, by name of the option."""
        return {**asdict(self.options), "teacher": self.digest}

    def observe(self, micro_batch: Batch) -> None:
        """Compute the teacher's outputs for a micro-batch."""

        def keep(_number: int, outputs: Any, _batch: Batch) -> None:
            self._teacher_outputs = outputs

        with torch.no_grad():
            self.teacher.evaluate([micro_batch], keep)

    def __call__(self, outputs: Any, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The terms by name, whose sum is trained, and their weight."""
        losses, weight = self.task(outputs, batch)
        frac = self.options.teacher_frac
        check_losses(losses)
        named = losses if not isinstance(losses, Tensor) else {_loss_name(self.given): losses}
        terms = {name: loss * (1 - frac) for name, loss in named.items()}
        student_logits, teacher_logits = find_logits(outputs), find_logits(self._teacher_outputs)
        self._teacher_outputs = None
        if (_objective_kind(self.given) or _kind_of_targets(batch)) == NUMBERS:
            terms["teacher_mse"], weights = _squared_errors(student_logits, teacher_logits, batch)
            terms["teacher_mse"] *= frac
        else:
            weights = _weights_of_rows(student_logits, batch, self.given)
            terms["kl"] = frac * divergence_sum(student_logits, teacher_logits, weights, self.options.temperature)
        if self.features is not None:
            terms["features"] = self.options.features_weight * self.features.errors(weights)
        reshard(self.teacher.model)  # without a backward pass nothing else frees what the loss has read
        return terms, weight

    def close(self) -> None:
        """Leave the trained model as it was given."""
        if self.features is not None:
            self.features.close()


def _objective_kind(objective: Callable[..., Any]) -> str:
    """Whether outputs are of classes or numbers, by the objective; empty for one of the user's own."""
    return objective_kind(_objective_name(objective))


def _objective_name(objective: Callable[..., Any]) -> str:
    return type(objective).__name__ if isinstance(objective, nn.Module) else function_name(objective)


def _loss_name(objective: Callable[..., Any]) -> str:
    """The name of the task's loss among the terms: ``ce``, ``mse``, the class of a loss of ``torch.nn``, or ``task``."""
    if _objective_kind(objective) == CLASSES:
        return "ce"
    if objective is mean_squared_error or isinstance(objective, nn.MSELoss):
        return "mse"
    return type(objective).__name__ if isinstance(objective, nn.Module) else "task"


def _kind_of_targets(batch: Batch) -> str:
    targets = batch.get("targets")
    if targets is not None and not targets.is_floating_point():
        return CLASSES
    raise DataError(
        given="a teacher with an objective of your own, for "
        + ("a batch without 'targets'" if targets is None else f"targets that are {targets.dtype}"),
        rule="outputs are compared as logits of classes where the targets are integers; of a built-in objective it is known",
        consequence="the outputs could be logits or numbers; nothing was trained",
        nearest="the objective cross_entropy or mean_squared_error",
    )


def _weights_of_rows(logits: LazyLogits | Tensor, batch: Batch, objective: Callable[..., Any]) -> Tensor:
    """The weight of each row [...] of logits [..., V], as the task's ``objective`` counts it."""
    rows = logits.hidden.shape[:-1] if isinstance(logits, LazyLogits) else logits.shape[:-1]
    targets = batch["targets"]
    if not targets.is_floating_point() and targets.shape != rows:
        raise DataError(
            given=f"targets {list(targets.shape)} for a student with {list(rows)} rows of logits",
            rule="the teacher's term counts each row whose target counts",
            consequence="it is not known which rows count; nothing was trained",
            nearest=f"targets {list(rows)} in the batch, {IGNORED} where none is asked",
        )
    return row_weights(batch, targets, objective).reshape(rows)


def _squared_errors(
    student_logits: LazyLogits | Tensor, teacher_logits: LazyLogits | Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Weighted sum of squared differences of numbers [B, …], and the weight of each sample [B], the sum of those of its elements,
    as ``mean_squared_error`` counts them."""
    student, teacher = dense_logits(student_logits).float(), dense_logits(teacher_logits).float()
    if student.numel() != teacher.numel() or len(student) != len(teacher):
        raise DataError(
            given=f"a teacher with outputs {list(teacher.shape)} for a student with outputs {list(student.shape)}",
            rule="both predict the same numbers",
            consequence="their outputs cannot be compared; nothing was trained",
            nearest="a teacher for the same task",
        )
    weights = flat_weights(batch, student).reshape(len(student), -1)  # [B, elements]
    errors = (student - teacher.reshape(student.shape)).square().reshape(weights.shape)
    return (errors * weights).sum(), weights.sum(1)

"""Plans out of what MindSpore says about a parallel job: its strategy files and its settings. Imports no torch.

A strategy file cuts each operator and parameter for itself; a plan has one degree for each way of being parallel, and rules for
the layers. What a plan cannot say is told with the reason; where the numbers contradict each other no plan is made.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from unisono.errors import ConfigError, PlanError, Problem, nearest_name
from unisono.interop.mindspore_strategy import OperatorStrategy, StrategyFile
from unisono.plan.options import MOST_RANKS
from unisono.sanitize import listed

# of operators whose second input is a weight, and of norms, whose input a sequence-parallel job cuts over all devices
_PRODUCTS: Final = ("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt", "Dense")
_NORMS: Final = ("LayerNorm", "LayerNormExt", "RmsNorm", "AddRmsNorm")
# names of ``AutoParallel`` → those of ``set_auto_parallel_context``
_ALIASES: Final[Mapping[str, str]] = {
    "shard_size": "optimizer_weight_shard_size",
    "threshold": "parallel_optimizer_threshold",
    "stages": "pipeline_stages",
    "scheduler": "pipeline_scheduler",
    "interleave": "pipeline_interleave",
}
_GROUPS: Final = ("parallel_optimizer_config", "pipeline_config")  # settings that are a dict of settings
_MODES: Final = (
    *("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"),
    *("semi_auto", "sharding_propagation", "recursive_programming"),
)
_LEVELS: Final = {"level1": 1, "level2": 2, "level3": 3}
_SCHEDULES: Final = {"gpipe": "gpipe", "1f1b": "1f1b", "zero_bubble_v": "zbv"}
_BYTES_OF_FP32: Final = 4
_WHOLE: Final = (  # settings that are whole numbers, and the least that each may be
    *(("device_num", 1), ("pipeline_stages", 1), ("optimizer_weight_shard_size", -1)),
    *(("parallel_optimizer_threshold", 0), ("micro_size", 1)),
)
_TRUTHS: Final = ("gradients_mean", "enable_parallel_optimizer", "full_batch", "pipeline_interleave")
# settings without a counterpart in a plan
_ELSEWHERE: Final[Mapping[str, str]] = {
    "global_rank": "ranks are numbered by the launcher",
    "gradient_fp32_sync": "parameters and gradients are fp32, and so are their sums",
    "loss_repeated_mean": "each sample's loss counts once",
    "parameter_broadcast": "all ranks start with the parameters of rank 0",
    "search_mode": "the strategy that was found is in the file; unisono plan searches one of its own",
    "auto_parallel_search_mode": "the strategy that was found is in the file; unisono plan searches one of its own",
    "auto_pipeline": "pipeline_stages is the number that it came to",
    "strategy_ckpt_config": "the file is an argument of this command",
    "strategy_ckpt_load_file": "the file is an argument of this command",
    "strategy_ckpt_save_file": "the file is an argument of this command",
    "group_ckpt_save_file": "checkpoints of sharded runs load on any number of ranks",
    "comm_fusion": "gradients are summed in buckets of sync.bucket_bytes",
    "all_reduce_fusion_config": "gradients are summed in buckets of sync.bucket_bytes",
    "enable_alltoall": "tokens are exchanged with experts by all-to-all",
    "communi_parallel_mode": "sums run beside the backward pass",
    "gradient_accumulation_shard": "optimizer_level=level2 says the same",
    "pipeline_result_broadcast": "the loss of a pipeline is on all ranks",
    "dump_local_norm": "train.gradient_stats_every_steps of a run",
    "dump_local_norm_path": "train.gradient_stats_every_steps of a run",
    "dump_device_local_norm": "train.gradient_stats_every_steps of a run",
}
_NAMES: Final = (
    *("parallel_mode", "optimizer_level", "dataset_strategy", "pipeline_scheduler"),
    *(name for name, _ in _WHOLE),
    *_TRUTHS,
    *_ELSEWHERE,
    *_ALIASES,
    *_GROUPS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedPlan:
    """Fields of a plan by group, the number of ranks they are for, and what they leave out: pairs of a subject and the reason."""

    fields: dict[str, dict[str, Any]]
    num_ranks: int
    notes: list[tuple[str, str]]


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Settings ``NAME=VALUE`` as ``set_auto_parallel_context`` and the methods of ``AutoParallel`` have them.

    A value is one of Python, or a word. Raises ConfigError with all names that are unknown and values that do not fit.
    """
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in texts:
        name, separator, written = text.partition("=")
        value = _value(written)
        if not separator or name not in _NAMES:
            problems.append(_bad_setting(text, "NAME is a setting of set_auto_parallel_context or AutoParallel", name))
        elif name in _GROUPS and isinstance(value, dict):
            given |= {_ALIASES.get(str(key), str(key)): each for key, each in value.items()}
        elif name in _GROUPS:
            problems.append(_bad_setting(text, "it is a dict of settings", name))
        else:
            given[_ALIASES.get(name, name)] = value
    problems += [_bad_setting(f"{name}={given[name]!r}", rule, name) for name, rule in _misfits(given)]
    if problems:
        raise ConfigError(*problems)
    return given


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _misfits(given: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Names whose values do not fit, and what they have to be."""
    yield from ((name, "it is no setting that is known") for name in given if name not in _NAMES)
    for name, least in _WHOLE:
        value = given.get(name, least)
        if type(value) is not int or not least <= value <= MOST_RANKS:
            yield name, f"it is a whole number from {least} to {MOST_RANKS:,}"
    yield from ((name, "it is True or False") for name in _TRUTHS if type(given.get(name, True)) is not bool)
    if given.get("parallel_mode", _MODES[0]) not in _MODES:
        yield "parallel_mode", f"it is one of {', '.join(_MODES)}; the layout of hybrid_parallel is in the program"
    if given.get("optimizer_level", "level1") not in _LEVELS:
        yield "optimizer_level", f"it is one of {', '.join(_LEVELS)}"
    if given.get("pipeline_scheduler", "1f1b") not in _SCHEDULES:
        yield "pipeline_scheduler", f"of MindSpore's schedules {', '.join(_SCHEDULES)} are here too"


def _bad_setting(given: str, rule: str, name: str) -> Problem:
    return Problem(
        given=f"--context {given}",
        rule=rule,
        consequence="no plan was made",
        nearest=nearest_name(name, _NAMES)
        if name not in _NAMES
        else "--context device_num=8 --context pipeline_stages=2",
    )


@dataclass(kw_only=True, slots=True)
class _Found:
    """What files and settings come to.

    Attributes:
        context: The settings.
        operators: Strategies of all files.
        notes: What has no counterpart.
        problems: What contradicts itself.
    """

    context: Mapping[str, Any]
    operators: tuple[OperatorStrategy, ...] = ()
    notes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    problems: list[Problem] = field(default_factory=list[Problem])

    def contradict(self, given: str, rule: str, nearest: str) -> None:
        self.problems.append(Problem(given=given, rule=rule, consequence="no plan was made", nearest=nearest))


def imported_plan(files: Sequence[StrategyFile], context: Mapping[str, Any]) -> ImportedPlan:
    """The fields of a plan that strategy files and settings come to.

    Args:
        files: The files of a job: one, one of each pipeline stage, or one that was merged.
        context: Settings, as ``parse_settings`` gives them.

    Raises PlanError, with all that contradicts itself.
    """
    found = _Found(context=context, operators=tuple(each for file in files for each in file.operators))
    found.notes += [(f"{name}={context[name]!r}", why) for name, why in _ELSEWHERE.items() if name in context]
    stages = _stages(found, files)
    devices = _devices(found, files, stages)
    tp = _tensor_parallel(found, files)
    if devices and devices % tp:
        found.contradict(
            f"weights are cut in {tp}, and a stage has {devices} devices",
            "the devices of a stage are tensor-parallel groups of one size",
            "the strategy file of the job whose device_num is given",
        )
    dp = max(1, devices // tp)  # no devices: a problem that is told below
    shard = _optimizer_shard(found, files, dp)
    _data(found, dp)
    fields: dict[str, dict[str, Any]] = {
        "mesh": {"pp": stages, "dp_replicate": dp // shard, "dp_shard": shard, "tp": tp},
    }
    if shard > 1:
        fields["fsdp"] = _sharded_state(found)
    if stages > 1:
        fields |= _pipeline(found, stages)
    if tp > 1 and _is_sequence_parallel(found, dp * tp):
        fields["tensor_parallel"] = {"sequence_parallel": True}
    if found.problems:
        raise PlanError(*found.problems)
    return ImportedPlan(fields=fields, num_ranks=stages * dp * tp, notes=found.notes)


def _stages(found: _Found, files: Sequence[StrategyFile]) -> int:
    seen = {operator.stage for operator in found.operators} | {file.stage for file in files if not file.layouts}
    seen |= {file.stage if layout.stage is None else layout.stage for file in files for layout in file.layouts}
    if any(layout.stage is not None for file in files for layout in file.layouts):
        # of a merged file, current_stage and the stages of operators that merging has overwritten say nothing
        seen = {layout.stage for file in files for layout in file.layouts if layout.stage is not None}
    least = max(seen, default=0) + 1
    given = found.context.get("pipeline_stages", 0)
    if given and given < least:
        found.contradict(
            f"pipeline_stages={given}, and a strategy of stage {least - 1}",
            "stages are numbered from 0",
            f"--context pipeline_stages={least}",
        )
    elif not given and least > 1 and len(seen) < least:
        found.notes.append(
            (f"stages {listed(map(str, sorted(seen)))}", f"the others have no file: {least} stages are taken")
        )
    return given or least


def _devices(found: _Found, files: Sequence[StrategyFile], stages: int) -> int:
    """Devices of a stage."""
    sizes = sorted({layout.num_devices for file in files for layout in file.layouts})
    total = found.context.get("device_num", 0)
    if found.context.get("parallel_mode") == "stand_alone":
        total = 1
    if len(sizes) > 1:
        found.contradict(
            f"parameters laid out on {listed(map(str, sizes))} devices",
            "the product of dev_matrix is the same for all parameters: the devices of a stage",
            "the strategy files of one job",
        )
    if sizes:
        if total and total != sizes[0] * stages:
            found.contradict(
                f"device_num={total} with {stages} {'stage' if stages == 1 else 'stages'} of {sizes[0]} devices",
                "device_num is the number of stages times the devices of one",
                f"--context device_num={sizes[0] * stages}, or --context pipeline_stages={max(1, total // sizes[0])}",
            )
        return sizes[0]
    if total and total % stages:
        found.contradict(
            f"device_num={total} with pipeline_stages={stages}",
            "all stages have the same number of devices",
            f"--context device_num={total // stages * stages or stages}",
        )
    if not total:
        found.contradict(
            "neither a layout of a parameter nor device_num",
            "the number of devices is the product of a dev_matrix, or device_num",
            "--context device_num=8",
        )
    return total // stages


def _products(found: _Found) -> list[OperatorStrategy]:
    """Matrix products, whose second input is a weight, or stands for one."""
    return [each for each in found.operators if each.name.partition("_")[0] in _PRODUCTS and len(each.inputs) > 1]


def _tensor_parallel(found: _Found, files: Sequence[StrategyFile]) -> int:
    layouts = {layout.name: layout for file in files for layout in file.layouts}
    cuts = {each.name.partition("_")[2]: each.inputs[1] for each in _products(found)}
    if not cuts:  # as files have it that were made of layouts alone
        cuts = {name: layout.cuts for name, layout in layouts.items() if len(layout.cuts) > 1}
    degrees = {name: math.prod(cut) for name, cut in cuts.items()}
    found_degrees = sorted({degree for degree in degrees.values() if degree > 1})
    if len(found_degrees) > 1:
        found.contradict(
            "weights cut in " + " and in ".join(f"{n} ({_some(degrees, n)})" for n in found_degrees),
            "tensor parallelism has one degree, mesh.tp, for all layers",
            "one degree there; plan.ep distributes experts, and plan.cp sequences",
        )
    if not found_degrees:
        return 1
    tp = found_degrees[0]
    reason = "layers are sharded by the rules of the model (tensor_parallel.rules, unisono plan show), not one by one"
    if whole := [name for name, degree in degrees.items() if degree == 1]:
        found.notes.append((f"weights that are whole: {listed(whole, 200)}", reason))
    if both := [name for name, cut in cuts.items() if sum(part > 1 for part in cut) > 1]:
        found.notes.append((f"weights cut along two dims: {listed(both, 200)}", "here a weight is cut along one"))
    others = [name for name, layout in layouts.items() if name not in cuts and math.prod(layout.cuts) not in (1, tp)]
    if others:
        found.notes.append((f"parameters cut otherwise than in {tp}: {listed(others, 200)}", reason))
    return tp


def _some(degrees: Mapping[str, int], degree: int) -> str:
    return listed([name for name, each in degrees.items() if each == degree], 120)


def _data(found: _Found, dp: int) -> None:
    """Compare what cuts the samples with ``dp``, and say how samples and gradients differ."""
    inputs = [each.inputs[0] for each in _products(found) if each.inputs[0]]
    fewer = sorted({cut[0] for cut in inputs if cut[0] < dp})
    if fewer:
        reason = f"the other devices compute the same there; here {dp} data ranks compute {dp} parts of the batch"
        found.notes.append((f"samples in {listed(map(str, fewer))} parts", reason))
    if any(len(cut) > 2 and cut[1] > 1 for cut in inputs):
        found.notes.append(("sequences that are cut", "plan.cp cuts sequences, over ranks of its own"))
    strategy = found.context.get("dataset_strategy", "data_parallel")
    if found.context.get("full_batch") or strategy == "full_batch":
        found.notes.append(("full_batch", "each data rank reads its own part of the batch, and reads no more"))
    elif strategy != "data_parallel":
        found.notes.append(
            (f"dataset_strategy={strategy!r}", f"the batch is divided over {dp} data ranks, in the first dim")
        )
    if dp > 1 and not found.context.get("gradients_mean", False):
        reason = f"gradients are summed over devices there, and averaged here: multiply the learning rate by {dp}"
        found.notes.append(("gradients_mean=False, the default", reason))


def _optimizer_shard(found: _Found, files: Sequence[StrategyFile], dp: int) -> int:
    """Ranks that share one copy of the state."""
    sizes = {layout.shard_size for file in files for layout in file.layouts if layout.shard_size not in (0, 1)}
    if not sizes and found.context.get("enable_parallel_optimizer"):
        sizes = {found.context.get("optimizer_weight_shard_size", -1)}
    whole = sorted({dp if size < 0 else size for size in sizes} - {0, 1})
    if not whole:
        return 1
    if len(whole) > 1:
        found.contradict(
            f"optimizer states of {listed(map(str, whole))} devices",
            "the state is sharded over one number of ranks, mesh.dp_shard",
            "one optimizer_weight_shard_size there; small parameters stay whole by fsdp.shard_threshold_numel",
        )
    if dp % whole[0]:
        found.contradict(
            f"optimizer states shared by {whole[0]} of {dp} data ranks",
            "the data ranks are groups of the same size, each with one copy of the state",
            f"an optimizer_weight_shard_size that divides {dp}; MindSpore leaves states whole otherwise",
        )
    return whole[0]


def _sharded_state(found: _Found) -> dict[str, Any]:
    level = found.context.get("optimizer_level", "level1")
    zero = _LEVELS[level]
    if zero < 3:
        reason = f"ZeRO {zero}: MindSpore keeps weights in parts too between steps; plan.zero=3 does, and gathers them once more"
        found.notes.append((f"optimizer_level={level}", reason))
    state: dict[str, Any] = {"zero": zero}
    if "parallel_optimizer_threshold" in found.context:
        state["shard_threshold_numel"] = found.context["parallel_optimizer_threshold"] * 1024 // _BYTES_OF_FP32
    else:
        reason = "parameters below 64 KiB stay whole there; fsdp.shard_threshold_numel=16384 in the plan does the same"
        found.notes.append(("parallel_optimizer_threshold, the default", reason))
    return state


def _pipeline(found: _Found, stages: int) -> dict[str, dict[str, Any]]:
    scheduler = found.context.get("pipeline_scheduler", "1f1b")
    schedule = "interleaved" if found.context.get("pipeline_interleave") else _SCHEDULES[scheduler]
    if schedule == "interleaved" and scheduler != "1f1b":
        found.notes.append((f"pipeline_scheduler={scheduler!r} with pipeline_interleave", "interleaved 1f1b is taken"))
    passes = found.context.get("micro_size", 0)
    if not passes:
        reason = f"of Pipeline(network, micro_size): {stages} are taken, as many as stages; --context micro_size=… says others"
        found.notes.append(("micro_size", reason))
    found.notes.append(
        ("blocks of the stages", "stages are balanced here; pipeline.layers_per_stage in the plan fixes them")
    )
    return {"pipeline": {"schedule": schedule}, "batch": {"accumulation": passes or stages}}


def _is_sequence_parallel(found: _Found, num_ranks: int) -> bool:
    """Whether norms are computed in as many parts as data and tensor ranks together have."""
    norms = [each for each in found.operators if each.name.partition("_")[0] in _NORMS and each.inputs]
    return bool(norms) and all(math.prod(each.inputs[0]) == num_ranks for each in norms)

"""The plan of a run: one frozen record of the computation of a step and its layout on ranks, resolved once.

Ranks are numbered row-major over the mesh axes (``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``), so the ``tp`` ranks of
one layer are neighbours. ``ep`` is no axis of its own: it regroups the ``dp_shard`` x ``cp`` ranks for experts. A plan is
printable, comparable and saved with every checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from unisono.config.renames import announce, migrate_plan
from unisono.errors import PlanError, Problem, nearest_name
from unisono.plan.options import Compile, PlanOptions, Recompute, Schedule, Sync, Zero
from unisono.plan.rules import DtypeRule, ParameterPlacement, Rule, match_modules
from unisono.storage.files import write_atomically
from unisono.storage.limits import MAX_PLAN_BYTES, read_json

VERSION = 3
# default size of the gradients summed by one all-reduce
BUCKET_BYTES = 4 * 2**20
# the pin of a plan that was read from a strategy file as a whole; "file:mesh.tp" is that of one field
FROM_FILE = "file"
# default number of pipeline stages per rank
STAGES_PER_RANK: Mapping[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Device type, and number of ranks along each mesh axis."""

    device: str
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs."""
        return self.pp * self.dp_world_size * self.cp * self.tp

    @property
    def dp_world_size(self) -> int:
        """Number of different parts of a batch that are computed at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_degree(self) -> int:
        """Number of ranks that share one copy of the state. ``cp`` ranks compute parts of the same samples and share it too."""
        return self.dp_shard * self.cp


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Samples per step over all ranks, samples per forward pass on one rank, and forward passes per step on one rank."""

    global_batch: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPlan:
    """Dtype of matrix products, and rules for modules that differ from it."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    dtype_rules: tuple[DtypeRule, ...]

    @property
    def uses_loss_scale(self) -> bool:
        """Whether anything computes in fp16, whose small gradients need a loss scale."""
        return self.compute == "fp16" or any(rule.compute == "fp16" for rule in self.dtype_rules)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePlan:
    """Activations that are recomputed or offloaded: in the blocks, or in the ``modules`` named by pattern.

    ``blocks_per_stage`` counts the recomputed blocks of each pipeline stage, from the first on; empty means all blocks.
    ``saved_ops`` are the operators whose results selective recompute keeps; empty means the built-in list.
    """

    mode: Recompute
    modules: tuple[str, ...]
    blocks_per_stage: tuple[int, ...]
    saved_ops: tuple[str, ...]
    offload: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPPlan:
    """How the state is sharded over ``dp_shard`` x ``cp`` ranks. Parameters below the threshold, and those of
    ``ignored_modules`` (patterns), are replicated."""

    zero: Zero
    shard_threshold_numel: int
    ignored_modules: tuple[str, ...]
    prefetch_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Schedule, and number of blocks of each stage; where that is empty, stages are balanced by ``block_costs``.

    ``block_costs``: first what comes before the blocks, then each block, last what follows them; empty means counted FLOPs.
    """

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    block_costs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """How gradients or parameters are synchronised between data ranks; see ``PlanOptions`` for the fields."""

    kind: Sync
    compression: str
    bucket_bytes: int
    reduction: Literal["mean", "sum"]
    staleness: int | None
    staleness_lr_decay: bool
    local_steps: int
    outer_lr: float
    outer_momentum: float
    num_fragments: int
    outer_delay_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelPlan:
    """Which layers are sharded over ``tp``, and how; empty ``rules`` means built-in or inferred ones."""

    sequence_parallel: bool
    rules: tuple[Rule, ...]
    placements: tuple[ParameterPlacement, ...]

    @property
    def dtensor_placements(self) -> tuple[ParameterPlacement, ...]:
        """Those by which modules compute with DTensors over ``tp``: all but those of other axes alone."""
        return tuple(each for each in self.placements if "tp" in each.dims or not any(each.dims))

    @property
    def state_placements(self) -> tuple[ParameterPlacement, ...]:
        """Those that name ``dp_shard`` or ``ep``."""
        return tuple(each for each in self.placements if not {"dp_shard", "ep"}.isdisjoint(each.dims))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendPlan:
    """Compiler, and choices of kernels and memory layout; see ``PlanOptions`` for the fields."""

    compile: Compile
    tf32: bool
    autotune: bool
    channels_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides the computation of a step and its layout on ranks.

    ``derive_plan`` makes one from options, ``load`` and ``from_json`` read one; ``updated`` changes fields. Two plans that
    compute the same are equal.

    Attributes:
        version: Version of the stored form.
        mesh: Device type, and number of ranks along each mesh axis.
        batch: Samples per step and per forward pass, and forward passes per step.
        precision: Dtype of matrix products, with rules for modules that differ.
        recompute: Activations that are recomputed or offloaded.
        fsdp: How parameters, gradients and optimizer state are sharded.
        pipeline: Schedule and stages.
        sync: How data ranks synchronise gradients or parameters.
        tensor_parallel: Layers that are sharded over ``tp``.
        backend: Compiler, and choices of kernels and memory layout.
        pins: Names of the options that the user set, ``file`` for a plan of a strategy file, ``file:mesh.tp`` for a field of a
            partial one; not compared. ``field_origins`` reads them.
        provenance: How the other fields were derived, in words; not compared.
    """

    version: int = VERSION
    mesh: MeshPlan
    batch: BatchPlan
    precision: PrecisionPlan
    recompute: RecomputePlan
    fsdp: FSDPPlan
    pipeline: PipelinePlan
    sync: SyncPlan
    tensor_parallel: TensorParallelPlan
    backend: BackendPlan
    pins: tuple[str, ...] = field(default=(), compare=False)
    provenance: str = field(default="", compare=False)

    @property
    def uses_fsdp(self) -> bool:
        """Whether ranks gather parameters from each other."""
        return self.mesh.shard_degree > 1

    @property
    def is_model_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.uses_fsdp or self.mesh.tp > 1 or self.mesh.pp > 1

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that one rank runs, one after the other."""
        layers = self.pipeline.layers_per_stage
        return len(layers) // self.mesh.pp if layers else STAGES_PER_RANK[self.pipeline.schedule]

    def shard_degree_of(self, name: str, numel: int, *, expert: bool = False) -> int:
        """Number of ranks that the parameter ``name``, of ``numel`` elements in the whole model, is sharded over by FSDP.

        ``expert``: it belongs to a stack of experts, which ``ep`` distributes first.
        """
        if expert and self.mesh.ep > 1:
            return self.mesh.shard_degree // self.mesh.ep
        parts = name.split(".")[:-1]
        parents = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        ignored = any(match_modules(pattern, parents) for pattern in self.fsdp.ignored_modules)
        return 1 if ignored or numel < self.fsdp.shard_threshold_numel else self.mesh.shard_degree

    def updated(self, **groups: Mapping[str, Any]) -> Plan:
        """A copy with fields of groups replaced: ``plan.updated(mesh={"tp": 2}, batch={"micro_batch": 1})``."""
        return replace(self, **{name: replace(getattr(self, name), **values) for name, values in groups.items()})

    def to_json(self) -> dict[str, Any]:
        """Plain data, by group, in field order."""
        return msgspec.json.decode(msgspec.json.encode(self))

    def decisions(self) -> dict[str, Any]:
        """The fields that decide the computation, as plain data by dotted name: all but pins and provenance."""
        return {name: value for name, value in _flat(self.to_json()).items() if name not in ("pins", "provenance")}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_json``; a plan of version 2 is migrated. Raises PlanError for another version, else with all
        unknown, missing and ill-typed fields at once."""
        types = _field_types()
        values, problems = _typed_fields(data)
        rule = f"a plan has the fields {', '.join(types)}, all of them"
        missing = types.keys() - _given_names(data)
        problems += [_not_loaded(f"{name!r} is missing", rule, f'"{name}": …') for name in missing]
        if problems:
            raise PlanError(*sorted(problems, key=lambda problem: problem.given))
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group, _, short = name.rpartition(".")
            groups.setdefault(group, {})[short] = value
        whole, types_of_groups = groups.pop(""), get_type_hints(Plan)
        return Plan(**whole, **{name: types_of_groups[name](**members) for name, members in groups.items()})

    def save(self, path: str | Path) -> None:
        """Write the strategy file: JSON, a line per field, always in the same order."""
        write_atomically(Path(path), strategy_text(self.to_json()).encode())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a strategy file that holds the whole plan; ``PlanOptions(file=…)`` reads a partial one too.

        Raises PlanError where it cannot be read or its fields do not fit (see ``from_json``).
        """
        data = read_strategy_file(Path(path))
        with _naming(path):
            plan = Plan.from_json(data)
        announce(str(path), migrate_plan(data).renamed)
        return plan

    @property
    def hash(self) -> str:
        """Twelve hex digits over the canonical JSON of the decisions."""
        return hashlib.sha256(msgspec.json.encode(self.decisions(), order="sorted")).hexdigest()[:12]

    def __repr__(self) -> str:
        return f"Plan({self.describe()})"

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Decisions that differ: dotted name → (mine, theirs)."""
        mine, theirs = self.decisions(), other.decisions()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def describe(self) -> str:
        """A summary of the plan in one line."""
        mesh, batch, sync = self.mesh, self.batch, self.sync
        shards = f", {mesh.pp} stages ({self.pipeline.schedule})" if mesh.pp > 1 else ""
        shards += f", state over {mesh.shard_degree} (ZeRO {self.fsdp.zero})" if self.uses_fsdp else ""
        shards += f", cp {mesh.cp}" if mesh.cp > 1 else ""
        shards += f", tp {mesh.tp}" if mesh.tp > 1 else ""
        shards += f", ep {mesh.ep}" if mesh.ep > 1 else ""
        details = "" if sync.compression == "none" else f" ({sync.compression})"
        if sync.kind == "dist_async" and sync.staleness is not None:
            details += f" (at most {sync.staleness} ahead)"
        if sync.kind == "dist_local":
            details += f" (every {sync.local_steps} steps)"
        return (
            f"{mesh.world_size} x {mesh.device}{shards}, {self.precision.compute}, batch {batch.global_batch} ="
            f" {mesh.dp_world_size} ranks x {batch.accumulation} x {batch.micro_batch}, sync {sync.kind}{details}"
            f", recompute {self.recompute.mode}, compile {self.backend.compile}"
        )


def strategy_text(data: Mapping[str, Any]) -> str:
    """The text of a strategy file: JSON with a line per field; also lists of numbers take one."""
    text = json.dumps(data, indent=1)
    # no string of JSON has a line break
    return re.sub(r"\[\n([-+.\de,\s]+)\n\s*\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def read_strategy_file(path: Path) -> dict[str, Any]:
    """The JSON object of a strategy file, not checked further. Raises PlanError."""
    try:
        data: Any = read_json(path, msgspec.json.decode, max_bytes=MAX_PLAN_BYTES)
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise PlanError(
            given=f"strategy file {path}: {error.strerror if isinstance(error, OSError) else error}",
            rule=f"a strategy file is a JSON object of at most {MAX_PLAN_BYTES >> 20} MiB",
            consequence="there is no plan",
            nearest="the plan.json that a run keeps in its folder",
        ) from error
    return cast("dict[str, Any]", data)


def is_whole(data: Mapping[str, Any]) -> bool:
    """Whether the JSON object of a strategy file has all fields of a plan, or is one of another version."""
    return data.get("version", VERSION) != VERSION or _field_types().keys() <= _given_names(data) | {
        "pins",
        "provenance",
    }


def load_fields(path: str | Path) -> dict[str, Any]:
    """The fields that a strategy file gives, some of a plan or all, by dotted name; without pins and provenance.

    Raises PlanError where the file cannot be read, has no field, or has unknown or ill-typed ones (all at once).
    """
    data = read_strategy_file(Path(path))
    with _naming(path):
        values, problems = _typed_fields(data)
        values = {name: value for name, value in values.items() if "." in name}
        if problems:
            raise PlanError(*sorted(problems, key=lambda problem: problem.given))
        if not values:
            rule = f"a strategy file gives at least one field of {', '.join(sorted(_GROUPS))}"
            raise PlanError(_not_loaded("there is no field of a plan", rule, '{"mesh": {"tp": 2}}'))
    announce(str(path), migrate_plan(data).renamed)
    return values


def field_origins(plan: Plan) -> dict[str, str]:
    """Who chose each field, by dotted name: ``strategy file``, ``setting plan.tp``, ``default``, or ``planner``.

    The planner derives what neither file nor setting gives from the number of ranks, the device and the model.
    """
    defaults = PlanOptions()
    derived = {
        "mesh.device",
        "mesh.dp_replicate",
        "batch.micro_batch",
        "batch.accumulation",
        "precision.compute",
        "sync.kind",
    }
    fixed: dict[str, Any] = {"sync.bucket_bytes": BUCKET_BYTES, "sync.reduction": "mean"}
    origins: dict[str, str] = {}
    for name, value in plan.decisions().items():
        if "." not in name:
            continue
        option = option_of(name)
        default = getattr(defaults, option) if option else fixed.get(name, 0 if isinstance(value, int) else [])
        if FROM_FILE in plan.pins or f"{FROM_FILE}:{name}" in plan.pins:
            origins[name] = "strategy file"
        elif option in plan.pins:
            origins[name] = f"setting plan.{option}"
        else:
            origins[name] = "planner" if name in derived or value != default else "default"
    return origins


def option_of(name: str) -> str:
    """The option of ``PlanOptions`` that sets the field ``name``; empty for a field of strategy files only."""
    renamed = {"precision.compute": "precision", "recompute.mode": "recompute", "sync.kind": "sync"}
    short = renamed.get(name, name.partition(".")[2])
    return short if short in {f.name for f in fields(PlanOptions)} else ""


def precision_reason(plan: Plan) -> str:
    """Why the plan computes in its precision, in a few words."""
    if not {"precision", FROM_FILE, f"{FROM_FILE}:precision.compute"}.isdisjoint(plan.pins):
        return f"{plan.precision.compute} as asked"
    if plan.precision.compute == "bf16":
        return "bf16 is native here"
    return f"no native bf16 on this {plan.mesh.device}"


@cache
def _field_types() -> dict[str, Any]:
    """Dotted name → type of each field, in order."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(Plan).items():
        members = get_type_hints(kind) if is_dataclass(kind) else None
        types |= {name: kind} if members is None else {f"{name}.{member}": hint for member, hint in members.items()}
    return types


def _given_names(data: Mapping[str, Any]) -> set[str]:
    """Dotted names of the fields of stored plan data, with those of this version."""
    return {*(_flat(data) if data.get("version", VERSION) == VERSION else migrate_plan(data).values)} | {"version"}


def _typed_fields(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the known fields by dotted name, in order, and a problem for each unknown or ill-typed one.

    Raises PlanError for another version, which is then the only problem.
    """
    version = data.get("version", VERSION)
    if type(version) is not int or version not in (2, VERSION):
        rule = f"this unisono reads version {VERSION}, and migrates version 2"
        near = f"a plan of version {VERSION}, or another unisono"
        raise PlanError(_not_loaded(f"a plan of version {version!r}", rule, near))
    types = _field_types()
    given = _flat(data) if version == VERSION else migrate_plan(data).values
    rule = f"a plan has the fields {', '.join(types)}, all of them"
    problems: list[Problem] = []
    for name in given.keys() - types:
        full_name = next((dotted for dotted in types if dotted.endswith(f".{name}")), name)
        problems.append(_not_loaded(f"there is no field {name!r}", rule, nearest_name(full_name, [*types, *_GROUPS])))
    values: dict[str, Any] = {}
    for name in (name for name in types if name in given):
        try:
            values[name] = msgspec.convert(given[name], types[name])
        except msgspec.ValidationError as error:
            fault = f"{name} = {given[name]!r}: {error}"
            problems.append(_not_loaded(fault, "a field holds a value of its type", _accepted(types[name])))
    return values, problems


@contextmanager
def _naming(path: str | Path) -> Generator[None]:
    """Put the name of the file before each problem."""
    try:
        yield
    except PlanError as error:
        raise PlanError(*(replace(problem, given=f"{path}: {problem.given}") for problem in error.problems)) from error


_GROUPS = frozenset(f.name for f in fields(Plan)) - {"version", "pins", "provenance"}


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name. A group that is no object, and a field outside of its group, stay under names that no field has."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if name in _GROUPS and isinstance(value, Mapping):
            flat |= {f"{name}.{member}": item for member, item in cast("Mapping[str, Any]", value).items()}
        else:
            flat[f"{name} outside of its group" if "." in name else name] = value
    return flat


def _not_loaded(given: str, rule: str, nearest: str) -> Problem:
    return Problem(given=given, rule=rule, consequence="the plan was not loaded", nearest=nearest)


def _accepted(kind: Any) -> str:
    """The values that a field of this type accepts, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return (
        "a list, as docs/plans.md has it"
        if get_origin(kind) is tuple
        else f"a value of type {getattr(kind, '__name__', kind)}"
    )

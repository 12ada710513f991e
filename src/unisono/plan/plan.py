"""The plan: one frozen record that everyone reads and nobody re-derives (design §3.3).

Ranks are numbered row-major over the mesh axes (``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``), so that the ``tp`` ranks
that share one layer are neighbours. ``ep`` is no axis of its own: it looks at the ``dp_shard`` x ``cp`` ranks again, for
experts. A plan is printable, comparable and saved with every checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from unisono.errors import PlanError, Problem, nearest_name
from unisono.plan.dtype_rules import DtypeRule
from unisono.plan.options import Compile, PlanOptions, Recompute, Schedule, Sync, Zero
from unisono.plan.rules import ParameterPlacement, Rule, match_modules
from unisono.storage.files import write_atomically

_MAX_FILE_BYTES = 1 << 20
VERSION = 2
# of gradients summed by one all-reduce, where a plan does not say
BUCKET_BYTES = 4 * 2**20
# pieces of the model per pipeline rank, where a plan does not say more
STAGES_PER_RANK: Mapping[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides what a step computes and where."""

    version: int = VERSION
    device: str
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    zero: Zero
    shard_threshold_numel: int
    unsharded: tuple[str, ...]
    prefetch_blocks: int
    bucket_bytes: int
    sequence_parallel: bool
    schedule: Schedule
    splits: tuple[int, ...]
    weights: tuple[float, ...]
    rules: tuple[Rule, ...]
    placements: tuple[ParameterPlacement, ...]
    global_batch: int
    micro_batch: int
    accumulation: int
    precision: Literal["fp32", "bf16", "fp16", "fp8"]
    dtypes: tuple[DtypeRule, ...]
    recompute: Recompute
    recompute_modules: tuple[str, ...]
    recompute_blocks: tuple[int, ...]
    recompute_keep: tuple[str, ...]
    offload: bool
    compile: Compile
    sync: Sync
    compression: str
    staleness: int | None
    damping: bool
    local_steps: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    overlap_steps: int
    gradients: Literal["mean", "sum"]
    tf32: bool
    autotune: bool
    channels_last: bool
    # who decided: fields that a user set, and how the rest came about; two plans that compute the same are equal
    pins: tuple[str, ...] = field(default=(), compare=False)
    provenance: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs."""
        return self.pp * self.dp_world_size * self.cp * self.tp

    @property
    def dp_world_size(self) -> int:
        """How many different parts of a batch are computed at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_degree(self) -> int:
        """How many ranks share one copy of the state: those of ``cp`` compute parts of the same samples and share it too."""
        return self.dp_shard * self.cp

    @property
    def uses_fsdp(self) -> bool:
        """Whether ranks gather parameters from each other."""
        return self.shard_degree > 1

    def shard_degree_of(self, name: str, numel: int, *, expert: bool = False) -> int:
        """Over how many ranks the parameter ``name``, of ``numel`` elements in the whole model, is cut as part of the state.

        ``expert``: of a stack of experts, which ``ep`` spreads first. Others stay whole on each rank where they are below the
        threshold or in a module that ``unsharded`` names.
        """
        if expert and self.ep > 1:
            return self.shard_degree // self.ep
        parts = name.split(".")[:-1]
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        whole = numel < self.shard_threshold_numel or any(match_modules(pattern, around) for pattern in self.unsharded)
        return 1 if whole else self.shard_degree

    @property
    def is_model_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.uses_fsdp or self.tp > 1 or self.pp > 1

    @property
    def uses_loss_scale(self) -> bool:
        """Whether anything computes in fp16, whose small gradients need a loss scale."""
        return self.precision == "fp16" or any(rule.compute == "fp16" for rule in self.dtypes)

    @property
    def stages_per_rank(self) -> int:
        """How many pieces of the model one pipeline rank runs, one after the other."""
        return len(self.splits) // self.pp if self.splits else STAGES_PER_RANK[self.schedule]

    def to_json(self) -> dict[str, Any]:
        """Plain data in field order."""
        return msgspec.json.decode(msgspec.json.encode(self))

    def decisions(self) -> dict[str, Any]:
        """The same without pins and provenance: what decides the computation."""
        return {name: value for name, value in self.to_json().items() if name not in ("pins", "provenance")}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_json``. Raises PlanError with all unknown, missing and ill-typed fields at once."""
        types = get_type_hints(Plan)
        rule = f"a plan has the fields {', '.join(each.name for each in fields(Plan))}, all of them"
        problems = [
            _not_loaded(f"there is no field {name!r}", rule, nearest_name(name, types)) for name in data.keys() - types
        ]
        problems += [_not_loaded(f"{name!r} is missing", rule, f'"{name}": …') for name in types.keys() - data.keys()]
        values: dict[str, Any] = {}
        for name in types.keys() & data.keys():
            try:
                values[name] = msgspec.convert(data[name], types[name])
            except msgspec.ValidationError as error:
                given = f"{name} = {data[name]!r}: {error}"
                problems.append(_not_loaded(given, "a field holds a value of its type", _values(types[name])))
        if values.get("version", VERSION) != VERSION:
            near = f"a plan of version {VERSION}, or another unisono"
            problems.append(_not_loaded(f"version {values['version']}", f"this unisono reads version {VERSION}", near))
        if problems:
            raise PlanError(*sorted(problems, key=lambda problem: problem.given))
        return Plan(**values)

    def save(self, path: Path) -> None:
        """Write the strategy file: JSON, a line per field, always in the same order."""
        write_atomically(path, json.dumps(self.to_json(), indent=1).encode() + b"\n")

    @staticmethod
    def load(path: Path) -> Plan:
        """A strategy file. Raises PlanError where it cannot be read or its fields do not fit (see ``from_json``)."""
        try:
            with path.open("rb") as file:
                data: Any = json.loads(file.read(_MAX_FILE_BYTES))
            if not isinstance(data, dict):
                raise ValueError("it holds no object")
        except (OSError, ValueError) as error:
            raise PlanError(
                given=f"strategy file {path}: {error.strerror if isinstance(error, OSError) else error}",
                rule=f"a strategy file is a JSON object of at most {_MAX_FILE_BYTES >> 20} MiB",
                consequence="there is no plan",
                nearest="the plan.json that a run keeps in its folder",
            ) from error
        try:
            return Plan.from_json(cast("dict[str, Any]", data))
        except PlanError as error:
            raise PlanError(
                *(replace(problem, given=f"{path}: {problem.given}") for problem in error.problems)
            ) from error

    @property
    def hash(self) -> str:
        """Twelve hex digits over the canonical JSON of the decisions."""
        return hashlib.sha256(msgspec.json.encode(self.decisions(), order="sorted")).hexdigest()[:12]

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Decisions that differ: name → (mine, theirs)."""
        mine, theirs = self.decisions(), other.decisions()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def describe(self) -> str:
        """One line for people."""
        shards = f", {self.pp} stages ({self.schedule})" if self.pp > 1 else ""
        shards += f", state cut over {self.shard_degree} (zero {self.zero})" if self.uses_fsdp else ""
        shards += f", sequences over {self.cp}" if self.cp > 1 else ""
        shards += f", layers over {self.tp}" if self.tp > 1 else ""
        shards += f", experts over {self.ep}" if self.ep > 1 else ""
        return (
            f"{self.world_size} x {self.device}{shards}, {self.precision}, batch {self.global_batch} = {self.dp_world_size} ranks"
            f" x {self.accumulation} x {self.micro_batch}, sync {self.sync}{self._sent()}, recompute {self.recompute},"
            f" compile {self.compile}"
        )

    def _sent(self) -> str:
        """What is said of the synchronisation beside its kind."""
        told = "" if self.compression == "none" else f" ({self.compression})"
        if self.sync == "dist_async":
            told += "" if self.staleness is None else f" (at most {self.staleness} ahead)"
        if self.sync == "dist_local":
            told += f" (every {self.local_steps} steps)"
        return told


def precision_reason(asked: Plan | PlanOptions, plan: Plan) -> str:
    """Where the plan's precision comes from, in a few words."""
    if isinstance(asked, Plan) or asked.file or asked.precision != "auto":
        return f"{plan.precision} as asked"
    return "bf16 is native here" if plan.precision == "bf16" else f"no native bf16 on this {plan.device}"


def _not_loaded(given: str, rule: str, nearest: str) -> Problem:
    return Problem(given=given, rule=rule, consequence="the plan was not loaded", nearest=nearest)


def _values(kind: Any) -> str:
    """What a field of this type takes, for people."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return "a list, as docs/plans.md has it" if get_origin(kind) is tuple else f"a value of type {kind.__name__}"

"""The plan: one frozen record that everyone reads and nobody re-derives (design §3.3).

It knows three mesh axes; ranks are numbered row-major over (``dp_replicate``, ``dp_shard``, ``tp``), so that the ``tp`` ranks
that share one layer are neighbours. It is printable, comparable and saved with every checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

import msgspec

from unisono.errors import PlanError, Problem, nearest_name
from unisono.files import write_atomically
from unisono.plan.options import Compile, PlanOptions, Recompute, Zero

LARGEST_AUTOMATIC_MICRO_BATCH = 32
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides what a step computes and where."""

    version: int = 1
    device: str
    dp_replicate: int
    dp_shard: int
    zero: Zero
    tp: int
    global_batch: int
    micro_batch: int
    accumulation: int
    precision: Literal["fp32", "bf16", "fp16"]
    recompute: Recompute
    compile: Compile
    sync: Literal["local", "dist_sync"]
    tf32: bool
    autotune: bool
    channels_last: bool

    @property
    def world(self) -> int:
        """Number of ranks the plan needs."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """How many different parts of a batch are computed at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Whether ranks gather parameters from each other."""
        return self.dp_shard > 1

    @property
    def spread(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.dp_shard > 1 or self.tp > 1

    def to_json(self) -> dict[str, Any]:
        """Plain data in field order."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_json``. Raises PlanError with all unknown, missing and ill-typed fields at once."""
        types = get_type_hints(Plan)
        problems = [
            _foreign(name, f"there is no field {name!r}", nearest_name(name, types)) for name in data.keys() - types
        ]
        problems += [_foreign(name, f"{name!r} is missing", f'"{name}": …') for name in types.keys() - data.keys()]
        values: dict[str, Any] = {}
        for name in types.keys() & data.keys():
            try:
                values[name] = msgspec.convert(data[name], types[name])
            except msgspec.ValidationError as error:
                problems.append(_foreign(name, f"{name} = {data[name]!r}: {error}", _values(types[name])))
        if values.get("version", 1) != 1:
            problems.append(
                _foreign("version", f"version {values['version']}", "a plan of version 1, or a newer unisono")
            )
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
                Problem(
                    given=f"strategy file {path}: {error.strerror if isinstance(error, OSError) else error}",
                    rule=f"a strategy file is a JSON object of at most {_MAX_FILE_BYTES >> 20} MiB",
                    consequence="there is no plan",
                    nearest="the plan.json that a run keeps in its folder",
                )
            ) from error
        try:
            return Plan.from_json(cast("dict[str, Any]", data))
        except PlanError as error:
            raise PlanError(
                *(replace(problem, given=f"{path}: {problem.given}") for problem in error.problems)
            ) from error

    @property
    def hash(self) -> str:
        """Twelve hex digits over the canonical JSON."""
        return hashlib.sha256(msgspec.json.encode(self.to_json(), order="sorted")).hexdigest()[:12]

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Fields whose values differ: name → (mine, theirs)."""
        mine, theirs = self.to_json(), other.to_json()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def describe(self) -> str:
        """One line for people."""
        shards = f", state cut over {self.dp_shard} (zero {self.zero})" if self.sharded else ""
        shards += f", layers over {self.tp}" if self.tp > 1 else ""
        return (
            f"{self.world} x {self.device}{shards}, {self.precision}, batch {self.global_batch} = {self.data_ranks} ranks"
            f" x {self.accumulation} x {self.micro_batch}, sync {self.sync}, recompute {self.recompute},"
            f" compile {self.compile}"
        )


def why_precision(asked: Plan | PlanOptions, plan: Plan) -> str:
    """Where the plan's precision comes from, in a few words."""
    if isinstance(asked, Plan) or asked.file or asked.precision != "auto":
        return "as asked"
    return "computed natively here" if plan.precision == "bf16" else f"no native bf16 on this {plan.device}"


def check(plan: Plan, world: int) -> None:
    """Raises PlanError with everything that keeps ``world`` ranks from carrying out the plan."""
    problems: list[Problem] = []
    counts = ("dp_replicate", "dp_shard", "tp", "global_batch", "micro_batch", "accumulation")
    for name in counts:
        if getattr(plan, name) < 1:
            problems.append(
                Problem(
                    given=f"{name} {getattr(plan, name)}",
                    rule=f"{', '.join(counts)} are at least 1",
                    consequence="no rank would compute anything",
                    nearest=f"{name}=1",
                )
            )
    if problems:
        raise PlanError(*problems)
    if plan.world != world:
        tp = _largest_divisor(world, plan.tp)
        shard = _largest_divisor(world // tp, plan.dp_shard)
        also = f" and tp={tp}" if plan.tp > 1 else ""
        problems.append(
            Problem(
                given=f"dp_replicate {plan.dp_replicate} x dp_shard {plan.dp_shard}"
                + (f" x tp {plan.tp}" if plan.tp > 1 else "")
                + f" on {world} ranks",
                rule="the product of the mesh axes is the number of ranks",
                consequence=f"the plan is for {plan.world} ranks",
                nearest=f"dp_shard={shard} with dp_replicate={world // tp // shard}{also}, or {plan.world} processes",
            )
        )
    ranks = plan.data_ranks if plan.world == world else max(1, world // plan.tp)
    if plan.global_batch < ranks:
        problems.append(
            Problem(
                given=f"global_batch {plan.global_batch} on {ranks} ranks",
                rule="every rank gets at least one sample of each step",
                consequence=f"{ranks - plan.global_batch} ranks would never see data",
                nearest=f"plan.global_batch={ranks}, or {plan.global_batch} processes",
            )
        )
    elif plan.sharded and plan.global_batch % ranks:
        problems.append(
            Problem(
                given=f"dp_shard {plan.dp_shard} with global_batch {plan.global_batch} on {ranks} ranks",
                rule="ranks that share one copy of the state run the same passes: global_batch is a multiple of the ranks",
                consequence="a rank that is done would keep the others waiting for its part of the parameters",
                nearest=f"plan.global_batch={plan.global_batch // ranks * ranks}",
            )
        )
    share = -(-plan.global_batch // ranks)
    if plan.micro_batch > share:
        problems.append(
            Problem(
                given=f"micro_batch {plan.micro_batch} with global_batch {plan.global_batch} on {ranks} ranks",
                rule="a micro-batch is part of a rank's share of the step",
                consequence=f"the share is only {share} samples",
                nearest=f"plan.micro_batch={share}, or plan.global_batch={plan.micro_batch * ranks}",
            )
        )
    elif plan.accumulation != -(-share // plan.micro_batch):
        problems.append(
            Problem(
                given=f"accumulation {plan.accumulation} of micro_batch {plan.micro_batch} for a share of {share} samples",
                rule="accumulation is the number of micro-batches in a rank's share of the step",
                consequence="the plan would not say what is computed",
                nearest=f"accumulation={-(-share // plan.micro_batch)}",
            )
        )
    if plan.tp > 1 and plan.compile != "off":
        problems.append(
            Problem(
                given=f"tp {plan.tp} with compile {plan.compile!r}",
                rule="the sums between ranks inside a layer are not traced by the compiler",
                consequence="the graph would break at each of them",
                nearest="compile='off'",
            )
        )
    if plan.sync == "local" and world > 1:
        problems.append(
            Problem(
                given=f"sync 'local' on {world} ranks",
                rule="the local store sums inside one process only",
                consequence="ranks would train different models",
                nearest="plan.sync='dist_sync' (or leave it at 'auto')",
            )
        )
    if problems:
        raise PlanError(*problems)


def read_plan(options: PlanOptions) -> Plan:
    """The plan of ``options.file``. Raises PlanError where it cannot be read, or where other options are set beside it."""
    unset = PlanOptions(file=options.file)
    set_too = [f"plan.{f.name}" for f in fields(options) if getattr(options, f.name) != getattr(unset, f.name)]
    if set_too:
        raise PlanError(
            Problem(
                given=f"plan.file {options.file!r} with {', '.join(set_too)}",
                rule="a strategy file holds the whole plan",
                consequence="it would be unclear which of the two counts",
                nearest="change the file, or leave it out and set options only",
            )
        )
    return Plan.load(Path(options.file).expanduser())


def derive(options: PlanOptions, *, world: int, device: str, native_bf16: bool) -> Plan:
    """Fill in what the user left open. ``device`` is the device type in use; raises PlanError with all problems at once."""
    ranks = max(1, world // options.tp)
    dp_shard = options.dp_shard or ranks
    share = -(-options.global_batch // ranks)
    micro_batch = options.micro_batch or min(share, LARGEST_AUTOMATIC_MICRO_BATCH)
    plan = Plan(
        device=device,
        dp_replicate=max(1, ranks // dp_shard),
        dp_shard=dp_shard,
        zero=options.zero,
        tp=options.tp,
        global_batch=options.global_batch,
        micro_batch=micro_batch,
        accumulation=-(-share // micro_batch),
        precision=options.precision if options.precision != "auto" else ("bf16" if native_bf16 else "fp32"),
        recompute=options.recompute,
        compile=options.compile,
        sync=options.sync if options.sync != "auto" else ("dist_sync" if world > 1 else "local"),
        tf32=options.tf32,
        autotune=options.autotune,
        channels_last=options.channels_last,
    )
    check(plan, world)
    return plan


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def _foreign(name: str, given: str, nearest: str) -> Problem:
    return Problem(
        given=given,
        rule=f"a plan has the fields {', '.join(each.name for each in fields(Plan))}, all of them",
        consequence="the plan was not loaded",
        nearest=nearest,
    )


def _values(kind: Any) -> str:
    """What a field of this type takes, for people."""
    return " or ".join(map(repr, get_args(kind))) if get_args(kind) else f"a value of type {kind.__name__}"

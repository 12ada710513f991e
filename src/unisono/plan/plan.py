"""The plan: one frozen record that everyone reads and nobody re-derives (design §3.3).

It knows two mesh axes, ``dp_replicate`` and ``dp_shard``; rank r is number ``r % dp_shard`` of the ranks that share one copy of
the state. It is printable, comparable and saved with every checkpoint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from unisono.errors import PlanError, Problem
from unisono.plan.options import Compile, PlanOptions, Recompute, Zero

LARGEST_AUTOMATIC_MICRO_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides what a step computes and where."""

    version: int = 1
    device: str
    dp_replicate: int
    dp_shard: int
    zero: Zero
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
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Whether the state is cut into parts at all."""
        return self.dp_shard > 1

    def to_json(self) -> dict[str, Any]:
        """Plain data in field order."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The inverse of ``to_json``; raises PlanError on unknown, missing or ill-typed fields."""
        unknown = sorted(set(data) - {f.name for f in fields(Plan)})
        try:
            if unknown:
                raise msgspec.ValidationError(f"unknown field {unknown[0]!r}")
            return msgspec.convert(data, Plan)
        except msgspec.ValidationError as error:
            raise PlanError(
                Problem(
                    given=f"a plan whose contents do not fit: {error}",
                    rule=f"plans have version 1 and the fields {', '.join(f.name for f in fields(Plan))}",
                    consequence="the plan was not loaded",
                    nearest="use a plan written by this version of unisono",
                )
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
        return (
            f"{self.world} x {self.device}{shards}, {self.precision}, batch {self.global_batch} = {self.world} ranks"
            f" x {self.accumulation} x {self.micro_batch}, sync {self.sync}, recompute {self.recompute},"
            f" compile {self.compile}"
        )


def why_precision(asked: str, plan: Plan) -> str:
    """Where the plan's precision comes from, in a few words."""
    if asked != "auto":
        return "as asked"
    return "computed natively here" if plan.precision == "bf16" else f"no native bf16 on this {plan.device}"


def derive(options: PlanOptions, *, world: int, device: str, native_bf16: bool) -> Plan:
    """Fill in what the user left open. ``device`` is the device type in use; raises PlanError with all problems at once."""
    problems: list[Problem] = []
    if options.global_batch < world:
        problems.append(
            Problem(
                given=f"global_batch {options.global_batch} on {world} ranks",
                rule="every rank gets at least one sample of each step",
                consequence=f"{world - options.global_batch} ranks would never see data",
                nearest=f"plan.global_batch={world}, or {options.global_batch} processes",
            )
        )
    dp_shard = options.dp_shard or world
    if world % dp_shard:
        near = max(n for n in range(1, min(world, dp_shard) + 1) if world % n == 0)
        problems.append(
            Problem(
                given=f"dp_shard {dp_shard} on {world} ranks",
                rule="dp_replicate times dp_shard is the number of ranks",
                consequence=f"{world % dp_shard} ranks would belong to no copy of the state",
                nearest=f"plan.dp_shard={near}, or {-(-world // dp_shard) * dp_shard} processes",
            )
        )
    share = -(-options.global_batch // world)
    if dp_shard > 1 and options.global_batch % world:
        problems.append(
            Problem(
                given=f"dp_shard {dp_shard} with global_batch {options.global_batch} on {world} ranks",
                rule="ranks that share one copy of the state run the same passes: global_batch is a multiple of the ranks",
                consequence="a rank that is done would keep the others waiting for its part of the parameters",
                nearest=f"plan.global_batch={max(1, options.global_batch // world) * world}",
            )
        )
    if options.micro_batch > share:
        problems.append(
            Problem(
                given=f"micro_batch {options.micro_batch} with global_batch {options.global_batch} on {world} ranks",
                rule="a micro-batch is part of a rank's share of the step",
                consequence=f"the share is only {share} samples",
                nearest=f"plan.micro_batch={share}, or plan.global_batch={options.micro_batch * world}",
            )
        )
    sync = options.sync if options.sync != "auto" else ("dist_sync" if world > 1 else "local")
    if sync == "local" and world > 1:
        problems.append(
            Problem(
                given=f"sync 'local' on {world} ranks",
                rule="the local store sums inside one process only",
                consequence="ranks would train different models",
                nearest="plan.sync='dist_sync' (or leave it at 'auto')",
            )
        )
    precision = options.precision if options.precision != "auto" else ("bf16" if native_bf16 else "fp32")
    if problems:
        raise PlanError(*problems)
    micro_batch = options.micro_batch or min(share, LARGEST_AUTOMATIC_MICRO_BATCH)
    return Plan(
        device=device,
        dp_replicate=world // dp_shard,
        dp_shard=dp_shard,
        zero=options.zero,
        global_batch=options.global_batch,
        micro_batch=micro_batch,
        accumulation=-(-share // micro_batch),
        precision=precision,
        recompute=options.recompute,
        compile=options.compile,
        sync=sync,
        tf32=options.tf32,
        autotune=options.autotune,
        channels_last=options.channels_last,
    )

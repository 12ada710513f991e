"""A layout of a search as a strategy file of unisono's own runs. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import VERSION, Plan, strategy_text
from unisono.plan.resolve import derive_plan
from unisono.plan.validate import validate_plan
from unisono.planner.layout import Layout
from unisono.planner.stage_blocks import blocks_per_stage
from unisono.storage.files import write_atomically

ACCELERATOR: Final = "accelerator"  # in place of a type of torch, where the type does not matter
# what a layout decides; the rest of a plan is left to the settings of the run
_FIELDS: Final = {
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "batch": ("global_batch", "micro_batch", "accumulation"),
    "precision": ("compute",),
    "recompute": ("mode",),
}


def plan_of(layout: Layout) -> Plan:
    """The plan of a run with this layout. Raises PlanError with all rules that it breaks."""
    if layout.precision == "fp4" or (layout.precision == "fp8" and layout.tp > 1):
        raise PlanError(
            given=f"precision {layout.precision} with tp {layout.tp}",
            rule="runs compute in bf16 or fp16, and without tp in fp8",
            consequence="no run has this layout",
            nearest="--precision bf16",
        )
    options = PlanOptions(
        global_batch=int(layout.global_batch),
        micro_batch=int(layout.micro_batch),
        dp_shard=layout.dp_shard if layout.zero else 1,
        zero=layout.zero if layout.state_ranks > 1 else 3,  # pyright: ignore[reportArgumentType]
        tp=layout.tp,
        sequence_parallel=layout.tp > 1,
        cp=layout.cp,
        pp=layout.pp,
        schedule=layout.passes,
        ep=layout.ep,
        precision=layout.precision,
        offload=layout.offload,
        recompute="full" if layout.recompute == "partial" else layout.recompute,
    )
    # one rule of these options depends on the device: nothing is moved to the host from the CPU
    device = ACCELERATOR if layout.offload else "cpu"
    plan = derive_plan(options, world_size=layout.num_devices, device=device, native_bf16=True)
    if layout.pp > 1:
        plan = plan.updated(pipeline={"layers_per_stage": blocks_per_stage(layout)})
    if layout.recompute == "partial":
        plan = plan.updated(recompute={"blocks_per_stage": layout.recomputed_blocks})
    validate_plan(plan, layout.num_devices)
    return plan


def strategy(layout: Layout) -> dict[str, Any]:
    """The groups of a partial strategy file. Raises PlanError for a layout that no run has."""
    plan = plan_of(layout).to_json()
    groups: dict[str, Any] = {group: {name: plan[group][name] for name in names} for group, names in _FIELDS.items()}
    if layout.state_ranks > 1:
        groups["fsdp"] = {"zero": layout.zero}
    if layout.pp > 1:
        groups["pipeline"] = {name: plan["pipeline"][name] for name in ("schedule", "layers_per_stage")}
    if layout.recompute == "partial":
        groups["recompute"]["blocks_per_stage"] = plan["recompute"]["blocks_per_stage"]
    if layout.offload:
        groups["recompute"]["offload"] = True
    if layout.tp > 1:  # as its memory is predicted
        groups["tensor_parallel"] = {"sequence_parallel": True}
    return {"version": VERSION, **groups}


def write_strategy(path: Path, layout: Layout) -> None:
    """Write the strategy file of ``layout``.

    Raises:
        PlanError: No run has this layout.
        OSError: The file cannot be written.
    """
    write_atomically(path, strategy_text(strategy(layout)).encode())

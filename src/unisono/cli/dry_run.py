"""``unisono train --dry-run``: a step of some ranks, traced here without values, and the memory that each would hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.common import print_result
from unisono.config import Resolved
from unisono.train.config import RunConfig
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.plan.plan import Plan
    from unisono.train.dry_run import RankMemory


def dry_run(resolved: Resolved[RunConfig], processes: int | None, ranks: Sequence[int], *, as_json: bool) -> None:
    """Trace ``ranks`` of a job of ``processes`` (by default one of each pipeline stage), and print their memory."""
    from unisono.device.torch_adapters import adapter_of
    from unisono.observe.host_memory import host_memory_limit_bytes
    from unisono.parallel.device import find_device
    from unisono.planner.run_trials import open_trials

    config = resolved.value
    with open_trials(resolved) as trials:
        plan, traced = trials.trace(config.plan, processes or _processes(config), ranks)
    device = find_device(plan.mesh.device, 0)
    memory = adapter_of(device)[0].memory(device.index or 0)
    limit = host_memory_limit_bytes() if memory is None else memory.limit_bytes
    print_result(as_json, _as_json(plan, traced, limit), _lines(plan, traced, str(device), limit))


def _processes(config: RunConfig) -> int:
    """The ranks that a whole strategy file is for; else those that ``unisono train`` would start."""
    from unisono.plan.plan import Plan, is_whole, read_strategy_file

    if config.plan.file and is_whole(read_strategy_file(Path(config.plan.file))):
        return Plan.load(Path(config.plan.file)).mesh.world_size
    return max(1, config.launch.num_processes)


def _as_json(plan: Plan, traced: Sequence[RankMemory], limit_bytes: int) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.rank,
            "stages": list(rank.stages),
            "parameters_bytes": rank.ledger.parameter_bytes,
            "gradients_bytes": rank.ledger.gradient_bytes,
            "optimizer_bytes": rank.ledger.state_bytes,
            "peak_bytes": rank.peak.bytes,
            "flops": rank.flops,
            "peak_phase": rank.peak.kind,
            "peak_operator": rank.peak.operator,
            "peak_bytes_by_kind": rank.peak.by_kind,
            "equal_blocks": rank.equal_blocks,
            "traced_blocks": rank.traced_blocks,
            "confidence": rank.confidence,
            "needs_values": rank.needs_values or None,
        }
        for rank in traced
    ]
    return {"plan": plan.to_json(), "processes": plan.mesh.world_size, "limit_bytes": limit_bytes, "ranks": ranks}


def _lines(plan: Plan, traced: Sequence[RankMemory], device: str, limit_bytes: int) -> Iterator[str]:
    yield f"{plan.describe()}"
    if needs_values := traced[0].needs_values:
        yield f"a real step on {device}, as {needs_values} needs values; the trained model was a copy. GiB of tensors:"
    else:
        yield f"a step traced on {device} without values; nothing was trained. GiB of tensors:"
    yield ""
    staged = any(rank.stages for rank in traced)
    head = ["rank", *(["stages"] if staged else []), "parameters", "gradients", "optimizer", "peak", "peak at"]
    rows = [
        [
            str(rank.rank),
            *([",".join(map(str, rank.stages))] if staged else []),
            *(f"{size / GIB:.4g}" for size in (rank.ledger.parameter_bytes, rank.ledger.gradient_bytes)),
            f"{rank.ledger.state_bytes / GIB:.4g}",
            f"{rank.peak.bytes / GIB:.4g}",
            f"{rank.peak.operator} ({rank.peak.kind})",
        ]
        for rank in traced
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    largest = max(traced, key=lambda rank: rank.peak.bytes)
    held = ", ".join(
        f"{kind} {size / GIB:.4g}"
        for kind, size in sorted(largest.peak.by_kind.items(), key=lambda item: -item[1])
        if size
    )
    yield f"rank {largest.rank} at its peak: {held}"
    if largest.traced_blocks:
        yield f"traced {largest.traced_blocks} of {largest.equal_blocks} equal blocks, from which the others follow"
    if needs_values:
        yield (
            "of lower confidence than a trace: values of this rank stood for those of the others, and other samples may take "
            "another course"
        )
    most = max(traced, key=lambda rank: rank.flops)
    yield f"rank {most.rank} computes most: {most.flops / 1e12:.4g} TFLOP in a step, with what is computed again"
    yield f"memory here: {limit_bytes / GIB:.4g}; beside tensors, processes, kernels and communicators take some"

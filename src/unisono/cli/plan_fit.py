"""``unisono plan fit``: the cheapest measures that make a configuration fit into memory."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from unisono.cli.common import (
    LOG,
    ExpandedPath,
    check_output,
    common_options,
    load_run_config,
    print_result,
    takes_config,
    tries_plans,
)
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.config.overlay_text import overlay_text
from unisono.diagnose.memory_ending import MEMORY_FILE, MemoryEnding, changes_text, ledger_lines
from unisono.errors import ConfigError, UnisonoError
from unisono.sanitize import redact
from unisono.storage.files import PRIVATE_MODE, write_atomically
from unisono.storage.run_folder import LOGS_FOLDER, REPORT_FILE, RUN_FILE
from unisono.storage.write_errors import explained_write_errors
from unisono.train.config import RunConfig
from unisono.units import GIB

if TYPE_CHECKING:
    import torch

    from unisono.planner.failed_run import FailedRank
    from unisono.planner.fit import Ladder, Rung


@click.command("fit")
@takes_config
@tries_plans(budget_s=None)
@click.option(
    "--failed",
    "failed_run",
    type=ExpandedPath(exists=True, file_okay=False),
    metavar="RUN_DIR",
    help="Folder of a run that ran out of memory: its memory is what it measured, and its CONFIG the default.",
)
@click.option(
    "--largest-micro-batch",
    is_flag=True,
    help="Find the largest micro-batch that fits too, up to a rank's samples of a step.",
)
@common_options
def fit(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    processes: int | None,
    memory_gib: float | None,
    overlay: str | None,
    failed_run: str | None,
    largest_micro_batch: bool,
    budget_s: float | None,
    as_json: bool,
) -> None:
    """Find the plan that fits into memory and changes CONFIG least. Nothing is trained.

    Tries, in this order: bf16, smaller micro-batches, recompute, states over all data ranks, tensor parallelism, offload. Each is
    traced (unisono train --dry-run). Exit code 1: none fits.
    """
    check_overlay(config, overlay)
    if failed_run is not None and not config:
        if not (Path(failed_run) / RUN_FILE).exists():
            _require_start(failed_run, overrides)
        overrides = (f"run.dir={json.dumps(failed_run)}", *overrides)
    resolved = load_run_config(config, overrides)
    failed = None
    if failed_run is not None:
        from unisono.planner.failed_run import read_failed_rank

        failed = read_failed_rank(Path(failed_run))
    from unisono.parallel.device import computes_bf16, find_device
    from unisono.planner.compute_time import COMPUTE_SOURCE
    from unisono.planner.fit import Ladder
    from unisono.planner.run_trials import open_trials

    num_ranks = processes or (failed and failed.num_ranks) or max(1, resolved.value.launch.num_processes)
    device = find_device(resolved.value.plan.device, 0)
    measured = None if failed is None else failed.budget_bytes(num_ranks)
    if memory_gib:
        budget = round(memory_gib * GIB)
    elif measured is not None:
        budget = measured
    else:
        # what kernels and the allocator took of a rank that was killed is not known: half is left to them
        budget = memory_budget_bytes(device, num_ranks) // (1 if failed is None else 2)

    compute_s = _compute_seconds(resolved.value, device, num_ranks)

    def show(rung: Rung) -> None:
        if failed is not None and len(ladder.rungs) == 1 and not as_json:
            for line in ledger_lines(_memory_ending(failed, ladder, None)):
                echo(line)
        if not as_json:
            echo(_line(rung, ladder, compute_s(rung)))

    if not as_json and failed is None:
        echo(f"tensors of a rank may take {budget / GIB:.4g} GiB")
    with sigterm_interrupts(), open_trials(resolved) as trials:
        ladder = Ladder(
            trace=trials.trace,
            options=resolved.value.plan,
            num_ranks=num_ranks,
            budget_bytes=budget,
            native_bf16=computes_bf16(device),
            tried=show,
            has_failed=failed is not None,
            budget_s=math.inf if budget_s is None else budget_s,
        )
        found = ladder.climb()
        largest = None
        if largest_micro_batch and found is not None and found.plan is not None:
            largest = ladder.with_larger_micro_batch(found, below=found.plan.batch.global_batch + 1)
    if failed is not None:
        _keep(Path(str(failed_run)), _memory_ending(failed, ladder, found))
    settings = {} if found is None else {f"plan.{name}": value for name, value in found.settings.items()}
    if overlay is not None and found is not None:
        write_overlay(config, overlay, settings)
    result = {
        "processes": num_ranks,
        "budget_bytes": ladder.budget_bytes,
        "fits": found is not None,
        "settings": settings,
        "plan": None if found is None or found.plan is None else found.plan.to_json(),
        "rungs": [_as_json(rung, compute_s(rung)) for rung in ladder.rungs],
        "largest_micro_batch": None if largest is None or largest.plan is None else largest.plan.batch.micro_batch,
        "is_cut": ladder.is_cut,
        "sources": {"compute_s": COMPUTE_SOURCE},
        "overlay": overlay if found is not None else None,
    }
    print_result(as_json, result, _verdict(ladder, found, settings, overlay, largest))
    if found is None:
        raise SystemExit(1)


def _require_start(failed_run: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError unless ``overrides`` have all that the run, which wrote no configuration, was started with."""
    from unisono.planner.failed_run import started_with

    started = started_with(Path(failed_run))
    if started is not None and set(started) <= set(redact([f"--set={text}" for text in overrides])):
        return
    what = "CONFIG" if started is None else shlex.join(started)
    raise ConfigError(
        given=f"--failed {failed_run}, which has no {RUN_FILE}, without what the run was started with",
        rule=f"the configuration is CONFIG, or that of the run; it writes its {RUN_FILE} before its first step",
        consequence="nothing was traced",
        nearest=f"unisono plan fit --failed {shlex.quote(failed_run)} {what}"
        + (", with the CONFIG and each --set of the run" if started is None else ""),
    )


def check_overlay(config: tuple[str, ...], overlay: str | None) -> None:
    """Raise ConfigError for a file that cannot be written over ``config``."""
    if overlay is not None and len(config) > 1:
        raise ConfigError(
            given=f"--apply with {len(config)} files of configuration",
            rule="the file that is written goes over one file",
            consequence="nothing was traced",
            nearest="one file that has the others as its base",
        )
    if overlay is not None:
        check_output("--apply", overlay, consequence="nothing was traced")


def write_overlay(config: tuple[str, ...], overlay: str, settings: Mapping[str, Any]) -> None:
    """Write ``settings``, by dotted name, over the file of ``config`` to a new file. Raises ConfigError if it cannot."""
    path, text = Path(overlay), overlay_text(os.path.abspath(config[0]) if config else "", settings)
    with explained_write_errors(
        path.parent, consequence="no settings were written", other_name="another file (--apply)"
    ):
        write_atomically(path, text.encode())


def memory_budget_bytes(device: Any, num_ranks: int) -> int:
    """What the tensors of a rank may take here: of a device all that it has, of the host a rank's part without its process."""
    from unisono.device.torch_adapters import adapter_of
    from unisono.observe import host_memory

    adapter, index = adapter_of(device)
    memory = adapter.memory(index)
    if memory is not None:
        return memory.limit_bytes
    return host_memory.tensor_budget_bytes(
        num_ranks,
        host_memory.process_memory(),  # a rank has loaded what this process has
        limit_bytes=host_memory.host_memory_limit_bytes(),
        address_space_limit_bytes=host_memory.address_space_limit_bytes(),
    )


def _compute_seconds(config: RunConfig, device: torch.device, num_ranks: int) -> Callable[[Rung], float | None]:
    """Gives the seconds of compute in a step of the rank with the most; None where this host was not measured for that."""
    from unisono.data.options import default_cache_dir
    from unisono.launch.resources import divide_host
    from unisono.measure.calibration import CALIBRATION_FILE, read_calibration
    from unisono.planner.compute_time import measured_flops_per_s

    known = read_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE)
    threads = divide_host(replace(config.launch, num_processes=num_ranks), busy_frac=0.0).threads

    def compute_s(rung: Rung) -> float | None:
        if rung.plan is None or not rung.flops:
            return None
        compute = rung.plan.precision.compute
        flops_per_s = measured_flops_per_s(known, device, compute, num_ranks=num_ranks, threads=threads)
        return rung.flops / flops_per_s if flops_per_s else None

    return compute_s


def _line(rung: Rung, ladder: Ladder, compute_s: float | None) -> str:
    if rung.largest is None:
        return f"  {rung.measure}: not possible ({rung.refused})"
    peak, budget_bytes = rung.largest.peak, ladder.budget_bytes
    less = "fits" if rung.fits(budget_bytes) else f"{(peak.bytes - budget_bytes) / GIB:.4g} GiB too much"
    place = f"{_gib(peak.bytes)} GiB on rank {rung.largest.rank}, in {peak.operator} ({peak.kind})"
    configured = ladder.rungs[0].flops
    computed = f"; {rung.flops / configured:.3g} x the FLOPs" if rung.flops != configured and configured else ""
    if compute_s is not None:
        from unisono.observe.run_summary import short_time

        computed += f"; {short_time(compute_s)} a step (modelled, compute only)"
    measured = "; measured in a real step, of lower confidence" if rung.largest.needs_values else ""
    return f"  {rung.measure}: {place}{computed}{measured}; {less}"


def _verdict(
    ladder: Ladder, found: Rung | None, settings: dict[str, Any], overlay: str | None, largest: Rung | None
) -> Iterator[str]:
    if found is None:
        least = min((rung for rung in ladder.rungs if rung.largest is not None), key=_peak_bytes)
        what = "nothing that was tried in time (--budget-s) fits" if ladder.is_cut else "nothing fits"
        yield f"{what}: {least.measure} needs least, {_gib(_peak_bytes(least))} GiB of {_gib(ladder.budget_bytes)}"
    elif not settings:
        yield "fits as configured"
    else:
        yield f"fits with {changes_text(settings)}"
        if overlay is not None:
            yield f"unisono train {overlay}"
    if largest is not None and largest.plan is not None:
        batch = largest.plan.batch
        yield (
            f"the largest micro-batch that fits{' of those tried in time' if ladder.is_cut else ''}: {batch.micro_batch} "
            f"of a rank's {batch.micro_batch * batch.accumulation} samples of a step, {_gib(_peak_bytes(largest))} GiB"
        )


def _memory_ending(failed: FailedRank, ladder: Ladder, found: Rung | None) -> MemoryEnding:
    from unisono.parallel.memory_ledger import coordinates_of

    configured = ladder.rungs[0]
    assert configured.plan is not None
    plan = configured.plan
    # a rank of the same pipeline stage stands for it
    stage = coordinates_of(plan, min(failed.rank, plan.mesh.world_size - 1))["pp"]
    peak = next(rank.peak for rank in configured.ranks if coordinates_of(plan, rank.rank)["pp"] == stage)
    return MemoryEnding(
        rank=failed.rank,
        measured=dict(failed.measured),
        peak_bytes=peak.bytes,
        peak_operator=peak.operator,
        peak_phase=peak.kind,
        peak_bytes_by_kind=peak.by_kind,
        budget_bytes=ladder.budget_bytes,
        settings={} if found is None else {f"plan.{name}": value for name, value in found.settings.items()},
        measure="" if found is None else found.measure,
        is_cut=ladder.is_cut,
    )


def _keep(run_dir: Path, memory: MemoryEnding) -> None:
    """Write ``memory`` into the run's folder, and its report again, if it has one."""
    from unisono.report.render import make_report

    try:
        write_atomically(run_dir / LOGS_FOLDER / MEMORY_FILE, msgspec.json.encode(memory) + b"\n", mode=PRIVATE_MODE)
        if (run_dir / REPORT_FILE).exists():
            make_report(run_dir)
    except (OSError, UnisonoError) as error:
        LOG.warning("%s does not show this: %s", run_dir, error)


def _peak_bytes(rung: Rung) -> int:
    assert rung.largest is not None
    return rung.largest.peak.bytes


def _gib(size: int) -> str:
    return f"{size / GIB:.4g}"


def _as_json(rung: Rung, compute_s: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"measure": rung.measure, "settings": dict(rung.settings), "refused": rung.refused or None}
    if rung.largest is not None:
        peak = rung.largest.peak
        found |= {
            "rank": rung.largest.rank,
            "peak_bytes": peak.bytes,
            "flops": rung.flops,
            "compute_s": compute_s,
            "peak_operator": peak.operator,
            "peak_phase": peak.kind,
            "peak_bytes_by_kind": peak.by_kind,
            "confidence": rung.largest.confidence,
            "needs_values": rung.largest.needs_values or None,
        }
    return found

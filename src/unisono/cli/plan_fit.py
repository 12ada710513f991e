"""``unisono plan fit``: the cheapest measures that make a configuration fit into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import ExpandedPath, common_options, load_run_config, print_result, takes_config
from unisono.cli.terminal import echo
from unisono.config.overlay_text import overlay_text
from unisono.errors import ConfigError
from unisono.storage.files import write_atomically

if TYPE_CHECKING:
    from unisono.planner.fit import Rung

_GIB = 2**30


@click.command("fit")
@takes_config
@click.option("--processes", type=click.IntRange(min=1), help="Ranks of the job (default: launch.num_processes).")
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory for the tensors of a rank (default: a rank's part of this machine's, without what a process takes).",
)
@click.option(
    "--apply", "overlay", type=ExpandedPath(dir_okay=False), help="Write the settings over CONFIG to this TOML file."
)
@common_options
def fit(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    processes: int | None,
    memory_gib: float | None,
    overlay: str | None,
    as_json: bool,
) -> None:
    """Find the plan that fits into memory and changes CONFIG least. Nothing is trained.

    Tries, in this order: bf16, smaller micro-batches, recompute, states over all data ranks, tensor parallelism, offload. Each is
    traced (unisono train --dry-run). Exit code 1: none fits.
    """
    check_overlay(config, overlay)
    resolved = load_run_config(config, overrides)
    from unisono.parallel.device import computes_bf16, find_device
    from unisono.planner.fit import Ladder
    from unisono.planner.run_trials import open_trials

    num_ranks = processes or max(1, resolved.value.launch.num_processes)
    device = find_device(resolved.value.plan.device, 0)
    budget = round(memory_gib * _GIB) if memory_gib else memory_budget_bytes(device, num_ranks)

    def show(rung: Rung) -> None:
        if not as_json:
            echo(_line(rung, budget))

    if not as_json:
        echo(f"tensors of a rank may take {budget / _GIB:.4g} GiB")
    with open_trials(resolved) as trials:
        ladder = Ladder(
            trace=trials.trace,
            options=resolved.value.plan,
            num_ranks=num_ranks,
            budget_bytes=budget,
            native_bf16=computes_bf16(device),
            tried=show,
        )
        found = ladder.climb()
    settings = {} if found is None else {f"plan.{name}": value for name, value in found.settings.items()}
    if overlay is not None and found is not None:
        text = overlay_text(os.path.abspath(config[0]) if config else "", settings)
        write_atomically(Path(overlay), text.encode())
    result = {
        "processes": num_ranks,
        "budget_bytes": budget,
        "fits": found is not None,
        "settings": settings,
        "plan": None if found is None or found.plan is None else found.plan.to_json(),
        "rungs": [_as_json(rung) for rung in ladder.rungs],
        "overlay": overlay if found is not None else None,
    }
    print_result(as_json, result, _verdict(found, settings, overlay, ladder.rungs, budget))
    if found is None:
        raise SystemExit(1)


def check_overlay(config: tuple[str, ...], overlay: str | None) -> None:
    """Raise ConfigError for a file that cannot be written over ``config``."""
    if overlay is not None and len(config) > 1:
        raise ConfigError(
            given=f"--apply with {len(config)} files of configuration",
            rule="the file that is written goes over one file",
            consequence="nothing was traced",
            nearest="one file that has the others as its base",
        )
    if overlay is not None and os.path.lexists(overlay):
        raise ConfigError(
            given=f"--apply {overlay}",
            rule="a file that exists is not overwritten",
            consequence="nothing was traced",
            nearest="another name",
        )


def memory_budget_bytes(device: Any, num_ranks: int) -> int:
    """What the tensors of a rank may take here: of a device all that it has, of the host a rank's part without its process."""
    import psutil

    from unisono.device.torch_adapters import adapter_of
    from unisono.observe.host_memory import host_memory_limit_bytes

    adapter, index = adapter_of(device)
    memory = adapter.memory(index)
    if memory is not None:
        return memory.limit_bytes
    # a rank has loaded what this process has
    return max(0, host_memory_limit_bytes() // num_ranks - psutil.Process().memory_info().rss)


def _line(rung: Rung, budget_bytes: int) -> str:
    if rung.largest is None:
        return f"  {rung.measure}: not possible ({rung.refused})"
    peak = rung.largest.peak
    less = "fits" if rung.fits(budget_bytes) else f"{(peak.bytes - budget_bytes) / _GIB:.4g} GiB too much"
    return f"  {rung.measure}: {peak.bytes / _GIB:.4g} GiB on rank {rung.largest.rank}, in {peak.operator} ({peak.kind}); {less}"


def _verdict(
    found: Rung | None, settings: dict[str, Any], overlay: str | None, rungs: Sequence[Rung], budget_bytes: int
) -> Iterator[str]:
    if found is None:
        least = min((rung for rung in rungs if rung.largest is not None), key=_peak_bytes)
        yield f"nothing fits: {least.measure} needs least, {_peak_bytes(least) / _GIB:.4g} GiB of {budget_bytes / _GIB:.4g}"
    elif not settings:
        yield "fits as configured"
    else:
        changes = " ".join(f"--set {name}={str(value).lower()}" for name, value in settings.items())
        yield f"fits with {changes}"
        if overlay is not None:
            yield f"unisono train {overlay}"


def _peak_bytes(rung: Rung) -> int:
    assert rung.largest is not None
    return rung.largest.peak.bytes


def _as_json(rung: Rung) -> dict[str, Any]:
    found: dict[str, Any] = {"measure": rung.measure, "settings": dict(rung.settings), "refused": rung.refused or None}
    if rung.largest is not None:
        peak = rung.largest.peak
        found |= {
            "rank": rung.largest.rank,
            "peak_bytes": peak.bytes,
            "peak_operator": peak.operator,
            "peak_phase": peak.kind,
            "peak_bytes_by_kind": peak.by_kind,
        }
    return found

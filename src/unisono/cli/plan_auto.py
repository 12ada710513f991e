"""``unisono plan auto``: the fastest plan of a configuration for the ranks of this host."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import (
    LOG,
    ExpandedPath,
    check_output,
    common_options,
    load_run_config,
    print_result,
    takes_config,
    train_arguments,
    tries_plans,
)
from unisono.cli.plan_fit import check_overlay, memory_budget_bytes, write_overlay
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.config import Resolved
from unisono.diagnose.memory_ending import changes_text
from unisono.dist.interpreter import module_command, module_path
from unisono.errors import PlanError, Problem
from unisono.exit_codes import REQUEUE
from unisono.storage.files import os_reason
from unisono.storage.write_errors import explained_write_errors
from unisono.train.config import RunConfig
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.planner.fastest import Candidate, FastestPlanSearch
    from unisono.planner.plan_record import Machine

# set in the child process that times the ranks with the environment of one: the cores of a rank, with commas; empty: all cores
_AS_A_RANK: Final = "UNISONO_TRIES_RANKS"
_CLEANS_UP_S: Final = 10.0  # in which that process, once interrupted, removes what it has made


@click.command("auto")
@takes_config
@tries_plans(budget_s=300.0)
@click.option("--report", type=ExpandedPath(dir_okay=False, path_type=Path), help="Also write a page (HTML) here.")
@common_options
def auto(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    processes: int | None,
    memory_gib: float | None,
    budget_s: float,
    overlay: str | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest plan of CONFIG that fits into memory. One process tries the ranks; nothing is trained.

    Settings of the plan that are given stay as they are. Step times are predicted from those of single ranks, and from what
    unisono plan calibrate measured of the links, and corrected by what earlier runs took (unisono plan accuracy). Exit code 1:
    none fits.
    """
    check_overlay(config, overlay)
    if report is not None:
        check_output("--report", report, consequence="nothing was searched")
    resolved = load_run_config(config, overrides)
    num_ranks = processes or max(1, resolved.value.launch.num_processes)
    if _AS_A_RANK not in os.environ:
        options: dict[str, object] = {"--processes": num_ranks, "--memory-gib": memory_gib, "--budget-s": budget_s}
        options |= {"--apply": overlay, "--report": report}
        arguments = [*train_arguments(config, overrides), *(["--json"] if as_json else [])]
        arguments += [f"{name}={value}" for name, value in options.items() if value is not None]
        raise SystemExit(_search_as_a_rank(resolved, num_ranks, arguments)[0])
    if cores := os.environ.get(_AS_A_RANK):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        with sigterm_interrupts():
            search, found = _search(resolved, num_ranks, memory_gib=memory_gib, budget_s=budget_s, quiet=as_json)
    except KeyboardInterrupt:
        raise SystemExit(REQUEUE) from None  # the process that started this one says so
    from unisono.planner.fastest import as_json as listed
    from unisono.planner.fastest import kept_fields
    from unisono.planner.fastest_page import write_fastest_page
    from unisono.planner.timed_plan import SPREAD
    from unisono.planner.why_fastest import CANDIDATE_SOURCES, flips, neighbours

    settings = {} if found is None else {f"plan.{name}": value for name, value in found.settings.items()}
    if overlay is not None and found is not None:
        write_overlay(config, overlay, settings)
    if report is not None and found is not None:
        with explained_write_errors(
            report.parent, consequence="no page was written", other_name="another file (--report)"
        ):
            write_fastest_page(report, search.candidates, found, num_ranks=num_ranks, memory_bytes=search.memory_bytes)
    result = {
        "processes": num_ranks,
        "memory_bytes": search.memory_bytes,
        "pinned": sorted(search.pinned),
        "kept": kept_fields(search.options),
        "settings": None if found is None else settings,
        "spread_frac": SPREAD,
        "learned_factor": None if found is None else found.learned.factor,
        "learned_runs": None if found is None else found.learned.runs,
        "plan": None if found is None or found.plan is None else found.plan.to_json(),
        "candidates": listed(search.candidates),
        "neighbours": [] if found is None else [asdict(each) for each in neighbours(search.candidates, found)],
        "flips": [] if found is None else [asdict(each) for each in flips(search.candidates, found)],
        "sources": dict(CANDIDATE_SOURCES),
        "overlay": overlay if found is not None else None,
    }
    print_result(as_json, result, _verdict(search, found, settings, overlay))
    if found is None:
        raise SystemExit(1)


def found_settings(resolved: Resolved[RunConfig], config: tuple[str, ...], overrides: tuple[str, ...]) -> list[str]:
    """The settings of the fastest plan of a configuration for its ranks, as ``--set`` takes them.

    Raises:
        PlanError: No plan fits, or the search failed.
    """
    num_ranks = max(1, resolved.value.launch.num_processes)
    arguments = [*train_arguments(config, overrides), f"--processes={num_ranks}", "--json"]
    code, said = _search_as_a_rank(resolved, num_ranks, arguments, stdout=subprocess.PIPE)
    if code:
        raise PlanError(*_problems_of(said))
    settings: dict[str, Any] = json.loads(said)["settings"]
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def _problems_of(said: str) -> list[Problem]:
    """The problems in the JSON of a failed search. Where no plan fits it prints none; then one that says so."""
    with suppress(ValueError, KeyError, TypeError):
        return [Problem(**problem) for problem in json.loads(said)["problems"]]
    return [
        Problem(
            given="train --plan auto, whose search found no plan",
            rule="a plan fits into memory, and its ranks can be tried",
            consequence="nothing was started",
            nearest="unisono plan auto, which shows each plan that it tries; unisono plan fit shows what each measure saves",
        )
    ]


def _search_as_a_rank(
    resolved: Resolved[RunConfig], num_ranks: int, arguments: Sequence[str], stdout: int | None = None
) -> tuple[int, str]:
    """Search in a process with the threads, cores and allocator of a rank; its exit code, and what it wrote to ``stdout``."""
    from unisono.launch.child import kill_group
    from unisono.launch.resources import divide_host
    from unisono.launch.workers import Reaper

    share = divide_host(replace(resolved.value.launch, num_processes=num_ranks))
    cores = "" if share.affinity is None else ",".join(map(str, share.affinity[0]))
    environ = {**os.environ, **share.environ(), "PYTHONPATH": module_path(), _AS_A_RANK: cores}
    command = module_command("unisono", "plan", "auto", *arguments)
    with (
        sigterm_interrupts(),
        Reaper() as reaper,
        subprocess.Popen(command, env=environ, stdout=stdout, text=True, start_new_session=True) as process,
    ):
        reaper.watch(process.pid)
        try:
            said, _ = process.communicate()
        except KeyboardInterrupt:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLEANS_UP_S)
            raise
        finally:
            kill_group(process)
            reaper.forget(process.pid)
    return process.returncode if process.returncode >= 0 else 1, said or ""


def _search(
    resolved: Resolved[RunConfig], num_ranks: int, *, memory_gib: float | None, budget_s: float, quiet: bool
) -> tuple[FastestPlanSearch, Candidate | None]:
    """Search the plan of a configuration for ``num_ranks`` ranks of this host, and print what is tried unless ``quiet``."""
    from unisono.data.options import default_cache_dir
    from unisono.measure.calibration import CALIBRATION_FILE, read_calibration
    from unisono.parallel.device import find_device
    from unisono.planner.fastest import FastestPlanSearch, pinned_options
    from unisono.planner.plan_record import PLAN_RECORD_FILE, machine_of, read_plan_record, used_axes
    from unisono.planner.run_trials import open_trials

    options = resolved.value.plan
    device = find_device(options.device, 0)
    memory_bytes = round(memory_gib * GIB) if memory_gib else memory_budget_bytes(device, num_ranks)
    if not quiet:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        echo(f"{ranks} on {device.type}; tensors of a rank may take {memory_bytes / GIB:.4g} GiB")
    cache = default_cache_dir(os.environ)
    machine = machine_of(device)
    learned = read_plan_record(cache / PLAN_RECORD_FILE).learned(machine)
    with open_trials(resolved) as trials:
        search = FastestPlanSearch(
            trials=trials,
            options=options,
            pinned=pinned_options(resolved),
            num_ranks=num_ranks,
            memory_bytes=memory_bytes,
            num_experts=trials.config.model.num_experts,
            links=read_calibration(cache / CALIBRATION_FILE),
            budget_s=budget_s,
            tried=lambda candidate: None if quiet else echo(f"  {_line(candidate)}"),
            learned=lambda plan: learned.of(used_axes(plan)),
        )
        found = search.run()
        _keep_predictions(cache / PLAN_RECORD_FILE, search, trials.config, machine)
        return search, found


def _keep_predictions(path: Path, search: FastestPlanSearch, config: RunConfig, machine: Machine) -> None:
    """Write the predictions where runs look for those of their plans; warn if that is not possible."""
    from unisono.planner.plan_record import add_to_plan_record, prediction_of, work_digest
    from unisono.train.settings import function_name

    work, now_s = work_digest(config, function_name), time.time()
    found = [
        prediction_of(each.plan, each.timed, machine=machine, work=work, peak_bytes=each.peak_bytes or 0, at_s=now_s)
        for each in search.candidates
        if each.plan is not None and each.timed is not None
    ]
    try:
        add_to_plan_record(path, predictions=found)
    except OSError as error:
        LOG.warning("the predictions were not kept, so no run is compared with them: %s", os_reason(error))


def _line(candidate: Candidate) -> str:
    from unisono.planner.fastest import changes_in_words

    what = changes_in_words(candidate.settings)
    if (timed := candidate.timed) is None:
        return f"{what}: {candidate.refused}"
    parts = [f"{name} {seconds:.4g}" for name, seconds in timed.parts_s.items()]
    if candidate.learned.runs:
        parts.append(f"times {candidate.learned.factor:.3g} learned from {candidate.learned.runs} runs")
    measured = " measured in a real step" if candidate.confidence == "measured" else ""
    peak_gib = (candidate.peak_bytes or 0) / GIB
    return f"{what}: {candidate.step_s:.4g} s ({', '.join(parts)}), {peak_gib:.4g} GiB{measured}"


def _verdict(
    search: FastestPlanSearch, found: Candidate | None, settings: dict[str, Any], overlay: str | None
) -> Iterator[str]:
    from unisono.cli.search_text import learned_line
    from unisono.planner.fastest import kept_fields
    from unisono.planner.timed_plan import SPREAD
    from unisono.planner.why_fastest import flips, neighbours

    if found is None:
        yield "no plan fits: unisono plan fit shows what each measure saves"
        return
    configured = search.candidates[0]
    than = (
        "; as configured it does not fit"
        if configured.timed is None
        else f", {configured.step_s / found.step_s:.3g} times as fast as configured"
        if settings
        else ""
    )
    yield f"fastest: {changes_text(settings) or 'as configured'}: {found.step_s:.4g} s a step{than}"
    low_s, high_s = found.step_s / (1 + SPREAD), found.step_s * (1 + SPREAD)
    yield f"nine of ten such steps take {low_s:.4g} to {high_s:.4g} s"
    if found.learned.runs:
        yield learned_line(found.learned, found.step_s)
    changed = neighbours(search.candidates, found)
    if changed:
        yield "with one setting changed:"
    for each in changed:
        yield f"  {each.change}: {each.reason if each.slower_frac is None else f'{each.slower_frac:+.1%}'}"
    for each in flips(search.candidates, found):
        yield f"with {each.change}: {each.plan}"
    kept = [*(f"plan.{name}" for name in sorted(search.pinned)), *kept_fields(search.options)]
    if kept:
        yield f"kept as given: {', '.join(kept)}"
    if overlay is not None:
        yield f"unisono train {overlay}"

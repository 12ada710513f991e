"""``unisono diagnose``: findings about a run, from its events and its last profile, or about a trace of a profiler."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.cli.common import ExpandedPath, common_options, print_result
from unisono.errors import ConfigError
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.diagnose import Finding, RunFacts


@click.command("diagnose")
@click.argument("run_dir", metavar="RUN_DIR|TRACE", type=ExpandedPath())
@click.option(
    "--apply",
    "overlay",
    type=ExpandedPath(dir_okay=False),
    help="Write the changed settings to this new file, for unisono train.",
)
@common_options
def command(run_dir: str, overlay: str | None, as_json: bool) -> None:
    """Say what makes the run in RUN_DIR slow or wrong, the most costly cause first.

    For a run that follows the diagnosis of another: what the changed settings gained.

    The run may be finished, killed or still under way. Costs are shares of the time of a step, of the last attempt.
    TRACE is a file of torch.profiler's export_chrome_trace (.json, .json.gz), of any program.
    """
    from unisono.compare.parent import gain_over_parent
    from unisono.diagnose import diagnose, read_run, read_trace_facts, write_overlay
    from unisono.diagnose.overlay import merged_patch, patch_text

    is_trace = os.path.isfile(run_dir)
    facts = read_trace_facts(Path(run_dir)) if is_trace else read_run(Path(run_dir))
    findings = diagnose(facts)
    patch = merged_patch(findings)
    applied: list[str] = []
    if overlay is not None and is_trace:
        raise ConfigError(
            given=f"--apply {overlay} with the trace {run_dir}",
            rule="an overlay changes the configuration of a run, and a trace has none",
            consequence="nothing was written",
            nearest="the folder of a run (run.dir) in place of the trace",
        )
    if overlay is not None and facts.is_script:
        raise ConfigError(
            given=f"--apply {overlay} with {run_dir}, the run of a Python script",
            rule="an overlay changes the configuration of a run of unisono train, and a script has its own options",
            consequence="nothing was written",
            nearest=f"in the script: {patch_text(patch, is_script=True)}" if patch else "the advice of each finding",
        )
    if overlay is not None and patch:
        write_overlay(Path(overlay), Path(run_dir), patch)
        applied = [f"wrote {overlay}; try: unisono train {shlex.quote(overlay)}"]
    elif overlay is not None:
        applied = [f"{overlay} was not written: no finding changes a setting"]
    result = {
        "run_dir": run_dir,
        "ranks": len(facts.ranks),
        "findings": [finding.to_json() for finding in findings],
        "patch": patch,
        "notes": list(facts.notes),
    }
    gained: list[str] = []
    if not is_trace and (gain := gain_over_parent(Path(run_dir), facts, findings)) is not None:
        result["gain"] = {**asdict(gain), "parent": str(gain.parent), "gain_frac": gain.gain_frac}
        gained = [str(gain)]
    print_result(as_json, result, [*_head(run_dir, facts), *gained, *_texts(facts, findings), *applied])


def _head(run_dir: str, facts: RunFacts) -> Iterator[str]:
    if not facts.ranks:
        profile = facts.profiles[0]
        yield (
            f"{run_dir}: a trace of {profile.num_events:,} events, {profile.wall_s:.3g} s"
            + (f", steps: {profile.num_steps}" if profile.num_steps else ", no steps marked")
        )
        yield from (printable(note) for note in facts.notes)
        return
    steps = facts.common_steps()
    rank = facts.ranks[0]
    first = steps[0] - rank.steps_per_reading[0] + 1 if len(steps) else 0
    measured = f"steps {first} to {steps[-1]} measured" if len(steps) else "no steps measured"
    yield f"{run_dir}: {len(facts.ranks)} {'rank' if len(facts.ranks) == 1 else 'ranks'}, {measured}"
    if facts.profiles and (profiled := facts.profiles[0].steps):
        yield f"with the profile of steps {profiled[0].step} to {profiled[-1].step}"
    yield from (printable(note) for note in facts.notes)


def _texts(facts: RunFacts, findings: Sequence[Finding]) -> Iterator[str]:
    from unisono.diagnose.figures import MIN_READINGS, has_enough_readings
    from unisono.diagnose.finding_text import confidence_word, finding_title, gain_text
    from unisono.diagnose.overlay import patch_text
    from unisono.observe.history import WARM_UP_READINGS

    if not findings:
        few = facts.ranks and not has_enough_readings(facts)
        judged = f"; times are judged from {MIN_READINGS} readings of the timers on, after the first {WARM_UP_READINGS}"
        yield "no findings" + (judged if few else "")
    for number, finding in enumerate(findings, start=1):
        cost = f", costs {finding.cost_frac:.0%} of the time" if finding.cost_frac else ""
        judged = ", ".join(filter(None, (finding.severity, confidence_word(finding))))
        yield f"\n{number}. {finding.id} ({judged}): {finding_title(finding)}{cost}"
        yield from (f"   {printable(line)}" for line in finding.evidence)
        gain = f" ({text})" if (text := gain_text(finding)) else ""
        yield f"   advice: {finding.advice}{'' if finding.patch else gain}"
        if finding.patch:
            yield f"   try: {patch_text(finding.patch, is_script=facts.is_script)}{gain}"

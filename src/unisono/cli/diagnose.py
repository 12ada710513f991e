"""``unisono diagnose``: findings about a run, from its events."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.cli.common import every_verb, print_result
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.diagnose import Finding, RunFacts


@click.command("diagnose")
@click.argument("run_dir", type=click.Path(file_okay=False))
@click.option(
    "--apply",
    "overlay",
    type=click.Path(dir_okay=False),
    help="Write the changed settings to this new file, for unisono train.",
)
@every_verb
def command(run_dir: str, overlay: str | None, as_json: bool) -> None:
    """Say what makes the run in RUN_DIR slow or wrong, the most costly cause first.

    The run may be finished, killed or still under way. Costs are shares of the time of a step, of the last attempt.
    """
    from unisono.diagnose import diagnose, read_run, write_overlay
    from unisono.diagnose.overlay import merged_patch

    facts = read_run(Path(run_dir))
    findings = diagnose(facts)
    patch = merged_patch(findings)
    applied: list[str] = []
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
    print_result(as_json, result, [*_head(run_dir, facts), *_texts(findings), *applied])


def _head(run_dir: str, facts: RunFacts) -> Iterator[str]:
    steps = facts.common_steps()
    measured = f"steps {steps[0]} to {steps[-1]} measured" if len(steps) else "no steps measured"
    yield f"{run_dir}: {len(facts.ranks)} {'rank' if len(facts.ranks) == 1 else 'ranks'}, {measured}"
    yield from (printable(note) for note in facts.notes)


def _texts(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "no findings"
    for number, finding in enumerate(findings, start=1):
        cost = f", costs {finding.cost_frac:.0%} of the time" if finding.cost_frac else ""
        yield f"\n{number}. {finding.id} ({finding.severity}): {finding.title}{cost}"
        yield from (f"   {printable(line)}" for line in finding.evidence)
        yield f"   advice: {finding.advice}"
        if finding.patch:
            settings = " ".join(f"--set {name}={value}" for name, value in finding.patch.items())
            gain = f" (expected: {finding.expected_gain:.0%} less time)" if finding.expected_gain else ""
            yield f"   try: {settings}{gain}"

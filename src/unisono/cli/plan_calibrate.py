"""``unisono plan calibrate``: what predictions of step times need to know of this machine, measured once."""

from __future__ import annotations

import click

from unisono.cli.common import common_options, print_result


@click.command("calibrate")
@click.option("--processes", type=click.IntRange(min=1), help="Ranks (default: one per device; 2 without any).")
@common_options
def calibrate(processes: int | None, as_json: bool) -> None:
    """Measure the links between the ranks of this host, its matrix products and its storage, within a minute.

    The figures are stored for plan auto. unisono doctor --bench measures the same, and compares it with earlier figures. Exit
    code 1: they could not be measured.
    """
    from unisono.doctor.ranks import RankExamination, examine_ranks

    report = examine_ranks(RankExamination(kind="bench", run_dir="."), processes=processes)
    if report is None:  # a rank other than 0 of a job
        return
    lines = [f"{check.title}: {check.evidence}" for check in report.checks]
    stored = report.figures.get("stored_in")
    lines += [f"stored in {stored}"] if stored else []
    print_result(as_json, {"figures": dict(report.figures), "stored_in": stored}, lines)
    if not stored:
        raise SystemExit(1)

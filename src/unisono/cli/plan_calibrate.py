"""``unisono plan calibrate``: what predictions of step times need to know of this machine, measured once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import ExpandedPath, check_output, common_options, print_result
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import ConfigError
from unisono.storage.files import write_atomically
from unisono.storage.write_errors import explained_write_errors

if TYPE_CHECKING:
    from unisono.doctor.ranks import RankReport


@click.command("calibrate")
@click.option("--processes", type=click.IntRange(min=1), help="Ranks (default: one per device; 2 without any).")
@click.option(
    "--output",
    type=ExpandedPath(dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="Also write what was measured as the file of a cluster (plan --cluster FILE.toml).",
)
@common_options
def calibrate(processes: int | None, output: Path | None, as_json: bool) -> None:
    """Measure the links between the ranks of this host, its matrix products, memory and storage, within a minute.

    The figures are stored for plan auto, and for plan without --cluster. unisono doctor --bench measures the same, and compares
    it with earlier figures. Exit code 1: they could not be measured.
    """
    from unisono.doctor.ranks import RankExamination, examine_ranks

    if output is not None:
        _check_output(output)
    with sigterm_interrupts():
        report = examine_ranks(RankExamination(kind="bench", run_dir="."), processes=processes)
    if report is None:  # a rank other than 0 of a job
        return
    lines = [f"{check.title}: {check.evidence}" for check in report.checks]
    stored = report.figures.get("stored_in")
    lines += [f"stored in {stored}"] if stored else []
    result: dict[str, Any] = {"figures": dict(report.figures), "stored_in": stored}
    if output is not None:
        text = _cluster_text(report) if stored else None
        if text is not None:
            with explained_write_errors(
                output.parent, consequence="the file was not written", other_name="another name"
            ):
                write_atomically(output, text.encode())
            lines += [f"wrote {output}", *(f"  {line}" for line in text.splitlines())]
        result["cluster_file"] = None if text is None else str(output)
    print_result(as_json, result, lines)
    if not stored:
        raise SystemExit(1)


def _check_output(output: Path) -> None:
    """Refuse a name that cannot be written before anything is measured."""
    from unisono.planner.cluster_file import SUFFIX, is_cluster_file

    if not is_cluster_file(output.name):
        raise ConfigError(
            given=f"--output {output}",
            rule=f"the name of such a file ends in {SUFFIX}",
            consequence="nothing was measured",
            nearest=f"--output {output.stem}{SUFFIX}",
        )
    check_output("--output", output, consequence="nothing was measured")


def _cluster_text(report: RankReport) -> str:
    import msgspec

    from unisono.measure.calibration import DeviceRate, LinkRate
    from unisono.planner.measured_cluster import cluster_text, measured_options

    rate = msgspec.convert(report.figures["device"], DeviceRate)
    links = msgspec.convert(report.figures["links"], list[LinkRate])
    first, *others = rate.hosts
    where = f"{first} and {len(others)} more" if others else first
    return cluster_text(measured_options(rate, links), f"{rate.ranks} ranks on {where}, by unisono plan calibrate")

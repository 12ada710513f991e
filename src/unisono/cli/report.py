"""``unisono report``: the HTML report of a run, from its events."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from unisono.cli.common import ExpandedPath, common_options, print_result
from unisono.errors import ConfigError


@click.command("report")
@click.argument("run_dir", type=ExpandedPath(file_okay=False))
@common_options
def command(run_dir: str, as_json: bool) -> None:
    """Write RUN_DIR/report.html from the events of the run, which may be finished, killed or still under way."""
    from unisono.observe.run_summary import goodput_text
    from unisono.report.render import make_report
    from unisono.storage.files import os_reason

    try:
        report = make_report(Path(run_dir))
    except OSError as error:
        raise ConfigError(
            given=f"{run_dir}/report.html cannot be written: {os_reason(error)}",
            rule="the report of a run is a file in its folder",
            consequence="no report was written",
            nearest=f"room, and the right to write there; or a copy of the run's folder: cp -r {shlex.quote(run_dir)} COPY",
        ) from error
    goodput = report.goodput
    result = {
        "run_dir": run_dir,
        "report": str(report.path),
        "goodput": None if goodput is None else goodput.to_json(),
    }
    goodput_lines = [] if goodput is None else [f"goodput: {goodput_text(goodput)}"]
    print_result(as_json, result, [*goodput_lines, f"wrote {report.path}"])

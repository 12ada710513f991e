"""``unisono report``: the HTML report of a run, from its events."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.cli.common import every_verb, print_result


@click.command("report")
@click.argument("run_dir", type=click.Path(file_okay=False))
@every_verb
def command(run_dir: str, as_json: bool) -> None:
    """Write RUN_DIR/report.html from the events of the run, which may be finished, killed or still under way."""
    from unisono.report import write_report

    path = write_report(Path(run_dir))
    print_result(as_json, {"run_dir": run_dir, "report": str(path)}, f"wrote {path}")

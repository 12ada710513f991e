"""``unisono doctor``: examines this host before a run."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.cli.common import every_verb, print_result
from unisono.exit_codes import USER_ERROR

_SIGNS = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}


@click.command("doctor")
@click.option("--run-dir", default="runs", type=click.Path(file_okay=False), help="Where runs will be written.")
@every_verb
def command(run_dir: str, as_json: bool) -> int:
    """Examine this host: versions, devices, limits, variables, storage and network, each with its cure.

    Exits with 2 where a run would not work.
    """
    from unisono.doctor import examine

    checks = examine(Path(run_dir))
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.code:7} {_SIGNS[check.status]} {check.title}: {check.evidence}")
        lines += [f"        try: {check.cure}"] if check.cure else []
    failed = any(check.status == "failure" for check in checks)
    print_result(as_json, {"checks": [check.to_json() for check in checks]}, lines)
    return USER_ERROR if failed else 0

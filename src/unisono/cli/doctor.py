"""``unisono doctor``: examines hosts before a run, or tries a configuration rung by rung."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import (
    ExpandedPath,
    common_options,
    load_run_config,
    print_result,
    trust_arguments,
    trusts_python,
)
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import ConfigError
from unisono.exit_codes import USER_ERROR
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.doctor import Check
    from unisono.doctor.ladder import CostlyFinding

_SIGNS = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}
_INDENT = "        "


@click.command("doctor")
@click.option("--nodes", is_flag=True, help="Compare the hosts of a job: what differs between them.")
@click.option(
    "--bench", is_flag=True, help="Measure links, storage and matrix products, within a minute, and store it."
)
@click.option("--smoke", is_flag=True, help="Train a tiny model: in one process, in several, and resumed.")
@click.option(
    "--ladder", metavar="CONFIG", help="Try this configuration: small model, own data, whole model, ranks, plan."
)
@click.option(
    "-n",
    "--processes",
    type=click.IntRange(min=1),
    help="Number of ranks (default: one per device; 2 without any).",
)
@click.option(
    "--hostfile", type=ExpandedPath(path_type=Path), help="File of hosts to reach over ssh, as of unisono launch."
)
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="ssh port of hosts without one in the file.")
@click.option("--run-dir", default="runs", type=ExpandedPath(file_okay=False), help="Where runs will be written.")
@trusts_python
@common_options
@click.pass_context
def command(context: click.Context, run_dir: str, as_json: bool, **options: Any) -> int:
    """Examine this host: versions, devices, topology, limits, variables, storage and network, each with its cure.

    --nodes and --bench are of several ranks: those of a hosts file, of the job that this process is in, or of this host.
    Exits with 2 where a run would not work.
    """
    gives_folder = context.get_parameter_source("run_dir") is click.core.ParameterSource.COMMANDLINE
    _check_unused(options, gives_folder=gives_folder)
    printed = _Printed(as_json=as_json, only_differences=bool(options["nodes"]))
    with sigterm_interrupts():
        more = _examine(run_dir, printed, options)
    if more is None:
        return 0
    print_result(as_json, {"checks": [check.to_json() for check in printed.checks], **more}, printed.last_lines())
    return USER_ERROR if printed.has_failure else 0


class _Printed:
    """The checks so far; as text each is printed as soon as it is known."""

    def __init__(self, *, as_json: bool, only_differences: bool) -> None:
        self.checks: list[Check] = []
        self._as_json, self._only_differences = as_json, only_differences
        self._notes: list[str] = []

    @property
    def has_failure(self) -> bool:
        return any(check.status == "failure" for check in self.checks)

    def add(self, checks: Iterable[Check]) -> None:
        for check in checks:
            self.checks.append(check)
            if not self._as_json and not (self._only_differences and check.status == "ok"):
                for line in _lines(check):
                    echo(line)

    def note(self, text: str) -> None:
        """A line after all checks."""
        self._notes.append(text)

    def last_lines(self) -> list[str]:
        alike = [check.title for check in self.checks if check.status == "ok"]
        if self._only_differences and alike:
            return [*self._notes, f"alike: {', '.join(alike)}"]
        return self._notes


def _lines(check: Check) -> Iterator[str]:
    first, *rest = (printable(line) for line in check.evidence.split("\n"))
    yield f"{check.code:7} {_SIGNS[check.status]} {check.title}: {first}"
    yield from (f"{_INDENT}{line}" for line in rest)
    if check.cure:
        yield f"{_INDENT}try: {printable(check.cure)}"


def _examine(run_dir: str, printed: _Printed, options: dict[str, Any]) -> dict[str, Any] | None:
    """Examine what the options name; what goes into the JSON beside the checks. None on ranks other than 0 of a job."""
    if options["ladder"] is not None or options["smoke"]:
        from unisono.launch.job import refuse_inside_a_job

        refuse_inside_a_job(Path(run_dir))
    if options["ladder"] is not None:
        return _climb(options["ladder"], printed)
    if options["smoke"]:
        from unisono.doctor.smoke import smoke

        printed.add(smoke(Path(run_dir), processes=options["processes"]))
    elif options["nodes"] or options["bench"]:
        return _examine_ranks(run_dir, printed, options)
    else:
        from unisono.doctor import examine

        printed.add(examine(Path(run_dir)))
        if options["hostfile"] is not None:
            printed.add(_hosts(options))
    return {}


def _hosts(options: dict[str, Any]) -> Iterator[Check]:
    from unisono.doctor.reachability import check_hosts

    return check_hosts(options["hostfile"], options["ssh_port"])


def _examine_ranks(run_dir: str, printed: _Printed, options: dict[str, Any]) -> dict[str, Any] | None:
    """Examine several ranks; what goes into the JSON beside the checks. None on ranks other than 0 of a job."""
    from unisono.doctor.ranks import RankExamination, examine_ranks

    if options["hostfile"] is not None:
        printed.add(_hosts(options))
        if printed.has_failure:
            return {}
    report = examine_ranks(
        RankExamination(kind="nodes" if options["nodes"] else "bench", run_dir=str(Path(run_dir).absolute())),
        processes=options["processes"],
        hostfile=options["hostfile"],
        ssh_port=options["ssh_port"],
    )
    if report is None:
        return None
    printed.add(report.checks)
    if stored := report.figures.get("stored_in"):
        printed.note(f"stored in {stored}")
    return {"figures": report.figures} if report.figures else {}


def _climb(config: str, printed: _Printed) -> dict[str, Any]:
    """Try a configuration rung by rung; ``first`` is the code of the first rung that fails or is slow."""
    from unisono.config import load_config
    from unisono.doctor.ladder import climb
    from unisono.train.config import RunConfig

    first: str | None = None
    settings = load_run_config([config], []).encoded
    defaults = load_config(RunConfig).encoded
    for report in climb([config], settings, defaults, diagnose=_costly_findings, arguments=trust_arguments()):
        printed.add([report.check])
        if first is None and report.verdict in ("failed", "slow"):
            first = report.check.code
            does = "fails" if report.verdict == "failed" else "is slow"
            printed.note(f"the first rung that {does}: {first}, {report.check.title}")
    if first is None:
        printed.note("all rungs passed")
    return {"first": first}


def _costly_findings(run_dir: Path) -> list[CostlyFinding]:
    from unisono.diagnose import diagnose, read_run
    from unisono.doctor.ladder import CostlyFinding

    return [
        CostlyFinding(id=finding.id, title=finding.title, cost_frac=finding.cost_frac, advice=finding.advice)
        for finding in diagnose(read_run(run_dir))
    ]


def _check_unused(options: dict[str, Any], *, gives_folder: bool) -> None:
    """Raise ConfigError for options that would have no effect together."""
    modes = [f"--{name}" for name in ("nodes", "bench", "smoke", "ladder") if options[name]]
    ranks, hosts = options["processes"] is not None, options["hostfile"] is not None
    rules = [
        (len(modes) > 1, " with ".join(modes), "each of them is an examination of its own", "one of them"),
        (
            ranks and modes not in (["--nodes"], ["--bench"], ["--smoke"]),
            f"--processes {f'with {modes[0]}' if modes else 'without another option'}",
            "it is the number of ranks of --nodes, --bench and --smoke; a configuration has launch.num_processes",
            "leave it out",
        ),
        (
            hosts and modes in (["--smoke"], ["--ladder"]),
            f"--hostfile with {' '.join(modes)}",
            "these trainings are on this host",
            "leave it out, or start unisono doctor there",
        ),
        (
            gives_folder and modes == ["--ladder"],
            "--run-dir with --ladder",
            "its trainings are in a temporary folder",
            "leave it out, or unisono doctor --run-dir DIR, which examines the folder",
        ),
        (
            options["ssh_port"] is not None and not hosts,
            "--ssh-port without --hostfile",
            "it is the port of its hosts",
            "leave it out",
        ),
    ]
    for holds, given, rule, nearest in rules:
        if holds:
            raise ConfigError(given=given, rule=rule, consequence="nothing was examined", nearest=nearest)

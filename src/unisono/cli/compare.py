"""``unisono compare``: runs side by side, and limits for CI."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from unisono.cli.common import ExpandedPath, FiniteRange, common_options, print_result, trust_arguments, trusts_python
from unisono.cli.termination import sigterm_interrupts


@click.command("compare")
@click.argument("run_dirs", nargs=-1, required=True, metavar="A B [C …]", type=ExpandedPath(file_okay=False))
@click.option("--max-ratio", multiple=True, metavar="NAME=X", help="Fail if the figure is above X times that of A.")
@click.option("--min-ratio", multiple=True, metavar="NAME=X", help="Fail if the figure is below X times that of A.")
@click.option("--max-delta", multiple=True, metavar="NAME=X", help="Fail if the figure minus that of A is above X.")
@click.option("--min-delta", multiple=True, metavar="NAME=X", help="Fail if the figure minus that of A is below X.")
@click.option("--full", is_flag=True, help="Also minor figures.")
@click.option(
    "--first-difference", "first_difference", is_flag=True, help="Replay A and B to find the first tensor that differs."
)
@click.option(
    "--script",
    "scripts",
    multiple=True,
    metavar="'FILE ARGUMENTS'",
    help="With --first-difference, for runs of Python scripts: the command that made them, without python; twice for "
    "one each.",
)
@click.option(
    "--timeout-s",
    default=600.0,
    type=FiniteRange(min=0),
    help="With --first-difference, most seconds of one replay.",
)
@trusts_python
@common_options
def command(
    run_dirs: tuple[str, ...],
    max_ratio: tuple[str, ...],
    min_ratio: tuple[str, ...],
    max_delta: tuple[str, ...],
    min_delta: tuple[str, ...],
    full: bool,
    first_difference: bool,
    scripts: tuple[str, ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Compare runs with the first of them: losses, speed, memory, time, settings.

    The runs may be finished, killed or still under way. Exit code 1 tells that a limit is broken, or could not be judged:
    unisono compare runs/main runs/mine --max-ratio perf/step_s=1.05 --max-delta train/loss=0.01
    """
    limit_texts = (max_ratio, min_ratio, max_delta, min_delta)
    if first_difference:
        if any(limit_texts) or full:
            raise click.UsageError("--first-difference takes no limits and no --full")
        raise SystemExit(_show_first_difference(run_dirs, scripts, timeout_s=timeout_s, as_json=as_json))
    if scripts:
        raise click.UsageError("--script is for --first-difference")
    if click.get_current_context().get_parameter_source("timeout_s") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--timeout-s is for --first-difference")
    from unisono.compare import broken_limits, compare_runs, read_figures
    from unisono.compare.limits import KINDS, read_limits
    from unisono.compare.table import table

    base, *others = run_dirs
    if not others:
        raise click.UsageError(f"one run, {base}: a comparison needs two or more")
    texts = dict(zip(KINDS, limit_texts, strict=True))
    limits = [limit for kind, given in texts.items() for limit in read_limits(kind, given)]
    first = read_figures(Path(base))
    comparisons = [compare_runs(first, read_figures(Path(run_dir))) for run_dir in others]
    broken = broken_limits(limits, comparisons)
    result = {
        "comparisons": [each.to_json() for each in comparisons],
        "limits": len(limits),
        "broken": [
            {"run_dir": each.run_dir, "limit": str(each.limit), "found": each.found, "why": each.why} for each in broken
        ],
    }
    broken_lines = [f"broken by {each.run_dir}: {each.limit}: {each.why}" for each in broken]
    kept_lines = [f"{len(limits)} {'limit' if len(limits) == 1 else 'limits'} kept"] if limits and not broken else []
    print_result(
        as_json, result, [*table(comparisons, is_full=full), *([""] if limits else []), *broken_lines, *kept_lines]
    )
    raise SystemExit(1 if broken else 0)


def _show_first_difference(run_dirs: Sequence[str], scripts: Sequence[str], *, timeout_s: float, as_json: bool) -> int:
    """Show the first tensor in which two runs differ; the exit code."""
    if len(run_dirs) != 2 or len(scripts) > 2:
        raise click.UsageError("--first-difference takes two runs, and --script at most twice")
    from unisono.compare.divergence_text import divergence_lines
    from unisono.compare.first_difference import find_first_difference
    from unisono.compare.replay_child import replay_as_child
    from unisono.compare.replayable import ReplayableRun
    from unisono.compare.step_record import ReplayRequest

    a, b = Path(run_dirs[0]), Path(run_dirs[1])
    script_of = dict(zip((a, b), (*scripts, *scripts)[:2], strict=False))
    start = partial(replay_as_child, flags=trust_arguments(), timeout_s=timeout_s)

    def replay(run: ReplayableRun, request: ReplayRequest) -> None:
        start(run, request, script=script_of.get(run.run_dir))

    with (
        sigterm_interrupts(),
        tempfile.TemporaryDirectory(prefix="unisono-compare-", ignore_cleanup_errors=True) as scratch,
    ):
        found = find_first_difference(a, b, replay=replay, scratch=Path(scratch))
    print_result(as_json, found.to_json(), divergence_lines(found))
    return 0 if found.verdict == "identical" else 1

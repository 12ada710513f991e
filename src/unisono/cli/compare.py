"""``unisono compare``: runs side by side, and limits for CI."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.cli.common import every_verb, print_result


@click.command("compare")
@click.argument("run_dirs", nargs=-1, required=True, metavar="A B [C …]", type=click.Path(file_okay=False))
@click.option("--max-ratio", multiple=True, metavar="NAME=X", help="Fail if the figure is above X times that of A.")
@click.option("--min-ratio", multiple=True, metavar="NAME=X", help="Fail if the figure is below X times that of A.")
@click.option("--max-delta", multiple=True, metavar="NAME=X", help="Fail if the figure minus that of A is above X.")
@click.option("--min-delta", multiple=True, metavar="NAME=X", help="Fail if the figure minus that of A is below X.")
@click.option("--full", is_flag=True, help="Also figures that hardly count.")
@every_verb
def command(
    run_dirs: tuple[str, ...],
    max_ratio: tuple[str, ...],
    min_ratio: tuple[str, ...],
    max_delta: tuple[str, ...],
    min_delta: tuple[str, ...],
    full: bool,
    as_json: bool,
) -> None:
    """Compare runs with the first of them: losses, speed, memory, time, settings.

    The runs may be finished, killed or still under way. Exit code 1 tells that a limit is broken, or could not be judged:
    unisono compare runs/main runs/mine --max-ratio perf/step_s=1.05 --max-delta train/loss=0.01
    """
    from unisono.compare import broken_limits, compare_runs, read_figures
    from unisono.compare.limits import KINDS, read_limits
    from unisono.compare.table import table

    base, *others = run_dirs
    if not others:
        raise click.UsageError(f"one run, {base}: a comparison needs two or more")
    texts = dict(zip(KINDS, (max_ratio, min_ratio, max_delta, min_delta), strict=True))
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
    told = [f"broken by {each.run_dir}: {each.limit}: {each.why}" for each in broken]
    kept = [f"{len(limits)} {'limit' if len(limits) == 1 else 'limits'} kept"] if limits and not broken else []
    print_result(as_json, result, [*table(comparisons, is_full=full), *([""] if limits else []), *told, *kept])
    raise SystemExit(1 if broken else 0)

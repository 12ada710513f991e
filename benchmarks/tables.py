"""Writes README's and this folder's tables, and those of two pages of docs/, from ``results/*.json``. Standard library only.

    python -m benchmarks.tables [--check | --stale | --mark-stale]

Only what stands between the marks of a page is written. ``--check`` writes nothing and fails where a page is not as it would
be written. ``--stale`` lists results whose code (``reach``) has changed since their newest run; ``--mark-stale`` also writes that
into their files: pages then show them as not yet re-run, and README without a figure, until there is a new run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import compress_table
from benchmarks.figures import Line, lines
from benchmarks.kvstore import convergence_table
from benchmarks.reach import files_of
from benchmarks.record import RESULTS, ROOT, Results, Run, changed, load, save
from benchmarks.suite import BENCHMARKS, Benchmark

BEGIN, END = "<!-- figures: written by python -m benchmarks.tables -->\n", "<!-- end of figures -->\n"
NOT_RUN, NOT_RERUN = "not yet run", "not yet re-run"
BUSY_LOAD = 1.0  # other work on the host makes rates low and intervals wide


def aim_of(line: Line) -> str:
    """The aim and whether it is met."""
    if line.is_met is None:
        return line.aim
    return f"{line.aim}: met" if line.is_met else f"{line.aim}: **aim missed**"


def run_of(run: Run) -> str:
    """Day and commit of a run."""
    return f"{run['date'][:10]}, `{run['commit']}`"


def processor_of(run: Run) -> str:
    """The processor's name without its maker's marks."""
    return " ".join(run["machine"]["cpu"].replace("(R)", "").replace(" CPU", "").split())


def machine_of(run: Run) -> str:
    """Processor, cores and versions of a run."""
    machine, versions = run["machine"], run["versions"]
    cores = f"{machine['cpu']}, {machine['cores']} cores"
    where = cores if machine.get("device", "cpu") == "cpu" else f"{machine['device']}, {cores}"
    return f"{where}, torch {versions.get('torch', '?')}, Python {versions['python']}"


def headlines(benchmarks: Sequence[Benchmark], folder: Path = RESULTS) -> str:
    """README's table: no figure where there is no run of the current code."""
    rows = ["| compared | measured | aim | run |", "|---|---|---|---|"]
    machines: list[str] = []
    for benchmark in benchmarks:
        results = load(benchmark.name, folder)
        run = results.newest
        shown = {line.headline: line for line in lines(benchmark.rows, run["result"])} if run else {}
        for row in benchmark.rows:
            line = shown.get(row.headline)
            if row.headline and line and run and not results.stale:
                rows.append(f"| {row.headline} | {line.figure} | {aim_of(line)} | {run_of(run)}, {processor_of(run)} |")
                machines.append(machine_of(run))
            elif row.headline:
                rows.append(f"| {row.headline} | {NOT_RERUN if run else NOT_RUN} | {row.aim or ''} | |")
    where = [f"\nMeasured on {'; '.join(sorted(set(machines)))}."] if machines else []
    return "\n".join([*rows, *where]) + "\n"


def sections(benchmarks: Sequence[Benchmark], folder: Path = RESULTS) -> str:
    """Every benchmark with all rows of its newest run."""
    return "\n".join(line for benchmark in benchmarks for line in _section(benchmark, load(benchmark.name, folder)))


def _section(benchmark: Benchmark, results: Results) -> Iterator[str]:
    yield from (f"## {benchmark.title}", "", benchmark.text, "")
    run = results.newest
    if run is None:
        yield from (NOT_RUN.capitalize() + ".", "")
        return
    if results.stale:
        yield from (not_rerun(results), "")
    yield from ("| what | measured | aim |", "|---|---|---|")
    yield from (f"| {line.label} | {line.figure} | {aim_of(line)} |" for line in lines(benchmark.rows, run["result"]))
    yield from (
        "",
        f"`{run['command']}` on {run_of(run)}, {machine_of(run)}; load average {run['load_average']['before']} before and "
        f"{run['load_average']['after']} after."
        + (" The host had other work meanwhile, so rates are low and intervals wide." if _is_busy(run) else "")
        + (f" Earlier runs in the result file: {len(results.runs) - 1}." if len(results.runs) > 1 else ""),
        "",
    )
    if "not_shown" in run["result"]:
        yield from (f"Not shown: {run['result']['not_shown']}", "")


def not_rerun(results: Results) -> str:
    """The line that marks a result of changed code; empty for others."""
    return f"**{NOT_RERUN.capitalize()}**: {', '.join(results.stale)} changed since this run." if results.stale else ""


def _is_busy(run: Run) -> bool:
    return run["load_average"]["before"] > BUSY_LOAD


def between(page: str, content: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """``page`` with ``content`` between two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page lacks {marks[0].strip()} or, after it, {marks[1].strip()}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def pages() -> dict[Path, str]:
    """Every generated page, as it should be."""
    readme, figures = ROOT / "README.md", ROOT / "benchmarks" / "README.md"
    convergence = convergence_table.PAGE
    results, smaller = load("kvstore_convergence"), load("compress")
    return {
        readme: between(readme.read_text(), headlines(BENCHMARKS)),
        figures: between(figures.read_text(), sections(BENCHMARKS)),
        convergence: between(
            convergence.read_text(),
            convergence_table.section(results.newest, not_rerun(results)).strip(),
            convergence_table.MARKS,
        ),
        compress_table.PAGE: between(
            compress_table.PAGE.read_text(),
            compress_table.section(smaller.newest, not_rerun(smaller)).strip(),
            compress_table.MARKS,
        ),
    }


def write() -> None:
    """Write all pages."""
    for path, text in pages().items():
        path.write_text(text)


def stale(benchmarks: Sequence[Benchmark], folder: Path = RESULTS, root: Path = ROOT) -> dict[str, list[str]]:
    """By benchmark with a run, the packages whose code has changed since the newest."""
    runs = {benchmark: load(benchmark.name, folder).newest for benchmark in benchmarks}
    changes = {
        benchmark.name: changed(run, files_of(benchmark.module, root), root) for benchmark, run in runs.items() if run
    }
    return {name: names for name, names in changes.items() if names}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="fail where a page is not as it would be written")
    choice.add_argument("--stale", action="store_true", help="list results of code that has changed since")
    choice.add_argument("--mark-stale", action="store_true", help="the same, and mark them in their files")
    arguments = parser.parse_args()
    if arguments.check:
        wrong = [path for path, text in pages().items() if path.read_text() != text]
        print("\n".join(f"{path.relative_to(ROOT)}: run python -m benchmarks.tables" for path in wrong))
        return 1 if wrong else 0
    if arguments.stale or arguments.mark_stale:
        names = stale(BENCHMARKS)
        for name, packages in names.items():
            print(f"{name}: {', '.join(packages)} changed")
        if arguments.stale:
            return 0
        for benchmark in BENCHMARKS:
            results = load(benchmark.name)
            if results.newest:
                results.stale = names.get(benchmark.name, [])
                save(results)
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The section "Measured" of docs/smaller-models.md, from the result of ``compress``. Standard library only.

``python -m benchmarks.tables`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.record import ROOT, Run

PAGE = ROOT / "docs" / "smaller-models.md"
MARKS = "<!-- from benchmarks/results/compress.json -->", "<!-- end -->"


def section(run: Run | None, not_rerun: str = "") -> str:
    """The text between the marks. ``not_rerun``: a line that says so where the code has changed since ``run``."""
    if run is None or "prune" not in run["result"]:
        return "Not measured yet.\n"
    result = run["result"]
    prune, aware = result["prune"], result["aware"]
    seeds: Mapping[str, Any] = prune["seeds"]
    lines = [not_rerun, ""] if not_rerun else []
    lines += [
        f"Pruning: a `gpt` of 3 layers and 64 dimensions, {prune['steps']} steps on the standard library's source, then "
        f"`--heads 0.5 --ffn 0.5`, then {prune['further_steps']} steps with the settings of the run; held-out loss:",
        "",
        *_table({seed: row["loss"] for seed, row in seeds.items()}, 3),
        "",
        f"The file went from {_range(row['mib']['before'] for row in seeds.values())} MiB to "
        f"{_range(row['mib']['after'] for row in seeds.values())} MiB, and a forward pass took "
        f"{_range(row['time_ratio'] for row in seeds.values())} of the time.",
        "",
        f"Training with rounded numbers: a `gpt` of 2 layers and 32 dimensions, {aware['steps']} steps on an artificial "
        f"language, then {aware['further_steps']} in floating point (`float`) or with the rounding of int4 (`aware`); held-out "
        "loss:",
        "",
        *_table(aware["seeds"], 4),
    ]
    return "\n".join(lines) + "\n"


def _table(columns: Mapping[str, Mapping[str, float]], digits: int) -> Iterator[str]:
    """A row for each loss, a column for each seed."""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(f'{losses[name]:.{digits}f}' for losses in columns.values())} |"


def _range(values: Iterator[float]) -> str:
    low, *_, high = sorted(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"

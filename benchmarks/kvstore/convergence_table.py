"""The section "What converges how" of docs/kvstore.md, from the result of ``convergence``. Standard library only.

``python -m benchmarks.tables`` writes it.
"""

from __future__ import annotations

from typing import Any

from benchmarks.figures import loss_over_seeds, minus_plain_sums
from benchmarks.record import ROOT, Run

PAGE = ROOT / "docs" / "kvstore.md"
MARKS = "<!-- from benchmarks/results/kvstore_convergence.json -->", "<!-- end -->"


def section(run: Run | None, not_rerun: str = "") -> str:
    """The text between the marks. ``not_rerun``: a line that says so where the code has changed since ``run``."""
    if run is None:
        return "Not measured yet.\n"
    models: dict[str, Any] = run["result"]["models"]
    lines = [not_rerun, ""] if not_rerun else []
    for name, model in models.items():
        lines += [
            f"**{name}**, {model['parameters']:,} parameters, {model['steps']} steps of {model['batch']} samples; held-out loss "
            f"before training {model['knowing_nothing']:.3f}, the best possible {model['knowing_all']:.3f}:",
            "",
            "| way | optimizer | loss | minus plain sums | in the band |",
            "|---|---|---|---|---|",
        ]
        for way, row in model["ways"].items():
            inside = f"yes, ≤ {row['band']:.3f}" if row["within_band"] else f"no, > {row['band']:.3f}"
            rate = f"{row['optimizer']}, {row['lr']:g}"
            lines.append(f"| {way} | {rate} | {loss_over_seeds(row)} | {minus_plain_sums(row)} | {inside} |")
        lines.append("")
    worse = [
        f"{way} ({name}, {100 * (row['ratio'] - 1):+.0f} %)"
        for name, model in models.items()
        for way, row in model["ways"].items()
        if not row["within_band"]
    ]
    lines.append(f"Outside the band: {'; '.join(worse) if worse else 'none'}.")
    return "\n".join(lines) + "\n"

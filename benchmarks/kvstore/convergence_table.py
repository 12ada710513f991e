"""The section "What converges how" of docs/kvstore.md, from the result of ``convergence``. Standard library only.

``python -m benchmarks.run --table-only`` writes it; a test holds page and result together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kvstore.md"
RESULT = ROOT / "benchmarks" / "results" / "kvstore_convergence.json"
BEGIN, END = "<!-- from benchmarks/results/kvstore_convergence.json -->\n", "<!-- end -->\n"


def loss(row: dict[str, Any]) -> str:
    """A way's loss: its mean over seeds, and their standard deviation."""
    return f"{row['mean']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] is not None else "")


def apart(row: dict[str, Any]) -> str:
    """Its difference to plain sums."""
    return f"{row['over_plain']:+.3f}, {100 * (row['ratio'] - 1):+.1f} %"


def section(record: dict[str, Any] | None) -> str:
    """What stands between the marks."""
    if record is None:
        return "Not measured yet.\n"
    models: dict[str, Any] = record["result"]["models"]
    lines: list[str] = []
    for name, model in models.items():
        lines += [
            f"**{name}**, {model['parameters']:,} parameters, {model['steps']} steps of {model['batch']} samples; held-out loss "
            f"before training {model['knowing_nothing']:.3f}, the best possible {model['knowing_all']:.3f}:",
            "",
            "| way | optimizer | loss | beside plain sums | in the band |",
            "|---|---|---|---|---|",
        ]
        for way, row in model["ways"].items():
            inside = f"yes, ≤ {row['band']:.3f}" if row["within_band"] else f"no, > {row['band']:.3f}"
            rate = f"{row['optimizer']}, {row['lr']:g}"
            lines.append(f"| {way} | {rate} | {loss(row)} | {apart(row)} | {inside} |")
        lines.append("")
    worse = [
        f"{way} ({name}, {100 * (row['ratio'] - 1):+.0f} %)"
        for name, model in models.items()
        for way, row in model["ways"].items()
        if not row["within_band"]
    ]
    lines.append(f"Outside the band: {'; '.join(worse) if worse else 'none'}.")
    return "\n".join(lines) + "\n"


def page(text: str, record: dict[str, Any] | None) -> str:
    """``text`` with the section renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN.strip()} or, behind it, {END.strip()}")
    return before + begin + section(record) + end + after


def write() -> None:
    """Renew the section in the page."""
    PAGE.write_text(page(PAGE.read_text(), newest()))


def newest() -> dict[str, Any] | None:
    """The record that is there."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None

"""Rows of the tables that profilers print: name → seconds of its own, or bytes. A ``column`` is one of torch.profiler's."""

from __future__ import annotations

import re

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "b": 1.0, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30}


def torch_rows(text: str, column: str) -> dict[str, float]:
    """Of torch.profiler's ``key_averages().table()``, the column "Self CPU" or "Self CPU Mem"."""
    lines = text.splitlines()
    rulers = [number for number, line in enumerate(lines) if re.fullmatch(r"-{3,}(  -{3,})+\s*", line)]
    spans = [match.span() for match in re.finditer(r"-+", lines[rulers[0]])]

    def cells(line: str) -> list[str]:
        return [line[begin:end].strip() for begin, end in spans]

    index = cells(lines[rulers[0] + 1]).index(column)
    rows: dict[str, float] = {}
    for line in lines[rulers[1] + 1 : rulers[2]]:
        name, cell = cells(line)[0], cells(line)[index]
        number, unit = re.fullmatch(r"(-?[\d.]+) ?(\w+)", cell).groups()  # pyright: ignore[reportOptionalMemberAccess]
        rows[name] = rows.get(name, 0.0) + float(number) * _UNITS[unit.lower()]
    return rows


def simple_rows(text: str, column: str = "") -> dict[str, float]:
    """Of Lightning's simple profiler: actions and their total time."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: float(row[3]) for row in cells if row[0] not in ("Action", "Total")}


def advanced_rows(text: str, column: str = "") -> dict[str, float]:
    """Of Lightning's advanced profiler: "action: function" and the function's time of its own."""
    rows: dict[str, float] = {}
    action = ""
    for line in text.splitlines():
        if header := re.fullmatch(r"Profile stats for: (.+?)( rank: \d+)?", line):
            action = header[1]
        elif found := re.match(r"\s+[\d/]+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+(.+)", line):
            rows[f"{action}: {found[2]}"] = float(found[1])
    return rows

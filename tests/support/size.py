"""The line budget: no module over 600 lines, the hot loop at most 120, the public surface at most 40 names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE_LINES = 600
HOT_LOOP_LINES = 120
PUBLIC_NAMES = 40


def problems() -> list[str]:
    """One line per broken bound."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MODULE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MODULE_LINES}: two modules in one")
    engine = ast.parse((ROOT / "src/unisono/train/step.py").read_text(encoding="utf-8"))
    loop = sum(
        node.end_lineno - node.lineno + 1
        for cls in engine.body
        if isinstance(cls, ast.ClassDef) and cls.name == "TrainStep"
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    )
    if not 0 < loop <= HOT_LOOP_LINES:
        found.append(f"the hot loop has {loop} lines, at most {HOT_LOOP_LINES}")
    stub = ast.parse((ROOT / "src/unisono/__init__.pyi").read_text(encoding="utf-8"))
    names = sum(len(node.names) for node in stub.body if isinstance(node, ast.ImportFrom))
    if not 0 < names <= PUBLIC_NAMES:
        found.append(f"{names} public names, at most {PUBLIC_NAMES}")
    return found


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or "sizes are within budget")
    sys.exit(bool(found))

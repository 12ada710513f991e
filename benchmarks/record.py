"""Result files: ``results/<name>.json`` holds every run of a benchmark, the oldest first. Standard library only.

A run holds its commit, date, command, machine, versions, load average, ``sources`` (digests of the files that it ran, one for
each package of unisono and one for the benchmarks; absent where they were not clean) and ``result``, the JSON that the script
printed; a ``note`` says why a run does not count. ``stale`` lists the packages that had changed since the newest run when
``benchmarks.tables --mark-stale`` last looked; a new run removes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Run = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Results:
    """All runs of one benchmark."""

    name: str
    runs: list[Run] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    @property
    def newest(self) -> Run | None:
        """The run that tables show."""
        return self.runs[-1] if self.runs else None

    def add(self, run: Run) -> None:
        """Append a run of the current sources."""
        self.runs.append(run)
        self.stale = []


def load(name: str, folder: Path = RESULTS) -> Results:
    """The runs of ``name``; without runs where there is no file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return Results(name=name)
    data = json.loads(path.read_text())
    return Results(name=data["name"], runs=data["runs"], stale=data.get("stale", []))


def save(results: Results, folder: Path = RESULTS) -> None:
    """Write the file of ``results``."""
    data: dict[str, Any] = {"name": results.name}
    if results.stale:
        data["stale"] = results.stale
    folder.mkdir(exist_ok=True)
    (folder / f"{results.name}.json").write_text(
        json.dumps(data | {"runs": results.runs}, indent=1, ensure_ascii=False) + "\n"
    )


def digests(files: Iterable[Path], root: Path = ROOT) -> dict[str, str]:
    """SHA-256 of the paths and the code of ``files``, by package: "benchmarks", or the part of ``src/unisono``."""
    shas: dict[str, Any] = {}
    for file in sorted(files):
        parts = file.relative_to(root).parts
        content = code_of(file.read_text()).encode()
        sha = shas.setdefault(parts[2] if parts[0] == "src" else parts[0], hashlib.sha256())
        sha.update(f"{'/'.join(parts)}\0{len(content)}\0".encode())
        sha.update(content)
    return {package: sha.hexdigest()[:12] for package, sha in sorted(shas.items())}


@cache
def code_of(source: str) -> str:
    """``source`` without docstrings, empty lines and lines of comment: prose changes no figure."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                    lines[first - 1 : last] = [""] * (last - first + 1)
                case _:
                    pass
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def changed(run: Run, files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Packages whose code differs from that of ``run``; all of them where the run recorded none."""
    now, then = digests(files, root), run.get("sources", {})
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))

"""What the sources do, found in their syntax trees: calls and imports by their full names, whatever a file calls them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
Rule = Callable[["Source"], Iterator[tuple[ast.AST, str]]]


@dataclass(frozen=True)
class Source:
    """One file: its nodes, and what its names stand for."""

    tree: ast.AST
    names: dict[str, str]

    def full_name(self, node: ast.AST) -> str:
        """``np.load`` as ``numpy.load``; a name that nothing imports as it is, and what is no name as ``?``."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.full_name(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and self.full_name(node.func) == "importlib.import_module" and node.args:
            return str(constant(node.args[0]) or "?")
        return "?"

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Each call, with the full name of what is called."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, self.full_name(node.func)

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Each module that is imported, also by ``import_module`` or under a name from it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and self.full_name(node.func) in ("importlib.import_module", "__import__"):
                yield node, str(constant(node.args[0]) or "?")


def source(text: str) -> Source:
    """The source of a text."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]: alias.name
                if alias.asname
                else alias.name.partition(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            called = node.value.func
            is_import = isinstance(called, ast.Attribute | ast.Name) and ast.unparse(called).endswith("import_module")
            if is_import and isinstance(target, ast.Name) and isinstance(name := constant(node.value.args[0]), str):
                names[target.id] = name
    return Source(tree, names)


@cache
def sources(*folders: str) -> dict[str, Source]:
    """All Python files below folders of the repository, by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): source(path.read_text()) for path in paths}


def found(rule: Rule, *folders: str) -> dict[str, list[str]]:
    """What a rule finds in each file of the folders."""
    results = {
        name: [f"{what} in line {node.lineno}" for node, what in rule(file)] for name, file in sources(*folders).items()
    }  # type: ignore[attr-defined]
    return {name: lines for name, lines in results.items() if lines}


def finds(rule: Rule, text: str) -> bool:
    """Whether a rule finds something in a text."""
    return any(True for _ in rule(source(text)))


def constant(node: ast.AST | None) -> object:
    """The value of a constant; None of anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.AST | None:
    """An argument by its name or position; None if it is not given."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is None and position is not None and len(call.args) > position:
        return call.args[position]
    return named


def top(name: str) -> str:
    """The package of a full name."""
    return name.partition(".")[0]


def is_in(name: str, names: set[str]) -> bool:
    """Whether a full name is one of ``names`` or lies in a package among them."""
    parts = name.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))

"""How readable a checkout is, in counts: ``python tests/support/readability.py [DIR] [--json] [--list NAME] [--quick]``.

Everything but two counts comes from the syntax trees of ``src`` and ``tests``. The settings come from ``unisono config show``
and the test cases from ``pytest --collect-only``, both run by the checkout's own interpreter; ``--quick`` leaves the cases out.

    src_files, src_lines       Python files under src, and their lines, blank ones and comments included
    short_files                of these, files under 60 lines (``__init__`` too)
    repeated_classes           class names defined more than once under src, nested classes too
    long_functions             functions over 60 lines, from ``def`` to the last line, docstring included
    many_parameters            functions over 8 parameters, without self and cls
    settings                   fields of all sections of a run's configuration
    vague_locals               names bound to each, found, told, kept or made: assignments, for, with, comprehensions, :=
    what_docstrings            docstrings that open with "What"
    fragment_docstrings        docstrings of at most three words
    forward_assignments        assignments to an attribute ``forward``, setattr included
    public_names               names that ``unisono`` exports
    empty_packages             packages whose ``__init__`` has nothing but a docstring
    asserts, cases             assert statements under tests; cases that pytest collects
    assertions                 the sum of the two
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORT_FILE = 60
LONG_FUNCTION = 60
MANY_PARAMETERS = 8
FRAGMENT_WORDS = 3
VAGUE = ("each", "found", "told", "kept", "made")

Tree = dict[Path, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def measure(root: Path, *, quick: bool = False) -> dict[str, Any]:
    """Every count of the checkout at ``root``; a list of places stands for its length."""
    library, tests = parse(root, "src"), parse(root, "tests")
    lines = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in library}
    docstrings = list(docstrings_of(library))
    counts: dict[str, Any] = {
        "src_files": len(library),
        "src_lines": sum(lines.values()),
        "short_files": [f"{path}: {count}" for path, count in lines.items() if count < SHORT_FILE],
        "repeated_classes": repeated_classes(library),
        "long_functions": [
            f"{place}: {count} lines" for place, node in functions(library) if (count := length(node)) > LONG_FUNCTION
        ],
        "many_parameters": [
            f"{place}: {count}"
            for place, node in functions(library)
            if (count := num_parameters(node)) > MANY_PARAMETERS
        ],
        "settings": settings(root),
        "vague_locals": [f"{path}:{line} {name}" for path, line, name in bound_names(library) if name in VAGUE],
        "vague_locals_by_name": dict(
            sorted(Counter(name for _, _, name in bound_names(library) if name in VAGUE).items())
        ),
        "what_docstrings": [f"{place}: {text[:70]}" for place, text in docstrings if re.match(r"What\b", text)],
        "fragment_docstrings": [
            f"{place}: {text}" for place, text in docstrings if len(text.split()) <= FRAGMENT_WORDS
        ],
        "forward_assignments": [f"{path}:{line}" for path, line in forward_assignments(library)],
        "public_names": len(exported(root)),
        "empty_packages": [
            str(path.parent) for path, module in library.items() if path.name == "__init__.py" and is_empty(module)
        ],
        "asserts": sum(isinstance(node, ast.Assert) for module in tests.values() for node in ast.walk(module)),
    }
    if not quick:
        counts["cases"] = num_cases(root)
        counts["assertions"] = counts["asserts"] + counts["cases"]
    return counts


def parse(root: Path, folder: str) -> Tree:
    """Syntax trees by path relative to ``root``."""
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root): ast.parse(path.read_bytes()) for path in paths}


def repeated_classes(tree: Tree) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for path, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def functions(tree: Tree) -> Iterator[tuple[str, Function]]:
    for path, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_parameters(node: Function) -> int:
    """Without self and cls; ``*args`` and ``**kwargs`` are one each."""
    plain = [*node.args.posonlyargs, *node.args.args]
    own = bool(plain) and plain[0].arg in ("self", "cls")
    starred = (node.args.vararg is not None) + (node.args.kwarg is not None)
    return len(plain) - own + len(node.args.kwonlyargs) + starred


def bound_names(tree: Tree) -> Iterator[tuple[Path, int, str]]:
    """Each place where a plain name is bound; parameters and imports are not counted."""
    for path, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield path, node.lineno, node.id


def docstrings_of(tree: Tree) -> Iterator[tuple[str, str]]:
    for path, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                line = node.body[0].lineno
                yield f"{path}:{line} {getattr(node, 'name', '')}".rstrip(), text


def forward_assignments(tree: Tree) -> Iterator[tuple[Path, int]]:
    for path, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr == "forward" and isinstance(node.ctx, ast.Store):
                yield path, node.lineno
            if isinstance(node, ast.Call) and _sets_forward(node):
                yield path, node.lineno


def _sets_forward(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    constants = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return name in ("setattr", "__setattr__") and "forward" in constants


def exported(root: Path) -> list[str]:
    """The names that the package exports: those its stub imports, or its literal ``__all__`` where there is no stub."""
    stub = root / "src/unisono/__init__.pyi"
    if stub.exists():
        imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
        return [alias.asname or alias.name for node in imports for alias in node.names]
    for node in ast.parse((root / "src/unisono/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def is_empty(module: ast.Module) -> bool:
    """Nothing but a docstring and imports from ``__future__``."""
    return all(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for node in module.body
    )


def settings(root: Path) -> int:
    """Fields that ``config show`` prints for a run that sets nothing, over all sections."""
    shown = _run(root, "unisono", "config", "show")
    return sum(1 for _ in _leaves(tomllib.loads(shown)))


def _leaves(table: dict[str, Any]) -> Iterator[Any]:
    for value in table.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


def num_cases(root: Path) -> int:
    """Cases that pytest collects, of all tiers."""
    shown = _run(root, "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    found = re.search(r"^(\d+) tests? collected", shown, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest collected nothing in {root}:\n{shown[-2000:]}")
    return int(found[1])


def _run(root: Path, *command: str) -> str:
    python = root / ".venv/bin/python"
    done = subprocess.run(
        [python if python.exists() else sys.executable, "-m", *command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} in {root} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2], metavar="DIR")
    parser.add_argument("--json", action="store_true", help="everything, with each place")
    parser.add_argument("--list", action="append", default=[], metavar="NAME", help="the places of this count")
    parser.add_argument("--quick", action="store_true", help="without collecting the tests")
    options = parser.parse_args()
    counts = measure(options.root.resolve(), quick=options.quick)
    if options.json:
        print(json.dumps(counts, indent=1))
        return 0
    for name, value in counts.items():
        shown = value if isinstance(value, int) or name == "vague_locals_by_name" else len(value)
        print(f"{name:<24} {shown}")
    for name in options.list:
        value = counts[name]
        print(f"\n{name}")
        for line in (
            [f"{key}: {', '.join(places)}" for key, places in value.items()] if isinstance(value, dict) else value
        ):
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

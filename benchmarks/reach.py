"""The files that a benchmark runs: its script, the modules that it imports or starts, theirs, and so on. Standard library only.

They are found by reading the source, so that nothing has to be run: imports anywhere in a module except under
``TYPE_CHECKING``; for a name that a package imports on first use the module in the package's stub; strings that are a dotted
name of a module, and f-strings that begin with one (all modules with that beginning); the module after ``"-m"``.
"""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def files_of(script: str, root: Path = ROOT) -> tuple[Path, ...]:
    """The files of ``benchmarks.{script}`` and of all modules of benchmarks and unisono that it reaches, sorted.

    Raises ValueError for a script that does not exist.
    """
    first = _file(f"benchmarks.{script}", root)
    if first is None:
        raise ValueError(f"benchmarks.{script} is no module below {root}")
    reached, waiting = {first}, [first]
    while waiting:
        new = _next_files(waiting.pop(), root) - reached
        reached |= new
        waiting += new
    return tuple(sorted(reached))


@cache
def _next_files(file: Path, root: Path) -> frozenset[Path]:
    """The files of the modules that a file imports or starts, with those of the packages around them."""
    modules = {
        ".".join(parts[:length])
        for parts in (name.split(".") for name in _modules(file, root))
        for length in range(1, len(parts) + 1)
    }
    return frozenset(path for path in (_file(module, root) for module in modules) if path is not None)


def _file(module: str, root: Path) -> Path | None:
    """The file of a module or package of benchmarks or unisono; None if there is none."""
    package = module.partition(".")[0]
    if package not in ("benchmarks", "unisono") or not all(part.isidentifier() for part in module.split(".")):
        return None
    place = (root / "src" if package == "unisono" else root) / module.replace(".", "/")
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _modules(file: Path, root: Path) -> set[str]:
    """Dotted names of the modules that a file imports or starts."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                nodes += node.orelse
                continue
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(package), level=0):
                names |= {_home(package, alias.name, root) for alias in node.names}
            case ast.Constant(value=str(text)) if text.startswith(("benchmarks.", "unisono.")) and _file(text, root):
                names.add(text)
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if text.startswith(
                ("benchmarks.", "unisono.")
            ):
                names |= _starting(text, root)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                values = [element.value if isinstance(element, ast.Constant) else None for element in elements]
                for option, module in pairwise(values):
                    if option == "-m":
                        names |= {str(module), f"{module}.__main__"}
            case _:
                pass
        nodes += ast.iter_child_nodes(node)
    return names


def _home(package: str, name: str, root: Path) -> str:
    """The module that ``from package import name`` imports."""
    if _file(f"{package}.{name}", root):
        return f"{package}.{name}"
    file = _file(package, root)
    module = _stub(file.with_suffix(".pyi")).get(name) if file is not None else None
    return _home(f"{package}.{module}", name, root) if module else package


@cache
def _stub(file: Path) -> dict[str, str]:
    """Name → module below the package, as its stub imports them: ``from .loading.loader import Loader as Loader``."""
    if not file.is_file():
        return {}
    imports = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom) and node.level == 1
    ]
    return {alias.name: node.module for node in imports for alias in node.names if node.module}


def _starting(text: str, root: Path) -> set[str]:
    """Modules whose dotted names begin with ``text``, such as ``"benchmarks.peers.with_"``."""
    package, _, start = text.rpartition(".")
    folder = (root / "src" if package.startswith("unisono") else root) / package.replace(".", "/")
    return {f"{package}.{file.stem}" for file in folder.glob(f"{start}*.py")}

"""Names of unisono in text exist: in strings of tests and sources, in pages, and in code that no type checker reads."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.train.config import RunConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/unisono"
CODE = [
    path
    for folder in ("src", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py*"))
    if path.suffix in (".py", ".pyi")
]
# the changelog and the decisions tell of old names; the reference is generated from the exports
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
# spelled like modules: groups of entry points, a key of click's context, and what two tests make up
OTHER_NAMES = {
    *(f"unisono.{group}" for group in ("objectives", "datasets", "transforms", "metrics", "sinks", "codecs", "rules")),
    *(
        f"unisono.{group}"
        for group in (
            "collate_fns",
            "optimizers",
            "schedules",
            "callbacks",
            "device_readers",
            "devices",
            "dist_backends",
        )
    ),
    "unisono.log_level",
    "unisono.gone.rst",
    "unisono.example",
    "unisono.data.image.Decoder",
}

# a section of options or a value may have the name of a package: their fields and methods
FIELDS = {
    **{
        section: {field.name for field in dataclasses.fields(options)}
        for section, options in typing.get_type_hints(RunConfig).items()
        if dataclasses.is_dataclass(options)
    },
    "plan": {field.name for field in dataclasses.fields(PlanOptions)} | set(dir(Plan)),
    "config": {field.name for field in dataclasses.fields(RunConfig)} | {"use_cache"},
}

DOTTED = r"unisono(?:\.[A-Za-z_]\w*)*"
FROM_IMPORT = re.compile(rf"\bfrom\s+({DOTTED})\s+import\s+(\([^)]*\)|[^\n;`]*)")
IMPORT = re.compile(rf"\bimport\s+({DOTTED})\b")
RUN_MODULE = re.compile(rf"(?<![\w-])-m\s+({DOTTED})\b")
OBJECT = re.compile(rf"(?<![\w./@-])({DOTTED}):([A-Za-z_]\w*)")
QUALIFIED = re.compile(r"(?<![\w./@-])(unisono(?:\.[A-Za-z_]\w*)+)(?![\w-])(?!\.\w)")
# in backquotes, from a package on: ``parallel.fsdp.reshard``
SHORT = re.compile(r"`((?:{packages})(?:\.[A-Za-z_]\w*)+)(?:[(=][^`]*)?`")
FILE_SUFFIXES = {"bin", "html", "json", "py", "toml"}
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what an f-string fills in; \w does not match it


class Names:
    """The modules below ``source`` and the names each of them binds, read without importing anything."""

    def __init__(self, source: Path) -> None:
        files = sorted(source.rglob("*.py"))
        self.modules: Mapping[str, Path] = {module_name(path, source): path for path in files}
        self._bound: dict[str, set[str]] = {}
        packages = "|".join(sorted(name.split(".")[1] for name in self.modules if name.count(".") == 1))
        self._short = re.compile(SHORT.pattern.replace("{packages}", packages))

    def bound(self, module: str) -> set[str]:
        """What may be imported from a module: names it binds at its top level, exports of its stub, its submodules."""
        if module not in self._bound:
            path, stub = self.modules[module], self.modules[module].with_suffix(".pyi")
            names = {name for file in (path, stub) if file.exists() for name in top_level_names(parsed(file).body)}
            below = module + "."
            names |= {name.removeprefix(below) for name in self.modules if name.startswith(below)}
            self._bound[module] = names
        return self._bound[module]

    def unknown_name(self, module: str, name: str | None) -> str | None:
        """What does not exist of ``module`` and its ``name``; None where both do."""
        if module not in self.modules:
            return f"no module {module}"
        if name is not None and name not in self.bound(module) and not name.startswith("__"):
            return f"no name {name} in {module}"
        return None

    def unknown_qualified(self, dotted: str) -> str | None:
        """As ``unknown_name`` for ``package.module.name`` or ``package.module.Class.attribute``."""
        module, rest = dotted, ""
        while module not in self.modules and "." in module:
            module, _, rest = module.rpartition(".")
        return (
            self.unknown_name(module, dotted.removeprefix(module).strip(".").partition(".")[0] or None)
            if rest
            else None
        )

    def problems(self, text: str) -> Iterator[str]:
        """What ``text`` names that does not exist."""
        for match in self._short.finditer(text):
            first, *rest = match[1].split(".")
            if rest[-1] not in FILE_SUFFIXES and rest[0] not in FIELDS.get(first, ()):
                yield from filter(None, [self.unknown_qualified(f"unisono.{match[1]}")])
        if "unisono" not in text:
            return
        for match in FROM_IMPORT.finditer(text):
            for name in imported_names(match[2]):
                yield from filter(None, [self.unknown_name(match[1], name)])
        for pattern in (IMPORT, RUN_MODULE):
            for match in pattern.finditer(text):
                yield from filter(None, [self.unknown_name(match[1], None)])
        for match in RUN_MODULE.finditer(text):
            path = self.modules.get(match[1])
            if path is not None and path.name == "__init__.py" and f"{match[1]}.__main__" not in self.modules:
                yield f"no {match[1]}.__main__ to run"
        for match in OBJECT.finditer(text):
            yield from filter(None, [self.unknown_name(match[1], match[2])])
        for match in QUALIFIED.finditer(text):
            if match[1] not in OTHER_NAMES:
                yield from filter(None, [self.unknown_qualified(match[1])])


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def top_level_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What the statements bind, also inside ``if``, ``try`` and ``with``."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case _:
                for field in ("body", "orelse", "finalbody", "handlers"):
                    inner = getattr(statement, field, [])
                    yield from top_level_names(inner if field != "handlers" else [s for h in inner for s in h.body])
                yield from (
                    node.id
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                )


def imported_names(text: str) -> Iterator[str]:
    """The names after ``import``; what follows them on the line, as in a sentence, ends the list."""
    for item in text.strip("() \n").split(","):
        match = re.match(r"\s*([A-Za-z_]\w*)", item)
        if match is None:
            return
        yield match[1]
        if not re.fullmatch(r"\s*\w+(?:\s+as\s+\w+)?\s*(?:#[^\n]*)?\s*", item):
            return


def strings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """The string literals with their lines; an f-string has ``UNKNOWN`` for what it fills in."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) not in inside:
                yield node.lineno, text
            case ast.JoinedStr(values=values):
                yield (
                    node.lineno,
                    "".join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in values),
                )
            case _:
                pass


def code_problems(path: Path, names: Names) -> Iterator[str]:
    """Names in imports and in strings of a file that do not exist, with their lines."""
    nodes = [*ast.walk(parsed(path))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = imported_module(node, path)
            if module.partition(".")[0] == "unisono":
                problems = (names.unknown_name(module, alias.name) for alias in node.names)
                yield from (f"{path.name}:{node.lineno}: {problem}" for problem in problems if problem)
    for line, text in strings(nodes):
        yield from (f"{path.name}:{line}: {problem}" for problem in names.problems(text))


def imported_module(node: ast.ImportFrom, path: Path) -> str:
    """The absolute name of the module that a ``from`` import in ``path`` names."""
    if not node.level or not path.is_relative_to(SOURCE):
        return "" if node.level else str(node.module)
    package = module_name(path.parents[node.level - 1] / "__init__.py", SOURCE)
    return f"{package}.{node.module}" if node.module else package


@pytest.fixture(scope="module")
def names() -> Names:
    return Names(SOURCE)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_code_names_what_exists(folder: str, names: Names) -> None:
    files = [path for path in CODE if path.relative_to(ROOT).parts[0] == folder and path != Path(__file__)]
    assert len(files) > 20
    assert [problem for path in files for problem in code_problems(path, names)] == []


def test_pages_name_what_exists(names: Names) -> None:
    assert [f"{page.name}: {problem}" for page in PAGES for problem in names.problems(page.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from unisono.data import Loader, Lodaer", "no name Lodaer in unisono.data"),
        ("from unisono.data import (\n    Loader,\n    Lodaer as L,  # mine\n)", "no name Lodaer in unisono.data"),
        ("from unisono.dta import Loader; Loader()", "no module unisono.dta"),
        ("import unisono.dta", "no module unisono.dta"),
        ("python -m unisono.kvstore.sever", "no module unisono.kvstore.sever"),
        ("python -m unisono.kvstore", "no unisono.kvstore.__main__ to run"),
        ("unisono.kvstore.server.__main__:nomain", "no name nomain in unisono.kvstore.server.__main__"),
        ("unisono.kvstore.server.nomain:main", "no module unisono.kvstore.server.nomain"),
        ("see `unisono.errors.Problm`.", "no name Problm in unisono.errors"),
        ("unisono.errors.Problm.given", "no name Problm in unisono.errors"),
        ("see ``models.loss.Had`` there", "no name Had in unisono.models.loss"),
        ("`plan.diffs(other)`", "no name diffs in unisono.plan"),
    ],
)
def test_a_wrong_name_is_reported(text: str, problem: str, names: Names) -> None:
    assert problem in set(names.problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "from unisono.data import Loader, bucketed as b",
        "write `from unisono.data import Loader` and it is imported when it is used",
        "import unisono",
        "python -m unisono train",
        "python -m unisono.kvstore.server",
        "unisono.kvstore.server.__main__:main",
        "see `unisono.errors.Problem`.",
        "unisono.kvstore.compression.Codec.encode",
        "`plan.diff(other)`, `plan.global_batch=8`, `train.steps`, `plan.json`, ``parallel.fsdp.reshard``, models.loss.Had",
        "the group `unisono.sinks`; https://example.org/unisono.dta; report.unisono.html; UNISONO_RANK",
    ],
)
def test_a_right_name_is_not(text: str, names: Names) -> None:
    assert list(names.problems(text)) == []


def test_imports_and_filled_in_strings_of_code(tmp_path: Path, names: Names) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "def late(x):\n"
        "    from unisono.data import Lodaer\n"
        "    return f'from unisono.dta import {x}', f'unisono.data.{x}:main', 'import unisono.dta'\n"
    )
    assert sorted(set(code_problems(file, names))) == [
        "code.py:2: no name Lodaer in unisono.data",
        "code.py:3: no module unisono.dta",
        "code.py:3: no name dta in unisono",
    ]

"""Signatures of everything that users may import, one line each, in ``tests/api/signatures.txt``.

    python tests/support/signatures.py            print what has changed since; exit code 1 if anything has
    python tests/support/signatures.py --write    take the change over, once the newest section of CHANGELOG.md names it

A package exports its ``__all__``; where it has none, the names its ``__init__`` imports as themselves (``from a import b as b``)
and what it defines. Each changed name must stand in backquotes on a line of the changelog's newest section that was not
there at the last ``--write``: `` `Loader` ``, `` `Loader.read` ``, with or without its package; `` `unisono.data.*` `` names
all of a package. The file's head keeps short digests of the lines that were there, so no git history is needed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests/api/signatures.txt"
CHANGELOG = ROOT / "CHANGELOG.md"
COMMAND = "python tests/support/signatures.py --write"

_SEEN = "# changelog lines taken over: "
_HEAD = f"# Public names and their signatures. Written by: {COMMAND}"
_OPERATORS = ("__call__", "__enter__", "__getitem__", "__iter__", "__len__", "__next__")


class _Bare(str):
    """Text whose repr is itself, so that annotations print as they are written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# --- what there is ------------------------------------------------------------------------------------------------------


def signatures() -> dict[str, str]:
    """Dotted name -> signature, of every export of every package, members of classes included.

    What several packages export is described where its module is nearest; elsewhere its line says where that is.
    """
    exports = {f"{package}.{name}": value for package in packages() for name, value in exported(package)}
    homes: dict[int, str] = {}
    for dotted, value in exports.items():
        if not _is_plain(value):
            homes[id(value)] = min(homes.get(id(value), dotted), dotted, key=lambda name: _distance(name, value))
    lines: dict[str, str] = {}
    for dotted, value in exports.items():
        home = homes.get(id(value), dotted)
        if home == dotted:
            lines.update(describe(dotted, value))
        else:
            lines[dotted] = f"is {home}"
    return dict(sorted(lines.items()))


def packages() -> list[str]:
    """Every package of the library, the library itself first."""
    source = ROOT / "src"
    return sorted(".".join(path.parent.relative_to(source).parts) for path in (source / "unisono").rglob("__init__.py"))


def exported(package: str) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(package)
    for name in sorted(export_names(module)):
        yield name, getattr(module, name)


def export_names(module: ModuleType) -> set[str]:
    if (names := getattr(module, "__all__", None)) is not None:
        return set(names)
    assert module.__file__ is not None
    return set(_names_in(ast.parse(Path(module.__file__).read_bytes()).body))


def _names_in(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Public names that a module without ``__all__`` exports by the convention of typed packages."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name == alias.asname and alias.name[0] != "_")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id[0] != "_")
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _names_in(node.body)


def _is_plain(value: Any) -> bool:
    """Whether equal values may be one object by chance."""
    return value is None or isinstance(value, str | int | float | tuple)


def _distance(dotted: str, value: Any) -> tuple[int, int, str]:
    """How far the package of an export is from the module of its value: the longest common beginning is nearest."""
    module = str(getattr(value, "__module__", ""))
    package = dotted.rpartition(".")[0]
    common = 0
    for own, other in zip(package.split("."), module.split("."), strict=False):
        if own != other:
            break
        common += 1
    return -common, package.count("."), dotted


# --- how it is described --------------------------------------------------------------------------------------------------


def describe(dotted: str, value: Any) -> Iterator[tuple[str, str]]:
    """The line of an export, then those of its members."""
    if inspect.ismodule(value):
        yield dotted, "module"
    elif inspect.isclass(value):
        yield from _describe_class(dotted, value)
    elif callable(value) and hasattr(value, "__name__"):
        yield dotted, f"{_kind(value)} {_signature(value)}"
    elif _is_plain(value) or type(value).__module__ in ("typing", "types"):
        yield dotted, f"= {_text(value)}"
    else:
        yield dotted, f"instance of {type(value).__module__}.{type(value).__qualname__}"


def _describe_class(dotted: str, cls: type) -> Iterator[tuple[str, str]]:
    bases = [base.__qualname__ for base in cls.__bases__ if base is not object]
    inherits = f"({', '.join(bases)})" if bases else ""
    own = [base for base in reversed(cls.__mro__) if base.__module__.partition(".")[0] == "unisono"]
    if issubclass(cls, enum.Enum):
        yield dotted, f"enum{inherits}"
        for member in cls:
            yield f"{dotted}.{member.name}", f"= {_text(member.value)}"
    elif dataclasses.is_dataclass(cls):
        yield dotted, f"dataclass{inherits}{_dataclass_traits(cls)}"
        for field in dataclasses.fields(cls):
            yield f"{dotted}.{field.name}", _field(field)
    else:
        yield dotted, f"class{inherits}{' ' + _signature(cls) if _has_own_init(own) else ''}"
    members: dict[str, Any] = {}
    for base in own:
        members.update(vars(base))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            members.setdefault(name, _Bare(f"attribute: {annotation}"))
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set[str]()
    for name, member in sorted(members.items()):
        public = not name.startswith("_") or name in _OPERATORS
        if public and name not in fields and (text := _member(member)):
            yield f"{dotted}.{name}", text


def _dataclass_traits(cls: type) -> str:
    traits = getattr(cls, "__dataclass_params__")  # noqa: B009 - not declared on type
    positional = [field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only]
    words = [*(["frozen"] if traits.frozen else []), *([f"positional {', '.join(positional)}"] if positional else [])]
    return f" [{'; '.join(words)}]" if words else ""


def _field(field: dataclasses.Field[Any]) -> str:
    kind = field.type if isinstance(field.type, str) else _text(field.type)
    if field.default is not dataclasses.MISSING:
        return f"field: {kind} = {_text(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"field: {kind} = {getattr(field.default_factory, '__qualname__', 'factory')}()"
    return f"field: {kind}"


def _has_own_init(own: list[type]) -> bool:
    return any("__init__" in vars(base) or "__new__" in vars(base) for base in own)


def _member(member: Any) -> str:
    """A method, property or annotated attribute; empty for what is none of these."""
    if isinstance(member, _Bare):
        return member
    if isinstance(member, property):
        returns = inspect.signature(member.fget).return_annotation if member.fget else inspect.Signature.empty
        return f"property: {returns}" if returns is not inspect.Signature.empty else "property"
    if isinstance(member, staticmethod | classmethod):
        return f"{type(member).__name__} {_kind(member.__func__)} {_signature(member.__func__)}"
    return f"{_kind(member)} {_signature(member)}" if inspect.isfunction(member) else ""


def _kind(function: Any) -> str:
    return "async def" if inspect.iscoroutinefunction(function) else "def"


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return "(…)"

    def bare(annotation: Any) -> Any:
        return _Bare(annotation) if isinstance(annotation, str) else annotation

    parameters = [
        parameter.replace(
            annotation=bare(parameter.annotation),
            default=parameter.default if parameter.default is parameter.empty else _Bare(_text(parameter.default)),
        )
        for parameter in signature.parameters.values()
    ]
    text = signature.replace(parameters=parameters, return_annotation=bare(signature.return_annotation))
    return str(text)


def _text(value: Any) -> str:
    """A repr that is the same in every process."""
    if inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value)).replace("\n", " ")


# --- the file and the changelog ------------------------------------------------------------------------------------------------


def read(path: Path | None = None) -> tuple[dict[str, str], set[str]]:
    """(name -> signature, digests of the changelog's lines at that time); nothing where there is no file."""
    path = path or SNAPSHOT
    lines: dict[str, str] = {}
    seen: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith(_SEEN):
            seen |= set(line.removeprefix(_SEEN).split())
        elif line and not line.startswith("#"):
            name, _, text = line.partition(" ")
            lines[name] = text
    return lines, seen


def render(lines: Mapping[str, str], changelog: str) -> str:
    seen = " ".join(sorted(digest(line) for line in newest_section(changelog)))
    body = "".join(f"{name} {text}\n" for name, text in lines.items())
    return f"{_HEAD}\n{_SEEN}{seen}\n\n{body}"


def newest_section(changelog: str) -> list[str]:
    """Lines under the first heading of the second level."""
    sections = re.split(r"^## .*$", changelog, flags=re.MULTILINE)
    return [line.strip() for line in sections[1].splitlines() if line.strip()] if len(sections) > 1 else []


def digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:8]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Dotted name -> how it has changed, in the order of names."""
    words = {name: f"gone, was {text}" for name, text in before.items() if name not in after}
    words |= {name: f"new: {text}" for name, text in after.items() if name not in before}
    words |= {
        name: f"{before[name]} -> {text}" for name, text in after.items() if name in before and before[name] != text
    }
    return dict(sorted(words.items()))


def unnamed(changed: Iterable[str], section: Iterable[str], seen: set[str]) -> list[str]:
    """The exports among ``changed`` that no new line of the changelog's section names in backquotes."""
    quoted = [word for line in section if digest(line) not in seen for word in re.findall(r"`([^`]+)`", line)]
    whole = {word.removesuffix(".*") for word in quoted if word.endswith(".*")}
    names = {name for word in quoted for name in re.findall(r"\w+", word)}
    missing = {
        export
        for export in map(_export_of, changed)
        if export.rpartition(".")[0] not in whole and export.rpartition(".")[2] not in names
    }
    return sorted(missing)


def _export_of(dotted: str) -> str:
    """``unisono.data.Loader`` of ``unisono.data.Loader.read``: the longest package in front, and one name more."""
    parts = dotted.split(".")
    depth = 1
    while (ROOT / "src").joinpath(*parts[: depth + 1], "__init__.py").exists():
        depth += 1
    return ".".join(parts[: depth + 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="take the change over")
    options = parser.parse_args()
    (before, seen), after = read(), signatures()
    changed = changes(before, after)
    for name, words in changed.items():
        print(f"{name}: {words}")
    if not options.write:
        return 1 if changed else 0
    changelog = CHANGELOG.read_text(encoding="utf-8")
    missing = unnamed(changed, newest_section(changelog), seen) if before else []
    if missing:
        print(f"\nnot written: no new line of the newest section of {CHANGELOG.name} names, in backquotes,")
        print("\n".join(f"  {name}" for name in missing))
        return 1
    if changed or not SNAPSHOT.exists():
        SNAPSHOT.write_text(render(after, changelog), encoding="utf-8")
    print(f"{len(after)} signatures, {len(changed)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

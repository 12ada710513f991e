"""The public names: what packages export, what the reference documents and what ``help()`` shows are the same."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import pydoc
import re
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import unisono

ROOT = Path(__file__).parents[1]


def load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()


def packages() -> list[str]:
    return ["unisono", *(info.name for info in pkgutil.walk_packages(unisono.__path__, "unisono.") if info.ispkg)]


def test_every_package_that_exports_names_has_a_page() -> None:
    with_exports = {name for name in packages() if getattr(importlib.import_module(name), "__all__", [])}
    assert with_exports <= set(reference.PACKAGES), with_exports - set(reference.PACKAGES)


@pytest.mark.parametrize("package", reference.PACKAGES)
def test_the_page_documents_exactly_the_exports(package: str) -> None:
    pattern = rf"^\.\. (?:auto\w+|py:data):: {re.escape(package)}\.(\w+)$|^``(\w+)``$"
    documented = re.findall(pattern, reference.page(package), re.M)
    names = [first or second for first, second in documented]
    assert names == reference.exports(package)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("package", reference.PACKAGES)
def test_help_shows_every_exported_name(package: str) -> None:
    module = importlib.import_module(package)
    for name in reference.exports(package):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            text = inspect.getdoc(value)
            assert text, f"{package}.{name} has no docstring"
            assert text.splitlines()[0] in pydoc.plain(pydoc.render_doc(value)), f"{package}.{name}"


def test_pages_and_index_are_written(tmp_path: Path) -> None:
    (tmp_path / "unisono.gone.rst").write_text("stale")
    reference.write_reference(tmp_path)
    written = {path.stem for path in tmp_path.glob("*.rst")}
    assert written == {name for name in reference.PACKAGES if reference.exports(name)} | {"index"}
    assert "unisono.data" in (tmp_path / "index.rst").read_text()


def is_option(field: dataclasses.Field[Any]) -> bool:
    return any(getattr(value, "help", "") for value in field.metadata.values())


def undocumented_parameters(value: Any) -> list[str]:
    """Parameters of a callable, or fields of a dataclass, that neither its docstring nor the help of an option names."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init and not is_option(field)]
    else:
        names = [name for name in inspect.signature(value).parameters if name not in ("args", "kwargs")]
    text = f"{inspect.getdoc(value)}\n{inspect.getdoc(value.__init__) if inspect.isclass(value) else ''}"
    return [name for name in names if not re.search(rf"``(\w+\.)?{name}\b|^ +\*{{0,2}}{name}( \(.*\))?:", text, re.M)]


@pytest.mark.parametrize("package", reference.PACKAGES)
def test_a_docstring_names_every_parameter_of_a_call_with_four_or_more(package: str) -> None:
    module = importlib.import_module(package)
    missing: dict[str, list[str]] = {}
    for name in reference.exports(package):
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)) or value.__module__.partition(".")[0] != "unisono":
            continue
        if (inspect.isclass(value) and issubclass(value, (BaseException, Enum))) or getattr(
            value, "_is_protocol", False
        ):
            continue
        if len(inspect.signature(value).parameters) >= 4 and (names := undocumented_parameters(value)):
            missing[name] = names
    assert not missing, missing

"""Writes the reference: one page per package, from the names the package exports."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

# In the order in which a reader meets them: the top level first, then along a training run.
PACKAGES = (
    "unisono",
    "unisono.config",
    "unisono.plan",
    "unisono.data",
    "unisono.data.image",
    "unisono.data.recordio",
    "unisono.data.sources",
    "unisono.data.mindrecord",
    "unisono.data.convert",
    "unisono.data.convert.pack",
    "unisono.models",
    "unisono.tasks",
    "unisono.optim",
    "unisono.parallel",
    "unisono.kvstore",
    "unisono.kvstore.compression",
    "unisono.train",
    "unisono.checkpoint",
    "unisono.storage",
    "unisono.observe",
    "unisono.interop",
    "unisono.launch",
    "unisono.diagnose",
    "unisono.compare",
    "unisono.report",
    "unisono.doctor",
    "unisono.dist",
    "unisono.measure",
    "unisono.profile",
    "unisono.errors",
)


def exports(package: str) -> list[str]:
    """The public names of a package: its ``__all__``; of the module ``unisono.errors``, the names it defines."""
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == package and callable(value)
        ]
    return sorted(names, key=lambda name: (name.lower(), name))


def page(package: str) -> str:
    """One reference page in reStructuredText."""
    lines = [package, "=" * len(package), "", f".. automodule:: {package}", "   :no-members:", ""]
    module = importlib.import_module(package)
    for name in exports(package):
        value = getattr(module, name)
        if package != "unisono" and name in exports("unisono"):
            lines += [f"``{name}``", "   Documented under :doc:`unisono`.", ""]
        elif inspect.isclass(value):
            lines += [f".. autoclass:: {package}.{name}", ""]
        elif callable(value):
            lines += [f".. autofunction:: {package}.{name}", ""]
        else:
            lines += [f".. py:data:: {package}.{name}", ""]
    return "\n".join(lines)


def write_reference(folder: Path) -> None:
    """Write the pages and their index into ``folder``; an unchanged page keeps its date, so that builds are quick."""
    folder.mkdir(exist_ok=True)
    pages = {package: page(package) for package in PACKAGES if exports(package)}
    index = ["Reference", "=========", "", ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in pages), ""]
    for name, text in {**pages, "index": "\n".join(index)}.items():
        target = folder / f"{name}.rst"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    for stale in {path.stem for path in folder.glob("*.rst")} - pages.keys() - {"index"}:
        (folder / f"{stale}.rst").unlink()

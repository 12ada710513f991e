"""Whose a line of source is, by the path of its file: the user's, this library's or torch's. Imports no torch."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

OWN_FOLDER: Final = f"{Path(__file__).parents[1]}/"
_PLACE: Final = re.compile(
    r"(?::\d+|\(\d+\): .*)$", re.DOTALL
)  # the line, as ``file:line`` or ``file(line): function``


@cache
def torch_folder() -> str:
    """The folder of the torch that is installed; a path that nothing is in where there is none."""
    spec = find_spec("torch")
    return f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else "/no/torch/"


def is_own(source: str) -> bool:
    """Whether ``source``, as a profile has it, is in this library.

    A trace leaves out folders of ``sys.path``, so what begins with ``unisono/`` is either ours or in a folder of the user's of
    that name: ours if the library has such a file.
    """
    file = _PLACE.sub("", source)
    if file.startswith("unisono/"):
        return Path(OWN_FOLDER, file.removeprefix("unisono/")).is_file()
    return file.startswith(OWN_FOLDER) or "/site-packages/unisono/" in file or "/dist-packages/unisono/" in file


def is_of_torch(source: str) -> bool:
    """Whether ``source`` is in torch. Of a path that begins with ``torch/`` its first folder decides: other releases have other
    files."""
    if source.startswith("torch/"):
        inside = _PLACE.sub("", source).split("/")[1]
        return not Path(torch_folder()).is_dir() or Path(torch_folder(), inside).exists()
    return source.startswith(torch_folder()) or "/site-packages/torch/" in source or "/dist-packages/torch/" in source


def shortened(file: str) -> str:
    """``file`` of this process, from the package on if it is of this library, as a trace has it: the same on every machine."""
    return f"unisono/{file.removeprefix(OWN_FOLDER)}" if file.startswith(OWN_FOLDER) else file


def marked(source: str) -> str:
    """``source`` for a table, with a mark if it is of this library and not of the user's code."""
    return f"{source} (of unisono)" if is_own(source) else source

"""Command lines and module path of our own child processes, which import nothing from the working folder.

``python -m`` and ``python -c`` put the working folder first in the module path: a file ``json.py`` in a shared or downloaded
folder would run in place of Python's own module. ``-P`` leaves it out. Commands of users, such as that of ``unisono launch``,
are started as they are given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules in a new interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str, *arguments: str) -> list[str]:
    """The command line that runs Python code of ours in a new interpreter."""
    return [sys.executable, "-P", "-c", code, *arguments]


def open_standard_descriptors() -> None:
    """Open what is closed of standard input, output and error as ``/dev/null``.

    Otherwise a socket or file of this process would get such a number, and a child would take it for its standard input. So this
    comes before whatever a child inherits.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def module_path() -> str:
    """``PYTHONPATH`` of a child that finds all packages this process finds, and runs no code of the user.

    The working folder and the folder of the script are left out unless ``PYTHONPATH`` names them: Python put them there by
    itself. The folder that has this package stays.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    implicit = {os.path.dirname(os.path.realpath(program))} if program else set[str]()
    with suppress(OSError):  # the working folder was removed
        implicit.add(os.path.realpath(os.getcwd()))
    implicit -= {os.path.realpath(folder) for folder in _explicit_folders()}
    return os.pathsep.join(entry for entry in sys.path if entry and os.path.realpath(entry) not in implicit)


def _explicit_folders() -> Iterable[str]:
    yield str(Path(__file__).parents[2])
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

"""Which Python files of run folders may run: those that the user has run before, or any, with ``--trust-python``.

The configuration in a run's folder names its Python file as ``base``. The folder may be anybody's, so that file runs only if the
user's own state has a record of its path and content, and only the user or root can have written it. A record is an empty
file whose name is a digest of both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from unisono.config.toml_file import config_problem
from unisono.errors import Problem
from unisono.storage.directory import make_folder
from unisono.storage.ownership import untrusted_reason


def record_python(path: Path, digest: str, environ: Mapping[str, str]) -> None:
    """Record that the user runs this Python file; ``digest`` is that of its content.

    Does nothing for a file that another user can have written, nor where no state can be kept.
    """
    if _foreign(path.resolve()):
        return
    with suppress(OSError):
        folder = _records(environ)
        make_folder(folder, mode=0o700)
        (folder / _record(path, digest)).touch(mode=0o600)


def python_problem(path: Path, digest: str, named: str, environ: Mapping[str, str]) -> Problem | None:
    """Why a Python file that a run's folder names may not run; None if it may. ``named`` is the line that names it."""
    path = path.resolve()
    record = _records(environ) / _record(path, digest)
    foreign = _foreign(path)
    if not foreign and record.is_file() and not (untrusted_reason(record) or untrusted_reason(record.parent)):
        return None
    return config_problem(
        f"{named}{foreign or f'{path} is a file that you have not run in this form'}",
        "the folder of a run can be anybody's: its Python file runs if you have run that file with this content before, and "
        "nobody else can write to it",
        "look at the file, then add --trust-python (each time, for a file that others own or can write); "
        "a run of TOML alone needs no code",
    )


def _foreign(path: Path) -> str:
    return untrusted_reason(path) or untrusted_reason(path.parent)


def _records(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    return home / "unisono" / "python-files"


def _record(path: Path, digest: str) -> str:
    return blake2b(f"{path.resolve()}\0{digest}".encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()

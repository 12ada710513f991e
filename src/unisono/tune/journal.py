"""Optuna's journal as a file that a kill can tear, or that may be no journal at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError

_START: Final = b'{"op_code":0,'  # Optuna's first line, which makes the study


def damaged(journal: Path, reason: object) -> ConfigError:
    """The error of a journal that cannot be read."""
    return ConfigError(
        given=f"{journal}, which cannot be read: {reason}",
        rule="a search goes on from Optuna's journal",
        consequence="nothing was started, and the file is as it was",
        nearest="a copy of the file from before it was changed; another folder (--out) begins a new search",
    )


def drop_torn_line(journal: Path) -> None:
    """Drop the last line where a killed process or a full disk left it without an end.

    Raises:
        ConfigError: The file is not Optuna's, or a link; it is left as it is.
    """
    if not os.path.lexists(journal):
        return
    if not stat.S_ISREG(journal.lstat().st_mode):
        raise damaged(journal, "it is a link" if journal.is_symlink() else "it is no regular file")
    fd = os.open(journal, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb+") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
        file.seek(0)
        content = file.read()
        start = content[: len(_START)]
        if start != _START[: len(start)]:
            raise damaged(journal, "it is no journal of a search")
        file.truncate(content.rfind(b"\n") + 1)

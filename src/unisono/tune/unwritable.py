"""Whether a training failed because its folder could not be written: that says nothing about its settings."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError
from unisono.observe.run_summary import format_gib
from unisono.storage.files import create_file, os_reason, temporary_name

_CODES: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_WORDS: Final = (
    *(words for code in _CODES for words in (os.strerror(code), errno.errorcode[code])),
    "could not be written",  # a checkpoint, by the error of a run
)
_PROBE_BYTES: Final = 1 << 16  # a training that cannot even write what it says ends without a word


def unwritable_reason(folder: Path, said: str) -> str:
    """Why a training that ended without a result could not write, in a line: of the error that it ended with, or the error of a
    small file that is written into ``folder`` now, where it had no room for its own. Empty if it failed otherwise."""
    for line in said.splitlines():
        if any(words in line for words in _WORDS):
            return line.strip()
    probe = temporary_name(folder / ".room")
    try:
        create_file(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return os_reason(error) if error.errno in _CODES else ""
    with suppress(OSError):
        probe.unlink()
    return ""


def unwritable_error(folder: Path, reason: str) -> ConfigError:
    """The error that ends a command whose training could not write ``folder``, for the reason of ``unwritable_reason``."""
    free = format_gib(shutil.disk_usage(folder).free)
    return ConfigError(
        given=f"{folder}, which a training could not write, with {free} free there: {reason}",
        rule="a training that cannot write its folder says nothing about its settings",
        consequence="the command ended; this training does not count, and the same command makes it again",
        nearest="room there, and the right to write there; then run the same command again",
    )

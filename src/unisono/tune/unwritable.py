"""Whether a training failed because its folder could not be written: that says nothing about its settings."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError
from unisono.observe.run_summary import format_gib
from unisono.storage.files import NO_ROOM, create_file, os_reason, temporary_name

_CODES: Final = NO_ROOM | {errno.EROFS}
_WORDS: Final = (
    *(words for code in sorted(_CODES) for words in (os.strerror(code), errno.errorcode[code])),
    "could not be written",  # a checkpoint, by the error of a run
)
_PLACE: Final = re.compile(r"(?<![\w.])/[^\s'\",:;]+")  # an absolute path
_PROBE_BYTES: Final = 1 << 16  # a training that cannot even write what it says ends without a word


def unwritable_reason(folder: Path, said: str) -> str:
    """The error that kept a training from writing into ``folder``, as one line; empty if something else ended it.

    Searches the text of the error with which the training ended, and then writes a small file, as a training without room may
    end without a word.
    """
    for line in said.splitlines():
        if any(words in line for words in _WORDS) and _is_about(folder, line):
            return line.strip()
    probe = temporary_name(folder / ".room")
    try:
        create_file(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return os_reason(error) if error.errno in _CODES else ""
    with suppress(OSError):
        probe.unlink()
    return ""


def _is_about(folder: Path, line: str) -> bool:
    """Whether an error may be about files in ``folder``: it names one, or no place at all."""
    places = _PLACE.findall(line)
    return not places or any(Path(place).is_relative_to(folder.absolute()) for place in places)


def unwritable_error(folder: Path, reason: str) -> ConfigError:
    """The error that ends a command whose training could not write ``folder``, for the reason of ``unwritable_reason``."""
    with suppress(OSError):  # the folder may be gone
        reason = f"{reason}; {format_gib(shutil.disk_usage(folder).free)} are free there"
    return ConfigError(
        given=f"{folder}, which a training could not write: {reason}",
        rule="a training that cannot write its folder says nothing about its settings",
        consequence="the command ended; this training does not count, and the same command makes it again",
        nearest="room there, and the right to write there; then run the same command again",
    )

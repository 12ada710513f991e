"""Why a folder of results cannot be written, as an error in four parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError
from unisono.storage.files import NO_ROOM, is_inside, os_reason

_ONLY_OF_WRITES: Final = NO_ROOM | {errno.EROFS}
_OF_NAMES: Final = (errno.EISDIR, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@contextmanager
def explained_write_errors(folder: Path, *, consequence: str, other_name: str) -> Generator[None]:
    """Raise ConfigError in place of an OSError that says that results cannot be written into a folder.

    Args:
        folder: The folder; it may be missing.
        consequence: What has not been done.
        other_name: What to do where a name is that of another file or folder.

    Raises:
        ConfigError: The folder, or one above it, cannot be made or written.
        OSError: Any other: something else cannot be read.
    """
    try:
        yield
    except OSError as error:
        if not _is_of(folder, error):
            raise
        raise ConfigError(
            given=f"{folder}, which cannot be written: {os_reason(error)}",
            rule="results are written into a folder, which needs room for them and for intermediate files",
            consequence=consequence,
            nearest=other_name
            if error.errno in _OF_NAMES
            else "room there, and the right to write there; then run the same command again",
        ) from error


def _is_of(folder: Path, error: OSError) -> bool:
    if error.errno in _ONLY_OF_WRITES:
        return True
    if not isinstance(error.filename, str | bytes | os.PathLike) or not error.filename:
        return False
    place = Path(os.fsdecode(error.filename))
    return is_inside(folder, place) or is_inside(place, folder)  # those above the folder are made too

"""Who could have written a file: code, journals and caches of other users of the host are not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from unisono.errors import DataError
from unisono.storage.directory import make_folder


def foreign_reason(path: Path) -> str:
    """Why another user of the host may have written what is at ``path``; empty if only the caller or root can have.

    It belongs to the caller or root, and others cannot write to it; a folder with the sticky bit, such as ``/tmp``, is one where
    others cannot replace what they do not own. Of a link both the link and what it leads to are looked at. A path that does not
    exist was written by nobody.
    """
    try:
        found = [os.lstat(path)]
        if stat.S_ISLNK(found[0].st_mode):
            found.append(os.stat(path))
    except FileNotFoundError:
        return ""
    for each in found:
        if each.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to {_user(each.st_uid)}"
        shared = stat.S_ISLNK(each.st_mode) or (stat.S_ISDIR(each.st_mode) and each.st_mode & stat.S_ISVTX)
        if each.st_mode & stat.S_IWOTH and not shared:
            return f"{path} can be written by others (mode {stat.S_IMODE(each.st_mode):o})"
    return ""


def shared_folder_reason(path: Path, *, mode: int) -> str:
    """Create a folder with ``mode``, unless it is there; why another user can have written into it, empty if none can.

    One with the sticky bit is shared too. Raises OSError if it cannot be created.
    """
    make_folder(path, mode=mode)
    reason = foreign_reason(path)
    if not reason and (found := stat.S_IMODE(path.stat().st_mode)) & stat.S_IWOTH:
        reason = f"{path} can be written by others (mode {found:o})"
    above = path.absolute().parent
    if not reason and (found := stat.S_IMODE(above.stat().st_mode)) & stat.S_IWOTH and not found & stat.S_ISVTX:
        reason = f"others can replace it: {above} has mode {found:o}"
    return reason


def make_own_folder(path: Path, *, mode: int = 0o755) -> None:
    """Create a folder of copies and prepared data, unless it is there.

    Raises:
        DataError: Another user of the host can have written into it; so they can into one with the sticky bit.
        OSError: It cannot be created.
    """
    if reason := shared_folder_reason(path, mode=mode):
        raise DataError(
            given=f"a folder of prepared data that is not this user's alone: {reason}",
            rule="prepared data and copies are read only from a folder that this user or root alone can have written",
            consequence="nothing was read from it or written to it",
            nearest="data.cache_dir=~/.cache/unisono, or chmod o-w on that folder if it is yours",
        )


def _user(uid: int) -> str:
    import pwd  # not everywhere, and rarely needed

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

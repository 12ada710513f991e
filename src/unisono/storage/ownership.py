"""Who could have written a file: code and journals of other users of the host are not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def foreign_reason(path: Path) -> str:
    """Why another user of the host may have written ``path`` or put it there; empty if only the caller or root can have.

    Looks at ``path`` itself, without following a link, and at its folder. Both belong to the caller or root and cannot be written
    by others, except for a folder with the sticky bit, such as ``/tmp``, where others cannot replace a file. A path that does
    not exist was written by nobody.
    """
    for each in (path, path.absolute().parent):
        try:
            found = os.lstat(each)
        except FileNotFoundError:
            continue
        if found.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to {_user(found.st_uid)}"
        is_folder = stat.S_ISDIR(found.st_mode)
        if (
            stat.S_ISLNK(found.st_mode)
            or not found.st_mode & stat.S_IWOTH
            or (is_folder and found.st_mode & stat.S_ISVTX)
        ):
            continue
        return f"{each} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _user(uid: int) -> str:
    import pwd  # not everywhere, and rarely needed

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

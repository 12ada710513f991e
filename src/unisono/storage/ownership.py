"""Who could have written a file: code, journals and caches of other users of the host are not used."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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


def _user(uid: int) -> str:
    import pwd  # not everywhere, and rarely needed

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

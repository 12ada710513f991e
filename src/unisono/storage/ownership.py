"""Who could have written a file: code, journals and caches of other users of the host are not used."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from unisono.errors import DataError
from unisono.storage.directory import make_folder
from unisono.storage.files import open_regular
from unisono.storage.limits import MAX_JSON_BYTES, decode_json


def foreign_reason(path: Path) -> str:
    """Why another user of the host may have written what is at ``path``; empty if only the caller or root can have.

    It belongs to the caller or root, and others cannot write to it, nor can a group with members besides the owner. A folder with
    the sticky bit, such as ``/tmp``, is one where others cannot replace what they do not own. Of a link both the link and what it
    leads to are looked at. A path that does not exist was written by nobody.
    """
    try:
        found = [os.lstat(path)]
        if stat.S_ISLNK(found[0].st_mode):
            found.append(os.stat(path))
    except FileNotFoundError:
        return ""
    return next(filter(None, (_foreign(path, each) for each in found)), "")


def open_own(path: Path) -> BinaryIO:
    """Open a file for reading that only the caller or root can have written.

    Raises:
        PermissionError: Another user can have written it; the text is that of ``foreign_reason``.
        OSError: It cannot be opened, is a link or no regular file.
    """
    file = open_regular(path, flags=os.O_NOFOLLOW)
    if reason := _foreign(path, os.fstat(file.fileno())):
        file.close()
        raise PermissionError(errno.EPERM, reason)
    return file


def read_own_json(path: Path, decode: Callable[[bytes], Any] = json.loads, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file that only the caller or root can have written.

    Raises:
        OSError: As ``open_own``.
        ValueError: As ``decode_json``.
    """
    with open_own(path) as file:
        return decode_json(file.read(max_bytes + 1), decode, max_bytes=max_bytes)


def shared_folder_reason(path: Path, *, mode: int) -> str:
    """Create a folder with ``mode``, unless it is there; why another user can have written into it, empty if none can.

    One with the sticky bit is shared too. Raises OSError if it cannot be created.
    """
    make_folder(path, mode=mode)
    reason = foreign_reason(path)
    if not reason and (who := _writers(found := path.stat())):
        reason = f"{path} can be written by {who} (mode {stat.S_IMODE(found.st_mode):o})"
    above = path.absolute().parent
    if not reason and (who := _writers(found := above.stat())) and not found.st_mode & stat.S_ISVTX:
        reason = f"{who} can replace it: {above} has mode {stat.S_IMODE(found.st_mode):o}"
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
            nearest="data.cache_dir=~/.cache/unisono, or chmod go-w on that folder if it is yours",
        )


def _foreign(path: Path, found: os.stat_result) -> str:
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to {_user(found.st_uid)}"
    is_shared = stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
    if not is_shared and (who := _writers(found)):
        return f"{path} can be written by {who} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _writers(found: os.stat_result) -> str:
    """Who but its owner can write to a file or folder, in words; empty for nobody."""
    if found.st_mode & stat.S_IWOTH:
        return "others"
    return _others_in_group(found.st_gid, found.st_uid) if found.st_mode & stat.S_IWGRP else ""


@cache
def _others_in_group(gid: int, uid: int) -> str:
    """The group in words if it has members besides ``uid``; empty for one's private group, which Linux gives each user."""
    import grp  # these two rarely needed
    import pwd

    try:
        group, members = grp.getgrgid(gid).gr_name, set(grp.getgrgid(gid).gr_mem)
    except KeyError:  # no name, no list of members
        group, members = str(gid), set[str]()
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    names = {user.pw_name for user in pwd.getpwall() if user.pw_uid == uid}
    return f"the group {group}" if members - names else ""


def _user(uid: int) -> str:
    import pwd  # not everywhere, and rarely needed

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

"""Who could have written a file: code, journals and caches of other users of the host are not used."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from unisono.errors import DataError
from unisono.storage.directory import make_folder
from unisono.storage.files import open_new, open_regular, temporary_name
from unisono.storage.limits import MAX_JSON_BYTES, decode_json, read_open


def untrusted_reason(path: Path) -> str:
    """Why another user of the host may have written what is at ``path``; empty if only the caller or root can have.

    It belongs to the caller or root, and others cannot write to it, nor can a group with members besides the owner. A folder with
    the sticky bit, such as ``/tmp``, is one where others cannot replace what they do not own. Of a link both the link and what it
    leads to are looked at. A path that does not exist was written by nobody.

    May create and delete a ``.probe`` file in the folder, to see what owner and mode its file system gives to new files.
    """
    try:
        found = [os.lstat(path)]
        if stat.S_ISLNK(found[0].st_mode):
            found.append(os.stat(path))
    except FileNotFoundError:
        return ""
    folder = path if stat.S_ISDIR(found[-1].st_mode) else path.parent
    return next(filter(None, (untrusted_status_reason(path, each, folder) for each in found)), "")


def open_own(path: Path) -> BinaryIO:
    """Open a file for reading that only the caller or root can have written.

    May create and delete a ``.probe`` file in its folder, as ``untrusted_reason`` does.

    Raises:
        PermissionError: Another user can have written it; the text is that of ``untrusted_reason``.
        OSError: It cannot be opened, is a link or no regular file.
    """
    file = open_regular(path, flags=os.O_NOFOLLOW)
    if reason := untrusted_status_reason(path, os.fstat(file.fileno()), path.parent):
        file.close()
        raise PermissionError(errno.EPERM, reason)
    return file


def read_own_json(path: Path, decode: Callable[[bytes], Any] = json.loads, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file that only the caller or root can have written.

    May create and delete a ``.probe`` file in its folder, as ``untrusted_reason`` does.

    Raises:
        OSError: As ``open_own``.
        ValueError: As ``decode_json``.
    """
    with open_own(path) as file:
        return decode_json(read_open(file, max_bytes), decode, max_bytes=max_bytes)


def make_and_check_folder(path: Path, *, mode: int) -> str:
    """Create a folder with ``mode``, unless it is there; why another user can have written into it, empty if none can.

    One with the sticky bit counts as writable by others. May create and delete a ``.probe`` file in it and in the folder above.
    Raises OSError if it cannot be created.
    """
    make_folder(path, mode=mode)
    reason = untrusted_reason(path) or untrusted_folder_reason(path, path.stat())
    above = path.absolute().parent
    found = above.stat()
    if reason or found.st_mode & stat.S_ISVTX or not (who := _writers(found)) or _is_given_by_file_system(above, found):
        return reason
    return f"{who} can replace it: {above} has mode {stat.S_IMODE(found.st_mode):o}"


def make_own_folder(path: Path, *, option: str = "") -> None:
    """Create a folder of copies and prepared data, unless it is there; this user alone can read it, as the data may be private.

    May create and delete a ``.probe`` file in it and in the folder above. ``option`` is the one that names another folder, for
    the error.

    Raises:
        DataError: Another user of the host can have written into it; so they can into one with the sticky bit.
        OSError: It cannot be created.
    """
    if reason := make_and_check_folder(path, mode=0o700):
        raise DataError(
            given=f"a folder of prepared data that is not this user's alone: {reason}",
            rule="prepared data and copies are read only from a folder that this user or root alone can have written",
            consequence="nothing was read from it or written to it",
            nearest="chmod go-w on the folder that has this mode, if it is yours; or "
            + (f"{option}=FOLDER of your own" if option else "a folder of your own"),
        )


def untrusted_status_reason(path: Path, found: os.stat_result, folder: Path) -> str:
    """As ``untrusted_reason``, of what is open or was looked at: ``found`` is its status, ``folder`` what it is in, or is.

    May create and delete a ``.probe`` file in ``folder``.
    """
    reason = ""
    if found.st_uid not in (os.geteuid(), 0):
        reason = f"{path} belongs to {_user(found.st_uid)}"
    elif not stat.S_ISLNK(found.st_mode) and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        reason = _writers_reason(path, found)
    return "" if reason and _is_given_by_file_system(folder, found) else reason


def untrusted_folder_reason(path: Path, found: os.stat_result) -> str:
    """Why others can have written into a folder of this status; with the sticky bit they can make files there.

    May create and delete a ``.probe`` file in the folder.
    """
    reason = untrusted_status_reason(path, found, path) or _writers_reason(path, found)
    return "" if reason and _is_given_by_file_system(path, found) else reason


def _writers_reason(path: Path, found: os.stat_result) -> str:
    who = _writers(found)
    return f"{path} can be written by {who} (mode {stat.S_IMODE(found.st_mode):o})" if who else ""


def _writers(found: os.stat_result) -> str:
    """Who but its owner can write to a file or folder, in words; empty for nobody."""
    if found.st_mode & stat.S_IWOTH:
        return "others"
    return _others_in_group(found.st_gid, found.st_uid, os.geteuid()) if found.st_mode & stat.S_IWGRP else ""


@cache
def _others_in_group(gid: int, owner: int, user: int) -> str:
    """The group in words, if others than its owner, this user and root may be in it; empty for a private group.

    A private group is that of root, or has its user's number or name and is that user's own group, as Linux makes one for each
    user. Members are counted as far as they are listed: directories such as LDAP do not list those whose own group it is.
    """
    import grp  # these two rarely needed
    import pwd

    try:
        group, members = grp.getgrgid(gid).gr_name, set(grp.getgrgid(gid).gr_mem)
    except KeyError:  # no name, no list of members
        group, members = str(gid), set[str]()
    members |= {each.pw_name for each in pwd.getpwall() if each.pw_gid == gid}
    is_private, trusted = gid in (0, owner, user), set[str]()
    for uid in {0, owner, user}:
        with suppress(KeyError):
            known = pwd.getpwuid(uid)
            trusted.add(known.pw_name)
            is_private |= (known.pw_gid, known.pw_name) == (gid, group)
    return "" if is_private and members <= trusted else f"the group {group}"


def _is_given_by_file_system(folder: Path, found: os.stat_result) -> bool:
    """Whether owner and permissions are those that the file system gives to what this process makes in ``folder``.

    It may have none of its own (FAT), or give the files of root to nobody (NFS). Creates and deletes a ``.probe`` file there.
    """
    probe = temporary_name(folder / ".probe")
    try:
        with open_new(probe, mode=0o600) as file:
            made = os.fstat(file.fileno())
        probe.unlink()
    except OSError:
        return False
    is_owner = found.st_uid in (made.st_uid, os.geteuid(), 0)
    return is_owner and (not _writers(found) or bool(_writers(made)))


def _user(uid: int) -> str:
    import pwd  # not everywhere, and rarely needed

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"

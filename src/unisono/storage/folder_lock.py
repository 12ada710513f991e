"""A folder that one process at a time works in."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from unisono.errors import ConfigError
from unisono.storage.files import PRIVATE_MODE
from unisono.storage.limits import MAX_LOCK_RECORD_BYTES

_HEARTBEAT_S: Final = 10.0
_WATCH_S: Final = 25.0  # two heartbeats and what a network file system keeps back
_POLL_S: Final = 0.5
_STALE_S: Final = 60.0  # a holder without a lock of the file system and without a heartbeat for so long has ended
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOG: Final = logging.getLogger("unisono")
_HELD: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


class FolderLock:
    """Exclusive use of ``path.parent``, from construction to ``close``, or to the end of this process, also by a kill.

    The lock is on the file ``path``, which names its holder. A network file system may have no locks, or only such as count on
    one host. So the holder changes the file every 10 s. Without locks its record counts for a minute. With a lock, a recent
    record of another host is watched for 25 s, and counts if it changes.

    Args:
        path: A file in the folder, made if it is missing, and then readable by its owner alone: who can read it can lock it. Its
            folder exists.
        work: What the holder does, in words: ``"is training"``.
        nearest: What to do while another process has it.
        heartbeat: Whether a thread changes the file. Without, only locks of the file system count, where there are any.

    Raises:
        ConfigError: Another process, or this one, has it; or ``path`` is a link or no regular file.
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, work: str, nearest: str, heartbeat: bool = True) -> None:
        self._stop = threading.Event()
        require_lock_file(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
        try:
            has_locks = self._try_lock()
            record = _record(self._fd)
            is_recent = bool(record) and time.time() - os.fstat(self._fd).st_mtime < _STALE_S
            is_held = has_locks is None or (is_recent and (not has_locks or _changes(path, record)))
            if is_held:
                raise ConfigError(
                    given=f"{path.parent}, in which {_holder(record)} {work}",
                    rule="one process at a time works in a folder: two would mix their events, settings and checkpoints",
                    consequence="nothing was started",
                    nearest=nearest,
                )
            mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            self._text = json.dumps(mine).encode() + b"\n"
            os.pwrite(self._fd, self._text, 0)  # at no moment is the file empty
            os.ftruncate(self._fd, len(self._text))
        except BaseException:
            os.close(self._fd)
            raise
        _HELD.add(self)
        if heartbeat or not has_locks:
            threading.Thread(target=self._beat, args=[path], name="unisono-folder-lock", daemon=True).start()

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        if self._fd >= 0:
            self._stop.set()
            with suppress(OSError):  # a full or lost disk
                os.ftruncate(self._fd, 0)
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def _forget(self) -> None:
        """In a forked process, which would otherwise keep the folder when the holder is killed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try_lock(self) -> bool | None:
        """True: locked. False: the file system has no locks. None: another one has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return True

    def _beat(self, path: Path) -> None:
        is_said = False
        while not self._stop.wait(_HEARTBEAT_S):
            with suppress(OSError):
                os.utime(self._fd)
                if not is_said and os.pread(self._fd, len(self._text), 0) != self._text:
                    is_said = True  # two that began at the same moment, on hosts whose locks count for themselves alone
                    _LOG.error("%s: %s works here too: end one of the two", path.parent, _holder(_record(self._fd)))


def is_abandoned(path: Path) -> bool:
    """Whether the holder of the lock on ``path``, which has a heartbeat, ended a minute or more ago without giving it up: by a
    kill, or with its host. A file that is missing, or cannot be read, says nothing.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(_record(fd)) and time.time() - os.fstat(fd).st_mtime >= _STALE_S
    finally:
        os.close(fd)


def require_lock_file(path: Path) -> None:
    """Raise ConfigError where something is at ``path`` that is no regular file, and so not a lock."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError(
            given=f"{path}, which is {'a link' if path.is_symlink() else 'no regular file'}",
            rule="a process that works in a folder locks this file, which it makes itself",
            consequence="nothing was started",
            nearest="remove it, then run the same command again; or another folder",
        )


def _forget_all() -> None:
    for lock in list(_HELD):
        lock._forget()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_all)


def _changes(path: Path, record: dict[str, Any]) -> bool:
    """Whether another host changes the file: its lock there does not count here."""
    if record.get("host") == socket.gethostname():
        return False
    _LOG.warning("%s: %s worked here a moment ago: looking for %g s whether it does", path, _holder(record), _WATCH_S)
    before, until = path.stat().st_mtime_ns, time.monotonic() + _WATCH_S
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _record(fd: int) -> dict[str, Any]:
    with suppress(ValueError, OSError, RecursionError):
        record: Any = json.loads(os.pread(fd, MAX_LOCK_RECORD_BYTES, 0))
        if isinstance(record, dict):
            return {str(name): value for name, value in record.items()}
    return {}


def _holder(record: dict[str, Any]) -> str:
    """The holder in words. The file may say anything: only what has the form of a record is shown."""
    pid, host, since = (str(record.get(name, "")) for name in ("pid", "host", "since"))
    if not (pid.isdigit() and re.fullmatch(r"[\w.-]{1,64}", host) and re.fullmatch(r"[\d: -]{1,20}", since)):
        return "another process"
    return f"process {pid} on {host}, since {since},"

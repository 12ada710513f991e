"""A folder that one process at a time works in."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from unisono.errors import ConfigError
from unisono.storage.files import FILE_MODE

_HEARTBEAT_S: Final = 10.0
_STALE_S: Final = 60.0  # a holder without a lock of the file system and without a heartbeat for so long has ended
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_RECORD_BYTES: Final = 4096
_HELD: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


class FolderLock:
    """Exclusive use of ``path.parent``, from construction to ``close``, or to the end of this process, also by a kill.

    The lock is on the file ``path``, which names its holder. On a file system without locks the holder changes the file every
    10 s, and its record counts for a minute.

    Args:
        path: A file in the folder, made if it is missing. Its folder exists.
        work: What the holder does, in words: ``"is training"``.
        nearest: What to do while another process has it.

    Raises:
        ConfigError: Another process, or this one, has it.
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, work: str, nearest: str) -> None:
        self._stop = threading.Event()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            has_locks = self._try_lock()
            record = _record(self._fd)
            if has_locks is None or (not has_locks and record and time.time() - os.fstat(self._fd).st_mtime < _STALE_S):
                raise ConfigError(
                    given=f"{path.parent}, in which {_holder(record)} {work}",
                    rule="one process at a time works in a folder: two would mix their events, settings and checkpoints",
                    consequence="nothing was started",
                    nearest=nearest,
                )
        except BaseException:
            os.close(self._fd)
            raise
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(mine).encode() + b"\n", 0)
        _HELD.add(self)
        if not has_locks:
            threading.Thread(target=self._beat, name="unisono-folder-lock", daemon=True).start()

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

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with suppress(OSError):
                os.utime(self._fd)


def _forget_all() -> None:
    for lock in list(_HELD):
        lock._forget()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_all)


def _record(fd: int) -> dict[str, Any]:
    with suppress(ValueError, OSError, RecursionError):
        record: Any = json.loads(os.pread(fd, _MAX_RECORD_BYTES, 0))
        if isinstance(record, dict):
            return {str(name): value for name, value in record.items()}
    return {}


def _holder(record: dict[str, Any]) -> str:
    """The holder in words. The file may say anything: only what has the form of a record is shown."""
    pid, host, since = (str(record.get(name, "")) for name in ("pid", "host", "since"))
    if not (pid.isdigit() and re.fullmatch(r"[\w.-]{1,64}", host) and re.fullmatch(r"[\d: -]{1,20}", since)):
        return "another process"
    return f"process {pid} on {host}, since {since},"

"""Files that are complete or absent, also after a crash, and that only their owner can write to."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import xxhash

# Permissions of new files and folders before the umask, which decides who reads them; only their owner writes to them.
FILE_MODE: Final = 0o644
FOLDER_MODE: Final = 0o755
PRIVATE_MODE: Final = 0o600  # of files with arguments or secrets
MAX_SHOWN_PATH: Final = 255  # characters of a path in an error that says why it cannot be looked up

_READ_BYTES = 1 << 20


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # some network file systems have no fsync of directories; they write names through anyway
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody can foresee, for a file until it is complete."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def open_new(path: Path, *, mode: int = FILE_MODE, buffering: int = -1) -> IO[Any]:
    """Open a new binary file for writing. Raises FileExistsError, also for a link; ``mode`` is before the umask."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, mode)
    return open(fd, "wb", buffering=buffering)


def open_regular(path: Path, *, flags: int = 0, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, with further ``flags`` of ``os.open``.

    Raises OSError for anything else: a pipe would wait for a writer, and a device may have no end.
    """
    refuse_nul(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        _refuse_irregular(path, os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb", buffering=buffering)


def refuse_nul(path: Path) -> None:
    """Raise OSError for a name with a NUL character, for which Python raises ValueError."""
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "a name with a NUL character", os.fspath(path))


def require_regular(path: Path) -> None:
    """Raise OSError, as ``open_regular``, where ``path`` is no regular file: for libraries that open a path themselves."""
    _refuse_irregular(path, os.stat(path).st_mode)


def _refuse_irregular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise PermissionError(errno.EPERM, "not a regular file", str(path))


def open_inside(root: str, path: Path) -> BinaryIO:
    """Open a regular file that lies in the folder ``root``, a path without links, once those of ``path`` are followed.

    What counts is where the open file lies: a folder of the path that is exchanged by a link meanwhile leads nowhere.
    Raises PermissionError for a file outside, and OSError as ``open_regular``.
    """
    file = open_regular(path)
    try:
        if not Path(_place(file, path)).is_relative_to(root):
            raise PermissionError(errno.EPERM, f"it leads out of {root}", str(path))
    except BaseException:
        file.close()
        raise
    return file


def _place(file: BinaryIO, path: Path) -> str:
    """The path without links of an open file. Without ``/proc`` that of ``path``, which has to lead to this file still."""
    try:
        return os.readlink(f"/proc/self/fd/{file.fileno()}")
    except FileNotFoundError:
        place = os.path.realpath(path)
        if not os.path.samestat(os.lstat(place), os.fstat(file.fileno())):
            raise PermissionError(errno.EPERM, "it was exchanged while it was opened", str(path)) from None
        return place


def opener(path: str, flags: int) -> int:
    """For ``open(path, "wb", opener=opener)``: a new file has the permissions that the umask leaves, and only its owner
    can write to it. Raises OSError for a link."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


@contextmanager
def new_file(path: Path, *, mode: int = FILE_MODE) -> Generator[IO[Any]]:
    """Open a binary file under a temporary name; when the block ends normally it is synced and renamed to ``path``.

    ``mode`` are the permissions of the new file, before the umask. Raises FileExistsError where ``path`` is a
    device or leads to one: ``/dev/null`` would be gone for all. Another link is replaced, and what it leads to stays.
    """
    if _is_device(path):
        raise FileExistsError(errno.EEXIST, "a device, which no file replaces", str(path))
    temporary = temporary_name(path)
    try:
        with open_new(temporary, mode=mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _is_device(path: Path) -> bool:
    """Whether ``path`` is a device, or leads to one."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing is there, or can be
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def copy_file(source: Path, target: Path) -> None:
    """Write the bytes of a regular file to ``target``, so that it holds either its old content or all of the new."""
    with open_regular(source) as file, new_file(target) as copy:
        shutil.copyfileobj(file, copy)


def write_atomically(path: Path, *parts: Any, mode: int = FILE_MODE) -> None:
    """Write the parts (bytes-like) so that ``path`` holds either its old content or all of the new."""
    with new_file(path, mode=mode) as file:
        for part in parts:
            file.write(part)


def create_file(path: Path, data: bytes) -> None:
    """Write and sync a new file; one that cannot be written whole is removed. Raises FileExistsError, also for a link."""
    file = open_new(path)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def file_lock(path: Path) -> Generator[bool]:
    """Hold an exclusive lock on ``path``; yields False if the file system has no locks. The lock ends with the process.

    The file is readable by its owner alone: who can read it can lock it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
    with open(fd, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            exclusive = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            exclusive = False
        yield exclusive


def file_digest(path: Path) -> str:
    """The xxh3-128 digest of a file's bytes, as 32 hexadecimal digits. Raises OSError for a link."""
    digest = xxhash.xxh3_128()
    with open_regular(path, flags=os.O_NOFOLLOW, buffering=0) as opened:
        file = cast(io.FileIO, opened)
        block = bytearray(_READ_BYTES)
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def is_inside(root: Path, path: Path) -> bool:
    """Whether ``path`` lies in the folder ``root``, once links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def look_up(given: str | Path) -> tuple[Path, str]:
    """The path that a user gave, with ``~`` expanded, and why the system cannot look it up, such as ``ELOOP, Too many levels …``.

    The reason is empty where it can, whether something is there or not.
    """
    path = Path(given)
    try:
        path = Path(os.path.expanduser(given))
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return path, os_reason(error)
    except ValueError:  # as Python checks names before the system does
        return path, "a name that no file can have, such as one with a NUL character"
    return path, ""


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # a disk, a quota or the limit of a file's size


def os_reason(error: OSError) -> str:
    """The system's reason without the path, such as ``ENOSPC, No space left on device``."""
    name = errno.errorcode.get(error.errno, str(error.errno)) if error.errno else type(error).__name__
    return f"{name}, {error.strerror or error}"

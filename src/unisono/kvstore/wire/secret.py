"""The job's secret: 32 bytes that are never in an argument, a variable's value or a log.

A launcher passes it by a descriptor (``UNISONO_SECRET_FD``) or a file of mode 0600 (``UNISONO_SECRET_FILE``). Without
either, a user's processes share ``~/.config/unisono/secret``, created at first use, like the cookie of Erlang's nodes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.secret import SECRET_BYTES, new_secret


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The secret from the descriptor, the file or the user's own file. A descriptor is closed: call it once.

    Raises LaunchError when both are named, when the length is wrong, or when others could have read or replaced the
    file.
    """
    fd, file = environ.get("UNISONO_SECRET_FD"), environ.get("UNISONO_SECRET_FILE")
    if fd is not None and file is not None:
        raise _refused(
            "both UNISONO_SECRET_FD and UNISONO_SECRET_FILE are set",
            "the secret comes from one place",
            "unset one of them",
        )
    if fd is not None:
        return _from_descriptor(fd)
    if file is not None:
        return _from_file(Path(file))
    return _own(Path(environ.get("HOME") or Path.home()) / ".config/unisono/secret")


def _from_descriptor(text: str) -> bytes:
    nearest = "start the process with unisono launch"
    try:
        fd = int(text)
        os.set_inheritable(fd, False)
    except (ValueError, OSError) as error:
        raise _refused(
            f"UNISONO_SECRET_FD={text} is not an open descriptor ({error})", "the launcher leaves it open", nearest
        ) from error
    try:
        secret = _read(fd)
    finally:
        os.close(fd)
    return _checked(secret, f"descriptor {fd}", nearest)


def _read(fd: int) -> bytes:
    try:
        # several processes may share the descriptor of one file, and with it the position
        return os.pread(fd, SECRET_BYTES + 1, 0)
    except OSError:
        secret = b""
        while len(secret) <= SECRET_BYTES and (more := os.read(fd, SECRET_BYTES + 1 - len(secret))):
            secret += more
        return secret


def _from_file(path: Path) -> bytes:
    nearest = f"make it with: umask 077; head -c {SECRET_BYTES} /dev/urandom > FILE"
    try:
        # not blocking: a named pipe in its place must not hold us up
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(f"{path} cannot be opened ({error.strerror})", "the secret is a plain file", nearest) from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise _refused(f"{path} is not a plain file", "the secret is a plain file", nearest)
        if facts.st_uid != os.geteuid():
            rule = f"the secret's file belongs to the user who reads it ({os.geteuid()})"
            raise _refused(f"{path} belongs to user {facts.st_uid}", rule, nearest)
        if facts.st_mode & 0o077:
            rule = "only its owner may read or write it"
            raise _refused(f"{path} has mode {stat.S_IMODE(facts.st_mode):04o}", rule, f"chmod 600 {path}")
        return _checked(_read(fd), str(path), nearest)
    finally:
        os.close(fd)


def _own(path: Path) -> bytes:
    if not os.path.lexists(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(path)
    if path.parent.stat().st_mode & 0o022:
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        rule = "only its owner may write to the folder of the secret"
        raise _refused(f"{path.parent} has mode {mode:04o}", rule, f"chmod 700 {path.parent}")
    return _from_file(path)


def _make(path: Path) -> None:
    """Create the user's secret. Two processes may do so at once: the file appears complete, and the first one stays."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, new_secret())
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        draft.unlink()


def _checked(secret: bytes, where: str, nearest: str) -> bytes:
    if len(secret) != SECRET_BYTES:
        many = f"more than {SECRET_BYTES}" if len(secret) > SECRET_BYTES else str(len(secret))
        raise _refused(f"{where} holds {many} bytes", f"the secret has {SECRET_BYTES}", nearest)
    return secret


def _refused(given: str, rule: str, nearest: str) -> LaunchError:
    consequence = "this process cannot prove that it belongs to the job and has not connected"
    return LaunchError(given=given, rule=rule, consequence=consequence, nearest=nearest)

"""The job's secret: 32 bytes by which its processes know each other; never in an argument, a variable's value or a log.

A launcher passes it by a descriptor (``UNISONO_SECRET_FD``) or a file of mode 0600 (``UNISONO_SECRET_FILE``). Without
either, a user's processes of one host share ``~/.config/unisono/secret``, created at first use.
No torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from unisono.dist.jobspec import JobSpec
from unisono.errors import LaunchError
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, open_new, temporary_name
from unisono.storage.ownership import untrusted_folder_reason, untrusted_status_reason

SECRET_BYTES = 32


def new_secret() -> bytes:
    """A new random secret."""
    return secrets.token_bytes(SECRET_BYTES)


def secret_descriptor(secret: bytes) -> int:
    """A descriptor from which another process reads ``secret``, to be inherited by it. The caller closes its own copy."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("unisono-secret", os.MFD_CLOEXEC)
        os.pwrite(fd, secret, 0)
        return fd
    reader, writer = os.pipe()
    os.write(writer, secret)  # far less than a pipe holds, so this never waits
    os.close(writer)
    return reader


def job_secret(job: JobSpec, environ: Mapping[str, str]) -> bytes | None:
    """The secret that all ranks of ``job`` share; None where there is none, and ranks trust host and network.

    A job has one if its launcher passes it or UNISONO_SECRET_FILE names it. Several ranks of one host fall back on the user's
    own file, unless the home folder cannot be written. Raises LaunchError as ``read_or_create_secret``.
    """
    if environ.get("UNISONO_SECRET_FD") is not None or environ.get("UNISONO_SECRET_FILE") is not None:
        return read_or_create_secret(environ)
    if job.world_size == 1 or not job.is_local:
        return None
    try:
        return read_or_create_secret(environ)
    except OSError:  # the same for all ranks: they are one user's, on one host
        return None


def read_or_create_secret(environ: Mapping[str, str]) -> bytes:
    """The secret from the descriptor, the file or the user's own file. A descriptor stays open, for this process only, and
    can be read again.

    Raises LaunchError when both are named, when the length is wrong, or when others could have read or replaced the
    file; OSError when the user's own file cannot be made.
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
    except (ValueError, OverflowError, OSError) as error:
        raise _refused(
            f"UNISONO_SECRET_FD={text} is not an open descriptor ({error})", "the launcher leaves it open", nearest
        ) from error
    return _checked(_read(fd), f"descriptor {fd}", nearest)


def _read(fd: int) -> bytes:
    try:
        # several processes may share the descriptor of one file, and with it the position
        return os.pread(fd, SECRET_BYTES + 1, 0)
    except OSError:
        secret = b""
        while len(secret) <= SECRET_BYTES and (more := os.read(fd, SECRET_BYTES + 1 - len(secret))):
            secret += more
        # a pipe gives it once: another one takes its place
        again = secret_descriptor(secret)
        os.dup2(again, fd, inheritable=False)
        os.close(again)
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
        if facts.st_mode & 0o077:  # read by others is as bad as written
            rule = "only its owner may read or write it"
            raise _refused(f"{path} has mode {stat.S_IMODE(facts.st_mode):04o}", rule, f"chmod 600 {path}")
        if reason := untrusted_status_reason(path, facts, path.parent):
            raise _refused(reason, "the secret's file belongs to the user who reads it", nearest)
        return _checked(_read(fd), str(path), nearest)
    finally:
        os.close(fd)


def _own(path: Path) -> bytes:
    if not os.path.lexists(path):
        make_folder(path.parent, mode=0o700)
        _make(path)
    if reason := untrusted_folder_reason(path.parent, path.parent.stat()):
        rule = "only its owner may write to the folder of the secret"
        raise _refused(reason, rule, f"chmod 700 {path.parent}, if it is yours")
    return _from_file(path)


def _make(path: Path) -> None:
    """Create the user's secret. Two processes may do so at once: the file appears complete, and the first one stays."""
    draft = temporary_name(path)
    with open_new(draft, mode=PRIVATE_MODE) as file:
        try:
            file.write(new_secret())
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()


def _checked(secret: bytes, where: str, nearest: str) -> bytes:
    if len(secret) != SECRET_BYTES:
        many = f"more than {SECRET_BYTES}" if len(secret) > SECRET_BYTES else str(len(secret))
        raise _refused(f"{where} holds {many} bytes", f"the secret has {SECRET_BYTES}", nearest)
    return secret


def _refused(given: str, rule: str, nearest: str) -> LaunchError:
    consequence = "this process cannot prove that it belongs to the job and has not connected"
    return LaunchError(given=given, rule=rule, consequence=consequence, nearest=nearest)

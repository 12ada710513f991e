"""Folder of a command of ``unisono tune``: a new one, or one in which the same command wrote before."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from unisono.errors import ConfigError
from unisono.storage.files import file_lock, write_atomically
from unisono.storage.folder_lock import require_lock_file
from unisono.storage.ownership import read_own_json


def require_own(folder: Path, record: str, leftovers: Collection[str]) -> None:
    """Raise ConfigError where ``folder`` holds files of others, which results would replace.

    Args:
        folder: Where a command writes; it may be missing.
        record: Name of the file with which the command goes on. It is written before all that has content, so a folder in which
            it is missing, or empty, has nothing of the command but what a start that was killed leaves.
        leftovers: Names of that: empty folders, and files of locks.
    """
    others = _others(folder, {record, *leftovers})
    # in this order: another process may begin at this moment, and write its record and then more
    if others and not _has_content(folder / record):
        raise _refused(
            folder, others, "results are written into a new folder, or one in which the same command goes on"
        )


def require_empty(folder: Path) -> None:
    """Raise ConfigError where ``folder`` holds files, for a command that goes on from none of them."""
    if others := _others(folder, ()):
        raise _refused(folder, others, "this command begins anew, in an empty folder")


class _HasIdentity(Protocol):
    identity: dict[str, Any]


R = TypeVar("R", bound=_HasIdentity)


def read_record(path: Path, kind: Callable[..., R], identity: Mapping[str, Any], work: str) -> R:
    """The record with which a command goes on; a new one is written where there is none.

    Args:
        path: Its file.
        kind: A msgspec struct with ``identity``; its other fields have defaults.
        identity: What makes the work this one, such as the configuration; JSON types.
        work: Its name: ``"sweep"``.

    Raises:
        ConfigError: There is the record of other work, or one that is damaged or that another user can have written.
        OSError: It cannot be written.
    """
    given: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(identity))
    if not path.exists():
        record = kind(identity=given)
        write_atomically(path, msgspec.json.encode(record) + b"\n")
        return record
    try:
        record = read_own_json(path, msgspec.json.Decoder(cast("type[R]", kind)).decode)
    except (ValueError, OSError) as error:
        raise ConfigError(
            given=f"{path}, which is no record of a {work}: {error}",
            rule=f"a {work} goes on from its record",
            consequence="nothing was started, and the file is as it was",
            nearest=f"another folder (--out) begins a new {work}",
        ) from error
    known = record.identity
    differing = [name for name in {**known, **given} if known.get(name) != given.get(name)]
    if differing:
        name = differing[0]
        raise ConfigError(
            given=f"{name} {given.get(name)} for the {work} in {path.parent}, which began with {known.get(name)}",
            rule=f"the trainings of a {work} are of one configuration",
            consequence="nothing was started",
            nearest=f"the same command as before goes on; another folder (--out) begins a new {work}",
        )
    return record


@contextmanager
def exclusive_lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file of a folder in which several processes work. It ends with the process.

    Raises:
        ConfigError: The file system has no locks, or the file is a link or no regular file.
        OSError: The file cannot be opened for writing.
    """
    require_lock_file(path)
    with file_lock(path) as is_locked:
        if not is_locked:
            raise ConfigError(
                given=f"{path.parent}, whose file system has no locks",
                rule="several processes may work in the folder of a search, one at a time writes, and a lock says which one",
                consequence="nothing was started",
                nearest="a folder of another file system, such as a local disk (--out)",
            )
        yield


def _others(folder: Path, known: Collection[str]) -> list[str]:
    try:
        names: Iterable[str] = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [name for name in names if not _is_leftover(folder / name, known)]


def _is_leftover(path: Path, known: Collection[str]) -> bool:
    name = path.name.partition(".tmp-")[0]  # a temporary name of a file that was being written
    return name in known and not (path.is_dir() and any(path.iterdir()))


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _refused(folder: Path, others: list[str], rule: str) -> ConfigError:
    return ConfigError(
        given=f"--out {folder}, which holds other files, such as {others[0]}",
        rule=rule,
        consequence="nothing was started, and the files are as they were",
        nearest="another folder",
    )

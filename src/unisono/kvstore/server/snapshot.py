"""A server's snapshots on disk: one folder each, written atomically; the newest two are kept.

    snapshot-00000007/state.safetensors    tensors, see ``chunk_state``
    snapshot-00000007/state.json           facts, and the digest of both
    quarantine/snapshot-00000006/          found damaged, with reason.txt

A folder is written under a temporary name, synced, and renamed. A damaged snapshot is quarantined with the reason,
which is reported, and the previous one is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unisono.errors import CommError
from unisono.storage.directory import (
    QUARANTINE,
    commit_directory,
    make_folder,
    numbered_directories,
    numbered_name,
    quarantine_directory,
    remove_directory,
)
from unisono.storage.files import file_digest
from unisono.storage.limits import decode_json, read_json
from unisono.storage.ownership import untrusted_folder_reason

KEEP = 2
_FACTS, _TENSORS = "state.json", "state.safetensors"
_PREFIX = "snapshot"
_LEFTOVER = re.compile(r"snapshot-\d{8,18}\.(tmp|trash.*)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSnapshot:
    """A loaded snapshot. ``set_aside``: the reasons for which newer ones were quarantined."""

    number: int
    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    set_aside: list[str]


def write_snapshot(folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], *, after: int) -> int:
    """Write a snapshot, in a folder of its user only, and delete all but the newest two; returns its number.

    ``after``: the newest snapshot that this server knows, 0 for none. Raises CommError where there is a newer one:
    another server has taken this one's place, and this one's state is out of date; and where other users can write to the
    folder. OSError where the disk fails.
    """
    make_folder(folder, mode=0o700)
    _refuse_shared(folder)
    if (newer := latest_snapshot_number(folder)) > after:
        raise newer_snapshot_error(folder, newer, after)
    for entry in folder.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry)
    final = folder / numbered_name(_PREFIX, after + 1)
    temporary = final.with_suffix(".tmp")
    temporary.mkdir(mode=0o700)
    save_file(dict(tensors), temporary / _TENSORS)
    with (temporary / _TENSORS).open("rb") as file:
        os.fsync(file.fileno())
    body = json.dumps({"facts": facts, "tensors": file_digest(temporary / _TENSORS)})
    sealed = {"body": body, "digest": xxhash.xxh3_128_hexdigest(body.encode())}
    commit_directory(temporary, final, manifest=(_FACTS, json.dumps(sealed).encode()))
    for old in list(_committed(folder).values())[:-KEEP]:
        remove_directory(old)
    return after + 1


def read_newest_snapshot(folder: Path) -> ServerSnapshot | None:
    """The newest intact snapshot; None where there never was one.

    Raises CommError where all snapshots are damaged: starting without state would lose the run. Also where another user can
    have written one.
    """
    _refuse_shared(folder)
    set_aside: list[str] = []
    for number, path in reversed(_committed(folder).items()):
        try:
            facts, tensors = _read(path)
        except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            reason = f"{path.name}: {error}"
            quarantine_directory(path, reason)
            set_aside.append(reason)
        else:
            return ServerSnapshot(number=number, facts=facts, tensors=tensors, set_aside=set_aside)
    if not set_aside:
        return None
    raise CommError(
        given=f"none of the {len(set_aside)} snapshots in {folder} holds: {'; '.join(set_aside)}",
        rule="a server that starts again takes its newest snapshot whose files are as they were written",
        consequence="it has not started, and nothing was begun over the old run",
        nearest=f"look into {folder / QUARANTINE}; to continue from a checkpoint, choose an empty folder",
    )


def latest_snapshot_number(folder: Path) -> int:
    """The number of the newest committed snapshot; 0 for none."""
    return max(_committed(folder), default=0)


def newer_snapshot_error(folder: Path, newer: int, known: int) -> CommError:
    return CommError(
        given=f"snapshot {newer} in {folder}, which this server has not written (its last one is {known})",
        rule="one server at a time writes there: another one has taken this one's place",
        consequence="this server saves nothing more",
        nearest="end this old server process",
    )


def _refuse_shared(folder: Path) -> None:
    if folder.exists() and (reason := untrusted_folder_reason(folder, folder.stat())):
        raise CommError(
            given=f"a folder of snapshots that is not this user's alone: {reason}",
            rule="a server's state is read from a folder that this user or root alone can have written",
            consequence="no snapshot was read or written",
            nearest="another run.dir, or chmod go-w on this folder if it is yours and nobody else has written to it",
        )


def _committed(folder: Path) -> dict[int, Path]:
    """The committed snapshots by ascending number. Links and other names in the folder are ignored."""
    return numbered_directories(folder.resolve(), _PREFIX)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    sealed = read_json(path / _FACTS)
    if xxhash.xxh3_128_hexdigest(sealed["body"].encode()) != sealed["digest"]:
        raise ValueError(f"{_FACTS} has another digest than when it was written")
    body = decode_json(sealed["body"].encode())
    if file_digest(path / _TENSORS) != body["tensors"]:
        raise ValueError(f"{_TENSORS} has another digest than when it was written")
    return body["facts"], load_file(path / _TENSORS)

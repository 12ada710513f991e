"""The folder of runs: room, speed, renames and locks. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from unisono.dist.interpreter import code_command
from unisono.doctor.check import Check, judged
from unisono.measure.storage import timed_write
from unisono.storage.files import file_lock, os_reason
from unisono.units import GIB

_PROBE_BYTES: Final = 16 << 20
# what a second process does with a file that this one has locked
_SECOND_PROCESS = """
import fcntl, sys
with open(sys.argv[1], "rb+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("kept out")
"""


def check_storage(folder: Path) -> Iterator[Check]:
    """DISK01 to DISK03, of the nearest folder that exists."""
    folder = nearest_folder(folder)
    yield _room(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".unisono-doctor-", dir=folder) as probe:
            yield _speed(folder, Path(probe))
            yield _locks(folder, Path(probe))
    except OSError as error:
        cure = "a folder that this user may write to, with run.dir"
        yield judged("DISK02", "writing", f"{folder}: {os_reason(error)}", failure=cure)


def nearest_folder(folder: Path) -> Path:
    """``folder``, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _room(folder: Path) -> Check:
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    evidence = f"{folder.resolve()} has {usage.free / GIB:.3g} of {usage.total / GIB:.3g} GiB free"
    cure = "remove old runs, or another run.dir"
    if files.f_files and files.f_favail < 1000:
        evidence += f", and room for {files.f_favail} more files"
    is_full = usage.free < GIB // 4 or (files.f_files > 0 and files.f_favail < 1000)
    is_short = usage.free < usage.total * 0.05 and usage.free < 20 * GIB
    return judged("DISK01", "room", evidence, failure=cure if is_full else "", warning=cure if is_short else "")


def _speed(folder: Path, probe: Path) -> Check:
    path = probe / "data"
    took_s = timed_write(path, _PROBE_BYTES)
    os.replace(path, probe / "renamed")
    rate = _PROBE_BYTES / took_s / 2**20
    cure = "checkpoints are written here: a faster disk for run.dir, and checkpoint.upload_to for the slow one"
    evidence = f"{rate:,.0f} MiB/s written through to the disk of {folder.resolve()}"
    return judged("DISK02", "writing", evidence, warning=cure if rate < 50 else "")


def _locks(folder: Path, probe: Path) -> Check:
    """Whether a lock that this process holds keeps another process out, as it must between runs."""
    title, path = "locks", probe / "lock"
    with file_lock(path) as held:
        done = subprocess.run([*code_command(_SECOND_PROCESS), str(path)], capture_output=True, text=True, check=False)
    kept_out = held and done.stdout.strip() == "kept out"
    cure = "two runs could write into one folder: mount it with locks (NFS: local_lock=none, and lockd running)"
    evidence = f"a second process {'is' if kept_out else 'is not'} kept out of a locked file in {folder.resolve()}"
    return judged("DISK03", title, evidence, failure="" if kept_out else cure)

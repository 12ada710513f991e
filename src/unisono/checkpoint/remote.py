"""Copies of a run's checkpoints at an address of fsspec: ``s3://``, ``gs://``, ``hdfs://``, ``file://`` and others.

    ADDRESS/step-00000120/shard-….safetensors, manifest.json    uploaded first
    ADDRESS/step-00000120/COMMIT                                uploaded last: without it the copy does not exist

A checkpoint is committed in the run's folder first. A thread of rank 0 then uploads it, so that training waits for no network. An
upload that fails is reported and tried again with the next checkpoint and at the end of the run. Retention is that of the run's
folder. A run that resumes downloads the newest copy if its folder has no newer checkpoint.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from unisono.checkpoint.folder import expired_checkpoints, list_checkpoints, open_root, remove, step_name, step_of
from unisono.checkpoint.integrity import verify
from unisono.checkpoint.manifest import COMMIT, MANIFEST, decode, encode_commit_marker
from unisono.checkpoint.options import CheckpointOptions
from unisono.errors import CheckpointError, UnisonoError
from unisono.sanitize import without_credentials_of
from unisono.storage.address import failure_text, is_within, local_path, open_address, public_cause
from unisono.storage.directory import commit_directory, quarantine_directory
from unisono.storage.files import FOLDER_MODE, create_file, open_new, open_regular
from unisono.storage.limits import MAX_JSON_BYTES, read_limited

_FINAL_ATTEMPTS: Final = 3  # of each checkpoint at the end of a run
_PAUSE_S: Final = 1.0  # before the second of them, doubled before each further one

Report = tuple[str, dict[str, Any]]  # an event: its kind and fields


class RemoteCheckpoints:
    """The copies at ``address``.

    Raises:
        CheckpointError: No filesystem of fsspec has such addresses.
        ExtraError: fsspec, or the package of the filesystem, is not installed.
    """

    def __init__(self, address: str) -> None:
        self._given, self.address = address, address.rstrip("/")
        self._scores: dict[int, float | None] = {}
        try:
            self._files, path = open_address(address, f"checkpoint.upload_to {address!r}")
        except UnisonoError:
            raise
        except Exception as error:  # some filesystems connect here, and raise errors of their own
            raise CheckpointError(
                given=f"checkpoint.upload_to {address!r}: {without_credentials_of(address, str(error))}",
                rule="an address begins with the name of a filesystem that fsspec has, and that can be reached",
                consequence="nothing was started",
                nearest="an address such as s3://bucket/folder",
            ) from public_cause(error, address)
        self._local = local_path(self._files, path)
        self._path: str = path.rstrip("/")

    def refuse_folder(self, folder: Path) -> None:
        """Raise CheckpointError if the address is ``folder``, lies in it or above it: an upload begins by removing a marker."""
        local = self._local
        if local is None:
            where = "the run's folder" if self._shows(folder) else ""
        elif is_within(local, folder):
            where = "the run's folder" if is_within(folder, local) else "a folder in the run's folder"
        else:
            where = "a folder above the run's folder" if is_within(folder, local) else ""
        if where:
            raise CheckpointError(
                given=f"checkpoint.upload_to {self._given!r}, which is {where}, {folder}",
                rule="copies of checkpoints lie apart from the run that they are copies of",
                consequence="an upload would replace the checkpoints that it copies, so nothing was started",
                nearest="an address on another disk or machine, or checkpoint.upload_to='' for no copies",
            )

    def _shows(self, folder: Path) -> bool:
        """Whether a file made in ``folder`` is at the address too: a server or mount may lead back to the folder."""
        probe = folder / f".probe-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):  # no folder yet
            create_file(probe, b"")
            try:
                with suppress(Exception):  # an address that cannot be reached now is reported where it is used
                    return self._files.exists(f"{self._path}/{probe.name}")
            finally:
                probe.unlink()
        return False

    def complete_steps(self) -> list[int]:
        """The steps whose copy has its marker, in order."""
        return sorted(step for step, complete in self._steps().items() if complete)

    def upload(self, path: Path) -> None:
        """Copy the committed checkpoint ``path``, the marker last.

        Only the files of its manifest, and none through a link: another user may own the folder of the run. Raises OSError for a
        link, ValueError if the marker is not of the manifest, and whatever the filesystem raises.
        """
        target = f"{self._path}/{path.name}"
        manifest, marker = (
            read_limited(path / name, MAX_JSON_BYTES, flags=os.O_NOFOLLOW) for name in (MANIFEST, COMMIT)
        )
        if marker != encode_commit_marker(manifest, step_of(path.name) or 0):
            raise ValueError(f"{path / COMMIT} is not of this {MANIFEST}")
        self._remove_marker(target)
        self._files.makedirs(target, exist_ok=True)
        for name in sorted(decode(manifest).files):
            with open_regular(path / name, flags=os.O_NOFOLLOW) as file:  # the path may lead elsewhere a moment later
                self._files.put_file(f"/dev/fd/{file.fileno()}", f"{target}/{name}")
        self._files.pipe_file(f"{target}/{MANIFEST}", manifest)
        self._files.pipe_file(f"{target}/{COMMIT}", marker)

    def download(self, step: int, root: Path) -> Path:
        """Copy a checkpoint to ``root`` and commit it there; returns its folder.

        Raises ValueError if it is damaged, also where a listed file is missing, and whatever else the filesystem raises.
        """
        source, final = f"{self._path}/{step_name(step)}", root / step_name(step)
        with _missing_is_damage():
            data = self._read(f"{source}/{MANIFEST}")
            marker = self._read(f"{source}/{COMMIT}")
        if marker != encode_commit_marker(data, step):
            raise ValueError(f"{COMMIT} is not of this {MANIFEST}")
        temporary = final.with_name(f"{final.name}.tmp-0")
        with suppress(FileNotFoundError):
            shutil.rmtree(temporary)
        if final.exists():
            remove(final)  # never committed: a process died while it wrote it
        temporary.mkdir(mode=FOLDER_MODE)
        try:
            for name, entry in decode(data).files.items():
                with _missing_is_damage(), open_new(temporary / name) as file:  # with our permissions, and no link
                    if self._files.size(f"{source}/{name}") not in (entry.bytes, None):
                        raise ValueError(f"{name} has another size than {MANIFEST} says")
                    self._files.get_file(f"{source}/{name}", f"/dev/fd/{file.fileno()}")
                    os.fsync(file.fileno())
            commit_directory(temporary, final, manifest=(MANIFEST, data), marker=(COMMIT, marker))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def prune(self, options: CheckpointOptions) -> None:
        """Delete expired copies, and older ones that were never complete. Raises whatever the filesystem raises."""
        steps = self._steps()
        complete = [step for step, has_marker in steps.items() if has_marker]
        scores = {step: self._score(step) for step in complete}
        newest = max(complete, default=-1)
        for step in [*expired_checkpoints(scores, options), *(s for s in steps if s not in scores and s < newest)]:
            target = f"{self._path}/{step_name(step)}"
            self._remove_marker(target)
            self._files.rm(target, recursive=True)

    def withdraw_after(self, step: int) -> None:
        """Remove the markers of copies newer than ``step``: the run resumed there and makes these steps again."""
        for newer in self.complete_steps():
            if newer > step:
                self._remove_marker(f"{self._path}/{step_name(newer)}")

    def _steps(self) -> dict[int, bool]:
        """Whether the copy of each step has its marker."""
        self._files.invalidate_cache()
        try:
            names: list[str] = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return {}
        folders = {step: name for name in names if (step := step_of(name.rstrip("/").rsplit("/", 1)[-1])) is not None}
        return {step: self._files.exists(f"{name}/{COMMIT}") for step, name in sorted(folders.items())}

    def _read(self, path: str) -> bytes:
        """A manifest or marker. Raises ValueError for one larger than any."""
        data: bytes = self._files.cat_file(path, start=0, end=MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"{path.rpartition('/')[2]} has more than {MAX_JSON_BYTES:,} bytes")
        return data

    def _remove_marker(self, target: str) -> None:
        if self._files.exists(f"{target}/{COMMIT}"):
            self._files.rm_file(f"{target}/{COMMIT}")

    def _score(self, step: int) -> float | None:
        if step not in self._scores:
            try:
                self._scores[step] = decode(self._read(f"{self._path}/{step_name(step)}/{MANIFEST}")).score
            except (ValueError, CheckpointError, FileNotFoundError):
                self._scores[step] = None
        return self._scores[step]


@contextmanager
def _missing_is_damage() -> Generator[None]:
    """Raise ValueError where the copy that has its marker lacks a file."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"a file of the copy is missing: {error}") from error


class Uploader:
    """A thread that uploads the committed checkpoints of ``root``. ``reports`` has what happened, for the event log."""

    def __init__(self, root: Path, remote: RemoteCheckpoints, options: CheckpointOptions) -> None:
        self._root, self._remote, self._options = root, remote, options
        self._jobs: queue.SimpleQueue[int | threading.Event | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._missing: dict[int, str] = {}  # why each checkpoint is not at the address yet
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def submit(self, step: int) -> None:
        """Upload the checkpoint of ``step`` in the background."""
        self._jobs.put(step)

    def reports(self) -> list[Report]:
        """The events since the last call."""
        found: list[Report] = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def flush(self) -> None:
        """Return when everything is uploaded, or has failed for the last time."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()

    def close(self) -> None:
        """``flush``, then end the thread. May be called twice."""
        if self._thread.is_alive():
            self.flush()
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                for attempt in range(_FINAL_ATTEMPTS if self._missing else 0):
                    if attempt:
                        time.sleep(_PAUSE_S * 2 ** (attempt - 1))
                    self._upload_missing(report=attempt == _FINAL_ATTEMPTS - 1)
                    if not self._missing:
                        break
                job.set()
            else:
                self._missing[job] = "not tried yet"
                self._upload_missing(report=True)

    def _upload_missing(self, *, report: bool) -> None:
        """Upload what is not at the address, the newest first; retention may have deleted the others meanwhile."""
        for step in sorted(self._missing, reverse=True):
            path, began_s = self._root / step_name(step), time.monotonic()
            try:
                self._remote.upload(path)
            except Exception as error:  # filesystems raise errors of their own
                if not path.exists():
                    del self._missing[step]
                    continue
                self._missing[step] = failure_text(error, self._remote.address)
                if report:
                    self._report_failure(step)
                continue
            del self._missing[step]
            fields = {
                "step": step,
                "path": f"{self._remote.address}/{path.name}",
                "upload_s": time.monotonic() - began_s,
            }
            try:
                self._remote.prune(self._options)
            except Exception as error:
                fields["retention_problem"] = failure_text(error, self._remote.address)
            self._reports.put(("checkpoint_uploaded", fields))

    def _report_failure(self, step: int) -> None:
        try:
            steps = self._remote.complete_steps()
            newest = (
                f"its newest complete checkpoint is that of step {steps[-1]}" if steps else "it has no checkpoint yet"
            )
        except Exception:
            newest = "it cannot be listed either"
        error = f"{self._missing[step]}; {self._remote.address}: {newest}"
        self._reports.put(("checkpoint_upload_failed", {"step": step, "error": error}))


def fetch_newest(root: Path, remote: RemoteCheckpoints, emit: Callable[..., None], *, allowed: bool = True) -> None:
    """Download the newest complete copy, if ``root`` has no checkpoint as new.

    A damaged copy is reported, and the one before it taken.

    Raises:
        CheckpointError: The address cannot be read, so that it is not known what it has; or it has a checkpoint, and that is not
            ``allowed``.
    """
    open_root(root)
    try:
        steps = remote.complete_steps()
        if steps and not allowed:
            raise CheckpointError(
                given=f"resume 'never' with checkpoint.upload_to {remote.address}, which has checkpoints up to step {steps[-1]}",
                rule="a committed checkpoint is never overwritten",
                consequence="nothing was started",
                nearest="another checkpoint.upload_to for a new run, or run.resume='auto' to continue this one",
            )
        for step in reversed(steps):
            if any(entry.state == "committed" and entry.step >= step for entry in list_checkpoints(root)):
                return
            began_s = time.monotonic()
            try:
                path = remote.download(step, root)
                reason = "; ".join(problem.given for problem in verify(path))
            except ValueError as error:
                path, reason = None, str(error)
            if not reason:
                emit("checkpoint_downloaded", step=step, path=str(path), download_s=time.monotonic() - began_s)
                return
            moved = f"{remote.address}/{step_name(step)}" if path is None else str(quarantine_directory(path, reason))
            emit("checkpoint_quarantined", step=step, path=moved, reason=reason)
    except UnisonoError:
        raise
    except Exception as error:  # filesystems raise errors of their own
        raise CheckpointError(
            given=f"checkpoint.upload_to {remote.address}: {failure_text(error, remote.address)}",
            rule="a run resumes from the newest checkpoint, in its folder or at this address",
            consequence="nothing was loaded, and no new run was begun",
            nearest="the address, its credentials in the environment and the network; without checkpoint.upload_to the run "
            "continues from its folder",
        ) from public_cause(error, remote.address)

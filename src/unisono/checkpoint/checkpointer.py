"""``Checkpointer``: saves checkpoints in the background of training, one at a time.

``save`` takes a snapshot and returns; a thread of low priority does the rest. A caller that has to wait for it takes
the work over at its own priority. A failure on any rank fails the save on all ranks: an event reports it, earlier
checkpoints are untouched and training continues, until ``max_failures`` saves in a row have failed. ``writer`` has
the steps of a save, ``reader`` loads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.commit import problems_of
from unisono.checkpoint.folder import step_name
from unisono.checkpoint.host_snapshot import HostBuffer, HostSnapshot
from unisono.checkpoint.manifest import json_meta
from unisono.checkpoint.options import CheckpointOptions
from unisono.checkpoint.remote import RemoteCheckpoints, Uploader, fetch_newest
from unisono.checkpoint.safetensors_format import dtype_code
from unisono.checkpoint.shard_assignment import ShardFileLayout, lay_out_shard
from unisono.checkpoint.writer import Save, SaveWriter
from unisono.dist import World
from unisono.dist.progress import note_progress
from unisono.errors import CheckpointError, Problem, UnisonoError
from unisono.parallel.sharding import TensorShard

# Background work uses idle time, and one or two percent of a busy core (see sched(7)).
_NICE = 19


class Checkpointer:
    """Writes the checkpoints of a run under ``root``. All ranks call each method in the same order, except ``poll``.

    Args:
        root: Folder of the run's checkpoints, on a file system that all ranks share; created if it is missing.
        world: The ranks that save together.
        options: Retention, background writing and the number of failures that stop the run. ``every_steps`` is the caller's.
        attempt: Number of this process among those that have worked on the run; leftovers of earlier ones are deleted.
        emit: Called as ``emit(kind, **fields)`` to record an event.
        fault: Called at the named points of a save, where tests kill the process; default no call.
        worker: Number of this process among workers that save to one root, each in a world of its own; they call
            ``remove_leftovers`` themselves. Default: the ranks of ``world`` alone save there.

    Attributes:
        root: As given.
        committed_step: The newest step that this object has committed, or None.

    Raises:
        CheckpointError: ``root`` or ``upload_to`` cannot be used.
    """

    def __init__(
        self,
        root: Path,
        *,
        world: World,
        options: CheckpointOptions,
        attempt: int,
        emit: Callable[..., None],
        fault: Callable[[str], None] | None = None,
        worker: int | None = None,
    ) -> None:
        self.root = root
        self.committed_step: int | None = None
        self._options = options
        self._emit = emit
        self._rank, self._world_size = world.rank, world.world_size
        self._buffer = HostBuffer()
        self._layout: tuple[Any, ShardFileLayout] | None = None
        self._failed: list[list[Problem]] = []
        self._running: _UnfinishedSave | None = None
        self._remote = RemoteCheckpoints(options.upload_to) if options.upload_to else None
        if self._remote is not None:
            self._remote.refuse_folder(root)
        self._world = world.with_own_group("checkpoint")
        self._writer = SaveWriter(
            root, world=self._world, options=options, attempt=attempt, fault=fault or _no_fault, worker=worker
        )
        try:
            self._writer.start_up()
        except BaseException:
            self._world.close()
            raise
        self._uploader = Uploader(root, self._remote, options) if self._remote is not None and self._rank == 0 else None
        self._thread = (
            ThreadPoolExecutor(1, "checkpoint", initializer=_lower_priority) if options.asynchronous else None
        )

    def remove_leftovers(self) -> None:
        """Delete what unfinished saves have left in ``root``. Call it only while no worker saves there. Raises
        CheckpointError on all ranks if that fails."""
        self._writer.remove_leftovers()

    def save(
        self,
        step: int,
        replicated: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        sharded: Mapping[str, tuple[Tensor, TensorShard]] | None = None,
        score: float | None = None,
    ) -> float:
        """Begin to save ``step``; returns the seconds the caller was blocked. Waits for an unfinished save first.

        All tensors may change after the return.

        Args:
            step: The number of steps made.
            replicated: Tensors by name that are equal on all ranks; each rank writes a share of them.
            own: Tensors of this rank only, under names no other rank uses.
            meta: JSON types, and NaN and infinities; rank 0's is saved.
            sharded: This rank's parts of tensors that are split over ranks. Every rank passes every name, also for an
                empty part or a replica. Parts that do not cover each global tensor exactly once fail the save on all ranks.
            score: Lower is better, for ``keep_best``; None: not compared.

        Raises:
            CheckpointError: Tensors cannot be saved, or ``max_failures`` saves in a row have failed.
        """
        called_s = time.monotonic()
        self.wait()
        began_s = time.monotonic()
        sharded = sharded or {}
        layout = self._file_layout(replicated, own, sharded)
        parts = {name: tensor for name, (tensor, _) in sharded.items()}
        save = Save(
            step=step,
            layout=layout,
            snapshot=HostSnapshot(layout, {**replicated, **own, **parts}, self._buffer),
            meta=_as_json(meta),
            score=score if score is not None and math.isfinite(score) else None,
            began_s=began_s,
        )
        self._running = _UnfinishedSave(save, self._writer)
        if self._thread is not None:
            self._running.start(self._thread)
        save.stall_s = time.monotonic() - began_s
        if self._thread is None:
            self.wait()
        return time.monotonic() - called_s

    def poll(self) -> None:
        """Emit the event of a save that has ended. With a single process, raises as ``wait`` does.

        Ranks see the end of a save at different steps. One that raised here would leave the others inside a
        collective, so with several ranks all raise in their next ``save`` or ``wait``.
        """
        self._report_uploads()
        if self._running is not None and self._running.save.ended:
            self._settle()
            if self._world_size == 1:
                self._raise_after_max_failures()

    def wait(self) -> None:
        """Wait for an unfinished save. Raises CheckpointError if ``max_failures`` in a row have failed."""
        self._finish()
        self._raise_after_max_failures()

    def wait_committed(self, step: int, *, resumed_step: int | None) -> None:
        """Wait for an unfinished save and for uploads, then check that ``step`` is committed, or is the ``resumed_step``.

        Raises:
            CheckpointError: It could not be written, and why. As ``wait``.
        """
        self.wait()
        self.finish_uploads()
        if step not in (self.committed_step, resumed_step):
            committed = self.committed_step
            newest = "that of an earlier run, if any" if committed is None else f"that of step {committed}"
            raise CheckpointError(
                Problem(
                    given=f"the checkpoint of the last step, {step}, could not be written to {self.root}",
                    rule="a run ends with its last state committed",
                    consequence=f"the newest committed state is {newest}",
                    nearest="repair what is named below, and start again: the steps since then are repeated",
                ),
                *(self._failed[-1] if self._failed else ()),
            )

    def finish_uploads(self) -> None:
        """Return when committed checkpoints are at ``upload_to``, or have failed for the last time, which an event reports."""
        if self._uploader is not None:
            self._uploader.flush()
        self._report_uploads()

    def fetch_newest(self, *, allowed: bool = True) -> None:
        """Download the newest checkpoint from ``upload_to``, if ``root`` has none as new.

        Raises CheckpointError on all ranks: the address cannot be read, or it has one and that is not ``allowed``.
        """
        if self._remote is None:
            return
        problems: list[dict[str, str]] = []
        if self._rank == 0:
            try:
                fetch_newest(self.root, self._remote, self._emit, allowed=allowed)
            except UnisonoError as error:
                problems = [asdict(problem) for problem in error.problems]
        if problems := self._world.broadcast_json(problems):
            raise CheckpointError(*(Problem(**parts) for parts in problems))

    def withdraw_after(self, step: int) -> None:
        """Have no copy newer than ``step`` at ``upload_to``: these steps are made again."""
        if self._remote is not None and self._rank == 0:
            self._remote.withdraw_after(step)

    def close(self) -> None:
        """Finish and report an unfinished save and upload, and leave the group. May be called twice."""
        self._finish()
        if self._uploader is not None:
            self._uploader.close()
        self._report_uploads()
        if self._thread is not None:
            self._thread.shutdown()
        self._world.close()

    def _finish(self) -> None:
        if self._running is not None:
            began_s = time.monotonic()
            self._running.finish()
            self._running.save.stall_s += time.monotonic() - began_s
            self._settle()

    def _report_uploads(self) -> None:
        for kind, fields in [] if self._uploader is None else self._uploader.reports():
            self._emit(kind, **fields)

    def _settle(self) -> None:
        if self._running is None:
            return
        save, self._running = self._running.save, None
        if save.problems:
            self._failed.append(save.problems)
            self._emit(
                "checkpoint_failed",
                step=save.step,
                error=str(CheckpointError(*save.problems)),
                failures=len(self._failed),
                max_failures=self._options.max_failures,
            )
            return
        self._failed = []
        self.committed_step = save.step
        if self._uploader is not None:
            self._uploader.submit(save.step)
        fields: dict[str, Any] = {"score": save.score} if save.score is not None else {}
        if save.retention_problem:
            fields["retention_problem"] = save.retention_problem
        self._emit(
            "checkpoint_saved",
            step=save.step,
            path=str(self.root / step_name(save.step)),
            bytes=save.num_bytes,
            stall_s=save.stall_s,
            save_s=save.took_s,
            **fields,
        )

    def _raise_after_max_failures(self) -> None:
        if len(self._failed) < self._options.max_failures:
            return
        newest = f"step {self.committed_step}" if self.committed_step is not None else "that of an earlier run"
        raise CheckpointError(
            Problem(
                given=f"{len(self._failed)} checkpoints in a row could not be written",
                rule=f"checkpoint.max_failures = {self._options.max_failures}",
                consequence=f"the run stops; its newest checkpoint is {newest}",
                nearest="repair the cause of the last failure, then start the run again",
            ),
            *self._failed[-1],
        )

    def _file_layout(
        self,
        replicated: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        sharded: Mapping[str, tuple[Tensor, TensorShard]],
    ) -> ShardFileLayout:
        """The layout of this rank's file; recomputed only if a name, shape, dtype or offset has changed since the last save."""
        tensors = [*replicated.items(), *own.items(), *((name, tensor) for name, (tensor, _) in sharded.items())]
        described = (
            len(replicated),
            [(name, tensor.shape, tensor.dtype, tensor.layout) for name, tensor in tensors],
            [shard for _, shard in sharded.values()],
        )
        if self._layout is None or self._layout[0] != described:
            _check(tensors)
            replicated_table, own_table = (
                {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in group.items()}
                for group in (replicated, own)
            )
            layout = lay_out_shard(replicated_table, own_table, sharded, rank=self._rank, world_size=self._world_size)
            self._layout = described, layout
        return self._layout[1]


class _UnfinishedSave:
    """An unfinished save: begun by the background thread, finished by it or by a caller that has to wait."""

    def __init__(self, save: Save, writer: SaveWriter) -> None:
        self.save = save
        self._writer = writer
        self._steps: Iterator[None] = writer.steps(save)
        self._future: Future[None] | None = None
        self._handed_over = False

    def start(self, thread: ThreadPoolExecutor) -> None:
        self._future = thread.submit(self._advance, lambda: self._handed_over)

    def finish(self) -> None:
        """Take the work over on the calling thread and finish it."""
        self._handed_over = True
        if self._future is not None:
            self._future.result()
        self._advance(lambda: False)

    def _advance(self, is_over: Callable[[], bool]) -> None:
        if self.save.ended:
            return
        try:
            for _ in self._steps:
                note_progress()
                if is_over():
                    return
        except BaseException as error:
            # nothing catches an exception of the background thread; poll reports it
            self.save.problems = problems_of(error, f"saving step {self.save.step} to {self._writer.root}")
            self._writer.discard(self.save)
            if not isinstance(error, Exception):
                self.save.ended = True
                raise
        self.save.ended = True


def _check(tensors: Sequence[tuple[str, Tensor]]) -> None:
    problems = [
        Problem(
            given=f"tensor {name!r} is passed {'twice' if count == 2 else f'{count} times'}",
            rule="a name is either replicated, a rank's own or a part",
            consequence="nothing was saved",
            nearest="rename one of them",
        )
        for name, count in Counter(name for name, _ in tensors).items()
        if count > 1
    ]
    for name, tensor in tensors:
        if dtype_code(tensor.dtype) is None or tensor.layout != torch.strided or name in ("", "__metadata__"):
            problems.append(
                Problem(
                    given=f"tensor {name!r} is {tensor.dtype}, {tensor.layout}",
                    rule="checkpoints hold dense tensors of the dtypes safetensors has, under names of their own",
                    consequence="nothing was saved",
                    nearest="convert it before saving",
                )
            )
    if problems:
        raise CheckpointError(*problems)


def _as_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``meta`` as it is written. Raises CheckpointError if it is not JSON."""
    try:
        return json.loads(json.dumps(json_meta(meta), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            given=f"meta is no JSON: {error}",
            rule="meta holds strings, numbers, booleans, None, lists and string-keyed dicts",
            consequence="nothing was saved",
            nearest="convert such values to strings, or pass them as tensors",
        ) from error


def _lower_priority() -> None:
    """Lower the priority of the calling thread only, which Linux supports."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _no_fault(point: str) -> None:
    """The default fault hook."""

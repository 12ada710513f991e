"""The work of one save on every rank, from the temporary directory to the commit and the deletion of old checkpoints.

The work is an iterator of small steps, so it can move from a background thread to a thread that waits for it. The
ranks agree three times (ready, written, committed) over their own process group: a failure on one rank fails the save
on all.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from unisono.checkpoint.commit import (
    commit_checkpoint,
    create_temporary_directory,
    describe_pieces,
    problems_of,
    reason_of,
    shard_entries,
    tensor_table,
)
from unisono.checkpoint.direct_io import write_blocks
from unisono.checkpoint.folder import (
    expired_checkpoints,
    is_committed,
    list_checkpoints,
    open_root,
    remove,
    remove_leftovers,
    step_name,
)
from unisono.checkpoint.host_snapshot import HostSnapshot
from unisono.checkpoint.manifest import Manifest, shard_name, versions
from unisono.checkpoint.options import CheckpointOptions
from unisono.checkpoint.reader import read_manifest
from unisono.checkpoint.shard_assignment import ShardFileLayout
from unisono.dist import World
from unisono.errors import CheckpointError, Problem


@dataclass(kw_only=True, slots=True)
class Save:
    """One save, and its outcome: committed if it ``ended`` without ``problems``. Training was blocked for ``stall_s``."""

    step: int
    layout: ShardFileLayout
    snapshot: HostSnapshot
    meta: dict[str, Any]
    score: float | None
    began_s: float
    stall_s: float = 0.0
    took_s: float = 0.0
    num_bytes: int = 0
    ended: bool = False
    problems: list[Problem] = field(default_factory=list[Problem])
    retention_problem: str = ""


class SaveWriter:
    """Writes this rank's shard files under ``root``; rank 0 also creates, commits and deletes directories."""

    def __init__(
        self,
        root: Path,
        *,
        world: World,
        options: CheckpointOptions,
        attempt: int,
        fault: Callable[[str], None],
        worker: int | None = None,
    ) -> None:
        self.root = root
        self._world = world
        self._options = options
        self._attempt, self._worker = attempt, worker
        self._fault = fault
        self._scores: dict[int, float | None] = {}

    def start_up(self) -> None:
        """Create the folder, and delete leftovers of earlier attempts where no other worker may be writing. Raises
        CheckpointError on all ranks."""

        def open_and_clear() -> None:
            if self._world.rank == 0:
                open_root(self.root)
                if self._worker is None:
                    remove_leftovers(self.root)

        self._on_all_ranks(open_and_clear, f"opening {self.root}")

    def remove_leftovers(self) -> None:
        """Delete leftovers of earlier attempts. Raises CheckpointError on all ranks."""

        def clear() -> None:
            if self._world.rank == 0:
                remove_leftovers(self.root)

        self._on_all_ranks(clear, f"opening {self.root}")

    def steps(self, save: Save) -> Iterator[None]:
        """Do the save, yielding often. A failure on one rank raises on all ranks that can still be reached."""
        operation = f"saving step {save.step} to {self.root}"
        temporary, final = self._paths(save)
        tables = self._on_all_ranks(lambda: self._prepare(save), operation)
        self._check_agreement(save, tables)
        yield
        running = xxhash.xxh3_128()

        def halfway() -> None:
            self._fault("mid_shard")

        path = temporary / shard_name(self._world.rank, self._world.world_size)
        writing = write_blocks(path, save.snapshot.blocks(running), save.snapshot.size, halfway=halfway)
        error: Exception | None = None
        try:
            self._fault("before_shard")
            yield from writing
        except Exception as caught:
            error = caught

        def report() -> dict[str, Any]:
            if error is not None:
                raise error
            return {"bytes": save.snapshot.size, "digest": running.hexdigest(), "pieces": describe_pieces(save.layout)}

        reports = self._on_all_ranks(report, operation)
        yield

        def commit() -> None:
            if self._world.rank == 0:
                commit_checkpoint(temporary, final, manifest=self._manifest(save, reports), fault=self._fault)

        self._on_all_ranks(commit, operation)
        save.num_bytes = sum(rank_report["bytes"] for rank_report in reports)
        save.took_s = time.monotonic() - save.began_s
        yield
        if self._world.rank == 0:
            self._scores[save.step] = save.score
            try:
                self._prune(save.step)
            except Exception as caught:  # the step is committed, so this is no failed save
                save.retention_problem = reason_of(caught)

    def discard(self, save: Save) -> None:
        """Delete the files of a failed save; the next attempt deletes the rest when it starts."""
        if self._world.rank != 0:
            return
        temporary, final = self._paths(save)
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        with contextlib.suppress(OSError):
            if final.is_dir() and not final.is_symlink() and not is_committed(final):
                remove(final)

    def _paths(self, save: Save) -> tuple[Path, Path]:
        final = self.root / step_name(save.step)
        own = "" if self._worker is None else f"-{self._worker}"
        return final.with_name(f"{final.name}.tmp-{self._attempt}{own}"), final

    def _prepare(self, save: Save) -> list[Any]:
        if self._world.rank == 0:
            temporary, _ = self._paths(save)
            if temporary.exists():
                shutil.rmtree(temporary)
            create_temporary_directory(self.root, save.step, temporary, save.layout.total_bytes)
        return [save.step, save.layout.fingerprint]

    def _check_agreement(self, save: Save, tables: list[list[Any]]) -> None:
        odd = next((rank for rank, table in enumerate(tables) if table != tables[0]), None)
        if odd is not None:
            raise CheckpointError(
                given=f"rank {odd} saves other tensors or another step than rank 0",
                rule="replicated tensors, and those in parts, have the same names, whole shapes and dtypes on all ranks",
                consequence=f"step {save.step} was not saved; earlier checkpoints are untouched",
                nearest="pass what only one rank has as its own tensors",
            )

    def _manifest(self, save: Save, reports: list[dict[str, Any]]) -> Manifest:
        return Manifest(
            step=save.step,
            world=self._world.world_size,
            attempt=self._attempt,
            score=save.score,
            versions=versions(),
            meta=save.meta,
            files=shard_entries(reports),
            tensors=tensor_table([report["pieces"] for report in reports], save.layout.sharded),
        )

    def _on_all_ranks(self, work: Callable[[], Any], operation: str) -> list[Any]:
        """Do ``work`` on every rank; returns all ranks' results, or raises one CheckpointError with all problems."""
        try:
            report: dict[str, Any] = {"value": work()}
        except Exception as error:
            report = {"problems": [asdict(problem) for problem in problems_of(error, operation)]}
        reports = self._world.all_gather_json(report)
        problems = dict.fromkeys(Problem(**parts) for answer in reports for parts in answer.get("problems", ()))
        if problems:
            raise CheckpointError(*problems)
        return [answer["value"] for answer in reports]

    def _prune(self, newest: int) -> None:
        """Delete expired checkpoints, and older directories that were never committed."""
        read_manifest(self.root / step_name(newest))  # raises if the newest is damaged, before anything is deleted
        entries = [entry for entry in list_checkpoints(self.root) if entry.state != "quarantined"]
        committed = {entry.step: entry.path for entry in entries if entry.state == "committed"}
        for step, path in committed.items():
            if step not in self._scores:
                self._scores[step] = _score(path)
        expired = expired_checkpoints({step: self._scores[step] for step in committed}, self._options)
        paths = [committed[step] for step in expired]
        paths += [entry.path for entry in entries if entry.state == "uncommitted" and entry.step < newest]
        for path in paths:
            remove(path)


def _score(path: Path) -> float | None:
    try:
        return read_manifest(path).score
    except (CheckpointError, OSError):
        return None

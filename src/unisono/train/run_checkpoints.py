"""The checkpoints of a run: the one it resumes from, the differences allowed then, and when it saves.

``auto`` takes the newest checkpoint that verifies, or starts a new run where there is none. ``strict`` also refuses a
change of anything bit-exactness depends on. ``never`` starts a new run and refuses a folder that already holds one. A
path names a checkpoint. A change of the samples of a step (data, seed, global batch) is always refused.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint import (
    Checkpointer,
    CheckpointOptions,
    CheckpointReader,
    find_latest,
    list_checkpoints,
    open_checkpoint,
    quarantine_after,
    scored_checkpoints,
    verify,
)
from unisono.checkpoint.folder import is_committed, step_name
from unisono.checkpoint.remote import RemoteCheckpoints
from unisono.config.renames import migrate_plan
from unisono.dist import World, fault_point
from unisono.dist.progress import at_work
from unisono.errors import CheckpointError
from unisono.observe.events import EventLog
from unisono.parallel.mesh import ParallelDims
from unisono.plan.plan import Plan
from unisono.storage.run_folder import CHECKPOINTS_FOLDER
from unisono.train.code_record import RunCode
from unisono.train.options import is_due, other_folder
from unisono.train.settings import setting_differences
from unisono.train.state import TrainState


def run_environment(world: World, plan: Plan) -> dict[str, Any]:
    """Facts besides the state that a bit-exact resume depends on; stored in every checkpoint."""
    return {
        "world": world.world_size,
        "plan": plan.decisions(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def best_before(run_dir: Path, step: int) -> tuple[float, int, Path] | None:
    """Held-out loss, step and path of a run's best checkpoint; None if it is that of ``step``, or none has a held-out loss."""
    best = next(iter(scored_checkpoints(run_dir / CHECKPOINTS_FOLDER)), None)
    return best if best is not None and best[1] != step else None


class RunCheckpoints:
    """Restores and saves the state of one run under ``root``. All ranks call each method together.

    ``resume`` is the mode of run.resume. ``meta`` is stored with every checkpoint: ``order`` (settings that decide the samples of
    a step), ``environment`` (see ``run_environment``), ``settings`` (see ``run_settings``) and ``provenance``.
    ``code`` is the record of the run's code, a part of the settings. ``worker`` as ``Checkpointer`` takes it.
    Raises CheckpointError.
    """

    def __init__(
        self,
        root: Path,
        state: TrainState,
        dims: ParallelDims,
        *,
        options: CheckpointOptions,
        resume: str,
        meta: Mapping[str, Any],
        code: RunCode,
        seed: int,
        events: EventLog,
        worker: int | None = None,
    ) -> None:
        self.saved_step = -1
        self._root, self._state, self._dims, self._world = root, state, dims, dims.world
        self._mode, self._meta, self._seed, self._events = resume, meta, seed, events
        self._code, self._is_one_of_several = code, worker is not None
        self._resumed_step = -1  # or that which another worker has saved
        self._every_steps = options.every_steps
        if options.upload_to:
            RemoteCheckpoints(options.upload_to).refuse_folder(root.parent)
        self._checkpointer = Checkpointer(
            root,
            world=self._world,
            options=options,
            attempt=events.attempt,
            emit=events.emit,
            fault=lambda point: fault_point(point, self.saved_step),
            worker=worker,
        )

    def restore(self) -> bool:
        """Load the checkpoint that ``resume`` selects, the same on all ranks; False if there is none."""
        mode = self._mode
        if self._is_one_of_several:  # none saves yet: the one that begins the run restores
            self._checkpointer.remove_leftovers()
        if mode in ("auto", "strict", "never"):
            self._checkpointer.fetch_newest(allowed=mode != "never")
        path = _choose(self._root, mode, self._world, self._events)
        if path is None:
            if self._events.attempt > 1 and not self._is_one_of_several:
                # the first event of this attempt that has a step may be one of a later step: what a loop logs comes at once
                self._events.emit("started_over", step=self._state.step)
            return False
        reader = open_checkpoint(path)
        _refuse_compressed(reader, path)
        _refuse_later_checkpoints(self._root, path, reader.step)
        _refuse_other_order(reader.meta["order"], self._meta["order"], path)
        differences = _differences(reader.meta["environment"], self._meta["environment"])
        if "settings" in reader.meta:  # checkpoints of the first commits have none
            current = {**self._meta["settings"], "code": self._code.start}
            differences += setting_differences(reader.meta["settings"], current)
        # each rank has read as many samples as it had time for
        differences = list(dict.fromkeys(chain.from_iterable(self._world.all_gather_json(differences))))
        if mode == "strict" and differences:
            raise CheckpointError(
                given=f"resume 'strict' from {path} with " + "; ".join(differences),
                rule="strict resumes only where every bit can be the same",
                consequence="nothing was loaded and nothing was changed",
                nearest="restore what differs, or run.resume='auto' to resume without bit-exactness",
            )
        differences += self._state.restore(reader, rank=self._dims.rng_rank, seed=self._seed)
        if mode not in ("auto", "strict") and self._world.rank == 0 and path.resolve().parent == self._root.resolve():
            self._checkpointer.withdraw_after(reader.step)
            quarantine_after(self._root, reader.step)  # these steps are made again, and no checkpoint is overwritten
        self._world.barrier()
        shown = (
            path.relative_to(here) if path.is_relative_to(here := Path.cwd()) else path
        )  # as run_dir is mostly given
        self._events.emit("resumed", step=self._state.step, path=shown, differences=differences)
        self.saved_step = self._resumed_step = self._state.step
        return True

    def is_due(self, step: int) -> bool:
        """Whether the options ask for a checkpoint of this step."""
        return is_due(self._every_steps, step)

    def save(self, *, score: float | None) -> None:
        """Begin to save the state as it is, once per step; ``score`` (lower is better) decides which are kept."""
        state = self._state
        if self.saved_step == state.step:
            return
        self.saved_step = state.step
        with at_work("a save", silent=True):
            self._begin_save(score)

    def _begin_save(self, score: float | None) -> None:
        state = self._state
        tensors, shards = state.global_state(), state.shards()
        rank_state = state.rank_state(self._dims.rng_rank) if self._dims.rank_along("tp") == 0 else {}
        settings = {**self._meta["settings"], "code": self._code.unchanged()}
        self._checkpointer.save(
            state.step,
            {name: tensor for name, tensor in tensors.items() if name not in shards},
            rank_state,
            {"state": state.meta(), **self._meta, "settings": settings},
            sharded={name: (tensors[name], shard) for name, shard in shards.items()},
            score=score,
        )

    def is_saved_by_another(self) -> bool:
        """Whether a worker of the run that died after its commit has left the checkpoint of this step. It is then this one's."""
        step = self._state.step
        if self.saved_step == step or not is_committed(self._root / step_name(step)):
            return False
        self.saved_step = self._resumed_step = step
        return True

    def poll(self) -> None:
        """Report a save that has ended in the background."""
        self._checkpointer.poll()

    def finish_save(self) -> None:
        """Finish a save that is under way. A collective. Raises CheckpointError if too many in a row have failed."""
        with at_work("a wait for a save", silent=True):
            self._checkpointer.wait()

    def wait(self) -> None:
        """Return when the current step is committed. Raises CheckpointError if it could not be written."""
        with at_work("a wait for a save", silent=True):
            self._checkpointer.wait_committed(self._state.step, resumed_step=self._resumed_step)

    def close(self) -> None:
        """Finish a save that is under way."""
        with at_work("a wait for a save", silent=True):
            self._checkpointer.close()


def _choose(root: Path, mode: str, world: World, events: EventLog) -> Path | None:
    if mode in ("auto", "strict"):
        return find_latest(root, world, emit=events.emit)
    if mode == "never":
        committed = [entry.step for entry in list_checkpoints(root) if entry.state == "committed"]
        if committed:
            raise CheckpointError(
                given=f"resume 'never' in {root.parent}, which holds {len(committed)} checkpoints "
                f"up to step {max(committed)}",
                rule="a committed checkpoint is never overwritten",
                consequence="nothing was started",
                nearest="another run.dir for a new run, or run.resume='auto' to continue this one",
            )
        return None
    path = Path(mode)
    if (problem := other_folder(mode)) is not None:
        raise CheckpointError(problem)
    problems = verify(path)
    if problems:
        raise CheckpointError(*problems)
    return path


def _refuse_later_checkpoints(root: Path, path: Path, step: int) -> None:
    """Of a run that starts from another folder's checkpoint: its own folder must not have those of the steps that it makes."""
    later = [entry.step for entry in list_checkpoints(root) if entry.state == "committed" and entry.step > step]
    if later and path.resolve().parent != root.resolve():
        raise CheckpointError(
            given=f"{path}, of step {step}, for a run in {root.parent}, which has checkpoints up to step {max(later)}",
            rule="a committed checkpoint is never overwritten",
            consequence="the steps after it could not be saved; nothing was loaded",
            nearest="another run.dir for this run, or run.resume='auto' to continue the one that is there",
        )


def _refuse_compressed(reader: CheckpointReader, path: Path) -> None:
    """Raise CheckpointError for the folder of a pruned or quantized model, which has no state of a training run."""
    if "compression" not in reader.meta:
        return
    folder = path.parent.parent
    raise CheckpointError(
        given=f"run.dir {str(folder)!r}, the folder of a compressed model ({reader.meta['compression']['what']})",
        rule="a run is resumed with the state of its optimizer and loader; this folder has a model alone",
        consequence="nothing was loaded and nothing was changed",
        nearest=f"a new run with its weights: --set model.weights={folder} --set run.dir=NEW; where its config.toml has "
        "model.pretrained, --set run.dir=NEW alone",
    )


def _refuse_other_order(saved: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    def difference(name: str) -> str:
        then, now = saved.get(name), here.get(name)
        # a fingerprint of sources and transforms is no text for a reader
        if name == "data" and max(len(str(then)), len(str(now))) > 80:
            return "data has other sources, samples or transforms"
        return f"{name} was {then!r} and is {now!r}"

    changed = [difference(name) for name in {**here, **saved} if saved.get(name) != here.get(name)]
    if changed:
        raise CheckpointError(
            given=f"the checkpoint {path} for a run whose {'; '.join(changed)}",
            rule="the samples of every step are a function of data, seed and global batch",
            consequence="the run would repeat some samples and never see others; nothing was loaded",
            nearest="restore these values, or start a new run in another run.dir",
        )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    texts: list[str] = []
    for name in current:
        if name == "plan":
            saved_plan = migrate_plan(saved["plan"]).values
            texts += [
                f"plan.{k} {saved_plan.get(k)!r} then, {v!r} now"
                for k, v in current["plan"].items()
                if saved_plan.get(k) != v
            ]
        elif saved.get(name) != current[name]:
            texts.append(f"{name} {saved.get(name)!r} then, {current[name]!r} now")
    return texts

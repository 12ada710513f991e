"""How a run starts: from nothing, or from a checkpoint, and what may differ then.

``auto`` takes the newest checkpoint that verifies, or starts a new run where there is none. ``strict`` also refuses a
change of anything bit-exactness depends on. ``never`` starts a new run and refuses a folder that already holds one. A
path names a checkpoint. What would change the samples of a step (data, seed, global batch) is refused always.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, quarantine_after, verify
from unisono.config.renames import migrate_plan
from unisono.dist import World
from unisono.errors import CheckpointError
from unisono.observe.events import EventLog
from unisono.plan.plan import Plan
from unisono.train.state import TrainState


def run_environment(world: World, plan: Plan) -> dict[str, Any]:
    """What a bit-exact resume depends on besides the state; recorded in every checkpoint."""
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


def resume_from_checkpoint(
    state: TrainState,
    root: Path,
    mode: str,
    *,
    world: World,
    rank: int,
    seed: int,
    order: Mapping[str, Any],
    environment: Mapping[str, Any],
    events: EventLog,
) -> bool:
    """Restore ``state`` as ``mode`` says; True if a checkpoint was loaded. All ranks come to the same answer.

    ``rank`` is whose random numbers this one draws. ``order`` is what decides the samples of a step.
    Raises CheckpointError.
    """
    path = _choose(root, mode, world, events)
    if path is None:
        return False
    snapshot = open_checkpoint(path)
    _refuse_other_order(snapshot.meta["order"], order, path)
    differences = _differences(snapshot.meta["environment"], environment)
    if mode == "strict" and differences:
        raise CheckpointError(
            given=f"resume 'strict' from {path} with " + "; ".join(differences),
            rule="strict resumes only where every bit can be the same",
            consequence="nothing was loaded and nothing was changed",
            nearest="restore what differs, or run.resume='auto' to go on with the weaker promise",
        )
    differences += state.restore(snapshot, rank=rank, seed=seed)
    if mode not in ("auto", "strict") and world.rank == 0 and path.resolve().parent == root.resolve():
        quarantine_after(root, snapshot.step)  # these steps are made again, and nothing is ever overwritten
    world.barrier()
    events.emit("resumed", step=state.step, path=path, differences=differences)
    return True


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
                nearest="another run.dir for a new run, or run.resume='auto' to go on with this one",
            )
        return None
    path = Path(mode)
    problems = verify(path)
    if problems:
        raise CheckpointError(*problems)
    return path


def _refuse_other_order(saved: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    changed = [
        f"{name} was {saved.get(name)!r} and is {here[name]!r}" for name in here if saved.get(name) != here[name]
    ]
    if changed:
        raise CheckpointError(
            given=f"the checkpoint {path} for a run whose {'; '.join(changed)}",
            rule="the samples of every step are a function of data, seed and global batch",
            consequence="the run would repeat some samples and never see others; nothing was loaded",
            nearest="restore these values, or start a new run in another run.dir",
        )


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    texts: list[str] = []
    for name in here:
        if name == "plan":
            there = migrate_plan(saved["plan"]).values
            texts += [
                f"plan.{k} {there.get(k)!r} then, {v!r} now" for k, v in here["plan"].items() if there.get(k) != v
            ]
        elif saved.get(name) != here[name]:
            texts.append(f"{name} {saved.get(name)!r} then, {here[name]!r} now")
    return texts

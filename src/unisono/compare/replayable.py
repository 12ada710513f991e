"""The facts of a run that a replay needs: losses, layout, and the checkpoints to start from. Reads checkpoints with torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from unisono.checkpoint import list_checkpoints, open_checkpoint
from unisono.checkpoint.folder import is_committed, step_of
from unisono.compare.differences import settings_of
from unisono.compare.divergence import Divergence, TensorSummary, difference_size, finite_or_none
from unisono.compare.step_record import START
from unisono.errors import CheckpointError, DataError
from unisono.observe.events import Event, as_mapping, events_path
from unisono.observe.history import Counts, Floats, read_history
from unisono.storage.run_folder import CHECKPOINTS_FOLDER

_LAYOUT: Final = {
    "mesh": ("device", "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "batch": ("global_batch", "micro_batch", "accumulation"),
    "precision": ("compute",),
    "backend": ("tf32",),
}
_COMPARED_FIRST: Final = ("model/", "optim/", "ema/")  # prefixes of tensors that every step reads


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayableRun:
    """One run.

    Attributes:
        run_dir: Its folder.
        steps: Number of each step, from 1, ascending [steps].
        losses: Its loss [steps].
        grad_norms: Its gradient norm [steps].
        layout: Sizes of the mesh, batch and precision, by name.
        order: What decides the samples of a step.
        world: Number of ranks.
        sync: The plan's kind of synchronisation.
        settings: Options, as text.
        start_points: Checkpoints to start a replay from, by step; at step 0 None, which starts from the seed.
    """

    run_dir: Path
    steps: Counts
    losses: Floats
    grad_norms: Floats
    layout: Mapping[str, Any]
    order: Mapping[str, Any]
    world: int
    sync: str
    settings: Mapping[str, str]
    start_points: Mapping[int, Path | None]

    def figures(self, step: int) -> tuple[float, float]:
        """Loss and gradient norm of a step; NaN for one that the history lacks."""
        row = int(np.searchsorted(self.steps, step))
        if row == len(self.steps) or self.steps[row] != step:
            return np.nan, np.nan
        return float(self.losses[row]), float(self.grad_norms[row])


def read_run(run_dir: Path) -> ReplayableRun:
    """Read a run. Raises DataError if the folder has no run, ConfigError if its events cannot be read."""
    history = read_history(events_path(run_dir, 0))
    starts = [event for event in history.all_events if event["kind"] == "run_start"]
    if not starts or not len(history.steps):
        raise DataError(
            given=f"{run_dir}, which has no {'steps' if starts else 'run'}: {events_path(run_dir, 0)}",
            rule="runs are compared by the losses of their steps, and replayed",
            consequence="nothing was compared",
            nearest="folders of runs (run.dir) that have made a step",
        )
    plan = as_mapping(starts[-1].get("plan"))
    order = np.argsort(history.steps, kind="stable")  # servers may report steps of dist_async in another one
    return ReplayableRun(
        run_dir=run_dir,
        steps=history.steps[order],
        losses=history.columns["train/loss"][order],
        grad_norms=history.columns["train/grad_norm"][order],
        layout={
            f"{group}.{name}": as_mapping(plan.get(group)).get(name)
            for group, names in _LAYOUT.items()
            for name in names
        },
        order=as_mapping(starts[-1].get("order")),
        world=_count(as_mapping(starts[-1].get("environment")).get("world")),
        sync=str(as_mapping(plan.get("sync")).get("kind", "")),
        settings=settings_of(starts[-1], run_dir),
        start_points=_start_points(run_dir, history.all_events),
    )


def _start_points(run_dir: Path, events: tuple[Event, ...]) -> dict[int, Path | None]:
    own = {
        entry.step: entry.path for entry in list_checkpoints(run_dir / CHECKPOINTS_FOLDER) if entry.state == "committed"
    }
    start_points: dict[int, Path | None] = dict(own)
    first = min((attempt for event in events if isinstance(attempt := event.get("attempt"), int)), default=0)
    resumed = [
        event for event in events if event["kind"] in ("resumed", "started_over") and event.get("attempt") == first
    ][:1]
    if resumed and resumed[0]["kind"] == "resumed":  # the run begins with the checkpoint of another
        path, step = Path(str(resumed[0].get("path"))), resumed[0].get("step")
        with suppress(OSError, ValueError):
            if isinstance(step, int) and step_of(path.name) == step and is_committed(path):
                start_points.setdefault(step, path)
    else:
        start_points[0] = None
    return start_points


def state_divergence(step: int, a: Path, b: Path) -> Divergence | None:
    """The first tensor in which two checkpoints of ``step`` differ, as a divergence of the next step; None where none does.

    Raises CheckpointError for a damaged checkpoint.
    """
    readers = open_checkpoint(a), open_checkpoint(b)
    names = [set(reader.names()) for reader in readers]
    for name in sorted(names[0] | names[1], key=lambda name: (not name.startswith(_COMPARED_FIRST), name)):
        layer = name.rpartition("/")[2].rpartition(".")[0] if name.startswith(_COMPARED_FIRST) else ""
        difference = partial(Divergence, step=step + 1, phase=START, layer=layer, tensor=name)
        if not (name in names[0] and name in names[1]):
            because = f"the checkpoint of {'B' if name in names[0] else 'A'} has no such tensor"
            return difference(because=(because,))
        tensors = [reader.tensor(name) for reader in readers]
        if (
            tensors[0].shape == tensors[1].shape
            and tensors[0].dtype == tensors[1].dtype
            and torch.equal(_bits(tensors[0]), _bits(tensors[1]))
        ):
            continue
        summaries = [_summary(tensor) for tensor in tensors]
        size = None
        if all(not tensor.is_complex() for tensor in tensors):
            size = difference_size(*(_array(tensor) for tensor in tensors))
        return difference(a=summaries[0], b=summaries[1], size=size)
    return None


def no_common_start(a: ReplayableRun, b: ReplayableRun, before: int) -> CheckpointError:
    """The error of runs that cannot be started at the same step."""
    have = [", ".join(str(step) for step in sorted(run.start_points) if step < before) or "none" for run in (a, b)]
    return CheckpointError(
        given=f"{a.run_dir} can start at the steps {have[0]}, {b.run_dir} at the steps {have[1]}, before step {before}",
        rule="both runs are replayed from checkpoints of the same step, or from step 0",
        consequence="nothing was replayed",
        nearest="checkpoint.every_steps and checkpoint.keep_last so that both keep checkpoints of the same steps",
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _array(tensor: torch.Tensor) -> Any:
    wide = tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return (tensor.float() if wide else tensor).numpy()


def _summary(tensor: torch.Tensor) -> TensorSummary:
    wide = tensor.abs().double() if tensor.is_complex() else tensor.double()
    norm, largest = (float(torch.linalg.vector_norm(wide)), float(wide.abs().max())) if tensor.numel() else (0.0, 0.0)
    return TensorSummary(
        operator="",
        arguments="",
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        norm=finite_or_none(norm),
        max_abs=finite_or_none(largest),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1

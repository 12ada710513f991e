"""Finds where two runs diverge first, by step, phase, layer, operator and tensor: replays a step or two of both.

The histories tell the first step whose loss or gradient norm differs, checkpoints narrow it down, and both runs are replayed from
the newest checkpoint in which they do not differ yet. Neither folder changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from unisono.compare.alignment import first_divergence
from unisono.compare.differences import Difference, differences
from unisono.compare.divergence import Divergence
from unisono.compare.replayable import ReplayableRun, no_common_start, read_run, state_divergence
from unisono.compare.step_record import START, Replay, ReplayRequest, StepRecord, read_records, read_replays
from unisono.compare.whole_tensors import first_whole_divergence, layout_of
from unisono.errors import CheckpointError, DataError
from unisono.observe.history import Counts
from unisono.storage.directory import make_folder

MAX_RECORDED: Final = 2  # steps of each run that are recorded at once
_UNIT: Final = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}
_LOSS_ROUNDINGS: Final = 16.0  # of a step's loss, which grows with the root of the number of steps
_NORM_ROUNDINGS: Final = 4 * _LOSS_ROUNDINGS

Replayer = Callable[[ReplayableRun, ReplayRequest], None]
Verdict = Literal["identical", "diverged", "not reproduced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The result of a search.

    Attributes:
        a: Folder of the first run.
        b: Folder of the second.
        verdict: ``identical``; ``diverged``; ``not reproduced``: the histories differ, and the replays do not.
        common_steps: Number of steps that both histories have.
        history_step: The first step whose loss or gradient norm differs; None where none does.
        divergence: The first tensor that differs.
        replayed_steps: Steps of each run that were replayed and recorded.
        run_up_steps: Steps of each run that were made before them without a record.
        is_rounded: Whether the layouts differ, so that values were compared up to rounding.
        settings: Options that differ.
        notes: Tensors that were not compared, and replays that do not repeat their run.
    """

    a: Path
    b: Path
    verdict: Verdict
    common_steps: int
    history_step: int | None = None
    divergence: Divergence | None = None
    replayed_steps: int = 0
    run_up_steps: int = 0
    is_rounded: bool = False
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "verdict": self.verdict,
            "common_steps": self.common_steps,
            "history_step": self.history_step,
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "replayed_steps": self.replayed_steps,
            "run_up_steps": self.run_up_steps,
            "is_rounded": self.is_rounded,
            "settings": [{"key": each.key, "a": each.a, "b": each.b} for each in self.settings],
            "notes": list(self.notes),
        }


def find_first_difference(a: Path, b: Path, *, replay: Replayer, scratch: Path) -> FirstDifference:
    """Find where two runs diverge first.

    Args:
        a: Folder of the first run.
        b: Folder of the second.
        replay: Replays steps of a run, and writes their records as its request says (``replay_as_child``).
        scratch: An empty folder for replays, outside of both runs.

    Raises:
        DataError: A folder has no run, the runs have no step in common, or a replay left no records.
        CheckpointError: They have no common step to start a replay from, a checkpoint is damaged, or a run has ``dist_async``.
        ConfigError: A replay failed, or events cannot be read.
    """
    return _Search(read_run(a), read_run(b), replay, scratch).result()


@dataclass(slots=True)
class _Search:
    a: ReplayableRun
    b: ReplayableRun
    replay: Replayer
    scratch: Path
    _notes: list[str] = field(default_factory=list[str])
    _num_replays: int = 0
    _recorded: int = 0
    _run_up: int = 0

    def result(self) -> FirstDifference:
        common, *places = np.intersect1d(self.a.steps, self.b.steps, return_indices=True)
        if not len(common):
            raise DataError(
                given=f"{self.a.run_dir} has the steps {_span(self.a)}, {self.b.run_dir} {_span(self.b)}",
                rule="runs are compared step by step",
                consequence="nothing was compared",
                nearest="runs that have steps in common",
            )
        is_rounded = self.a.layout != self.b.layout or self.a.world != self.b.world
        settings = tuple(differences(self.a.settings, self.b.settings))
        if is_rounded:
            names = [name for name in self.a.layout if self.a.layout[name] != self.b.layout.get(name)]
            shown = ", ".join(f"{name} {self.a.layout[name]} and {self.b.layout.get(name)}" for name in names)
            self._notes.append(f"the layouts differ ({shown}): values are compared up to rounding")
        step = self._first_step(common, *places, is_rounded=is_rounded)
        divergence = self._divergence_beyond_rounding(step) if is_rounded else self._bitwise_divergence(step)
        verdict: Verdict = "diverged" if divergence is not None else "identical" if step is None else "not reproduced"
        return FirstDifference(
            a=self.a.run_dir,
            b=self.b.run_dir,
            verdict=verdict,
            common_steps=len(common),
            history_step=step,
            divergence=divergence,
            replayed_steps=self._recorded,
            run_up_steps=self._run_up,
            is_rounded=is_rounded,
            settings=settings,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _first_step(self, steps: Counts, mine: Counts, its: Counts, *, is_rounded: bool) -> int | None:
        """The first of ``steps`` whose figures differ; ``mine`` and ``its`` are their places in A and B."""
        unit = max(_UNIT.get(str(run.layout.get("precision.compute")), _UNIT["fp32"]) for run in (self.a, self.b))
        differs = np.zeros(len(steps), bool)
        for x, y, roundings in (
            (self.a.losses[mine], self.b.losses[its], _LOSS_ROUNDINGS),
            (self.a.grad_norms[mine], self.b.grad_norms[its], _NORM_ROUNDINGS),
        ):
            unlike = (x != y) & ~(np.isnan(x) & np.isnan(y))
            if is_rounded:
                with np.errstate(invalid="ignore", over="ignore"):
                    unlike &= ~(np.abs(x - y) <= roundings * unit * np.sqrt(steps) * np.maximum(np.abs(x), np.abs(y)))
            differs |= unlike
        return int(steps[differs.argmax()]) if differs.any() else None

    # --- runs of one layout -----------------------------------------------------------------------------------------

    def _bitwise_divergence(self, step: int | None) -> Divergence | None:
        """The first divergence of bits, which is not after ``step``."""
        end = step if step is not None else int(min(self.a.steps.max(), self.b.steps.max())) + 1
        common = sorted(at for at in self.a.start_points.keys() & self.b.start_points.keys() if at < end)
        if not common:
            if step is None:
                return None
            raise no_common_start(self.a, self.b, end)
        changed: Divergence | None = None
        start = common[0]
        for at in reversed(common):
            found = self._checkpoint_divergence(at)
            if found is None:
                start = at
                break
            end, changed = at, found
        if changed is not None and end <= start:  # they differ in the first checkpoint of both already
            self._notes.append(
                f"the checkpoints of step {start} differ, and there are none of earlier steps in both runs"
            )
            return changed
        if step is None and changed is None:
            return None
        if (found := self._replay_divergence(start, end)) is not None:
            return found
        if changed is not None:
            self._notes.append(
                f"the replays of both runs are the same up to step {end}, and their checkpoints of that step are not: "
                "a checkpoint was changed, or the run had another state"
            )
        return changed

    def _checkpoint_divergence(self, step: int) -> Divergence | None:
        """The first divergence of both checkpoints of ``step``."""
        a, b = self.a.start_points[step], self.b.start_points[step]
        if a is None or b is None:
            return None  # replayed from the seed, which shows what differs
        return state_divergence(step, a, b)

    def _replay_divergence(self, start: int, end: int) -> Divergence | None:
        """The first divergence in the steps after ``start`` up to ``end``, by replaying both runs."""
        record = range(max(start + 1, end - MAX_RECORDED + 1), end + 1)
        folders = self._replay_both(start, record)
        found = self._record_divergence(record, folders)
        if found is None or found.phase != START or found.step != record[0] or start + 1 == record[0]:
            return found
        # they differ in a step before the first recorded one: digests of the state after each step tell in which
        states = [[replay.states for replay in read_replays(folder)] for folder in folders]
        earlier = next(
            (
                step
                for step in sorted({step for found in (*states[0], *states[1]) for step in found})
                if start < step < record[0] and any(x.get(step) != y.get(step) for x, y in zip(*states, strict=True))
            ),
            None,
        )
        if earlier is None:
            return found
        again = range(earlier, earlier + 1)
        return self._record_divergence(again, self._replay_both(start, again)) or found

    def _record_divergence(self, steps: Sequence[int], folders: tuple[Path, Path]) -> Divergence | None:
        """The first divergence in the records of ``steps``. Raises DataError where a rank has left none."""
        for step in steps:
            records = [read_records(folder, step) for folder in folders]
            self._require_all_ranks(records, step)
            if (found := first_divergence(records[0], records[1], folders)) is not None:
                return found
        return None

    # --- runs of other layouts --------------------------------------------------------------------------------------

    def _divergence_beyond_rounding(self, step: int | None) -> Divergence | None:
        """The first divergence beyond rounding, from the same state where the runs have the same order of samples."""
        if step is None:
            return None
        own = [sorted(at for at in run.start_points if at < step) for run in (self.a, self.b)]
        same_order = self.a.order == self.b.order
        common = sorted(set(own[0]) & set(own[1])) if not same_order or not own[0] else own[0]
        if not common:
            raise no_common_start(self.a, self.b, step)
        start = common[-1]
        if same_order and self.a.start_points[start] is not None:
            self.b = replace(self.b, start_points={**self.b.start_points, start: self.a.start_points[start]})
            self._notes.append(f"both were replayed from the checkpoint of step {start} of A")
        record = range(max(start + 1, step - MAX_RECORDED + 1), step + 1)
        folders = self._replay_both(start, record)
        for number in record:
            records = [read_records(folder, number) for folder in folders]
            self._require_all_ranks(records, number)
            if layout_of(records[0][0]) == layout_of(records[1][0]):
                return first_divergence(records[0], records[1], folders)
            found, notes = first_whole_divergence(records[0], records[1], folders)
            self._notes += notes
            if found is not None:
                return found
        return None

    # --- replays ----------------------------------------------------------------------------------------------------

    def _replay_both(self, start: int, record: Sequence[int]) -> tuple[Path, Path]:
        """Replay both runs from checkpoint ``start``, and record the steps ``record``; returns the folders of their records.

        Raises CheckpointError for a run with ``dist_async``.
        """
        for run in (self.a, self.b):
            if run.sync == "dist_async":
                raise CheckpointError(
                    given=f"{run.run_dir}, a run with plan.sync 'dist_async'",
                    rule="a replay repeats steps bit for bit, and asynchronous ones depend on when others arrive",
                    consequence="nothing was replayed",
                    nearest="runs with plan.sync 'dist_sync'",
                )
        self._num_replays += 1
        folders: list[Path] = []
        for letter, run in (("a", self.a), ("b", self.b)):
            folder = self.scratch / f"{letter}{self._num_replays}"
            records = folder / "records"
            make_folder(records)
            checkpoint = run.start_points[start]
            request = ReplayRequest(
                run_dir=str(folder / "run"),
                resume="" if checkpoint is None else str(checkpoint.absolute()),
                record_dir=str(records),
                record_steps=tuple(record),
                last_step=record[-1],
            )
            self.replay(run, request)
            folders.append(records)
            replays = read_replays(records)
            if replays:
                self._note_other_losses(letter.upper(), run, replays[0])
        self._recorded += len(record)
        self._run_up += record[0] - start - 1
        return folders[0], folders[1]

    def _note_other_losses(self, letter: str, run: ReplayableRun, replay: Replay) -> None:
        """Add a note if a replay has other losses than its run had."""
        for step, loss in sorted(replay.losses.items()):
            then, _ = run.figures(step)
            if loss is not None and not math.isnan(then) and loss != then:
                self._notes.append(
                    f"the replay of {letter} does not repeat the run: the loss of step {step} was {then!r} and is {loss!r}; "
                    "its code, data, packages or machine may differ from those of the run, or it is not deterministic"
                )
                return

    def _require_all_ranks(self, records: Sequence[Sequence[StepRecord]], step: int) -> None:
        if not records[0] or not records[1] or len(records[0]) != self.a.world or len(records[1]) != self.b.world:
            raise DataError(
                given=f"the replays left records of step {step} of {len(records[0])} and {len(records[1])} ranks",
                rule=f"the runs have {self.a.world} and {self.b.world} ranks, and each leaves one",
                consequence="nothing was compared",
                nearest="the messages of the replays, with -v",
            )


def _span(run: ReplayableRun) -> str:
    return f"{run.steps.min()} to {run.steps.max()}"

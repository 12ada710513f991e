"""``unisono train`` as a child of an examination: started, timed, ended, and what it said."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.dist.interpreter import module_command
from unisono.errors import ConfigError
from unisono.launch import child
from unisono.launch.child import error_paragraph
from unisono.observe.events import events_path, number, read_events
from unisono.observe.history import WARM_UP_READINGS
from unisono.storage.limits import MAX_PLAN_BYTES
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import PLAN_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutcome:
    """How a training ended.

    Attributes:
        run_dir: Its folder.
        code: Its exit code; None if it was killed because its time was over.
        took_s: Seconds from its start to its end.
        said: The end of its output.
    """

    run_dir: Path
    code: int | None
    took_s: float
    said: str

    @property
    def trouble(self) -> str:
        """Why it failed, in its own words; empty if it did not."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"not done after {self.took_s:.0f} s"
        return error_paragraph(self.said) or f"it ended with exit code {self.code}"

    def losses(self) -> list[float]:
        """Loss of each step, as rank 0 wrote it."""
        return [loss for event in self._steps() if (loss := number(event.get("train/loss"))) is not None]

    def step_s(self) -> float | None:
        """Median seconds of a step of rank 0, without the first ones; None if there are too few."""
        seconds: list[float] = []
        last = 0
        for event in self._steps():
            window_s, step = number(event.get("time/window_s")), event.get("step")
            if window_s is None or not isinstance(step, int) or step <= last:
                continue
            seconds.append(window_s / (step - last))
            last = step
        steady = sorted(seconds[WARM_UP_READINGS:])
        return steady[len(steady) // 2] if steady else None

    def peak_bytes(self) -> float | None:
        """Largest memory of rank 0; None if it is not known."""
        peaks = [peak for event in self._steps() if (peak := number(event.get("mem/peak_bytes"))) is not None]
        return max(peaks, default=None)

    def samples(self) -> int | None:
        """Samples of a step, by the plan of the run; None where it has none."""
        return self._batch_number("global_batch")

    def micro_batch(self) -> int | None:
        """Samples of a forward pass of a rank, by the plan of the run; None where it has none."""
        return self._batch_number("micro_batch")

    def accumulation(self) -> int | None:
        """Forward passes of a step, by the plan of the run; None where it has none."""
        return self._batch_number("accumulation")

    def _batch_number(self, name: str) -> int | None:
        with suppress(OSError, ValueError):
            plan: Any = read_own_json(self.run_dir / PLAN_FILE, max_bytes=MAX_PLAN_BYTES)
            batch: Any = plan.get("batch") if isinstance(plan, dict) else None
            count: Any = batch.get(name) if isinstance(batch, dict) else None
            return count if isinstance(count, int) and count > 0 else None
        return None

    def last_save(self) -> tuple[float, float] | None:
        """Bytes of its last checkpoint, of all ranks, and the seconds that it took to be written; None if there is none."""
        saves = [
            (number(event.get("bytes")), number(event.get("save_s"))) for event in self._events("checkpoint_saved")
        ]
        return next(
            ((size, took_s) for size, took_s in reversed(saves) if size is not None and took_s is not None), None
        )

    def _steps(self) -> list[Mapping[str, Any]]:
        return self._events("step")

    def _events(self, kind: str) -> list[Mapping[str, Any]]:
        """Those of rank 0."""
        with suppress(OSError, ConfigError):
            return [event for event in read_events(events_path(self.run_dir, 0)).events if event["kind"] == kind]
        return []


def train_child(run_dir: Path, arguments: Sequence[str], *, timeout_s: float) -> TrainOutcome:
    """Run ``unisono train`` with ``arguments`` in the folder ``run_dir``, for at most ``timeout_s`` seconds."""
    return run_child(run_dir, module_command("unisono", "train", *arguments), timeout_s=timeout_s)


def run_child(
    run_dir: Path, command: Sequence[str], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> TrainOutcome:
    """Run a command that trains in the folder ``run_dir``, for at most ``timeout_s`` seconds, with more environment variables."""
    began_s = time.monotonic()
    code, said = child.run_child(command, run_dir=run_dir, timeout_s=timeout_s, variables=variables)
    return TrainOutcome(run_dir=run_dir, code=code, took_s=time.monotonic() - began_s, said=said)

"""One training of a search: ``unisono train`` as a child, its metric followed while it runs, and how it ended."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from unisono.diagnose.ending import read_ending
from unisono.dist.interpreter import module_command
from unisono.errors import ConfigError
from unisono.exit_codes import REQUEUE
from unisono.launch.child import end_of_output, error_paragraph, kill_group, start_child
from unisono.launch.workers import Reaper
from unisono.observe.events import decode_event, event_step, events_path, number, open_events
from unisono.storage.directory import make_folder
from unisono.storage.files import open_new
from unisono.tune.unwritable import unwritable_reason

OUTPUT_FILE: Final = "output.txt"  # beside the folder of the run
_GRACE_S: Final = 120.0  # for a run that was asked to stop: it saves

End = Literal["done", "out_of_memory", "diverged", "failed", "interrupted", "no_metric", "unwritable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a training ended: ``interrupted`` if the same command goes on; ``no_metric`` if it trained, and its events lack the
    metric; ``unwritable`` if its folder cannot be written; ``reason`` says why it did not finish."""

    kind: End
    reason: str = ""


class TrialRun:
    """A training that has been started. It goes on from its last checkpoint where its folder has one.

    Args:
        reaper: Ends it when this process ends.
        run_dir: Its folder.
        arguments: Of ``unisono train``, with ``run.dir``.
        metric: Name of the number that is followed.
        beside: Name of another number in the same events, for ``pairs``.
        variables: Environment variables besides this process's own.
        cpus: Processors that it may use; None for those of this process.

    Attributes:
        run_dir: Its folder.
        output_path: File with what it says, beside that folder.
    """

    def __init__(
        self,
        reaper: Reaper,
        run_dir: Path,
        arguments: Sequence[str],
        *,
        metric: str,
        beside: str = "",
        variables: Mapping[str, str] | None = None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        make_folder(run_dir.parent)
        self.run_dir, self._reaper, self._metric = run_dir, reaper, metric
        self.output_path = run_dir.with_name(f"{run_dir.name}.{OUTPUT_FILE}")
        self.output_path.unlink(missing_ok=True)
        self._began_s, self._began_at_s = time.monotonic(), time.time()
        self._follower = MetricFollower(events_path(run_dir, 0), metric, beside)
        with open_new(self.output_path) as output:
            self._process = start_child(reaper, module_command("unisono", "train", *arguments), output, variables)
        if cpus is not None:
            with suppress(OSError, AttributeError):  # it has ended; or a system without that call
                os.sched_setaffinity(self._process.pid, cpus)

    @property
    def took_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began_s

    def values(self) -> list[tuple[int, float]]:
        """Values of the metric by step that were written since the last call."""
        return [(step, value) for step, value, _ in self._follower.take()]

    def pairs(self) -> list[tuple[int, float, float]]:
        """The same with the other number; without events that lack it."""
        return [(step, value, other) for step, value, other in self._follower.take() if other is not None]

    def last_value(self) -> float | None:
        """The last value of the metric so far; None if it has none."""
        self._follower.read()
        return self._follower.last

    def names(self) -> list[str]:
        """Names of the numbers in its events so far."""
        return sorted(self._follower.names)

    def poll(self) -> RunEnd | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reaper.forget(self._process.pid)
        if code == REQUEUE:
            return RunEnd(kind="interrupted", reason=f"it ended with {code}")
        value = self.last_value() if code == 0 else None
        if value is not None:
            return (
                RunEnd(kind="done")
                if math.isfinite(value)
                else RunEnd(kind="diverged", reason=f"the last value is {value}")
            )
        with self.output_path.open("rb") as output:
            error = _error_first(error_paragraph(end_of_output(output, self.run_dir))) if code else ""
        if reason := unwritable_reason(self.run_dir.parent, error):
            return RunEnd(kind="unwritable", reason=reason)
        if code == 0:
            names = ", ".join(self.names()) or "none at all"
            return RunEnd(kind="no_metric", reason=f"its events have no {self._metric}; they have {names}")
        if code < 0:
            return RunEnd(kind="interrupted", reason=f"it ended with {signal.Signals(-code).name}")
        _, ending = read_ending(self.run_dir, since_s=self._began_at_s)
        if ending is not None and ending.kind == "killed":  # a rank, from outside
            return RunEnd(kind="interrupted", reason=ending.sentence)
        kinds: dict[str, End] = {"out_of_memory": "out_of_memory", "numerics": "diverged", "disk_full": "unwritable"}
        kind = kinds.get(ending.kind if ending is not None else "", "failed")
        return RunEnd(kind=kind, reason=error or f"it ended with exit code {code}")

    def ask_to_stop(self) -> None:
        """Ask it to save and end."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Wait until it has ended after ``ask_to_stop``; end it where it does not."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        kill_group(self._process)
        self._reaper.forget(self._process.pid)


def _error_first(reason: str) -> str:
    """An error with what the launcher saw of its rank behind it: where only one line is shown, it is that of the error."""
    seen, _, error = reason.partition("\n")
    return f"{error}\n{seen}" if error and seen.startswith("attempt ") else reason


class MetricFollower:
    """Reads a growing file of events: each line once, when it is whole.

    Attributes:
        last: The last value of the metric.
        names: Names of all numbers with a ``/``.
    """

    def __init__(self, path: Path, metric: str, beside: str = "") -> None:
        self.last: float | None = None
        self.names: set[str] = set()
        self._path, self._metric, self._beside, self._read_bytes = path, metric, beside, 0
        self._new: list[tuple[int, float, float | None]] = []

    def take(self) -> list[tuple[int, float, float | None]]:
        """Step, value, and the other number where the event has it, since the last call."""
        self.read()
        found, self._new = self._new, []
        return found

    def read(self) -> None:
        """Read what was written since."""
        for line in self._lines():
            event = decode_event(line)
            if event is None:
                continue
            self.names |= {name for name in event if "/" in name and number(event[name]) is not None}
            value, step = number(event.get(self._metric)), event_step(event)
            if value is not None:
                self.last = value
                if step is not None:
                    self._new.append((step, value, number(event.get(self._beside))))

    def _lines(self) -> Sequence[bytes]:
        file: IO[Any]
        try:
            file = open_events(self._path)
        except (FileNotFoundError, ConfigError):
            return []
        with file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return whole.split(b"\n")

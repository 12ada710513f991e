"""A search: trainings one after another, or several at a time, until a budget is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from unisono.errors import ConfigError, nearest_name
from unisono.launch.workers import Reaper
from unisono.storage.run_folder import RUN_FILE
from unisono.tune.slots import Slot
from unisono.tune.study import Outcome, Study, Trial
from unisono.tune.trial_run import TrialRun
from unisono.tune.unwritable import unwritable_error

_POLL_S: Final = 0.2
_RECORD_S: Final = 60.0  # from one record of a running trial's time in the journal to the next
_MAX_STARTS: Final = 4  # of a trial that was killed from outside
_MAX_FIRST_FAILURES: Final = 3  # with no result yet: the configuration is at fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When no further trial begins; those that run are finished. None: no limit.

    Attributes:
        trials: Number of trials in the whole search.
        seconds: Seconds of this process.
        device_s: Device-seconds (processes x seconds) of all trials in the search; those of other processes up to a minute late.
    """

    trials: int | None = None
    seconds: float | None = None
    device_s: float | None = None


@dataclass(kw_only=True, slots=True)
class _Running:
    trial: Trial
    slot: Slot
    run: TrialRun
    starts: int = 1
    recorded_s: float = 0.0  # of this start, in the journal

    @property
    def new_s(self) -> float:
        """Seconds that the journal does not have."""
        return self.run.took_s - self.recorded_s


@dataclass(kw_only=True, slots=True)
class Search:
    """Runs the trials of a study.

    Attributes:
        study: Where trials come from.
        arguments: Arguments of ``unisono train`` for every trial.
        metric: Name of the number that counts.
        budget: When no further trial begins.
        slots: One for each trial that runs at a time.
        on_start: Called with each trial that begins.
        on_end: Called with each trial that ended: its outcome, last value and the reason, which is empty of one that is done.
    """

    study: Study
    arguments: Sequence[str]
    metric: str
    budget: Budget
    slots: Sequence[Slot]
    on_start: Callable[[Trial], None]
    on_end: Callable[[Trial, Outcome, float | None, str], None]
    _running: list[_Running] = field(default_factory=list[_Running])
    _num_results: int = 0
    _num_failures: int = 0

    def run(self) -> None:
        """Run trials until the budget is used up. An interrupt lets those that run save; the same search goes on with them.

        Raises:
            ConfigError: The first trials all failed, no trial has the metric, or the folder of one cannot be written: that one is
                left unfinished.
        """
        began_s = time.monotonic()
        with Reaper() as reaper:
            try:
                while True:
                    free = [slot for slot in self.slots if all(each.slot is not slot for each in self._running)]
                    for slot in free:
                        if not self._may_begin(time.monotonic() - began_s) or not self._begin(reaper, slot):
                            break
                    if not self._running:
                        return
                    time.sleep(_POLL_S)
                    for running in tuple(self._running):
                        self._look_at(reaper, running)
            finally:
                self._leave_all()

    def _may_begin(self, seconds: float) -> bool:
        budget = self.budget
        if budget.seconds is not None and seconds >= budget.seconds:
            return False
        if budget.device_s is None:
            return True
        used_s = sum(record.device_s for record in self.study.records())
        return used_s + sum(each.new_s * each.slot.num_processes for each in self._running) < budget.device_s

    def _begin(self, reaper: Reaper, slot: Slot) -> bool:
        """Start a trial in a slot; whether there was one."""
        trial = self.study.take_trial(self.budget.trials)
        if trial is None:
            return False
        self._running.append(_Running(trial=trial, slot=slot, run=self._start(reaper, trial, slot)))
        self.on_start(trial)
        return True

    def _start(self, reaper: Reaper, trial: Trial, slot: Slot) -> TrialRun:
        settings = {**slot.settings, **trial.settings, "run.dir": str(trial.run_dir)}
        if (trial.run_dir / RUN_FILE).exists():
            settings["run.resume"] = "auto"  # what the configuration says applied to its first start
        arguments = [*self.arguments, *(f"--set={name}={text}" for name, text in settings.items())]
        return TrialRun(reaper, trial.run_dir, arguments, metric=self.metric, variables=slot.variables, cpus=slot.cpus)

    def _look_at(self, reaper: Reaper, running: _Running) -> None:
        trial, run = running.trial, running.run
        end = run.poll()
        if end is None:
            if running.new_s >= _RECORD_S:
                self._record_time(running)
            if self.study.report(trial, run.values()):
                run.kill()
                self._end(running, "pruned", "others were better at the same step")
            return
        if end.kind == "interrupted" and running.starts < _MAX_STARTS:
            self._record_time(running)
            running.run, running.starts = self._start(reaper, trial, running.slot), running.starts + 1
            running.recorded_s = 0.0
            return
        if end.kind == "unwritable":
            self._running.remove(running)
            with suppress(OSError):  # the journal is on the same disk
                self._record_time(running)
            self.study.release(trial)
            raise unwritable_error(trial.run_dir.parent, end.reason)
        self.study.report(trial, run.values())
        self._end(running, "failed" if end.kind in ("interrupted", "no_metric") else end.kind, end.reason)
        if end.kind == "no_metric" and all(record.value is None for record in self.study.records()):
            raise ConfigError(
                given=f"--metric {self.metric}, and trial {trial.number}, which trained without it: {end.reason}",
                rule="the last value of the metric in a run's events says how good a trial is",
                consequence="the search ended; its folder keeps the trial",
                nearest=f"another folder and --metric NAME: {nearest_name(self.metric, run.names())}",
            )

    def _record_time(self, running: _Running) -> None:
        seconds = running.new_s
        self.study.add_time(running.trial, seconds, ranks=running.slot.num_processes)
        running.recorded_s += seconds

    def _end(self, running: _Running, outcome: Outcome, reason: str) -> None:
        trial, run = running.trial, running.run
        self._running.remove(running)
        value = run.last_value()
        self._record_time(running)
        self.study.finish(trial, outcome, value, reason=reason)
        self.on_end(trial, outcome, value, reason)
        self._num_results += outcome != "failed"
        self._num_failures += outcome == "failed"
        if not self._num_results and self._num_failures >= _MAX_FIRST_FAILURES:
            raise ConfigError(
                given=f"the first {self._num_failures} trials, which all failed; the last one: {reason}",
                rule="a search needs trials that train",
                consequence=f"no further trial began; what they said is in {run.output_path.parent}",
                nearest="try the configuration alone first: unisono train CONFIG",
            )

    def _leave_all(self) -> None:
        for running in self._running:
            running.run.ask_to_stop()
        for running in self._running:
            running.run.stop()
            self._record_time(running)
            self.study.release(running.trial)
        self._running.clear()

"""The trials of a search in an Optuna journal: what to try next, and what came of it.

Several processes and hosts may work on one journal. Each operation holds the journal lock. A running trial holds its own lock,
which the OS releases when its process dies; the next process resumes such a trial. A kill may leave a trial without some
settings: they are then sampled as before (``_choose``).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import xxhash

from unisono.errors import ConfigError, missing_extra
from unisono.storage.directory import make_folder
from unisono.storage.folder_lock import FolderLock
from unisono.storage.ownership import untrusted_reason
from unisono.tune.folder import exclusive_lock, require_own
from unisono.tune.journal import damaged, drop_torn_line
from unisono.tune.space import MAX_VALUES, Choice, Space, grid, num_combinations

if TYPE_CHECKING:
    import optuna

JOURNAL_FILE: Final = "journal.jsonl"
TRIALS_FOLDER: Final = "trials"
_JOURNAL_LOCK_FILE: Final = ".journal.lock"
_NAME: Final = "search"
_STARTUP_TRIALS: Final = 10  # random ones before a model of them is made
_RESAMPLES: Final = 20  # draws of one of a finite number of combinations, until one is new
_MAX_LEFT: Final = 1000  # combinations of which one is chosen where no draw was new
_IDENTITY: Final = "identity"
_FIXED: Final = "fixed_params"  # where Optuna keeps the values of a trial that was enqueued
_FROM_CONFIG: Final = "from_configuration"
MIN_TRIALS: Final = 10  # completed, from which on importances of settings are estimated
_UNPRUNED_TRIALS: Final = 5  # there is nothing to compare the first ones with

# what Optuna raises for a journal that it did not write
_UNREADABLE: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, IndexError, OverflowError),
)
Outcome = Literal["done", "pruned", "out_of_memory", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """Metric, sampler and pruner of a search.

    Attributes:
        metric: Metric to optimize.
        maximize: True to maximize it, False to minimize it.
        sampler: ``tpe`` (tree-structured Parzen estimator, Bergstra et al. 2011), ``random`` or ``grid``.
        pruner: ``none``; ``median``: ends a trial that is worse than the median of earlier ones at the same step;
            ``halving``: asynchronous successive halving (Li et al. 2018).
        seed: Seed of the sampler.
    """

    metric: str = "eval/loss"
    maximize: bool = False
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class Trial:
    """A trial that this process runs.

    Attributes:
        number: Its number, from 0.
        settings: Values of the settings that are searched, as ``--set`` takes them.
        run_dir: The folder of its run.
        reported: Steps whose values the journal has.
        optuna_trial: The same for Optuna.
        lock: Held as long as this process runs it.
    """

    number: int
    settings: Mapping[str, str]
    run_dir: Path
    reported: set[int]
    optuna_trial: Any
    lock: FolderLock


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """What the journal has of a trial.

    Attributes:
        number: Its number, from 0.
        settings: Values of the settings that are searched.
        outcome: How it ended; ``running`` if it has not.
        value: Its last value of the metric; None if it has none.
        took_s: Seconds that it ran, over all its starts.
        device_s: Device-seconds (processes x seconds), over all its starts.
        reason: Why it failed.
        run_dir: The folder of its run.
        curve: Values by step, as far as they were reported.
        from_configuration: Whether its settings are the configuration's own.
    """

    number: int
    settings: Mapping[str, str]
    outcome: Outcome | Literal["running"]
    value: float | None
    took_s: float
    device_s: float
    reason: str
    run_dir: Path
    curve: Mapping[int, float] = field(default_factory=dict[int, float])
    from_configuration: bool = False

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types; of the curve the last step."""
        fields = {name: getattr(self, name) for name in ("number", "outcome", "value", "took_s", "device_s", "reason")}
        fields["from_configuration"] = self.from_configuration
        last = {"last_step": max(self.curve, default=None)}
        return {**fields, **last, "settings": dict(self.settings), "run_dir": str(self.run_dir)}


class Study:
    """A search in ``folder``.

    Args:
        folder: Its folder, made if it is missing.
        space: The settings that are searched.
        options: How it chooses.
        identity: What else makes it this search, such as the configuration; JSON types.
        first: Settings of the first trial, of all that are searched; None: they are chosen, as those of the others. A grid has
            its own first one.

    Raises:
        ExtraError: Optuna is not installed.
        ConfigError: The folder has another search, files of others, or a journal that is damaged or that another user can have
            written; or its file system has no locks.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        options: StudyOptions,
        identity: Mapping[str, Any],
        *,
        first: Mapping[str, str] | None = None,
    ) -> None:
        self._optuna = _optuna()
        from optuna.storages.journal import JournalFileBackend

        require_own(folder, JOURNAL_FILE, (TRIALS_FOLDER, _JOURNAL_LOCK_FILE))
        self._folder, self._space, self._options, self._first = folder, space, options, first
        self._size = num_combinations(space)
        if self._size is not None and self._size > MAX_VALUES:
            self._size = None  # so many that hardly one comes twice
        make_folder(folder / TRIALS_FOLDER)
        journal = folder / JOURNAL_FILE
        if reason := untrusted_reason(journal):
            raise ConfigError(
                given=f"the search in {folder}: {reason}",
                rule="a journal that another user can have written is not used: trials start from what it says",
                consequence="nothing was started",
                nearest="a folder of your own (--out)",
            )
        with self._journal_lock():
            # no other process writes: this one holds the journal lock
            backend = JournalFileBackend(str(journal), lock_obj=cast(Any, _NoLock()))
            try:
                storage, pruner = self._optuna.storages.JournalStorage(backend), self._pruner()
                self._study: optuna.Study
                if journal.stat().st_size:  # create_study would add a line
                    self._study = self._optuna.load_study(storage=storage, study_name=_NAME, pruner=pruner)
                else:
                    direction = "maximize" if options.maximize else "minimize"
                    self._study = self._optuna.create_study(
                        storage=storage, study_name=_NAME, direction=direction, pruner=pruner
                    )
            except _UNREADABLE as error:
                raise damaged(journal, repr(error)) from error
            self._check_identity(
                {
                    **identity,
                    "space": {name: parameter.text for name, parameter in space.items()},
                    **{name: getattr(options, name) for name in ("metric", "maximize", "sampler", "seed")},
                }
            )
            self._records()  # before a trial is started

    def take_trial(self, max_trials: int | None) -> Trial | None:
        """Take a trial: one that was left unfinished, else a new one. None if there is none to take.

        Args:
            max_trials: Number of trials in the whole search; None for no limit.
        """
        states = self._optuna.trial.TrialState
        with self._journal_lock():
            for frozen in self._study.get_trials(deepcopy=False, states=[states.RUNNING]):
                if (lock := self._try_lock(frozen.number)) is not None:
                    trial_id = frozen._trial_id  # pyright: ignore[reportPrivateUsage]  # a trial has no other name
                    return self._taken(self._optuna.trial.Trial(self._study, trial_id), lock)
            if not self._study.get_trials(deepcopy=False, states=[states.WAITING]):
                count = len(self._study.get_trials(deepcopy=False))
                if (max_trials is not None and count >= max_trials) or not self._enqueue(count):
                    return None
            trial = self._study.ask()  # takes the one that waits, if one does
            lock = self._try_lock(trial.number)
            assert lock is not None  # no process has run it
            return self._taken(trial, lock)

    def _enqueue(self, number: int) -> bool:
        """Have a new trial wait whose settings are known: of a grid, the first one, or one of a finite number of combinations.
        False if there is no further one."""
        if self._options.sampler == "grid":
            settings = next(islice(grid(self._space), number, None), None)
        elif number == 0 and self._first is not None:
            settings = self._first
        elif self._size is None:
            return True
        else:
            settings = self._untried(number)
        if settings is None:
            return False
        values = {name: self._value(name, text) for name, text in settings.items()}
        self._study.enqueue_trial(values, user_attrs={_FROM_CONFIG: True} if settings is self._first else None)
        return True

    def _untried(self, number: int) -> dict[str, str] | None:
        """A combination that no trial has, as the sampler draws it: a second training of the same settings tells nothing. None if
        all are tried."""
        tried = {tuple(self._known_settings(frozen).items()) for frozen in self._study.get_trials(deepcopy=False)}
        if self._size is not None and len(tried) >= self._size:
            return None
        new = self._optuna.trial.create_trial(state=self._optuna.trial.TrialState.RUNNING)
        for attempt in range(_RESAMPLES):
            sampler = self._sampler(_trial_seed(self._options.seed, number, attempt))
            drawn = {
                name: sampler.sample_independent(self._study, new, name, self._distribution(name))
                for name in self._space
            }
            if tuple((settings := self._settings(drawn)).items()) not in tried:
                return settings
        combinations = (
            self._settings({name: self._value(name, each[name]) for name in each}) for each in grid(self._space)
        )
        left = list(islice((each for each in combinations if tuple(each.items()) not in tried), _MAX_LEFT))
        return left[_trial_seed(self._options.seed, number, _RESAMPLES) % len(left)] if left else None

    def _known_settings(self, frozen: Any) -> dict[str, str]:
        """Settings of a trial, also of one that was killed before it had them all."""
        return self._settings({**frozen.system_attrs.get(_FIXED, {}), **frozen.params})

    def report(self, trial: Trial, values: Sequence[tuple[int, float]]) -> bool:
        """Add values of the metric by step; whether the trial should be ended because others were better."""
        new = {step: value for step, value in values if step not in trial.reported and math.isfinite(value)}
        if not new:
            return False
        with self._journal_lock():
            for step, value in new.items():
                trial.reported.add(step)
                trial.optuna_trial.report(value, step)
            return bool(trial.optuna_trial.should_prune())

    def finish(self, trial: Trial, outcome: Outcome, value: float | None = None, *, reason: str = "") -> None:
        """Record how a trial ended.

        Args:
            trial: The trial.
            outcome: How it ended. All but ``failed`` are results, which the sampler learns from.
            value: The last value of the metric; needed for ``done``.
            reason: Why it failed.
        """
        states = self._optuna.trial.TrialState
        with self._journal_lock():
            trial.optuna_trial.set_user_attr("outcome", outcome)
            if value is not None and math.isfinite(value):
                trial.optuna_trial.set_user_attr("value", value)
            if reason:
                trial.optuna_trial.set_user_attr("reason", reason)
            if outcome == "done":
                self._study.tell(trial.optuna_trial, value, state=states.COMPLETE)
            else:
                self._study.tell(trial.optuna_trial, state=states.FAIL if outcome == "failed" else states.PRUNED)
            self._unlock(trial)

    def add_time(self, trial: Trial, seconds: float, *, ranks: int = 1) -> None:
        """Add to the time of a trial, for ``ranks`` processes: while it runs, so that other processes see it, and at its end."""
        with self._journal_lock():
            for name, more_s in (("took_s", seconds), ("device_s", seconds * ranks)):
                before_s = self._number(trial, trial.optuna_trial.user_attrs, name) or 0.0
                trial.optuna_trial.set_user_attr(name, before_s + more_s)

    def release(self, trial: Trial) -> None:
        """Leave a trial unfinished: the next process that asks resumes it."""
        with self._journal_lock():
            self._unlock(trial)

    def records(self) -> list[TrialRecord]:
        """All trials, by number."""
        with self._journal_lock():
            return self._records()

    def _records(self) -> list[TrialRecord]:
        try:
            return [self._record(frozen) for frozen in self._study.get_trials(deepcopy=False)]
        except _UNREADABLE as error:
            raise damaged(self._folder / JOURNAL_FILE, repr(error)) from error

    def best(self) -> TrialRecord | None:
        """The trial with the best value; the first of several. None if none is done."""
        done = [(each.value, each) for each in self.records() if each.outcome == "done" and each.value is not None]
        sign = -1.0 if self._options.maximize else 1.0
        return min(done, key=lambda pair: (sign * pair[0], pair[1].number))[1] if done else None

    def importances(self) -> dict[str, float]:
        """Share of each setting in how the better trials differ from the others (PED-ANOVA, Watanabe et al. 2023).

        Empty where trials are too few.
        """
        states = self._optuna.trial.TrialState
        if len(self._study.get_trials(deepcopy=False, states=[states.COMPLETE])) < MIN_TRIALS:
            return {}
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        try:
            return get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        except (ValueError, RuntimeError, ZeroDivisionError):  # no value differs
            return {}

    def _taken(self, trial: Any, lock: FolderLock) -> Trial:
        try:
            self._choose(trial)
        except BaseException:  # the next process, or this one, takes it up
            lock.close()
            raise
        known = self._study.get_trials(deepcopy=False)[trial.number]
        return Trial(
            number=trial.number,
            settings=self._settings(known.params),
            run_dir=self._run_dir(trial.number),
            reported=set(known.intermediate_values),
            optuna_trial=trial,
            lock=lock,
        )

    def _choose(self, trial: Any) -> None:
        """Choose the settings that a trial lacks: all of a new one, the rest of one whose process was killed meanwhile.

        Values already in the journal are sampled again to advance the sampler's random state, so the remaining ones are the same
        as without the kill.
        """
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        if all(name in frozen.params for name in self._space):
            return
        self._study.sampler = sampler = self._sampler(_trial_seed(self._options.seed, trial.number))
        is_drawn = _FIXED not in frozen.system_attrs
        for name in self._space:
            distribution = self._distribution(name)
            if name in frozen.params and is_drawn and name not in trial.relative_params and not distribution.single():
                sampler.sample_independent(self._study, frozen, name, distribution)
            self._suggest(trial, name, distribution)

    def _suggest(self, trial: Any, name: str, distribution: Any) -> None:
        if isinstance(distribution, self._optuna.distributions.CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)
            return
        is_integer = isinstance(distribution, self._optuna.distributions.IntDistribution)
        suggest = trial.suggest_int if is_integer else trial.suggest_float
        suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)

    def _record(self, frozen: Any) -> TrialRecord:
        """A trial of the journal. Raises ConfigError where a value is of another kind than a search writes."""
        attributes: Mapping[str, Any] = frozen.user_attrs
        outcome: Any = "running"
        if frozen.state.is_finished():  # else a process that was killed at its end left it to be ended once more
            outcome = attributes.get("outcome")
            if outcome not in get_args(Outcome):
                raise self._damaged(
                    frozen, f"outcome is {outcome!r:.80}, and should be one of {', '.join(get_args(Outcome))}"
                )
        value = self._number(frozen, attributes, "value")
        if outcome == "done" and (value is None or list(frozen.values or ()) != [value]):
            raise self._damaged(
                frozen, f"it is done with value {value} and {frozen.values!r:.80}, which should be the same"
            )
        curve = {step: self._number(frozen, frozen.intermediate_values, step) for step in frozen.intermediate_values}
        return TrialRecord(
            number=frozen.number,
            settings=self._settings(frozen.params),
            outcome=outcome,
            value=value,
            took_s=self._number(frozen, attributes, "took_s") or 0.0,
            device_s=self._number(frozen, attributes, "device_s") or 0.0,
            reason=str(attributes.get("reason", "")),
            run_dir=self._run_dir(frozen.number),
            curve={step: known for step, known in curve.items() if known is not None},
            from_configuration=bool(attributes.get(_FROM_CONFIG, False)),
        )

    def _number(self, frozen: Any, values: Mapping[Any, Any], name: str | int) -> float | None:
        """A number that the journal has of a trial; None if it has none. Raises ConfigError if it is not finite, or no number."""
        value = values.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        ):
            raise self._damaged(frozen, f"{name} is {value!r:.80}, and should be a finite number")
        return None if value is None else float(value)

    def _damaged(self, frozen: Any, reason: str) -> ConfigError:
        return damaged(self._folder / JOURNAL_FILE, f"trial {frozen.number}: {reason}")

    def _run_dir(self, number: int) -> Path:
        return self._folder / TRIALS_FOLDER / f"{number:04}"

    def _settings(self, values: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, parameter in self._space.items():
            if name in values:
                value = values[name]
                found[name] = str(value) if isinstance(parameter, Choice) else parameter.value_text(value)
        return found

    def _value(self, name: str, text: str) -> Any:
        parameter = self._space[name]
        if isinstance(parameter, Choice):
            return text
        return int(text) if parameter.is_integer else float(text)

    def _distribution(self, name: str) -> Any:
        distributions, parameter = self._optuna.distributions, self._space[name]
        if isinstance(parameter, Choice):
            return distributions.CategoricalDistribution(parameter.values)
        if parameter.is_integer:
            step = int(parameter.step or 1)
            low, high = int(parameter.low), int(parameter.high)
            return distributions.IntDistribution(low, high, log=parameter.is_log, step=step)
        low, high = parameter.low, parameter.high
        return distributions.FloatDistribution(low, high, log=parameter.is_log, step=parameter.step)

    def _sampler(self, seed: int) -> Any:
        """A sampler whose choice depends on ``seed`` and the trials in the journal alone, whichever process makes it."""
        samplers = self._optuna.samplers
        if self._options.sampler == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        return samplers.RandomSampler(seed=seed)

    def _pruner(self) -> Any:
        pruners = self._optuna.pruners
        if self._options.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=_UNPRUNED_TRIALS)
        return pruners.SuccessiveHalvingPruner() if self._options.pruner == "halving" else pruners.NopPruner()

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        known = self._study.user_attrs.get(_IDENTITY)
        if known is None:
            self._study.set_user_attr(_IDENTITY, dict(identity))
            return
        differing = [name for name in {**known, **identity} if known.get(name) != identity.get(name)]
        if differing:
            name = differing[0]
            raise ConfigError(
                given=f"{name} {identity.get(name)} for the search in {self._folder}, which began with {known.get(name)}",
                rule="the trials of a search are comparable: they differ in the settings that are searched",
                consequence="nothing was started",
                nearest="the same command as before goes on; another folder (--out) begins a new search",
            )

    @contextmanager
    def _journal_lock(self) -> Generator[None]:
        with exclusive_lock(self._folder / _JOURNAL_LOCK_FILE):
            drop_torn_line(self._folder / JOURNAL_FILE)
            yield

    def _lock_path(self, number: int) -> Path:
        return self._folder / TRIALS_FOLDER / f".{number:04}.lock"

    def _try_lock(self, number: int) -> FolderLock | None:
        try:
            return FolderLock(self._lock_path(number), work="runs this trial", nearest="wait for its end")
        except ConfigError:
            return None

    def _unlock(self, trial: Trial) -> None:
        trial.lock.close()
        self._lock_path(trial.number).unlink(missing_ok=True)


def _trial_seed(seed: int, number: int, attempt: int = 0) -> int:
    """A seed of 32 bits for one trial, or for another draw of its settings; searches with neighbouring seeds have none in common
    but by chance."""
    return xxhash.xxh32_intdigest(f"{seed} {number}{f' {attempt}' if attempt else ''}".encode())


class _NoLock:
    """The lock that Optuna takes on the journal: it locks nothing, as the process holds the journal lock already."""

    def acquire(self) -> bool:
        """See Optuna."""
        return True

    def release(self) -> None:
        """See Optuna."""


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise missing_extra("tune", "optuna", "a search of settings") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

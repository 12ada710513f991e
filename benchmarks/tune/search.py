"""Searches of settings: what a trial costs beside its training, and how good the best of forty trials is.

Overhead: ``unisono tune params``, a loop with Optuna by hand that starts the same trainings, and a loop without a search, one
after the other in each round. Trainings are of two steps of a small model, so that nearly all is the start of a process.

Quality: made-up losses with a known best value, no training. ``unisono`` makes each choice by a sampler of its own that is built
from the journal; Optuna by hand has one sampler in one process. Regret is the best value found minus the smallest there is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from benchmarks.paired import median_interval, ratio

from unisono.observe.events import events_path, number, read_events
from unisono.tune.space import read_space
from unisono.tune.study import Study, StudyOptions

SETTINGS = (
    *("train.steps=2", "train.num_eval_samples=4", "train.eval_every_steps=0", "observe.report=false"),
    *("model.num_layers=1", "model.dim=32", "model.num_heads=4", "model.num_kv_heads=2", "data.seq_len=32"),
    *("plan.global_batch=4", "observe.monitor_every_s=0"),
)
LR = "optim.lr=log:1e-4..1e-2"


# --- overhead ---------------------------------------------------------------------------------------------------------


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "unisono", *arguments], check=True, capture_output=True)


def _train(folder: Path, lr: float) -> float:
    _run("train", *(f"--set={each}" for each in SETTINGS), f"--set=run.dir={folder}", f"--set=optim.lr={lr!r}")
    losses = [number(event.get("eval/loss")) for event in read_events(events_path(folder, 0)).events]
    return [loss for loss in losses if loss is not None][-1]


def tune(folder: Path, trials: int) -> None:
    settings = [f"--set={each}" for each in SETTINGS]
    _run("tune", "params", *settings, f"--space={LR}", f"--out={folder}", f"--trials={trials}", "--sampler=random")


def by_hand(folder: Path, trials: int) -> None:
    """What a user writes with Optuna: a journal, ask and tell, a process for each trial."""
    folder.mkdir()
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal"))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend), sampler=optuna.samplers.RandomSampler(seed=0)
    )
    for _ in range(trials):
        trial = study.ask()
        study.tell(trial, _train(folder / str(trial.number), trial.suggest_float("lr", 1e-4, 1e-2, log=True)))


def loop(folder: Path, trials: int) -> None:
    """The trainings alone."""
    for index in range(trials):
        _train(folder / str(index), 1e-3)


def overhead(rounds: int, trials: int) -> dict[str, Any]:
    ways: Mapping[str, Callable[[Path, int], None]] = {"unisono tune": tune, "Optuna by hand": by_hand, "loop": loop}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds):
        order = list(ways) if index % 2 else list(reversed(ways))
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                begin_s = time.perf_counter()
                ways[name](Path(folder) / "search", trials)
                times[name].append((time.perf_counter() - begin_s) / trials)
            print(f"round {index}, {name}: {times[name][-1]:.2f} s a trial", file=sys.stderr)
    return {
        "trials": trials,
        "s_per_trial": {name: statistics.median(values) for name, values in times.items()},
        "ratios": {
            "unisono tune / Optuna by hand": ratio(times["unisono tune"], times["Optuna by hand"]),
            "unisono tune / trainings alone": ratio(times["unisono tune"], times["loop"]),
        },
    }


# --- quality ----------------------------------------------------------------------------------------------------------


def _bowl(a: float, b: float, c: float, kind: str) -> float:
    """Like a loss by learning rate, weight decay and dropout: one optimizer is better, and rate and decay belong together."""
    rate, decay = math.log10(a / 3e-3), math.log10(b / 0.1)
    return rate**2 + 0.5 * (decay + rate) ** 2 + 4 * (c - 0.1) ** 2 + (0.0 if kind == "adamw" else 0.3)


def _two_valleys(a: float, b: float, c: float, kind: str) -> float:
    """A wide valley and a narrow, deeper one."""
    x, y = math.log10(a) + 3, math.log10(b) + 2
    wide, deep = (x - 1) ** 2 + (y - 1) ** 2, 10 * ((x + 1) ** 2 + (y + 1) ** 2)
    return min(0.3 + wide, deep) + abs(c - 0.2) + (0.0 if kind == "lamb" else 0.2)


LOSSES: Mapping[str, Callable[[float, float, float, str], float]] = {"bowl": _bowl, "two valleys": _two_valleys}
SPACE = ("a=log:1e-5..1e-1", "b=log:1e-4..1e1", "c=0.0..0.5", "kind=adamw,lamb,sgd")


def of_unisono(loss: Callable[..., float], sampler: str, seed: int, trials: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder), read_space(SPACE), StudyOptions(sampler=sampler, seed=seed), {})
        best = math.inf
        for _ in range(trials):
            trial = study.take_trial(None)
            assert trial is not None
            a, b, c, kind = trial.settings.values()
            value = loss(float(a), float(b), float(c), kind)
            study.finish(trial, "done", value)
            best = min(best, value)
        return best


def of_optuna(loss: Callable[..., float], seed: int, trials: int) -> float:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def objective(trial: optuna.Trial) -> float:
        return loss(
            trial.suggest_float("a", 1e-5, 1e-1, log=True),
            trial.suggest_float("b", 1e-4, 1e1, log=True),
            trial.suggest_float("c", 0.0, 0.5),
            trial.suggest_categorical("kind", ["adamw", "lamb", "sgd"]),
        )

    study.optimize(objective, n_trials=trials)
    return study.best_value


def quality(seeds: int, trials: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        regrets = {
            "tpe": [of_unisono(loss, "tpe", seed, trials) for seed in range(seeds)],
            "random": [of_unisono(loss, "random", seed, trials) for seed in range(seeds)],
            "optuna": [of_optuna(loss, seed, trials) for seed in range(seeds)],
        }
        wins = sum(mine < other for mine, other in zip(regrets["tpe"], regrets["random"], strict=True))
        results[name] = {
            "regret": {way: statistics.median(values) for way, values in regrets.items()},
            "tpe_over_random": ratio(regrets["tpe"], regrets["random"]),
            "unisono_over_optuna": ratio(regrets["tpe"], regrets["optuna"]),
            "tpe_wins": f"{wins} of {seeds} seeds",
            "tpe_interval": list(median_interval(regrets["tpe"])[:2]),
        }
        print(f"{name}: {results[name]}", file=sys.stderr)
    return {"trials": trials, "seeds": seeds, "losses": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=40)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {
        "overhead": overhead(arguments.rounds, arguments.trials),
        "quality": quality(arguments.seeds, 40),
        "versions": {"optuna": optuna.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

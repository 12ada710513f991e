"""What ``unisono diagnose`` says of runs whose cause is known, and what accounting costs. Prints JSON.

    python -m benchmarks.observe.diagnosis [--rounds 4] [--steps 50] [--blocks 40] [--only costs] [--cases CASE;CASE]

costs     Steps are made slower by a known cause. A round is a run without it, then one with it (in turned order every other
          round). The true cost is the share by which the step is longer; the named cost is that of the finding. Garbage is
          made on both sides, and collected on one. Rules of a profile have no case: their costs are shares of profiled
          steps, which are longer than others.
gains     Runs with a cause, and the same with the settings that diagnosis proposes. The true gain is the share by which the
          step became shorter.
healthy   Runs of a GPT, a BERT and a ResNet on one and two processes, in which nothing is wrong: findings.
overhead  Steps with accounting and without it, in blocks that alternate in one process, and in two with collectives inside
          layers; ``benchmarks.observe.overhead`` says what accounting is.
verification  Steps that are computed twice (observe.verify_every_steps) and others, in such blocks of one step; and what that
          costs at a cadence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.observe.overhead import MEASURES, on_ranks
from benchmarks.observe.short_run import COMMON, SAMPLES, Settings, overrides
from benchmarks.paired import ratio, spread
from PIL import Image

from unisono.diagnose import Finding, diagnose, read_run
from unisono.observe.events import Event, events_path, read_events

ROOT = Path(__file__).resolve().parents[2]
SLOW_RUN = ROOT.joinpath(*["benchmarks", "observe", "slow_run"]).with_suffix(".py")
ROUNDS = {"costs": 4, "gains": 3, "healthy": 2}  # a run takes some 25 s on two cores
WARM_UP_STEPS = 10
PROFILED_STEPS = 3  # the last but one, where a run has a profile
DISTURBED_STEPS = 6  # from where a profile is prepared to the end of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A cause in runs, by code or by settings.

    Attributes:
        rule: The rule that is to name it.
        cause: That of ``benchmarks.observe.slow_run``; empty where the settings are the cause.
        other_cause: The same of the run without the cause, where it is no plain run.
        slower_s: How much longer a step takes, where code makes it longer by a fixed time.
        rank: The rank that has the cause; -1 for all.
        processes: Number of ranks.
        is_profiled: Whether the rule needs a profile.
        settings: Settings of both runs.
        without: Further settings of the run without the cause.
    """

    rule: str
    cause: str = ""
    other_cause: str = ""
    slower_s: float = 0.0
    rank: int = -1
    processes: int = 1
    is_profiled: bool = False
    settings: Settings = field(default_factory=dict[str, Any])
    without: Settings = field(default_factory=dict[str, Any])


COSTS: Mapping[str, Case] = {
    "slow loader, 1 process": Case(rule="DATA01", cause="loader", slower_s=0.03, settings={"loader.num_workers": 0}),
    "slow loader, 2 processes": Case(
        rule="DATA01", cause="loader", slower_s=0.03, processes=2, settings={"loader.num_workers": 0}
    ),
    "slow loader of rank 1": Case(
        rule="DATA02", cause="loader", slower_s=0.03, rank=1, processes=2, settings={"loader.num_workers": 0}
    ),
    "slow rank 1": Case(rule="BAL01", cause="compute", slower_s=0.03, rank=1, processes=2),
    "slow link": Case(rule="COMM01", cause="link", slower_s=0.03, processes=2),
    "synchronous saves": Case(
        rule="CKPT01",
        settings={"checkpoint.every_steps": 2, "checkpoint.asynchronous": False},
        without={"checkpoint.every_steps": 0, "checkpoint.asynchronous": False},
    ),
    "garbage collections": Case(rule="GC01", cause="garbage", other_cause="garbage, not collected"),
}
GAINS: Mapping[str, Case] = {
    "slow loader": COSTS["slow loader, 1 process"],
    "synchronous saves": COSTS["synchronous saves"],
    "one micro-batch in a pipeline": Case(
        rule="PP01",
        processes=2,
        settings={
            "plan.pp": 2,
            "plan.schedule": "gpipe",
            "plan.micro_batch": SAMPLES,
            "model.dim": 256,
            "data.seq_len": 256,
        },
    ),
    "garbage collections": COSTS["garbage collections"],
    "frequent saves": Case(rule="CKPT01", cause="save", slower_s=0.06, settings={"checkpoint.every_steps": 2}),
    "micro-batches of one small sample": Case(
        rule="LAUNCH01",
        is_profiled=True,
        settings={"plan.micro_batch": 1, "model.dim": 32, "data.seq_len": 16},
    ),
}
HEALTHY: Mapping[str, Settings] = {
    "GPT": {"model.dim": 256, "data.seq_len": 256},
    "BERT": {"task.kind": "masked_language_model", "data.corpus": "texts", "model.dim": 256, "data.seq_len": 128},
    "ResNet-14": {
        "task.kind": "image",
        "data.seq_len": None,
        "data.train": "images",
        "image.size": 64,
        "components.model": "resnet14",
        "plan.global_batch": 32,
    },
}


def train(folder: Path, settings: Settings, *, processes: int, steps: int, case: Case | None = None) -> Path:
    """Make a run of ``unisono train``; its folder."""
    run_dir = folder / "run"
    changed = {**COMMON, **settings, "launch.num_processes": processes, "train.steps": steps, "run.dir": str(run_dir)}
    if case is not None and case.is_profiled:
        changed["observe.profile_steps"] = f"{steps - PROFILED_STEPS}:{steps}"
    command = [sys.executable, "-m", "unisono", "train"]
    environ = dict(os.environ)
    if case is not None:
        command.append(str(SLOW_RUN))
        environ |= {"SLOW_CAUSE": case.cause, "SLOW_S": str(case.slower_s), "SLOW_RANK": str(case.rank)}
        environ["SLOW_SAMPLES"] = str(SAMPLES // processes)
    command += [f"--set={override}" for override in overrides(changed)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder.parent)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return run_dir


def step_s(run_dir: Path, case: Case) -> float:
    """Mean seconds between steps after the warm-up and before a profile, all that happened between them included."""
    events: Sequence[Event] = read_events(events_path(run_dir, 0)).events
    readings = [event for event in events if "time/window_s" in event and event["step"] > WARM_UP_STEPS]
    if case.is_profiled:
        last = readings[-1]["step"] - DISTURBED_STEPS
        readings = [event for event in readings if event["step"] <= last]
    return (readings[-1]["m"] - readings[0]["m"]) / (readings[-1]["step"] - readings[0]["step"])


def found(run_dir: Path) -> dict[str, Finding]:
    """The findings of a run by rule."""
    return {finding.id: finding for finding in diagnose(read_run(run_dir))}


def costs(cases: Mapping[str, Case], rounds: int, steps: int) -> dict[str, Any]:
    """By case: named cost / true cost, and how often the rule and the rank were named."""
    result: dict[str, Any] = {}
    for name, case in cases.items():
        named: list[float] = []
        true: list[float] = []
        right = 0
        for number in range(rounds):
            run_dirs: dict[str, Path] = {}
            with tempfile.TemporaryDirectory() as root:
                for side in ("with", "without")[:: 1 if number % 2 else -1]:
                    one = case if side == "with" else replace(case, cause=case.other_cause, slower_s=0.0)
                    settings = {**case.settings, **(case.without if side == "without" else {})}
                    folder = Path(root, side)
                    folder.mkdir()
                    run_dirs[side] = train(folder, settings, processes=case.processes, steps=steps, case=one)
                finding = found(run_dirs["with"]).get(case.rule)
                is_right = finding is not None and finding.ranks == (() if case.rank < 0 else (case.rank,))
                right += is_right
                named.append(finding.cost_frac if finding is not None else 0.0)
                true.append(1 - step_s(run_dirs["without"], case) / step_s(run_dirs["with"], case))
        result[name] = {
            "rule": case.rule,
            "right": right,
            "rounds": rounds,
            "true_cost": spread(true),
            "named_over_true": ratio(named, true),
        }
        print(f"costs: {name}", file=sys.stderr)
    return result


def gains(cases: Mapping[str, Case], rounds: int, steps: int) -> dict[str, Any]:
    """By case: true gain / expected gain of the settings that diagnosis proposes."""
    result: dict[str, Any] = {}
    for name, case in cases.items():
        true: list[float] = []
        expected: list[float] = []
        patch: Settings = {}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as root:
                for side in ("before", "after"):
                    Path(root, side).mkdir()
                before = train(Path(root, "before"), case.settings, processes=case.processes, steps=steps, case=case)
                finding = found(before)[case.rule]
                patch = finding.patch
                settings = {**case.settings, **patch}
                after = train(Path(root, "after"), settings, processes=case.processes, steps=steps, case=case)
                true.append(1 - step_s(after, case) / step_s(before, case))
                expected.append(finding.expected_gain)
        result[name] = {
            "rule": case.rule,
            "patch": patch,
            "expected": spread(expected),
            "true_over_expected": ratio(true, expected),
        }
        print(f"gains: {name}", file=sys.stderr)
    return result


def healthy(rounds: int, steps: int) -> dict[str, Any]:
    """By model and number of processes: all findings of all rounds."""
    result: dict[str, Any] = {}
    for name, settings in HEALTHY.items():
        for processes in (1, 2):
            findings: list[str] = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as root:
                    _make_data(Path(root))
                    Path(root, "run").mkdir()
                    run_dir = train(Path(root, "run"), settings, processes=processes, steps=steps)
                    findings += [
                        f"{one.id} {one.cost_frac:.2f} {'; '.join(one.evidence)}" for one in diagnose(read_run(run_dir))
                    ]
            result[f"{name}, {processes} {'process' if processes == 1 else 'processes'}"] = {
                "rounds": rounds,
                "findings": findings,
            }
            print(f"healthy: {name}, {processes}: {findings}", file=sys.stderr)
    return result


def _make_data(folder: Path) -> None:
    """Texts and images, enough that no epoch ends early."""
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 9))) for _ in range(500)]
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(rng.choice(words, 20_000)))
    for label in ("light", "dark"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(200):
            pixels = rng.integers(0, 128, (64, 64, 3), dtype=np.uint8) + np.uint8(127 * (label == "light"))
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.jpg", quality=90)


def _chosen(cases: Mapping[str, Case], names: Sequence[str]) -> dict[str, Case]:
    return {name: case for name, case in cases.items() if name in names}


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help=f"of each case; by default {ROUNDS}")
    parser.add_argument("--steps", type=int, default=50, help="of a run")
    parser.add_argument("--blocks", type=int, default=40, help="of each side, for the overhead")
    parser.add_argument("--only", choices=("costs", "gains", "healthy", *MEASURES))
    parser.add_argument("--cases", help="of costs and gains, separated by ;")
    arguments = parser.parse_args()
    rounds = {part: arguments.rounds or number for part, number in ROUNDS.items()}
    chosen = arguments.cases.split(";") if arguments.cases else [*COSTS, *GAINS]
    parts: Mapping[str, Callable[[], dict[str, Any]]] = {
        "costs": lambda: costs(_chosen(COSTS, chosen), rounds["costs"], arguments.steps),
        "gains": lambda: gains(_chosen(GAINS, chosen), rounds["gains"], arguments.steps),
        "healthy": lambda: healthy(rounds["healthy"], arguments.steps),
        **{part: lambda part=part: on_ranks(part, arguments.blocks) for part in MEASURES},
    }
    print(json.dumps({name: part() for name, part in parts.items() if arguments.only in (None, name)}, indent=1))


if __name__ == "__main__":
    main()

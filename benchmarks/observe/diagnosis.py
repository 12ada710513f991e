"""What ``unisono diagnose`` says of runs whose cause is known, and what accounting costs. Prints JSON.

    python -m benchmarks.observe.diagnosis [--rounds 5] [--steps 50] [--blocks 40] [--only costs]

costs     Steps are made slower by a known cause. A round is a run without it, then one with it (in turned order every other
          round). The true cost is the share by which the step is longer; the named cost is that of the finding.
gains     Runs with a cause, and the same with the settings that diagnosis proposes. The true gain is the share by which the
          step became shorter.
healthy   Runs of a GPT, a BERT and a ResNet on one and two processes, in which nothing is wrong: findings.
overhead  Steps with accounting and without it, in blocks that alternate in one process, and in two with collectives inside
          layers.
verification  Steps that are computed twice (observe.verify_every_steps) and others, in such blocks of one step; and what that
          costs at a cadence of EVERY_STEPS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.paired import ratio, spread
from benchmarks.step_time import alternate
from benchmarks.workload import run_config
from PIL import Image

from unisono.diagnose import Finding, diagnose, read_run
from unisono.dist import World, job_from_environ, join_world
from unisono.observe import meters
from unisono.observe.events import Event, EventLog, events_path, read_events
from unisono.parallel.traffic import Traffic
from unisono.train.build import build_data, build_trainer
from unisono.train.nonfinite_search import NonfiniteSearch
from unisono.train.setup import open_events, resolve_plan

ROOT = Path(__file__).resolve().parents[2]
SLOW_RUN = ROOT.joinpath(*["benchmarks", "observe", "slow_run"]).with_suffix(".py")
WARM_UP_STEPS = 10
EVERY_STEPS = 300  # from one verified step to the next
SAMPLES = 8
COMMON: Mapping[str, Any] = {
    "plan.device": "cpu",
    "plan.precision": "fp32",
    "plan.global_batch": SAMPLES,
    "data.seq_len": 128,
    "train.eval_every_steps": 0,
    "checkpoint.every_steps": 0,
    "observe.console": "plain",
    "observe.report": False,
    "launch.num_threads": 1,
}
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A cause in the runs of ``processes``: ``slower_s`` more in a step by code, on ``rank`` or on all, or by ``settings``."""

    rule: str
    cause: str = ""
    slower_s: float = 0.0
    rank: int = -1
    processes: int = 1
    settings: Settings = field(default_factory=dict[str, Any])
    without: Settings = field(default_factory=dict[str, Any])  # settings of the run that has no cause


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
}
GAINS: Mapping[str, Case] = {
    "slow loader": COSTS["slow loader, 1 process"],
    "synchronous saves": COSTS["synchronous saves"],
    "one micro-batch in a pipeline": Case(
        rule="PP01",
        processes=2,
        settings={"plan.pp": 2, "plan.micro_batch": SAMPLES, "model.dim": 256, "data.seq_len": 256},
    ),
}
HEALTHY: Mapping[str, Settings] = {
    "GPT": {"model.dim": 256, "data.seq_len": 256},
    "BERT": {"task.kind": "masked_language_model", "data.corpus": "texts", "model.dim": 256, "data.seq_len": 128},
    "ResNet-14": {
        "task.kind": "image",
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
    command = [sys.executable, "-m", "unisono", "train"]
    environ = dict(os.environ)
    if case is not None:
        command.append(str(SLOW_RUN))
        environ |= {"SLOW_CAUSE": case.cause, "SLOW_S": str(case.slower_s), "SLOW_RANK": str(case.rank)}
        environ["SLOW_SAMPLES"] = str(SAMPLES // processes)
    command += [f"--set={name}={_written(value)}" for name, value in changed.items()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder.parent)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return run_dir


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def step_s(run_dir: Path) -> float:
    """Mean seconds between steps after the warm-up, all that happened between them included."""
    events: Sequence[Event] = read_events(events_path(run_dir, 0)).events
    readings = [event for event in events if "time/window_s" in event and event["step"] > WARM_UP_STEPS]
    return (readings[-1]["m"] - readings[0]["m"]) / (readings[-1]["step"] - readings[0]["step"])


def found(run_dir: Path) -> dict[str, Finding]:
    """The findings of a run by rule."""
    return {finding.id: finding for finding in diagnose(read_run(run_dir))}


def costs(rounds: int, steps: int) -> dict[str, Any]:
    """By case: named cost / true cost, and how often the rule and the rank were named."""
    result: dict[str, Any] = {}
    for name, case in COSTS.items():
        named: list[float] = []
        true: list[float] = []
        right = 0
        for number in range(rounds):
            run_dirs: dict[str, Path] = {}
            with tempfile.TemporaryDirectory() as root:
                for side in ("with", "without")[:: 1 if number % 2 else -1]:
                    one = case if side == "with" else Case(rule=case.rule)
                    settings = {**case.settings, **(case.without if side == "without" else {})}
                    folder = Path(root, side)
                    folder.mkdir()
                    run_dirs[side] = train(folder, settings, processes=case.processes, steps=steps, case=one)
                finding = found(run_dirs["with"]).get(case.rule)
                is_right = finding is not None and finding.ranks == (() if case.rank < 0 else (case.rank,))
                right += is_right
                named.append(finding.cost_frac if finding is not None else 0.0)
                true.append(1 - step_s(run_dirs["without"]) / step_s(run_dirs["with"]))
        result[name] = {
            "rule": case.rule,
            "right": right,
            "rounds": rounds,
            "true_cost": spread(true),
            "named_over_true": ratio(named, true),
        }
        print(f"costs: {name}", file=sys.stderr)
    return result


def gains(rounds: int, steps: int) -> dict[str, Any]:
    """By case: true gain / expected gain of the settings that diagnosis proposes."""
    result: dict[str, Any] = {}
    for name, case in GAINS.items():
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
                true.append(1 - step_s(after) / step_s(before))
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


# --- overhead --------------------------------------------------------------------------------------------------------

OVERHEAD: Mapping[str, tuple[int, Settings]] = {
    "1 process": (1, {}),
    "2 processes": (2, {}),
    "2 processes, tp=2": (2, {"plan.tp": 2}),
    "2 processes, dp_shard=2": (2, {"plan.dp_shard": 2}),
}


@contextlib.contextmanager
def _trainer(settings: Settings, steps: int, folder: Path, world: World) -> Iterator[Any]:
    changed = {**COMMON, **settings, "train.steps": steps, "run.dir": str(folder), "observe.console": "off"}
    config = run_config([f"{name}={_written(value)}" for name, value in changed.items()])
    with open_events(folder, world) as events:
        plan = resolve_plan(config.plan, world.job)[1]
        with build_trainer(config, build_data(config), plan, world=world, events=events, provenance={}) as trainer:
            yield trainer


def measure_overhead(settings: Settings, blocks: int, folder: Path, world: World) -> dict[str, Any]:
    """Time of steps with accounting / without it: phases, traffic, what a search for NaN keeps, events."""
    always_on: list[tuple[Any, str]] = [
        (meters._Phase, "__enter__"),
        (meters._Phase, "__exit__"),
        (Traffic, "sums"),
        (Traffic, "parts"),
        (Traffic, "scattered_sums"),
        (Traffic, "message"),
        (NonfiniteSearch, "remember"),
        (EventLog, "emit"),
    ]
    accounting = [getattr(owner, name) for owner, name in always_on]

    def nothing(*_: object, **options: object) -> None:
        pass

    def set_to(functions: Sequence[Any]) -> None:
        for (owner, name), function in zip(always_on, functions, strict=True):
            setattr(owner, name, function)

    steps_per_block = 4
    with _trainer(settings, 2 * blocks * steps_per_block + 20, folder, world) as trainer:
        steps = iter(trainer)
        for _ in range(10):
            next(steps)

        def with_accounting() -> None:
            set_to(accounting)
            next(steps)

        def without() -> None:
            set_to([nothing] * len(always_on))
            next(steps)

        times = alternate(with_accounting, without, blocks, steps_per_block)
        set_to(accounting)
    mine, other = times["mine"], times["other"]
    return {
        "wall": ratio(mine[:, 0].tolist(), other[:, 0].tolist()),
        "cpu": ratio(mine[:, 1].tolist(), other[:, 1].tolist()),
    }


def measure_verification(settings: Settings, blocks: int, folder: Path, world: World) -> dict[str, Any]:
    """Time of a verified step / another, and of steps at the cadence / without."""
    # a cadence that never comes: the blocks choose
    settings = {**settings, "observe.verify_every_steps": 10**9}
    with _trainer(settings, 2 * blocks + 20, folder, world) as trainer:
        verifier: Any = trainer._loop.runner.verifier
        verifier.is_due = lambda step: False
        steps = iter(trainer)
        for _ in range(10):
            next(steps)

        def verified() -> None:
            verifier.digests.note(verifier.digests.take())  # at the end of the step before, in a run
            verifier.is_due = lambda step: step == trainer.state.step + 1
            next(steps)
            verifier.is_due = lambda step: False

        times = alternate(verified, lambda: next(steps), blocks, 1)
    measured: dict[str, Any] = {"single": {}, "at_cadence": {}}
    for column, clock in enumerate(("wall", "cpu")):
        mine, other = times["mine"][:, column], times["other"][:, column]
        measured["single"][clock] = ratio(mine.tolist(), other.tolist())
        spread_out = other + (mine - other) / EVERY_STEPS
        measured["at_cadence"][clock] = ratio(spread_out.tolist(), other.tolist())
    return measured


MEASURES = {"overhead": measure_overhead, "verification": measure_verification}


def on_ranks(part: str, blocks: int) -> dict[str, Any]:
    """By case, as rank 0 measured it."""
    result: dict[str, Any] = {}
    for name, (processes, _) in OVERHEAD.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command += [
                "-m",
                "benchmarks.observe.diagnosis",
                "--rank-of",
                part,
                name,
                "--blocks",
                str(blocks),
                "--folder",
                folder,
            ]
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)
            result[name] = json.loads(Path(folder, "result.json").read_text())
        print(f"{part}: {name}", file=sys.stderr)
    return result


def on_rank(part: str, name: str, blocks: int, folder: Path) -> None:
    """One rank of ``on_ranks``; rank 0 writes the result."""
    _, settings = OVERHEAD[name]
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        measured = MEASURES[part](settings, blocks, folder / "run", world)
        if world.rank == 0:
            (folder / "result.json").write_text(json.dumps(measured))
    finally:
        world.close()


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="of a run")
    parser.add_argument("--blocks", type=int, default=40, help="of each side, for the overhead")
    parser.add_argument("--only", choices=("costs", "gains", "healthy", *MEASURES))
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        on_rank(*arguments.rank_of, arguments.blocks, arguments.folder)
        return
    parts: Mapping[str, Callable[[], dict[str, Any]]] = {
        "costs": lambda: costs(arguments.rounds, arguments.steps),
        "gains": lambda: gains(arguments.rounds, arguments.steps),
        "healthy": lambda: healthy(max(1, arguments.rounds // 2), arguments.steps),
        **{part: lambda part=part: on_ranks(part, arguments.blocks) for part in MEASURES},
    }
    print(json.dumps({name: part() for name, part in parts.items() if arguments.only in (None, name)}, indent=1))


if __name__ == "__main__":
    main()

"""What accounting and verification cost: steps with and without, in blocks that alternate in each rank of one run.

``on_ranks`` starts this module under torchrun, and rank 0 writes the result.

Without accounting nothing measures phases, speed, memory, garbage collections and exposed communication, and nothing counts
bytes; no event is written, no batch is remembered for a search for NaN, and no request for a profile is looked for; the
monitor's thread and the watchdog's stand still. The numbers of a step are still read from its tensors, as a loop does that
prints its loss. What cannot be left out of a step, and is on both sides:

- the loader's readings of the clock, five for a micro-batch, and those that surround a step;
- a look-up of a context variable at each collective;
- what the sum of the losses carries for accounting: units, the losses of this rank, whether a profile was requested.

No console, tracker or report is attached. The monitor, the watchdog and the ``links`` events, which work once in ten seconds,
once in a second and once in a hundred steps, would be in few blocks, of which a median takes no notice: their time is measured
alone and spread over all steps with accounting. What falls due in a block without accounting is made up for in the next.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.observe.short_run import COMMON, Settings, overrides
from benchmarks.paired import ratio
from benchmarks.step_time import alternate
from benchmarks.workload import run_config

from unisono.data.loading import batch_builder, loader
from unisono.data.loading.batch_builder import StageTimes
from unisono.dist import World, job_from_environ, join_world
from unisono.dist.watchdog import Watchdog
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.observe import meters
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter
from unisono.observe.system_monitor import SystemMonitor
from unisono.train import loop
from unisono.train.build import build_data, build_trainer
from unisono.train.comm_stats import CommStats
from unisono.train.metrics_reader import MetricsReader
from unisono.train.nonfinite_search import NonfiniteSearch
from unisono.train.profiling import ProfileScheduler
from unisono.train.setup import open_events, resolve_plan
from unisono.train.step import Step

WARM_UP_STEPS = 10
STEPS_PER_BLOCK = 4
EVERY_STEPS = 300  # from one verified step to the next
# what accounting takes does not grow with the model: of the demo's steps of some 10 ms it is a larger share than of others
_WIDE: Settings = {"model.dim": 256, "data.seq_len": 256}
CASES: Mapping[str, tuple[int, Settings]] = {
    "1 process": (1, {}),
    "2 processes": (2, {}),
    "2 processes, tp=2": (2, {"plan.tp": 2}),
    "2 processes, dp_shard=2": (2, {"plan.dp_shard": 2}),
    "256 wide, 1 process": (1, _WIDE),
    "256 wide, 2 processes": (2, _WIDE),
    "256 wide, 2 processes, dp_shard=2": (2, {**_WIDE, "plan.dp_shard": 2}),
}


# --- accounting ------------------------------------------------------------------------------------------------------


def _nothing(*_: object, **options: object) -> None:
    pass


def _no_context(*_: object, **options: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _read_alone(reader: MetricsReader, step: Step) -> None:
    step.stats.tolist()


# what is called on the training thread and on those of the loader, and what takes its place
CALLED: Sequence[tuple[Any, str, Callable[..., Any]]] = (
    (meters._Phase, "__enter__", _nothing),
    (meters._Phase, "__exit__", _nothing),
    (RateMeter, "paused", _no_context),
    (loop, "recording_exposed_time", _no_context),  # outside of it no collective is timed, and no bytes are counted
    (BucketedAllReduce, "_count", _nothing),
    (CommStats, "sampling", _no_context),
    (StageTimes, "add", _nothing),
    (batch_builder, "note_progress", _nothing),
    (loader, "note_progress", _nothing),
    (NonfiniteSearch, "remember", _nothing),
    (ProfileScheduler, "is_requested", _nothing),
    (MetricsReader, "add", _read_alone),  # readings: windows, rates, memory, traffic; their events
    (EventLog, "emit", _nothing),
)
# the first thing that a thread does when it wakes up
WATCHING: Sequence[tuple[Any, str]] = ((SystemMonitor, "_sample"), (Watchdog, "_steps"))
WATCHING_THREADS = ("unisono-monitor", "unisono-watchdog")


class Accounting:
    """Everything of a trainer that is always on: left out, and put back, between two steps; and its rare parts timed."""

    def __init__(self, trainer: Any) -> None:
        self._called = [(owner, name, getattr(owner, name), other) for owner, name, other in CALLED]
        self._watching = [(owner, name, getattr(owner, name)) for owner, name in WATCHING]
        self._garbage_callback = trainer._loop.runner.metrics_reader.garbage_timer._observe
        self._is_on, self._may_watch = True, threading.Event()
        self._links_s = 0.0
        self._emit_links = CommStats.emit

    def __enter__(self) -> Accounting:
        self._may_watch.set()
        for owner, name, function in self._watching:
            setattr(owner, name, self._when_allowed(function))
        CommStats.emit = self._timed(CommStats.emit)
        self._began_s = self._rare_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.switch(on=True)
        for owner, name, function in self._watching:
            setattr(owner, name, function)
        CommStats.emit = self._emit_links

    def switch(self, *, on: bool) -> None:
        """Put accounting back, or leave it out."""
        if on == self._is_on:
            return
        self._is_on = on
        for owner, name, function, other in self._called:
            setattr(owner, name, function if on else other)
        if on:
            gc.callbacks.append(self._garbage_callback)
            self._may_watch.set()
        else:
            gc.callbacks.remove(self._garbage_callback)
            self._may_watch.clear()

    def rare_s(self) -> float:
        """Seconds of ``links`` events, and processor seconds of the threads that watch, since it was entered."""
        return self._rare_s() - self._began_s

    def _rare_s(self) -> float:
        threads = [thread for thread in threading.enumerate() if thread.name in WATCHING_THREADS]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
        return self._links_s + sum(map(time.clock_gettime, clocks))

    def _when_allowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any) -> Any:
            self._may_watch.wait()
            return function(*arguments)

        return watch

    def _timed(self, function: Callable[[CommStats], None]) -> Callable[[CommStats], None]:
        def emit(stats: CommStats) -> None:
            begin_s = time.perf_counter()
            function(stats)
            self._links_s += time.perf_counter() - begin_s

        return emit


def measure_overhead(settings: Settings, blocks: int, folder: Path, world: World) -> dict[str, Any]:
    """Time of steps with accounting / without it; ``rare_frac`` is the part of a step in it that few blocks have."""
    with _trainer(settings, 2 * blocks * STEPS_PER_BLOCK + 20, folder, world) as trainer:
        steps = iter(trainer)
        for _ in range(WARM_UP_STEPS):
            next(steps)
        with Accounting(trainer) as accounting:

            def step(*, on: bool) -> None:
                accounting.switch(on=on)
                next(steps)

            times = alternate(lambda: step(on=True), lambda: step(on=False), blocks, STEPS_PER_BLOCK)
            rare_s = accounting.rare_s() / (blocks * STEPS_PER_BLOCK)
    mine, other = times["mine"] + rare_s, times["other"]
    return {
        "wall": ratio(mine[:, 0].tolist(), other[:, 0].tolist()),
        "cpu": ratio(mine[:, 1].tolist(), other[:, 1].tolist()),
        "rare_frac": rare_s / statistics.median(other[:, 0].tolist()),
        "step_s": statistics.median(other[:, 0].tolist()),
        "added_s": statistics.median((mine - other)[:, 0].tolist()),
    }


# --- verification ----------------------------------------------------------------------------------------------------


def measure_verification(settings: Settings, blocks: int, folder: Path, world: World) -> dict[str, Any]:
    """Time of a verified step / another, and of steps at the cadence / without."""
    # a cadence that never comes: the blocks choose
    settings = {**settings, "observe.verify_every_steps": 10**9}
    with _trainer(settings, 2 * blocks + 20, folder, world) as trainer:
        verifier: Any = trainer._loop.runner.verifier
        verifier.is_due = lambda step: False
        steps = iter(trainer)
        for _ in range(WARM_UP_STEPS):
            next(steps)

        def verified() -> None:
            verifier.digests.record(verifier.digests.take())  # at the end of the step before, in a run
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


# --- processes -------------------------------------------------------------------------------------------------------

MEASURES = {"overhead": measure_overhead, "verification": measure_verification}


@contextlib.contextmanager
def _trainer(settings: Settings, steps: int, folder: Path, world: World) -> Generator[Any]:
    changed = {**COMMON, **settings, "train.steps": steps, "run.dir": str(folder), "observe.console": "off"}
    config = run_config(overrides(changed))
    with open_events(folder, world) as events:
        plan = resolve_plan(config.plan, world.job)[1]
        with build_trainer(config, build_data(config), plan, world=world, events=events, provenance={}) as trainer:
            yield trainer


def on_ranks(part: str, blocks: int) -> dict[str, Any]:
    """By case, as rank 0 measured it."""
    result: dict[str, Any] = {}
    for name, (processes, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command += ["-m", "benchmarks.observe.overhead", part, name, str(blocks), folder]
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)
            result[name] = json.loads(Path(folder, "result.json").read_text())
        print(f"{part}: {name}", file=sys.stderr)
    return result


def main() -> None:
    """Be one rank of a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=MEASURES)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("blocks", type=int)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    _, settings = CASES[arguments.name]
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        measured = MEASURES[arguments.part](settings, arguments.blocks, arguments.folder / "run", world)
        if world.rank == 0:
            (arguments.folder / "result.json").write_text(json.dumps(measured))
    finally:
        world.close()


if __name__ == "__main__":
    main()

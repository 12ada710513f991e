"""Who makes a batch changes nothing: threads, processes, any number of them, dying, tuned, left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import samples
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unisono.config import check_options
from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.loader import Loader
from unisono.data.loading.subprocess_map import subprocess_map
from unisono.data.loading.worker_pool import FunctionWorker, WorkerPool, usable_cores
from unisono.data.loading.worker_tuning import WorkerSetting, WorkerTuner
from unisono.data.options import LoaderOptions
from unisono.errors import ConfigError, DataError


def loader(
    data: Any, *, seed: int = 5, rank: int = 0, world_size: int = 1, shuffle: bool = True, **options: Any
) -> Loader:
    given = {
        name: options.pop(name)
        for name in ("transform", "pair_transform", "batch_transform", "micro_batch", "global_batch", "prefetch_depth")
        if name in options
    }
    return Loader(
        data,
        **{
            "seed": seed,
            "global_batch": 12,
            "micro_batch": 5,
            "rank": rank,
            "world_size": world_size,
            "shuffle": shuffle,
            **given,
        },
        options=LoaderOptions(**{"num_workers": 1, "worker_kind": "thread", **options}),
    )


def rows(batches: Any) -> list[dict[str, list[Any]]]:
    return [
        {name: tensor.tolist() for name, tensor in part.items()} for batch in batches for part in batch.micro_batches
    ]


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("last_batch", ["keep", "pad"])
def test_every_kind_and_number_of_workers_makes_the_same_batches(kind: str, workers: int, last_batch: str) -> None:
    recipe = {"transform": samples.noise, "batch_transform": samples.doubled, "last_batch": last_batch}
    alone = rows(loader(samples.Rows(29), num_workers=0, **recipe).iterate(0, 7))
    with loader(samples.Rows(29), worker_kind=kind, num_workers=workers, prefetch_depth=4, **recipe) as one:
        assert rows(one.iterate(0, 7)) == alone
        assert rows(one.iterate(3, 7)) == rows(loader(samples.Rows(29), num_workers=0, **recipe).iterate(3, 7))
    if last_batch == "pad":
        assert [w for part in alone for w in part["weights"]] == (([1.0] * 29 + [0.0] * 7) * 3)[:84]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("last_batch", ["rollover", "keep", "drop", "pad", "wrap"])
def test_mixing_pairs_is_the_same_on_any_number_of_ranks(world: int, last_batch: str) -> None:
    def step(world: int, number: int, micro_batch: int) -> list[tuple[int, list[float]]]:
        found = []
        for rank in range(world):
            one = loader(
                samples.Rows(27), world_size=world, rank=rank, micro_batch=micro_batch, global_batch=11,
                pair_transform=samples.blend, last_batch=last_batch,
            )  # fmt: skip
            for part in one.batch(number).micro_batches:
                found += list(zip(part["x"].tolist(), part["row"].tolist(), strict=True))
        return found

    for number in (0, 1, 2, 10**9):
        alone = step(1, number, 100)
        assert step(world, number, 3) == alone
        mixed = [row[0] for x, row in alone]
        assert mixed[0] == -mixed[1], "both members of a pair see the same draw"
        assert mixed[0] != alone[0][0]


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    once = tmp_path / "killed"
    expected = rows(loader(samples.Rows(40), num_workers=0).iterate(0, 4))
    with loader(samples.Rows(40, deadly=7, once=once), worker_kind="process", num_workers=2) as one:
        assert rows(one.iterate(0, 4)) == expected
    assert once.exists(), "it was killed, once"


ECHO = """
import sys
from multiprocessing.connection import Connection
from unisono.data.loading.subprocess_map import serve_requests

serve_requests(Connection(int(sys.argv[-1])), bytes.upper)
"""


def test_processes_start_only_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def counted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", counted)
    requests = [(number, f"request {number}".encode()) for number in range(2)]
    command = [sys.executable, "-c", ECHO]
    found = list(
        subprocess_map(requests, command, workers=8, ahead=2, ended=lambda tag, code: DataError("", "", "", ""))
    )
    assert found == [(number, f"REQUEST {number}".encode()) for number in range(2)]
    assert 1 <= len(started) <= 2
    assert all(process.poll() is not None for process in started)


def test_a_sample_that_kills_every_worker_is_named() -> None:
    with (
        loader(samples.Rows(40, deadly=7), worker_kind="process", shuffle=False) as one,
        pytest.raises(DataError) as caught,
    ):
        list(one.iterate(0, 4))
    assert str(caught.value) == (
        "the worker process that read sample 5 of step 0 was killed by SIGKILL, 3 times\n"
        "  rule: a worker that dies is started again with the same samples, twice at most\n"
        "  so:   step 0 cannot run\n"
        "  try:  SIGKILL often means no memory: fewer loader.num_workers; or loader.worker_kind thread to see it happen"
    )


def seen_by_workers(transform: Any, data: Any = None, workers: int = 3) -> dict[int, Any]:
    """What ``transform`` added under ``seen``, by the worker process that ran it."""
    with loader(
        samples.Rows(600) if data is None else data, worker_kind="process", num_workers=workers, transform=transform
    ) as one:
        parts = [part for batch in one.iterate(0, 40) for part in batch.micro_batches]
    return {int(pid): seen.tolist() for part in parts for pid, seen in zip(part["process"], part["seen"], strict=True)}


def test_the_first_worker_forks_the_others_with_seeds_of_their_own() -> None:
    found = seen_by_workers(samples.process_tree)
    assert len(found) > 1, "one worker made every batch"
    parents = {parent for parent, *_ in found.values()}
    assert parents <= {os.getpid(), *found}, "each is a child of this process or of a worker"
    assert parents - {os.getpid()}, "no worker was forked"
    for draws in zip(*(draws for _, *draws in found.values()), strict=True):
        assert len(set(draws)) == len(draws), "two workers have the same global generator"


@pytest.mark.parametrize("data", [samples.WithOpenFile(600), samples.WithThread(600)])
def test_what_cannot_be_forked_is_started_by_itself(data: Any) -> None:
    found = seen_by_workers(samples.process_tree, data)
    assert len(found) > 1, "one worker made every batch"
    assert {parent for parent, *_ in found.values()} == {os.getpid()}


def test_a_fork_that_is_killed_is_started_again() -> None:
    """Any worker may die, also the one that forked the others; the batches stay the same."""
    me = psutil.Process()
    others = {child.pid for child in me.children(recursive=True)}
    expected = rows(loader(samples.Rows(600), num_workers=0).iterate(0, 40))
    with loader(samples.Rows(600), worker_kind="process", num_workers=3) as one:
        steps = one.iterate(0, 40)
        found = rows(next(steps) for _ in range(10))
        first = next(child for child in me.children() if child.pid not in others)
        forks = first.children()
        assert len(forks) == 2
        forks[0].kill()
        found += rows(next(steps) for _ in range(10))
        first.kill()
        found += rows(steps)
    assert found == expected


def test_an_error_in_a_process_has_its_sample_and_its_traceback() -> None:
    with loader(samples.Rows(40, rotten=(7,)), worker_kind="process", shuffle=False) as one:
        with pytest.raises(
            DataError, match="reading sample 7 of step 0 failed with ValueError: sample 7 is rotten"
        ) as caught:
            list(one.iterate(0, 4))
        assert "in read\n    raise ValueError" in caught.value.__notes__[0]
        assert rows(one.iterate(1, 2)) == rows(loader(samples.Rows(40), num_workers=0, shuffle=False).iterate(1, 2))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_transform_that_returns_no_numbers_is_an_error_of_the_data(kind: str) -> None:
    with (
        loader(samples.Rows(40), worker_kind=kind, batch_transform=samples.as_text) as one,
        pytest.raises(DataError, match=r"'x' of dtype <U\d+\n  rule: batches hold numbers"),
    ):
        next(one.iterate(0, 1))


def test_what_a_process_cannot_import_is_refused_at_once() -> None:
    with (
        loader(samples.Rows(40), worker_kind="process", transform=lambda s, rng: s) as one,
        pytest.raises(DataError) as caught,
    ):
        next(one.iterate(0, 1))
    text = str(caught.value)
    assert "they are pickled to reach a process" in text
    assert "no worker process was started" in text
    assert "define what is passed at the top of a module" in text


def test_what_a_process_cannot_load_is_told() -> None:
    with loader(samples.Unloadable(40), worker_kind="process") as one, pytest.raises(DataError) as caught:
        next(one.iterate(0, 1))
    assert str(caught.value) == (
        "data set or transform: FileNotFoundError: no such file there\n"
        "  rule: a worker process must be able to load them\n"
        "  so:   no worker process was started\n"
        "  try:  define what is passed at the top of a module that the program imports; or loader.worker_kind thread"
    )


def test_what_the_program_itself_defines_is_refused_and_its_name_in_data_is_not(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import samples\n"
        "from unisono.data import Loader, LoaderOptions, from_map_style\n"
        "def own(sample, rng):\n"
        "    return sample\n"
        "rows = [{'x': i, 'text': list(b'if __name__ == \"__main__\":')} for i in range(8)]\n"
        "for transform in (samples.noise, own):\n"
        "    options = LoaderOptions(worker_kind='process', num_workers=1)\n"
        "    with Loader(from_map_style(rows), seed=0, global_batch=4, transform=transform, options=options) as one:\n"
        "        try:\n"
        "            print(sorted(next(iter(one))))\n"
        "        except Exception as error:\n"
        "            print(error)\n"
    )
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines()[:3] == [
        "['noise', 'text', 'x']",
        "own, which is defined in the program or notebook itself",
        "  rule: a worker process imports modules and never runs the program or its cells again",
    ]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_stuck_sample_is_named(kind: str) -> None:
    one = loader(
        samples.Rows(40, sleepy=7), worker_kind=kind, transform=samples.noise, shuffle=False, timeout_s=3, micro_batch=1
    )
    with pytest.raises(DataError) as caught:
        list(one.iterate(0, 4))
    assert str(caught.value) == (
        "sample 7 of step 0: no answer in 3 s\n"
        "  rule: reading a step's samples ends within loader.timeout_s\n"
        "  so:   step 0 cannot run\n"
        "  try:  look at that sample and the storage it is on; a larger loader.timeout_s"
    )


@pytest.mark.parametrize("transform", [None, samples.noise])
@pytest.mark.parametrize("world", [1, 3])
def test_a_skipped_sample_keeps_its_place_and_weighs_nothing(transform: Any, world: int) -> None:
    rotten = (3, 4, 20)
    for number in range(4):
        clean = loader(samples.Rows(30), transform=transform).batch(number)
        ids, weights, skipped, kept = [], [], [], {}
        for rank in range(world):
            one = loader(
                samples.Rows(30, rotten=rotten),
                transform=transform,
                max_bad_sample_frac=0.2,
                rank=rank,
                world_size=world,
            )
            batch = one.batch(number)
            ids += batch.sample_ids.tolist()
            skipped += batch.skipped_ids
            weights += [w for part in batch.micro_batches for w in part["weights"].tolist()]
            kept |= {
                x: row
                for part in batch.micro_batches
                for x, row in zip(part["x"].tolist(), part["row"].tolist(), strict=True)
            }
        assert ids == clean.sample_ids.tolist()
        assert skipped == [i for i in ids if i in rotten]
        assert weights == [float(i not in rotten) for i in ids]
        assert all(kept[i] == [i] * 3 for i in ids if i not in rotten)


def test_too_many_bad_samples_end_the_run() -> None:
    one = loader(samples.Rows(300, rotten=tuple(range(0, 300, 10))), max_bad_sample_frac=0.01)
    with pytest.raises(DataError, match=r"rule: at most 0.01 of the samples are skipped") as caught:
        list(one.iterate(0, 1000))
    assert "could not be read, at last [" in str(caught.value)
    with pytest.raises(DataError, match="reading sample 0 of step 0 failed"):
        loader(samples.Rows(3, rotten=(0, 1, 2)), max_bad_sample_frac=0.5, shuffle=False).batch(0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tuned(rate: Any, *, cores: int = 4, recipe: Any = None, **options: Any) -> WorkerTuner:
    """A tuner after a while in a world where ``rate(setting)`` says how many steps a second workers make; training makes 10."""
    clock = Clock()
    recipe = recipe or BatchBuilder(dataset=samples.Rows(5), seed=0)
    tuner = WorkerTuner(LoaderOptions(**options), limit=cores, about=recipe, clock=clock)
    for _ in range(2000):
        took = max(1 / 10, 1 / rate(tuner.setting))
        clock.now += took
        tuner.record_wait(took - 1 / 10)
    return tuner


def thread(n: int) -> WorkerSetting:
    return WorkerSetting(kind="thread", workers=n)


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tuning_adds_threads_while_they_help() -> None:
    assert tuned(lambda s: 3 * s.workers if s.kind == "thread" else 1).setting == thread(4)
    other = BatchBuilder(dataset=samples.Rows(6), seed=0)
    assert tuned(lambda s: 100, recipe=other).setting == thread(1), "nothing is tried while nobody waits"


def test_threads_that_wait_for_storage_may_be_many() -> None:
    assert tuned(lambda s: 0.4 * s.workers if s.kind == "thread" else 1, cores=2).setting == thread(16)


def test_tuning_turns_to_processes_where_threads_do_not_help() -> None:
    setting = tuned(lambda s: 2 if s.kind == "thread" else 2 * s.workers).setting
    assert setting == WorkerSetting(kind="process", workers=4)
    local = BatchBuilder(dataset=samples.Rows(5), seed=0, transform=lambda s, rng: s)
    assert tuned(lambda s: 2 if s.kind == "thread" else 2 * s.workers, recipe=local).setting == thread(1)


def quick(s: WorkerSetting) -> float:
    """Batches that take 0.1 ms to build, and 0.1 ms more from a worker."""
    return {("thread", 0): 10_000, ("thread", 1): 5000}.get((s.kind, s.workers), 4000)


def tuned_without_work(rate: Any, *, recipe: Any = None, **options: Any) -> tuple[WorkerTuner, list[WorkerSetting]]:
    """As ``tuned``, with training that does nothing but wait, and the settings that were used, in order."""
    clock = Clock()
    recipe = recipe or BatchBuilder(dataset=samples.Rows(5), seed=0)
    tuner = WorkerTuner(LoaderOptions(**options), limit=usable_cores(os.environ), about=recipe, clock=clock)
    used = [tuner.setting]
    for _ in range(50_000):
        clock.now += 1 / rate(tuner.setting)
        tuner.record_wait(1 / rate(tuner.setting))
        if tuner.setting != used[-1]:
            used.append(tuner.setting)
    return tuner, used


def test_batches_that_are_quicker_than_a_hand_over_are_built_by_the_consumer() -> None:
    assert tuned_without_work(quick)[1] == [thread(1), thread(0), thread(2), thread(0)], "a process is slower still"
    assert tuned_without_work(quick)[1] == [thread(0)], "remembered"
    assert tuned_without_work(quick, worker_kind="thread")[0].setting == thread(1), "threads were asked for"
    assert tuned_without_work(quick, num_workers=1)[0].setting.workers == 1, "a worker was asked for"
    other = BatchBuilder(dataset=samples.Rows(6), seed=0)
    assert thread(0) not in tuned_without_work(lambda s: quick(s) / 6, recipe=other)[1], "a step takes over 1 ms"
    other = BatchBuilder(dataset=samples.Rows(7), seed=0)
    assert tuned_without_work(lambda s: 2000 * (1 + s.workers), recipe=other)[0].setting.workers > 1


def test_no_worker_is_left_for_good_when_batches_become_slow() -> None:
    tuned_without_work(quick)
    slow_from, seen = 10_000, 0

    def world(s: WorkerSetting) -> float:
        nonlocal seen
        seen += 1
        return quick(s) if seen < slow_from else 100 * min(3, 1 + s.workers)

    tuner, used = tuned_without_work(world)
    assert used[:2] == [thread(0), thread(1)]
    assert tuner.setting == thread(2)
    assert used.count(thread(0)) == 1
    assert tuned_without_work(lambda s: 100)[1][0] == thread(2), "remembered"


def test_changing_workers_in_mid_run_changes_no_batch() -> None:
    settings = [thread(2), thread(0), WorkerSetting(kind="process", workers=1), thread(0), thread(1)]
    before = set(threading.enumerate())
    with loader(samples.Rows(29), num_workers=-1, worker_kind="auto", transform=samples.noise) as one:
        got: list[Any] = []
        for batch in one.iterate(0, 40):
            got.append(batch)
            one._tuner.setting = settings[batch.step // 8]
            added = [each for each in threading.enumerate() if each not in before and each.name == "unisono-loader"]
            if batch.step % 8 == 7:  # all that was built ahead with the previous setting has been used
                assert bool(added) == (one.worker_setting.workers > 0)
        assert [batch.step for batch in got] == list(range(40))
        assert rows(got) == rows(loader(samples.Rows(29), num_workers=0, transform=samples.noise).iterate(0, 40))


def test_data_that_turns_slow_is_read_ahead_again() -> None:
    """Real time: a remembered setting without workers, and samples that from step 5 on wait as for a disk."""
    recipe = BatchBuilder(dataset=samples.Rows(1000), seed=0, transform=slow_later)
    assert tuned_without_work(quick, recipe=recipe)[0].setting == thread(0)
    with loader(samples.Rows(1000), num_workers=-1, worker_kind="auto", transform=slow_later, shuffle=False) as one:
        got: list[Any] = []
        for batch in one.iterate(0, 60):
            got.append(batch)
            if one.worker_setting.workers and len(got) > 20:
                break
        assert one.worker_setting == thread(1)
        assert [batch.step for batch in got] == list(range(len(got)))
        assert rows(got) == rows(loader(samples.Rows(1000), num_workers=0, shuffle=False).iterate(0, len(got)))


def slow_later(sample: Any, rng: np.random.Generator) -> Any:
    if int(np.min(next(iter(sample.values())))) >= 60:
        time.sleep(0.003)
    return sample


@pytest.mark.parametrize("workers", [0, -1])
def test_an_error_without_workers_names_the_sample(workers: int) -> None:
    data = samples.Rows(30, rotten=(17,))
    tuned_without_work(quick, recipe=BatchBuilder(dataset=data, seed=0))
    with loader(data, num_workers=workers, worker_kind="auto", shuffle=False) as one:
        assert one.worker_setting == thread(0)
        steps = one.iterate(0, 4)
        assert next(steps).step == 0
        with pytest.raises(DataError, match="reading sample 17 of step 1 failed"):
            next(steps)


def test_a_notebook_gets_processes_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(setting: WorkerSetting) -> float:
        return 2 if setting.kind == "thread" else 2 * setting.workers

    assert tuned(rate).setting.kind == "process"  # and remembered
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert tuned(rate).setting == thread(1)
    assert tuned(rate, worker_kind="process").setting == WorkerSetting(kind="process", workers=4)


def test_what_was_found_is_where_the_next_run_starts() -> None:
    assert tuned(lambda s: 3 * s.workers if s.kind == "thread" else 1).setting == thread(4)
    recipe = BatchBuilder(dataset=samples.Rows(5), seed=0)
    assert WorkerTuner(LoaderOptions(), limit=4, about=recipe).setting == thread(4)
    assert WorkerTuner(LoaderOptions(num_workers=2), limit=4, about=recipe).setting.workers == 2, (
        "what is asked for goes first"
    )
    other = BatchBuilder(dataset=samples.Rows(6), seed=0)
    assert WorkerTuner(LoaderOptions(), limit=4, about=other).setting == thread(1)


def test_tuning_starts_wrong_and_ends_right() -> None:
    """Real threads: a transform that sleeps needs more than one of them to keep up, however busy the machine is."""

    def slow(sample: Any, rng: np.random.Generator) -> Any:
        time.sleep(0.01)
        return sample

    with loader(
        samples.Rows(1000), transform=slow, num_workers=-1, worker_kind="auto", micro_batch=2, global_batch=2
    ) as one:
        for _ in one.iterate(0, 1500):
            time.sleep(0.002)
            if one.worker_setting.workers >= 2:
                return
    raise AssertionError(f"still {one.worker_setting}")


def test_profiling_is_left_alone() -> None:
    def world(s: WorkerSetting) -> float:
        return 3 * s.workers

    with torch.profiler.profile():
        assert tuned(world).setting == thread(1)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_nothing_is_left_behind(kind: str) -> None:
    """Many epochs of a tiny set, iterators left early, loaders forgotten: no threads, processes, descriptors or memory."""
    me = psutil.Process()
    others = {child.pid for child in me.children(recursive=True)}  # earlier tests' pools

    def children() -> int:
        return sum(child.pid not in others for child in me.children(recursive=True))

    def use(epochs: int) -> None:
        one = loader(samples.Rows(4), worker_kind=kind, num_workers=2, global_batch=2, micro_batch=1)
        for _ in range(epochs):
            for _ in one:
                break
            for _ in one:
                pass
        del one
        gc.collect()

    def settled() -> tuple[int, int, int]:
        deadline = time.monotonic() + 20
        while children() and time.monotonic() < deadline:
            time.sleep(0.05)
        return me.num_threads(), me.num_fds(), children()

    def fits(now: tuple[int, int, int]) -> bool:
        return all(a <= b for a, b in zip(now, before, strict=True))  # an earlier test's stuck thread may end meanwhile

    use(20)
    before, memory = settled(), me.memory_info().rss
    use(5000 if kind == "thread" else 300)
    deadline = time.monotonic() + 20
    while not fits(settled()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fits(settled()), (settled(), before)
    assert me.memory_info().rss - memory < 20 << 20


def used_paths(process: psutil.Process) -> set[str]:
    """The paths of all files that a process has mapped or open."""
    opened = [os.path.realpath(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {*opened, *(map.path for map in process.memory_maps())}


def test_a_full_dev_shm_is_no_obstacle() -> None:
    """Worker processes hand arrays over in memory that has no name and no place in /dev/shm."""
    me = psutil.Process()
    others = {child.pid for child in me.children(recursive=True)}  # earlier tests' pools
    before = used_paths(me)  # an earlier test's cache or data set may still be mapped
    with loader(samples.Rows(40), worker_kind="process", num_workers=2) as one:
        for _ in one.iterate(0, 8):  # so many that each worker gets some
            pass
        processes = [me, *(child for child in me.children(recursive=True) if child.pid not in others)]
        assert len(processes) == 3
        paths = set[str]().union(*map(used_paths, processes))
    assert any("memfd:unisono-loader" in path for path in paths)
    assert not {path for path in paths - before if path.startswith("/dev/shm/")}


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, os, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import samples\n"
        "from unisono.data import Loader, LoaderOptions\n"
        "one = Loader(samples.Rows(40), seed=0, global_batch=4, options=LoaderOptions(worker_kind='process', num_workers=2))\n"
        "steps = one.iterate(0, 100)\n"
        "next(steps); next(steps)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert (len(gone), alive) == (2, [])


def test_a_fork_after_threads_reads_on() -> None:
    """A user's fork has none of our threads; its loader must not wait for them."""
    one = loader(samples.Rows(40), num_workers=2)
    expected = rows(one.iterate(0, 3))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if rows(one.iterate(0, 3)) == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    one.close()


def test_in_a_plain_loop_with_state() -> None:
    def loader_again() -> Loader:
        return Loader(samples.Rows(22), seed=1, global_batch=4, options=LoaderOptions(last_batch="keep"))

    one = loader_again()
    assert len(one) == 6
    epochs = [[batch["x"].tolist() for batch in one] for _ in range(2)]
    assert [sorted(x for xs in epoch for x in xs) for epoch in epochs] == [list(range(22))] * 2
    assert epochs[0] != epochs[1]
    assert one.state_dict() == {"step": 12}

    two = loader_again()
    two.load_state_dict({"step": 8})
    assert [batch["x"].tolist() for batch in two] == epochs[1][2:]
    for _ in two:
        break
    assert two.state_dict() == {"step": 12}, "a batch in whose body the loop was left comes again"


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    micro_batch=st.integers(1, 9),
    world=st.integers(2, 9),
    last_batch=st.sampled_from(["rollover", "keep", "drop", "pad", "wrap"]),
    start=st.integers(0, 10**7),
    workers=st.sampled_from([0, 1, 3]),
    transform=st.sampled_from([None, samples.noise]),
)
def test_ranks_together_see_the_single_process_batch(
    size: int,
    global_batch: int,
    micro_batch: int,
    world: int,
    last_batch: str,
    start: int,
    workers: int,
    transform: Any,
) -> None:
    assume(last_batch != "drop" or size >= global_batch)
    common = {"last_batch": last_batch, "transform": transform, "global_batch": global_batch}

    def steps(world: int, workers: int, micro_batch: int) -> list[list[tuple[Any, ...]]]:
        found: list[list[tuple[Any, ...]]] = [[] for _ in range(5)]
        for rank in range(world):
            with loader(
                samples.Rows(size), rank=rank, world_size=world, num_workers=workers, micro_batch=micro_batch, **common
            ) as one:
                for batch in one.iterate(start, start + 5):
                    for part in rows([batch]):
                        found[batch.step - start] += list(
                            zip(*(map(str, part[name]) for name in sorted(part)), strict=True)
                        )
        return found

    assert steps(world, workers, micro_batch) == steps(1, 0, 1000)


@pytest.mark.parametrize("last_batch", ["keep", "pad", "wrap"])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_epoch_visits_each_sample_once(last_batch: str, kind: str) -> None:
    with loader(samples.Rows(31), last_batch=last_batch, worker_kind=kind, num_workers=2, global_batch=7) as one:
        for epoch in range(3):
            seen: list[int] = []
            for batch in one.iterate(epoch * 5, epoch * 5 + 5):
                for part in rows([batch]):
                    weights = part.get("weights", [1.0] * len(part["x"]))
                    seen += [x for x, w in zip(part["x"], weights, strict=True) if w]
            assert sorted(seen[:31]) == list(range(31))
            assert len(seen) == (35 if last_batch == "wrap" else 31)


def test_torch_has_one_thread_in_a_worker_and_all_in_the_training() -> None:
    seen: list[tuple[str, int]] = []

    def look(sample: Any, rng: np.random.Generator) -> Any:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return sample

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with loader(samples.Rows(20), transform=look, num_workers=2) as one:
            list(one.iterate(0, 3))
            assert {threads for name, threads in seen if name == "unisono-loader"} == {1}
            assert torch.get_num_threads() == 3
            later: list[int] = []
            other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert later == [3]
    finally:
        torch.set_num_threads(before)


def test_workers_have_an_upper_bound_and_a_step_too() -> None:
    with pytest.raises(ConfigError, match=r"num_workers must be >= -1 and <= 1024"):
        check_options(LoaderOptions(num_workers=10**6))
    with pytest.raises(DataError) as caught:
        loader(samples.Rows(5), global_batch=10**12)
    (problem,) = caught.value.problems
    assert (problem.given, problem.rule) == ("global_batch 1000000000000", "a step has at most 67108864 samples")
    assert problem.nearest == "global_batch 5"


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def start_three(thread: threading.Thread) -> None:
        if thread.name == "limited":
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    pool: WorkerPool[int, int] = WorkerPool(lambda: FunctionWorker(lambda x: x), name="limited")
    with pytest.raises(DataError) as caught:
        pool.resize(5)
    assert caught.value.problems[0].given == "5 workers (limited): can't start new thread after 3"
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)


# --- times of stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers"), [("thread", 0), ("thread", 2), ("process", 1)])
@pytest.mark.parametrize(
    ("given", "least_s"),
    [
        ({}, (0.04, 0.0, 0.0)),
        ({"transform": samples.slow_transform}, (0.04, 0.08, 0.0)),
        ({"transform": samples.slow_transform, "collate_fn": samples.slow_collate}, (0.04, 0.08, 0.04)),
    ],
    ids=["read", "transform", "collate"],
)
def test_the_time_of_each_stage_is_known(
    kind: Any, workers: int, given: dict[str, Any], least_s: tuple[float, ...]
) -> None:
    """A step of two micro-batches of two samples: each is read at once, and transformed sample by sample."""
    options = LoaderOptions(num_workers=workers, worker_kind=kind)
    with Loader(samples.SlowRows(8), seed=1, global_batch=4, micro_batch=2, options=options, **given) as loading:
        for batch in loading.iterate(0, 2):
            stages = batch.stages
            found = stages.read_s, stages.transform_s, stages.collate_s
            assert all(value >= least for value, least in zip(found, least_s, strict=True)), found

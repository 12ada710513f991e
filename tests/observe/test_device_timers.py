"""Times of a device by events, against a device whose clock only the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import MS, FakeDevice, FakeStream, in_place_of_the_cpu
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.loading.loader import StepBatch, prefetch_to_device
from unisono.observe.meters import COMM_AXES, PHASES, EventMarks, StepTimers, TimeSplit
from unisono.parallel.timed_collectives import count_in_backward, recording_exposed_time, timed_wait
from unisono.train.setup import step_timers


def timers_of(device: FakeDevice) -> StepTimers:
    return StepTimers(marks=EventMarks(device.new_event, lambda: device.current))


def ms(split: TimeSplit) -> dict[str, float]:
    """The phases that took any time, in milliseconds."""
    return {name: round(1e3 * seconds, 6) for name, seconds in split.seconds.items() if seconds}


def test_a_phase_is_the_devices_time_and_not_that_of_its_launches() -> None:
    device = FakeDevice(launch_ms=1)
    timers = timers_of(device)
    timers.start()
    with timers.phase("forward"):
        device.launch(10)
    with timers.phase("backward"):
        device.launch(20)
    with timers.phase("optimizer"):
        device.launch(5)
    assert device.now_ns == 3 * MS  # the host is done long before the device
    device.current.synchronize()
    assert ms(timers.take()) == {"forward": 11, "backward": 20, "optimizer": 5}  # 1: the device had no work yet


def test_on_the_cpu_the_timers_are_the_hosts() -> None:
    with in_place_of_the_cpu(FakeDevice()):
        assert step_timers(torch.device("cpu"))._marks is not None
    assert step_timers(torch.device("cpu"))._marks is None


def test_communication_that_work_hides_is_not_exposed() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)

    def step(comm_ms: float) -> dict[str, float]:
        timers.start()
        side = FakeStream(device)
        with timers.phase("backward"):
            device.launch(2)
            side.wait_event(device.current.record_event())  # a gradient is there
            side.launch(comm_ms)
            reduced = side.record_event()
            device.launch(10)  # the rest of the backward pass
        with timers.comm_exposed("dp"):
            device.current.wait_event(reduced)
        with timers.phase("optimizer"):
            device.launch(1)
        device.current.synchronize()
        return ms(timers.take())

    assert step(10) == {"backward": 12, "optimizer": 1}
    assert step(14) == {"backward": 12, "comm_exposed": 4, "optimizer": 1}


def test_a_collective_inside_a_pass_is_exposed_by_its_axis() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    with recording_exposed_time(timers), timers.phase("forward"):
        device.launch(4)
        with timed_wait(None):
            device.launch(3)  # a collective that the next kernel waits for
        device.launch(5)
    device.current.synchronize()
    split = timers.take()
    assert ms(split) == {"forward": 9, "comm_exposed": 3}
    assert split.comm_exposed_s["dp"] == 0.003


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_collective_of_a_backward_pass_on_a_thread_of_its_own(is_announced: bool) -> None:
    """torch runs the nodes of an accelerator on a thread that it starts; here ``backward`` is called from another one."""
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    weight = torch.ones(2, requires_grad=True)

    def reduce(gradient: torch.Tensor) -> None:
        with timed_wait(None):
            device.launch(3)

    with recording_exposed_time(timers):
        scaled = weight * 2
        scaled.register_hook(reduce)
        loss = scaled.sum()
        if is_announced:
            count_in_backward(loss)
        with timers.phase("backward"):
            device.launch(5)
            in_a_thread(loss.backward)
    device.current.synchronize()
    assert ms(timers.take()) == ({"backward": 5, "comm_exposed": 3} if is_announced else {"backward": 8})
    # what the thread does later belongs to nobody
    assert weight.grad is not None
    reduce(weight.grad)
    device.current.synchronize()
    assert ms(timers.take()) == {"other": 3}


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_of_a_backward_pass_counts_no_longer_once_the_step_is_over() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    weight = torch.ones(2, requires_grad=True)
    with ThreadPoolExecutor(1) as pool:  # one thread, which keeps what the hook has set
        with recording_exposed_time(timers):
            loss = (weight * 2).sum()
            count_in_backward(loss)
            pool.submit(loss.backward).result()
        for _ in range(2):
            pool.submit(lambda: timed_wait(None).__enter__()).result()
    assert timers.take().seconds["comm_exposed"] == 0
    assert timers._current is timers._phases["other"]


def test_waiting_for_data_counts_where_the_device_has_nothing_to_do() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    for wait_ms in (6, 6, 25):
        with timers.phase("data_wait"):
            device.host(wait_ms)
        with timers.phase("forward"):
            device.launch(10)
    device.current.synchronize()
    # 6 before any work; 6 behind the 10 of it; 25, of which the 14 that are left of two times 10 hide some
    assert ms(timers.take()) == {"data_wait": 6 + 11, "forward": 30}


def test_reading_never_waits_and_loses_nothing() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    with timers.phase("forward"):
        device.launch(10)
    with timers.phase("backward"):
        device.launch(20)
    assert timers.take().wall_s == 0  # the device has come to nothing yet
    device.host(15)
    assert ms(timers.take()) == {"forward": 10}
    device.host(15)
    assert ms(timers.take()) == {"backward": 20}  # what follows came after the take before
    assert device.num_waits == 0
    device.host(5)
    assert ms(timers.take()) == {"other": 5}


def test_what_was_before_the_start_belongs_to_no_window() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    with timers.phase("eval"):
        device.launch(100)
    timers.start()
    with timers.phase("forward"):
        device.launch(1)
    device.current.synchronize()
    assert ms(timers.take()) == {"forward": 1}


def test_events_are_used_again() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    for step in range(200):
        for phase in ("data_wait", "forward", "backward", "optimizer"):
            with timers.phase(phase):
                device.launch(1)
        if step % 10 == 9:
            device.current.synchronize()
            assert timers.take().seconds["forward"] == pytest.approx(0.01)
    assert device.num_recorded > 1600
    assert device.num_events <= 90  # of ten steps


def test_events_are_used_again_where_nobody_reads() -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    for _ in range(500):
        with timers.phase("eval"):
            device.launch(1)
        device.host(1)
    assert device.num_events <= 10
    assert ms(timers.take())["eval"] == 500


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*PHASES, *(f"comm {axis}" for axis in COMM_AXES), "none"]),
            st.integers(0, 50),  # host ms
            st.integers(0, 50),  # device ms
            st.booleans(),  # whether the host waits for the device
            st.booleans(),  # whether the times are taken
        ),
        max_size=30,
    )
)
def test_the_phases_add_up_to_the_time_of_the_device(steps: list[tuple[str, int, int, bool, bool]]) -> None:
    device = FakeDevice(launch_ms=0)
    timers = timers_of(device)
    timers.start()
    wall_ns = 0
    for name, host_ms, device_ms, waits, takes in steps:
        _, _, axis = name.partition(" ")
        if name in ("none", "comm_exposed"):
            device.launch(device_ms, host_ms)
        else:
            with timers.comm_exposed(axis) if axis else timers.phase(name):
                device.launch(device_ms, host_ms)
        if waits:
            device.current.synchronize()
        if takes:
            wall_ns += nanoseconds(timers.take())
    device.current.synchronize()
    wall_ns += nanoseconds(timers.take())
    assert wall_ns == device.now_ns


def nanoseconds(split: TimeSplit) -> int:
    assert split.wall_s == sum(split.seconds.values())
    assert sum(split.comm_exposed_s.values()) == split.seconds["comm_exposed"]
    return sum(round(seconds * 1e9) for seconds in split.seconds.values())


@pytest.mark.parametrize("copy_ms", [8, 30])
def test_copies_of_batches_count_where_work_does_not_hide_them(copy_ms: int) -> None:
    device = FakeDevice(launch_ms=0, copy_ms=copy_ms)

    def batches() -> Generator[StepBatch]:
        for step in range(4):
            part: Any = {"inputs": torch.full((2,), float(step))}
            yield StepBatch(
                step=step,
                epoch=0,
                batch_shard=step,
                sample_ids=np.arange(2),
                micro_batches=[part],
                wait_s=0,
                skipped_ids=[],
            )

    with in_place_of_the_cpu(device):
        timers = step_timers(torch.device("cpu"))
        timers.start()
        prefetched = prefetch_to_device(batches(), torch.device("cpu"), lambda: timers.phase("h2d"))
        seen: list[float] = []
        for _ in range(4):
            with timers.phase("data_wait"):
                batch = next(prefetched)
            seen.append(float(batch.micro_batches[0]["inputs"][0]))
            with timers.phase("forward"):
                device.launch(10)
        device.current.synchronize()
        took = ms(timers.take())
    assert seen == [0, 1, 2, 3]
    # all copies are queued long before; the first has nothing to hide behind
    assert took == ({"h2d": 8, "forward": 40} if copy_ms == 8 else {"h2d": 30 * 4 - 30, "forward": 40})

"""Runs whose device is a fake one: tensors of the CPU, and events, memory and health of a device whose clock the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fake_device import GIB, FakeDevice, in_place_of_the_cpu
from procs import wait_until
from torch import Tensor, nn

from unisono import ObserveOptions
from unisono.device.health import DeviceHealth
from unisono.models.gpt import GPT
from unisono.observe.events import events_path, read_events
from unisono.observe.history import read_history
from unisono.observe.meters import PHASES
from unisono.train.loop_assembly import ACCELERATOR_READ_STEPS


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with in_place_of_the_cpu(FakeDevice(launch_ms=1)) as device:
        yield device


def working_on(device: FakeDevice, model: GPT) -> GPT:
    """``model``, whose forward pass takes 10 ms of the device and whose backward pass 20; the host needs 1 ms for each."""

    def before(module: nn.Module, inputs: object) -> None:
        device.launch(10)

    def after(module: nn.Module, inputs: object, output: Tensor) -> None:
        def backward(gradient: Tensor) -> None:
            device.launch(20)

        if output.requires_grad:
            output.register_hook(backward)

    model.register_forward_pre_hook(before)
    model.norm.register_forward_hook(after)
    return model


def test_the_split_of_a_run_is_that_of_its_device(tmp_path: Path, device: FakeDevice) -> None:
    tiny.complete(tmp_path, steps=30, network=working_on(device, tiny.model()))
    steps = [event for event in tiny.events(tmp_path) if event["kind"] == "step"]
    read = [event for event in steps if "time/window_s" in event]
    assert [event["step"] for event in read] == [10, 20, 30]
    for event in read:
        window_s = event["time/window_s"]
        took = {name: event[f"time/{name}_frac"] * window_s for name in ("forward", "backward", "other", "data_wait")}
        # 1 ms until the first launch has reached a device that has nothing to do; by the host's clock it were 10 and 10
        assert took == pytest.approx({"forward": 0.101, "backward": 0.2, "other": 0, "data_wait": 0}, abs=1e-9)
        assert window_s == pytest.approx(0.301, abs=1e-9)
        fractions = [value for name, value in event.items() if name in SPLIT]
        assert sum(fractions) == pytest.approx(1, abs=1e-12)
        assert event["mem/peak_bytes"] == 2 * GIB


SPLIT = {f"time/{phase}_frac" for phase in (*PHASES, "other")}


def test_between_two_readings_the_host_does_not_wait_for_the_device(tmp_path: Path, device: FakeDevice) -> None:
    with tiny.trainer(tmp_path, steps=25, network=working_on(device, tiny.model())) as run:
        waits = [device.num_waits for _ in run]
    assert waits == [step // ACCELERATOR_READ_STEPS for step in range(1, 25)] + [3]  # the last step is read too


def test_a_device_that_waits_for_the_loop_of_the_user(tmp_path: Path, device: FakeDevice) -> None:
    with tiny.trainer(tmp_path, steps=10, network=working_on(device, tiny.model())) as run:
        steps = iter(run)
        for _ in range(10):
            device.host(35)  # the loop's own work, which 30 ms of the device do not hide
            next(steps)
    (event,) = (event for event in tiny.events(tmp_path) if event["kind"] == "step" and "time/window_s" in event)
    idle_s = event["time/other_frac"] * event["time/window_s"]
    # before the first step nothing counts; then each time the device has work for 29 ms more when the host begins to wait
    assert idle_s == pytest.approx(9 * (35 - 29) / 1e3, abs=1e-9)


def test_memory_is_read_from_the_device_and_kept_in_the_history(tmp_path: Path, device: FakeDevice) -> None:
    with tiny.trainer(tmp_path, steps=20) as run:
        for step in run:
            if step.index == 12:
                device.alloc(3 * GIB)
                device.memory = replace(device.memory, num_alloc_retries=2)
    history = read_history(events_path(tmp_path, 0))
    for name, values in {
        "mem/now_bytes": [1, 4],
        "mem/peak_bytes": [2, 4],
        "mem/peak_reserved_bytes": [3, 4],
        "mem/limit_bytes": [8, 8],
    }.items():
        column = history.columns[name]
        assert [float(column[place]) / GIB for place in (9, 19)] == values, name
    assert [float(history.columns["mem/alloc_retries"][place]) for place in (9, 19)] == [0, 2]


def test_the_monitor_reads_the_state_of_the_device(tmp_path: Path, device: FakeDevice) -> None:
    device.health = DeviceHealth(util_frac=0.75, power_w=300.0, slowdowns=("power brake",), uncorrected_errors=0)
    observe = ObserveOptions(console="off", trackers=(), report=False, monitor_every_s=0.05)
    with tiny.trainer(tmp_path, steps=3, observe=observe) as run:
        for _ in run:
            pass

        def sampled() -> bool:
            return any(event["kind"] == "system" for event in read_events(events_path(tmp_path, 0)).events)

        wait_until(sampled, "a sample")
    samples = [event for event in tiny.events(tmp_path) if event["kind"] == "system"]
    told = {name: value for name, value in samples[0].items() if name.startswith("sys/device_")}
    assert told == {
        "sys/device_util_frac": 0.75,
        "sys/device_power_w": 300,
        "sys/device_throttled": 1,
        "sys/device_slowdowns": "power brake",
        "sys/device_uncorrected_errors": 0,
    }


def test_the_devices_generator_goes_on_after_a_resume(tmp_path: Path) -> None:
    def drawn(folder: Path, **options: Any) -> list[float]:
        device = FakeDevice()
        numbers: list[float] = []

        def draw(module: nn.Module, inputs: object) -> None:
            numbers.append(float(torch.rand((), generator=device.random)))

        model = tiny.model()
        model.register_forward_pre_hook(draw)
        with in_place_of_the_cpu(device):
            tiny.complete(folder, steps=6, network=model, **options)
        return numbers

    whole = drawn(tmp_path / "whole")
    first = drawn(tmp_path / "parts", stop_after=3)
    assert first + drawn(tmp_path / "parts") == whole
    assert len(set(whole)) == 6


class ReadOnce(tiny.RaggedTokens):
    """The targets of sample 5 are no numbers, and it can be read but once."""

    def __init__(self) -> None:
        super().__init__(samples=160, poison=5)
        self._was_read = False

    def read(self, indices: Any) -> Any:
        if 5 in indices:
            if self._was_read:
                raise OSError("the disk is gone")
            self._was_read = True
        return super().read(indices)


def test_a_search_whose_batch_cannot_be_read_again_does_not_end_the_run(tmp_path: Path, device: FakeDevice) -> None:
    end = tiny.complete(tmp_path, steps=20, data=ReadOnce(), num_workers=0)
    assert end["step"] == 20
    (event,) = (event for event in tiny.events(tmp_path) if event["kind"] == "nonfinite")
    assert event["reproduced"] is False
    assert "the disk is gone" in event["reason"]


def test_times_of_the_host_are_those_of_a_cpu(tmp_path: Path) -> None:
    began = time.perf_counter()
    tiny.complete(tmp_path, steps=3)
    took = time.perf_counter() - began
    steps = [event for event in tiny.events(tmp_path) if event["kind"] == "step"]
    assert all("time/window_s" in event for event in steps)  # each is read, as there is nothing to wait for
    assert 0 < sum(event["time/window_s"] for event in steps) < took

"""Every adapter keeps to the same rules, and the suite of rules finds what does not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import device_contract
import pytest
import torch
from device_contract import Case
from fake_device import MS, Entry, FakeDevice, FakeEvent, in_place_of_the_cpu, installed

from unisono.device.adapter import DeviceStreams
from unisono.device.health import DeviceHealth
from unisono.device.torch_adapters import adapter_for, adapter_of, present_adapter
from unisono.errors import PlanError
from unisono.parallel.device import find_device


def of_fake(device: FakeDevice, **changes: Any) -> Case:
    return Case(adapter=replace(device.adapter(), **changes), work=lambda: device.launch(3), allocate=device.alloc)


@pytest.fixture(params=["cpu", "fake", pytest.param("accelerator", marks=pytest.mark.gpu)])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "cpu":
        yield Case(adapter=adapter_for("cpu"), work=lambda: None, allocate=lambda size: None)
        return
    if request.param == "fake":
        yield of_fake(FakeDevice())
        return
    adapter = present_adapter()
    matrix = torch.ones(1024, 1024, device=adapter.name)
    yield Case(
        adapter=adapter,
        work=lambda: matrix @ matrix,
        allocate=lambda size: torch.empty(size, dtype=torch.uint8, device=adapter.name),
    )


def test_the_rules(case: Case) -> None:
    device_contract.check(case)


class Backwards(FakeEvent):
    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        return -super().elapsed_time(end_event)


class Once(FakeEvent):
    def record(self, stream: Any = None, /) -> None:
        if self.at_ns is None:
            super().record(stream)


class Early(FakeEvent):
    """Takes the host's time, as if the device worked at once."""

    def record(self, stream: Any = None, /) -> None:
        self.at_ns = self.device.now_ns


def with_events(device: FakeDevice, kind: type[FakeEvent]) -> Case:
    made = device.adapter().streams
    assert made is not None
    return of_fake(device, streams=DeviceStreams(current=made.current, new=made.new, new_event=lambda: kind(device)))


@pytest.mark.parametrize("kind", [Backwards, Once])
def test_events_that_break_the_rules(kind: type[FakeEvent]) -> None:
    with pytest.raises(AssertionError):
        device_contract.check(with_events(FakeDevice(), kind))


def test_an_event_of_the_hosts_clock_is_not_of_the_device() -> None:
    device = FakeDevice(launch_ms=0)
    with pytest.raises(AssertionError, match="work takes no time"):
        device_contract.check(with_events(device, Early))


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": None},
        {"count": lambda: 0},
        {"device_name": lambda index: ""},
        {"collective_backend": lambda: "pigeons"},
        {"memory": lambda index: FakeDevice().memory},
        {"health": lambda index: DeviceHealth(util_frac=55.0)},
        {"health": lambda index: {"util_frac": 0.5}},
        {"pci_address": lambda index: "bus 3"},
        {"fork_random": lambda index: contextlib.nullcontext()},
        {"kernel_errors": lambda lines: list(lines)},
    ],
    ids=lambda changes: "".join(changes),
)
def test_an_adapter_that_breaks_the_rules(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        device_contract.check(of_fake(FakeDevice(), **changes))


def test_an_installed_adapter_takes_the_place_of_a_built_in_one() -> None:
    device = FakeDevice()
    with in_place_of_the_cpu(device):
        adapter, index = adapter_of(torch.device("cpu"))
        assert (adapter.device_name(0), index) == ("Fake 1000", 0)
        assert present_adapter() is adapter
    assert adapter_for("cpu").streams is None


def test_a_device_that_torch_does_not_know_is_found_by_its_adapter() -> None:
    device = FakeDevice()
    with installed(Entry("npu", lambda: device.adapter("npu", count=2))):
        assert (present_adapter().name, present_adapter().count()) == ("npu", 2)
        with pytest.raises(PlanError, match="local rank 2"):
            find_device("npu", 2)
        with pytest.raises(PlanError, match="'npu' and the CPU"):
            find_device("xpu", 0)
        assert find_device("cpu", 0) == torch.device("cpu")
    with installed(Entry("npu", lambda: device.adapter("npu", count=0))):
        assert present_adapter().name == "cpu"


def test_adapters_that_cannot_be_used_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ImportError("no such driver")

    entries = Entry("npu", fails), Entry("xpu", lambda: "no adapter"), Entry("mps", FakeDevice().adapter)
    with caplog.at_level(logging.WARNING), installed(*entries):
        assert present_adapter().name == "cpu"
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "device npu of fake_package:adapter is left out: ImportError: no such driver",
        "device xpu of fake_package:adapter is left out: TypeError: it is not a DeviceAdapter of the name 'xpu'",
        "device mps of fake_package:adapter is left out: TypeError: it is not a DeviceAdapter of the name 'mps'",
    ]


def test_the_fake_device_works_behind_the_host() -> None:
    device = FakeDevice(launch_ms=1)
    device.launch(10)
    device.launch(10)
    assert device.now_ns == 2 * MS
    event = device.current.record_event()
    assert not event.query()
    event.synchronize()
    assert device.now_ns == 21 * MS  # the second began where the first ended

"""What every adapter of a device keeps to, built in or of another package: ``check(case)`` fails where one does not.

Adapters of other packages can be tested by it too; the rules are those of ``unisono.device.adapter``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from unisono.device.adapter import DeviceAdapter, DeviceMemory, DeviceStreams
from unisono.device.health import DeviceHealth


@dataclass(frozen=True, kw_only=True)
class Case:
    """An adapter, and how a test makes its device work.

    Attributes:
        adapter: The adapter.
        work: Launches some work on the stream that computes.
        allocate: Allocates so many bytes on the device; returns what keeps them.
    """

    adapter: DeviceAdapter
    work: Callable[[], object]
    allocate: Callable[[int], object]


def check(case: Case) -> None:
    """All rules."""
    adapter = case.adapter
    check_answers(adapter)
    check_health(adapter)
    if adapter.streams is None:
        assert adapter.memory(0) is None, "a device that does not work behind the host has its memory"
    else:
        check_events(case, adapter.streams)
        check_order_of_streams(case, adapter.streams)
        check_memory(case)
    check_random(adapter)


def check_answers(adapter: DeviceAdapter) -> None:
    assert re.fullmatch("[a-z]+", adapter.name)
    assert torch.ones(3, device=adapter.name).device.type == adapter.name
    assert adapter.count() >= 1
    for index in range(adapter.count()):
        assert adapter.device_name(index)
        assert re.fullmatch(r"|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", adapter.pci_address(index))
        adapter.set_current(index)
        adapter.synchronize(index)
    adapter.set_current(0)
    assert adapter.collective_backend() in ("gloo", "nccl", "xccl", "hccl", "ucc", "mpi")
    assert isinstance(adapter.computes_bf16(), bool)
    assert isinstance(adapter.computes_fp8(), bool)
    assert adapter.kernel_errors(["usb 1-1: new device", "", "NVRM: Xid"]) == []
    if adapter.reaches is not None and adapter.count() > 1:
        assert isinstance(adapter.reaches(0, 1), bool)


def check_health(adapter: DeviceAdapter) -> None:
    health = adapter.health(0)
    assert isinstance(health, DeviceHealth)
    figures = health.figures()
    assert all(type(value) is float for value in figures.values())
    assert 0 <= figures.get("util_frac", 0) <= 1
    assert figures.get("throttled", 0) in (0, 1)
    assert all(value >= 0 for name, value in figures.items() if name != "temperature_c")


def check_events(case: Case, streams: DeviceStreams) -> None:
    """Events take times in order, add up, and can be recorded again."""
    stream = streams.current(0)
    stream.synchronize()
    first, second, third = (streams.new_event() for _ in range(3))
    first.record(stream)
    case.work()
    second.record(stream)
    case.work()
    third.record(stream)
    third.synchronize()
    assert all(event.query() for event in (first, second, third)), "an event is behind one that the device has come to"
    parts = first.elapsed_time(second), second.elapsed_time(third)
    assert min(parts) > 0, "work takes no time"
    whole = first.elapsed_time(third)
    assert abs(sum(parts) - whole) <= 1e-3 + 1e-5 * whole, "times do not add up"
    case.work()
    first.record(stream)
    first.synchronize()
    assert third.elapsed_time(first) > 0, "an event that is recorded again keeps its old time"
    case.work()
    case.work()
    second.record(stream)
    stream.synchronize()
    assert second.query(), "the device has not come to an event of a stream that was waited for"


def check_order_of_streams(case: Case, streams: DeviceStreams) -> None:
    """What waits for an event of another stream comes after it."""
    current, side = streams.current(0), streams.new(0)
    before, after = streams.new_event(), streams.new_event()
    case.work()
    before.record(current)
    side.wait_event(before)
    after.record(side)
    after.synchronize()
    assert before.query(), "a stream did not wait for another's event"
    assert before.elapsed_time(after) >= 0
    with side:
        copied = side.record_event()
    current.wait_event(copied)
    current.synchronize()
    assert copied.query()


def check_memory(case: Case) -> None:
    size = 64 * 2**20
    before = _memory(case.adapter)
    kept = case.allocate(size)
    after = _memory(case.adapter)
    assert after.now_bytes >= before.now_bytes + size, "a tensor takes no memory"
    assert before.peak_bytes <= after.peak_bytes
    for memory in (before, after):
        assert 0 <= memory.now_bytes <= memory.peak_bytes <= memory.peak_reserved_bytes <= memory.limit_bytes
        assert 0 <= memory.free_bytes <= memory.limit_bytes
        assert memory.num_alloc_retries >= 0
    del kept


def _memory(adapter: DeviceAdapter) -> DeviceMemory:
    memory = adapter.memory(0)
    assert memory is not None
    return memory


def check_random(adapter: DeviceAdapter) -> None:
    """The states of generators come back."""
    host = torch.get_rng_state()
    state = None if adapter.random is None else adapter.random.state()
    with adapter.fork_random(0):
        torch.rand(3)
        torch.rand(3, device=adapter.name)
    assert torch.equal(host, torch.get_rng_state()), "a forked context leaves the CPU's generator changed"
    if adapter.random is not None and state is not None:
        assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
        assert torch.equal(adapter.random.state(), state), "a forked context leaves the device's generator changed"
        adapter.random.set_state(state)
        assert torch.equal(adapter.random.state(), state)

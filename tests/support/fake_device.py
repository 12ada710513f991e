"""A device that exists in tests alone: its adapter, with a clock that only the test moves.

The host launches work, which takes host time, and the device does it later, in order of each stream. Tensors are those of the
CPU. Events, memory and health are what the test says. ``installed`` puts it in the place of the CPU for a whole run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from unisono.device import torch_adapters
from unisono.device.adapter import ADAPTER_GROUP, DeviceAdapter, DeviceMemory, DeviceRandom, DeviceStreams
from unisono.device.health import DeviceHealth
from unisono.device.kernel_log import xid_errors

MS = 1_000_000
GIB = 2**30


@dataclass
class FakeEvent:
    """Takes the device's time when the work before it is done."""

    device: FakeDevice
    at_ns: int | None = None

    def record(self, stream: FakeStream | None = None, /) -> None:
        queue = self.device.current if stream is None else stream
        self.at_ns = max(self.device.now_ns, queue.done_ns)
        self.device.num_recorded += 1

    def query(self) -> bool:
        return self.at_ns is not None and self.at_ns <= self.device.now_ns

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("the device has not come to both events yet")  # as a real one says
        assert self.at_ns is not None
        assert end_event.at_ns is not None
        return (end_event.at_ns - self.at_ns) / MS

    def synchronize(self) -> None:
        assert self.at_ns is not None
        self.device.wait_until(self.at_ns)


@dataclass
class FakeStream:
    """A queue of work; ``done_ns`` is when the last of it will be done. Left after it was entered, it copies a batch."""

    device: FakeDevice
    done_ns: int = 0

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.launch(self.device.copy_ms, host_ms=0)

    def launch(self, device_ms: float, host_ms: float | None = None) -> None:
        """Queue work that takes ``device_ms``; the host needs ``host_ms`` for it (default: as the device says)."""
        self.device.host(self.device.launch_ms if host_ms is None else host_ms)
        self.done_ns = max(self.device.now_ns, self.done_ns) + round(device_ms * MS)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.device)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent, /) -> None:
        assert event.at_ns is not None
        self.done_ns = max(self.done_ns, event.at_ns)

    def synchronize(self) -> None:
        self.device.num_waits += 1
        self.device.wait_until(self.done_ns)


@dataclass
class FakeDevice:
    """The device, and the host's clock in nanoseconds.

    Attributes:
        launch_ms: Host time of a launch.
        copy_ms: Device time of the copy of a batch.
        num_waits: How often the host waited for a stream.
        num_recorded: Events recorded so far.
        num_events: Events made so far.
    """

    launch_ms: float = 1
    copy_ms: float = 0
    memory: DeviceMemory = DeviceMemory(
        now_bytes=GIB,
        peak_bytes=2 * GIB,
        peak_reserved_bytes=3 * GIB,
        limit_bytes=8 * GIB,
        free_bytes=8 * GIB,
        num_alloc_retries=0,
    )
    health: DeviceHealth | Exception = field(default_factory=DeviceHealth)
    now_ns: int = 0
    num_waits: int = 0
    num_recorded: int = 0
    num_events: int = 0
    current: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self.current = FakeStream(self)
        self.random = torch.Generator().manual_seed(0)

    def host(self, ms: float) -> None:
        """The host works, or waits for something else than the device."""
        self.now_ns += round(ms * MS)

    def wait_until(self, at_ns: int) -> None:
        self.now_ns = max(self.now_ns, at_ns)

    def launch(self, device_ms: float, host_ms: float | None = None) -> None:
        """Queue work on the stream that computes."""
        self.current.launch(device_ms, host_ms)

    def alloc(self, nbytes: int) -> None:
        """A tensor more; the counters change as an allocator's do."""
        now = self.memory.now_bytes + nbytes
        self.memory = replace(
            self.memory,
            now_bytes=now,
            peak_bytes=max(now, self.memory.peak_bytes),
            peak_reserved_bytes=max(now, self.memory.peak_reserved_bytes),
            free_bytes=self.memory.free_bytes - nbytes,
        )

    def new_event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)

    def read_health(self, index: int) -> DeviceHealth:
        if isinstance(self.health, Exception):
            raise self.health
        return self.health

    def adapter(self, name: str = "cpu", count: int = 1) -> DeviceAdapter:
        """The adapter, under the device type whose tensors it has."""

        def set_state(state: torch.Tensor) -> None:
            self.random.set_state(state)

        return DeviceAdapter(
            name=name,
            count=lambda: count,
            set_current=lambda index: None,
            device_name=lambda index: "Fake 1000",
            collective_backend=lambda: "gloo",
            synchronize=lambda index: self.current.synchronize(),
            streams=DeviceStreams(
                current=lambda index: self.current, new=lambda index: FakeStream(self), new_event=self.new_event
            ),
            memory=lambda index: self.memory,
            random=DeviceRandom(state=lambda: self.random.get_state(), set_state=set_state),
            health=self.read_health,
            kernel_errors=xid_errors,
            pci_address=lambda index: f"0000:{index:02x}:00.0",
            reaches=lambda index, other: True,
            computes_bf16=lambda: False,
            computes_fp8=lambda: False,
            has_tf32=False,
            fork_random=lambda index: torch.random.fork_rng(devices=[]),
        )


@dataclass
class Entry:
    """An entry point of an installed package."""

    name: str
    load: Callable[[], Any]
    value: str = "fake_package:adapter"


@contextlib.contextmanager
def installed(*entries: Entry) -> Generator[None]:
    """Inside, these entry points of the group of devices are installed."""

    def entry_points(group: str) -> Iterable[Entry]:
        return entries if group == ADAPTER_GROUP else []

    def forget() -> None:
        torch_adapters.adapter_for.cache_clear()
        torch_adapters._plugged.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_adapters, "entry_points", entry_points)
        forget()
        try:
            yield
        finally:
            forget()


@contextlib.contextmanager
def in_place_of_the_cpu(device: FakeDevice) -> Generator[FakeDevice]:
    """Inside, runs on the CPU take ``device`` for theirs."""
    with installed(Entry("cpu", device.adapter)):
        yield device

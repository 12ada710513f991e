"""What unisono asks of a kind of device. Needs no torch.

``torch_adapters`` has those of the CPU and of whatever ``torch.accelerator`` drives. An entry point of the group
``unisono.devices``, named like a device type of torch, is another one, or takes the place of a built-in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from unisono.device.health import DeviceHealth
from unisono.device.kernel_log import KernelError

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_GROUP: Final = "unisono.devices"


class DeviceEvent(Protocol):
    """A point in a stream's work whose time is taken, such as ``torch.Event(enable_timing=True)``."""

    def record(self, stream: Any = None, /) -> object:
        """Put it behind the work that is queued on ``stream`` now; an event may be recorded again."""

    def query(self) -> bool:
        """Whether the device has come to it. Does not wait."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to ``end_event``; the device has come to both."""
        ...

    def synchronize(self) -> object:
        """Wait until the device has come to it."""


class DeviceStream(Protocol):
    """A queue of work on a device, such as ``torch.Stream``; entered, it takes the work that is launched."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: Any) -> object: ...

    def record_event(self) -> Any:
        """A new event behind the work that is queued now."""

    def wait_event(self, event: Any, /) -> object:
        """Let what is queued later start after ``event``."""

    def synchronize(self) -> object:
        """Wait until all queued work is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of an accelerator: of this process as its caching allocator counts it, and of the whole device.

    Attributes:
        now_bytes: In tensors now.
        peak_bytes: Most that was in tensors.
        peak_reserved_bytes: Most that the allocator had taken from the device, for tensors and free blocks between them.
        limit_bytes: Memory of the device.
        free_bytes: What no process has taken.
        num_alloc_retries: Allocations that succeeded only after all free blocks were given back to the device.
    """

    now_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    limit_bytes: int
    free_bytes: int
    num_alloc_retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStreams:
    """Streams and events of a kind of device that works behind the host.

    Attributes:
        current: The stream that takes the work of this thread, by the device's index.
        new: A new stream, by the device's index.
        new_event: A new event that takes times.
    """

    current: Callable[[int], DeviceStream]
    new: Callable[[int], DeviceStream]
    new_event: Callable[[], DeviceEvent]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRandom:
    """The random generator of this rank's device: its state as bytes, and how that is set."""

    state: Callable[[], Tensor]
    set_state: Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAdapter:
    """The functions of one kind of device. Devices are numbered as torch numbers those that the process sees.

    Attributes:
        name: Device type of its tensors, as torch calls it.
        count: Number of devices that this process sees.
        set_current: Make a device the one that this thread uses where it names none.
        device_name: Name of a device.
        collective_backend: Backend of ``torch.distributed`` for its tensors.
        synchronize: Wait until a device has done all its work.
        streams: Its streams and events; None where work is done when a call returns.
        memory: Memory of a device; None on the CPU, whose memory is that of the process.
        random: Its random generator; None where it is the CPU's.
        health: State of a device, as its driver tells it; where it tells nothing, a ``DeviceHealth`` without values.
        kernel_errors: The errors of devices of this kind among lines of the kernel's log.
        pci_address: Address of a device on the PCI bus; empty where it is not known.
        reaches: Whether a device can read the memory of another; None where nobody knows.
        computes_bf16: Whether products of bf16 run in hardware rather than by conversion to fp32.
        computes_fp8: Whether there are products of 8-bit floats.
        has_tf32: Whether fp32 products can run as TF32, and convolution kernels can be chosen by timing.
        fork_random: A context after which the generators of the CPU and of a device are as before.
    """

    name: str
    count: Callable[[], int]
    set_current: Callable[[int], None]
    device_name: Callable[[int], str]
    collective_backend: Callable[[], str]
    synchronize: Callable[[int], None]
    streams: DeviceStreams | None
    memory: Callable[[int], DeviceMemory | None]
    random: DeviceRandom | None
    health: Callable[[int], DeviceHealth]
    kernel_errors: Callable[[Iterable[str]], list[KernelError]]
    pci_address: Callable[[int], str]
    reaches: Callable[[int, int], bool] | None
    computes_bf16: Callable[[], bool]
    computes_fp8: Callable[[], bool]
    has_tf32: bool
    fork_random: Callable[[int], AbstractContextManager[Any]]

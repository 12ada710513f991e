"""Load of the host, of this process and of its device, sampled by a thread while a run goes on, as ``system`` events.

Figures of the host and the process are means over the time since the sample before. A device is read by its adapter, and by
functions of other packages.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from unisono.observe.events import EventLog

if TYPE_CHECKING:
    import torch

# An entry point of this group is a function of a device's index that returns figures by name, such as {"util_frac": 0.9}, or
# raises where there is no such device.
READER_GROUP: Final = "unisono.device_readers"
DeviceReader = Callable[[], Mapping[str, float | str]]
# such as /proc without the rights to read it; psutil raises NotImplementedError where a sandbox has no /proc/diskstats
_REFUSED: Final = (psutil.Error, OSError, NotImplementedError)
_CLOSE_S: Final = 5.0
_MAX_TEXT: Final = 200  # characters of a figure that is a text
_LOG: Final = logging.getLogger("unisono.observe")


class SystemMonitor:
    """Emits a ``system`` event every ``every_s`` seconds, from construction until ``close``.

    It is made on the thread that trains, whose waiting for a core is one of the figures.

    Args:
        events: Event log of this rank.
        every_s: Seconds between samples.
        step: Returns the number of finished steps, a field of the event.
        with_host: Whether the figures of the host are sampled too, which one rank of it does.
        readers: Functions that return figures of this rank's device by name, by their own names (``device_readers``).
    """

    def __init__(
        self,
        events: EventLog,
        *,
        every_s: float,
        step: Callable[[], int],
        with_host: bool,
        readers: Mapping[str, DeviceReader],
    ) -> None:
        self._events, self._every_s, self._step, self._with_host = events, every_s, step, with_host
        self._readers = dict(readers)
        self._process = psutil.Process()
        self._thread_id = threading.get_native_id()
        self._host = socket.gethostname()
        self._stop = threading.Event()
        try:
            self._before = self._counters()
        except _REFUSED as error:
            self._give_up(error)
        self._thread = threading.Thread(target=self._run, name="unisono-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling. Idempotent. A device's reader that does not return is left behind: the run ends without it."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning("the monitor is left behind: a figure could not be read within %g s", _CLOSE_S)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                fields = self._sample()
            except _REFUSED as error:
                self._give_up(error)
                return
            if not self._stop.is_set():
                self._events.emit("system", step=self._step(), host=self._host, **fields)

    def _give_up(self, error: Exception) -> None:
        _LOG.warning("the monitor stops: %s: %s", type(error).__name__, error)
        self._stop.set()

    def _counters(self) -> dict[str, float]:
        """Counters that only grow, and the time."""
        times = self._process.cpu_times()
        found = {"at_s": time.monotonic(), "process_cpu_s": times.user + times.system}
        if (waited_s := _waited_for_core_s(self._thread_id)) is not None:
            found["core_wait_s"] = waited_s
        if self._with_host:
            cpu = psutil.cpu_times()._asdict()
            disk, networks = psutil.disk_io_counters(), psutil.net_io_counters(pernic=True)
            links = [counters for name, counters in networks.items() if name != "lo"]
            found |= {
                # the time of guests is part of user and nice
                "cpu_s": sum(seconds for name, seconds in cpu.items() if not name.startswith("guest")),
                "cpu_idle_s": cpu["idle"],
                "cpu_iowait_s": cpu.get("iowait", 0.0),
                "disk_read_bytes": float(disk.read_bytes) if disk else 0.0,
                "disk_written_bytes": float(disk.write_bytes) if disk else 0.0,
                "network_sent_bytes": float(sum(link.bytes_sent for link in links)),
                "network_received_bytes": float(sum(link.bytes_recv for link in links)),
            }
        return found

    def _sample(self) -> dict[str, float | str]:
        now, before = self._counters(), self._before
        self._before = now
        took_s = max(1e-9, now["at_s"] - before["at_s"])
        per_s = {name: max(0.0, now[name] - before[name]) / took_s for name in now if name in before}
        fields: dict[str, float | str] = {"sys/process_cpus": per_s["process_cpu_s"]}
        if "core_wait_s" in per_s:
            fields["sys/core_wait_frac"] = min(1.0, per_s["core_wait_s"])
        fields |= {f"sys/{name}_per_s": value for name, value in per_s.items() if name.endswith("_bytes")}
        if self._with_host:
            fields["sys/memory_frac"] = psutil.virtual_memory().percent / 100
            if cpu_s := per_s["cpu_s"]:
                iowait, idle = (min(1.0, per_s[f"cpu_{name}_s"] / cpu_s) for name in ("iowait", "idle"))
                fields |= {"sys/cpu_frac": max(0.0, 1 - idle - iowait), "sys/iowait_frac": iowait}
        return fields | self._device_fields()

    def _device_fields(self) -> dict[str, float | str]:
        """The figures of the device; a reader that fails is not asked again."""
        found: dict[str, float | str] = {}
        for name, reader in list(self._readers.items()):
            try:
                values = reader()
                found |= {f"sys/device_{key}": _plain(value) for key, value in values.items()}
            except Exception as error:
                _LOG.warning("device reader %s is left out: %s: %s", name, type(error).__name__, error)
                del self._readers[name]
        return found


def _plain(value: float | str) -> float | str:
    return value[:_MAX_TEXT] if isinstance(value, str) else float(value)


def _waited_for_core_s(thread_id: int) -> float | None:
    """Seconds in which a thread of this process could have run and had no core; None where the system does not tell it.

    Source: Linux, Documentation/scheduler/sched-stats.rst, ``/proc/<pid>/schedstat``.
    """
    try:
        return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def device_readers(device: torch.device) -> dict[str, DeviceReader]:
    """Readers of an accelerator by name: of its adapter, and of other packages. Of the CPU none: the host's figures are its."""
    from unisono.device.torch_adapters import adapter_of  # imports torch, which watching a run does without

    adapter, index = adapter_of(device)
    if adapter.streams is None:
        return {}
    readers: dict[str, DeviceReader] = {adapter.name: lambda: adapter.health(index).figures()}
    for entry in entry_points(group=READER_GROUP):
        try:
            readers[entry.name] = partial(entry.load(), index)
        except Exception as error:
            _LOG.warning("device reader %s cannot be imported: %s: %s", entry.name, type(error).__name__, error)
    return readers

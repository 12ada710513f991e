"""Places for trials that run at the same time: each has its share of the devices, or of the processors, of this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.errors import ConfigError
from unisono.launch.resources import allowed_cores, core_shares, count_accelerators, visible_devices_variable


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one trial at a time.

    Attributes:
        num_processes: Processes of a trial.
        settings: Settings of every trial in it. They are part of its configuration, so that the same configuration gives the same
            numbers elsewhere.
        variables: Environment variables.
        cpus: Processors; None for all.
    """

    num_processes: int = 1
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    cpus: Sequence[int] | None = None


def divide_into_slots(count: int, num_processes: int, *, has_num_threads: bool) -> list[Slot]:
    """``count`` places for trials of ``num_processes`` processes each (0: one for each device).

    On accelerators each place has its own devices. Without, it has its own cores, and ``launch.num_threads`` is set unless the
    configuration sets it (``has_num_threads``): sums depend on the number of threads.

    Raises:
        ConfigError: There are fewer devices than places.
    """
    if count == 1:
        return [Slot(num_processes=num_processes or max(1, count_accelerators()))]
    variable = visible_devices_variable()
    devices = _visible_devices(variable)
    if devices:
        share = len(devices) // count
        if not share or num_processes > share:
            raise ConfigError(
                given=f"{count} trials of {num_processes or 1} processes at a time on {len(devices)} devices",
                rule="each process of a trial has a device of its own",
                consequence="nothing was started",
                nearest=f"--parallel {max(1, len(devices) // max(1, num_processes))}",
            )
        parts = [devices[slot * share : (slot + 1) * share] for slot in range(count)]
        return [Slot(num_processes=num_processes or share, variables={variable: ",".join(part)}) for part in parts]
    shares = core_shares(allowed_cores(), count)
    if shares is None:
        raise ConfigError(
            given=f"{count} trials at a time on {len(allowed_cores())} cores",
            rule="each trial has a core of its own",
            consequence="nothing was started",
            nearest=f"--parallel {len(allowed_cores())}",
        )
    threads = min(max(1, _num_cores(share) // max(1, num_processes)) for share in shares)
    settings = {} if has_num_threads else {"launch.num_threads": str(threads)}
    return [Slot(num_processes=max(1, num_processes), settings=settings, cpus=share) for share in shares]


def _num_cores(cpus: Sequence[int]) -> int:
    return sum(bool(set(core.cpus) & set(cpus)) for core in allowed_cores())


def _visible_devices(variable: str) -> list[str]:
    given = os.environ.get(variable)
    if given is not None:
        return [name for name in given.split(",") if name.strip()]
    return [str(index) for index in range(count_accelerators())]

"""The state of Ascend devices from the tables of ``npu-smi info``, as its manual shows them. Needs no torch.

Two rows for each chip, whose cells are parted by bars: number and name, health, then power, temperature and pages; below them
chip and place, bus, then use and memory (of training devices that of the HBM is the last). A second table has the processes.
Source: hiascend.com, "npu-smi info", releases 23.0 to 25.5.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from unisono.device.health import DeviceHealth

_COMMAND: Final = ("npu-smi", "info")
_TIMEOUT_S: Final = 20.0
_MIB: Final = 2**20
VISIBLE_VARIABLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
_DEVICE: Final = re.compile(r"([0-9]{1,4})\s+\S.*")
_PLACE: Final = re.compile(r"([0-9]{1,4})(?:\s+[0-9]{1,4})?")
_BUS: Final = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9]|NA")
_PAIR: Final = re.compile(r"([0-9]{1,9})\s*/\s*([0-9]{1,9})")
_NUMBER: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")


def npu_health(index: int) -> DeviceHealth:
    """State of the Ascend device that torch calls ``index``.

    Raises OSError or subprocess.SubprocessError where ``npu-smi`` does not run, IndexError where it shows no such device.
    """
    done = subprocess.run(
        _COMMAND,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return parse_npu_smi(done.stdout)[_physical(index, os.environ)]


def parse_npu_smi(text: str) -> list[DeviceHealth]:
    """The chips that the output of ``npu-smi info`` shows, in its order; a cell that has no number is not told."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    processes: dict[tuple[str, str], dict[int, int]] = {}
    for row in rows:
        if len(row) == 4 and (place := re.fullmatch(r"([0-9]+)\s+([0-9]+)", row[0])) and row[1].isdigit():
            held = int(row[3]) * _MIB if row[3].isdigit() else 0
            processes.setdefault((place[1], place[2]), {})[int(row[1])] = held
    return [_chip(first, second, processes.get((device, chip), {})) for device, chip, first, second in _pairs(rows)]


def _pairs(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, str, Sequence[str], Sequence[str]]]:
    """Number of the device, number of the chip, and both rows, of each chip."""
    first: Sequence[str] | None = None
    for row in rows:
        place = _PLACE.fullmatch(row[0])
        if first is not None and place is not None and len(row) == 3 and _BUS.fullmatch(row[1]):
            device = _DEVICE.fullmatch(first[0])
            assert device is not None
            yield device[1], place[1], first, row
            first = None
        else:
            first = row if len(row) == 3 and _DEVICE.fullmatch(row[0]) else None


def _chip(first: Sequence[str], second: Sequence[str], processes: Mapping[int, int]) -> DeviceHealth:
    power, temperature = (*(_number(word) for word in first[2].split()[:2]), None, None)[:2]
    use = _number(second[2].split()[0]) if second[2] else None
    memory = _PAIR.findall(second[2])
    return DeviceHealth(
        util_frac=None if use is None else use / 100,
        power_w=power,
        temperature_c=temperature,
        memory_bytes=int(memory[-1][0]) * _MIB if memory else None,
        alarm="" if first[1] == "OK" else first[1],
        processes=processes,
    )


def _number(word: str) -> float | None:
    return float(word) if _NUMBER.fullmatch(word) else None


def _physical(index: int, environ: Mapping[str, str]) -> int:
    """The number among all devices of the host of the one that torch calls ``index``."""
    visible = environ.get(VISIBLE_VARIABLE, "").split(",")
    return int(visible[index]) if index < len(visible) and visible[index].strip().isdigit() else index

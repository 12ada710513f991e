"""What was measured on this machine, in one JSON file: matrix products, devices, links between ranks, and storage. No torch.

``unisono doctor --bench`` writes all of it and compares its next figures with it; a run adds the matrix products of its device,
and reads what its link can do. The file lies in the user's cache folder and may be deleted at any time.

    {"version": 2, "matmul": {NAME: {…}}, "links": [{…}], "storage": [{…}], "devices": [{…}]}

The reader takes what it understands: entries that are damaged, of another kind or of a later version are left out. A file that
another user can have written is not read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from unisono.storage.directory import make_folder
from unisono.storage.files import file_lock, write_atomically
from unisono.storage.ownership import read_own_json

CALIBRATION_FILE: Final = "calibration.json"  # in the user's cache folder
SHARED_MEMORY: Final = "shared memory"  # transport of sums inside a host, beside torch's backends
_VERSION: Final = 2
_MAX_BYTES: Final = 1 << 22
_MAX_ENTRIES: Final = 256  # of each kind, the newest
_MAX_NUMBER: Final = 1e18

Operation = Literal["all_reduce", "all_reduce_in_step", "send", "send_in_step"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulRate:
    """Rate of a large square matrix product.

    Attributes:
        tflops: At the median time, in TFLOP/s.
        size: Side of the matrices.
        repeats: Number of products that were timed.
        spread_frac: Distance of the quartiles over the median.
    """

    tflops: float
    size: float
    repeats: float
    spread_frac: float

    def __post_init__(self) -> None:
        _check(self.tflops, self.size, self.repeats)
        _check(self.spread_frac, least=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Time of one message size between ranks.

    Attributes:
        operation: ``all_reduce``, or ``send`` between the slowest pair of ranks; with ``_in_step``, what a sum, or a message to
            the next rank, adds to ranks that compute between them.
        transport: ``gloo``, ``nccl`` or another backend of torch, or ``shared memory``.
        ranks: Number of ranks that sum, or that exchange messages in pairs at the same time.
        hosts: Names of their hosts, sorted.
        nbytes: Size of the message, which every rank has.
        seconds: Median time of one operation, of the slowest rank.
        spread_frac: Distance of the quartiles over the median.
        at_s: When it was measured, in seconds since 1970.
        torch: Version of torch.
        pair: For ``send``, the two ranks.
    """

    operation: Operation
    transport: str
    ranks: int
    hosts: tuple[str, ...]
    nbytes: int
    seconds: float
    spread_frac: float
    at_s: float = 0.0
    torch: str = ""
    pair: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.nbytes, self.seconds, self.ranks)
        _check(self.spread_frac, self.at_s, least=0.0)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the message over its time."""
        return self.nbytes / self.seconds

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured: a later figure of the same key takes its place."""
        return self.operation, self.transport, self.ranks, self.hosts, self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRate:
    """Speed of a folder.

    Attributes:
        host: Name of the host.
        folder: The folder, without links.
        write_bytes_per_s: Of one file, written through to the disk.
        read_bytes_per_s: Of the same file, dropped from the page cache before where the system allows that.
        opens_per_s: Small files opened, read and closed in a second.
        spread_frac: Range of the writes over their median.
        at_s: When it was measured, in seconds since 1970.
    """

    host: str
    folder: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    opens_per_s: float
    spread_frac: float
    at_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self.write_bytes_per_s, self.read_bytes_per_s, self.opens_per_s)
        _check(self.spread_frac, self.at_s, least=0.0)

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured: a later figure of the same key takes its place."""
        return self.host, self.folder


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRate:
    """What the device of a rank does while those of all other ranks do the same: that of the slowest.

    Attributes:
        hosts: Names of the hosts of the job, sorted.
        name: Of the device; the model name of a CPU.
        ranks: Number of ranks, each with a device, or with a part of its host's cores and memory.
        tflops: Of large matrix products in bf16, in TFLOP/s.
        memory_bytes: Memory of the device.
        memory_bytes_per_s: Bandwidth of that memory, read and written.
        spread_frac: Distance of the quartiles over the median, of the figure that varies most.
        at_s: When it was measured, in seconds since 1970.
    """

    hosts: tuple[str, ...]
    name: str
    ranks: int
    tflops: float
    memory_bytes: float
    memory_bytes_per_s: float
    spread_frac: float
    at_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self.ranks, self.tflops, self.memory_bytes, self.memory_bytes_per_s)
        _check(self.spread_frac, self.at_s, least=0.0)

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured: a later figure of the same key takes its place."""
        return self.hosts, self.name, self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The content of a calibration file.

    Attributes:
        matmul: By device, threads, dtype and torch version.
        links: Between ranks.
        storage: Of folders.
        devices: Of ranks that all compute at the same time.
    """

    matmul: Mapping[str, MatmulRate] = field(default_factory=dict[str, MatmulRate])
    links: Sequence[LinkRate] = ()
    storage: Sequence[StorageRate] = ()
    devices: Sequence[DeviceRate] = ()

    def link(self, like: LinkRate) -> LinkRate | None:
        """What was measured before for the same operation, transport, ranks, hosts and size."""
        return next((rate for rate in self.links if rate.key == like.key), None)

    def folder(self, like: StorageRate) -> StorageRate | None:
        """What was measured before for the same folder of the same host."""
        return next((rate for rate in self.storage if rate.key == like.key), None)

    def all_reduce_s(
        self, nbytes: int, *, transport: str, ranks: int, host: str, num_hosts: int, in_step: bool = False
    ) -> float | None:
        """Seconds of a sum of ``nbytes`` over ``ranks`` ranks on ``num_hosts`` hosts, of which ``host`` is one.

        ``in_step``: what it adds to ranks that compute between sums, at least what it takes between idle ranks. None where
        nothing like it was measured.
        """

        def seconds(operation: Operation) -> float | None:
            rates = self._like(operation, transport, host, num_hosts)
            return _interpolated([rate for rate in rates if rate.ranks == ranks], nbytes)

        if not in_step:
            return seconds("all_reduce")
        added_s = seconds("all_reduce_in_step")
        return added_s and max(added_s, seconds("all_reduce") or 0.0)

    def send_s(self, nbytes: int, *, transport: str, host: str, num_hosts: int, in_step: bool = False) -> float | None:
        """Seconds of a message of ``nbytes`` between two ranks of ``num_hosts`` hosts, of which ``host`` is one.

        Of the job with the fewest ranks, the slowest pair counts, with its largest message; a message takes at least as long as
        the smallest sum of that job. ``in_step``: at least what it adds to ranks that compute between messages, where that was
        measured. None where nothing was.
        """
        found = self._like("send", transport, host, num_hosts)
        if not found:
            return None
        pair = min(found, key=lambda rate: (rate.ranks, -rate.nbytes, -rate.at_s))
        least_s = self.all_reduce_s(0, transport=transport, ranks=pair.ranks, host=host, num_hosts=num_hosts)
        added = [rate for rate in self._like("send_in_step", transport, host, num_hosts) if in_step]
        fewest = min((rate.ranks for rate in added), default=0)
        added_s = _interpolated([rate for rate in added if rate.ranks == fewest], nbytes)
        return max(pair.seconds * nbytes / pair.nbytes, least_s or 0.0, added_s or 0.0)

    def _like(self, operation: Operation, transport: str, host: str, num_hosts: int) -> list[LinkRate]:
        return [
            rate
            for rate in self.links
            if (rate.operation, rate.transport, len(rate.hosts)) == (operation, transport, num_hosts)
            and host in rate.hosts
        ]


def _interpolated(rates: Sequence[LinkRate], nbytes: int) -> float | None:
    """Seconds of ``nbytes``: between two measured sizes interpolated, above the largest one growing with the bytes.

    A size that was measured as slower than a larger one was disturbed, and takes the larger one's time.
    """
    measured = sorted((rate.nbytes, rate.seconds) for rate in rates)
    points = [(size, min(seconds for _, seconds in measured[index:])) for index, (size, _) in enumerate(measured)]
    if not points:
        return None
    if nbytes <= points[0][0]:
        return points[0][1]
    for (low, low_s), (high, high_s) in pairwise(points):
        if nbytes <= high:
            return low_s + (high_s - low_s) * (nbytes - low) / (high - low)
    return points[-1][1] * nbytes / points[-1][0]


def read_calibration(path: Path | None) -> Calibration:
    """What the file at ``path`` holds; nothing where there is none, or it cannot be read."""
    if path is None:
        return Calibration()
    try:
        content = read_own_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return Calibration()
    if not isinstance(content, dict):
        return Calibration()
    entries = cast("dict[str, Any]", content)
    if "version" not in entries:  # of an earlier release: matrix products alone
        entries = {"version": _VERSION, "matmul": entries}
    if entries["version"] != _VERSION:
        return Calibration()
    matmul: Any = entries.get("matmul")
    rates = {
        str(name): _entry(value, MatmulRate) for name, value in (matmul if isinstance(matmul, dict) else {}).items()
    }
    return Calibration(
        matmul={name: rate for name, rate in rates.items() if rate is not None},
        links=_entries(entries.get("links"), LinkRate),
        storage=_entries(entries.get("storage"), StorageRate),
        devices=_entries(entries.get("devices"), DeviceRate),
    )


def add_to_calibration(
    path: Path,
    *,
    matmul: Mapping[str, MatmulRate] | None = None,
    links: Sequence[LinkRate] = (),
    storage: Sequence[StorageRate] = (),
    devices: Sequence[DeviceRate] = (),
) -> None:
    """Add figures to the file at ``path``, in place of earlier ones of the same keys. It is replaced atomically.

    Args:
        path: The calibration file.
        matmul: Rates of matrix products by the device's name.
        links: Rates between ranks.
        storage: Rates of folders.
        devices: Rates of ranks that all compute.

    Raises:
        OSError: It cannot be written.
    """
    make_folder(path.parent)
    with file_lock(path.with_name(f".{path.name}.lock")):  # hosts with one home folder add theirs at the same time
        known = read_calibration(path)
        content = {
            "version": _VERSION,
            "matmul": {
                name: asdict(rate) for name, rate in list({**known.matmul, **(matmul or {})}.items())[-_MAX_ENTRIES:]
            },
            "links": _newest([*known.links, *links]),
            "storage": _newest([*known.storage, *storage]),
            "devices": _newest([*known.devices, *devices]),
        }
        write_atomically(path, json.dumps(content, indent=1).encode(), mode=0o600)


def _newest(rates: Iterable[LinkRate | StorageRate | DeviceRate]) -> list[dict[str, Any]]:
    by_key = {rate.key: rate for rate in rates}
    return [asdict(rate) for rate in sorted(by_key.values(), key=lambda rate: rate.at_s)[-_MAX_ENTRIES:]]


def _entries(values: Any, kind: type[T]) -> tuple[T, ...]:
    if not isinstance(values, list):
        return ()
    found = (_entry(value, kind) for value in cast("list[Any]", values)[-_MAX_ENTRIES:])
    return tuple(rate for rate in found if rate is not None)


def _entry(value: Any, kind: type[T]) -> T | None:
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):  # the latter for half of a surrogate pair
        return msgspec.convert(value, kind)
    return None


def _check(*numbers: float, least: float = 1e-12) -> None:
    """Raise ValueError for a number that no measurement gives."""
    if not all(
        least <= number <= _MAX_NUMBER for number in numbers
    ):  # false for NaN; JSON has integers beyond any float
        raise ValueError(f"{numbers} of a measurement")

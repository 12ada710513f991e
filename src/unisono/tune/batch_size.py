"""The largest micro-batch that fits into memory: short trainings, each in processes of its own, by doubling and bisection.

A size that the sizes before it say will not fit is not tried where memory is the host's: there the kernel would end other
processes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from unisono.diagnose.ending import read_ending
from unisono.doctor.child import train_child
from unisono.doctor.short_run import QUIET, set_arguments
from unisono.errors import ConfigError
from unisono.observe.events import number, read_events
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.storage.files import write_atomically
from unisono.storage.limits import MAX_PLAN_BYTES
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import EVENTS_FOLDER, PLAN_FILE
from unisono.units import GIB

RECORD_FILE: Final = "report.json"
PAGE_FILE: Final = "report.html"
_STEPS: Final = 12  # enough for a median step without the first ones
_TIMEOUT_S: Final = 1800.0
_ROOM_FRAC: Final = 0.95  # of the memory; a size that is expected to need more is taken as one that does not fit
_RESOLUTION: Final = 8  # the result is within an eighth of the largest size


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A micro-batch that was tried.

    Attributes:
        micro_batch: Samples of a forward pass.
        fits: Whether it trained.
        peak_bytes: Largest memory of a rank; None if it did not fit.
        limit_bytes: The memory there is for it.
        samples_per_s: Of all ranks; None if it is not known.
        reason: Why it did not fit.
    """

    micro_batch: int
    fits: bool
    peak_bytes: float | None = None
    limit_bytes: float | None = None
    samples_per_s: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """What was found.

    Attributes:
        probes: What was tried, in that order.
        largest: The largest micro-batch that fits.
        hit_memory_limit: Whether a larger one does not fit; else the search ended at the largest that it may try.
        proposed: The largest micro-batch that divides a data rank's share of the global batch, and fits.
        fastest: The one with most samples a second.
    """

    probes: Sequence[Probe]
    largest: int
    hit_memory_limit: bool
    proposed: int
    fastest: int | None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        rest = {name: getattr(self, name) for name in ("largest", "hit_memory_limit", "proposed", "fastest")}
        return {**rest, "probes": [probe.to_json() for probe in self.probes]}


class BatchRecord(msgspec.Struct, kw_only=True):
    """What the folder of a search for the largest micro-batch has of it.

    Attributes:
        identity: The configuration; JSON types.
        probes: Those made so far, in order.
    """

    identity: dict[str, Any]
    probes: list[Probe] = msgspec.field(default_factory=list[Probe])


def find_largest(try_size: Callable[[int], Probe], *, max_micro_batch: int, share: int, on_host: bool) -> LargestBatch:
    """Double the micro-batch until one does not fit, then bisect.

    Args:
        try_size: Runs a short training with a micro-batch.
        max_micro_batch: The largest one to try.
        share: Samples of a step that each data rank has: the proposed micro-batch divides it.
        on_host: Whether memory is the host's, so that no size is tried that will not fit.

    Raises:
        ConfigError: A micro-batch of one sample does not train.
    """
    probes: list[Probe] = []
    low, high = 0, max_micro_batch + 1
    size = 1
    while low < max_micro_batch < high:
        if on_host and _expected_bytes(probes, size) > _room(probes):
            high = size
            break
        probes.append(try_size(size))
        if not probes[-1].fits:
            high = size
            break
        low, size = size, min(2 * size, max_micro_batch)
    if not low:
        raise ConfigError(
            given=f"a micro-batch of one sample: {probes[-1].reason}",
            rule="the smallest micro-batch is one sample",
            consequence="nothing was found",
            nearest="plan.recompute, plan.dp_shard or a smaller model; or see the error",
        )
    hit_memory_limit = high <= max_micro_batch
    while hit_memory_limit and high - low > max(1, low // _RESOLUTION):
        middle = (low + high) // 2
        if on_host and _expected_bytes(probes, middle) > _room(probes):
            high = middle
            continue
        probes.append(try_size(middle))
        low, high = (middle, high) if probes[-1].fits else (low, middle)
    fitting = [probe for probe in probes if probe.fits]
    timed = [probe for probe in fitting if probe.samples_per_s is not None]
    return LargestBatch(
        probes=probes,
        largest=low,
        hit_memory_limit=hit_memory_limit,
        proposed=max(size for size in range(1, min(low, share) + 1) if share % size == 0),
        fastest=max(timed, key=lambda probe: probe.samples_per_s or 0.0).micro_batch if timed else None,
    )


def _expected_bytes(probes: Sequence[Probe], size: int) -> float:
    """Memory that a size is expected to need, by the last two that fit: it grows with the samples. 0 where that is not known."""
    known = sorted((probe.micro_batch, probe.peak_bytes) for probe in probes if probe.fits and probe.peak_bytes)
    if len(known) < 2:
        return 0.0
    (small, small_bytes), (large, large_bytes) = known[-2:]
    return large_bytes + max(0.0, large_bytes - small_bytes) * (size - large) / (large - small)


def _room(probes: Sequence[Probe]) -> float:
    limits = [probe.limit_bytes for probe in probes if probe.limit_bytes]
    return _ROOM_FRAC * min(limits) if limits else math.inf


def probe_size(
    folder: Path, arguments: Sequence[str], micro_batch: int, ranks: int, *, settings: Mapping[str, Any]
) -> Probe:
    """Run a short training with a micro-batch, in ``folder``.

    Args:
        folder: A new folder of this probe.
        arguments: Of ``unisono train``.
        micro_batch: Samples of a forward pass.
        ranks: Number of processes.
        settings: All settings of the configuration, by name.
    """
    changes = {name: value for name, value in QUIET.items() if name in settings} | {
        "train.steps": _STEPS,
        "train.epochs": 0.0,
        "checkpoint.every_steps": 0,
        "plan.micro_batch": micro_batch,
        "plan.global_batch": micro_batch * ranks,  # a multiple of what the data ranks need, however many they are
        "run.dir": str(folder),
    }
    outcome = train_child(folder, [*arguments, *set_arguments(changes)], timeout_s=_TIMEOUT_S)
    if outcome.code != 0:
        _, ending = read_ending(folder, since_s=0.0)
        if ending is not None and ending.kind == "out_of_memory":
            return Probe(micro_batch=micro_batch, fits=False, reason=ending.sentence)
        raise ConfigError(
            given=f"a training with plan.micro_batch={micro_batch}: {outcome.trouble}",
            rule="a micro-batch either trains or runs out of memory",
            consequence="the search ended",
            nearest="see the error; --max-micro-batch gives the largest one to try",
        )
    peak_bytes, limit_bytes = _memory(folder)
    samples, step_s = outcome.samples(), outcome.step_s()
    return Probe(
        micro_batch=micro_batch,
        fits=True,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        samples_per_s=samples / step_s if samples and step_s else None,
    )


def _memory(run_dir: Path) -> tuple[float | None, float | None]:
    """Largest memory of a rank, and the smallest limit of one: ranks of one host share the host's."""
    peaks: list[float] = []
    limits: list[float] = []
    for path in sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")):
        with suppress(OSError, ConfigError):
            events = [event for event in read_events(path).events if event["kind"] == "step"]
            peaks += [max(found)] if (found := _numbers(events, "mem/peak_bytes")) else []
            limits += [min(found)] if (found := _numbers(events, "mem/limit_bytes")) else []
    return max(peaks, default=None), min(limits, default=None)


def _numbers(events: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for event in events if (value := number(event.get(name))) is not None]


def data_ranks(run_dir: Path) -> int:
    """Number of data ranks of the run in a folder; 1 where its plan does not say."""
    with suppress(OSError, ValueError):
        plan: Any = read_own_json(run_dir / PLAN_FILE, max_bytes=MAX_PLAN_BYTES)
        mesh = cast("Mapping[str, Any]", plan["mesh"])
        return max(1, int(mesh["dp_replicate"]) * int(mesh["dp_shard"]))
    return 1


def write_batch(folder: Path, record: BatchRecord, found: LargestBatch | None = None) -> None:
    """Write the memory of the sizes that were tried as an HTML page, and the record; atomically.

    Args:
        folder: Of the search.
        record: What was tried.
        found: The result; None before the end.
    """
    fitting = sorted((probe for probe in record.probes if probe.fits), key=lambda probe: probe.micro_batch)
    sizes = [probe.micro_batch for probe in fitting]
    memory = [None if probe.peak_bytes is None else probe.peak_bytes / GIB for probe in fitting]
    limits = [None if probe.limit_bytes is None else probe.limit_bytes / GIB for probe in fitting]
    speed = [probe.samples_per_s for probe in fitting]
    axis = {"title": {"text": "micro-batch"}, "zeroline": False}
    charts = [
        {
            "id": "memory",
            "data": [
                {"type": "scatter", "mode": "lines+markers", "name": "peak of a rank", "x": sizes, "y": memory},
                {"type": "scatter", "mode": "lines", "name": "memory there is", "x": sizes, "y": limits},
            ],
            "layout": curve_layout("", "GiB") | {"xaxis": axis},
        },
        {
            "id": "speed",
            "data": [{"type": "scatter", "mode": "lines+markers", "name": "samples per s", "x": sizes, "y": speed}],
            "layout": curve_layout("", "samples/s") | {"xaxis": axis},
        },
    ]
    rows = [
        [
            str(probe.micro_batch),
            "yes" if probe.fits else "no",
            "" if probe.peak_bytes is None else f"{probe.peak_bytes / GIB:.3g} GiB",
            "" if probe.samples_per_s is None else f"{probe.samples_per_s:.4g}",
            probe.reason,
        ]
        for probe in record.probes
    ]
    table = Table(head=["micro-batch", "fits", "peak of a rank", "samples per s", "why not"], rows=rows)
    section = Section(title="Memory and speed", charts=charts, tables=[table], in_grid=True)
    page = render_page(
        SUMMARY,
        charts,
        title="Largest micro-batch",
        verdict="The search has not ended." if found is None else batch_verdict(found),
        figures=[
            Figure("largest that fits", str(max(sizes, default=0))),
            Figure("trainings", str(len(record.probes))),
        ],
        sections=[section],
    )
    write_atomically(folder / PAGE_FILE, page.encode())
    write_atomically(folder / RECORD_FILE, msgspec.json.encode(record) + b"\n")


def batch_verdict(found: LargestBatch) -> str:
    """What was found, in a sentence or two."""
    if found.hit_memory_limit:
        text = f"The largest micro-batch that fits is {found.largest}."
    else:
        text = f"The largest micro-batch that was tried fits: {found.largest}."
    if found.fastest is not None and found.fastest != found.largest:
        text += f" Most samples a second: {found.fastest}."
    return text

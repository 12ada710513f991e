"""All names of a run's own numbers, with unit and meaning: one table, from which ``docs/trackers.md`` is written.

Names have lower-case words and the unit at their end (``_s``, ``_bytes``, ``_frac``, ``_per_s``). ``<word>`` in a name stands for
one or more words. Numbers that a user logs have names of their own, which do not begin with the first part of one of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from unisono.observe.meters import ALL_PHASES, COMM_AXES

_PHASE_MEANINGS: Final = {
    "data_wait": "waiting for the next batch",
    "h2d": "copying the batch to the device",
    "forward": "forward passes",
    "backward": "backward passes",
    "bubble": "a pipeline stage waiting for another",
    "comm_exposed": "communication that computation does not hide",
    "optimizer": "clipping and update",
    "ckpt_stall": "a checkpoint stopping the loop",
    "eval": "evaluations",
    "other": "the rest, such as the loop of the user",
}
_AXIS_MEANINGS: Final = {
    "dp": "data ranks",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
    "ep": "experts",
    "pp": "pipeline stages",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricName:
    """One name of the vocabulary.

    Attributes:
        name: The name, with ``<word>`` for a part that varies.
        unit: Its unit; ``1`` for a plain number or a fraction.
        kind: Kind of the events that have it.
        meaning: What it is, in a few words.
    """

    name: str
    unit: str
    kind: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this one, with words in the place of its ``<word>``."""
        parts = re.split(r"<\w+>", self.name)
        return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


def _of(kind: str, *rows: tuple[str, str, str]) -> tuple[MetricName, ...]:
    return tuple(MetricName(name=name, unit=unit, kind=kind, meaning=meaning) for name, unit, meaning in rows)


METRIC_NAMES: Final[tuple[MetricName, ...]] = (
    *_of(
        "step",
        ("train/loss", "1", "loss of the step's global batch"),
        ("train/loss/<name>", "1", "one of several losses; they add up to `train/loss`"),
        ("train/lr", "1", "learning rate of the first parameter group"),
        ("train/grad_norm", "1", "norm of the gradient of the whole model before clipping"),
        ("train/tokens_total", "tokens or samples", "trained so far, in the event's `unit`"),
        ("train/epoch", "epochs", "number of the epoch, from 1"),
        ("train/skipped_steps", "steps", "steps that the guard refused so far"),
        ("perf/step_s", "s", "mean time of a step in the window, without evaluations and checkpoints"),
        ("perf/tokens_per_s", "tokens or samples per s", "throughput of all devices"),
        ("perf/tokens_per_s_device", "tokens or samples per s", "throughput of one device"),
        ("perf/tflops_device", "TFLOP/s", "FLOP of forward and backward that one device makes in a second"),
        ("perf/mfu", "1", "`perf/tflops_device` divided by the device's data sheet (MFU)"),
        (
            "perf/matmul_ceiling_frac",
            "1",
            "the same divided by the measured rate of a matrix product",
        ),
        (
            "time/window_s",
            "s",
            "length of the reading, which the fractions below refer to; on an accelerator, by device events",
        ),
        *((f"time/{phase}_frac", "1", _PHASE_MEANINGS[phase]) for phase in ALL_PHASES),
        *((f"time/comm_exposed_{axis}_frac", "1", f"of `comm_exposed`, {_AXIS_MEANINGS[axis]}") for axis in COMM_AXES),
        ("time/gc_frac", "1", "of these phases, Python's garbage collections"),
        (
            "time/loader_read_s",
            "s",
            "time that loader workers spent in the data set (reading and decoding), for the batches of this reading",
        ),
        ("time/loader_transform_s", "s", "their time in transforms"),
        ("time/loader_collate_s", "s", "their time in making batches of samples"),
        ("mem/now_bytes", "bytes", "memory in use on the device; on a CPU, anonymous memory of the process"),
        ("mem/peak_bytes", "bytes", "largest memory in use so far; on a CPU, of the process without pages of files"),
        ("mem/peak_reserved_bytes", "bytes", "most that the allocator of an accelerator has held"),
        ("mem/alloc_retries", "allocations", "those that succeeded after the allocator gave back its free blocks"),
        ("mem/limit_bytes", "bytes", "memory of the device; on a CPU, what the host or the container allows"),
    ),
    *_of(
        "eval",
        ("eval/loss", "1", "loss on the held-out samples"),
        ("eval/<metric>", "that of the metric", "a metric of the evaluation, by its name"),
    ),
    *_of(
        "links",
        (
            "comm/<axis>_used_frac",
            "1",
            "how much of the rate that `unisono doctor --bench` measured is used by communication along `dp`, `cp`, `tp`, `ep` "
            "or `pp`; only where that rate is known",
        ),
    ),
    *_of(
        "tap",
        ("tap/<module>/output_norm", "1", "norm of the output of a tapped module"),
        ("tap/<module>/dead_frac", "1", "channels of that output that are 0 for the whole batch"),
        ("tap/<name>/gradient_norm", "1", "norm of the gradient of a tapped output, or of a parameter of it"),
        ("tap/<parameter>/norm", "1", "norm of a parameter of a tapped module"),
        ("tap/<parameter>/update_frac", "1", "norm of its update over its norm"),
    ),
    *_of(
        "system",
        ("sys/process_cpus", "CPUs", "processors that the process keeps busy"),
        ("sys/core_wait_frac", "1", "time in which the thread that trains could have run and had no core (Linux)"),
        ("sys/cpu_frac", "1", "processors of the host that are busy"),
        ("sys/iowait_frac", "1", "processors of the host that wait for disks"),
        ("sys/memory_frac", "1", "memory of the host in use"),
        ("sys/disk_read_bytes_per_s", "bytes per s", "read from disks of the host"),
        ("sys/disk_written_bytes_per_s", "bytes per s", "written to disks of the host"),
        ("sys/network_sent_bytes_per_s", "bytes per s", "sent by the host, without loopback"),
        ("sys/network_received_bytes_per_s", "bytes per s", "received by the host, without loopback"),
        ("sys/device_util_frac", "1", "time in which some kernel ran on the device"),
        ("sys/device_power_w", "W", "power that it takes"),
        ("sys/device_power_limit_w", "W", "power that it may take"),
        ("sys/device_temperature_c", "°C", "temperature of the chip"),
        ("sys/device_clock_hz", "Hz", "clock of its processors"),
        ("sys/device_max_clock_hz", "Hz", "the highest clock that they may have"),
        ("sys/device_memory_bytes", "bytes", "memory that processes hold"),
        ("sys/device_throttled", "1", "1 where heat or the power supply hold its clock down"),
        ("sys/device_corrected_errors", "errors", "of memory, which ECC corrected since the driver was loaded"),
        ("sys/device_uncorrected_errors", "errors", "of memory, which it could not correct"),
        ("sys/device_<figure>", "in its name", "a figure of an installed device reader"),
    ),
)

GROUPS: Final = frozenset(name.name.partition("/")[0] for name in METRIC_NAMES)
"""First parts of names that a user's own numbers do not have."""


def find_metric(name: str) -> MetricName | None:
    """The entry of ``name``; the one that says most of it where several match."""
    found = [entry for entry in METRIC_NAMES if entry.matches(name)]
    return max(found, key=lambda entry: (entry.name == name, len(entry.name)), default=None)


def markdown_table() -> str:
    """The table of all names, for the documentation."""
    lines = ["| name | unit | event | meaning |", "|---|---|---|---|"]
    lines += [f"| `{entry.name}` | {entry.unit} | `{entry.kind}` | {entry.meaning} |" for entry in METRIC_NAMES]
    return "\n".join(lines) + "\n"

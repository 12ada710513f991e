"""The summary of one rank's profile, as ``profile/step-…/rank-N.json`` has it. Times in seconds, sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from unisono.errors import DataError
from unisono.storage.directory import numbered_directories, numbered_name
from unisono.storage.files import os_reason
from unisono.storage.limits import MAX_PROFILE_BYTES, read_json
from unisono.storage.run_folder import PROFILE_FOLDER

VERSION: Final = 1
MERGED_FILE: Final = "trace.json.gz"
MEMORY_CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "other")
_FILE_NAME: Final = re.compile(r"rank-([0-9]{1,9})\.json")
# files of a profile, and with a second group what a rank that was killed while it wrote them has left
_ALL_FILES: Final = re.compile(
    r"(?:rank-([0-9]{1,9})\.(?:json|trace\.json\.gz)|trace\.json\.gz)(\.json(?:\.tmp)?|\.tmp-[0-9]+-[0-9a-f]+)?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One profiled step: its number (-1 where the trace has none), its begin after that of the first, and its length."""

    step: int
    start_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Time of the training thread in one phase, without phases inside it."""

    name: str
    calls: int
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpan:
    """One pass through a phase, such as the forward pass of one micro-batch: its begin after that of the step, and its length."""

    name: str
    start_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """Calls of one operator.

    Attributes:
        name: Such as ``aten::mm``.
        calls: How often it ran.
        total_s: Time in it, on the host.
        self_s: The same without operators that it calls.
        device_s: Time of the kernels that it launched itself.
        shapes: The shapes of inputs that took most of its own time, as JSON texts, the longest first.
    """

    name: str
    calls: int
    total_s: float
    self_s: float
    device_s: float = 0.0
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Runs of one kernel of an accelerator."""

    name: str
    calls: int
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixProduct:
    """Products of matrices [m, k] and [k, n], ``batch`` of them at a time."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    calls: int
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind along one axis of the mesh.

    Attributes:
        name: Such as ``all_reduce``.
        axis: ``dp``, ``cp``, ``tp``, ``ep`` or ``pp``; in a foreign trace the description of the group.
        group_size: Ranks of the group; 0 where it is not known.
        calls: How often.
        num_bytes: Bytes of all calls, as nccl-tests counts them.
        total_s: Time from the start of each to its end, together.
        algorithm_bytes_per_s: ``num_bytes`` by the time.
        bus_bytes_per_s: The same times the factor of nccl-tests; 0 where the group's size is not known.
        can_overlap: Whether it can overlap with computation; sums through shared memory cannot.
    """

    name: str
    axis: str
    group_size: int
    calls: int
    num_bytes: int
    total_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    can_overlap: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Time in which collectives of an axis run (``total_s``), and the part in which nothing is computed (``exposed_s``)."""

    axis: str
    total_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTime:
    """Use of host and device.

    Attributes:
        compute_s: Time of the steps without waiting for data, other ranks, checkpoints and evaluations.
        work_s: Of it, time in operators whose median call, of the same shapes, takes 10 µs or longer without inner operators;
            with kernels, time in which any kernel runs.
        num_operators: Operators that the host called, without those of waits.
        num_kernels: Kernels; 0 on the CPU.
        num_short: Kernels, or operators on the CPU, that take less than 10 µs.
    """

    compute_s: float
    work_s: float
    num_operators: int
    num_kernels: int
    num_short: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """Where the host waits for the device, or would on an accelerator.

    Attributes:
        kind: Operator or call, such as ``aten::_local_scalar_dense``.
        phase: The phase that it is in.
        calls: How often.
        total_s: Time in it.
        source: ``file:line`` or ``file(line): function``, without files of torch; those of this library begin with ``unisono/``.
            Empty without stacks.
    """

    kind: str
    phase: str
    calls: int
    total_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingAllocation:
    """A line of the source whose allocations stay from step to step.

    Attributes:
        kind: ``tensor``, or ``object`` for arrays and other Python objects.
        source: ``file:line``, of the innermost frame that is neither Python's nor torch's for a tensor.
        phase: The phase that a tensor is allocated in; empty for an object.
        bytes_per_step: Bytes by which they grow in a step.
    """

    kind: Literal["tensor", "object"]
    source: str
    phase: str
    bytes_per_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCounts:
    """Compilations of torch.compile in the window (after warm-up there should be none), their time, and graph breaks; -1 graph
    breaks where their number is not known."""

    compilations: int = 0
    total_s: float = 0.0
    graph_breaks: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """Operators that one fused operator replaces.

    Attributes:
        kind: ``attention`` or ``norm``.
        calls: How often they ran.
        total_s: Time of all of them, forward and backward.
        element_s: Of it, time outside of matrix products.
        example: Names of the operators, in order.
        shapes: Shapes of the inputs of the softmax or of the root, as JSON text.
    """

    kind: str
    calls: int
    total_s: float
    element_s: float
    example: tuple[str, ...]
    shapes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """Memory of the device, or of the host on the CPU, through the window.

    Attributes:
        peak_bytes: Most tensor memory in use.
        at_peak: Bytes by category of ``MEMORY_CATEGORIES`` then; empty in a foreign trace.
        planned: Bytes by category that follow from the plan; empty without one.
        limit_bytes: The memory there is; 0 where it is not known.
        timeline: Up to 500 points, the largest of each part of the window: seconds since the first step, and bytes by category
            in the order of ``MEMORY_CATEGORIES``; in a foreign trace seconds and all bytes.
    """

    peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict[str, int])
    planned: Mapping[str, int] = field(default_factory=dict[str, int])
    limit_bytes: int = 0
    timeline: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The clock of a rank compared with that of rank 0.

    Attributes:
        offset_s: This rank's clock minus rank 0's.
        error_s: Largest error of ``offset_s``; 0 on the same host, which has one clock.
        base_ns: Wall-clock time, in nanoseconds since 1970, that the times of the trace count from.
    """

    offset_s: float = 0.0
    error_s: float = 0.0
    base_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """The profile of one rank.

    Attributes:
        version: Version of this format.
        rank: The rank; 0 for a foreign trace.
        world_size: Number of ranks; 0 where it is not known.
        is_foreign: Whether the trace was not made by a run of this library.
        device: ``cpu``, or the type of the accelerator.
        num_events: Events of the trace.
        num_steps: Steps in it; in a trace without marks of steps, updates of the optimizer, 0 where it has no marks of these.
        wall_s: Time of these steps, or of the whole trace.
        steps: The steps.
        began_s: When the first of them began, by rank 0's clock, in seconds since 1970.
        phases: Phases of the training thread.
        spans: Phases of that thread in the first step, by their begin, an outer one before the inner ones; up to 400.
        operators: The operators with most time of their own, up to 50.
        kernels: The kernels with most time, up to 50.
        products: The matrix products with most time, up to 20.
        collectives: Communication by collective and axis.
        overlaps: Communication and computation at the same time, by axis.
        launch: Use of host and device.
        syncs: Where the host waits, up to 50.
        compiled: What torch.compile did.
        loader_wait_s: Time in which the training thread waits for a batch and no kernel runs.
        recompute_s: Time in forward operators inside of the backward pass; on an accelerator that of their kernels.
        patterns: Operators that one fused operator replaces.
        memory: Memory through the window.
        grows: Lines whose allocations stay, the largest first; recorded with stacks, in three steps or more.
        clock: This rank's clock.
        has_stacks: Whether Python's stacks were recorded.
        trace_file: Name of the trace beside this file; empty if it was dropped.
        notes: What is missing, and why.
    """

    version: int = VERSION
    rank: int = 0
    world_size: int = 0
    is_foreign: bool = False
    device: str = "cpu"
    num_events: int = 0
    num_steps: int = 0
    wall_s: float = 0.0
    steps: tuple[StepTime, ...] = ()
    began_s: float = 0.0
    phases: tuple[PhaseTime, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    collectives: tuple[Collective, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    launch: LaunchTime = field(
        default_factory=lambda: LaunchTime(compute_s=0.0, work_s=0.0, num_operators=0, num_kernels=0, num_short=0)
    )
    syncs: tuple[SyncPoint, ...] = ()
    compiled: CompileCounts = field(default_factory=CompileCounts)
    loader_wait_s: float = 0.0
    recompute_s: float = 0.0
    patterns: tuple[Pattern, ...] = ()
    memory: MemoryProfile = field(default_factory=MemoryProfile)
    grows: tuple[GrowingAllocation, ...] = ()
    clock: Clock = field(default_factory=Clock)
    has_stacks: bool = False
    trace_file: str = ""
    notes: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """The profile as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


_decode: Final = msgspec.json.Decoder(RankProfile).decode


def profile_folder(run_dir: Path, step: int) -> Path:
    """The folder of the profile whose first step is ``step``, such as ``profile/step-00000100``."""
    return run_dir / PROFILE_FOLDER / numbered_name("step", step)


def profile_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of a run's profiles, by first step, ascending."""
    return numbered_directories(run_dir / PROFILE_FOLDER, "step")


def read_profile(path: Path) -> RankProfile:
    """Read one rank's profile. Raises DataError for a file that is none."""
    try:
        profile: RankProfile = read_json(path, _decode, max_bytes=MAX_PROFILE_BYTES)
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise DataError(
            given=f"{path}, which is no profile of a rank: {reason}",
            rule="a profile is the file rank-N.json that a run wrote",
            consequence="it was left out",
            nearest="profile again: unisono profile RUN.toml",
        ) from error
    return profile


def read_profiles(folder: Path) -> tuple[tuple[RankProfile, ...], tuple[str, ...]]:
    """The profiles of all ranks in a folder, by rank; and a note for each that cannot be read."""
    profiles: list[RankProfile] = []
    notes: list[str] = []
    for path in _rank_files(folder):
        try:
            profiles.append(read_profile(path))
        except DataError as error:
            notes.append(error.problems[0].given)
    return tuple(sorted(profiles, key=lambda profile: profile.rank)), tuple(notes)


def remove_earlier(folder: Path, rank: int | None, before_s: float) -> None:
    """Remove what attempts that began before ``before_s`` (seconds since 1970) left in a profile's folder: of one rank, or of all
    with None, and the merged trace. What cannot be removed stays."""
    for path, _, of_rank in _files(folder):
        if rank is None or of_rank == rank:
            _remove_older(path, before_s)


def remove_unfinished(run_dir: Path, rank: int, before_s: float) -> None:
    """Remove the unfinished files of ``rank`` from all profiles of a run, which may be gigabytes; on rank 0 also those of other
    ranks from before ``before_s`` (seconds since 1970). Called while the rank writes none. What cannot be removed stays."""
    for folder in profile_folders(run_dir).values():
        for path, is_unfinished, of_rank in _files(folder):
            if is_unfinished and of_rank == rank:
                with suppress(OSError):
                    path.unlink()
            elif is_unfinished and rank == 0:
                _remove_older(path, before_s)


def _files(folder: Path) -> list[tuple[Path, bool, int | None]]:
    """The files of a profile, whether each is unfinished, and whose it is; None for the merged trace."""
    try:
        found = [(path, _ALL_FILES.fullmatch(path.name)) for path in folder.iterdir()]
    except OSError:
        return []
    return [
        (path, match[2] is not None, None if match[1] is None else int(match[1]))
        for path, match in found
        if match is not None
    ]


def _remove_older(path: Path, before_s: float) -> None:
    with suppress(OSError):
        if path.lstat().st_mtime < before_s:
            path.unlink()


def newest_profiles(run_dir: Path) -> tuple[tuple[RankProfile, ...], Sequence[str]]:
    """The profiles of the last window of a run, and notes on files that cannot be read; nothing where there are none."""
    folder = newest_profile_folder(run_dir)
    return ((), ()) if folder is None else read_profiles(folder)


def newest_profile_folder(run_dir: Path) -> Path | None:
    """The folder of the last window of a run that has the profile of a rank, readable or not; None without one."""
    folders = sorted(profile_folders(run_dir).items(), reverse=True)
    return next((folder for _, folder in folders if any(_rank_files(folder))), None)


def _rank_files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name))
    except OSError:
        return

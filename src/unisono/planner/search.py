"""The fastest layouts of a model on a cluster that fit into its memory, and why not others. Imports no torch.

Every layout of an axis' powers of two and divisors is counted (``step_work``, ``peak_memory``); there are some ten thousand, so
nothing is pruned but by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.planner.devices import Device, Precision
from unisono.planner.layout import Layout, LayoutError, Numbers, Recompute
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import peak_memory
from unisono.planner.step_time import efficiencies, fitted_constants, step_time
from unisono.planner.step_work import count_work

AXES: Final = ("tp", "pp", "stages_per_rank", "cp", "ep", "dp_shard", "micro_batch", "recompute")
MEMORY_SHARE: Final = (
    0.92  # of the device's memory that a layout may take: the rest is for communicators and the driver
)
# shorter sequences are not divided: few published runs divide any, so what that costs is the least certain part of a prediction
LEAST_CP_TOKENS: Final = 32768
_LEAST_SHARE: Final = 4096  # tokens of a sequence on each rank that divides it
_SAME: Final = 0.03  # part of a step time, or of a memory: predictions are not more exact than this
_EQUAL: Final = 1e-9  # as times of many layouts are summed in another order
_MOST_MICRO_BATCH: Final = 16
_RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is searched for.

    Attributes:
        model: Its shape.
        device: The accelerator.
        num_devices: Devices of the cluster, all of which are used.
        precision: Of the matrix products.
        global_batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        compiled: Whether the model is compiled.
        pins: Values that are given, by the names of ``AXES``.
        memory_bytes: Memory of a device; 0: that of its data sheet.
    """

    model: ModelShape
    device: Device
    num_devices: int
    precision: Precision
    global_batch: int
    seq_len: int
    compiled: bool = False
    pins: Mapping[str, int | str]
    memory_bytes: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its prediction.

    Attributes:
        layout: The layout.
        step_s: Seconds of a step.
        needed_bytes: What must fit into the device that needs most (``MemoryParts.counted``).
    """

    layout: Layout
    step_s: float
    needed_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What was found.

    Attributes:
        best: The fastest that fits; None if none fits.
        simplest: Of those that fit and take at most 3 % longer, the one with the fewest axes; None if none fits.
        num_layouts: Layouts that were compared.
        num_fitting: Those that fit.
        limit_bytes: What ``needed_bytes`` may be.
        changes: Each other value of an axis, in the order of ``AXES``, with the best layout that has it. A value that no layout
            has is left out.
        pareto: The fastest for each amount of memory: none is both faster and smaller.
        smallest: The one that needs least memory.
        without_limit: The fastest if memory did not count.
    """

    best: Candidate | None
    simplest: Candidate | None
    num_layouts: int
    num_fitting: int
    limit_bytes: float
    changes: Sequence[tuple[str, int | str, Candidate]]
    pareto: Sequence[Candidate]
    smallest: Candidate
    without_limit: Candidate


def search(job: Job) -> SearchResult:
    """The fastest layout of ``job`` that fits. The same job has the same result.

    Raises:
        LayoutError: No layout is legal.
    """
    layouts = list(_layouts(job))
    if not layouts:
        raise LayoutError(
            f"{job.num_devices} devices, a global batch of {job.global_batch} sequences"
            + (f", {' '.join(f'{axis}={value}' for axis, value in job.pins.items())}" if job.pins else ""),
            "axes divide the devices, the batch, the heads, the experts and the layers, and no layout does",
            "a batch that more numbers divide, such as a power of two, or fewer pins",
        )
    fitted, work = fitted_constants(), count_work(layouts)
    times = step_time(work, efficiencies(layouts, fitted), fitted).total
    needs = peak_memory(layouts).counted
    limit = MEMORY_SHARE * (job.memory_bytes or job.device.memory_bytes)
    fits = needs <= limit

    def candidate(index: int) -> Candidate:
        return Candidate(layout=layouts[index], step_s=float(times[index]), needed_bytes=float(needs[index]))

    def fastest(inside: NDArray[np.bool_]) -> int:
        """Of equal ones the simplest."""
        among = np.flatnonzero(inside)
        least = times[among].min()
        equal = among[times[among] <= least * (1 + _EQUAL)]
        return int(min(equal, key=lambda index: _complexity(layouts[index])))

    best = fastest(fits) if fits.any() else None
    simplest = None
    if best is not None:
        near = np.flatnonzero(fits & (times <= times[best] * (1 + _SAME)))
        simplest = candidate(int(min(near, key=lambda index: (_complexity(layouts[index]), times[index]))))
    return SearchResult(
        best=None if best is None else candidate(best),
        simplest=simplest,
        num_layouts=len(layouts),
        num_fitting=int(fits.sum()),
        limit_bytes=limit,
        changes=tuple(
            (axis, value, candidate(index)) for axis, value, index in _changes(layouts, fits, needs, best, fastest)
        ),
        pareto=tuple(map(candidate, _pareto(times, needs))),
        smallest=candidate(int(np.argmin(needs))),
        without_limit=candidate(fastest(np.ones(len(layouts), bool))),
    )


def _changes(
    layouts: Sequence[Layout],
    fits: NDArray[np.bool_],
    needs: Numbers,
    best: int | None,
    fastest: Callable[[NDArray[np.bool_]], int],
) -> Iterator[tuple[str, int | str, int]]:
    """For each other value of an axis, the best layout with it: the fastest that fits, else the one that needs least memory."""
    for axis in AXES:
        values = [getattr(layout, axis) for layout in layouts]
        for value in sorted(set(values), key=str if axis == "recompute" else float):
            if best is not None and value == values[best]:
                continue
            inside = np.array([each == value for each in values])
            fitting = inside & fits
            smallest = int(np.flatnonzero(inside)[np.argmin(needs[inside])])
            yield axis, value, fastest(fitting) if fitting.any() else smallest


def _complexity(layout: Layout) -> tuple[float, ...]:
    """Fewer axes first, then fewer ranks of each; recompute and sharding count as axes."""
    axes = (layout.pp, layout.cp, layout.tp, layout.stages_per_rank, layout.ep)
    used = sum(axis > 1 for axis in axes) + (layout.dp_shard > 1) + _RECOMPUTE.index(layout.recompute)
    return (used, *axes, layout.dp_shard, layout.micro_batch)


def _pareto(times: Numbers, needs: Numbers) -> list[int]:
    """From the fastest to the smallest."""
    found: list[int] = []
    least = np.inf
    for index in np.lexsort((needs, times)):
        if needs[index] < least * (1 - _SAME):
            found.append(int(index))
            least = needs[index]
    return found


def _layouts(job: Job) -> Iterator[Layout]:
    """Every legal layout with the pins."""
    model, pins = job.model, job.pins

    def values(axis: str, every: Sequence[int]) -> Sequence[int]:
        return [int(pins[axis])] if axis in pins else every

    tps = [n for n in _powers(job.device.domain) if model.heads % n == 0 and model.ffn % n == 0]
    cps = [
        n
        for n in _powers(job.seq_len // _LEAST_SHARE if job.seq_len >= LEAST_CP_TOKENS else 1)
        if job.seq_len % (2 * n) == 0 or n == 1
    ]
    for tp in values("tp", tps):
        for pp in values("pp", [n for n in _divisors(job.num_devices // tp) if n <= model.layers]):
            for cp in values("cp", cps):
                if job.num_devices % (tp * pp * cp):
                    continue
                yield from _within(job, values, tp, pp, cp, job.num_devices // (tp * pp * cp))


def _within(
    job: Job, values: Callable[[str, Sequence[int]], Sequence[int]], tp: int, pp: int, cp: int, dp: int
) -> Iterator[Layout]:
    """Layouts with these axes.

    Args:
        job: The job.
        values: The pin of an axis, else what is given.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        cp: Ranks that share a sequence.
        dp: Model replicas.
    """
    model = job.model
    if job.global_batch % dp:
        return
    share = job.global_batch // dp
    eps = [n for n in _divisors(model.experts) if (job.num_devices // pp) % n == 0] if model.experts else [1]
    per_rank = [n for n in _powers(8) if pp * n <= model.layers] if pp > 1 else [1]
    for micro_batch in values("micro_batch", [n for n in _powers(_MOST_MICRO_BATCH) if share % n == 0]):
        if share % micro_batch:
            continue
        micro_batches = share // micro_batch
        for stages in values("stages_per_rank", per_rank):
            if pp > 1 and (micro_batches < pp or (stages > 1 and micro_batches % pp)):
                continue
            for ep in values("ep", eps):
                # a pipeline gathers parameters with each of many micro-batches, so its states are shared by ZeRO 1
                for dp_shard in values("dp_shard", _shards(job, dp * cp) if pp == 1 else [1]):
                    for recompute in (str(job.pins["recompute"]),) if "recompute" in job.pins else _RECOMPUTE:
                        if recompute == "selective" and dp_shard == 1 and "recompute" not in job.pins:
                            continue  # the same as none
                        try:
                            yield Layout(
                                model=model,
                                device=job.device,
                                precision=job.precision,
                                num_devices=job.num_devices,
                                tp=tp,
                                pp=pp,
                                stages_per_rank=stages if pp > 1 else 0,
                                cp=cp,
                                ep=ep,
                                dp_shard=dp_shard,
                                micro_batch=micro_batch,
                                global_batch=job.global_batch,
                                seq_len=job.seq_len,
                                recompute=recompute,  # pyright: ignore[reportArgumentType]
                                compiled=job.compiled,
                            )
                        except LayoutError:
                            continue


def _shards(job: Job, ranks: int) -> list[int]:
    """Data ranks that share the parameters: none, those within a domain of fast links, or all."""
    within = max(n for n in _powers(job.device.domain) if ranks % n == 0)
    return sorted({1, within, ranks})


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, most).bit_length())]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

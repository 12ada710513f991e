"""What would change the decision of a search, and what fewer devices would do. Imports no torch.

One property of the cluster or of the batch at a time is halved and doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_space import AXES, Job
from unisono.planner.layout_time import layout_time
from unisono.planner.search import LayoutTable, PredictedLayout, compare, memory_limit, with_other_memory

Property = Literal["device memory", "network bandwidth", "link bandwidth", "global batch", "devices"]
PROPERTIES: Final[tuple[Property, ...]] = (
    "device memory",
    "network bandwidth",
    "link bandwidth",
    "global batch",
    "devices",
)
FACTORS: Final = (0.5, 2.0)
_SHARES: Final = (1, 2, 4)  # of the cluster's devices: all, a half, a quarter


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """The best layout with one property changed.

    Attributes:
        changed: The property.
        factor: What it is multiplied by.
        best: The fastest layout that fits; None if none does.
        is_other: Whether it has another value on some axis than the best layout of the job itself, or recomputes other blocks.
        reason: Why there is no layout; empty if there is one.
    """

    changed: Property
    factor: float
    best: PredictedLayout | None
    is_other: bool
    reason: str = ""

    @property
    def text(self) -> str:
        """The property and its factor, such as ``device memory x 2``."""
        return f"{self.changed} x {self.factor:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCount:
    """What a number of devices does.

    Attributes:
        num_devices: The number.
        best: The fastest layout that fits; None if none does.
        tokens_per_s: Tokens of a device in a second; 0 if none fits.
        front: Of the layouts that fit, those that no other one of as many devices or fewer beats in both time and memory.
        reason: Why there is no layout; empty if there is one.
    """

    num_devices: int
    best: PredictedLayout | None
    tokens_per_s: float
    front: Sequence[PredictedLayout]
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Perturbations in the order of ``PROPERTIES``, and device counts from the whole cluster down."""

    perturbations: Sequence[Perturbation]
    device_counts: Sequence[DeviceCount]


def sensitivity(job: Job, compared: LayoutTable) -> Sensitivity:
    """Search again with each property changed; ``compared`` are the layouts of ``job`` itself."""
    searches = {job.num_devices: _Search(job=job, compared=compared)}
    for count in [job.num_devices // share for share in _SHARES if job.num_devices % share == 0] + [
        2 * job.num_devices
    ]:
        if count not in searches:
            searches[count] = _Search.of(replace(job, num_devices=count))
    best = searches[job.num_devices].best
    return Sensitivity(
        perturbations=tuple(_perturbations(job, compared, best, searches)),
        device_counts=tuple(
            _device_counts([searches[count] for count in sorted(searches, reverse=True) if count <= job.num_devices])
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """Layouts of a job; ``reason`` if there are none."""

    job: Job
    compared: LayoutTable | None
    reason: str = ""

    @staticmethod
    def of(job: Job, find: Callable[[Job], LayoutTable] = compare) -> _Search:
        try:
            return _Search(job=job, compared=find(job))
        except LayoutError as error:
            return _Search(job=job, compared=None, reason=str(error))

    @property
    def best(self) -> PredictedLayout | None:
        return self.compared.best(memory_limit(self.job)) if self.compared else None


def _perturbations(
    job: Job, compared: LayoutTable, best: PredictedLayout | None, searches: Mapping[int, _Search]
) -> Iterator[Perturbation]:
    for changed in PROPERTIES:
        for factor in FACTORS:
            count = job.num_devices * factor
            if changed == "devices" and count not in searches:
                continue  # a half of an odd number
            if changed == "device memory":
                memory = (job.memory_bytes or job.device.memory_bytes) * factor
                # partial recompute is made for a memory
                found = _Search.of(replace(job, memory_bytes=memory), partial(with_other_memory, compared=compared))
                other, reason = found.best, found.reason
            elif changed in ("network bandwidth", "link bandwidth"):
                other, reason = _with_bandwidth(job, compared, changed, factor), ""
            else:
                found = searches[int(count)] if changed == "devices" else _with_batch(job, factor)
                other, reason = found.best, found.reason
            is_other = (other and _decision(other.layout)) != (best and _decision(best.layout))
            if other is None and not reason:
                reason = "no layout fits into the memory of a device"
            yield Perturbation(changed=changed, factor=factor, best=other, is_other=is_other, reason=reason)


def _with_bandwidth(job: Job, compared: LayoutTable, changed: Property, factor: float) -> PredictedLayout | None:
    """The best layout with other links or another network: needs stay, times change."""
    name = "network_bytes_per_s" if changed == "network bandwidth" else "link_bytes_per_s"
    device = replace(job.device, **{name: getattr(job.device, name) * factor})
    layouts = [replace(layout, device=device) for layout in compared.layouts]
    return replace(compared, layouts=layouts, step_s=layout_time(layouts).total).best(memory_limit(job))


def _with_batch(job: Job, factor: float) -> _Search:
    batch = job.global_batch * factor
    if not batch.is_integer():
        return _Search(job=job, compared=None, reason=f"a half of {job.global_batch} sequences is no whole number")
    return _Search.of(replace(job, global_batch=int(batch)))


def _decision(layout: Layout) -> tuple[object, ...]:
    """What is chosen: the axes, with all data ranks as one value, so that another number of devices alone changes nothing; and
    which blocks are recomputed."""
    values = {axis: getattr(layout, axis) for axis in AXES}
    values["dp_shard"] = "all" if layout.zero and layout.dp_shard == layout.dp else layout.dp_shard
    return (*values.values(), layout.recomputed_blocks)


def _device_counts(searches: Sequence[_Search]) -> Iterator[DeviceCount]:
    """From the most devices on; layouts of fewer devices are only left out where one of still fewer is as good."""
    for number, each in enumerate(searches):
        limit = memory_limit(each.job)
        fewer = [layout for other in searches[number + 1 :] if other.compared for layout in other.compared.pareto()]
        front = [
            layout
            for layout in (each.compared.pareto() if each.compared else ())
            if layout.needed_bytes <= limit
            and not any(it.step_s <= layout.step_s and it.needed_bytes <= layout.needed_bytes for it in fewer)
        ]
        best, tokens = each.best, each.job.global_batch * each.job.seq_len
        yield DeviceCount(
            num_devices=each.job.num_devices,
            best=best,
            tokens_per_s=tokens / best.step_s / each.job.num_devices if best else 0.0,
            front=front,
            reason=each.reason or ("" if best else "no layout fits into the memory of a device"),
        )

"""The layouts that a search compares, and for each value of an axis that none of them has, the rule. Imports no torch.

Compared are powers of two and divisors of each axis. Left out is what unisono's own runs refuse (``plan.validate``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from unisono.plan.options import Schedule
from unisono.plan.plan import STAGES_PER_RANK
from unisono.planner.devices import Device, Precision
from unisono.planner.layout import KEPT_BY_RUNS, ZERO_STAGES, Layout, LayoutError, Recompute, check_blocks
from unisono.planner.learned import LearnedFactors
from unisono.planner.model_shape import ModelShape

AXES: Final = (
    *("tp", "pp", "stages_per_rank", "schedule", "cp", "ep", "zero", "dp_shard", "micro_batch", "recompute", "offload"),
)
# shorter sequences are not divided: few published runs divide any, so what that costs is the least certain part of a prediction
LEAST_CP_TOKENS: Final = 32768
RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")  # of all blocks
OFFLOAD: Final = "offload"  # not enumerated either, unless pinned (``offloading``)
PARTIAL: Final[Recompute] = "partial"  # not enumerated: its blocks follow from the memory (``partial_recompute``)
RECOMPUTED_BLOCKS: Final = "recomputed_blocks"  # a pin beside those of ``AXES``, of partial recompute
LAYERS_PER_STAGE: Final = "layers_per_stage"  # and another, which ``Job`` has by itself
_LEAST_SHARE: Final = 4096  # tokens of a sequence on each rank that divides it
_MOST_MICRO_BATCH: Final = 16
_MOST_STAGES: Final = 10  # of a rank
SCHEDULES: Final = tuple(STAGES_PER_RANK)
WORDS: Final = ("schedule", "recompute")  # axes whose values are no numbers
_MOST_RANKS: Final = 64  # of tp and cp whose rule is told

Value = int | str  # of an axis; a bool of ``offload``


def value_text(value: Value | float) -> str:
    """A value as pins have it; layouts that were read from a file have numbers with a point."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The model, cluster and batch that a layout is searched for.

    Attributes:
        model: Shape of the model.
        device: The accelerator.
        num_devices: Devices of the cluster, all of which are used.
        precision: Precision of the matrix products.
        global_batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        compiled: Whether the model is compiled.
        pins: Values that are given, by the names of ``AXES``. With ``recompute=partial`` there may be ``recomputed_blocks``, the
            blocks of each stage that are recomputed.
        layers_per_stage: Blocks of each stage of a pipeline, where they are given.
        memory_bytes: Memory of a device; 0: that of its data sheet.
        learned: What earlier runs of such a model on such devices correct.
        traced_over_counted: What counted memory is multiplied by, for each kind of recompute (``finalists``); empty: by nothing.
            That of partial recompute is beside those of none and full recompute (``search.needed_bytes``).
    """

    model: ModelShape
    device: Device
    num_devices: int
    precision: Precision
    global_batch: int
    seq_len: int
    compiled: bool = False
    pins: Mapping[str, int | str]
    layers_per_stage: tuple[int, ...] = ()
    memory_bytes: float = 0
    learned: LearnedFactors = LearnedFactors()
    traced_over_counted: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def given_text(self) -> str:
        """The job with its pins, without its model."""
        given = {axis: value_text(value) for axis, value in self.pins.items()}
        if self.layers_per_stage:
            given[LAYERS_PER_STAGE] = ",".join(map(str, self.layers_per_stage))
        pins = " ".join(f"{axis}={text}" for axis, text in given.items())
        job = f"{self.num_devices} devices, a global batch of {self.global_batch} sequences"
        return f"{job}, {pins}" if pins else job


@dataclass(slots=True)
class Space:
    """All legal layouts of a job, enumerated when it is made, and why other values of an axis have none.

    Making it raises LayoutError for a pin that no layout of such a model and such sequences has (``check_pins``).

    Attributes:
        job: The job.
        layouts: Every legal layout with the pins; without recompute if partial recompute is pinned.
        refused: Each value of an axis that no layout has, in the order of ``AXES``, with the rule.
    """

    job: Job
    layouts: list[Layout] = field(default_factory=list[Layout])
    refused: tuple[tuple[str, Value, str], ...] = ()
    _reasons: defaultdict[tuple[str, Value], Counter[str]] = field(default_factory=lambda: defaultdict(Counter[str]))

    def __post_init__(self) -> None:
        check_pins(self.job)
        self.layouts = list(self._every())
        had = {axis: {getattr(layout, axis) for layout in self.layouts} for axis in AXES}
        self.refused = tuple(
            (axis, value, reason)
            for axis in AXES
            if axis not in self.job.pins
            for value in _candidates(self.job, axis)
            if value not in had[axis] and (reason := self._reason(axis, value))
        )

    def nearest_pin(self) -> tuple[str, str, str] | None:
        """A pin without which there are layouts, the rule that it breaks, and its nearest value that has layouts.

        None if no single pin is in the way of all others.
        """
        job = self.job
        for axis, pin in job.pins.items():
            if axis not in AXES or axis == OFFLOAD:
                continue
            free = replace(job, pins={name: value for name, value in job.pins.items() if name != axis})
            values = {getattr(layout, axis) for layout in Space(free).layouts} - {None}
            if values:
                nearest = nearest_value(pin, sorted(values, key=_order))
                (rule, _), *_ = self._reasons[axis, pin].most_common(1) or [("no layout has it beside the others", 0)]
                return f"{axis}={value_text(pin)}", rule, f"{axis}={value_text(nearest)}"
        if job.layers_per_stage and (layouts := Space(replace(job, layers_per_stage=())).layouts):
            counts = sorted({layout.pp * layout.stages_per_rank for layout in layouts if layout.pp > 1})
            text = ",".join(map(str, job.layers_per_stage))
            rule = "pp x stages_per_rank is the number of stages, and the other pins leave no such pipeline"
            near = nearest_value(len(job.layers_per_stage), counts) if counts else 0
            return f"{LAYERS_PER_STAGE}={text}", rule, f"{near} numbers" if near else "pp above 1"
        return None

    def _reason(self, axis: str, value: Value) -> str:
        """The rule that keeps most layouts with this value out."""
        counts = self._reasons[axis, value]
        told = _rule(self.job, axis, value) or (counts.most_common(1)[0][0] if counts else "")
        return told or ("it orders the passes of a pipeline, and no layout has one" if axis == "schedule" else "")

    def _refuse(self, reason: str, **values: Value) -> None:
        for axis, value in values.items():
            self._reasons[axis, value][reason] += 1

    def _values(self, axis: str) -> Sequence[int]:
        """The pin of an axis, else all values that break no rule."""
        job = self.job
        if axis in job.pins:
            return [int(job.pins[axis])]
        return [int(value) for value in _candidates(job, axis) if not _rule(job, axis, value)]

    def _every(self) -> Iterator[Layout]:
        job = self.job
        for tp in self._values("tp"):
            for pp in self._values("pp"):
                for cp in self._values("cp"):
                    if job.num_devices % (tp * pp * cp):
                        self._refuse(f"tp x pp x cp divides {job.num_devices} devices", tp=tp, pp=pp, cp=cp)
                        continue
                    dp = job.num_devices // (tp * pp * cp)
                    if job.global_batch % dp:
                        rule = f"replicas divide the global batch of {job.global_batch}"
                        self._refuse(rule, tp=tp, pp=pp, cp=cp)
                        continue
                    if cp > 1 and tp > 1 and job.seq_len % (2 * cp * tp):
                        self._refuse(f"2 x cp x tp divides sequences of {job.seq_len} tokens", tp=tp, cp=cp)
                        continue
                    yield from self._within(tp, pp, cp, dp)

    def _within(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[Layout]:
        """Layouts with these axes.

        Args:
            tp: Tensor-parallel ranks.
            pp: Pipeline ranks.
            cp: Ranks that share a sequence.
            dp: Model replicas.
        """
        share = self.job.global_batch // dp
        cut = self.job.layers_per_stage
        if pp == 1 and (cut or int(self.job.pins.get("stages_per_rank", 1)) > 1):
            self._refuse("several stages are those of a pipeline", pp=pp)
            return
        if len(cut) % pp:
            self._refuse(f"it divides the {len(cut)} stages that are given", pp=pp)
            return
        for micro_batch in self._values("micro_batch"):
            if share % micro_batch:
                self._refuse("it divides a replica's share of the global batch", micro_batch=micro_batch)
                continue
            micro_batches = share // micro_batch
            if pp == 1 and not self.job.pins.keys().isdisjoint(("stages_per_rank", "schedule")):
                continue  # a rank has stages, and an order of passes, in a pipeline alone
            for stages in self._stages_per_rank(pp):
                if stages > 1 and pp * stages > self.job.model.layers:
                    self._refuse("each stage has a block", stages_per_rank=stages, schedule=_of_stages(stages))
                    continue
                uneven = stages > 1 and math.ceil(self.job.model.layers / pp) % stages
                if uneven and not cut and "stages_per_rank" not in self.job.pins:
                    # with unequal stages ranks wait for each other, up to a tenth of a step (``pipeline_timeline``)
                    rule = "all stages of a rank have as many blocks"
                    self._refuse(rule, stages_per_rank=stages, schedule=_of_stages(stages))
                    continue
                for schedule in self._schedules(pp, stages, micro_batches) if pp > 1 else [None]:
                    for zero, dp_shard in self._sharings(dp, cp, schedule):
                        for ep in self._values("ep"):
                            if ep > 1 and (dp_shard * cp % ep or zero == 0):
                                self._refuse("it divides the dp_shard x cp ranks that share states", ep=ep)
                                continue
                            for recompute in self._recomputes(schedule):
                                yield self._layout(
                                    tp, pp, cp, stages, schedule, zero, dp_shard, ep, micro_batch, recompute
                                )

    def _stages_per_rank(self, pp: int) -> Sequence[int]:
        """Stages of each of ``pp`` ranks: as many as a given cut has, else the values of the axis."""
        count, pin = len(self.job.layers_per_stage) // pp, self.job.pins.get("stages_per_rank")
        if count and pin not in (None, count):
            rule = f"pp x stages_per_rank is {count * pp}, the number of stages that are given"
            self._refuse(rule, pp=pp, stages_per_rank=int(pin or 0))
            return []
        return [count] if count else self._values("stages_per_rank") if pp > 1 else [0]

    def _schedules(self, pp: int, stages: int, micro_batches: int) -> Iterator[Schedule]:
        """Orders of the passes of so many ranks with so many stages each (``plan.validate``)."""
        pin = self.job.pins.get("schedule")
        for schedule in SCHEDULES:
            if pin not in (None, schedule):
                continue
            if stages != STAGES_PER_RANK[schedule] and not (schedule == "interleaved" and stages > 1):
                continue
            if schedule == "gpipe":
                if pin is None and micro_batches >= pp:
                    self._refuse("it takes as long as 1f1b, and holds all micro-batches", schedule=schedule)
                    continue
            elif micro_batches < pp:
                rule = "a replica has at least as many micro-batches as the pipeline has ranks, except with gpipe"
                self._refuse(rule, pp=pp, stages_per_rank=stages, schedule=schedule)
                continue
            if schedule == "interleaved" and micro_batches % pp:
                self._refuse("pp divides the micro-batches", stages_per_rank=stages, schedule=schedule)
                continue
            if schedule == "zbv" and self.job.precision in ("fp8", "fp4"):
                rule = f"layers whose gradients of weights are computed later have no {self.job.precision} products"
                self._refuse(rule, schedule=schedule)
                continue
            yield schedule

    def _sharings(self, dp: int, cp: int, schedule: Schedule | None) -> Iterator[tuple[int, int]]:
        """ZeRO stages with data ranks that share states: none, those within a domain of fast links, or all."""
        pins = self.job.pins
        within = max(n for n in _powers(self.job.device.domain) if dp % n == 0)
        for zero in self._values("zero"):
            for dp_shard in [int(pins["dp_shard"])] if "dp_shard" in pins else sorted({1, within, dp}):
                if schedule == "zbv" and dp_shard * cp > 1:
                    self._refuse("gradients of weights that zbv computes later are not shared", schedule=schedule)
                elif dp % dp_shard == 0 and (zero == 0) == (dp_shard * cp == 1):
                    yield zero, dp_shard
                elif zero and dp_shard * cp == 1:
                    self._refuse("states are shared by several data ranks", zero=zero)
                elif zero == 0:
                    rule = "ranks of a sequence share states" if cp > 1 else "it shares no states between data ranks"
                    self._refuse(rule, zero=zero)
                elif dp % dp_shard:
                    self._refuse("it divides the model's replicas", dp_shard=dp_shard)

    def _recomputes(self, schedule: Schedule | None) -> Iterator[Recompute]:
        pin = self.job.pins.get("recompute")
        for recompute in RECOMPUTE if not self.job.pins.get(OFFLOAD) else RECOMPUTE[:1]:
            if pin not in (None, recompute) and (pin, recompute) != (PARTIAL, "none"):
                continue
            if recompute == "selective" and self.job.model.traced:
                self._refuse("what it keeps of a model of one's own is not known", recompute=recompute)
                continue
            if recompute != "none" and schedule == "zbv" and pin is None:
                self._refuse("zbv keeps for gradients of weights what is recomputed", recompute=recompute)
                continue
            yield recompute

    def _layout(
        self,
        tp: int,
        pp: int,
        cp: int,
        stages: int,
        schedule: Schedule | None,
        zero: int,
        dp_shard: int,
        ep: int,
        micro_batch: int,
        recompute: Recompute,
    ) -> Layout:
        """The layout with these values; Args are those of ``Layout``."""
        job = self.job
        layout = Layout(
            model=job.model,
            device=job.device,
            precision=job.precision,
            num_devices=job.num_devices,
            tp=tp,
            pp=pp,
            stages_per_rank=stages,
            schedule=schedule,
            cut="given" if job.layers_per_stage else "balanced",
            layers_per_stage=job.layers_per_stage,
            cp=cp,
            ep=ep,
            zero=zero,
            dp_shard=dp_shard,
            micro_batch=micro_batch,
            global_batch=job.global_batch,
            seq_len=job.seq_len,
            recompute=recompute,
            offload=bool(job.pins.get(OFFLOAD, False)),
            compiled=job.compiled,
            keeps=KEPT_BY_RUNS,
        )
        factor = job.learned.of(layout.shared_axes).factor
        return layout if factor == 1 else replace(layout, learned_factor=factor)


def check_pins(job: Job) -> None:
    """Raises LayoutError for a pin that no layout has: by the shape of the model, or by the length of sequences."""
    for axis, pin in job.pins.items():
        if axis in AXES and (law := _law(job, axis, pin)):
            legal = [value for value in _candidates(job, axis) if not _law(job, axis, value)]
            raise LayoutError(f"{axis}={value_text(pin)}", law, f"{axis}={value_text(nearest_value(pin, legal))}")
    if job.layers_per_stage:
        check_blocks(job.layers_per_stage, job.model.layers)


def nearest_value(pin: Value, values: Sequence[Value]) -> Value:
    """That of ``values`` whose ratio to a number is closest to 1, or whose place in their order is; of equal ones the first."""
    if isinstance(pin, str):
        return min(values, key=lambda value: abs(_order(value) - _order(pin)))
    return min(values, key=lambda value: abs(math.log((int(value) or 0.5) / (pin or 0.5))))


def _order(value: Value) -> int:
    """Words in the order of their axis."""
    words = (*SCHEDULES, *RECOMPUTE, PARTIAL)
    return words.index(value) if isinstance(value, str) else int(value)


def _candidates(job: Job, axis: str) -> Sequence[Value]:
    """Values of an axis that are compared, or whose rule is told; those of ``dp_shard`` follow from the other axes."""
    model = job.model
    if axis in ("tp", "cp"):
        powers = _powers(min(job.num_devices, max(_MOST_RANKS, job.device.domain if axis == "tp" else 0)))
        return sorted({*powers, *_divisors(job.device.domain)} if axis == "tp" else powers)
    if axis == "pp":
        return [n for n in _divisors(job.num_devices) if n <= 2 * model.layers]
    if axis == "stages_per_rank":
        return range(1, _MOST_STAGES + 1)
    if axis == "ep":
        return _divisors(model.experts) if model.experts else [1, 2]
    if axis == "zero":
        return ZERO_STAGES
    if axis == "micro_batch":
        return _powers(_MOST_MICRO_BATCH)
    if axis == "schedule":
        return SCHEDULES
    return RECOMPUTE if axis == "recompute" else ()


def _rule(job: Job, axis: str, value: Value) -> str:
    """The rule that any layout with this value would break; empty if there is none. Values that are pinned may break those that
    are no ``_law``."""
    if law := _law(job, axis, value):
        return law
    count = value if isinstance(value, int) else 0
    if axis == "tp" and count > job.device.domain:
        return f"fast links connect {job.device.domain} devices"
    if axis == "cp" and count > 1:
        if job.seq_len < LEAST_CP_TOKENS:
            return f"sequences are divided from {LEAST_CP_TOKENS:,} tokens on, and have {job.seq_len:,}"
        if job.seq_len // count < _LEAST_SHARE:
            return f"each rank has at least {_LEAST_SHARE:,} tokens of a sequence"
    return ""


def _law(job: Job, axis: str, value: Value) -> str:
    """The rule of all runs that any layout with this value would break; empty if there is none."""
    model, count = job.model, value if isinstance(value, int) else 0
    if axis == "tp":
        if model.traced and count > 1:
            return "layers of a model of one's own are not divided"
        if model.heads % count or model.ffn % count or (model.kv_heads % count and count % model.kv_heads):
            return (
                f"it divides {model.heads} heads and {model.ffn} hidden units, and divides {model.kv_heads} key/value "
                "heads or is a multiple of them"
            )
        return f"it divides sequences of {job.seq_len} tokens" if job.seq_len % count else ""
    if axis == "pp":
        return f"each stage has a block, and the model has {model.layers}" if count > model.layers else ""
    if axis == "cp" and count > 1:
        return f"2 x cp divides sequences of {job.seq_len} tokens" if job.seq_len % (2 * count) else ""
    if axis == "ep" and count > 1:
        if not model.experts:
            return "the model has no experts"
        return f"it divides the model's {model.experts} experts" if model.experts % count else ""
    return ""


def _of_stages(stages: int) -> Schedule:
    """The schedule whose only value is that of ``stages``."""
    return "zbv" if stages == 2 else "interleaved"


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, most).bit_length())]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

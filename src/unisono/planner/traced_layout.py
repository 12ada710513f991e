"""The memory of a layout as unisono's own runs hold it, from traces of a few blocks and micro-batches.

Counts of shapes (``peak_memory``) are those of a well-fused stack. Here the run's own code is traced without values
(``train.pass_traces``) in a short pipeline: a first and a last stage with one block, one between them with one and with two.
A block more adds the same bytes to a pass each time, so each pass of a stage with any number of blocks follows. The passes of a
rank in the order of its schedule give its peak. Traces of layouts that differ in the pipeline alone, or in what is recomputed of
it, are shared.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.checkpoint import CheckpointOptions
from unisono.data.options import LoaderOptions
from unisono.dist.simulated_world import HOST_RANKS
from unisono.errors import UnisonoError
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.observe.options import ObserveOptions
from unisono.optim.options import OptimOptions
from unisono.parallel.pipeline.executor import HiddenStates, UnknownHiddenState
from unisono.plan.options import Schedule
from unisono.plan.pipeline_schedule import Action, Kind, schedule_order
from unisono.plan.plan import Plan
from unisono.planner.finalists import TracedMemory
from unisono.planner.layout import Layout
from unisono.planner.layout_strategy import plan_of
from unisono.planner.model_shape import ModelShape
from unisono.planner.stage_blocks import blocks_per_stage, recomputed_per_stage
from unisono.train.assembly import RunInputs
from unisono.train.input_pipeline import InputPipeline
from unisono.train.objectives import next_token
from unisono.train.optimizers import OptimizerSetup
from unisono.train.options import TrainOptions
from unisono.train.pass_traces import Pass, RankPasses, trace_passes

# data ranks that share states in a trace: from here on what they share is scaled, and all else is the same
_MOST_SHARDS: Final = 8
_RANKS: Final = 3  # of a traced pipeline: a first, a last, and one between
# the first converts weights and makes gradients, the next ones add to these, the last one converts by itself and reduces them
_MICRO_BATCHES: Final = 3

Place = Literal["first", "middle", "last", "only"]  # of a stage in the model
# of a pass among those of its kind through its stage; ``change`` for one of the next ones behind a pass of another kind
Role = Literal["first", "next", "change", "last", "single"]
Mode = Literal["none", "selective", "full"]  # of what is recomputed in a block

_OTHER_ROLE: Final[dict[Role, Role]] = {"next": "change", "change": "next"}
_PASSES: Final[tuple[Kind, Kind]] = ("F", "B")  # of a micro-batch without a pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class _PassBytes:
    """A pass through a stage with few blocks. Blocks more go between its begin and its end.

    Attributes:
        delta: Bytes that are alive after it and were not before.
        of_block: What a block more adds to these.
        alone: The most that is alive in it, over its begin, without blocks more.
        from_begin: With blocks more the most that is alive in its first part, over its begin.
        from_end: The same of its last part, over its end. Both parts have a whole block.
    """

    delta: float
    of_block: float
    alone: float
    from_begin: float
    from_end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankBytes:
    """A rank with few blocks outside of its passes, and what a block more adds.

    Attributes:
        begin: Alive before the step.
        begin_of_block: The same of a block.
        update: The most after the passes, over ``begin``.
        update_of_block: The same of a block.
        shards_of_block: What a block's gradients leave, of those that data ranks share.
    """

    begin: float
    begin_of_block: float
    update: float
    update_of_block: float
    shards_of_block: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traces:
    """All passes of a layout whose blocks are of one ``Mode``.

    Attributes:
        passes: By place of the stage, kind of the pass, and role.
        ranks: By place of the rank in the pipeline.
        blocks: Blocks of a traced stage.
        rank_blocks: Blocks of a traced rank.
        batch_bytes: Of a micro-batch before the step.
        hidden_bytes: Of a hidden state between stages.
        share: What a rank holds of states that data ranks share, over what it holds in the trace.
    """

    passes: Mapping[tuple[Place, Kind, Role], _PassBytes]
    ranks: Mapping[Place, _RankBytes]
    blocks: int
    rank_blocks: int
    batch_bytes: float
    hidden_bytes: float
    share: float

    def at(self, place: Place, kind: Kind, role: Role) -> _PassBytes:
        """A pass of a stage at ``place``; without a pipeline there is one stage."""
        at = place if (place, kind, role) in self.passes or (place, kind, "first") in self.passes else "only"
        return (
            self.passes[(at, kind, role)]
            if (at, kind, role) in self.passes
            else self.passes[at, kind, _OTHER_ROLE[role]]
        )


@dataclass(slots=True)
class LayoutTracer:
    """Traces layouts, each part of them once."""

    _traces: dict[tuple[object, ...], _Traces] = field(default_factory=dict[tuple[object, ...], _Traces])

    def memory(self, layout: Layout) -> TracedMemory:
        """The traced memory of ``layout``, whose model is not ``untraceable``."""
        try:
            plan = plan_of(layout)
            again, kept = _modes(layout)
            modes: tuple[Mode, ...] = (again, kept) if layout.recompute == "partial" else (kept,)
            traces: dict[Mode, _Traces] = {mode: self._traced(layout, mode) for mode in modes}
        except UnisonoError as error:
            return TracedMemory(refused="; ".join(f"{problem.given}: {problem.rule}" for problem in error.problems))
        peaks = [_peak(layout, plan, traces, rank) for rank in range(layout.pp)]
        return TracedMemory(peak_bytes=float(max(peaks)), rank=int(np.argmax(peaks)))

    def _traced(self, layout: Layout, mode: Mode) -> _Traces:
        short = _short(layout, mode)
        key = tuple(getattr(short, name) for name in Layout.__slots__ if name != "device")
        if key not in self._traces:
            gc.freeze()  # what was made before is no garbage of the traces, which look for theirs often
            try:
                self._traces[key] = _trace(short)
            finally:
                gc.unfreeze()
        return replace(self._traces[key], share=short.state_ranks / layout.state_ranks)


def _short(layout: Layout, mode: Mode) -> Layout:
    """The layout of few ranks and blocks whose passes are those of ``layout``."""
    shards = layout.dp_shard or layout.dp if layout.zero else 1
    traced = next(
        count
        for count in range(1, shards + 1)
        if shards % count == 0 and count >= min(shards, _MOST_SHARDS) and count * layout.cp % layout.ep == 0
    )
    pp = 1 if layout.pp == 1 else _RANKS
    # ranks of one host alone would share memory
    replicas = min(layout.dp // shards, max(2, 1 + HOST_RANKS // (layout.tp * layout.cp * pp * traced)))
    dp, is_zbv = traced * replicas, layout.passes == "zbv"
    is_fsdp = layout.zero > 1 and layout.state_ranks > 1
    # of ZeRO 2 and 3 a block has something of its neighbours; and one block alone is no list of blocks
    blocks = 2 if is_fsdp or pp == 1 else 1
    micro_batches = _MICRO_BATCHES if layout.num_micro_batches > 1 else 1
    schedule: Schedule = "gpipe"
    if is_zbv:
        schedule = "zbv"
    elif is_fsdp and pp > 1 and layout.passes != "gpipe" and layout.num_micro_batches > 2:
        # of these a pass leaves something to the next one, which differs behind one of the other kind
        schedule, micro_batches = "1f1b", _MICRO_BATCHES + 1
    stages_per_rank = 2 if is_zbv else min(pp - 1, 1)
    # beside blocks that are not recomputed their weights are converted once for all micro-batches, as those of the others
    beside = layout.recompute == "partial" and mode == "full" and pp > 1 and _converts(layout)
    return replace(
        layout,
        model=replace(layout.model, layers=blocks * pp * (2 if is_zbv else 1), other_params=0),
        num_devices=layout.tp * layout.cp * pp * dp,
        pp=pp,
        stages_per_rank=stages_per_rank,
        schedule=schedule if pp > 1 else None,
        dp_shard=traced if layout.zero else layout.dp_shard and 1,
        global_batch=dp * int(layout.micro_batch) * micro_batches,
        recompute="partial" if beside else mode,
        recomputed_blocks=(blocks,) * pp * stages_per_rank if beside else (),
        learned_factor=1.0,
    )


def _trace(short: Layout) -> _Traces:
    """Trace the ranks of ``short``. Raises UnisonoError for a plan that no run has."""
    stages = max(1, short.pp * short.stages_per_rank)
    blocks, per_rank = short.model.layers // stages, max(1, short.stages_per_rank)
    hidden: HiddenStates = {}

    def rank_of(rank: int, more: int = 0) -> RankPasses:
        plan = plan_of(short)
        if short.pp > 1:
            middle = {rank, 2 * short.pp - 1 - rank} if more else set[int]()
            counts = tuple(blocks + (more if stage in middle else 0) for stage in range(stages))
            plan = plan.updated(pipeline={"layers_per_stage": counts})
            if short.recompute == "partial":
                plan = plan.updated(recompute={"blocks_per_stage": counts})
        else:
            counts = (blocks + more,)
        given = _inputs(replace(short.model, layers=sum(counts)), short, plan)
        number = rank * (plan.mesh.world_size // short.pp)
        trace = partial(trace_passes, given, plan, number, hidden, has_experts=short.model.experts > 0)
        try:
            made = trace()
        except UnknownHiddenState:  # all hidden states are alike
            (_, shapes), spec = next(iter(hidden.items()))
            hidden.update({(stage, shapes): spec for stage in range(stages)})
            made = trace()
        return replace(made, passes=_without_sent(made, stages - 1))

    first = rank_of(0)
    middle = first if short.pp == 1 else rank_of(1)
    longer = rank_of(min(1, short.pp - 1), 1)
    ranks: dict[Place, RankPasses] = {"first": first, "middle": middle}
    at: dict[Place, tuple[RankPasses, int]] = {"first": (first, 0), "middle": (middle, 1)}
    base: Place = "middle"
    if short.pp == 1:
        ranks, at, base = {"first": first}, {"only": (first, 0)}, "only"
    elif per_rank == 2:  # of a V the first rank has both ends
        at["last"] = first, stages - 1
    else:
        ranks["last"] = rank_of(short.pp - 1)
        at["last"] = ranks["last"], stages - 1
    converts = _converts(short)
    one, two = _by_role(*at[base], converts=converts), _by_role(longer, at[base][1], converts=converts)
    passes: dict[tuple[Place, Kind, Role], _PassBytes] = {}
    for place, (rank, stage) in at.items():
        for (kind, role), made in _by_role(rank, stage, converts=converts).items():
            like = (kind, role if (kind, role) in one else _OTHER_ROLE[role])
            passes[place, kind, role] = _pass_bytes(place, one[like], two[like], made)
    return _Traces(
        passes=passes,
        ranks={place: _rank_bytes(rank, middle, longer, per_rank) for place, rank in ranks.items()},
        blocks=blocks,
        rank_blocks=blocks * per_rank,
        batch_bytes=first.batch_bytes / short.num_micro_batches,
        hidden_bytes=first.hidden_bytes,
        share=1.0,
    )


def _without_sent(rank: RankPasses, last: int) -> list[Pass]:
    """The passes as if a gradient that a rank sends were freed at once: it waits for the rank's next message (``_peak``)."""
    waits, made = False, list[Pass]()
    for each in rank.passes:
        left = each.end_bytes
        if _sends(each.action, last):
            left += rank.hidden_bytes * (waits - (each.action.kind != "F"))
            waits = each.action.kind != "F"
        made.append(replace(each, end_bytes=left))
    return made


def _sends(action: Action, last: int) -> bool:
    """Whether a pass sends to another stage; number ``last`` is the last one."""
    return action.kind != "W" and 0 <= action.stage + (1 if action.kind == "F" else -1) <= last


def _by_role(rank: RankPasses, stage: int, *, converts: bool) -> dict[tuple[Kind, Role], Pass]:
    """The passes through a stage, by kind and role; ``converts`` as of ``_role``."""
    last = max(each.action.micro for each in rank.passes)
    before: list[Kind | None] = [None, *(each.action.kind for each in rank.passes)]
    return {
        (each.action.kind, _role(each.action, last, behind, converts=converts)): each
        for each, behind in zip(rank.passes, before, strict=False)
        if each.action.stage == stage
    }


def _role(action: Action, last: int, behind: Kind | None, *, converts: bool) -> Role:
    """The role of a pass.

    Args:
        action: The pass.
        last: Number of the last micro-batch.
        behind: Kind of the pass before.
        converts: Whether passes convert weights, which the last forward pass does by itself (``train.step``).
    """
    if last == 0:
        return "single"
    if action.micro == 0:
        return "first"
    if action.micro == last and (converts or action.kind != "F"):  # else the last forward pass is one of the next ones
        return "last"
    return "next" if action.kind == behind else "change"


def _pass_bytes(place: Place, one: Pass, two: Pass, other: Pass) -> _PassBytes:
    """A pass of ``place``.

    Args:
        place: The place.
        one: The pass through a stage between others.
        two: The same with one block more.
        other: The pass through the stage of ``place``, which is ``one`` itself where that is between others.
    """
    length = len(one.history)
    # what is there of the next block as well, where a block has one behind it
    more = _over_begin(two, 0, length) - _over_begin(one, 0, length), _over_end(two, length) - _over_end(one, length)
    # operations beside the blocks come first in a forward pass of the first stage and a backward pass of the last one
    beside, is_before = max(0, len(other.history) - length), (place == "first") == (one.action.kind == "F")
    return _PassBytes(
        delta=other.end_bytes - other.begin_bytes,
        of_block=two.end_bytes - two.begin_bytes - one.end_bytes + one.begin_bytes,
        alone=_over_begin(other, 0, len(other.history)),
        from_begin=_over_begin(other, 0, len(other.history) - (0 if is_before else beside)) + max(0, more[0]),
        from_end=_over_end(other, len(other.history) - (beside if is_before else 0)) + max(0, more[1]),
    )


def _over_begin(made: Pass, first: int, last: int) -> int:
    """The most that operations from ``first`` to ``last`` have over the begin of a pass."""
    return max(made.history[first:last], default=made.begin_bytes) - made.begin_bytes


def _over_end(made: Pass, count: int) -> int:
    """The most that the last ``count`` operations have over the end of a pass."""
    return max(made.history[len(made.history) - count :], default=made.end_bytes) - made.end_bytes


def _rank_bytes(rank: RankPasses, one: RankPasses, two: RankPasses, per_rank: int) -> _RankBytes:
    """A rank outside of its passes, where ``two`` has a block more in each of ``per_rank`` stages than ``one``."""

    def values(of: RankPasses) -> NDArray[np.float64]:
        before = of.passes[0].begin_bytes + of.state_bytes
        return np.array(
            [
                of.begin_bytes + of.state_bytes - of.batch_bytes,
                max(of.after, default=before) - before,
                of.left_bytes - of.passes[0].begin_bytes,
            ],
            float,
        )

    here, more = values(rank), (values(two) - values(one)) / per_rank
    return _RankBytes(
        begin=here[0],
        begin_of_block=more[0],
        update=here[1],
        update_of_block=more[1],
        shards_of_block=more[2],
    )


# --- the passes of a rank in order -----------------------------------------------------------------------------------


def _peak(layout: Layout, plan: Plan, traces: Mapping[Mode, _Traces], rank: int) -> float:
    """The most that ``rank`` of the pipeline holds in a step."""
    every = next(iter(traces.values()))
    blocks, again = blocks_per_stage(layout), recomputed_per_stage(layout)
    micro_batches, last = int(layout.num_micro_batches), len(blocks) - 1
    if layout.pp == 1:
        actions = tuple(Action(kind, 0, micro) for micro in range(micro_batches) for kind in _PASSES)
    else:
        actions = schedule_order(layout.passes, layout.pp, plan.stages_per_rank, micro_batches)[rank]
    mine = {action.stage for action in actions}
    outside = every.ranks["first" if 0 in mine else "last" if last in mine else "middle"]
    more = sum(blocks[stage] for stage in mine) - every.rank_blocks
    begin = every.share * (outside.begin + more * outside.begin_of_block) + micro_batches * every.batch_bytes
    peak = begin + every.share * (outside.update + more * outside.update_of_block)
    level, posted, receives = begin, set[Action](), _next_receives(actions, mine, last)
    behind, waits, converts = None, False, _converts(layout)
    reduced = ("first", "single") if layout.zero > 1 else ("last", "single")
    for action, nexts in zip(actions, receives, strict=True):
        for message in nexts:
            if message not in posted:
                posted.add(message)
                level += every.hidden_bytes
        stage, role, behind = action.stage, _role(action, micro_batches - 1, behind, converts=converts), action.kind
        place: Place = "first" if stage == 0 else "last" if stage == last else "middle"
        kept = blocks[stage] - again[stage]
        # the first blocks of a stage are those that are recomputed
        parts = [
            (traces[mode], count) for mode, count in zip(_modes(layout), (again[stage], kept), strict=True) if count
        ]
        highest, delta = _through(parts if action.kind == "F" else parts[::-1], place, action.kind, role)
        peak = max(peak, level + highest)
        level += delta
        if _sends(action, last):
            level += every.hidden_bytes * ((action.kind != "F") - waits)
            waits = action.kind != "F"
        if action.kind in "BW" and role in reduced:
            level -= (1 - every.share) * blocks[stage] * outside.shards_of_block
    return peak


def _converts(layout: Layout) -> bool:
    """Whether passes convert weights to 16 bits: ranks that share parameters gather converted ones."""
    return not plan_of(layout).uses_fsdp


def _modes(layout: Layout) -> tuple[Mode, Mode]:
    """How blocks that are recomputed, and the others, are traced."""
    return ("full", "none") if layout.recompute == "partial" else ("full", layout.recompute)


def _next_receives(actions: Sequence[Action], mine: Container[int], last: int) -> list[list[Action]]:
    """For each of ``actions`` the messages whose buffers are there: its own, and the next one (``pipeline.executor``)."""
    found: list[list[Action]] = []
    following: list[Action] = []
    for action in reversed(actions):
        source = action.stage + (-1 if action.kind == "F" else 1)
        own = [action] if action.kind != "W" and 0 <= source <= last and source not in mine else []
        found.append([*own, *following])
        following = own or following
    return found[::-1]


def _through(parts: Sequence[tuple[_Traces, int]], place: Place, kind: Kind, role: Role) -> tuple[float, float]:
    """The most of a pass over its begin, and what is left of it.

    Args:
        parts: Blocks of the stage in the order in which the pass comes through them: so many as in a trace.
        place: Place of the stage.
        kind: Kind of the pass.
        role: Role of the pass.
    """
    if len(parts) == 1 and parts[0][1] == parts[0][0].blocks:
        made = parts[0][0].at(place, kind, role)
        return made.alone, made.delta
    level = highest = 0.0
    for number, (traces, count) in enumerate(parts):
        made = traces.at(place, kind, role)
        begin, level = level, level + count * made.of_block
        # what lies beside the blocks is before them in a forward pass of the first stage and a backward pass of the last
        is_before = (place == "first") == (kind == "F")
        if number == (0 if is_before else len(parts) - 1):
            level += made.delta - traces.blocks * made.of_block
        inner = traces.at("middle", kind, role)
        from_begin = made.from_begin if number == 0 else inner.from_end + min(count, traces.blocks) * inner.of_block
        highest = max(highest, begin + from_begin)
        if number == len(parts) - 1:
            highest = max(highest, level + made.from_end)
        elif made.of_block > 0:  # else the most is at the begin of these blocks
            highest = max(highest, level + inner.from_end)
    return highest, level


# --- what a trace is of ----------------------------------------------------------------------------------------------


def _inputs(model: ModelShape, short: Layout, plan: Plan) -> RunInputs:
    """A run of unisono's GPT of ``model``, with the default optimizer."""
    options = ModelOptions(
        num_layers=model.layers,
        dim=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn_dim=model.ffn,
        vocab_size=model.vocab,
        tied=model.tied,
        num_experts=model.experts,
        num_experts_per_token=model.experts_per_token or ModelOptions().num_experts_per_token,
    )
    return RunInputs(
        model=lambda: GPT(options),
        objective=next_token,
        given_objective=next_token,
        optim=OptimizerSetup(given=OptimOptions(), schedule=None, clip_norm=None),
        options=TrainOptions(steps=1, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=0),
        run_dir=Path(),
        seed=0,
        resume="",
        input=InputPipeline(
            data=_Zeros(plan.batch.global_batch, short.seq_len),
            options=LoaderOptions(),
            transform=None,
            pair_transform=None,
            batch_transform=None,
            shuffle_block=0,
            shuffle=True,
            collate_fn=None,
        ),
        eval_data=None,
        metrics={},
        flops_per_token=0.0,
        callbacks=(),
        observe=ObserveOptions(console="off", trackers=(), report=False),
        provenance={},
        shows_histograms=False,
    )


@dataclass(slots=True)
class _Zeros:
    """``count`` sequences of ``tokens`` tokens each, as packed data have them."""

    count: int
    tokens: int
    fingerprint: str = "zeros"

    def __len__(self) -> int:
        return self.count

    def read(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The same for all indices."""
        tokens = np.zeros((len(indices), self.tokens), np.int64)
        return {"tokens": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}

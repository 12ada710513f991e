"""The bytes of each pass of one rank's step, traced without values: what a schedule of any length is put together from.

A step of many micro-batches and blocks runs the same passes again and again. ``trace_passes`` makes one short step of a rank, by
the run's own code (``train.dry_run``), and keeps for each pass what was alive at its begin, at its end, and at every operation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch._subclasses.fake_tensor import FakeTensorMode  # has no public name; torch 2.13 tested
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # neither

from unisono.measure.live_storages import LiveStorages
from unisono.models.traced_experts import GroupedProducts
from unisono.parallel.deferred_init import deferred_init
from unisono.parallel.fsdp import traced_shards
from unisono.parallel.pipeline.executor import HiddenStates
from unisono.plan.pipeline_schedule import Action, Kind
from unisono.plan.plan import Plan
from unisono.train.assembly import RunInputs, RunParts
from unisono.train.dry_run import begin_step
from unisono.train.loop_assembly import build_train_step
from unisono.train.simulated_rank import assembled_rank
from unisono.train.whole_model import empty_copy

_KINDS: Final[dict[str, Kind]] = {"forward": "F", "backward": "B"}  # of phases of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of one micro-batch through a stage.

    Attributes:
        action: Which.
        begin_bytes: Alive at its begin.
        end_bytes: Alive at its end.
        history: Alive after each of its operations.
    """

    action: Action
    begin_bytes: int
    end_bytes: int
    history: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPasses:
    """One rank's step.

    Attributes:
        begin_bytes: Alive before the step: parameters, buffers, and the batch; the optimizer's state if it is there already.
        state_bytes: Of the optimizer's state that the step makes.
        batch_bytes: Those of the batch.
        passes: The passes in order.
        left_bytes: Alive at the end of the last pass.
        after: Alive after each operation from there to the end of the step.
        hidden_bytes: Of a hidden state between two stages; 0 without a pipeline.
    """

    begin_bytes: int
    state_bytes: int
    batch_bytes: int
    passes: Sequence[Pass]
    left_bytes: int
    after: Sequence[int]
    hidden_bytes: int


@dataclass(slots=True)
class _Recorder:
    """Keeps the passes of a step as they are made."""

    live: LiveStorages
    passes: list[Pass] = field(default_factory=list[Pass])
    operations: int = 0  # until the end of the last pass

    @contextmanager
    def around(self, action: Action) -> Generator[None]:
        """A context of a pass."""
        begin, place = self.live.now_bytes, len(self.live.history)
        yield
        self.operations = len(self.live.history)
        made = Pass(action=action, begin_bytes=begin, end_bytes=self.live.now_bytes, history=self.live.history[place:])
        self.passes.append(made)


@dataclass(slots=True)
class _PhaseOfPass:
    """A forward or backward phase of a step without a pipeline, entered many times: each time a pass of the next micro-batch."""

    recorder: _Recorder
    kind: Kind
    phase: AbstractContextManager[None]
    count: int = 0
    entered: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> None:
        self.entered.enter_context(self.recorder.around(Action(self.kind, 0, self.count)))
        self.entered.enter_context(self.phase)
        self.count += 1

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


def trace_passes(given: RunInputs, plan: Plan, rank: int, hidden: HiddenStates, *, has_experts: bool) -> RankPasses:
    """Trace the first step of ``rank``. The passes of others begin with the optimizer's state beside.

    Args:
        given: What the run is made of.
        plan: The plan of the job, which compiles nothing.
        rank: The rank.
        hidden: The hidden states that stages are known to receive; those that this rank passes on are added.
        has_experts: Whether the model has layers of experts.

    Raises:
        UnknownHiddenState: A stage of the rank receives another one.
        PlanError: The plan does not fit the model.
        RuntimeError: The model needs the values of tensors.
    """
    if not plan.is_model_sharded:  # else it is built without values, and sharded
        given = replace(given, model=deferred_init(given.model).model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveStorages(fake)
    modes = (fake, *([GroupedProducts()] if has_experts else []), live)
    with traced_shards(), assembled_rank(given, plan, rank, hidden, modes, copied=empty_copy) as parts:
        return _passes(parts, live, fake)


def _passes(parts: RunParts, live: LiveStorages, fake: FakeTensorMode) -> RankPasses:
    train_step, pipeline, recorder = build_train_step(parts), parts.sharded.pipeline, _Recorder(live)
    with _disable_current_modes(), closing(parts.loader.iterate(0, 1)) as steps:
        batch = next(steps)
    micro_batches = [
        {name: fake.from_tensor(value).to(parts.device) for name, value in micro.items()}
        for micro in batch.micro_batches
    ]
    begin_step(live, parts.built.model, parts.state, micro_batches)
    begin = live.now_bytes
    if pipeline is not None:
        pipeline.around_pass = recorder.around
        pipeline.is_sent = lambda work: True  # by the next send, as the back ends of accelerators tell
        train_step.run(replace(batch, micro_batches=micro_batches))
    else:
        with parts.timers.wrapped(
            lambda name, phase: _PhaseOfPass(recorder, _KINDS[name], phase) if name in _KINDS else phase
        ):
            train_step.run(replace(batch, micro_batches=micro_batches))
    # the first step makes the optimizer's state; the passes of the next ones begin with it
    state = 0 if parts.state.optimizer.eager_state else parts.ledger.state_bytes
    spec = next(iter(pipeline.hidden_states.values()), None) if pipeline is not None else None
    return RankPasses(
        begin_bytes=begin,
        state_bytes=state,
        batch_bytes=sum(tensor.nbytes for micro in micro_batches for tensor in micro.values()),
        passes=recorder.passes,
        left_bytes=recorder.passes[-1].end_bytes,
        after=live.history[recorder.operations :],
        hidden_bytes=0 if spec is None else spec[0].numel() * spec[1].itemsize,
    )

"""Finds silent corruption: at a cadence a step is computed again, and the state is compared over time and over ranks.

    end of the step before   record digests of the state
    begin of the step        compare them: nothing may have changed                           memory
    the step, with digests   compare them again before the update                             memory
    the step once more       from a copy of the state: every digest of both must be equal     compute
    end                      compare digests over the ranks that hold equal parts             replica

Where two computations differ, a third one is made: the one that differs from two equal ones is wrong. If all three differ, the
model is not deterministic: a notice says so, and later steps of this attempt are computed once. Where an accelerator may use
kernels that are not deterministic, five computations are made, of which four must be equal.

A finding ends the run with CorruptionError on all ranks, before the state is saved: no state is saved without a comparison.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from unisono.data.loading.loader import StepBatch
from unisono.errors import CorruptionError
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter, StepTimers
from unisono.sanitize import listed
from unisono.train.state_digests import StateDigests
from unisono.train.state_snapshot import StateSnapshot
from unisono.train.step import COUNTED, RANK_LOSS, STOP, Step, TrainStep
from unisono.train.step_digests import StepDigests

# phases of a step in the order in which a wrong value spreads, with what is said of them
_PHASES: Final = {
    "before": "the state that it began with",
    "forward": "forward pass",
    "loss": "loss of the rank's samples",
    "backward": "backward pass",
    "sums": "gradients, summed over ranks",
    "statistics": "loss, norm and counts of the step",
    "after": "the state after the update",
}
_MAX_NAMES: Final = 20  # of tensors in an event


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """Tensors whose bits are wrong, and the ranks that hold them.

    Attributes:
        source: ``memory``, ``compute`` or ``replica``.
        ranks: The ranks whose values are wrong; several that cannot be told apart where it is not certain.
        tensor: The first wrong tensor: a path in a checkpoint, or the output or gradient of a layer.
        is_certain: Whether the ranks are known.
        evidence: What it follows from, in one sentence.
        tensors: The first of all wrong tensors.
    """

    source: str
    ranks: tuple[int, ...]
    tensor: str
    is_certain: bool
    evidence: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Computation:
    """One computation of the step: digests ``values`` of ``names``, pairs of phase and name; ``after`` are those of the state."""

    step: Step
    after: dict[str, Tensor]
    names: list[tuple[str, str]]
    values: list[int]

    def is_equal(self, other: _Computation) -> bool:
        return (self.names, self.values) == (other.names, other.values)

    def differences(self, other: _Computation) -> list[tuple[int, str, str]]:
        """Index, phase and name of the entries that differ, up to the first where other tensors were computed."""
        differing: list[tuple[int, str, str]] = []
        mine, its = (list(zip(one.names, one.values, strict=True)) for one in (self, other))
        for place, (here, there) in enumerate(zip(mine, its, strict=False)):
            if here != there:
                differing.append((place, *here[0]))
            if here[0] != there[0]:
                break
        return differing or [(min(len(mine), len(its)), "after", "the number of its operations")]


class _NoProfileRequests:
    """Stands for the profiler where a step is computed again: no profile is requested."""

    def is_requested(self, now_s: float) -> bool:
        return False


@dataclass(kw_only=True, slots=True)
class StepVerifier:
    """Makes the steps of a run, and verifies those that ``is_due`` says. All ranks call each method together.

    Attributes:
        train_step: The step of the run.
        digests: Digests of its state.
        is_due: Whether a step, from 1, is verified: at the cadence, where a checkpoint is due, and the last step of the run.
        rates: Meter of the run's speed, which leaves out the repeated computations.
        events: Event log of this rank.
        device: Device of the model.
        stage: This rank's place along the pipeline, from 0.
    """

    train_step: TrainStep
    digests: StateDigests
    is_due: Callable[[int], bool]
    rates: RateMeter
    events: EventLog
    device: torch.device
    stage: int
    _verified_step: int = -1
    _recomputes: bool = True

    def run(self, batch: StepBatch) -> Step:
        """Make one step of ``batch``. Raises CorruptionError."""
        if self.is_due(batch.step + 1):
            return self._run_verified(batch)
        step = self.train_step.run(batch)
        if self.is_due(step.index + 1):
            self.digests.record(self.digests.take())
        return step

    def before_save(self) -> None:
        """Compare the state before it is saved: over time, and over ranks unless the step was verified. Waits for the device.

        Raises CorruptionError.
        """
        step = self.train_step.state.step
        digests = self.digests.take()
        changed = self.digests.changed(digests)
        corruptions = self._memory_corruptions(changed, "before it was saved")
        if not corruptions and self._verified_step != step:
            corruptions = self._replica_corruptions(digests)
        self._raise_if_any(step, corruptions)

    # --- a verified step -----------------------------------------------------------------------------------------------

    def _run_verified(self, batch: StepBatch) -> Step:
        train_step, state = self.train_step, self.train_step.state
        with self.rates.paused():
            snapshot = StateSnapshot(state, self.device) if self._recomputes else None
            begin = self.digests.take()
            changed = self.digests.changed(begin)
            self.digests.record(begin)
        in_step: list[str] = []
        first = self._compute(batch, train_step, begin, in_step)
        with self.rates.paused():
            corruptions = self._memory_corruptions(changed, "between the step before and this one")
            corruptions = corruptions or self._memory_corruptions(
                in_step, "while the gradients of this step were computed"
            )
            computed = [first]
            if snapshot is not None and not corruptions:
                computed.append(self._compute_again(batch, snapshot))
                corruptions = self._compute_corruptions(batch, snapshot, computed)
            self._raise_if_any(state.step, corruptions or self._replica_corruptions(computed[-1].after))
            self.digests.record(computed[-1].after)
        self._verified_step = state.step
        last = computed[-1].step
        if last is not first.step and not computed[-1].is_equal(first):  # the state is that of the last one
            stats = last.stats.clone()
            stats[STOP] = first.step.stats[STOP]
            return replace(last, stats=stats)
        return first.step

    def _compute(
        self, batch: StepBatch, train_step: TrainStep, begin: dict[str, Tensor], changed: list[str] | None = None
    ) -> _Computation:
        """Make the step and take its digests; ``changed`` gets paths of tensors that changed by themselves before the update."""
        model = train_step.forward_backward.model
        trained = [name for name, parameter in train_step.state.sharded.parameters.items() if parameter.requires_grad]
        step_digests = StepDigests(model, self.device, with_modules=train_step.plan.backend.compile == "off")

        def observe_gradients(step: int, gradients: list[Tensor], divisor: Tensor) -> None:
            train_step.observe_gradients(step, gradients, divisor)
            if changed is not None:
                changed.extend(self.digests.changed(self.digests.take(), with_buffers=False))
            for name, gradient in zip(trained, gradients, strict=True):
                step_digests.add("sums", f"gradient of {name}", gradient)

        step_digests.add_digests("before", begin)
        with step_digests:
            step = replace(train_step, observe_gradients=observe_gradients).run(batch)
        step_digests.add("loss", "loss", step.stats[RANK_LOSS])
        step_digests.add("statistics", "loss and norm", step.stats[: COUNTED + 1])
        after = self.digests.take()
        step_digests.add_digests("after", after)
        return _Computation(step, after, step_digests.names, step_digests.values())

    def _compute_again(self, batch: StepBatch, snapshot: StateSnapshot) -> _Computation:
        """Make the step from the state before it. Nothing of it is reported."""
        snapshot.restore()
        quiet = replace(
            self.train_step,
            timers=StepTimers(),
            stop_notice=None,
            profiler=cast(Any, _NoProfileRequests()),
            observe_gradients=lambda step, gradients, divisor: None,
            taps=self.train_step.taps.silent(),
        )
        return self._compute(batch, quiet, self.digests.take())

    # --- findings ------------------------------------------------------------------------------------------------------

    def _memory_corruptions(self, changed: Sequence[str], when: str) -> list[Corruption]:
        """Corruption of tensors that ``changed`` although nothing wrote to them, on any rank. A collective."""
        answers: list[list[str]] = self._gather(list(changed[:_MAX_NAMES]))
        return [
            Corruption(
                source="memory",
                ranks=(rank,),
                tensor=paths[0],
                is_certain=True,
                evidence=f"its bits changed {when}, and no operation that torch counts has written to it",
                tensors=tuple(paths),
            )
            for rank, paths in enumerate(answers)
            if paths
        ]

    def _compute_corruptions(
        self, batch: StepBatch, snapshot: StateSnapshot, computed: list[_Computation]
    ) -> list[Corruption]:
        """The corruption that two computations of the step show; where they differ, further ones tell which is wrong."""
        if all(self._gather(computed[0].is_equal(computed[1]))):
            return []
        is_deterministic = self.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        count = 3 if is_deterministic else 5
        while len(computed) < count:
            computed.append(self._compute_again(batch, snapshot))
        # number of the first computation that each one equals, on this rank; then the same of all ranks, a row for each
        equal_to = [next(n for n, other in enumerate(computed) if one.is_equal(other)) for one in computed]
        rows = list(zip(*self._gather(equal_to), strict=True))
        groups = Counter(rows)
        if sorted(groups.values()) != [1, count - 1]:
            self._stop_recomputing(count)
            return []
        odd = next(n for n, row in enumerate(rows) if groups[row] == 1)
        return [self._outlier(computed[odd], computed[odd - 1], odd, is_deterministic=is_deterministic)]

    def _outlier(self, odd: _Computation, other: _Computation, number: int, *, is_deterministic: bool) -> Corruption:
        """The corruption of the one computation that differs from the others, by its first difference. A collective."""
        phases = list(_PHASES)
        differences = [] if odd.is_equal(other) else odd.differences(other)
        first: list[list[Any]] = []
        if differences:
            place, phase, _ = differences[0]
            # a wrong output spreads to later stages, a wrong gradient to earlier ones
            stage_order = {"forward": self.stage, "backward": -self.stage}.get(phase, 0)
            first = [[phases.index(phase), stage_order, place, [name for _, _, name in differences[:_MAX_NAMES]]]]
        answers: list[list[list[Any]]] = self._gather(first)
        begins = {rank: tuple(answer[0]) for rank, answer in enumerate(answers) if answer}
        phase, *_ = earliest = min(begin[:3] for begin in begins.values())
        ranks = tuple(rank for rank, begin in begins.items() if begin[:3] == earliest)
        names: list[str] = begins[ranks[0]][3]
        doubt = (
            ""
            if is_deterministic
            else "; torch.use_deterministic_algorithms(True) would rule out kernels that add in any order"
        )
        return Corruption(
            source="memory" if phases[phase] == "before" else "compute",
            ranks=ranks,
            tensor=names[0],
            is_certain=len(ranks) == 1,
            evidence=f"of {'three' if is_deterministic else 'five'} computations of the step number {number + 1} has other bits "
            f"than the others, first in: {_PHASES[phases[phase]]}{doubt}",
            tensors=tuple(names),
        )

    def _replica_corruptions(self, digests: dict[str, Tensor]) -> list[Corruption]:
        """Corruption of tensors of which ranks hold copies that are not equal. A collective."""
        values = torch.stack([digest.to(self.device) for digest in digests.values()]).tolist()
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        certain: dict[tuple[int, ...], bool] = {}
        for unequal in self.digests.unequal_copies(dict(zip(digests, values, strict=True))):
            by_ranks.setdefault(unequal.ranks, []).append(unequal.path)
            certain[unequal.ranks] = unequal.is_certain
        return [
            Corruption(
                source="replica",
                ranks=ranks,
                tensor=paths[0],
                is_certain=certain[ranks],
                evidence=f"ranks hold copies of {len(paths)} tensor(s) that are not equal"
                + (
                    "; most copies agree"
                    if certain[ranks]
                    else ", and no majority of the copies agrees: one of them is wrong"
                ),
                tensors=tuple(paths[:_MAX_NAMES]),
            )
            for ranks, paths in by_ranks.items()
        ]

    def _stop_recomputing(self, count: int) -> None:
        self._recomputes = False
        if self.train_step.forward_backward.world.rank == 0:
            self.events.emit(
                "notice",
                step=self.train_step.state.step,
                code="not_deterministic",
                what=f"a step that was computed {count} times from one state gave different bits, and no one result stands out",
                why="the model, the objective or a kernel is not deterministic, or a device fails often",
                cost="steps are not computed again in this attempt: the state is compared over time and over ranks alone",
                fix="torch.use_deterministic_algorithms(True), and no generators but torch's, Python's and numpy's own ones",
            )

    def _raise_if_any(self, step: int, corruptions: Sequence[Corruption]) -> None:
        """Emit the corruptions, and end the run if there are any. A collective. Raises CorruptionError."""
        if not corruptions:
            return
        hosts: list[str] = self._gather(socket.gethostname())
        first = corruptions[0]
        for one in corruptions if self.train_step.forward_backward.world.rank == 0 else ():
            self.events.emit(
                "corruption",
                step=step,
                source=one.source,
                ranks=list(one.ranks),
                hosts=[hosts[rank] for rank in one.ranks],
                tensor=one.tensor,
                certain=one.is_certain,
                evidence=one.evidence,
                tensors=list(one.tensors),
            )
        named = " or ".join(f"rank {rank} on {hosts[rank]}" for rank in first.ranks[:8])
        error = CorruptionError(
            given=f"{first.tensor!r} of {named} in step {step}: {first.evidence}",
            rule="the same step from the same state gives the same bits, and bits change only where something writes to them",
            consequence="the run ends, and this state was not saved; the newest checkpoint was compared before it was committed",
            nearest="the same command again, which continues from that checkpoint; where it comes back, "
            f"leave out {listed(sorted({hosts[rank] for rank in first.ranks}), 200)} and test its memory and devices",
        )
        error.ranks = first.ranks
        raise error

    def _gather(self, value: Any) -> list[Any]:
        return self.train_step.forward_backward.world.all_gather_json(value)

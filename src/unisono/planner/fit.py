"""The first plan that fits into a memory limit, on a ladder of measures that each cost more time than the one before.

    precision      bf16 in place of fp32, where the device computes it natively
    micro-batch    one sample at a time, with more accumulation: the batch of a step stays
    recompute      selective, then full: activations are computed again in the backward pass
    sharding       parameters, gradients and optimizer state spread over all data ranks (ZeRO 3)
    tensor         each layer spread over 2, 4, 8, … ranks
    offload        activations of blocks in host memory; accelerators only

Each rung keeps the settings of the rungs before it. The first that fits is then given back the largest micro-batch that fits, of
those that divide a data rank's samples of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.errors import ConfigError, PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.train.dry_run import RankMemory

# (options, number of ranks, ranks to trace) -> the plan, and the memory of the ranks
Trace = Callable[[PlanOptions, int, Sequence[int]], tuple[Plan, list[RankMemory]]]

MAX_TENSOR_RANKS = 8  # of one host


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A plan that was tried.

    Attributes:
        measure: The change from the rung before, in words.
        settings: Settings of the plan that differ from the configuration, by name.
        plan: The plan; None where the settings make no legal one.
        ranks: Traced memory of one rank of each pipeline stage; empty where nothing was traced.
        refused: Why nothing was traced.
    """

    measure: str
    settings: Mapping[str, Any]
    plan: Plan | None = None
    ranks: Sequence[RankMemory] = ()
    refused: str = ""

    @property
    def largest(self) -> RankMemory | None:
        """The rank that holds the most; None where nothing was traced."""
        return max(self.ranks, key=lambda rank: rank.peak.bytes, default=None)

    @property
    def flops(self) -> int:
        """FLOPs of a step of the rank with the most; 0 where nothing was traced."""
        return max((rank.flops for rank in self.ranks), default=0)

    def fits(self, budget_bytes: int) -> bool:
        """Whether no rank holds more than ``budget_bytes``."""
        return self.largest is not None and self.largest.peak.bytes <= budget_bytes


@dataclass(slots=True)
class Ladder:
    """A walk up the ladder.

    Attributes:
        trace: Traces a plan (``RunTrials.trace``).
        options: Options of the plan as configured.
        num_ranks: Ranks of the job.
        budget_bytes: Bytes that the tensors of a rank may take. Less, once ``climb`` has traced a configured plan that failed.
        native_bf16: Whether the device computes bf16 natively.
        tried: Called with each rung once it is traced.
        has_failed: Whether the configured plan ran out of memory, so that only one that needs less can fit.
        budget_s: Seconds after which no further rung is tried; the configured plan always is.
        is_cut: Whether rungs were left out for that.
        rungs: All that were tried.
    """

    trace: Trace
    options: PlanOptions
    num_ranks: int
    budget_bytes: int
    native_bf16: bool
    tried: Callable[[Rung], None]
    has_failed: bool = False
    budget_s: float = math.inf
    is_cut: bool = False
    rungs: list[Rung] = field(default_factory=list[Rung])
    _ends_s: float = math.inf

    def climb(self) -> Rung | None:
        """The rung that fits, with the largest micro-batch that does; None if none fits.

        Raises:
            PlanError, ConfigError: The configured plan is not legal, or cannot be traced.
        """
        self._ends_s = time.monotonic() + self.budget_s
        first = self._traced("as configured", {})
        assert first.plan is not None
        assert first.largest is not None
        if self.has_failed:
            self.budget_bytes = min(self.budget_bytes, first.largest.peak.bytes - 1)
        self._shown(first)
        if first.fits(self.budget_bytes):
            return first
        settings = dict[str, Any]()
        for measure, more in self._measures(first.plan):
            if self._is_over():
                return None
            rung = self._try(measure, {**settings, **more})
            if rung.largest is None:
                continue  # such as tp=8 for six heads: the next one builds upon the rung before
            settings |= more
            if rung.fits(self.budget_bytes):
                if "micro_batch" not in settings:
                    return rung
                return self.with_larger_micro_batch(rung, below=first.plan.batch.micro_batch)
        return None

    def with_larger_micro_batch(self, rung: Rung, *, below: int) -> Rung:
        """``rung`` with the largest micro-batch below ``below`` that fits, of those that divide a data rank's share of a step."""
        assert rung.plan is not None
        batch = rung.plan.batch
        share = batch.micro_batch * batch.accumulation
        larger = [size for size in range(batch.micro_batch + 1, min(share + 1, below)) if share % size == 0]
        while larger and not self._is_over():
            middle = len(larger) // 2
            tried = self._try(f"micro-batch of {larger[middle]}", {**rung.settings, "micro_batch": larger[middle]})
            if tried.fits(self.budget_bytes):
                rung, larger = tried, larger[middle + 1 :]
            else:
                larger = larger[:middle]
        return rung

    def _is_over(self) -> bool:
        self.is_cut = self.is_cut or time.monotonic() > self._ends_s
        return self.is_cut

    def _measures(self, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
        if plan.precision.compute == "fp32" and self.native_bf16:
            yield "bf16", {"precision": "bf16"}
        if plan.batch.micro_batch > 1:
            yield "micro-batch of 1", {"micro_batch": 1}
        if plan.recompute.mode == "none":
            yield "selective recompute", {"recompute": "selective"}
        if plan.recompute.mode != "full":
            yield "full recompute", {"recompute": "full"}
        data_ranks = self.num_ranks // (plan.mesh.pp * plan.mesh.cp * plan.mesh.tp)
        if plan.mesh.dp_shard < data_ranks or (plan.mesh.dp_shard > 1 and plan.fsdp.zero < 3):
            yield "states over all data ranks", {"dp_shard": 0, "zero": 3}
        ranks = 2 * plan.mesh.tp
        while ranks <= MAX_TENSOR_RANKS and self.num_ranks % (ranks * plan.mesh.pp * plan.mesh.cp) == 0:
            yield f"layers over {ranks} ranks", {"tp": ranks}
            ranks *= 2
        if plan.mesh.device != "cpu" and not plan.recompute.offload:
            yield "activations in host memory", {"offload": True}

    def _try(self, measure: str, settings: Mapping[str, Any]) -> Rung:
        try:
            return self._shown(self._traced(measure, settings))
        except (PlanError, ConfigError) as error:
            return self._shown(Rung(measure=measure, settings=settings, refused=error.problems[0].given))

    def _traced(self, measure: str, settings: Mapping[str, Any]) -> Rung:
        plan, ranks = self.trace(replace(self.options, **settings), self.num_ranks, ())
        return Rung(measure=measure, settings=settings, plan=plan, ranks=ranks)

    def _shown(self, rung: Rung) -> Rung:
        self.rungs.append(rung)
        self.tried(rung)
        return rung

"""The ladder of measures, with made-up traces: plans that need as many GiB as their micro-batch has samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.dist import JobSpec
from unisono.measure.live_storages import Peak
from unisono.parallel.memory_ledger import MemoryLedger
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.planner.fit import Ladder
from unisono.train.dry_run import RankMemory
from unisono.train.setup import resolve_plan

GIB = 2**30


def trace(options: PlanOptions, num_ranks: int, ranks: Sequence[int]) -> tuple[Plan, list[RankMemory]]:
    plan = resolve_plan(options, JobSpec(world_size=num_ranks))[1]
    peak = Peak(bytes=plan.batch.micro_batch * GIB, operator="aten.mm.default", kind="forward")
    return plan, [RankMemory(rank=0, stages=(), ledger=MemoryLedger(parameters={}), peak=peak, flops=1)]


def ladder(budget_gib: int, *, num_ranks: int = 1, given: dict[str, Any] | None = None, **options: Any) -> Ladder:
    plan = PlanOptions(device="cpu", precision="fp32", **{"global_batch": 24, **options})
    return Ladder(
        trace=trace,
        options=plan,
        num_ranks=num_ranks,
        budget_bytes=budget_gib * GIB,
        native_bf16=False,
        tried=lambda rung: None,
        **(given or {}),
    )


def test_the_micro_batch_that_comes_back_is_the_largest_divisor_that_fits() -> None:
    tried = ladder(7, micro_batch=24)
    found = tried.climb()
    assert found is not None
    assert found.settings == {"micro_batch": 6}
    assert len(tried.rungs) <= 2 + 3  # seven divisors below 24, bisected


def test_a_plan_that_ran_out_of_memory_does_not_fit_however_much_there_is() -> None:
    assert ladder(100, micro_batch=8).climb().settings == {}  # type: ignore[union-attr]
    failed = ladder(100, micro_batch=8, given={"has_failed": True})
    found = failed.climb()
    assert found is not None
    assert found.settings == {"micro_batch": 6}
    assert failed.budget_bytes == 8 * GIB - 1


def test_the_largest_micro_batch_goes_up_to_the_samples_of_a_rank() -> None:
    for budget, size in ((5, 4), (11, 6), (100, 12)):
        tried = ladder(budget, num_ranks=2, micro_batch=2)
        found = tried.climb()
        assert found is not None
        assert found.settings == {}
        largest = tried.with_larger_micro_batch(found, below=25)
        assert largest.plan is not None
        assert largest.plan.batch.micro_batch == size


def test_once_time_is_over_only_the_configured_plan_is_tried() -> None:
    cut = ladder(7, micro_batch=24, given={"budget_s": 1e-9})
    assert cut.climb() is None
    assert [rung.measure for rung in cut.rungs] == ["as configured"]
    assert cut.is_cut

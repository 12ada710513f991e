"""The matrix: every case trains like one process for 20 steps, and its first gradients are those of one process in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matrix
import numpy as np
import pytest
from matrix import CASES, Case
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.plan.validate import validate_plan

# also in the short tier
SHORT = {"gpt-moe-dp_shard2-ep2", "resnet-pp2"}


@cache
def alone(model: str, settings: tuple[tuple[str, object], ...], dtype: str, steps: int) -> dict:
    return matrix.run_case(World(JobSpec()), model, {**dict(settings), "steps": steps}, dtype)


def reference(case: Case, dtype: str, steps: int) -> dict:
    """One process, with the same batch and nothing spread; the micro-batch matters to batch statistics only."""
    kept = {
        name: value
        for name, value in matrix.settings_of(case).items()
        if name in ("layers", "global_batch", "clip_norm", "lr")
    }
    return alone(
        case.model, tuple(sorted({**kept, "micro_batch": matrix.reference_micro_batch(case)}.items())), dtype, steps
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in SHORT else pytest.mark.full) for case in CASES],
)
def test_trains_like_one_process(pool: Pool, case: Case) -> None:
    together = pool.run(matrix.run_case, case.model, matrix.settings_of(case), ranks=case.ranks, timeout_s=240)
    expected = reference(case, "float32", matrix.STEPS)
    for outcome in together:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert len({str(outcome["losses"]) for outcome in together}) == 1
    exact = pool.run(
        matrix.run_case,
        case.model,
        {**matrix.settings_of(case), "steps": 1},
        "float64",
        ranks=case.ranks,
        timeout_s=240,
    )
    ours, theirs = matrix.gradients(exact), matrix.gradients([reference(case, "float64", 1)])
    assert ours.keys() == theirs.keys()
    # a bias of keys changes no attention: its gradient is zero, and what is computed is rounding
    rounding = 1e-14 * np.linalg.norm([np.linalg.norm(gradient) for gradient in theirs.values()])
    for name, gradient in theirs.items():
        apart, size = np.linalg.norm(ours[name] - gradient), np.linalg.norm(gradient)
        assert apart <= max(1e-5 * size, rounding), f"{name}: {apart:.2g} of {size:.2g}"


@pytest.mark.parametrize(("settings", "ranks", "reason"), matrix.REFUSED, ids=[reason for *_, reason in matrix.REFUSED])
def test_refused_with_a_reason(settings: dict, ranks: int, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate_plan(derive_plan(PlanOptions(**settings), world_size=ranks, device="cpu", native_bf16=False), ranks)
    assert reason in str(caught.value)


def test_the_page_is_written_from_the_cases() -> None:
    page = Path(__file__).parents[2] / "docs" / "what-runs.md"
    assert page.read_text() == matrix.page(), "python tests/support/matrix.py writes it"

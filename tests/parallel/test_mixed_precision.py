"""bf16 and fp16 under the axes: losses near those of one process in the same precision, and one loss scale on all ranks.

How near: a rounding to bf16 is off by up to 2^-9, to fp16 by 2^-12. Spread layers round sums in other places than whole ones, so
single activations differ by about that much, their mean, the loss, by less. Adam makes more of it: a gradient near 0 may change
its sign, and with it a whole update. Later losses get 2^-9 in both precisions; measured are 3e-4 and 6e-4.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import matrix
import pytest
import tiny
from pool import Pool

from unisono.dist import JobSpec, World

COMMON = {"steps": 12, "global_batch": 8, "micro_batch": 2, "clip_norm": 0.5}
FIRST_STEP = {"bf16": 2e-3, "fp16": 3e-4}
CASES = [
    ("gpt", 2, {"tp": 2, "sequence_parallel": True}),
    ("gpt", 2, {}),
    ("gpt", 2, {"dp_shard": 2}),
    ("gpt", 2, {"pp": 2, "recompute": "full"}),
    ("gpt", 2, {"pp": 2, "schedule": "zbv"}),
    ("gpt", 2, {"cp": 2}),
    ("gpt-moe", 2, {"dp_shard": 2, "ep": 2}),
    ("gpt", 4, {"pp": 2, "tp": 2, "schedule": "interleaved"}),
    ("gpt", 4, {"cp": 2, "tp": 2}),
    ("bert", 2, {"tp": 2}),
    ("resnet", 2, {"pp": 2}),
]


def watch(world: World, model: str, settings: dict[str, Any], poison: int | None = None) -> dict[str, list[Any]]:
    """Of each step its loss, gradient norm, loss scale, and whether it was skipped."""
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "scales": [], "skipped": []}
    with tempfile.TemporaryDirectory() as folder:
        shared = str(world.broadcast_json(folder))
        network, data, objective = matrix.MODELS[model](4)
        if poison is not None:
            data = tiny.RaggedTokens(poison=poison)
        with tiny.trainer(shared, world=world, network=network, data=data, objective=objective, **settings) as run:
            for step in run:
                seen["losses"].append(step.loss)
                seen["norms"].append(float(step.stats[1]))
                seen["scales"].append(float(run.state.loss_scaler.value))
                seen["skipped"].append(step.skipped)
        world.barrier()
    return seen


@cache
def alone(model: str, settings: tuple[tuple[str, Any], ...], poison: int | None = None) -> dict[str, list[Any]]:
    return watch(World(JobSpec()), model, {**COMMON, **dict(settings)}, poison)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("model", "ranks", "plan"),
    [
        pytest.param(*case, id=name)
        for case in CASES
        for name in ["-".join([case[0], *(f"{k}{v}" if k in matrix.AXES else f"{k}={v}" for k, v in case[2].items())])]
    ],
)
def test_follows_one_process(pool: Pool, model: str, ranks: int, plan: dict[str, Any], precision: str) -> None:
    together = pool.run(watch, model, {**COMMON, "precision": precision, **plan}, ranks=ranks)
    expected = alone(model, (("precision", precision),))
    assert len({str(outcome) for outcome in together}) == 1
    assert together[0]["losses"][0] == pytest.approx(expected["losses"][0], rel=FIRST_STEP[precision])
    assert together[0]["norms"][0] == pytest.approx(expected["norms"][0], rel=4 * FIRST_STEP[precision])
    assert together[0]["losses"] == pytest.approx(expected["losses"], rel=2**-9)
    assert expected["losses"] != alone(model, (("precision", "fp32"),))["losses"], "nothing was rounded"


@pytest.mark.parametrize(
    ("model", "ranks", "plan"),
    [
        pytest.param("gpt", 2, {"pp": 2}, id="pp2"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in CASES if case[0] == "gpt"),
    ],
)
def test_an_overflow_anywhere_is_seen_everywhere(pool: Pool, model: str, ranks: int, plan: dict[str, Any]) -> None:
    """From far too large a scale all ranks come down together, step by step as one process does; a poisoned sample, which
    one data rank reads, keeps all of them from changing anything and halves the scale of all."""
    settings = {"precision": "fp16", "loss_scale": 2.0**24}
    together = pool.run(watch, model, {**COMMON, **settings, **plan}, ranks=ranks)
    expected = alone(model, tuple(settings.items()))
    for outcome in together:
        assert outcome["skipped"] == expected["skipped"]
        assert outcome["scales"] == expected["scales"]
    assert any(expected["skipped"])
    assert not expected["skipped"][-1]
    poisoned = pool.run(watch, model, {**COMMON, "precision": "fp16", **plan}, 5, ranks=ranks)
    expected = alone(model, (("precision", "fp16"),), 5)
    for outcome in poisoned:
        assert (outcome["skipped"], outcome["scales"]) == (expected["skipped"], expected["scales"])
    assert 0 < sum(expected["skipped"]) < len(expected["skipped"])

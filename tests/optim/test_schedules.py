"""Learning rates: values at every boundary, the vectors of MXNet and MindSpore, and properties of all shapes."""

from __future__ import annotations

import doctest
import importlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ConfigError
from unisono.optim.options import SCHEDULE_FIELDS, ScheduleOptions, decay_steps, schedule_problems
from unisono.optim.schedules import build_schedule


def rates(options: ScheduleOptions, total_steps: int, steps: range | None = None) -> list[float]:
    rate = build_schedule(options, total_steps)
    return [rate(step) for step in steps or range(total_steps)]


@pytest.mark.parametrize("module", ["clip", "groups", "schedules"])
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"unisono.optim.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("kind", SCHEDULE_FIELDS)
def test_warmup_starts_at_one_part_and_its_last_step_has_the_full_rate(kind: str) -> None:
    values = rates(ScheduleOptions(kind=kind, warmup_steps=4, step_every_steps=100, decay_frac=0.2), 20)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    if kind != "inverse_sqrt":
        assert values[4] == 1.0
    assert build_schedule(ScheduleOptions(kind=kind, warmup_steps=4), 20, lr=8.0)(1) == 4.0


def test_values_at_the_boundaries() -> None:
    linear = ScheduleOptions(kind="linear", warmup_steps=2, final_lr_frac=0.0)
    assert rates(linear, 6, range(8)) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = ScheduleOptions(kind="cosine", warmup_steps=2, final_lr_frac=0.2)
    assert rates(cosine, 6, range(8)) == pytest.approx(
        [0.5, 1.0, 1.0, 0.2 + 0.8 * (2 + math.sqrt(2)) / 4, 0.6, 0.2 + 0.8 * (2 - math.sqrt(2)) / 4, 0.2, 0.2],
        abs=1e-15,
    )
    polynomial = ScheduleOptions(kind="polynomial", power=2.0, warmup_steps=2, final_lr_frac=0.0)
    assert rates(polynomial, 6, range(8)) == [0.5, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    stable = ScheduleOptions(kind="wsd", warmup_steps=2, decay_frac=0.4, final_lr_frac=0.0)
    assert rates(stable, 10, range(12)) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    root = ScheduleOptions(kind="inverse_sqrt", warmup_steps=4)
    assert rates(root, 16) == [0.25, 0.5, 0.75, *(math.sqrt(4 / (t + 1)) for t in range(3, 16))]
    assert rates(ScheduleOptions(kind="constant", warmup_steps=3), 5) == [1 / 3, 2 / 3, 1, 1, 1]
    assert rates(ScheduleOptions(kind="linear", warmup_steps=3, final_lr_frac=0.0), 3) == [1 / 3, 2 / 3, 1]


@pytest.mark.parametrize(
    ("options", "total_steps", "expected"),
    [
        (ScheduleOptions(kind="constant"), 10, {7: 1.0}),
        (ScheduleOptions(kind="linear", final_lr_frac=0.5), 4, {0: 1.0, 2: 0.75, 4: 0.5, 5: 0.5}),
        (ScheduleOptions(kind="cosine", final_lr_frac=0.0), 10, {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0}),
        (ScheduleOptions(kind="polynomial", power=2.0, final_lr_frac=0.0), 4, {0: 1.0, 1: 0.5625, 2: 0.25, 4: 0.0}),
        (ScheduleOptions(kind="inverse_sqrt", warmup_steps=4), 100, {3: 1.0, 15: 0.5, 63: 0.25}),
        (ScheduleOptions(kind="wsd", decay_frac=0.4, final_lr_frac=0.0), 10, {5: 1.0, 6: 1.0, 8: 0.5, 10: 0.0}),
        (
            ScheduleOptions(kind="step", step_every_steps=2, step_factor=0.5),
            9,
            {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5, 4: 0.25},
        ),
    ],
)
def test_values_of_each_shape(options: ScheduleOptions, total_steps: int, expected: dict[int, float]) -> None:
    rate = build_schedule(options, total_steps)
    assert {step: round(rate(step), 6) for step in expected} == expected


def peers(package: str) -> dict[str, list[float]]:
    """What the package's own schedulers returned, recorded by ``tests/peers/make_optim_fixtures.py``."""
    path = Path(__file__).parent / "fixtures" / f"{package}.json"
    schedules: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))["schedules"]
    return schedules


def test_mxnet() -> None:
    """MXNet asks at u = 1 for its first update: drops and warm-up agree step by step, decays are one step ahead."""
    theirs = peers("mxnet")
    factor = ScheduleOptions(kind="step", step_every_steps=2, step_factor=0.5)
    assert rates(factor, 11) == theirs["factor"][1:]
    assert theirs["factor"][1:6] == [1, 1, 0.5, 0.5, 0.25]
    warmup = ScheduleOptions(kind="constant", warmup_steps=4)
    assert rates(warmup, 11) == theirs["factor_warmup"][1:]
    cosine = ScheduleOptions(kind="cosine", final_lr_frac=0.0)
    assert rates(cosine, 10, range(12)) == pytest.approx(theirs["cosine"], abs=1e-15)
    both = ScheduleOptions(kind="cosine", final_lr_frac=0.0, warmup_steps=4)
    assert rates(both, 10, range(4)) == theirs["cosine_warmup"][1:5]
    assert rates(both, 10, range(4, 12)) == pytest.approx(theirs["cosine_warmup"][4:], abs=1e-15)
    assert theirs["cosine_warmup"][10] == 0  # its tenth and last update moves nothing
    assert rates(both, 10)[9] > 0
    polynomial = ScheduleOptions(kind="polynomial", power=2.0, final_lr_frac=0.25)
    assert rates(polynomial, 10, range(12)) == pytest.approx(theirs["poly"], abs=1e-15)


def test_mindspore() -> None:
    """MindSpore counts from 0 as we do, but spends its first step at learning rate 0; float32 values."""
    theirs = peers("mindspore")
    warmup = ScheduleOptions(kind="constant", warmup_steps=4)
    assert theirs["warmup"][0] == 0
    assert rates(warmup, 11) == theirs["warmup"][1:]
    assert theirs["warmup_list"][:2] == [0, 0]  # a whole epoch of two steps
    cosine = ScheduleOptions(kind="cosine", final_lr_frac=0.25)
    assert rates(cosine, 10, range(12)) == pytest.approx(theirs["cosine"], rel=1e-6)
    polynomial = ScheduleOptions(kind="polynomial", power=2.0, final_lr_frac=0.25)
    assert rates(polynomial, 10, range(12)) == pytest.approx(theirs["polynomial"], rel=1e-6)
    # cosine_decay_lr(.01, .1, total_step=10, step_per_epoch=2, decay_epoch=4) holds a value for an epoch of 2 steps
    by_epoch = build_schedule(ScheduleOptions(kind="cosine", final_lr_frac=0.1), 4, lr=0.1)
    assert [by_epoch(t // 2) for t in range(10)] == pytest.approx(theirs["cosine_list"], rel=1e-15)


@given(
    kind=st.sampled_from(sorted(SCHEDULE_FIELDS)),
    total=st.integers(1, 10**7),
    warmup_part=st.floats(0, 1),
    final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
    power=st.floats(0.1, 5),
    at=st.floats(0, 1.5),
)
def test_every_shape_stays_in_range_and_falls_after_warmup(
    kind: str, total: int, warmup_part: float, final: float, decay: float, power: float, at: float
) -> None:
    options = ScheduleOptions(
        kind=kind,
        warmup_steps=int(warmup_part * total),
        final_lr_frac=final,
        decay_frac=decay,
        power=power,
        step_factor=0.5,
        step_every_steps=max(1, total // 5),
    )
    if list(schedule_problems(options, total)):
        with pytest.raises(ConfigError):
            build_schedule(options, total)
        return
    rate = build_schedule(options, total)
    step = int(at * total)
    assert 0 <= rate(step) <= 1
    assert rate(0) > 0
    if step < total:
        assert rate(step) > 0  # no step of the run is spent at 0
    if step < options.warmup_steps:
        assert rate(step) <= rate(step + 1) or step + 1 >= options.warmup_steps
    else:
        assert rate(step + 1) <= rate(step)
    if kind in ("linear", "cosine", "polynomial", "wsd") and total > options.warmup_steps:
        assert rate(total) == pytest.approx(final, abs=1e-12)
        assert rate(10 * total) == rate(total)


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(ScheduleOptions(warmup_steps=200), 50)
    assert str(caught.value) == (
        "warmup_steps = 200 in a run of 50 steps\n"
        "  rule: warm-up must end within the run\n"
        "  so:   the learning rate would never reach lr\n"
        "  try:  warmup_steps = 5"
    )


def test_warmup_and_final_decay_must_not_overlap() -> None:
    options = ScheduleOptions(kind="wsd", warmup_steps=30, decay_frac=0.8)
    assert decay_steps(options, 50) == 40
    with pytest.raises(ConfigError) as caught:
        build_schedule(options, 50)
    assert str(caught.value) == (
        "warmup_steps = 30 and decay_frac = 0.8 (40 steps) in a run of 50 steps\n"
        "  rule: warm-up and final decay must not overlap\n"
        "  so:   20 steps would belong to both\n"
        "  try:  decay_frac = 0.4"
    )
    with pytest.raises(ConfigError, match="try:  warmup_steps = 5"):
        build_schedule(ScheduleOptions(kind="wsd", warmup_steps=50), 50)


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(ScheduleOptions(kind="cosin"), 50)
    assert str(caught.value) == (
        "schedule kind 'cosin'\n"
        "  rule: the kind is one of constant, linear, cosine, polynomial, inverse_sqrt, wsd, step\n"
        "  so:   there is no learning rate\n"
        "  try:  did you mean 'cosine'?"
    )

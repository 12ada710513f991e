"""Options: what the configuration accepts, and what it says about settings that would do nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from unisono.config import check_options, load_config
from unisono.errors import ConfigError
from unisono.optim.options import (
    DEFAULT_WEIGHT_DECAY,
    OPTIMIZER_FIELDS,
    SCHEDULE_FIELDS,
    OptimOptions,
    ScheduleOptions,
    describe_rate,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Both:
    optim: OptimOptions = field(default_factory=OptimOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)


def test_values_come_from_a_file_and_from_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[optim]\nkind = "lamb"\nlr = 0.01\ndecay_exclude = ["*.pos"]\n[schedule]\nkind = "wsd"\n')
    resolved = load_config(Both, [path], overrides=["schedule.decay_frac=0.3", "optim.beta2=0.99"])
    assert resolved.value == Both(
        optim=OptimOptions(kind="lamb", lr=0.01, decay_exclude=("*.pos",), beta2=0.99),
        schedule=ScheduleOptions(kind="wsd", decay_frac=0.3),
    )


@pytest.mark.parametrize(
    "field_", [f"{section}.{leaf.name}" for section, cls in (("optim", OptimOptions), ("schedule", ScheduleOptions))
               for leaf in fields(cls) if "float" in str(leaf.type) and leaf.name != "groups"]
)  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_finite(field_: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{field_} = -?(inf|nan)\n  rule: {field_} must be "):
        load_config(Both, overrides=[f"{field_}={value}"])
    section, _, name = field_.partition(".")
    built = {"optim": OptimOptions, "schedule": ScheduleOptions}[section](**{name: value})
    with pytest.raises(ConfigError, match=f"{name} must be "):
        check_options(built)


@pytest.mark.parametrize("kind", OPTIMIZER_FIELDS)
def test_weight_decay_has_a_default_for_each_kind(kind: str) -> None:
    assert OptimOptions(kind=kind).effective_weight_decay == DEFAULT_WEIGHT_DECAY[kind]
    assert OptimOptions(kind=kind, weight_decay=0.0).effective_weight_decay == 0.0


def test_few_fields_each_explained() -> None:
    every = (*fields(OptimOptions), *fields(ScheduleOptions))
    assert len(every) <= 20
    assert all(next(iter(each.metadata.values())).help for each in every)
    assert set(DEFAULT_WEIGHT_DECAY) == set(OPTIMIZER_FIELDS)
    assert {each.name for each in fields(OptimOptions)} >= frozenset[str]().union(*OPTIMIZER_FIELDS.values())
    assert {each.name for each in fields(ScheduleOptions)} >= frozenset[str]().union(*SCHEDULE_FIELDS.values())


def test_all_settings_that_would_do_nothing_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            Both,
            overrides=["optim.kind=adamw", "optim.nesterov=true", "optim.momentum=0.5", "schedule.power=3.0"],
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    for part in (
        "nesterov = true with optimizer kind 'adamw'",
        "rule: nesterov is read by sgd",
        "so:   it would change nothing",
        "try:  remove nesterov, or choose kind = 'sgd'",
        "momentum = 0.5 with optimizer kind 'adamw'",
        "rule: momentum is read by lars, sgd",
        "power = 3.0 with schedule kind 'cosine'",
        "rule: power is read by polynomial",
        "try:  remove power, or choose kind = 'polynomial'",
    ):
        assert part in text


def test_nesterov_needs_momentum() -> None:
    [(name, problem)] = OptimOptions(kind="sgd", nesterov=True, momentum=0.0).problems()
    assert name == "nesterov"
    assert str(problem) == (
        "nesterov = true with momentum = 0.0\n"
        "  rule: Nesterov's look-ahead follows the momentum buffer, so momentum must be above 0\n"
        "  so:   there is nothing to look ahead along\n"
        "  try:  momentum = 0.9, or nesterov = false"
    )


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("optim.kind=adamww", "adamww"),
        ("optim.lr=0", "0"),
        ("optim.beta2=1", "1"),
        ("optim.weight_decay=-0.1", "-0.1"),
        ("schedule.warmup_steps=-1", "-1"),
        ("schedule.final_lr_frac=1.5", "1.5"),
    ],
)
def test_values_out_of_range_are_refused(override: str, given: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]) as caught:
        load_config(Both, overrides=[override])
    assert given in str(caught.value)


def test_options_and_schedules_need_no_torch() -> None:
    code = (
        "import sys; from unisono.optim import OptimOptions, ScheduleOptions, build_schedule;"
        "build_schedule(ScheduleOptions(), 10)(0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (ScheduleOptions(), "lr 0.002 falling to 0.0002 at step 300 (cosine)"),
        (ScheduleOptions(kind="constant"), "lr 0.002 constant"),
        (ScheduleOptions(kind="step"), "lr 0.002 (step)"),
        (lambda step: 1.0, "lr 0.002, schedule of your own"),
    ],
)
def test_the_learning_rate_over_a_run_in_words(schedule: object, text: str) -> None:
    assert describe_rate(0.002, schedule, 300) == text

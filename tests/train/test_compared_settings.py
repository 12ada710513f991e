"""Every option of the configuration is compared on resume, or is in the list of those that change no step."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from unisono.config.fields import option_tree
from unisono.optim import ScheduleOptions
from unisono.train.compared import (
    BY_CONFIGURATION,
    BY_CONTENT,
    BY_TRAINER,
    NOT_COMPARED,
    compared_settings,
    in_list,
)
from unisono.train.config import Components, RunConfig
from unisono.train.objectives import cross_entropy, masked_token
from unisono.train.options import TrainOptions
from unisono.train.settings import function_name, run_settings, setting_differences

LISTS = (BY_TRAINER, BY_CONFIGURATION, BY_CONTENT, NOT_COMPARED)
LEAVES = option_tree(RunConfig).leaves


def settings(config: RunConfig) -> dict[str, object]:
    return run_settings(
        optimizer={},
        schedule=config.schedule,
        options=config.train,
        functions={},
        model={},
        data=None,
        config=compared_settings(config, function_name),
    )


def test_every_option_is_in_one_list() -> None:
    """A new option belongs into one list of ``unisono.train.compared``: BY_CONFIGURATION, if it changes the mathematics."""
    counts = {key: sum(in_list(key, names) for names in LISTS) for key in LEAVES}
    assert [key for key, count in counts.items() if count != 1] == []
    names = Counter(name for each in LISTS for name in each)
    known = {*LEAVES, *(field.name for field in fields(RunConfig))}
    assert [name for name, count in names.items() if count > 1 or name not in known] == []


@pytest.mark.parametrize("key", [key for key in LEAVES if in_list(key, BY_CONFIGURATION)])
def test_each_option_of_the_list_is_told(key: str) -> None:
    section, _, name = key.partition(".")
    before = RunConfig()
    options = getattr(before, section)
    new = "another" if isinstance(LEAVES[key].default, str) else ("one",) if LEAVES[key].default == () else 0.375
    config = replace(before, **{section: replace(options, **{name: new})})
    shown = ["one"] if new == ("one",) else new
    assert setting_differences(settings(before), settings(config)) == [f"{key} 'default' then, {shown!r} now"]
    assert setting_differences(settings(config), settings(before)) == [f"{key} {shown!r} then, 'default' now"]
    assert setting_differences(settings(config), settings(config)) == []


def test_functions_are_compared_by_name_and_checkpoints_without_settings_by_the_rest() -> None:
    config = RunConfig(components=Components(transform=test_every_option_is_in_one_list))
    assert setting_differences(settings(RunConfig()), settings(config)) == [
        "components.transform 'default' then, 'test_every_option_is_in_one_list' now"
    ]
    earlier = {
        name: value for name, value in settings(RunConfig()).items() if name not in ("config", "train.loss_scale")
    }
    assert setting_differences(earlier, settings(config)) == []


def recorded(options: TrainOptions, schedule: object = None, **functions: object) -> dict[str, object]:
    return run_settings(
        optimizer={},
        schedule=schedule or ScheduleOptions(),
        options=options,
        functions=functions,
        model={},
        data=None,
        config={},
    )


def test_options_of_the_loop_are_compared_where_they_change_a_step() -> None:
    def told(before: TrainOptions, schedule: object = None, **changes: object) -> list[str]:
        return setting_differences(recorded(before, schedule), recorded(replace(before, **changes), schedule))

    default = TrainOptions()
    assert told(default, loss_scale=4.0) == [f"train.loss_scale {default.loss_scale!r} then, 4.0 now"]
    assert told(default, eval_every_steps=7) == told(default, max_skips=3) == []
    stops = TrainOptions(early_stop_patience=2)
    assert told(stops, eval_every_steps=7) == ["train.eval_every_steps 100 then, 7 now"]
    assert recorded(default)["loader.max_bad_sample_frac"] == 0.0
    torch_schedule = torch.optim.lr_scheduler.ReduceLROnPlateau
    assert told(default, torch_schedule, num_eval_samples=7) == ["train.num_eval_samples 256 then, 7 now"]


def test_a_setting_that_one_side_does_not_record_is_not_given_a_value() -> None:
    """The number of steps is recorded with a schedule that it stretches."""
    cosine, constant = ScheduleOptions(warmup_steps=0), ScheduleOptions(kind="constant", warmup_steps=0)
    before, after = recorded(TrainOptions(steps=2), cosine), recorded(TrainOptions(steps=6), constant)
    assert setting_differences(before, after) == ["schedule.kind 'cosine' then, 'constant' now"]
    assert setting_differences(after, before) == ["schedule.kind 'constant' then, 'cosine' now"]
    renamed = [recorded(TrainOptions(), objective=objective) for objective in (cross_entropy, masked_token)]
    assert setting_differences(*renamed) == []
    assert setting_differences(*reversed(renamed)) == ["objective 'masked_token' then, 'cross_entropy' now"]
    function = recorded(TrainOptions(steps=6), function_name)
    assert setting_differences(before, function) == ["schedule 'cosine' then, 'function_name' now"]
    assert setting_differences(function, before) == ["schedule 'function_name' then, 'cosine' now"]
    changed = recorded(TrainOptions(steps=6), function_name, transform=recorded)
    assert setting_differences(function, changed) == ["transform nothing then, 'recorded' now"]
    assert setting_differences(changed, function) == ["transform 'recorded' then, nothing now"]

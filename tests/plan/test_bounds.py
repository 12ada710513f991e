"""Sizes that no job has are refused, in options and in strategy files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unisono.cli.plan import command
from unisono.config import check_options
from unisono.errors import ConfigError, PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

HUGE = 99999999999999999999


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep", "dp_shard"])
def test_axes_and_batches_have_bounds(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"{axis} must be >= [01] and <= 1048576"):
        check_options(PlanOptions(**{axis: 2**21}))
    with pytest.raises(ConfigError, match=r"global_batch must be >= 1 and <= 67108864"):
        check_options(PlanOptions(global_batch=10**12))


@pytest.mark.parametrize(
    "fields",
    [
        *({"mesh": {axis: HUGE}} for axis in ("tp", "pp", "cp", "dp_shard", "dp_replicate", "ep")),
        {"mesh": {"tp": 2**15, "pp": 2**15}},
        {"batch": {"global_batch": HUGE}},
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_strategy_file_of_such_sizes_is_refused(tmp_path: Path, fields: dict[str, Any], whole: bool) -> None:
    path = tmp_path / "plan.json"
    content: dict[str, Any] = {}
    if whole:
        content = derive_plan(PlanOptions(device="cpu"), world_size=1, device="cpu", native_bf16=False).to_json()
    for group, values in fields.items():
        content[group] = content.get(group, {}) | values
    path.write_text(json.dumps(content))
    result = CliRunner().invoke(command, ["check", str(path)])
    assert isinstance(result.exception, PlanError | ConfigError), (result.output, result.exception)
    assert "at most" in str(result.exception) or "<=" in str(result.exception), str(result.exception)

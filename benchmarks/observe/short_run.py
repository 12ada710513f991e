"""Settings of short runs of the demo on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]
SAMPLES = 8  # in a step
COMMON: Settings = {
    "plan.device": "cpu",
    "plan.precision": "fp32",
    "plan.global_batch": SAMPLES,
    "data.seq_len": 128,
    "train.eval_every_steps": 0,
    "checkpoint.every_steps": 0,
    "observe.console": "plain",
    "observe.report": False,
    "launch.num_threads": 1,
}


def overrides(settings: Settings) -> list[str]:
    """``name=value`` of each setting, as the command line takes them; one that is None keeps its default."""
    return [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in settings.items()
        if value is not None
    ]

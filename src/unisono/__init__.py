"""unisono: train PyTorch models on the hardware you have.

The names below are the public surface. They are imported when first used, so ``import unisono`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.config import load as load_config
    from unisono.data.dataset import Dataset, from_map_style
    from unisono.data.options import DataOptions, LoaderOptions
    from unisono.errors import Problem, UnisonoError
    from unisono.kvstore import create as create_kvstore
    from unisono.launch.options import LaunchOptions
    from unisono.models.options import ModelOptions
    from unisono.observe.options import ObserveOptions
    from unisono.optim.options import OptimOptions, ScheduleOptions
    from unisono.plan.options import PlanOptions
    from unisono.plan.plan import Plan
    from unisono.train.checkpoint.options import CheckpointOptions
    from unisono.train.config import Parts, RunConfig
    from unisono.train.engine import Step
    from unisono.train.metrics import Metric
    from unisono.train.options import RunOptions, SampleOptions, TrainOptions
    from unisono.train.trainer import Result, Trainer

_HOMES = {
    "load_config": "unisono.config:load",
    "Dataset": "unisono.data.dataset",
    "from_map_style": "unisono.data.dataset",
    "DataOptions": "unisono.data.options",
    "LoaderOptions": "unisono.data.options",
    "Problem": "unisono.errors",
    "UnisonoError": "unisono.errors",
    "create_kvstore": "unisono.kvstore:create",
    "LaunchOptions": "unisono.launch.options",
    "ModelOptions": "unisono.models.options",
    "ObserveOptions": "unisono.observe.options",
    "OptimOptions": "unisono.optim.options",
    "ScheduleOptions": "unisono.optim.options",
    "PlanOptions": "unisono.plan.options",
    "Plan": "unisono.plan.plan",
    "CheckpointOptions": "unisono.train.checkpoint.options",
    "Parts": "unisono.train.config",
    "RunConfig": "unisono.train.config",
    "Step": "unisono.train.engine",
    "Metric": "unisono.train.metrics",
    "RunOptions": "unisono.train.options",
    "SampleOptions": "unisono.train.options",
    "TrainOptions": "unisono.train.options",
    "Result": "unisono.train.trainer",
    "Trainer": "unisono.train.trainer",
}

__all__ = [  # noqa: RUF022 - in the order of _HOMES, kept equal by a test
    "load_config",
    "Dataset",
    "from_map_style",
    "DataOptions",
    "LoaderOptions",
    "Problem",
    "UnisonoError",
    "create_kvstore",
    "LaunchOptions",
    "ModelOptions",
    "ObserveOptions",
    "OptimOptions",
    "ScheduleOptions",
    "PlanOptions",
    "Plan",
    "CheckpointOptions",
    "Parts",
    "RunConfig",
    "Step",
    "Metric",
    "RunOptions",
    "SampleOptions",
    "TrainOptions",
    "Result",
    "Trainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return list(_HOMES)

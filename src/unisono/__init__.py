"""unisono: train PyTorch models on the hardware you have.

The names below are the public surface. They are imported when first used, so ``import unisono`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily

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
    "load_config": "config:load",
    "Dataset": "data.dataset",
    "from_map_style": "data.dataset",
    "DataOptions": "data.options",
    "LoaderOptions": "data.options",
    "Problem": "errors",
    "UnisonoError": "errors",
    "create_kvstore": "kvstore:create",
    "LaunchOptions": "launch.options",
    "ModelOptions": "models.options",
    "ObserveOptions": "observe.options",
    "OptimOptions": "optim.options",
    "ScheduleOptions": "optim.options",
    "PlanOptions": "plan.options",
    "Plan": "plan.plan",
    "CheckpointOptions": "train.checkpoint.options",
    "Parts": "train.config",
    "RunConfig": "train.config",
    "Step": "train.engine",
    "Metric": "train.metrics",
    "RunOptions": "train.options",
    "SampleOptions": "train.options",
    "TrainOptions": "train.options",
    "Result": "train.trainer",
    "Trainer": "train.trainer",
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

__getattr__, __dir__ = lazily(__name__, _HOMES)

"""Optimizers and learning-rate schedules. Importing this package alone does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.optim.build import build_optimizer as build_optimizer
    from unisono.optim.build import param_groups as param_groups
    from unisono.optim.build import state_names as state_names
    from unisono.optim.clip import clip_coefficient as clip_coefficient
    from unisono.optim.clip import global_norm as global_norm
    from unisono.optim.layerwise import Lamb as Lamb
    from unisono.optim.layerwise import Lars as Lars
    from unisono.optim.options import OptimOptions as OptimOptions
    from unisono.optim.options import ScheduleOptions as ScheduleOptions
    from unisono.optim.schedules import schedule as schedule
    from unisono.optim.skipping import make_skippable as make_skippable
    from unisono.optim.state import load_state_tensors as load_state_tensors
    from unisono.optim.state import state_tensors as state_tensors

_HOME = {
    "build_optimizer": "build",
    "state_names": "build",
    "param_groups": "build",
    "clip_coefficient": "clip",
    "global_norm": "clip",
    "Lamb": "layerwise",
    "Lars": "layerwise",
    "OptimOptions": "options",
    "ScheduleOptions": "options",
    "schedule": "schedules",
    "make_skippable": "skipping",
    "load_state_tensors": "state",
    "state_tensors": "state",
}

__getattr__, __dir__ = lazily(__name__, _HOME)

"""A run that is replayed for a comparison: in a folder of its own, quiet, and ended after the steps to be recorded.

``UNISONO_REPLAY`` names the request (``compare.step_record``); the first ``Trainer`` of the process follows it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.compare.step_record import request_of
from unisono.errors import PlanError
from unisono.observe.options import ObserveOptions
from unisono.optim import ScheduleOptions
from unisono.train.code_record import RunCode
from unisono.train.replay_recorder import StepRecorder, describe_modules

if TYPE_CHECKING:
    from unisono.train.assembly import RunInputs, RunParts


def inputs_of_replay(given: RunInputs) -> RunInputs:
    """The inputs of a run, changed for its replay: another folder, the checkpoint to start from, no trackers, no uploads.

    Unchanged where this process is no replay. Raises DataError for a request that cannot be read.
    """
    request = request_of(os.environ)
    if request is None:
        return given
    return replace(
        given,
        run_dir=Path(request.run_dir),
        resume=request.resume or "auto",
        checkpoint=replace(given.checkpoint, every_steps=0, upload_to=""),
        observe=ObserveOptions(console="off", trackers=(), report=False, monitor_every_s=0.0, replay_nonfinite=False),
        callbacks=(),
        shows_histograms=False,
    )


def build_recorder(parts: RunParts) -> StepRecorder | None:
    """The recorder of a replay's steps; None where this process is no replay.

    Raises PlanError for ``dist_async``, whose steps depend on when other workers arrive, and DataError for a request that cannot
    be read.
    """
    request = request_of(os.environ)
    if request is None:
        return None
    if parts.plan.sync.kind == "dist_async":
        raise PlanError(
            given="a replay of a run with plan.sync 'dist_async'",
            rule="a replay repeats the steps of a run bit for bit, and asynchronous steps depend on when others arrive",
            consequence="nothing was replayed",
            nearest="a run with plan.sync 'dist_sync'",
        )
    given, schedule = parts.inputs, parts.inputs.optim.used_schedule
    functions = {"objective": given.given_objective, **given.input.functions}
    if not isinstance(schedule, ScheduleOptions):
        functions["schedule"] = schedule
    plan = parts.plan
    return StepRecorder(
        request=request,
        dims=parts.built.dims,
        modules=describe_modules(parts.built.model),
        code=RunCode(functions, parts.built.record).start["parts"],
        settings={
            "clip_norm": repr(given.optim.norm_limit),
            "plan.reduction": plan.sync.reduction,
            "train.spike_sigmas": repr(given.options.spike_sigmas),
            "train.ema_decay": repr(given.options.ema_decay),
        },
    )

"""What plans were predicted to take on this host, and what runs with them took, in one JSON file. No torch.

``unisono plan auto`` writes the predictions, a run adds what it took, and the next prediction is corrected by both. A run of a
language model also adds its layout, for ``unisono plan --cluster`` (``layout_record``). The file lies in the user's cache folder,
beside that of ``measure.calibration``, and may be deleted at any time.

    {"version": 1, "predictions": [{…}], "runs": [{…}], "layouts": [{…}]}

The reader takes what it understands: entries that are damaged or of a later version are left out. A file that another user can
have written is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
import numpy as np

from unisono.config.fields import option_tree
from unisono.planner.layout_record import MeasuredLayout
from unisono.planner.learned import MOST_WAIT_FRAC, LearnedFactors, Ratio
from unisono.storage.directory import make_folder
from unisono.storage.files import file_lock, write_atomically
from unisono.storage.ownership import read_own_json
from unisono.train.compared import BY_CONTENT, compared_settings
from unisono.train.config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from unisono.observe.history import RankHistory
    from unisono.plan.plan import Plan
    from unisono.planner.layout import Layout
    from unisono.planner.timed_plan import TimedPlan

# Raise it with every change after which predicted step times differ: errors of other predictions are no guide.
PREDICTOR_VERSION: Final = 1
PLAN_RECORD_FILE: Final = "plan_record.json"  # in the user's cache folder
MIN_STEPS: Final = 10  # steady ones: the time of fewer is no figure of a run
_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 22
_MAX_ENTRIES: Final = 256  # of each kind, the newest
_MAX_NUMBER: Final = 1e18
# what a run completes from its model: a prediction is made of the plan before, a resumed run has it from its plan.json
_COMPLETED: Final = (
    "tensor_parallel.rules",
    "tensor_parallel.placements",
    "pipeline.layers_per_stage",
    "pipeline.block_costs",
)
# settings beside those of ``train.compared`` that change the work of a step
_MORE_WORK: Final = (
    *("components.optimizer", "components.collate_fn", "components.pair_transform", "components.batch_transform"),
    *("optim.kind", "optim.freeze", "train.ema_decay", "launch.num_threads"),
)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where steps were timed.

    Attributes:
        host: Name of the host.
        device: Name of its devices.
        torch: Version of torch.
        predictor: ``PREDICTOR_VERSION`` of the predictions.
    """

    host: str
    device: str
    torch: str
    predictor: int = PREDICTOR_VERSION

    def __post_init__(self) -> None:
        _check_text(self.host, self.device, self.torch)

    def is_like(self, other: Machine) -> bool:
        """Whether errors of predictions there are a guide here: the same but for the last part of torch's version."""
        return replace(self, torch=other.torch) == other and _minor(self.torch) == _minor(other.torch)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrediction:
    """The predicted step of a plan, without any correction by earlier runs.

    Attributes:
        machine: Where it was predicted, and for.
        plan: Digest of the plan's decisions (``plan_digest``).
        work: Digest of what is computed (``work_digest``).
        words: The plan in words.
        axes: Axes that more than one rank share, sorted; ``dp`` for both kinds of data ranks.
        ranks: Number of ranks.
        step_s: Seconds of a step.
        parts_s: Seconds of its parts by name.
        peak_bytes: Bytes of tensors of the rank with the most.
        at_s: When it was predicted, in seconds since 1970.
    """

    machine: Machine
    plan: str
    work: str
    words: str
    axes: tuple[str, ...]
    ranks: int
    step_s: float
    parts_s: Mapping[str, float]
    peak_bytes: int
    at_s: float

    def __post_init__(self) -> None:
        _check_text(self.words)
        _check(self.step_s, self.ranks)
        _check(self.peak_bytes, self.at_s, *self.parts_s.values(), least=0.0)

    @property
    def key(self) -> tuple[Machine, str, str]:
        """What was predicted: a later prediction of the same key takes its place."""
        return self.machine, self.plan, self.work


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """What a run took.

    Attributes:
        predicted: What was predicted of its plan before.
        step_s: Seconds per step, without pauses: the median over the logged steps.
        steps: Steady steps of which that is.
        data_wait_frac: Share of the time in which it waited for data, from 0 to 1.
        peak_bytes: The most that the device's allocator gave out; None where it does not say, or other ranks hold more.
        at_s: When the run ended, in seconds since 1970.
    """

    predicted: PlanPrediction
    step_s: float
    steps: int
    data_wait_frac: float
    peak_bytes: int | None
    at_s: float

    def __post_init__(self) -> None:
        _check(self.step_s, self.steps)
        _check(self.data_wait_frac, self.at_s, self.peak_bytes or 0, least=0.0)

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds of a step."""
        return self.step_s / self.predicted.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """The content of a record file, each list from the oldest to the newest."""

    predictions: Sequence[PlanPrediction] = ()
    runs: Sequence[MeasuredRun] = ()
    layouts: Sequence[MeasuredLayout] = ()

    def predicted(self, machine: Machine, plan: str, work: str) -> PlanPrediction | None:
        """What was predicted of the plan and the work with these digests on this very machine."""
        return next((each for each in self.predictions if each.key == (machine, plan, work)), None)

    def learned(self, machine: Machine) -> LearnedFactors:
        """The corrections by runs on ``machine`` or one that is like it."""
        return LearnedFactors(
            ratios=[
                Ratio(prediction=(run.predicted.key, run.predicted.at_s), axes=run.predicted.axes, ratio=run.ratio)
                for run in self.runs
                if run.predicted.machine.is_like(machine) and run.data_wait_frac <= MOST_WAIT_FRAC
            ]
        )


def machine_of(device: torch.device) -> Machine:
    """This host with such devices."""
    import torch

    from unisono.measure.ceiling import device_name

    return Machine(host=socket.gethostname(), device=device_name(device), torch=str(torch.__version__))


def used_axes(plan: Plan) -> tuple[str, ...]:
    """Axes that more than one rank of ``plan`` share, sorted."""
    mesh = plan.mesh
    sizes = {"cp": mesh.cp, "dp": mesh.dp_world_size, "ep": mesh.ep, "pp": mesh.pp, "tp": mesh.tp}
    return tuple(axis for axis, size in sizes.items() if size > 1)


def plan_digest(plan: Plan) -> str:
    """Digest of the plan's decisions but for those that a run completes from its model: rules of layers, and stages."""
    return _digest({name: value for name, value in plan.decisions().items() if name not in _COMPLETED})


def work_digest(config: RunConfig, name_of: Callable[[Any], str]) -> str:
    """Digest of the settings beside the plan that decide the work of a step; ``name_of`` names a function.

    Rates and lengths of the run are not among them.
    """
    settings: dict[str, Any] = {}
    for key, leaf in option_tree(RunConfig).leaves.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if key in (*BY_CONTENT, *_MORE_WORK) and value != leaf.default:
            settings[key] = name_of(value) if callable(value) else value
    return _digest(settings | compared_settings(config, name_of))


def prediction_of(
    plan: Plan, timed: TimedPlan, *, machine: Machine, work: str, peak_bytes: int, at_s: float
) -> PlanPrediction:
    """What was predicted of ``plan``.

    Args:
        plan: The plan.
        timed: Its predicted step.
        machine: This machine.
        work: ``work_digest`` of the configuration.
        peak_bytes: Bytes of tensors of the rank with the most.
        at_s: Now, in seconds since 1970.
    """
    return PlanPrediction(
        machine=machine,
        plan=plan_digest(plan),
        work=work,
        words=plan.describe(),
        axes=used_axes(plan),
        ranks=plan.mesh.world_size,
        step_s=timed.step_s,
        parts_s=timed.parts_s,
        peak_bytes=peak_bytes,
        at_s=at_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadySteps:
    """What the steady steps of an attempt took.

    Attributes:
        step_s: Seconds per step, without pauses: the median over the logged steps.
        steps: How many there are.
        data_wait_frac: Share of the time in which they waited for data, from 0 to 1.
        peak_bytes: The most that the allocator of rank 0's device gave out; None where it has none.
    """

    step_s: float
    steps: int
    data_wait_frac: float
    peak_bytes: int | None

    @staticmethod
    def of(history: RankHistory, attempt: int) -> SteadySteps | None:
        """Those of an attempt, from 1, by the history of its rank 0; None of fewer than ``MIN_STEPS``."""
        here = history.attempts == attempt
        steps, columns = history.steps[here], {name: values[here] for name, values in history.columns.items()}
        step_s = columns["perf/step_s"]
        steady = np.isfinite(step_s)
        if not steady.any():
            return None
        first = int(steady.argmax())
        earlier = steps[:first][np.isfinite(columns["time/window_s"][:first])]  # readings of the warm-up
        begin = int(earlier[-1]) if len(earlier) else int(steps[0]) - 1
        count = int(steps[steady][-1]) - begin
        if count < MIN_STEPS:
            return None
        waits = columns["time/data_wait_frac"][steady]
        of_allocator = np.isfinite(columns["mem/peak_reserved_bytes"]).any()  # only an allocator reserves
        return SteadySteps(
            step_s=float(np.median(step_s[steady])),
            steps=count,
            data_wait_frac=float(np.nanmedian(waits)) if np.isfinite(waits).any() else 0.0,
            peak_bytes=int(np.nanmax(columns["mem/peak_bytes"])) if of_allocator else None,
        )


def measured_run(predicted: PlanPrediction, steady: SteadySteps, *, at_s: float) -> MeasuredRun:
    """What a run took.

    Args:
        predicted: What was predicted of its plan.
        steady: Its steps.
        at_s: Now, in seconds since 1970.
    """
    return MeasuredRun(
        predicted=predicted,
        step_s=steady.step_s,
        steps=steady.steps,
        data_wait_frac=steady.data_wait_frac,
        # a pipeline's first rank is not the one that the prediction is of
        peak_bytes=None if "pp" in predicted.axes else steady.peak_bytes,
        at_s=at_s,
    )


def measured_layout(layout: Layout, steady: SteadySteps, *, at_s: float) -> MeasuredLayout:
    """What a run with ``layout`` took; ``at_s`` is now, in seconds since 1970."""
    return MeasuredLayout(
        layout=layout,
        step_s=steady.step_s,
        steps=steady.steps,
        data_wait_frac=min(1.0, steady.data_wait_frac),
        at_s=at_s,
    )


def read_plan_record(path: Path) -> PlanRecord:
    """What the file at ``path`` holds; nothing where there is none, or it cannot be read."""
    try:
        content = read_own_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return PlanRecord()
    if not isinstance(content, dict):
        return PlanRecord()
    entries = cast("dict[str, Any]", content)
    if entries.get("version") != _VERSION:
        return PlanRecord()
    return PlanRecord(
        predictions=_entries(entries.get("predictions"), PlanPrediction),
        runs=_entries(entries.get("runs"), MeasuredRun),
        layouts=_entries(entries.get("layouts"), MeasuredLayout),
    )


def add_to_plan_record(
    path: Path,
    *,
    predictions: Iterable[PlanPrediction] = (),
    runs: Iterable[MeasuredRun] = (),
    layouts: Iterable[MeasuredLayout] = (),
) -> None:
    """Add entries to the file at ``path``, predictions in place of earlier ones of the same keys. It is replaced atomically.

    Args:
        path: The file.
        predictions: What was predicted.
        runs: What runs with predicted plans took.
        layouts: What layouts took.

    Raises:
        OSError: It cannot be written.
    """
    make_folder(path.parent)
    with file_lock(path.with_name(f".{path.name}.lock")):  # runs may end at the same time
        known = read_plan_record(path)
        by_key = {each.key: each for each in (*known.predictions, *predictions)}
        content = {
            "version": _VERSION,
            "predictions": _newest(by_key.values()),
            "runs": _newest((*known.runs, *runs)),
            "layouts": _newest((*known.layouts, *layouts)),
        }
        write_atomically(path, json.dumps(content, indent=1).encode(), mode=0o600)


def _newest(entries: Iterable[PlanPrediction | MeasuredRun | MeasuredLayout]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.at_s)[-_MAX_ENTRIES:]]


def _entries(values: Any, kind: type[T]) -> tuple[T, ...]:
    found: list[T] = []
    for value in cast("list[Any]", values)[-_MAX_ENTRIES:] if isinstance(values, list) else ():
        with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):  # the latter in names of fields
            found.append(msgspec.convert(value, kind))
    return tuple(found)


def _check(*numbers: float, least: float = 1e-12) -> None:
    """Raise ValueError for a number that no prediction or measurement gives."""
    if not all(
        least <= number <= _MAX_NUMBER for number in numbers
    ):  # false for NaN; JSON has integers beyond any float
        raise ValueError(f"{numbers} of a plan")


def _check_text(*texts: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON can hold and no terminal shows."""
    for text in texts:
        text.encode()


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split(".")[:2])

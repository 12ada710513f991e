"""The range test of learning rates: one short training whose rate rises at every step until the loss does (Smith 2017)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unisono.errors import ConfigError
from unisono.launch.workers import Reaper
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section
from unisono.report.tables import Figure
from unisono.storage.files import write_atomically
from unisono.tune.transfer import WidthTransfer
from unisono.tune.trial_run import TrialRun

_POLL_S: Final = 0.2
_SMOOTHING: Final = 0.9  # weight of the past in the running mean of the loss
_DIVERGED: Final = (
    2.0  # the test ends where the loss is this many times as far above its smallest value as the first one was
)
_FEWEST: Final = 10  # steps that a slope is estimated from
_EDGE_FRAC: Final = 0.1  # of the steps at both ends: a running mean has not begun there, or diverges


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeTest:
    """What a range test saw.

    Attributes:
        lrs: Learning rate of each step.
        losses: Loss of each step.
        smoothed: Running mean of the losses, without the bias of its start.
        suggested_lr: The rate at which the smoothed loss fell fastest against the rate's logarithm; None if it never fell.
        min_loss_lr: The rate with the smallest smoothed loss.
        diverged_lr: The rate at which the test ended because the smoothed loss rose; None if it did not.
        worse_lr: The rate from which on each single loss was above the first one; None if the last one is not.
    """

    lrs: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggested_lr: float | None
    min_loss_lr: float
    diverged_lr: float | None
    worse_lr: float | None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)


def range_settings(low: float, high: float, steps: int, schedule_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a training whose learning rate rises from ``low`` to ``high`` by the same factor at each of ``steps`` steps."""
    return {
        **schedule_defaults,
        "schedule.kind": "step",
        "schedule.warmup_steps": 0,
        "schedule.step_every_steps": 1,
        "schedule.step_factor": (high / low) ** (1.0 / max(1, steps - 1)),
        "optim.lr": low,
        "train.steps": steps,
        "train.epochs": 0.0,
        "train.max_skips": steps,
        "train.eval_every_steps": 0,
        "train.spike_sigmas": 0.0,
        "train.early_stop_patience": 0,
        "checkpoint.every_steps": 0,
    }


def run_range_test(
    run_dir: Path, arguments: Sequence[str], *, steps: int, on_step: Callable[[float, float], None]
) -> RangeTest:
    """Run the training that ``arguments`` describe, and end it once its loss rises.

    Args:
        run_dir: Its folder.
        arguments: Of ``unisono train``, with the settings of ``range_settings``.
        steps: Its number of steps.
        on_step: Called with the rate and the loss of each step.

    Raises:
        ConfigError: It failed, or ended before a slope can be estimated.
    """
    points: dict[int, tuple[float, float]] = {}
    reason, ended = "", False
    with Reaper() as reaper:
        run = TrialRun(reaper, run_dir, arguments, metric="train/loss", beside="train/lr")
        try:
            while not ended:
                end = run.poll()
                for step, loss, rate in run.pairs():
                    points[step] = (rate, loss)
                    on_step(rate, loss)
                ended = end is not None or _rises([loss for _, loss in points.values()])
                reason = end.reason if end is not None and end.kind != "diverged" else ""
                time.sleep(_POLL_S)
        finally:
            run.kill()
    found = [points[step] for step in sorted(points)]
    if len(found) < min(_FEWEST, steps):
        raise ConfigError(
            given=f"a range test that ended after {len(found)} of {steps} steps{f': {reason}' if reason else ''}",
            rule=f"a slope is estimated from {_FEWEST} steps or more",
            consequence="no learning rate is proposed",
            nearest="a smaller --low where the loss rose at once; else see what unisono train says of this configuration",
        )
    return analyze_range([rate for rate, _ in found], [loss for _, loss in found])


def analyze_range(lrs: Sequence[float], losses: Sequence[float]) -> RangeTest:
    """Find the learning rates to suggest from the loss at each rate, in the order of the steps."""
    smoothed = _smoothed(losses)
    end = len(smoothed) if not _rises(losses) else max(1, len(smoothed) - 1)
    finite = [index for index in range(end) if math.isfinite(smoothed[index])]
    smallest = min(finite, key=lambda index: smoothed[index])
    edge = max(1, int(_EDGE_FRAC * len(lrs)))
    slopes = {
        index: (smoothed[index + 1] - smoothed[index - 1]) / math.log(lrs[index + 1] / lrs[index - 1])
        for index in range(edge, min(smallest, len(lrs) - 2) + 1)
        if math.isfinite(smoothed[index + 1])
    }
    steepest = min(slopes, key=lambda index: slopes[index], default=None)
    falls = steepest is not None and slopes[steepest] < 0
    return RangeTest(
        lrs=lrs,
        losses=losses,
        smoothed=smoothed,
        suggested_lr=lrs[steepest] if steepest is not None and falls else None,
        min_loss_lr=lrs[smallest],
        diverged_lr=lrs[-1] if _rises(losses) else None,
        worse_lr=_worse_lr(lrs, losses),
    )


def _worse_lr(lrs: Sequence[float], losses: Sequence[float]) -> float | None:
    found: float | None = None
    for rate, loss in zip(reversed(lrs), reversed(losses), strict=True):
        if math.isfinite(loss) and loss <= losses[0]:
            break
        found = rate
    return found


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential running mean, divided by the weight that it has had so far."""
    mean, weight = 0.0, 0.0
    found: list[float] = []
    for loss in losses:
        mean, weight = _SMOOTHING * mean + (1 - _SMOOTHING) * loss, _SMOOTHING * weight + (1 - _SMOOTHING)
        found.append(mean / weight)
    return found


def _rises(losses: Sequence[float]) -> bool:
    """Whether the loss is not finite any more, or has left its smallest value by twice what it had fallen before."""
    smoothed = _smoothed(losses)
    if not smoothed:
        return False
    if not math.isfinite(smoothed[-1]):
        return True
    low = min(smoothed)
    return len(smoothed) > _FEWEST and smoothed[-1] - low > _DIVERGED * max(smoothed[0] - low, 0.05 * abs(low))


def write_range_page(path: Path, found: RangeTest, transfer: WidthTransfer | None = None) -> None:
    """Write the curve of a range test as an HTML page; an older one is replaced atomically.

    With ``transfer`` the result is for a wider model than that of the test.
    """
    lrs = list(found.lrs)
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "loss",
            "x": lrs,
            "y": list(found.losses),
            "marker": {"color": "#8c959f", "size": 4},
        },
        {"type": "scatter", "mode": "lines", "name": "running mean", "x": lrs, "y": list(found.smoothed)},
    ]
    layout = curve_layout("", "loss", height=420) | {
        "xaxis": {"type": "log", "title": {"text": "learning rate"}, "zeroline": False, "exponentformat": "e"},
        "hovermode": "closest",
    }
    if found.suggested_lr is not None:
        at = math.log10(found.suggested_lr)  # axes of logarithms take places in powers of ten
        line = {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": found.suggested_lr,
            "x1": found.suggested_lr,
            "y0": 0,
            "y1": 1,
        }
        layout["shapes"] = [{**line, "line": {"color": "#cf222e", "dash": "dot"}}]
        layout["annotations"] = [
            {"x": at, "y": 1, "yref": "paper", "text": "steepest", "showarrow": False, "xanchor": "left"}
        ]
    figures = [Figure("steepest fall", _rate(found.suggested_lr)), Figure("smallest loss", _rate(found.min_loss_lr))]
    figures.append(Figure("running mean rose at", _rate(found.diverged_lr)))
    figures.append(Figure("each loss above the first from", _rate(found.worse_lr)))
    section = Section(
        title="Loss by learning rate",
        note="One training whose learning rate rises at every step. The running mean lags behind the loss. It has risen "
        "where it is above its smallest value by twice what it had fallen before.",
        charts=[{"id": "range", "data": data, "layout": layout}],
    )
    if transfer is not None:
        figures += transfer.figures()
    page = render_page(
        SUMMARY,
        section.charts,
        title="Range of learning rates",
        verdict=range_verdict(found),
        figures=figures,
        sections=[section, *([] if transfer is None else [transfer.section()])],
    )
    write_atomically(path, page.encode())


def range_verdict(found: RangeTest) -> str:
    """What to try, in a sentence."""
    if found.suggested_lr is None:
        return "The loss never fell: begin lower, or look at the data and the model."
    if found.diverged_lr is None:
        singles = (
            "" if found.worse_lr is None else f"; from {found.worse_lr:.2g} on each single loss was above the first one"
        )
        return (
            f"Try a learning rate of {found.suggested_lr:.2g}; up to {found.lrs[-1]:.2g} the running mean of the loss did not "
            f"rise by twice its fall{singles}."
        )
    return f"Try a learning rate of {found.suggested_lr:.2g}; at {found.diverged_lr:.2g} the running mean of the loss had risen."


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.2g}"

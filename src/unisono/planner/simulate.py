"""Predicted speed and memory of layouts, with the interval in which nine of ten step times lie. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from unisono.errors import ConfigError
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.layout_time import layout_time
from unisono.planner.peak_memory import MemoryParts, host_bytes, peak_memory
from unisono.planner.step_time import StepParts, fitted_constants
from unisono.planner.step_work import count_work
from unisono.units import GIB

# appended to rows, under the names that tools for published runs use; ``confidence`` is ``Prediction.spread``
PREDICTED = (
    *("pred_step_time_s", "pred_tflops_per_gpu", "pred_tokens_per_s_per_gpu", "pred_mfu", "pred_peak_mem_gib"),
    *("confidence", "error"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The step of one layout.

    Attributes:
        step_s: Seconds of a step.
        parts_s: What they consist of, by the names of ``StepParts``.
        tokens_per_s: Tokens of a device.
        model_flops_per_s: FLOP/s of a device, without what is recomputed, with attention over the whole square.
        utilization: These over the device's peak (MFU).
        memory: Bytes of the device that needs most, by the names of ``MemoryParts``.
        host_bytes: Bytes of the host's memory that activations of one device take at most (``Layout.offload``).
        spread: Nine of ten runs lie between ``step_s`` divided and multiplied by 1 + ``spread`` (``Constants.spread``).
    """

    step_s: float
    parts_s: Mapping[str, float]
    tokens_per_s: float
    model_flops_per_s: float
    utilization: float
    memory: Mapping[str, float]
    host_bytes: float
    spread: float

    @property
    def peak_bytes(self) -> float:
        """Memory that the allocator of this device reserves."""
        return sum(self.memory.values())

    @property
    def needed_bytes(self) -> float:
        """What must fit into the device (``MemoryParts.counted``)."""
        return self.peak_bytes - self.memory["allocator"]


def predict(layouts: Sequence[Layout]) -> list[Prediction]:
    """A prediction for each of ``layouts``."""
    if not layouts:
        return []
    fitted, work, times = fitted_constants(), count_work(layouts), layout_time(layouts)
    total, memory = times.total, peak_memory(layouts)
    predictions: list[Prediction] = []
    for i, layout in enumerate(layouts):
        step_s = float(total[i])
        tokens_per_s = float(work.tokens_per_step[i]) / step_s / layout.num_devices
        flops = tokens_per_s * layout.model.flops_per_token(layout.seq_len)
        predictions.append(
            Prediction(
                step_s=step_s,
                parts_s={item.name: float(getattr(times, item.name)[i]) for item in fields(StepParts)},
                tokens_per_s=tokens_per_s,
                model_flops_per_s=flops,
                utilization=flops / float(work.peak_flops[i]),
                memory={item.name: float(getattr(memory, item.name)[i]) for item in fields(MemoryParts)},
                host_bytes=host_bytes(layout),
                spread=fitted.spread_experts if layout.model.experts else fitted.spread,
            )
        )
    return predictions


def predict_rows(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """``rows`` with the columns of ``PREDICTED``: a prediction, or in ``error`` why there is none."""
    layouts: dict[int, Layout] = {}
    errors: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            layouts[number] = read_layout(row)
        except LayoutError as error:
            errors[number] = str(error)
        except ConfigError as error:
            errors[number] = "; ".join(f"{problem.given}: {problem.rule}" for problem in error.problems)
    predictions = dict(zip(layouts, predict(list(layouts.values())), strict=True))
    return [
        {**row, **(as_columns(predictions[number]) if number in predictions else _without(errors[number]))}
        for number, row in enumerate(rows)
    ]


def as_columns(prediction: Prediction) -> dict[str, str]:
    """The columns of ``PREDICTED``."""
    values = (
        prediction.step_s,
        prediction.model_flops_per_s / 1e12,
        prediction.tokens_per_s,
        prediction.utilization,
        prediction.peak_bytes / GIB,
        prediction.spread,
    )
    return {**dict(zip(PREDICTED, (f"{value:.6g}" for value in values), strict=False)), "error": ""}


def _without(error: str) -> dict[str, str]:
    return {**dict.fromkeys(PREDICTED, ""), "error": error}

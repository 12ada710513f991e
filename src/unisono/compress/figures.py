"""What a model costs and how good it is, before and after: quality, bytes on disk, memory, and time of a forward pass here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn

from unisono.device.torch_adapters import adapter_of
from unisono.interop.huggingface import weights_bytes
from unisono.measure.live_storages import LiveStorages
from unisono.train.trained import TrainedRun

_PAIRS: Final = (5, 50)
_BUDGET_S: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The figures of one model.

    Attributes:
        evaluation: Held-out loss and metrics by name.
        stored_bytes: Bytes of its weights as a safetensors file.
        peak_bytes: Most bytes of tensors during a forward pass of one micro-batch: weights, buffers, activations and outputs.
        latency_s: Median seconds of that pass, on this device.
    """

    evaluation: dict[str, float]
    stored_bytes: int
    peak_bytes: int
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A model before and after a change.

    Attributes:
        before: Of the model as it was.
        after: Of the changed model.
        latency_ratio: Median, over pairs of passes one after the other, of the time after over the time before.
        latency_quartiles: Quartiles of this ratio.
        device: Device on which the passes ran.
        micro_batch: Samples of a pass.
        samples: Held-out samples that the loss and the metrics are of.
        num_held_out: Held-out samples of the run.
    """

    before: Figures
    after: Figures
    latency_ratio: float
    latency_quartiles: tuple[float, float]
    device: str
    micro_batch: int
    samples: int
    num_held_out: int

    def worsening(self, metric: str, *, maximize: bool) -> float:
        """How much worse ``metric`` is after, over its value before: of a loss its rise, of a score its fall; < 0 if better.

        ``maximize``: it is better the larger it is.
        """
        before, after = self.before.evaluation[metric], self.after.evaluation[metric]
        change = before - after if maximize else after - before
        return change / max(abs(before), 1e-12)

    def rows(self) -> Iterator[str]:
        """The table of both as text, a line for each figure."""
        yield f"{'':<20}{'before':>12}{'after':>12}{'change':>10}"
        for name in self.before.evaluation:
            yield _row(name, self.before.evaluation[name], self.after.evaluation[name], "{:.4f}")
        for name, label in (("stored_bytes", "size on disk"), ("peak_bytes", "peak memory")):
            before, after = getattr(self.before, name), getattr(self.after, name)
            yield _row(label, before / 2**20, after / 2**20, "{:.2f} MiB")
        before, after = self.before.latency_s * 1e3, self.after.latency_s * 1e3
        low, high = self.latency_quartiles
        yield f"{_row('forward pass', before, after, '{:.2f} ms')}  quartiles {low - 1:+.1%} to {high - 1:+.1%}"
        yield f"loss and metrics: {self.judged_by()}"
        yield f"a forward pass has {self.micro_batch} samples, on {self.device}: {self.verdict()}"

    def judged_by(self) -> str:
        """The held-out samples that loss and metrics are of."""
        return f"{self.samples} of the run's {self.num_held_out} held-out samples"

    def verdict(self) -> str:
        """Whether the model is smaller and whether it is faster here."""
        low, high = self.latency_quartiles
        speed = "yes" if high < 1 else ("no, slower" if low > 1 else "no difference seen")
        return f"smaller: {'yes' if self.after.stored_bytes < self.before.stored_bytes else 'no'}, faster here: {speed}"

    def as_json(self) -> dict[str, Any]:
        """All figures as JSON types."""
        return asdict(self)


def _row(name: str, before: float, after: float, form: str) -> str:
    change = f"{after / before - 1:+.1%}" if before else ""
    return f"{name:<20}{form.format(before):>12}{form.format(after):>12}{change:>10}"


def compare(run: TrainedRun, before: nn.Module, after: nn.Module, *, samples: int) -> Comparison:
    """Measure two models of a run on the same samples; their forward passes take turns, so that both meet the same machine.

    Args:
        run: The run, whose held-out samples judge both.
        before: The model as it was.
        after: The changed model.
        samples: Held-out samples of the evaluation; 0 = all.
    """
    models = (before.eval(), after.eval())
    evaluations = [run.evaluate(model, samples) for model in models]
    peaks = [_peak_bytes(run, model) for model in models]
    seconds = _times(run, models)
    ratios = [second / first for first, second in seconds]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    figures = [
        Figures(
            evaluation=evaluation,
            stored_bytes=weights_bytes(model),
            peak_bytes=peak,
            latency_s=statistics.median(pair[number] for pair in seconds),
        )
        for number, (model, evaluation, peak) in enumerate(zip(models, evaluations, peaks, strict=True))
    ]
    return Comparison(
        before=figures[0],
        after=figures[1],
        latency_ratio=ratio,
        latency_quartiles=(low, high),
        device=str(run.device),
        micro_batch=len(next(iter(run.held_out_batch().values()))),
        samples=min(samples or len(run.held_out), len(run.held_out)),
        num_held_out=len(run.held_out),
    )


def _peak_bytes(run: TrainedRun, model: nn.Module) -> int:
    passes, batch = run.forward_backward(model), run.held_out_batch()
    with torch.no_grad(), LiveStorages() as storages:
        storages.mark([*model.parameters(), *model.buffers()], "weights")
        storages.mark(batch.values(), "batch")
        passes.evaluate([batch], lambda _number, outputs, batch: _loss(run, outputs, batch))
    return storages.peak.bytes


def _times(run: TrainedRun, models: Sequence[nn.Module]) -> list[tuple[float, float]]:
    """Seconds of a forward pass of each model, in pairs."""
    batch = run.held_out_batch()
    passes = [run.forward_backward(model) for model in models]
    adapter, index = adapter_of(run.device)

    def seconds(number: int) -> float:
        adapter.synchronize(index)
        begin = time.perf_counter()
        passes[number].evaluate([batch], lambda _number, outputs, batch: _loss(run, outputs, batch))
        adapter.synchronize(index)
        return time.perf_counter() - begin

    with torch.no_grad():
        once_s = seconds(0) + seconds(1)  # kernels and caches are warm
        pairs = max(_PAIRS[0], min(_PAIRS[1], int(_BUDGET_S / once_s)))
        return [(seconds(0), seconds(1)) for _ in range(pairs)]


def _loss(run: TrainedRun, outputs: Any, batch: Any) -> None:
    """Logits of a large vocabulary are computed with the loss, chunk by chunk."""
    run.objective(outputs, batch)

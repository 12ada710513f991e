"""A sweep of settings that decide speed: each is tried in short trainings, side by side with the settings so far.

Two trainings that follow each other have the noise of the machine in common, so their ratio is judged, and not their times. A
setting is kept where every pair of trainings was faster; the next one is then tried beside it.

``report.json`` has the comparisons made so far, with which an interrupted sweep goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.config.overlay_text import overlay_text
from unisono.doctor.child import TrainOutcome
from unisono.errors import ConfigError
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically

LEAST_GAIN: Final = 0.02  # of the time of a sample; less is not worth a setting
FEWEST_PAIRS: Final = 3  # of noise alone half of the pairs are faster: three of three by chance once in eight times
_HOPELESS: Final = 1.15  # after one pair that was so much slower, no other is made
OVERLAY_FILE: Final = "system.toml"
RECORD_FILE: Final = "report.json"
PAGE_FILE: Final = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A setting and a value for it, by dotted name."""

    name: str
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A candidate beside the settings so far.

    Attributes:
        name: The setting.
        value: Its value.
        ratio: Median over the pairs of the time of a sample with it, over that without; None where it did not train.
        low: The smallest of these ratios.
        high: The largest.
        pairs: Number of pairs.
        kept: Whether it is part of the settings from then on.
        same_losses: Whether all losses were the same, to the last bit.
        peak_ratio: Ratio of the peak memory of rank 0; None where it is not known.
        reason: Why it did not train.
    """

    name: str
    value: Any
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    kept: bool = False
    same_losses: bool = False
    peak_ratio: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)

    @property
    def words(self) -> str:
        """What came of it, in a few words."""
        if self.ratio is None:
            return f"did not train: {self.reason.partition(chr(10))[0]}"
        losses = "the same losses" if self.same_losses else "other losses"
        return f"{self.ratio:.3g} times the time ({self.low:.3g} to {self.high:.3g}), {losses}{', kept' if self.kept else ''}"


class SweepRecord(msgspec.Struct, kw_only=True):
    """What the folder of a sweep has of it.

    Attributes:
        identity: What makes it this sweep, such as the configuration; JSON types.
        micro_batch: Samples of a forward pass of a rank, of the configuration; None: not known yet.
        accumulation: Forward passes of a step, of the configuration; None: not known yet.
        comparisons: Those made so far, in order.
    """

    identity: dict[str, Any]
    micro_batch: int | None = None
    accumulation: int | None = None
    comparisons: list[Comparison] = msgspec.field(default_factory=list[Comparison])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep found: the comparisons in order."""

    comparisons: Sequence[Comparison]

    @property
    def kept(self) -> dict[str, Any]:
        """The settings that were kept; of several values of a setting the last one."""
        return {comparison.name: comparison.value for comparison in self.comparisons if comparison.kept}

    @property
    def speedup(self) -> float:
        """Product of what the kept settings gained."""
        product = 1.0
        for comparison in self.comparisons:
            if comparison.kept and comparison.ratio:
                product /= comparison.ratio
        return product

    @property
    def doubt(self) -> str:
        """What too few pairs do not tell, in a sentence; empty if there are enough of each setting."""
        doubted = [
            f"{each.name}={each.value}"
            for each in self.comparisons
            if each.low is not None and each.low <= _HOPELESS and each.pairs < FEWEST_PAIRS
        ]
        if not doubted:
            return ""
        return (
            f"Fewer than {FEWEST_PAIRS} pairs are no evidence for or against {', '.join(doubted)}: the noise of the machine "
            "alone can do that."
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        comparisons = [comparison.to_json() for comparison in self.comparisons]
        return {"kept": self.kept, "speedup": self.speedup, "doubt": self.doubt or None, "comparisons": comparisons}

    def verdict(self) -> str:
        """What was found, in a sentence."""
        text = f"None of {len(self.comparisons)} settings made steps faster by {LEAST_GAIN:.0%} or more in every pair."
        if self.kept:
            settings = ", ".join(f"{name}={value}" for name, value in self.kept.items())
            text = f"{settings}: {self.speedup:.3g} times as many samples a second, by the pairs of trainings."
        return f"{text} {self.doubt}" if self.doubt else text


def candidates_of(settings: Mapping[str, Any], *, has_accelerator: bool, threads: int) -> list[Candidate]:
    """What is tried for a configuration: other values than its own of settings that decide speed; micro-batches come after them
    (``micro_batch_candidates``).

    Args:
        settings: All settings, by dotted name, encoded as in TOML.
        has_accelerator: Whether ranks compute on one.
        threads: CPU threads of a rank.
    """
    values: dict[str, Sequence[Any]] = {
        "plan.precision": ("bf16", "fp32"),
        "plan.recompute": ("none",),
        "plan.compile": ("blocks",),
        "loader.num_workers": (0, 1, 2, 4),
        "launch.allocator": ("system",),
    }
    if has_accelerator:
        values |= {"plan.tf32": (True,)}
    elif threads > 1:
        values |= {"launch.num_threads": (threads // 2,)}
    return [
        Candidate(name=name, value=value)
        for name, tried in values.items()
        if name in settings
        for value in tried
        if value != settings[name]
    ]


def micro_batch_candidates(micro_batch: int, accumulation: int) -> list[Candidate]:
    """Twice and half the micro-batch of ``accumulation`` forward passes of a step, where they divide the samples of a rank."""
    samples = micro_batch * accumulation
    sizes = [each for each in (2 * micro_batch, micro_batch // 2) if each and samples % each == 0]
    return [Candidate(name="plan.micro_batch", value=each) for each in sizes]


def sweep(
    train: Callable[[Mapping[str, Any]], TrainOutcome],
    candidates: Iterable[Candidate],
    *,
    pairs: int,
    on_comparison: Callable[[Comparison], None],
    made: Sequence[Comparison] = (),
) -> Sweep:
    """Try candidates one after another.

    Args:
        train: Runs a short training with some settings over the configuration.
        candidates: What is tried, in this order. Of several values of a setting the last one that was kept counts.
        pairs: Pairs of trainings for each.
        on_comparison: Called with each comparison that is made.
        made: Comparisons of the first candidates, which an interrupted sweep has made.

    Raises:
        ConfigError: The configuration itself does not train, or too short for a time.
    """
    found = Sweep(comparisons=list(made))
    for number, candidate in enumerate(candidates):
        if number < len(made):
            continue
        comparison = _compare(train, found.kept, candidate, pairs)
        found = Sweep(comparisons=[*found.comparisons, comparison])
        on_comparison(comparison)
    return found


def _compare(
    train: Callable[[Mapping[str, Any]], TrainOutcome], kept: Mapping[str, Any], candidate: Candidate, pairs: int
) -> Comparison:
    ratios: list[float] = []
    peaks: list[float] = []
    same_losses = True
    for number in range(pairs):
        changed = {**kept, candidate.name: candidate.value}
        # who is first alternates: a machine that gets warm favours it
        if number % 2:
            other, base = train(changed), train(kept)
        else:
            base, other = train(kept), train(changed)
        base_s = _sample_s(base)
        if base_s is None:
            raise ConfigError(
                given=f"a short training of this configuration: {base.trouble or 'too few steps for a time'}",
                rule="a sweep compares trainings that work",
                consequence="the sweep ended",
                nearest="try it alone first: unisono train CONFIG; or more --steps",
            )
        other_s = _sample_s(other)
        if other_s is None:
            reason = other.trouble or "too few steps for a time"
            return Comparison(name=candidate.name, value=candidate.value, reason=reason)
        ratios.append(other_s / base_s)
        same_losses &= base.losses() == other.losses()
        base_bytes, other_bytes = base.peak_bytes(), other.peak_bytes()
        peaks += [other_bytes / base_bytes] if base_bytes and other_bytes else []
        if ratios[0] > _HOPELESS:
            break
    return Comparison(
        name=candidate.name,
        value=candidate.value,
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        pairs=len(ratios),
        kept=len(ratios) == pairs and max(ratios) < 1.0 - LEAST_GAIN,
        same_losses=same_losses,
        peak_ratio=statistics.median(peaks) if peaks else None,
    )


def _sample_s(outcome: TrainOutcome) -> float | None:
    """Seconds of a sample; None where it is not known."""
    step_s, samples = outcome.step_s(), outcome.samples()
    return None if outcome.code != 0 or step_s is None or not samples else step_s / samples


def write_sweep(folder: Path, base: str, record: SweepRecord, own: Mapping[str, Any]) -> Path | None:
    """Write the page of a sweep and its record, and a file with the settings that were kept; atomically.

    Args:
        folder: Of the sweep.
        base: Configuration file over which that file is; empty for the defaults.
        record: The sweep so far.
        own: Settings of the command line, which that file has as well.

    Returns:
        Path of the file with the settings; None where none were kept.
    """
    found = Sweep(comparisons=record.comparisons)
    rows = list(_rows(found.comparisons))
    timed = [comparison for comparison in found.comparisons if comparison.ratio is not None]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [printable(f"{comparison.name}={comparison.value}") for comparison in reversed(timed)],
            "x": [comparison.ratio for comparison in reversed(timed)],
            "marker": {"color": ["#2da44e" if comparison.kept else "#8c959f" for comparison in reversed(timed)]},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [(each.high or 0.0) - (each.ratio or 0.0) for each in reversed(timed)],
                "arrayminus": [(each.ratio or 0.0) - (each.low or 0.0) for each in reversed(timed)],
            },
        }
    ]
    layout = curve_layout("", "", height=max(220, 100 + 34 * len(timed))) | {
        "xaxis": {"title": {"text": "time of a sample, times that without the setting"}, "zeroline": False},
        "yaxis": {"automargin": True, "type": "category"},
        "hovermode": "closest",
    }
    head = ["setting", "time ratio", "min", "max", "pairs", "peak memory", "losses", "kept"]
    section = Section(
        title="Settings",
        note="Each is beside the settings kept before it. A ratio below 1 is faster; the bars span all pairs.",
        charts=[{"id": "settings", "data": data, "layout": layout}] if timed else [],
        tables=[Table(head=head, rows=rows)],
    )
    page = render_page(
        SUMMARY,
        section.charts,
        title="Settings for speed",
        verdict=printable(found.verdict()),
        figures=[Figure("settings tried", str(len(rows))), Figure("kept", str(len(found.kept)))],
        sections=[section],
    )
    path = folder / OVERLAY_FILE
    write_atomically(folder / PAGE_FILE, page.encode())
    if found.kept:
        write_atomically(path, overlay_text(base, {**own, **found.kept}).encode())
    write_atomically(folder / RECORD_FILE, msgspec.json.encode(record) + b"\n")
    return path if found.kept else None


def _rows(comparisons: Sequence[Comparison]) -> Iterator[list[str]]:
    for each in comparisons:
        setting = printable(f"{each.name}={each.value}")
        if each.ratio is None:
            yield [setting, printable(each.words), "", "", "", "", "", "no"]
            continue
        peak = "" if each.peak_ratio is None else f"{each.peak_ratio:.3g}"
        figures = [f"{value:.3g}" for value in (each.ratio, each.low or 0.0, each.high or 0.0)]
        losses = "the same" if each.same_losses else "others"
        yield [setting, *figures, str(each.pairs), peak, losses, "yes" if each.kept else "no"]

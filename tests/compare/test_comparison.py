"""Runs side by side: figures of events whose times are known, intervals that hold, limits that break."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_streams import write_events

from unisono.compare import Limit, Row, RunFigures, broken_limits, compare_runs, differences, read_figures
from unisono.compare.comparison import Comparison
from unisono.compare.limits import Kind, read_limits
from unisono.compare.statistics import Sample, mean_interval, median_ratio_interval, ratio_interval
from unisono.compare.table import table
from unisono.errors import ConfigError, DataError


def make_run(
    folder: Path,
    *,
    step_s: float = 0.1,
    wait_s: float = 0.0,
    loss: Callable[[int], float] = lambda n: 4.0 / n,
    **more: Any,
) -> RunFigures:
    """Forty steps on two ranks, each step 4 ms longer or shorter; an evaluation and a pause every ten."""

    def times(rank: int, step: int) -> dict[str, float]:
        noise = 0.004 * math.sin(7.0 * step)
        pause = {"eval": 0.5, "ckpt_stall": 0.25} if step % 10 == 1 else {}
        return {"forward": step_s + noise, "data_wait": wait_s, "comm_exposed_dp": 0.01 * rank, **pause}

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": 2 * loss(step), "eval/accuracy": 0.5}] if step % 10 == 0 else []

    def fields_of(rank: int, step: int) -> dict[str, Any]:
        rates = {"perf/step_s": step_s, "perf/tokens_per_s": 1000 / step_s, "perf/mfu": 0.03 / step_s}
        return {"train/loss": loss(step), "mem/peak_bytes": 1e9 * (1 + rank), **rates}

    settings = {"optim.lr": 0.1, "run.dir": str(folder), "data.hf_token": "canary"}
    given = {"settings": settings, "extra": extra, "fields_of": fields_of, "began_s": 1.8e9, **more}
    return read_figures(write_events(folder, times, **given))


def row_of(comparison: Comparison, name: str) -> Row:
    row = comparison.row(name)
    assert row is not None, name
    return row


def value(comparison: Comparison, name: str, what: str) -> float:
    found = getattr(row_of(comparison, name), what)
    assert found is not None, (name, what)
    return float(found)


def test_figures_of_known_times(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", step_s=0.12, wait_s=0.02)
    found = compare_runs(a, b)
    # the mean over both ranks; evaluations and checkpoints are no part of a step
    assert value(found, "perf/step_s", "a") == pytest.approx(0.105, rel=0.01)
    assert value(found, "perf/step_s", "ratio") == pytest.approx(0.145 / 0.105, rel=0.01)
    assert value(found, "perf/tokens_per_s", "a") == pytest.approx(1000 / 0.105, rel=0.01)
    assert value(found, "perf/tokens_per_s", "ratio") == pytest.approx(0.105 / 0.145, rel=0.01)
    assert value(found, "perf/mfu", "ratio") == pytest.approx(0.105 / 0.145, rel=0.01)
    assert value(found, "time/comm_exposed_dp_s", "b") == pytest.approx(0.005)
    assert value(found, "time/data_wait_s", "b") == pytest.approx(0.02)
    assert value(found, "time/data_wait_frac", "b") == pytest.approx(0.02 * 38 / (38 * 0.145 + 3 * 0.75), rel=0.01)
    assert value(found, "mem/peak_bytes", "a") == 2e9
    assert (value(found, "eval/loss", "delta"), row_of(found, "eval/loss").at) == (0.0, "step 40")
    assert row_of(found, "time/data_wait_s").a is None
    assert value(found, "goodput/wall_s", "a") == pytest.approx(
        sum(0.11 + 0.004 * math.sin(7.0 * n) + 0.75 * (n % 10 == 1) for n in range(1, 41))
    )
    row = row_of(found, "perf/step_s")
    assert row.interval is not None
    assert row.interval[0] <= 0.145 / 0.105 <= row.interval[1]
    assert row.interval[1] - row.interval[0] < 0.1


def test_losses_at_equal_steps(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    same = compare_runs(a, make_run(tmp_path / "b", steps=30))
    assert (same.common_steps, same.first_loss_difference, value(same, "train/loss", "delta")) == (30, None, 0.0)
    assert value(same, "eval/loss", "delta") == 0.0  # after step 30, which both have
    other = compare_runs(a, make_run(tmp_path / "c", loss=lambda n: 4.0 / n + (0.25 if n > 20 else 0.0)))
    assert (other.common_steps, other.first_loss_difference) == (40, 21)
    assert value(other, "train/loss", "delta") == pytest.approx(0.25 / 2)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    found = compare_runs(
        make_run(tmp_path / "a"), make_run(tmp_path / "b", loss=lambda n: math.nan if n == 33 else 4.0 / n)
    )
    assert found.first_loss_difference == 33
    assert math.isnan(value(found, "train/loss", "b"))
    assert found.to_json()["figures"][0]["b"] is None
    (broken,) = broken_limits([Limit("max-delta", "train/loss", 1.0)], [found])
    assert (broken.found, "has no difference" in broken.why) == (None, True)


@pytest.mark.parametrize("step", [10**400, -(10**400), True])
def test_a_step_that_is_no_count(tmp_path: Path, step: int) -> None:
    def extra(rank: int, number: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "step": step, "eval/loss": 1.0}, {"kind": "run_end", "step": step}]

    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", extra=extra)
    assert b.values["train/steps"] == 40
    assert value(compare_runs(a, b), "train/loss", "delta") == 0


def test_settings_and_secrets(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", settings={"optim.lr": 0.2, "data.hf_token": "other", "run.dir": "b", "new": [1]})
    found = compare_runs(a, b)
    assert [(each.key, each.a, each.b) for each in found.settings] == [("new", None, "[1]"), ("optim.lr", "0.1", "0.2")]
    assert "canary" not in str(found.to_json())
    assert differences({"x": "1"}, {"x": "1"}) == []


def test_runs_too_short_to_tell(tmp_path: Path) -> None:
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=9))
    assert row_of(found, "perf/step_s").interval is None
    assert any("b has 7 readings after warm-up" in note for note in found.notes)
    text = "\n".join(table([found]))
    assert "too short to tell" in text


def test_readings_of_several_steps(tmp_path: Path) -> None:
    """An accelerator is read every few steps: the time of a step is that of a reading divided by its steps."""
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", every=4))
    assert value(found, "perf/step_s", "ratio") == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("every", [1, 4])
def test_pauses_count_with_what_they_take(tmp_path: Path, every: int) -> None:
    """Each twentieth step waits 2 s for its data: the median step does not see it, and the run takes twice the time."""

    def waits(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.1, **({"data_wait": 2.0} if step % 20 == 10 else {})}

    def rates(rank: int, step: int) -> dict[str, float]:
        return {"perf/step_s": 0.2, "perf/tokens_per_s": 500.0}

    a = make_run(tmp_path / "a", steps=200, every=every)
    b = read_figures(write_events(tmp_path / "b", waits, steps=200, every=every, fields_of=rates))
    found = compare_runs(a, b)
    steady = 200 - 2 * every  # the first two readings are left out
    step_s = 0.1 + 10 * 2.0 / steady
    assert value(found, "perf/step_s", "b") == pytest.approx(step_s)
    assert value(found, "perf/tokens_per_s", "b") == pytest.approx(100 / step_s)
    assert value(found, "time/data_wait_s", "b") == pytest.approx(10 * 2.0 / steady)
    assert value(found, "time/data_wait_frac", "b") == pytest.approx(10 * 2.0 / (steady * step_s))
    for name, ratio in (("perf/step_s", step_s / 0.105), ("perf/tokens_per_s", 0.1 * 0.105 / step_s)):
        row = row_of(found, name)
        assert row.ratio == pytest.approx(ratio, rel=0.01)
        assert row.interval is not None
        assert row.interval[0] < ratio < row.interval[1]
    assert value(found, "perf/step_median_s", "b") == pytest.approx(0.1)
    limits = [Limit("max-ratio", "perf/step_s", 1.05), Limit("min-ratio", "perf/tokens_per_s", 0.95)]
    assert [each.limit for each in broken_limits(limits, [found])] == limits
    lines = list(table([found]))
    assert not any(line.startswith("perf/step_median_s") for line in lines)
    assert any(line.startswith("perf/step_median_s") for line in table([found], is_full=True))


def test_a_folder_without_events(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no events of a rank"):
        read_figures(tmp_path)


@pytest.mark.parametrize(
    ("kind", "limit", "breaks"),
    [
        ("max-ratio", 1.5, False), ("max-ratio", 1.2, True), ("min-ratio", 1.5, True), ("min-ratio", 1.2, False),
        ("max-delta", 0.05, False), ("max-delta", 0.03, True), ("min-delta", 0.05, True), ("min-delta", 0.03, False),
    ],
)  # fmt: skip
def test_limits(tmp_path: Path, kind: Kind, limit: float, breaks: bool) -> None:
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", step_s=0.14))
    broken = broken_limits([Limit(kind, "perf/step_s", limit)], [found])
    assert [each.run_dir for each in broken] == [str(tmp_path / "b")] * breaks
    if broken and kind.endswith("ratio"):
        assert "95 % interval" in broken[0].why


def test_a_limit_of_a_figure_that_only_one_run_has(tmp_path: Path) -> None:
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", wait_s=0.02))
    (broken,) = broken_limits([Limit("max-ratio", "time/data_wait_s", 2.0)], [found])
    assert broken.why == "time/data_wait_s has no ratio (none and 0.02)"


def test_limits_that_are_none(tmp_path: Path) -> None:
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    with pytest.raises(ConfigError, match="did you mean 'perf/step_s'") as caught:
        broken_limits([Limit("max-ratio", "perf/step_ms", 1.0)], [found])
    assert "a figure that the runs have" in str(caught.value)
    for text in ("perf/step_s", "=1", "perf/step_s=fast", "perf/step_s=nan"):
        with pytest.raises(ConfigError, match="the name of a figure and a number"):
            read_limits("max-ratio", [text])
    assert read_limits("max-ratio", ["a=1", "b=1e-3"]) == [Limit("max-ratio", "a", 1.0), Limit("max-ratio", "b", 1e-3)]


def evenly(values: Any) -> Sample:
    return Sample(np.asarray(values, np.float64), np.ones(len(values)))


@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_intervals_hold_their_level(pause: float) -> None:
    """Of dependent samples, with pauses now and then, about 95 % of intervals have the true ratio: counted over many pairs."""
    random = np.random.default_rng(3)
    held = [0, 0]
    for _ in range(100):
        drift = [np.convolve(random.normal(size=140), np.ones(3) / 3, "valid")[:120] for _ in range(2)]
        base, other = (1.0 + 0.05 * each + pause * (random.random(120) < 0.1) for each in drift)
        for place, interval in enumerate(
            (ratio_interval(evenly(base), evenly(1.1 * other)), median_ratio_interval(base, 1.1 * other))
        ):
            assert interval is not None
            held[place] += interval[0] <= 1.1 <= interval[1]
    assert min(held) >= 85


def test_intervals_that_are_none_or_exact() -> None:
    assert ratio_interval(evenly(np.ones(7)), evenly(np.ones(100))) is None
    assert median_ratio_interval(np.ones(7), np.ones(100)) is None
    assert mean_interval(np.ones(7)) is None
    assert mean_interval(np.full(9, 0.5)) == (0.5, 0.5)
    assert mean_interval(np.array([np.nan, *np.ones(20)])) is None
    assert ratio_interval(evenly(np.zeros(20)), evenly(np.ones(20))) is None
    assert median_ratio_interval(np.zeros(20), np.ones(20)) is None


def test_intervals_of_many_readings_miss_no_pause() -> None:
    """The pauses come at equal distances, at which readings may not be left out; weights are those of readings."""
    values = np.where(np.arange(30_000) % 3 == 0, 4.0, 1.0)
    interval = ratio_interval(evenly(np.ones(30_000)), evenly(values))
    assert interval is not None
    assert interval == pytest.approx((2.0, 2.0), rel=1e-9)
    sample = Sample(np.array([1.0, 4.0]), np.array([3.0, 1.0]))
    assert sample.mean() == 7 / 4
    steps = np.random.default_rng(0).choice([1.0, 3.0], 400)  # the short readings are the slow ones
    uneven = Sample(np.where(steps == 1.0, 4.0, 1.0), steps)
    interval = ratio_interval(evenly(np.ones(20)), uneven)
    assert interval is not None
    assert interval[0] < (uneven.mean() or 0) < interval[1]
    assert interval[1] < 2  # the mean without weights is 2.5


def test_table_of_three_runs(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    lines = list(table([compare_runs(a, make_run(tmp_path / "b", step_s=0.12)), compare_runs(a, a)]))
    assert [line.split()[0] for line in lines[:3]] == ["A", "B", "C"]
    row = next(line.split() for line in lines if line.startswith("perf/step_s"))
    assert row[2::2][0] == "ms"
    assert row[-4] == "1.000"  # C is A
    assert 1.15 < float(row[5]) < 1.23
    assert "A and B do not differ in settings" in lines
    assert not any(line.startswith("goodput/useful_s") for line in lines)
    full = list(table([compare_runs(a, a)], is_full=True))
    assert any(line.startswith("goodput/useful_s") for line in full)

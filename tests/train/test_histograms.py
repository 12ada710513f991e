"""Histograms of gradients and parameters: against numpy, over shards, and as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from pool import Pool

from unisono import ObserveOptions
from unisono.dist import JobSpec, World
from unisono.train import histograms as module
from unisono.train.histograms import histograms

SHOWN = ObserveOptions(console="off", trackers=("tensorboard",), report=False)


class Whole:
    """Parameters that no rank has a part of."""

    def sum_over_shards(self, parameters: object, values: torch.Tensor) -> torch.Tensor:
        return values


def of(values: torch.Tensor, divisor: float | None = None) -> dict[str, Any]:
    scale = None if divisor is None else torch.tensor(divisor)
    return histograms(Whole(), [], [values], scale)[0]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_counts_are_numpys(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32) ** 3
    x[0, :4] = 0.0, np.nan, np.inf, -np.inf
    found = of(torch.from_numpy(x), 4.0)
    finite = x[np.isfinite(x)] / 4
    powers = 2.0 ** np.arange(found["exponent"], found["exponent"] + len(found["positive"]) + 1)
    assert found["positive"] == np.histogram(finite, powers)[0].tolist()
    assert found["negative"] == np.histogram(-finite, powers)[0].tolist()
    assert (found["zeros"], found["nonfinite"]) == (1, 3)
    assert found["sum"] == pytest.approx(finite.sum(), rel=1e-4)
    assert found["sum_squares"] == pytest.approx((finite**2).sum(), rel=1e-4)


def test_edges_belong_to_the_bin_above_and_extremes_to_the_outermost() -> None:
    found = of(torch.tensor([1.0, 2.0, 3.999, 4.0, -1.0, 1e-30, -1e-30, 3e38]))
    assert found["exponent"] == 0
    assert found["positive"][:3] == [1, 2, 1]
    assert (found["positive"][-1], len(found["positive"])) == (1, 24)  # 2^23 and above
    assert sum(found["negative"]) == found["negative"][0] == 1
    assert found["zeros"] == 2


def test_of_no_values_and_of_low_precision() -> None:
    assert of(torch.zeros(0))["positive"] == []
    assert of(torch.tensor([0.5, -0.25], dtype=torch.bfloat16))["positive"] == [0, 1]


@pytest.mark.gpu
def test_an_accelerator_counts_the_same() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) ** 3
    x[:3] = torch.tensor([0.0, float("nan"), float("inf")])
    device = torch.accelerator.current_accelerator()
    torch.use_deterministic_algorithms(True)
    try:
        here, there = of(x), of(x.to(device))
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("sum", "sum_squares"):
        assert there.pop(name) == pytest.approx(here.pop(name), rel=1e-4)
    assert there == here


def shown(world: World, run_dir: str, axes: dict[str, int], trackers: bool = True) -> list[dict[str, Any]]:
    observe = SHOWN if trackers and world.rank == 0 else tiny.QUIET  # a script may give trackers on rank 0 alone
    with tiny.trainer(
        run_dir, world=world, steps=2, gradient_stats_every_steps=2, sizes={"num_kv_heads": 2}, observe=observe, **axes
    ) as run:
        list(run)
    return [event for event in tiny.events(run_dir) if event["kind"] == "histograms"]


@pytest.mark.parametrize(
    ("ranks", "axes"), [(2, {"dp_shard": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {}), (4, {"tp": 2, "dp_shard": 2})]
)
def test_histograms_are_of_whole_tensors(pool: Pool, tmp_path: Path, ranks: int, axes: dict[str, int]) -> None:
    if axes.get("pp"):
        axes = axes | {"micro_batch": 2}
    (alone,) = shown(World(JobSpec()), str(tmp_path / "alone"), {})
    (event,) = pool.run(shown, str(tmp_path / "run"), axes, ranks=ranks)[0]
    assert event["step"] == 2
    for group in ("gradients", "parameters"):
        assert list(event[group]) == list(alone[group])
        for name, here in event[group].items():
            there = alone[group][name]
            assert total(here) == total(there), name
            assert here["sum_squares"] == pytest.approx(there["sum_squares"], rel=1e-3), name
            # rounding moves a value over an edge now and then
            assert differing(here, there) <= 2 + total(there) // 50, name
    others = [path for path in (tmp_path / "run" / "events").iterdir() if path.name != "rank00000.jsonl"]
    assert len(others) == ranks - 1
    assert not any('"histograms"' in path.read_text() for path in others)


def bins(histogram: dict[str, Any]) -> dict[tuple[int, int], int]:
    exponent = histogram["exponent"]
    signs = {-1: histogram["negative"], 1: histogram["positive"]}
    return {(sign, exponent + i): n for sign, counts in signs.items() for i, n in enumerate(counts)}


def total(histogram: dict[str, Any]) -> int:
    return histogram["zeros"] + histogram["nonfinite"] + sum(bins(histogram).values())


def differing(one: dict[str, Any], other: dict[str, Any]) -> int:
    here, there = bins(one), bins(other)
    return sum(abs(here.get(key, 0) - there.get(key, 0)) for key in here.keys() | there.keys()) // 2


def test_without_a_tracker_that_shows_them_none_are_made(tmp_path: Path) -> None:
    assert shown(World(JobSpec()), str(tmp_path), {}, trackers=False) == []


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tiny.trainer(tmp_path, steps=4, gradient_stats_every_steps=2, observe=SHOWN) as run:
        list(run)
        size = run.model.embedding.weight.numel()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    read.Reload()
    tags = read.Tags()["histograms"]
    assert len(tags) == 2 * len({tag.partition("/")[2] for tag in tags}) > 10
    gradients = read.Histograms("gradients/embedding.weight")
    assert [each.step for each in gradients] == [2, 4]
    found = gradients[0].histogram_value
    norms = {e["step"]: e["layers"] for e in tiny.events(tmp_path) if e["kind"] == "gradient_stats"}
    assert found.sum_squares**0.5 == pytest.approx(norms[2]["embedding.weight"]["norm"], rel=1e-3)
    assert sum(found.bucket) == found.num
    assert found.min < found.max
    assert found.num == read.Histograms("parameters/embedding.weight")[1].histogram_value.num == size

"""The sweep on trainings of which the time is known."""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.tune.folder import read_record
from unisono.tune.system import (
    RECORD_FILE,
    Candidate,
    Comparison,
    Sweep,
    SweepRecord,
    candidates_of,
    micro_batch_candidates,
    sweep,
    write_sweep,
)


def record_of(folder: Path, identity: Mapping[str, Any]) -> SweepRecord:
    return read_record(folder / RECORD_FILE, SweepRecord, identity, "sweep")


@dataclass
class Outcome:
    """What a sweep asks of a training."""

    seconds: float
    code: int = 0
    trouble: str = ""
    loss: float = 1.0

    def step_s(self) -> float | None:
        return self.seconds or None

    def samples(self) -> int:
        return 8

    def losses(self) -> list[float]:
        return [self.loss]

    def peak_bytes(self) -> float:
        return 100.0


def trainings(seconds_of: Callable[[Mapping[str, Any]], float], noise: float = 0.0) -> Callable[..., Any]:
    draw = random.Random(0)
    drift = itertools.count()  # the machine gets slower all the time

    def train(settings: Mapping[str, Any]) -> Outcome:
        seconds = seconds_of(settings)
        if seconds < 0:
            return Outcome(0.0, code=1, trouble="out of memory")
        return Outcome(seconds * (1 + 0.002 * next(drift)) * (1 + noise * draw.random()))

    return train


def swept(train: Callable[..., Any], *candidates: Candidate, pairs: int = 3) -> tuple[Any, list[Comparison]]:
    told: list[Comparison] = []
    return sweep(train, candidates, pairs=pairs, on_comparison=told.append), told


def test_what_is_faster_is_kept_and_the_next_is_beside_it() -> None:
    def seconds(settings: Mapping[str, Any]) -> float:
        time = 1.0
        time *= 0.5 if settings.get("a") == 2 else 1.0
        return time * (0.8 if settings.get("b") and settings.get("a") == 2 else 1.1 if settings.get("b") else 1.0)

    found, told = swept(
        trainings(seconds), Candidate(name="a", value=2), Candidate(name="b", value=True), Candidate(name="c", value=1)
    )
    assert found.kept == {"a": 2, "b": True}
    assert found.speedup == pytest.approx(2.5, rel=0.02)
    assert [each.kept for each in told] == [True, True, False]
    assert found.verdict().startswith("a=2, b=True: 2.")


def test_noise_is_not_kept() -> None:
    found, told = swept(
        trainings(lambda settings: 1.0, noise=0.3), *(Candidate(name=f"n{i}", value=1) for i in range(20))
    )
    assert len(found.kept) <= 3  # by chance one in eight is faster in three pairs
    assert all(each.pairs == 3 for each in told if each.high is not None and each.high < 1.15)


def test_what_is_much_slower_is_tried_once() -> None:
    found, told = swept(trainings(lambda settings: 2.0 if settings else 1.0), Candidate(name="a", value=2))
    assert (told[0].pairs, found.kept) == (1, {})
    assert found.verdict() == "None of 1 settings made steps faster by 2% or more in every pair."


@pytest.mark.parametrize("seconds", [1.1, 1.0, 0.5])
def test_few_pairs_say_nothing_of_a_setting_whether_it_is_kept_or_not(seconds: float) -> None:
    train = trainings(lambda settings: seconds if settings else 1.0)
    for pairs in (1, 2):
        found, _ = swept(train, Candidate(name="a", value=2), pairs=pairs)
        assert found.doubt.startswith("Fewer than 3 pairs are no evidence for or against a=2: ")
        assert found.verdict().endswith(found.doubt)
    found, _ = swept(train, Candidate(name="a", value=2))
    assert found.doubt == ""


def test_what_does_not_train_is_told() -> None:
    found, told = swept(trainings(lambda settings: -1.0 if settings else 1.0), Candidate(name="a", value=2))
    assert told[0].words == "did not train: out of memory"
    assert found.kept == {}
    with pytest.raises(ConfigError, match="a short training of this configuration: out of memory"):
        swept(trainings(lambda settings: -1.0), Candidate(name="a", value=2))


def test_the_overlay_and_the_page(tmp_path: Path) -> None:
    train = trainings(lambda settings: 0.5 if settings.get("loader.num_workers") == 2 else -1.0 if settings else 1.0)
    found, _ = swept(
        train, Candidate(name="plan.compile", value="blocks"), Candidate(name="loader.num_workers", value=2)
    )
    path = write_sweep(tmp_path, "/etc/run.toml", recorded(found), {"optim.lr": 0.1})
    assert path is not None
    assert tomllib.loads(path.read_text()) == {
        "base": "/etc/run.toml",
        "optim": {"lr": 0.1},
        "loader": {"num_workers": 2},
    }
    page = (tmp_path / "report.html").read_text()
    assert "did not train" in page
    assert all(f"<th>{head}</th>" in page for head in ("time ratio", "min", "max"))
    nothing, _ = swept(trainings(lambda settings: 1.0), Candidate(name="a", value=1))
    assert write_sweep(tmp_path, "", recorded(nothing), {}) is None


def recorded(found: Sweep) -> SweepRecord:
    return SweepRecord(identity={"steps": 30}, micro_batch=4, accumulation=2, comparisons=list(found.comparisons))


def test_a_sweep_goes_on_with_the_comparisons_it_has(tmp_path: Path) -> None:
    """Interrupted in each training, it finds the same as at one go, and makes no comparison twice."""
    candidates = [Candidate(name="a", value=2), Candidate(name="b", value=True), Candidate(name="c", value=[1])]
    faster = {"a": 0.5, "b": 0.8, "c": 1.0}

    def seconds(settings: Mapping[str, Any]) -> float:
        time = 1.0
        for name in settings:
            time *= faster[name]
        return time

    whole = sweep(trainings(seconds), candidates, pairs=2, on_comparison=lambda comparison: None)
    assert whole.kept == {"a": 2, "b": True}
    record = record_of(tmp_path, {"steps": 30})
    numbers = itertools.count(1)
    made: list[str] = []

    def on_comparison(comparison: Comparison) -> None:
        made.append(comparison.name)
        record.comparisons.append(comparison)
        write_sweep(tmp_path, "", record, {})

    def train(settings: Mapping[str, Any]) -> Any:
        if next(numbers) % 5 == 0:
            raise KeyboardInterrupt
        return trainings(seconds)(settings)

    num_interrupts = 0
    while True:
        record = record_of(tmp_path, {"steps": 30})
        try:
            found = sweep(train, candidates, pairs=2, on_comparison=on_comparison, made=tuple(record.comparisons))
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        break
    assert num_interrupts == 2
    assert made == ["a", "b", "c"]
    assert found.kept == whole.kept
    assert [each.value for each in found.comparisons] == [2, True, [1]]
    assert record_of(tmp_path, {"steps": 30}).comparisons == list(found.comparisons)


def test_a_record_of_another_sweep(tmp_path: Path) -> None:
    found, _ = swept(trainings(lambda settings: 1.0), Candidate(name="a", value=1))
    write_sweep(tmp_path, "", recorded(found), {})
    record = record_of(tmp_path, {"steps": 30})
    assert (record.micro_batch, record.accumulation) == (4, 2)
    with pytest.raises(ConfigError, match=r"steps 31 for the sweep in .*, which began with 30"):
        record_of(tmp_path, {"steps": 31})
    with pytest.raises(ConfigError, match=r"optim\.lr 0\.1 for the sweep in .*, which began with None"):
        record_of(tmp_path, {"steps": 30, "optim.lr": 0.1})
    for content in (b"", b"{}", b'{"identity": {}, "comparisons": [{}]}', b"[" * 5000):
        (tmp_path / RECORD_FILE).write_bytes(content)
        with pytest.raises(ConfigError, match="which is no record of a sweep"):
            record_of(tmp_path, {"steps": 30})
        assert (tmp_path / RECORD_FILE).read_bytes() == content


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "sizes"), [(4, 2, [8, 2]), (4, 1, [2]), (1, 4, [2]), (1, 1, []), (3, 4, [6, 1])]
)
def test_micro_batches_divide_the_samples_of_a_rank(micro_batch: int, accumulation: int, sizes: list[int]) -> None:
    assert [each.value for each in micro_batch_candidates(micro_batch, accumulation)] == sizes


def test_what_is_tried_is_not_what_is_set() -> None:
    settings = {
        **{"plan.precision": "auto", "plan.recompute": "full"},
        **{"plan.compile": "blocks", "loader.num_workers": 2, "launch.allocator": "tuned", "launch.num_threads": 0},
    }
    tried = {(each.name, each.value) for each in candidates_of(settings, has_accelerator=False, threads=4)}
    assert tried == {
        *{("plan.precision", "fp32"), ("plan.precision", "bf16")},
        *{("plan.recompute", "none"), ("loader.num_workers", 0), ("loader.num_workers", 1), ("loader.num_workers", 4)},
        *{("launch.allocator", "system"), ("launch.num_threads", 2)},
    }

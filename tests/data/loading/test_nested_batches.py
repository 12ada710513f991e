"""Nested samples, collate functions, and torch's samplers and DataLoader as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unisono.data.dataset import as_dataset
from unisono.data.loading.loader import Loader, StepBatch
from unisono.data.loading.stream_loader import StreamLoader
from unisono.data.loading.torch_loader import read_torch_loader
from unisono.data.options import LoaderOptions
from unisono.errors import DataError
from unisono.plan import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train import Trainer, TrainOptions
from unisono.train.input_pipeline import read_source


@dataclass
class Box:
    corners: Any
    label: Any


class Nested:
    """Sample i has a nested dict, a dataclass, a tuple and a string."""

    fingerprint = ""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": {"a": torch.full((2,), float(index)), "b": index},
            "box": Box(np.full(4, index, np.int32), f"box {index}"),
            "pair": (index, torch.tensor([index])),
            "name": f"sample {index}",
        }


def ragged(samples: list[list[int]]) -> dict[str, Any]:
    longest = max(map(len, samples))
    return {
        "ids": torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples]),
        "lengths": [len(sample) for sample in samples],
    }


def batches(data: Any, kind: Any, workers: int, **given: Any) -> list[StepBatch]:
    options = LoaderOptions(num_workers=workers, worker_kind=kind, last_batch=given.pop("last_batch", "rollover"))
    fixed: dict[str, Any] = {"seed": 3, "global_batch": 4, "options": options}
    with Loader(as_dataset(data), **{**fixed, **given}) as loader:
        return list(loader.iterate(0, 3))


@pytest.mark.parametrize(("kind", "workers"), [("auto", 0), ("thread", 1), ("process", 1)])
def test_nested_samples_keep_their_structure(kind: str, workers: int) -> None:
    for batch in batches(Nested(), kind, workers, last_batch="pad"):
        (part,) = batch.micro_batches
        ids: Any = batch.sample_ids.tolist()
        nested: dict[str, Any] = dict(part)
        assert nested["x"]["a"].tolist() == [[float(i)] * 2 for i in ids]
        assert nested["x"]["b"].tolist() == ids
        assert isinstance(nested["box"], Box)
        assert nested["box"].corners.tolist() == [[i] * 4 for i in ids]
        assert nested["box"].label == [f"box {i}" for i in ids]
        assert isinstance(nested["pair"], tuple)
        assert nested["pair"][1].tolist() == [[i] for i in ids]
        assert nested["name"] == [f"sample {i}" for i in ids]
        expected = [1, 1, 0, 0] if batch.step == 2 else [1, 1, 1, 1]  # 10 samples in batches of 4
        assert part["weights"].tolist() == expected


def test_ranks_share_a_nested_batch() -> None:
    (whole,) = batches(Nested(), "auto", 0)[1].micro_batches
    parts = [batches(Nested(), "auto", 0, rank=rank, world_size=2)[1].micro_batches[0] for rank in range(2)]
    assert [*parts[0]["name"], *parts[1]["name"]] == whole["name"]
    assert torch.cat([part["x"]["a"] for part in parts]).equal(whole["x"]["a"])  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(("kind", "workers"), [("auto", 0), ("thread", 1), ("process", 1)])
def test_collate_fn_gets_the_items_of_the_data_set(kind: str, workers: int) -> None:
    data = [[index] * (index % 3 + 1) for index in range(1, 13)]
    for batch in batches(data, kind, workers, collate_fn=ragged):
        (part,) = batch.micro_batches
        samples = [data[index] for index in batch.sample_ids]
        assert part["ids"].equal(ragged(samples)["ids"])
        assert part["lengths"].tolist() == [len(sample) for sample in samples]


def test_collate_fn_of_a_stream() -> None:
    stream = StreamLoader(iter_again(), seed=0, global_batch=3, collate_fn=ragged)
    (first,) = list(stream.iterate(0, 1))
    assert first.micro_batches[0]["ids"].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]


class iter_again:
    def __iter__(self) -> Any:
        return iter([[0], [1, 1], [2, 2, 2]])


def test_a_collate_fn_without_arrays_is_refused() -> None:
    with pytest.raises(DataError, match="a batch without an array from collate_fn: name"):
        batches(Nested(), "auto", 0, collate_fn=lambda samples: {"name": "all"})  # pyright: ignore[reportUnknownLambdaType]


def numbers(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(count).float()[:, None], torch.arange(count).float())


def epoch_ids(loader: DataLoader[Any], *, steps: int = 4, world_size: int = 1) -> list[float]:
    """Targets of the first steps, rank after rank in each step."""
    parts = read_torch_loader(loader)
    assert not isinstance(parts.data, DataLoader)
    loaders = [
        Loader(as_dataset(parts.data), seed=1, global_batch=4, rank=rank, world_size=world_size, shuffle=parts.shuffle)  # pyright: ignore[reportArgumentType]
        for rank in range(world_size)
    ]
    return [
        value
        for step in range(steps)
        for rank in loaders
        for part in rank.batch(step).micro_batches
        for value in part["targets"].tolist()
    ]


def test_orders_of_torch_samplers() -> None:
    data = numbers()
    assert epoch_ids(DataLoader(data, 4, sampler=SequentialSampler(data)), steps=3) == list(range(12))
    shuffled = epoch_ids(DataLoader(data, 4, shuffle=True), steps=3)
    assert sorted(shuffled) == list(range(12)) != shuffled
    chosen = [11, 2, 5, 7]
    subset = epoch_ids(DataLoader(data, 4, sampler=SubsetRandomSampler(chosen)), steps=1)
    assert sorted(subset) == sorted(chosen)
    shared = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    assert epoch_ids(DataLoader(data, 2, sampler=shared), steps=3, world_size=2) == list(range(12))


def test_weighted_draws_are_independent_and_rank_free() -> None:
    weights = [0.0] * 6 + [1.0] * 5 + [5.0]
    loader = DataLoader(numbers(), 4, sampler=WeightedRandomSampler(weights, 40))
    parts = read_torch_loader(loader)
    assert len(parts.data) == 40  # pyright: ignore[reportArgumentType]
    drawn = epoch_ids(loader, steps=1000)
    assert epoch_ids(loader, steps=1000, world_size=2) == drawn
    assert min(drawn) == 6
    counts = np.bincount(np.array(drawn, np.int64), minlength=12)
    assert abs(counts[11] / 4000 - 0.5) < 4 * (0.25 / 4000) ** 0.5
    repeats = np.mean(np.diff(drawn) == 0)
    assert abs(repeats - (0.25 + 5 * 0.01)) < 4 * (0.21 / 4000) ** 0.5 * 1.5  # Σ p²


class Backwards(Sampler[int]):
    def __init__(self, data: Any) -> None:
        self.size = len(data)

    def __iter__(self) -> Any:
        return iter(range(self.size)[::-1])


@pytest.mark.parametrize(
    ("sampler", "given"),
    [
        (Backwards(numbers()), "the sampler Backwards"),
        (RandomSampler(numbers(), replacement=True), "the sampler RandomSampler"),
        (WeightedRandomSampler([1.0] * 12, 5, replacement=False), "the sampler WeightedRandomSampler"),
    ],
)
def test_other_samplers_are_refused_by_name(sampler: Any, given: str) -> None:
    with pytest.raises(DataError) as caught:
        read_torch_loader(DataLoader(numbers(), 4, sampler=sampler))
    (problem,) = caught.value.problems
    assert problem.given == given
    assert problem.consequence == "its order could not be the same on other numbers of ranks, nor after a resume"


def test_a_batch_sampler_of_ones_own_is_refused() -> None:
    class Mine(BatchSampler):
        pass

    data = numbers()
    with pytest.raises(DataError, match="a DataLoader with batch_sampler Mine"):
        read_torch_loader(DataLoader(data, batch_sampler=Mine(SequentialSampler(data), 2, False)))
    with pytest.raises(DataError, match="a DataLoader without batch_size"):
        read_torch_loader(DataLoader(data, batch_size=None))


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)[:, 0]


def squares(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs - batch["targets"]).square().sum(), torch.tensor(float(len(outputs)))


def as_pair(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_trainer_takes_a_torch_loader_and_lists(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def losses(data: Any, name: str, **given: Any) -> tuple[list[float], dict[str, float]]:
        torch.manual_seed(0)
        options = TrainOptions(steps=5)
        with Trainer(Linear(), data, objective=squares, options=options, run_dir=tmp_path / name, **given) as run:
            values = [float(step.stats[0]) for step in run]
            return values, run.evaluate()

    held_out = [(torch.ones(1), 1.0), (torch.zeros(1), 2.0)]
    plain = losses(numbers(), "plain", plan=PlanOptions(global_batch=4, micro_batch=4), eval_data=held_out)
    capsys.readouterr()
    loader = DataLoader(numbers(), 4, shuffle=True, collate_fn=as_pair)
    held_out_tensors = [(x, torch.tensor(y)) for x, y in held_out]
    assert losses(loader, "torch", eval_data=held_out_tensors) == plain
    assert (
        "Loader replaces DataLoader:\n  each sample once per epoch, shuffled, keyed by the run's seed"
        in capsys.readouterr().out
    )


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(1), 1.0)] * 20)


def taken_over(capsys: pytest.CaptureFixture[str], data: DataLoader[Any], /, **given: Any) -> tuple[Any, list[str]]:
    """The source of a trainer of ``data``, and the lines that it printed about it."""
    source = read_source(data, **{"plan": None, "loader": None, "collate_fn": None} | given)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Loader replaces DataLoader:"
    return source, [line.removeprefix("  ") for line in lines]


def test_each_setting_of_a_torch_loader_is_taken_over_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    source, lines = taken_over(capsys, DataLoader(numbers(), 3, num_workers=1, drop_last=True, collate_fn=as_pair))
    assert (source.plan.global_batch, source.plan.micro_batch, source.collate_fn) == (3, 3, as_pair)
    assert source.loader == LoaderOptions(num_workers=1, last_batch="drop")
    assert lines == [
        "samples in order, keyed by the run's seed instead of torch's generators",
        "batch_size 3, from the DataLoader",
        "num_workers 1, from the DataLoader",
        "collate_fn, from the DataLoader",
        "drop_last, as last_batch=drop",
    ]


def test_each_setting_that_is_given_replaces_that_of_a_torch_loader(capsys: pytest.CaptureFixture[str]) -> None:
    def first(samples: list[Any]) -> Any:
        return samples[0]

    source, lines = taken_over(
        capsys,
        DataLoader(numbers(), 8, shuffle=True, collate_fn=as_pair),
        plan=PlanOptions(global_batch=4),
        loader=LoaderOptions(num_workers=1),
        collate_fn=first,
    )
    assert (source.plan, source.collate_fn) == (PlanOptions(global_batch=4), first)
    assert lines[1:] == [
        "batch_size 8, replaced by global_batch 4 of the plan given here",
        "num_workers 0, replaced by num_workers=1 of the loader given here",
        "collate_fn, replaced by the one given here",
        "drop_last=False, replaced by last_batch=rollover of the loader given here",
    ]
    plan = derive_plan(PlanOptions(global_batch=6), world_size=1, device="cpu", native_bf16=False)
    source, lines = taken_over(capsys, DataLoader(numbers(), 8), plan=plan)
    assert source.plan is plan
    assert lines[1] == "batch_size 8, replaced by global_batch 6 of the plan given here"


def test_a_plan_without_a_size_of_its_own_takes_that_of_a_torch_loader(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(numbers(), 16)
    source, lines = taken_over(capsys, loader, plan=PlanOptions(precision="fp32"))
    assert source.plan == PlanOptions(precision="fp32", global_batch=16, micro_batch=16)
    assert lines[1] == "batch_size 16, from the DataLoader"
    assert taken_over(capsys, loader, plan=PlanOptions(micro_batch=4))[0].plan.micro_batch == 4
    path = tmp_path / "plan.json"
    path.write_text('{"batch": {"global_batch": 8}}')
    source, lines = taken_over(capsys, loader, plan=PlanOptions(file=str(path)))
    assert source.plan == PlanOptions(file=str(path))
    assert lines[1] == "batch_size 16, replaced by global_batch 8 of the plan given here"
    path.write_text('{"precision": {"compute": "fp32"}}')
    assert taken_over(capsys, loader, plan=PlanOptions(file=str(path)))[0].plan.global_batch == 16
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    source, lines = taken_over(capsys, loader, plan=PlanOptions(tp=2))
    assert source.plan.global_batch == 32
    assert lines[1] == "batch_size 16, from the DataLoader, the share of each of 2 ranks: global_batch 32"


@pytest.mark.parametrize(("workers", "taken", "said"), [(0, 0, "no thread"), (1, -1, "one thread")])
def test_a_stream_of_a_torch_loader(capsys: pytest.CaptureFixture[str], workers: int, taken: int, said: str) -> None:
    source, lines = taken_over(capsys, DataLoader(Counting(), 4, num_workers=workers))
    assert source.loader == LoaderOptions(num_workers=taken)
    assert lines == [
        "the stream's own order",
        "batch_size 4, from the DataLoader",
        f"num_workers {workers}: {said} reads the stream ahead",
        "samples are stacked, Python floats as float32",
        "an epoch's incomplete batch is completed from the next epoch",
    ]


def test_the_batch_of_a_run_is_the_one_that_is_printed(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for plan, size in ((PlanOptions(global_batch=4), 4), (PlanOptions(), 6), (None, 6)):
        options = TrainOptions(steps=1)
        with Trainer(
            Linear(), DataLoader(numbers(), 6), plan, objective=squares, options=options, run_dir=tmp_path / str(plan)
        ) as run:
            assert next(iter(run)).weight == size
        assert f"{'replaced by global_batch 4' if size == 4 else 'batch_size 6, from'}" in capsys.readouterr().out


def test_eval_data_is_checked_when_it_is_given(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="eval_data of type generator"):
        Trainer(Linear(), numbers(), objective=squares, run_dir=tmp_path, eval_data=(i for i in range(3)))  # pyright: ignore[reportArgumentType]

"""Streams: the same steps for any number of ranks and any place to resume from, at the price the contract states."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.utils.data import IterableDataset

from unisono.data.loading.stream_loader import StreamLoader, is_stream
from unisono.errors import DataError


class Lines(IterableDataset[dict[str, int]]):
    """Samples 0 … size - 1, turned round by the epoch; counts how many were read."""

    def __init__(self, size: int, *, broken: int = -1) -> None:
        self.size, self.broken, self.epoch, self.read = size, broken, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for i in range(self.size):
            self.read += 1
            if i == self.broken:
                raise OSError("the line is dead")
            yield {"x": (i + self.epoch) % self.size}


def xs(stream: Any, start: int, stop: int, *, world: int = 1, **changes: Any) -> list[list[int]]:
    steps: list[list[int]] = [[] for _ in range(start, stop)]
    for rank in range(world):
        one = StreamLoader(stream, seed=3, global_batch=7, rank=rank, world_size=world, **changes)
        for batch in one.iterate(start, stop):
            steps[batch.step - start] += [x for part in batch.micro_batches for x in part["x"].tolist()]
    return steps


def epochs(size: int, count: int) -> list[int]:
    return [(i + epoch) % size for epoch in range(count) for i in range(size)]


@pytest.mark.parametrize("world", [1, 2, 3, 9])
@pytest.mark.parametrize("start", [0, 3, 8])
@pytest.mark.parametrize("depth", [0, 2])
def test_steps_are_the_streams_samples_for_any_ranks_and_resume_point(world: int, start: int, depth: int) -> None:
    whole = epochs(20, 10)
    expected = [whole[step * 7 : step * 7 + 7] for step in range(start, 12)]
    assert xs(Lines(20), start, 12, world=world, micro_batch=2, prefetch_depth=depth) == expected


def test_resuming_reads_what_is_behind_and_a_rank_reads_all() -> None:
    stream = Lines(10**6)
    xs(stream, 100, 101, prefetch_depth=0)
    assert stream.read == 707


def test_what_a_transform_draws_depends_on_epoch_and_sample_only() -> None:
    def noise(sample: Any, rng: np.random.Generator) -> Any:
        return {**sample, "noise": rng.random()}

    def drawn(world: int, start: int) -> dict[tuple[int, int], float]:
        found = {}
        for rank in range(world):
            one = StreamLoader(Lines(10), seed=3, global_batch=7, rank=rank, world_size=world, transform=noise)
            for batch in one.iterate(start, 6):
                for number, value in zip(batch.sample_ids, batch.micro_batches[0]["noise"].tolist(), strict=True):
                    found[batch.step, int(number)] = value
        return found

    alone = drawn(1, 0)
    assert len(set(alone.values())) == 42
    assert drawn(3, 2) == {key: value for key, value in alone.items() if key[0] >= 2}


def test_errors_name_the_step() -> None:
    steps = StreamLoader(Lines(30, broken=16), seed=3, global_batch=7).iterate(0, 9)
    assert [next(steps).step for _ in range(2)] == [0, 1]
    with pytest.raises(DataError) as caught:
        next(steps)
    assert str(caught.value) == (
        "reading step 2 from a stream failed with OSError: the line is dead\n"
        "  rule: every sample of a step is readable\n"
        "  so:   step 2 cannot run, and a stream cannot continue after an error\n"
        "  try:  repair the stream, or make it skip the same unreadable samples each time"
    )
    for stream, epoch in ((iter([]), 0), (iter([{"x": 1}] * 10), 1)):
        with pytest.raises(DataError, match=f"a stream that gave no sample in epoch {epoch}"):
            list(StreamLoader(stream, seed=3, global_batch=7).iterate(0, 2))


def test_leaving_early_ends_the_thread() -> None:
    steps = StreamLoader(Lines(10), seed=3, global_batch=7).iterate(0, 10**9)
    next(steps)
    steps.close()
    deadline = time.monotonic() + 5
    while any(t.name == "unisono-stream" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not any(t.name == "unisono-stream" for t in threading.enumerate())


def test_what_is_a_stream() -> None:
    assert is_stream(Lines(3))
    assert is_stream(iter([1]))
    assert not is_stream([1, 2])
    assert not is_stream(torch.utils.data.TensorDataset(torch.zeros(3)))


class TokenStream(IterableDataset[Any]):
    """The tiny run's samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        data = tiny.RaggedTokens()
        for i in range(len(data)):
            yield {name: array[0] for name, array in data.read(np.array([i])).items()}


def test_a_trainer_resumes_a_stream_exactly(tmp_path: Path) -> None:
    whole = tiny.complete(tmp_path / "whole", steps=6, data=TokenStream())
    first = tiny.complete(tmp_path / "parts", steps=6, stop_after=3, data=TokenStream())
    second = tiny.complete(tmp_path / "parts", steps=6, data=TokenStream())
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]
    with pytest.raises(DataError, match="they would have no effect"):
        tiny.complete(tmp_path / "other", steps=2, data=TokenStream(), last_batch="drop")


def test_the_time_of_each_stage_is_known() -> None:
    def slow(sample: Any, rng: np.random.Generator) -> Any:
        time.sleep(0.02)
        return sample

    loader = StreamLoader(Lines(8), seed=0, global_batch=4, micro_batch=2, transform=slow)
    for batch in loader.iterate(0, 2):
        assert batch.stages.transform_s >= 0.08
        assert batch.stages.read_s > 0
        assert batch.stages.collate_s > 0

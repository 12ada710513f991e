"""The samples of a step depend on the step alone: not on ranks, threads, prefetch, nor on where the run began."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.dataset import from_map_style
from unisono.data.loading.loader import Loader, eval_batches, prefetch_to_device, rank_range
from unisono.data.options import LoaderOptions
from unisono.data.order.permutation import Permutation
from unisono.data.tokens.shards import TokenSet
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

MakeTokens = Callable[..., TokenSet]


class Numbers:
    """Sample i is {"x": i, "row": [i, i]}; counts reads, and fails or waits where told to."""

    fingerprint = "numbers"

    def __init__(self, size: int, *, broken: int = -1, error: type[BaseException] = ValueError) -> None:
        self.size = size
        self.broken = broken
        self.error = error
        self.reads: list[list[int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.reads.append(indices.tolist())
        self.threads.add(threading.current_thread().name)
        if self.broken in indices:
            raise self.error(f"sample {self.broken} is rotten")
        return {"x": indices.copy(), "row": np.stack([indices, indices], axis=1).astype(np.float32)}


def loader(dataset: Any, **changes: Any) -> Loader:
    chosen = {name: changes.pop(name) for name in LoaderOptions.__dataclass_fields__ if name in changes}
    options = LoaderOptions(**{"num_workers": 1, "worker_kind": "thread", **chosen})
    fixed = {"seed": 11, "global_batch": 8, "micro_batch": 3, "prefetch_depth": 0, "options": options}
    return Loader(dataset, **{**fixed, **changes})


def prefetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("unisono-loader")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert prefetch_threads() == []


def xs(batches: Any) -> list[list[int]]:
    return [[int(v) for part in batch.micro_batches for v in part["x"]] for batch in batches]


@given(total=st.integers(0, 10**6), world=st.integers(1, 300))
def test_shares_are_contiguous_complete_and_even(total: int, world: int) -> None:
    parts = [rank_range(total, rank, world) for rank in range(world)]
    assert parts[0].start == 0
    assert parts[-1].stop == total
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(1, 200),
    global_batch=st.integers(1, 50),
    micro_batch=st.integers(1, 20),
    start=st.integers(0, 10**9),
    shuffle=st.booleans(),
    block=st.sampled_from([0, 0, 4, 1000]),
)
def test_any_number_of_ranks_reads_the_same_samples_per_step(
    size: int, global_batch: int, micro_batch: int, start: int, shuffle: bool, block: int
) -> None:
    def step_samples(world: int) -> list[list[int]]:
        loaders = [
            loader(
                Numbers(size), global_batch=global_batch, micro_batch=micro_batch, rank=rank, world_size=world,
                shuffle=shuffle, shuffle_block=block,
            )
            for rank in range(world)
        ]  # fmt: skip
        return [
            [int(x) for one in loaders for part in one.batch(step).micro_batches for x in part["x"]]
            for step in range(start, start + 3)
        ]

    alone = step_samples(1)
    positions = np.arange(start * global_batch, (start + 3) * global_batch)
    order = Permutation(size, seed=11, block_size=block)(positions) if shuffle else positions % size
    assert [x for step in alone for x in step] == order.tolist()
    for world in (2, 3, 4, 60):
        assert step_samples(world) == alone


def test_every_sample_once_per_epoch_across_steps_of_any_size() -> None:
    one = loader(Numbers(10), global_batch=4)
    stream = [x for step in range(10) for x in one.sample_ids(step).tolist()]
    assert [sorted(stream[i : i + 10]) for i in range(0, 40, 10)] == [list(range(10))] * 4
    assert stream[:10] != stream[10:20]


def test_a_dataset_shorter_than_a_batch() -> None:
    ids = loader(Numbers(3), global_batch=8).batch(0).sample_ids.tolist()
    assert sorted(ids[:3]) == sorted(ids[3:6]) == [0, 1, 2]
    assert len(ids) == 8


def test_micro_batches() -> None:
    batch = loader(Numbers(100), global_batch=8, micro_batch=3).batch(2)
    assert [len(part["x"]) for part in batch.micro_batches] == [3, 3, 2]
    assert batch.step == 2
    assert torch.cat([part["x"] for part in batch.micro_batches]).tolist() == batch.sample_ids.tolist()
    assert {name: (v.dtype, tuple(v.shape)) for name, v in batch.micro_batches[0].items()} == {
        "x": (torch.int64, (3,)),
        "row": (torch.float32, (3, 2)),
    }
    assert all(v.is_contiguous() for part in batch.micro_batches for v in part.values())


def test_ranks_without_samples_get_no_micro_batch_and_read_nothing() -> None:
    data = Numbers(10)
    batch = loader(data, global_batch=2, rank=3, world_size=4).batch(0)
    assert batch.micro_batches == []
    assert batch.sample_ids.tolist() == []
    assert data.reads == []


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
def test_prefetch_changes_nothing(depth: int) -> None:
    data = Numbers(50)
    batches = list(loader(data, prefetch_depth=depth).iterate(7, 30))
    assert [batch.step for batch in batches] == list(range(7, 30))
    assert xs(batches) == xs(loader(Numbers(50)).iterate(0, 30))[7:]
    assert data.threads == ({"unisono-loader"} if depth else {"MainThread"})


def test_a_batch_says_how_long_it_was_waited_for() -> None:
    class Slow(Numbers):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            time.sleep(0.05)
            return super().read(indices)

    assert loader(Slow(50)).batch(0).wait_s >= 3 * 0.05  # three micro-batches
    assert next(loader(Slow(50), prefetch_depth=1).iterate(0, 2)).wait_s >= 0.05


def test_resuming_reads_only_what_is_asked_for() -> None:
    data = Numbers(10**12)
    batch = next(iter(loader(data, global_batch=64, micro_batch=64).iterate(10**9, 10**9 + 5)))
    assert batch.sample_ids.tolist() == Permutation(10**12, seed=11)(np.arange(64 * 10**9, 64 * 10**9 + 64)).tolist()
    assert len(data.reads) == 1


def test_prefetch_is_bounded() -> None:
    data = Numbers(50)
    steps = loader(data, micro_batch=8, prefetch_depth=3).iterate(0, 40)
    for consumed in range(1, 6):
        next(steps)
        deadline = time.monotonic() + 10
        while len(data.reads) < consumed + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # whatever else it might do, it would do now
        assert len(data.reads) == consumed + 3
    steps.close()


def test_workers_live_as_long_as_the_loader() -> None:
    one = loader(Numbers(50), prefetch_depth=2)
    steps = one.iterate(0, 10**9)
    next(steps)
    assert prefetch_threads() == ["unisono-loader"]
    steps.close()
    assert next(one.iterate(5, 10**9)).step == 5, "an abandoned iterator leaves a loader that works"
    assert prefetch_threads() == ["unisono-loader"], "and its worker is used again"
    one.close()
    assert prefetch_threads() == []
    assert next(one.iterate(5, 6)).step == 5
    del one, steps  # and the fixture sees that no thread is left
    loader(Numbers(50), prefetch_depth=2).iterate(0, 10)  # never started


def broken_at(step: int) -> Numbers:
    return Numbers(100, broken=int(loader(Numbers(100)).sample_ids(step)[1]))


@pytest.mark.parametrize("depth", [0, 4])
def test_a_reading_error_names_the_sample(depth: int) -> None:
    data = broken_at(3)
    one = loader(data, prefetch_depth=depth)
    steps = one.iterate(0, 12)
    assert [next(steps).step for _ in range(3)] == [0, 1, 2], "steps before it are delivered"
    with pytest.raises(DataError) as caught:
        next(steps)
    assert str(caught.value) == (
        f"reading sample {data.broken} of step 3 failed with ValueError: sample {data.broken} is rotten\n"
        "  rule: every sample of a step is readable\n"
        "  so:   step 3 cannot run\n"
        "  try:  repair or leave out what is named; loader.max_bad_sample_frac lets some bad samples weigh 0 instead"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_is_not_one_samples_fault_names_all_and_an_error_of_ours_is_quoted() -> None:
    class Ours(Numbers):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": np.zeros(indices.size + (indices.size > 1))}

    with pytest.raises(DataError) as caught:
        loader(Ours(100), global_batch=20, micro_batch=20).batch(0)
    given, _, consequence, nearest = str(caught.value).split("\n")
    ids = loader(Numbers(100), global_batch=20).sample_ids(0)[:8].tolist()
    assert given == (
        f"reading samples {', '.join(map(str, ids))}, … (20 in all) of step 0 failed with DataError: "
        "'x' of shape [21] from reading 20 samples"
    )
    assert consequence == "  so:   step 0 cannot run"
    assert nearest == "  try:  loader.batch(0) raises the same error in the calling thread"


def test_batches_hold_numbers() -> None:
    class Text(Numbers):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": np.array(["text"] * indices.size)}

    with pytest.raises(DataError, match="'x' of dtype <U4"):
        loader(Text(100)).batch(0)


def test_even_an_exit_in_the_thread_reaches_the_consumer() -> None:
    data = broken_at(0)
    data.error = SystemExit
    with pytest.raises(SystemExit, match="is rotten"):
        next(loader(data, prefetch_depth=2).iterate(0, 5))


def test_a_held_out_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError) as caught:
        list(eval_batches(Numbers(100, broken=6), 4, 0, 1))
    assert str(caught.value) == (
        "reading sample 6 of the held-out data failed with ValueError: sample 6 is rotten\n"
        "  rule: every held-out sample is readable\n"
        "  so:   the model cannot be evaluated\n"
        "  try:  repair or leave out what is named"
    )


def test_a_read_of_the_wrong_length() -> None:
    class Short(Numbers):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": indices[1:]}

    with pytest.raises(DataError, match=r"'x' of shape \[0\] from reading 1 samples"):
        loader(Short(100)).batch(0)
    with pytest.raises(DataError) as caught:
        list(eval_batches(Short(100), 4, 0, 1))
    assert str(caught.value) == (
        "'x' of shape [3] from reading 4 samples\n"
        "  rule: the first dim of each array is the number of samples asked for\n"
        "  so:   samples and values cannot be matched\n"
        "  try:  return 'x' with shape [4, …]"
    )


def test_arrays_that_cannot_be_written_are_copied() -> None:
    class ReadOnly(Numbers):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": np.broadcast_to(np.float32(1), (indices.size, 2))}

    batch = loader(ReadOnly(10)).batch(0)  # a warning of torch's would be an error here
    batch.micro_batches[0]["x"].fill_(2)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_transform_draws_the_same_for_a_sample_everywhere(world: int, depth: int) -> None:
    def noise(sample: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": sample["x"], "noise": rng.random(3), "mean": sample["row"].mean()}

    def drawn(world: int, depth: int, start: int) -> dict[tuple[int, int], list[float]]:
        draws: dict[tuple[int, int], list[float]] = {}
        for rank in range(world):
            one = loader(Numbers(7), rank=rank, world_size=world, prefetch_depth=depth, transform=noise)
            for batch in one.iterate(start, 6):
                row = rank_range(8, rank, world).start
                for part in batch.micro_batches:
                    assert part["mean"].tolist() == part["x"].tolist()
                    for values in part["noise"].tolist():
                        draws[batch.step, row] = values
                        row += 1
        return draws

    alone = drawn(1, 0, 0)
    assert len(alone) == 48
    assert len({tuple(v) for v in alone.values()}) == 48, "every sample of every epoch draws its own"
    assert drawn(world, depth, 2) == {key: v for key, v in alone.items() if key[0] >= 2}


def test_ragged_counts_add_up_over_any_number_of_ranks(make_tokens: MakeTokens) -> None:
    rng = np.random.default_rng(1)
    tokens = make_tokens([rng.integers(0, 256, n).tolist() for n in rng.integers(1, 60, 120)], shard_tokens=700)
    windows = TokenWindows(tokens, seq_len=16)

    def counts(world: int, micro_batch: int) -> list[float]:
        totals = [0.0] * 6
        for rank in range(world):
            one = loader(
                windows, global_batch=24, micro_batch=micro_batch, rank=rank, world_size=world, prefetch_depth=2
            )
            for batch in one.iterate(0, 6):
                totals[batch.step] += sum(float(part["weights"].sum()) for part in batch.micro_batches)
        return totals

    alone = counts(1, 24)
    assert len(set(alone)) > 1, "steps hold different numbers of targets"
    for world, micro_batch in ((1, 5), (2, 12), (3, 4), (4, 6), (5, 100)):
        assert counts(world, micro_batch) == alone


@pytest.mark.parametrize("world", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("limit", [None, 1, 5, 10, 99])
def test_evaluation_reads_each_sample_once(world: int, limit: int | None) -> None:
    parts = [[part["x"].tolist() for part in eval_batches(Numbers(10), 3, rank, world, limit)] for rank in range(world)]
    assert all(0 < len(ids) <= 3 for part in parts for ids in part)
    samples = [x for part in parts for ids in part for x in ids]
    assert samples == {1: [0], 5: [0, 2, 4, 6, 8]}.get(limit or 0, list(range(10)))


def test_impossible_arithmetic() -> None:
    with pytest.raises(DataError) as caught:
        loader(Numbers(10), global_batch=0, rank=4, world_size=4)
    assert str(caught.value) == (
        "global_batch 0, micro_batch 3, rank 4 of 4\n"
        "  rule: batches hold at least one sample, ranks count from 0 to world - 1\n"
        "  so:   no batch can be made\n"
        "  try:  global_batch 1, micro_batch 3, rank 3 of 4"
    )
    with pytest.raises(DataError, match="a dataset of 0 samples"):
        loader(Numbers(0))


def test_pinning_is_for_devices_with_host_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self)
    for device in (None, torch.device("cpu"), torch.device("mps")):
        loader(Numbers(10), device=device).batch(0)
    assert pinned == []
    loader(Numbers(10), device=torch.device("xpu")).batch(0)
    assert pinned == [torch.Size(s) for s in ([3], [3, 2], [3], [3, 2], [2], [2, 2])]


@pytest.mark.gpu
def test_batches_for_an_accelerator_are_pinned() -> None:
    device = torch.accelerator.current_accelerator()
    (batch,) = loader(Numbers(10), device=device, prefetch_depth=1).iterate(0, 1)
    for part in batch.micro_batches:
        assert all(tensor.is_pinned() for tensor in part.values())
        assert part["x"].to(device, non_blocking=True).cpu().tolist() == part["x"].tolist()


@pytest.mark.gpu
def test_batches_arrive_on_an_accelerator_in_order_and_whole() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    one = loader(Numbers(1000), device=device, prefetch_depth=2, global_batch=64, micro_batch=64)
    expected = [one.sample_ids(step).tolist() for step in range(200)]
    busy = torch.randn(2048, 2048, device=device)
    found = []
    for batch in prefetch_to_device(one.iterate(0, 200), device):
        busy = (busy @ busy).tanh()  # the device is behind, so that copies overlap with use
        found.append(batch.micro_batches[0]["x"] + 0)
    assert [x.tolist() for x in found] == expected


def test_on_a_cpu_batches_stay_as_they_are() -> None:
    one = loader(Numbers(50), prefetch_depth=2)
    there = prefetch_to_device(one.iterate(0, 9), torch.device("cpu"))
    assert xs(there) == xs(loader(Numbers(50)).iterate(0, 9))
    one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_claimed_shares_are_those_of_the_ranks(workers: int) -> None:
    """A claimed share has the samples, random numbers and partners of its rank, whichever process computes it."""
    options = LoaderOptions(num_workers=workers)

    def mixed(a: dict[str, Any], b: dict[str, Any], rng: np.random.Generator) -> Any:
        return {"x": a["x"] + b["x"] * rng.random()}, {"x": b["x"] * rng.random()}

    common: dict[str, Any] = {"seed": 3, "global_batch": 7, "options": options, "pair_transform": mixed}
    data = from_map_style([{"x": np.float32(i)} for i in range(40)])
    expected: dict[int, Any] = {}
    for rank in range(3):
        with Loader(data, rank=rank, world_size=3, **common) as loader, closing(loader.iterate(0, 4)) as batches:
            expected |= {batch.batch_shard: batch for batch in batches}
    order = iter([5, 0, 1, 2, None, 11, 3, 4, 7, None, 6, 9, 8, 10])
    asked: list[bool] = []

    def claim(wait: bool) -> int | None:
        asked.append(wait)
        return next(order, None)

    with Loader(data, rank=0, world_size=3, **common) as loader:
        found: list[Any] = []
        for _ in range(3):  # a None where it would wait ends the generator; somebody else decides whether to go on
            with closing(loader.iterate_claimed(claim)) as batches:
                found += list(batches)
    assert sorted(batch.batch_shard for batch in found) == sorted(expected)
    for batch in found:
        mine = expected[batch.batch_shard]
        assert batch.step == mine.step == batch.batch_shard // 3
        assert batch.sample_ids.tolist() == mine.sample_ids.tolist()
        for here, there in zip(batch.micro_batches, mine.micro_batches, strict=True):
            assert torch.equal(here["x"], there["x"])
    assert (False in asked) == (workers > 0)

"""What is pushed into shared memory: sums of tensors that share a slot, fill it, or are larger; and what is applied when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool

from unisono.kvstore import create_kvstore
from unisono.kvstore.allreduce.shared_memory import PushStaging, SharedMemoryAllReduce

SLOT_BYTES = 4096
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "one": ((1,), torch.float32),
    "none": ((0, 3), torch.float32),
    "fills the rest": ((15, 67), torch.float32),
    "bytes": ((5,), torch.uint8),
    "spans slots": ((3, 1000), torch.float64),
    "half": ((70,), torch.bfloat16),
    "scalar": ((), torch.int64),
    "exactly a slot": ((1024,), torch.float32),
}


def value(rank: int, name: str) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator).abs() * 20).to(dtype)


def staged(world) -> list[dict[str, Any]]:
    """Two rounds: the second finds the memory of the first."""
    staging = PushStaging(SharedMemoryAllReduce(world, SLOT_BYTES))
    rounds: list[dict[str, Any]] = []
    for number in range(2):
        found: dict[str, Any] = {}

        def flush(found: dict[str, Any] = found) -> None:
            assert staging.all_equal(7)
            for key, total in staging.drain():
                assert key not in found
                found[key] = (tuple(total.shape), total.dtype, total.tolist())

        for name in SHAPES:
            given = value(world.rank + number, name)
            staging.put(name, given, flush)
            given.zero_()  # what lies there is a copy
        flush()
        rounds.append(found)
    assert not staging.all_equal(world.rank)
    staging.close()
    return rounds


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_what_lies_side_by_side(pool: Pool, ranks: int) -> None:
    first, *others = pool.run(staged, ranks=ranks)
    for number, found in enumerate(first):
        assert list(found) == list(SHAPES)  # in the order of the pushes
        for name, (shape, dtype) in SHAPES.items():
            want = value(number, name)
            for rank in range(1, ranks):
                want = want + value(rank + number, name)
            assert found[name] == (shape, dtype, want.tolist())  # bit for bit
    assert all(other == first for other in others)


def what_is_applied_when(world) -> list[tuple[float, float, bool]]:
    store = create_kvstore("dist_sync", world, shared_memory=True)
    store.init({"a": torch.zeros(3), "b": torch.zeros(3), "huge": torch.zeros(3_000_000), "rows": torch.zeros(4, 2)})
    stored = store._backend._values.tensors  # type: ignore[attr-defined]

    def seen(done: bool) -> tuple[float, float, bool]:
        return float(stored["a"][0]), float(stored["huge"][-1]), done

    found: list[tuple[float, float, bool]] = []
    waits = store.push("a", torch.ones(3))
    found.append(seen(waits.done()))  # nothing yet
    huge = store.push("huge", torch.ones(3_000_000))
    found.append(seen(huge.done()))  # its beginning filled the memory, so the small one before it is applied
    out = torch.zeros(3_000_000)
    store.pull("huge", out).wait()
    found.append(seen(huge.done()))
    assert float(out[-1]) == 2.0
    store.push("a", torch.ones(3) * 2)
    store.push("rows", (torch.tensor([1]), torch.ones(1, 2)))
    store.barrier()
    found.append(seen(waits.done()))
    store.close()
    return found


def test_what_is_applied_when(pool: Pool) -> None:
    one, other = pool.run(what_is_applied_when)
    assert one == other == [(0.0, 0.0, False), (2.0, 0.0, False), (2.0, 2.0, True), (4.0, 2.0, True)]

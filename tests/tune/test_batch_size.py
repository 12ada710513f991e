"""The largest micro-batch of made-up memories: found with few trials, and none that would not fit where that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ConfigError
from unisono.tune.batch_size import BatchRecord, Probe, batch_verdict, find_largest, write_batch


class Memory:
    """A device on which a micro-batch needs ``fixed + each * size`` bytes."""

    def __init__(self, limit: int, each: int = 10, fixed: int = 100) -> None:
        self.limit, self.each, self.fixed = limit, each, fixed
        self.tried: list[int] = []

    @property
    def largest(self) -> int:
        return (self.limit - self.fixed) // self.each

    def probe(self, size: int) -> Probe:
        self.tried.append(size)
        needs = self.fixed + self.each * size
        if needs > self.limit:
            return Probe(micro_batch=size, fits=False, reason="out of memory")
        return Probe(micro_batch=size, fits=True, peak_bytes=needs, limit_bytes=self.limit, samples_per_s=float(size))


@given(st.integers(110, 100_000), st.integers(1, 4096))
def test_the_result_fits_and_an_eighth_more_does_not(limit: int, most: int) -> None:
    memory = Memory(limit)
    found = find_largest(memory.probe, max_micro_batch=most, share=64, on_host=False)
    assert 1 <= found.largest <= min(memory.largest, most)
    assert found.hit_memory_limit == (memory.largest < most)
    if found.hit_memory_limit:
        assert found.largest + max(1, found.largest // 8) + 1 > memory.largest
    else:
        assert found.largest == most
    assert len(memory.tried) == len(set(memory.tried)) <= 20
    assert 64 % found.proposed == 0
    assert found.proposed <= found.largest


@given(st.integers(1000, 100_000))
def test_nothing_is_tried_that_will_not_fit_into_the_host(limit: int) -> None:
    memory = Memory(limit)
    found = find_largest(memory.probe, max_micro_batch=1 << 20, share=64, on_host=True)
    assert max(memory.tried) <= memory.largest
    assert found.hit_memory_limit
    assert found.largest >= 0.8 * memory.largest - 2


def test_not_even_one_sample() -> None:
    with pytest.raises(ConfigError, match="a micro-batch of one sample: out of memory"):
        find_largest(Memory(50).probe, max_micro_batch=8, share=8, on_host=False)


def test_the_page(tmp_path: Path) -> None:
    found = find_largest(Memory(1000).probe, max_micro_batch=1024, share=48, on_host=False)
    assert (found.largest, found.proposed) == (88, 48)
    write_batch(tmp_path, BatchRecord(identity={}, probes=list(found.probes)), found)
    assert "The largest micro-batch that fits is 88." in (tmp_path / "report.html").read_text()
    assert batch_verdict(find_largest(Memory(1000).probe, max_micro_batch=16, share=48, on_host=False)).startswith(
        "The largest micro-batch that was tried fits: 16."
    )

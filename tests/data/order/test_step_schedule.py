"""Which positions a step has, for every way to treat an epoch's remainder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order.step_schedule import StepSchedule
from unisono.errors import DataError

sizes = {"size": st.integers(1, 60), "batch": st.integers(1, 25), "epoch": st.integers(0, 10**9)}


def epoch_of(steps: StepSchedule, epoch: int) -> tuple[list[list[int]], list[int]]:
    """Positions of each step inside the epoch, and how many of each are samples."""
    found = [steps.positions(epoch * steps.steps_per_epoch + turn) for turn in range(steps.steps_per_epoch)]
    return [(positions - epoch * steps.num_samples).tolist() for positions, _ in found], [real for _, real in found]


@given(**sizes)
def test_keep_visits_each_sample_once_and_ends_with_a_smaller_step(size: int, batch: int, epoch: int) -> None:
    steps, real = epoch_of(StepSchedule(size, batch, "keep"), epoch)
    assert [x for step in steps for x in step] == list(range(size))
    assert [len(step) for step in steps] == real
    assert all(n == batch for n in real[:-1])
    assert 1 <= real[-1] <= batch


@given(**sizes)
def test_pad_fills_up_with_rows_that_are_no_samples(size: int, batch: int, epoch: int) -> None:
    steps, real = epoch_of(StepSchedule(size, batch, "pad"), epoch)
    assert [x for step, n in zip(steps, real, strict=True) for x in step[:n]] == list(range(size))
    assert {len(step) for step in steps} == {batch}
    assert set(steps[-1][real[-1] :]) <= {size - 1}


@given(**sizes)
def test_wrap_fills_up_with_the_epochs_own_first_samples(size: int, batch: int, epoch: int) -> None:
    steps, real = epoch_of(StepSchedule(size, batch, "wrap"), epoch)
    assert [x for step in steps for x in step] == [i % size for i in range(len(steps) * batch)]
    assert set(real) == {batch}


@given(**sizes)
def test_drop_leaves_out_less_than_a_batch(size: int, batch: int, epoch: int) -> None:
    if size < batch:
        with pytest.raises(DataError) as caught:
            StepSchedule(size, batch, "drop")
        assert str(caught.value) == (
            f"last_batch drop with {size} samples and global_batch {batch}\n"
            "  rule: an epoch has at least one full batch\n"
            "  so:   every batch would be dropped\n"
            f"  try:  global_batch <= {size}, or last_batch pad"
        )
        return
    steps, _ = epoch_of(StepSchedule(size, batch, "drop"), epoch)
    assert [x for step in steps for x in step] == list(range(size - size % batch))


@given(**sizes)
def test_rollover_knows_no_epochs(size: int, batch: int, epoch: int) -> None:
    steps = StepSchedule(size, batch, "rollover")
    found = np.concatenate([steps.positions(epoch + i)[0] for i in range(5)])
    assert found.tolist() == list(range(epoch * batch, (epoch + 5) * batch))
    assert steps.steps_per_epoch == -(-size // batch)


def test_mxnets_names_mean_the_same() -> None:
    for theirs, ours in (("discard", "drop"), ("roll_over", "rollover")):
        assert StepSchedule(10, 4, theirs).steps_per_epoch == StepSchedule(10, 4, ours).steps_per_epoch  # type: ignore[arg-type]
        assert (
            StepSchedule(10, 4, theirs).positions(3)[0].tolist() == StepSchedule(10, 4, ours).positions(3)[0].tolist()
        )  # type: ignore[arg-type]


@given(
    size=sizes["size"], batch=sizes["batch"], epochs=st.integers(1, 5), kind=st.sampled_from(["keep", "pad", "wrap"])
)
def test_whole_epochs_have_whole_steps(size: int, batch: int, epochs: int, kind: Any) -> None:
    steps = StepSchedule(size, batch, kind)
    assert steps.steps_of(epochs) == epochs * steps.steps_per_epoch
    assert [steps.epoch(step) for step in (0, steps.steps_of(epochs) - 1, steps.steps_of(epochs))] == [
        0,
        epochs - 1,
        epochs,
    ]


@given(size=sizes["size"], batch=sizes["batch"], epochs=st.integers(1, 5))
def test_with_rollover_the_last_step_completes_the_epochs(size: int, batch: int, epochs: int) -> None:
    steps = StepSchedule(size, batch, "rollover")
    last = steps.steps_of(epochs) - 1
    positions = steps.positions(last)[0]
    assert positions[0] < epochs * size <= positions[-1] + 1
    assert steps.epoch(last) == positions[0] // size


def test_a_fraction_of_an_epoch_is_taken_as_it_is_written() -> None:
    steps = StepSchedule(100, 10)
    assert [steps.steps_of(epochs) for epochs in (0.7, 0.71, 1e-6, 1.1, 3)] == [7, 8, 1, 11, 30]

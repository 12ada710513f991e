from __future__ import annotations

import pytest
import torch
from states import bits, large_state, mixed_state, save_steps

from unisono.checkpoint import open_checkpoint
from unisono.errors import CheckpointError


def test_tensors_are_described_without_being_read(tmp_path):
    save_steps(tmp_path, 3)
    snapshot = open_checkpoint(tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors").unlink()
    spec = snapshot.spec("every/bfloat16")
    assert (spec.shape, spec.dtype) == ((37, 5), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001\.safetensors is missing"):
        snapshot.tensor("every/bfloat16")


def test_reading_into_any_tensor_of_the_same_shape_and_dtype(tmp_path):
    state = {"w": torch.randn(40, 6), "s": torch.tensor(2.5), "p": torch.randn(8, 8)}
    save_steps(tmp_path, 3, state=state)
    snapshot = open_checkpoint(tmp_path / "step-00000003")
    column_major = torch.zeros(6, 40).t()
    snapshot.read_into("w", column_major)
    assert torch.equal(column_major, state["w"])
    scalar = torch.zeros(())
    snapshot.read_into("s", scalar)
    assert scalar == 2.5
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    snapshot.read_into("p", parameter)
    assert torch.equal(parameter, state["p"])
    window = torch.zeros(50, 6)
    snapshot.read_into("w", window[5:45])
    assert torch.equal(window[5:45], state["w"])
    assert window[45:].abs().sum() + window[:5].abs().sum() == 0


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_another_shape_or_dtype_is_an_error_with_both_in_it(tmp_path, other):
    save_steps(tmp_path, 3, state={"w": torch.ones(2, 3)})
    snapshot = open_checkpoint(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError) as caught:
        snapshot.read_into("w", other)
    assert str(caught.value) == (
        f"'w' is [2, 3] torch.float32 in {tmp_path}/step-00000003, and {list(other.shape)} {other.dtype} here\n"
        "  rule: a tensor is loaded into one of the same shape and dtype\n"
        "  so:   it was not loaded\n"
        "  try:  use the configuration the checkpoint was saved with"
    )
    assert other.sum() == 0


def test_an_unknown_name_is_an_error_with_the_nearest_one(tmp_path):
    save_steps(tmp_path, 3, state={"model/weight": torch.ones(2)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "step-00000003").tensor("model/weights")
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/step-00000003 has no tensor 'model/weights'\n"
        "  rule: only what was saved can be loaded\n"
        "  so:   it was not loaded\n"
        "  try:  did you mean 'model/weight'?"
    )


def test_something_that_is_no_checkpoint_is_an_error(tmp_path):
    for path, given in {
        tmp_path / "step-00000009": "COMMIT is missing",
        tmp_path: "is no checkpoint; those are directories called like step-00000120",
    }.items():
        with pytest.raises(CheckpointError, match=given):
            open_checkpoint(path)


def test_a_snapshot_reads_no_more_than_it_is_asked_for(tmp_path):
    """Tensors lie one after the other: damage in one does not touch another."""
    state = large_state(mib=4)
    save_steps(tmp_path, 3, state=state)
    shard = tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors"
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    snapshot = open_checkpoint(tmp_path / "step-00000003")
    same = {name: bits(snapshot.tensor(name)) == bits(tensor) for name, tensor in state.items()}
    assert sorted(same.values()) == [False, True, True, True]


def test_values_that_compare_unequal_to_themselves_come_back_too(tmp_path):
    state = mixed_state(4)
    assert any(bool(torch.isnan(tensor).any()) for tensor in state.values() if tensor.dtype == torch.float16)
    save_steps(tmp_path, 3, state=state)
    snapshot = open_checkpoint(tmp_path / "step-00000003")
    assert all(bits(snapshot.tensor(name)) == bits(tensor) for name, tensor in state.items())

"""Map-style datasets as PyTorch users write them become batches of named arrays."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from unisono.data.dataset import Dataset, as_dataset, from_map_style, read_samples
from unisono.errors import DataError

Pair = namedtuple("Pair", ["left", "right"])


class Squares(TorchDataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(index)), index * index


class Batched:
    """What newer torch datasets offer: all samples of a batch in one call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[dict[str, float]]:
        self.calls.append(indices)
        return [{"x": float(i)} for i in indices]


def read(data: Any, *indices: int) -> dict[str, np.ndarray]:
    return from_map_style(data).read(np.array(indices))


def test_pairs_become_inputs_and_targets() -> None:
    batch = read(Squares(), 3, 0)
    assert {name: (v.dtype.name, v.shape) for name, v in batch.items()} == {
        "inputs": ("float32", (2, 2, 3)),
        "targets": ("int64", (2,)),
    }
    assert batch["targets"].tolist() == [9, 0]
    assert batch["inputs"][0].tolist() == [[3.0] * 3] * 2
    batch["inputs"][:] = 7  # the caller owns it


@pytest.mark.parametrize(
    ("sample", "want"),
    [
        ({"a": 1, "b": np.float16(2)}, {"a": ("int64", ()), "b": ("float16", ())}),
        (Pair(np.zeros(3, np.uint8), True), {"left": ("uint8", (3,)), "right": ("bool", ())}),
        (0.5, {"inputs": ("float32", ())}),
        (np.float64(0.5), {"inputs": ("float64", ())}),
        (torch.zeros(2, dtype=torch.int16), {"inputs": ("int16", (2,))}),
        ([torch.zeros(2), np.ones((2, 2))], {"inputs": ("float32", (2,)), "targets": ("float64", (2, 2))}),
    ],
)
def test_kinds_of_samples(sample: Any, want: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    batch = read([sample, sample], 0, 1)
    assert {name: (v.dtype.name, v.shape[1:]) for name, v in batch.items()} == want
    assert all(len(v) == 2 for v in batch.values())


@pytest.mark.parametrize("values", [[1, 2, -3], [True, False], [1.5, 2.1], [2**63, 2**63 + 1]], ids=str)
def test_numbers_read_together_are_those_read_one_by_one(values: list[Any]) -> None:
    dataset, ids = from_map_style(values), np.arange(len(values))
    together = dataset.read(ids)["inputs"]
    alone = np.concatenate([dataset.read(ids[row : row + 1])["inputs"] for row in range(len(values))])
    samples = np.stack([np.asarray(sample["inputs"]) for sample in read_samples(dataset, ids)])
    for other in (alone, samples):
        assert together.dtype == other.dtype
        np.testing.assert_array_equal(together, other)


def test_numbers_of_two_types_do_not_stack() -> None:
    with pytest.raises(DataError, match="sample 1 is float32"):
        from_map_style([1, 2.5]).read(np.arange(2))


def test_tensor_datasets() -> None:
    x, y = torch.randn(10, 4), torch.arange(10)
    batch = read(TensorDataset(x, y), 7, 2)
    assert np.array_equal(batch["inputs"], x[[7, 2]].numpy())
    assert batch["targets"].tolist() == [7, 2]


def test_samples_are_asked_for_together_where_that_is_offered() -> None:
    data = Batched()
    assert read(data, 4, 1)["x"].tolist() == [4.0, 1.0]
    assert data.calls == [[4, 1]]
    assert all(type(i) is int for i in data.calls[0])


def test_fingerprints() -> None:
    plain = from_map_style(Squares()).fingerprint
    assert plain.endswith(".Squares:20")
    assert from_map_style([1, 2]).fingerprint == "map:builtins.list:2"
    assert from_map_style(Squares(), fingerprint="v1").fingerprint == "v1"
    own = Squares()
    own.fingerprint = "mine"  # type: ignore[attr-defined]
    assert from_map_style(own).fingerprint == "mine"


def test_what_is_a_dataset_already_stays() -> None:
    adapted = as_dataset(Squares())
    assert isinstance(adapted, Dataset)
    assert as_dataset(adapted) is adapted


def test_samples_that_do_not_stack() -> None:
    with pytest.raises(DataError) as caught:
        read([torch.zeros(3), torch.zeros(4)], 0, 1)
    assert str(caught.value) == (
        "'inputs' of sample 1 is float32[4], of sample 0 float32[3]\n"
        "  rule: the samples of a batch have the same names, shapes and dtypes\n"
        "  so:   they cannot be stacked\n"
        "  try:  pad or crop in the dataset, in the loader's transform or in a collate_fn, and give the loss a weight of 0 there"
    )
    with pytest.raises(DataError, match=r"'inputs' of sample 1 is float32\[\], of sample 0 int64\[\]"):
        read([1, 1.0], 0, 1)
    with pytest.raises(DataError, match=r"sample 1 has \['b'\], sample 0 has \['a'\]"):
        read([{"a": 1}, {"b": 1}], 0, 1)


@pytest.mark.parametrize(
    ("sample", "given"),
    [
        ((1, 2, 3), "a sample that is a tuple of 3 values"),
        ("text", "'inputs' of a sample, str of dtype <U4"),
        ({"x": None}, "'x' of a sample, NoneType of dtype object"),
        ({"x": torch.zeros(1, dtype=torch.bfloat16)}, "'x' of a sample, Tensor: Got unsupported ScalarType BFloat16"),
        (
            {"x": torch.zeros(1, requires_grad=True)},
            "'x' of a sample, Tensor: Can't call numpy() on Tensor that requires",
        ),
    ],
)
def test_samples_that_are_no_numbers(sample: Any, given: str) -> None:
    with pytest.raises(DataError) as caught:
        read([sample], 0)
    assert str(caught.value).startswith(given)
    assert str(caught.value).endswith(
        "  rule: a sample is a dict or dataclass of tensors, arrays, numbers, strings, a pair (inputs, targets), or one value\n"
        "  so:   it cannot be put into a batch\n"
        '  try:  return {"inputs": …, "targets": …} with tensors numpy has a dtype for (bfloat16 as float32)'
    )


@pytest.mark.parametrize("data", [[1.0, 1e308], [{"x": 1.0}, {"x": [1.0, "a", -1e39]}]])
def test_a_float_beyond_float32_is_an_error(data: list[Any]) -> None:
    name, value = ("x.2", "-1e+39") if isinstance(data[0], dict) else ("inputs", "1e+308")
    with pytest.raises(DataError) as caught:
        from_map_style(data).read(np.array([1, 1]))
    assert str(caught.value) == (
        f"'{name}' of a sample, {value}\n"
        "  rule: Python floats become float32, whose largest number is 3.403e+38\n"
        "  so:   it would be infinite\n"
        "  try:  scale the values, or return numpy.float64(…)"
    )
    assert from_map_style([math.inf, math.nan]).read(np.arange(1))["inputs"].tolist() == [math.inf]


def test_a_number_that_is_called_samples_is_no_method() -> None:
    class Counted:
        samples = 3

        def __len__(self) -> int:
            return self.samples

        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"inputs": indices * 2}

    assert [int(row["inputs"]) for row in read_samples(Counted(), np.array([1, 2]))] == [2, 4]

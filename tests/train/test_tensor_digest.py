"""The digest of a tensor's bits."""

from __future__ import annotations

import pytest
import torch

from unisono.train.tensor_digest import tensor_digest


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 2, (1000 * dtype.itemsize,), generator=generator).to(torch.uint8)
    whole = int(tensor_digest(data.view(dtype)))
    for place in torch.randint(len(data), (300,), generator=generator).tolist():
        for bit in (0, 7) if dtype != torch.bool else (0,):
            data[place] ^= 1 << bit
            assert int(tensor_digest(data.view(dtype))) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert int(tensor_digest(data.view(dtype))) == whole


def test_long_tensors_and_exchanged_elements() -> None:
    values = torch.randn(3 * 65536 + 17, generator=torch.Generator().manual_seed(0))
    digest = int(tensor_digest(values))
    assert int(tensor_digest(values.reshape(-1, 1))) == digest
    for first, second in ((0, 1), (5, 65541), (65536, 131072), (12, len(values) - 1)):
        other = values.clone()
        other[[first, second]] = values[[second, first]]
        assert int(tensor_digest(other)) != digest
    assert int(tensor_digest(torch.zeros(3, 4).t())) == 0
    assert int(tensor_digest(values[::2])) == int(tensor_digest(values[::2].clone()))
    assert int(tensor_digest(torch.tensor([]))) == 0


def test_parts_of_complex_numbers_count() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert int(tensor_digest(values)) != int(tensor_digest(values.conj().resolve_conj()))
    assert int(tensor_digest(values.conj())) == int(tensor_digest(values.conj().resolve_conj()))

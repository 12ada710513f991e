"""Activations kept on the host: the same gradients, parameters left where they are, and on a device less of its memory."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from unisono.errors import PlanError
from unisono.models.loss import cross_entropy_sum
from unisono.parallel import recompute as module
from unisono.parallel.recompute import offload_activations
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan


def gradients(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy_sum(model(tokens), tokens, torch.ones(2, 12))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_stay_bit_equal_and_parameters_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(tiny.model())
    model, moved = tiny.model(), []

    class Watched(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            inner = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor.data_ptr()), inner(tensor))[1]

    monkeypatch.setattr(module, "save_on_cpu", Watched)
    offload_activations(list(model.blocks), pinned=False)
    found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert moved
    assert not {p.data_ptr() for p in model.parameters()} & set(moved)
    moved.clear()
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert not moved


def test_refused_where_it_moves_nothing() -> None:
    with pytest.raises(PlanError) as caught:
        derive_plan(PlanOptions(offload=True, recompute="full"), world_size=1, device="cpu", native_bf16=False)
    text = str(caught.value)
    assert "offload on the device 'cpu'" in text
    assert "they would be copied to where they are" in text
    assert "offload with recompute 'full', compile 'off'" in text


class Sequences:
    """As many tokens as it takes for activations to be most of the memory; sequences so short that the attention of a device
    sums in one order."""

    fingerprint = "sequences"

    def __len__(self) -> int:
        return 256

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = (indices[:, None] + np.arange(65)) % tiny.VOCAB
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((len(indices), 64), np.float32)}


@pytest.mark.gpu
def test_takes_less_of_the_device(tmp_path: Path) -> None:
    changes = {
        "steps": 4,
        "device": "auto",
        "precision": "bf16",
        "global_batch": 64,
        "micro_batch": 64,
        "sizes": {"dim": 256, "num_layers": 8, "num_heads": 4},
    }
    peaks, losses = [], []
    for offloaded in (False, True):
        gc.collect()  # a trainer refers to itself: the first one's tensors would count in the second half
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        run = tiny.complete(tmp_path / str(offloaded), data=Sequences(), offload=offloaded, **changes)
        losses.append(run["losses"])
        peaks.append(torch.accelerator.max_memory_allocated())
    assert losses[0] == losses[1]
    assert peaks[1] < 0.8 * peaks[0]

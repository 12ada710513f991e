"""fp8 is refused with a reason where it cannot be; what it does where it can be, only such a device can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from unisono.errors import PlanError
from unisono.parallel.device import computes_fp8
from unisono.parallel.precision import fits
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan


def test_refused_on_a_device_without_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught, tiny.trainer(tmp_path / "run", precision="fp8"):
        pass
    text = str(caught.value)
    assert "precision 'fp8' on a cpu without fp8 products" in text
    assert "fp8 products need torchao (the extra unisono[quant]) and a device with them" in text
    assert "plan.precision='bf16'" in text


def test_refused_where_layers_are_computed_otherwise() -> None:
    with pytest.raises(PlanError, match="precision 'fp8' with tp 2, schedule '1f1b'"):
        derive_plan(PlanOptions(tp=2, precision="fp8"), world_size=2, device="cuda", native_bf16=True)


def test_which_layers_fit() -> None:
    assert fits(nn.Linear(32, 48))
    assert not fits(nn.Linear(32, 40))
    assert not fits(nn.LayerNorm(32))


@pytest.mark.gpu
@pytest.mark.skipif(not computes_fp8("cuda"), reason="no fp8 products here")
def test_follows_bf16(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    changes = {"steps": 8, "device": "auto", "sizes": {"dim": 64, "ffn_dim": 128}}
    eighth = tiny.complete(tmp_path / "fp8", precision="fp8", **changes)["losses"]
    rounded = tiny.complete(tmp_path / "bf16", precision="bf16", **changes)["losses"]
    assert eighth != rounded
    assert eighth == pytest.approx(rounded, rel=5e-2)  # e4m3 has 4 significant bits
    assert torch.isfinite(torch.tensor(eighth)).all()

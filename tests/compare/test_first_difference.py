"""Planted divergences, each made by two real runs, are found by replaying at most two steps of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from divergences import search
from pool import Pool

from unisono.compare.divergence_text import divergence_lines
from unisono.compare.first_difference import FirstDifference
from unisono.data.order.permutation import Permutation

SECOND = Permutation(tiny.SAMPLES, seed=0)(np.arange(8, 16)).tolist()  # samples of step 2


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is planted in B, and what has to be found: parts of the operator, of the tensor and of a cause."""

    plant: dict[str, Any]
    step: int
    phase: str
    layer: str = ""
    operator: str = ""
    tensor: str = ""
    because: str = ""
    samples: tuple[int, ...] = ()
    ranks: tuple[int, int] = (1, 1)
    rank: int | None = 0
    a: dict[str, Any] = field(default_factory=dict)


PLANTED = {
    "a weight by 1 ulp": Planted(
        plant={"flipped": "model/up.weight"}, step=3, phase="weights at start", layer="up", tensor="model/up.weight"
    ),
    "a moment by 1 ulp": Planted(
        plant={"flipped": "optim/exp_avg_sq/down.weight"},
        step=3,
        phase="weights at start",
        layer="down",
        tensor="optim/exp_avg_sq/down.weight",
    ),
    "order of samples": Planted(plant={"seed": 1}, step=1, phase="data", tensor="sample ids", because="row 0"),
    "a label": Planted(
        plant={"spoilt": (SECOND[5], "targets")}, step=2, phase="data", tensor="targets", samples=(SECOND[5],)
    ),
    "weight of a token": Planted(
        plant={"spoilt": (SECOND[3], "weights")}, step=2, phase="data", tensor="weights", samples=(SECOND[3],)
    ),
    "seed of dropout": Planted(plant={"reseeded": 123}, step=1, phase="random state", tensor="torch"),
    "rate of dropout": Planted(
        plant={"net": {"rate": 0.2}},
        step=1,
        phase="forward",
        layer="drop",
        operator="aten.bernoulli_",  # as dropout is on the CPU
        because="drop is Dropout(p=0.1, inplace=False) in A, Dropout(p=0.2, inplace=False) in B",
    ),
    "epsilon of a norm": Planted(
        plant={"net": {"eps": 1e-6}},
        step=1,
        phase="forward",
        layer="norm",
        operator="aten.native_layer_norm",
        because="1e-05 in A, [16], 1e-06 in B",
    ),
    "approximation of an activation": Planted(
        plant={"net": {"approximate": "tanh"}},
        step=1,
        phase="forward",
        layer="act",
        operator="aten.gelu",
        because="approximate='tanh'",
    ),
    "another activation": Planted(
        plant={"net": {"activation": "relu"}},
        step=1,
        phase="forward",
        layer="act",
        operator="aten.gelu",
        because="where B has aten.relu",
    ),
    "weight decay": Planted(
        plant={"optim": {"weight_decay": 0.2}},
        step=1,
        phase="optimizer",
        because="weight_decay of group 0: 0.1 in A, 0.2 in B",
    ),
    "learning rate of one step": Planted(plant={"rate": "once"}, step=2, phase="optimizer", because="lr of group 0"),
    "beta2": Planted(plant={"optim": {"beta2": 0.999}}, step=1, phase="optimizer", because="betas of group 0"),
    "limit of the gradient norm": Planted(
        plant={"optim": {"clip_norm": 0.05}}, step=1, phase="optimizer", because="clip_norm: 0.1 in A, 0.05 in B"
    ),
    "reduction of the loss": Planted(plant={"objective": "mean"}, step=1, phase="loss", operator="aten.div.Tensor"),
    "scale of attention": Planted(
        plant={"net": {"scale": 0.31}},
        step=1,
        phase="forward",
        layer="attention",
        operator="aten.mul",
        because="0.3 in A, 0.31 in B",
    ),
    "a masked token": Planted(
        plant={"net": {"masked": 4}}, step=1, phase="forward", layer="attention", operator="aten."
    ),
    "a buffer": Planted(plant={"net": {"shift": 1e-3}}, step=1, phase="weights at start", tensor="model/shift"),
    "precision of a layer": Planted(
        plant={"net": {"is_low": True}}, step=1, phase="forward", layer="up", because="aten._to_copy"
    ),
    "code of a layer": Planted(
        plant={"net": {"change": 1.0001}}, step=1, phase="forward", layer="scale", because="is 1.0 in A, 1.0001 in B"
    ),
    "gradient of a layer": Planted(
        plant={"gradient": "up"}, step=1, phase="backward", because="where B has aten.mul.Tensor(1.001)"
    ),
    "gradient of a rank left out": Planted(
        plant={"left_out": 1}, step=1, phase="gradient synchronisation", tensor="embedding.weight", ranks=(2, 2)
    ),
    "forward pass of one rank": Planted(
        plant={"spoilt_rank": 1}, step=1, phase="forward", layer="down", ranks=(2, 2), rank=1
    ),
    "accumulation, divided twice": Planted(
        a={"net": {"rate": 0.0}},
        plant={"net": {"rate": 0.0}, "plan": {"micro_batch": 4}, "objective": "halved"},
        step=1,
        phase="loss",
        tensor="loss",
        rank=None,
    ),
    "gradient left out, one rank and two": Planted(
        a={"net": {"rate": 0.0}},
        plant={"net": {"rate": 0.0}, "left_out": 1},
        step=1,
        phase="gradient synchronisation",
        tensor="embedding.weight",
        ranks=(1, 2),
        rank=None,
    ),
}
QUICK = {"a weight by 1 ulp", "a label", "epsilon of a norm", "weight decay", "gradient of a rank left out", "a buffer"}
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in PLANTED]


def text_of(found: FirstDifference) -> str:
    return "\n".join(divergence_lines(found))


@pytest.mark.parametrize("name", CASES)
def test_a_planted_divergence(pool: Pool, tmp_path: Path, name: str) -> None:
    case = PLANTED[name]
    found = search(tmp_path, pool, case.a, case.plant, ranks=case.ranks)
    text = text_of(found)
    assert found.verdict == "diverged", text
    assert found.replayed_steps <= 2, text
    divergence = found.divergence
    assert divergence is not None
    where = divergence.step, divergence.phase, divergence.layer if case.layer else ""
    assert where == (case.step, case.phase, case.layer), text
    assert case.operator in divergence.operator, text
    assert case.tensor in divergence.tensor, text
    assert any(case.because in sentence for sentence in [*divergence.because, ""]), text
    assert divergence.rank == case.rank, text
    if case.samples:
        assert divergence.samples == case.samples, text
    assert "does not repeat the run" not in text

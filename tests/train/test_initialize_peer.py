"""Initial values have the statistics of MXNet's: UNISONO_MXNET_PYTHON names an interpreter that has mxnet 1.9.1."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
from torch import Tensor, nn

from unisono.models.init_rules import InitRule
from unisono.train.initialize import initialize

PYTHON = os.environ.get("UNISONO_MXNET_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not PYTHON, reason="set UNISONO_MXNET_PYTHON to an interpreter with mxnet==1.9.1: nothing was compared"
    ),
]
# a call of mxnet.initializer, and our rule
PAIRS: list[tuple[str, InitRule]] = [
    ("Xavier()", {"kind": "xavier"}),
    *(
        (
            f"Xavier(rnd_type={rnd!r}, factor_type={factor!r}, magnitude=2.34)",
            {"kind": "xavier", "distribution": rnd, "factor": factor, "magnitude": 2.34},
        )
        for rnd in ("uniform", "gaussian")
        for factor in ("avg", "in", "out")
    ),
    ("MSRAPrelu()", {"kind": "msra_prelu"}),
    ("MSRAPrelu('in', 0.5)", {"kind": "msra_prelu", "factor": "in", "slope": 0.5}),
    ("Orthogonal()", {"kind": "orthogonal"}),
    ("Orthogonal(2.0, 'normal')", {"kind": "orthogonal", "scale": 2.0, "distribution": "gaussian"}),
    ("Normal()", {"kind": "normal"}),
    ("Uniform()", {"kind": "uniform"}),
    ("Constant(0.5)", {"kind": "constant", "value": 0.5}),
]
SHAPES = [(300, 200), (200, 300), (64, 32, 3, 5)]
DRAW = """
import json, sys
import numpy as np
np.bool = bool
import mxnet as mx
mx.random.seed(0)
np.random.seed(0)
found = []
for call, shape in json.load(sys.stdin):
    rule = eval("mx.init." + call)
    weight, bias = mx.nd.zeros(shape), mx.nd.ones((7,))
    rule(mx.init.InitDesc("x_weight"), weight)
    rule(mx.init.InitDesc("x_bias"), bias)
    flat = weight.asnumpy().reshape(shape[0], -1)
    found.append([flat.std(), flat.mean(), abs(flat).mean(), np.linalg.norm(flat, 2), bias.asnumpy().sum()])
print(json.dumps(np.array(found).tolist()))
"""


def statistics(weight: Tensor) -> list[float]:
    """Deviation, mean, mean size (which tells a uniform distribution from a gaussian), and largest singular value."""
    flat = weight.reshape(len(weight), -1)
    values = weight.std(unbiased=False), weight.mean(), weight.abs().mean(), torch.linalg.matrix_norm(flat, 2)
    return [float(value) for value in values]


def test_statistics_are_mxnets() -> None:
    cases = [(call, rule, shape) for call, rule in PAIRS for shape in SHAPES]
    asked = json.dumps([(call, shape) for call, _, shape in cases])
    done = subprocess.run([str(PYTHON), "-c", DRAW], input=asked, capture_output=True, text=True, check=True)
    for (call, rule, shape), (*theirs, bias) in zip(cases, json.loads(done.stdout), strict=True):
        module = nn.ParameterDict({"weight": nn.Parameter(torch.empty(shape)), "bias": nn.Parameter(torch.ones(7))})
        initialize(module, [{"match": "*", **rule}], seed=0)
        deviation, mean, size, norm = statistics(module["weight"].detach())
        where = f"{call} {shape}"
        assert deviation == pytest.approx(theirs[0], rel=0.01), where
        assert mean == pytest.approx(theirs[1], abs=0.03 * theirs[2]), where
        assert size == pytest.approx(theirs[2], rel=0.01), where
        assert norm == pytest.approx(theirs[3], rel=1e-4 if rule["kind"] == "orthogonal" else 0.04), where
        if rule["kind"] in ("xavier", "msra_prelu", "orthogonal"):
            assert float(module["bias"].detach().sum()) == bias == 0

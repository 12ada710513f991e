"""fp8 products in the linear layers of blocks, by torchao (Micikevicius et al. 2022, FP8 formats for deep learning).

Weights stay what they are, and so do their gradients; a layer scales and rounds its three products' operands as it goes. What is
no such layer computes in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torch import nn

from unisono.errors import PlanError
from unisono.parallel.device import computes_fp8
from unisono.plan.plan import Plan

MULTIPLE = 16  # rows and columns that the products want


def check_fp8(plan: Plan, blocks: Sequence[nn.Module]) -> None:
    """Raises PlanError where the device or the package lacks, and where no linear layer of ``blocks`` fits."""
    lacking = [] if computes_fp8(plan.mesh.device) else [f"a {plan.mesh.device} without fp8 products"]
    lacking += [] if find_spec("torchao") else ["no torchao"]
    if lacking:
        raise PlanError(
            given=f"precision 'fp8' on {' and '.join(lacking)}",
            rule="fp8 products need torchao (the extra unisono[quant]) and a device with them (compute capability 8.9 up)",
            consequence="nothing was started",
            nearest="plan.precision='bf16'",
        )
    if not any(fits(layer) for block in blocks for layer in block.modules()):
        raise PlanError(
            given=f"precision 'fp8' for {len(blocks)} repeated blocks",
            rule=f"it acts on linear layers in them whose sizes are multiples of {MULTIPLE}",
            consequence="it would change nothing",
            nearest="plan.precision='bf16', or other sizes",
        )


def apply_fp8(blocks: Sequence[nn.Module]) -> None:
    """Have the linear layers of ``blocks`` compute in fp8, in place; before they are sharded or wrapped."""
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=lambda layer, _path: fits(layer))


def fits(layer: nn.Module) -> bool:
    """Whether a layer's products can be made in fp8."""
    return type(layer) is nn.Linear and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)

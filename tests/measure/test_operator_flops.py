"""Counted FLOPs against counts by hand, and against those of a step of known models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.nn import functional as F

from unisono.dist import JobSpec, World
from unisono.measure.operator_flops import OperatorFlops


def test_products_and_attention_by_hand() -> None:
    left, right = torch.randn(3, 5), torch.randn(5, 7)
    with OperatorFlops() as counted:
        left @ right
    assert counted.flops == 2 * 3 * 5 * 7
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with OperatorFlops() as counted:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    square = 2 * 4 * 16 * 16 * 8
    assert counted.flops == 2 * 2 * square  # scores and weighted values
    with OperatorFlops() as counted:
        out.sum().backward()
    assert counted.flops == 5 * 2 * square  # scores again, and two products for each of the two


def test_a_grouped_product_meets_one_matrix_for_each_row() -> None:
    rows, stack = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 32, dtype=torch.bfloat16)
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    with OperatorFlops() as counted:
        torch._grouped_mm(rows, stack, offs=offsets)  # type: ignore[attr-defined]
    assert counted.flops == 2 * 8 * 16 * 32


def traced(folder: Path, **settings: Any) -> int:
    world = World(JobSpec(world_size=settings.pop("ranks", 1)))
    (memory, *_) = tiny.trainer(folder, world=world, **settings).dry_run(world.job.world_size)
    return memory.flops


def test_a_step_computes_what_its_plan_says(tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "tied": False}
    given: dict[str, Any] = {"sizes": sizes, "micro_batch": 1}
    none = traced(tmp_path, **given)
    # of two micro-batches as of more, of which a trace makes three
    assert traced(tmp_path, **given | {"micro_batch": 2}) == pytest.approx(none, rel=1e-3)
    full = traced(tmp_path, **given, recompute="full")
    assert 1.15 < full / none < 4 / 3  # the forward pass of the blocks again, and not that of the output matrix
    # two ranks share the products of the blocks, not those of the output matrix
    assert 0.5 <= traced(tmp_path, **given, ranks=2, tp=2) / none < 0.8
    assert traced(tmp_path, **given, ranks=2, dp_shard=2) == pytest.approx(none / 2, rel=1e-3)
    more = given | {"sizes": {**sizes, "num_layers": 30}}
    less = given | {"sizes": {**sizes, "num_layers": 29}}
    # of traces of a few blocks as of all
    assert traced(tmp_path, **more) - traced(tmp_path, **less) == pytest.approx(
        (none - traced(tmp_path, **given | {"sizes": {**sizes, "num_layers": 3}})), rel=1e-3
    )

"""Plans drawn at random among the legal ones, on up to eight processes: each trains like one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
from plans import like_one_process
from pool import Pool

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

LAYERS = 6  # two for each rank of three that take turns
NAMED = [
    ("blocks.*.attention",),
    ("blocks.*.ffn", "embedding"),
    ("blocks.*.*_norm", "norm", "blocks.*.attention.out"),
    ("blocks.1", "blocks.0.ffn", "blocks.5.attention"),
]


def draw(seed: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(ranks, settings, the model's sizes): the first legal plan of a stream of any."""
    rng = random.Random(seed)
    while True:
        pp, cp, tp = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 4])
        data_ranks, experts = rng.choice([1, 2, 3, 4]), rng.choice([0, 4])
        share = pp * rng.choice([1, 2, 3])
        ranks = pp * cp * tp * data_ranks
        plan = {
            "pp": pp,
            "cp": cp,
            "tp": tp,
            "dp_shard": rng.choice([n for n in range(1, data_ranks + 1) if data_ranks % n == 0]),
            "ep": rng.choice([1, 2, 4]) if experts else 1,
            "schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zbv"]),
            # a rank's part of a sequence is cut over tp
            "sequence_parallel": rng.choice([True, False]) and tiny.SEQ_LEN // cp % tp == 0,
            "zero": rng.choice([1, 2, 3]),
            "global_batch": data_ranks * share,
            "micro_batch": rng.randint(1, share // pp),
            "recompute": rng.choice(["none", "full", "selective"]),
        }
        if not 2 <= ranks <= 8:
            continue
        try:
            derive_plan(
                PlanOptions(device="cpu", precision="fp32", **plan), world_size=ranks, device="cpu", native_bf16=False
            )
        except PlanError:
            continue
        others = {
            "kind": rng.choice(["adamw", "adamw", "sgd", "lamb"]),
            "ema_decay": rng.choice([0.0, 0.9]),
            "clip_norm": rng.choice([0.0, 0.5]),
        }
        sizes = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "tied": rng.choice([True, False])}
        if plan["recompute"] != "none" and rng.random() < 0.7:
            others["recompute.modules"] = rng.choice(NAMED)
        return ranks, plan | others, sizes | ({"num_experts": experts, "ffn_dim": 16} if experts else {})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(14))
def test_any_legal_plan_trains_like_one_process(pool: Pool, tmp_path: Path, seed: int) -> None:
    ranks, settings, sizes = draw(seed)
    like_one_process(pool, tmp_path, ranks, sizes=sizes, **settings)

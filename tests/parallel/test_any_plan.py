"""Plans drawn at random among the legal ones, on up to eight processes: each trains like one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from plans import like_one_process
from pool import Pool


def draw(seed: int) -> tuple[int, dict[str, Any]]:
    """(ranks, settings); two of the model's sizes, heads 4 and kv_heads 2, allow ``tp`` 1 or 2."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 6, 8, 8])
    tp = rng.choice([n for n in (1, 2) if ranks % n == 0])
    data_ranks = ranks // tp
    share = rng.choice([1, 2, 3])
    return ranks, {
        "tp": tp,
        "dp_shard": rng.choice([n for n in range(1, data_ranks + 1) if data_ranks % n == 0]),
        "zero": rng.choice([1, 2, 3]),
        "global_batch": data_ranks * share,
        "micro_batch": rng.randint(1, share),
        "recompute": rng.choice(["none", "full", "selective"]),
        "kind": rng.choice(["adamw", "adamw", "sgd", "lamb"]),
        "ema_decay": rng.choice([0.0, 0.9]),
        "clip_norm": rng.choice([0.0, 0.5]),
    }


@pytest.mark.full
@pytest.mark.parametrize("seed", range(14))
def test_any_legal_plan_trains_like_one_process(pool: Pool, tmp_path: Path, seed: int) -> None:
    ranks, settings = draw(seed)
    like_one_process(pool, tmp_path, ranks, sizes={"heads": 4, "kv_heads": 2}, **settings)

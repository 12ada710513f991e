"""A configuration of the demo whose steps take longer for one known cause: ``unisono train benchmarks/observe/slow_run.py``.

``SLOW_CAUSE`` names the cause, ``SLOW_S`` is how much longer a step takes (of ``save``: a save), ``SLOW_RANK`` the rank on which
(-1: all). ``garbage`` makes many objects in each step, of which the newest are kept.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from typing import Any

from unisono import Components, RunConfig
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.train import Every
from unisono.train.run_checkpoints import RunCheckpoints

SLOW_S, SLOW_RANK = float(os.environ["SLOW_S"]), int(os.environ["SLOW_RANK"])
SAMPLES = int(os.environ["SLOW_SAMPLES"])  # of a rank in a step
NUM_LISTS, STEPS_KEPT = 200_000, 5  # that a step makes, and for how many steps they are kept


def config() -> RunConfig:
    """The configuration of all ranks: code asks at each step whether its rank is the slow one."""
    match os.environ["SLOW_CAUSE"]:
        case "loader":
            return RunConfig(components=Components(transform=lambda sample, rng: slowed(sample, SAMPLES)))
        case "compute":
            call = Every(steps=1, call=lambda step, model: slowed(None))
            return RunConfig(components=Components(callbacks=lambda run: [call]))
        case "link":
            wait = BucketedAllReduce.wait
            BucketedAllReduce.wait = lambda self, totals: wait(slowed(self), totals)
        case "garbage" | "garbage, not collected" as cause:
            if "not collected" in cause:
                gc.disable()
            kept: deque[list[Any]] = deque(maxlen=STEPS_KEPT)
            lists = Every(steps=1, call=lambda step, model: kept.append([[] for _ in range(NUM_LISTS)]))
            return RunConfig(components=Components(callbacks=lambda run: [lists]))
        case "save":
            save = RunCheckpoints.save
            RunCheckpoints.save = lambda self, **options: save(slowed(self), **options)
        case _:
            pass
    return RunConfig()


def slowed(value: Any, parts: int = 1) -> Any:
    """The value, later on the slow rank: a part of what a step takes longer."""
    if SLOW_RANK in (-1, int(os.environ.get("UNISONO_RANK", "0"))):
        time.sleep(SLOW_S / parts)
    return value

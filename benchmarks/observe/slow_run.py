"""A configuration of the demo whose steps take longer for one known cause: ``unisono train benchmarks/observe/slow_run.py``.

``SLOW_CAUSE`` names the cause, ``SLOW_S`` is how much longer a step takes, ``SLOW_RANK`` the rank on which (-1: all).
"""

from __future__ import annotations

import os
import time
from typing import Any

from unisono import Components, RunConfig
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.train import Every

SLOW_S, SLOW_RANK = float(os.environ["SLOW_S"]), int(os.environ["SLOW_RANK"])
SAMPLES = int(os.environ["SLOW_SAMPLES"])  # of a rank in a step


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
        case _:
            pass
    return RunConfig()


def slowed(value: Any, parts: int = 1) -> Any:
    """The value, later on the slow rank: a part of what a step takes longer."""
    if SLOW_RANK in (-1, int(os.environ.get("UNISONO_RANK", "0"))):
        time.sleep(SLOW_S / parts)
    return value

"""A configuration of the demo whose steps take longer for one known cause: ``unisono train benchmarks/observe/slow_run.py``.

``SLOW_CAUSE`` names the cause, ``SLOW_S`` is how much longer a step takes, ``SLOW_RANK`` the rank on which (-1: all).
"""

from __future__ import annotations

import os
import time
from typing import Any

from unisono import Components, RunConfig
from unisono.dist import job_from_environ
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.train import Every


def config() -> RunConfig:
    """The configuration of one rank."""
    cause, seconds, slow_rank = os.environ["SLOW_CAUSE"], float(os.environ["SLOW_S"]), int(os.environ["SLOW_RANK"])
    rank = job_from_environ(os.environ).rank
    if slow_rank not in (-1, rank) or not seconds:
        return RunConfig()
    if cause == "loader":
        samples = int(os.environ["SLOW_SAMPLES"])  # of a rank in a step
        return RunConfig(components=Components(transform=lambda sample, rng: slowed(seconds / samples, sample)))
    if cause == "compute":
        call = Every(steps=1, call=lambda step, model: time.sleep(seconds))
        return RunConfig(components=Components(callbacks=lambda run: [call]))
    if cause == "link":
        wait = BucketedAllReduce.wait
        BucketedAllReduce.wait = lambda self, totals: wait(slowed(seconds, self), totals)
    return RunConfig()


def slowed(seconds: float, value: Any) -> Any:
    """The value, later."""
    time.sleep(seconds)
    return value

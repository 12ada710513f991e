"""Processes as one job: who am I (torch-free), who are the others, and how do we stop together.

``JobSpec``, ``job_from_environ``, ``StopNotice``, ``fault_point`` and ``record_failure`` import no torch; ``World``,
``join`` and ``agree`` do, when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.dist.failure import Failure, read_failure, record_failure
from unisono.dist.faults import fault_point
from unisono.dist.jobspec import JobSpec, job_from_environ
from unisono.dist.signals import StopNotice
from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.dist.agreement import agree
    from unisono.dist.world import World, join

__all__ = [
    "Failure",
    "JobSpec",
    "StopNotice",
    "World",
    "agree",
    "fault_point",
    "job_from_environ",
    "join",
    "read_failure",
    "record_failure",
]

_HOMES = {"World": "world", "join": "world", "agree": "agreement"}

__getattr__, __dir__ = lazily(__name__, _HOMES)

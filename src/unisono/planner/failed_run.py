"""A run that ran out of memory: the rank that did, what it measured, and what its tensors could have taken. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.diagnose.ending import Ending, read_ending
from unisono.diagnose.run_facts import read_run
from unisono.dist import Failure
from unisono.errors import ConfigError, DataError, PlanError
from unisono.observe.host_memory import ProcessMemory, host_memory_limit_bytes, tensor_budget_bytes
from unisono.plan.plan import Plan
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import LAUNCH_FILE, LOGS_FOLDER, PLAN_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRank:
    """The rank of a run that ran out of memory first.

    Attributes:
        rank: The rank.
        num_ranks: Ranks of its job; None if it failed before it had a plan.
        measured: What it measured, in bytes, by name (``train.failure_memory``); of a killed one its last readings, if any.
    """

    rank: int
    num_ranks: int | None
    measured: Mapping[str, int]

    def budget_bytes(self, num_ranks: int) -> int | None:
        """What the tensors of one of ``num_ranks`` could have taken of the memory; None if the rank did not measure it.

        Of a device, the most that was in tensors and what was free: what lay between tensors counts as unusable.
        """
        sizes = self.measured
        if {"allocated_peak_bytes", "free_bytes"} <= sizes.keys():
            return sizes["allocated_peak_bytes"] + sizes["free_bytes"]
        if not {"beside_resident_bytes", "beside_address_space_bytes", "limit_bytes"} <= sizes.keys():
            return None
        beside = ProcessMemory(
            resident_bytes=sizes["beside_resident_bytes"], address_space_bytes=sizes["beside_address_space_bytes"]
        )
        limit_bytes = sizes.get("address_space_limit_bytes")
        return tensor_budget_bytes(
            num_ranks, beside, limit_bytes=sizes["limit_bytes"], address_space_limit_bytes=limit_bytes
        )


def read_failed_rank(run_dir: Path) -> FailedRank:
    """The rank whose lack of memory ended the run's last attempt.

    Raises:
        ConfigError: The run did not run out of memory, as far as its launcher or its ranks have recorded.
    """
    is_over, ending = read_ending(run_dir, since_s=0.0)
    failures = list(_failures(run_dir))
    newest = max((failure.restart_count for failure in failures), default=0)
    failures = [each for each in failures if each.restart_count == newest and each.cause == "out_of_memory"]
    if is_over and (ending is None or ending.kind != "out_of_memory"):
        failures = []
    first = min(failures, key=lambda failure: failure.at_monotonic_s, default=None)
    if first is not None:
        return FailedRank(rank=first.rank, num_ranks=_num_ranks(run_dir), measured=first.memory)
    if is_over and ending is not None and ending.kind == "out_of_memory":
        return _killed_rank(run_dir, ending)
    raise ConfigError(
        given=f"--failed {run_dir}",
        rule="its last attempt ended because a rank ran out of memory, as launch.json or logs/failure-rank-N.json say",
        consequence="nothing was traced",
        nearest=f"unisono diagnose {run_dir} says why it ended; without --failed a plan is fitted to the memory of this machine",
    )


def started_with(run_dir: Path) -> list[str] | None:
    """The files and settings that the run's ``unisono train`` got, as its launcher recorded them; None if it recorded none.

    Secrets are recorded as ``sanitize.redact`` leaves them.
    """
    try:
        command = [str(word) for word in read_own_json(run_dir / LAUNCH_FILE)["command"]]
        words = command[command.index("train") + 1 :]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [word for word in words if not word.startswith("-") or word.startswith("--set=")]


def _killed_rank(run_dir: Path, ending: Ending) -> FailedRank:
    """A rank that the kernel ended, which recorded nothing then."""
    rank = ending.ranks[0] if ending.ranks else 0
    measured = {"limit_bytes": host_memory_limit_bytes()}
    with suppress(DataError, ConfigError):
        for facts in read_run(run_dir).ranks:
            if facts.rank == rank and facts.peak_bytes > 0 and facts.limit_bytes > 0:
                measured = {"resident_peak_bytes": round(facts.peak_bytes), "limit_bytes": round(facts.limit_bytes)}
    return FailedRank(rank=rank, num_ranks=_num_ranks(run_dir), measured=measured)


def _failures(run_dir: Path) -> Iterator[Failure]:
    for path in sorted((run_dir / LOGS_FOLDER).glob("failure-rank-*.json")):
        with suppress(OSError, ValueError, TypeError):
            yield Failure.from_json(read_own_json(path))


def _num_ranks(run_dir: Path) -> int | None:
    try:
        return Plan.load(run_dir / PLAN_FILE).mesh.world_size
    except (OSError, PlanError):
        return None

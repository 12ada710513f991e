"""Runs that ran out of memory, as their folders tell it: what is damaged counts as not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.diagnose.ending import Ending
from unisono.diagnose.memory_ending import with_memory
from unisono.planner.failed_run import read_failed_rank

RECORD: dict[str, Any] = {
    **{
        "rank": 0,
        "epoch": 0,
        "step": None,
        "type": "MemoryError",
        "message": "",
        "traceback": "",
        "at_monotonic_s": 1.0,
    },
    "cause": "out_of_memory",
}
OF_DEVICE = {
    name: 2**30
    for name in ("allocated_bytes", "allocated_peak_bytes", "reserved_peak_bytes", "free_bytes", "limit_bytes")
}
OF_PROCESS = {
    name: 2**30
    for name in (
        *("resident_peak_bytes", "limit_bytes", "address_space_peak_bytes", "address_space_limit_bytes"),
        *("beside_resident_bytes", "beside_address_space_bytes"),
    )
}
ENDING = Ending(kind="out_of_memory", ranks=(0,), sentence="memory ran out")


def record(run_dir: Path, name: str, content: object) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / name).write_text(json.dumps(content))


def ending(**changes: Any) -> dict[str, Any]:
    return {
        **{"rank": 0, "measured": OF_DEVICE, "peak_bytes": 1, "peak_operator": "mm", "peak_phase": "forward"},
        **{"peak_bytes_by_kind": {"forward": 1}, "budget_bytes": 1, "settings": {}, "measure": "", "is_cut": False},
        **changes,
    }


def test_a_run_that_failed_before_it_had_a_plan_has_no_number_of_ranks(tmp_path: Path) -> None:
    record(tmp_path, "failure-rank-0.json", RECORD | {"memory": OF_DEVICE})
    failed = read_failed_rank(tmp_path)
    assert (failed.rank, failed.num_ranks, failed.budget_bytes(1)) == (0, None, 2**31)


@pytest.mark.parametrize("measured", [OF_DEVICE, OF_PROCESS], ids=["device", "process"])
def test_sizes_that_are_missing_count_as_not_measured(tmp_path: Path, measured: dict[str, int]) -> None:
    for missing in measured:
        sizes = {name: size for name, size in measured.items() if name != missing}
        record(tmp_path, "failure-rank-0.json", RECORD | {"memory": sizes})
        assert read_failed_rank(tmp_path).measured == sizes
        read_failed_rank(tmp_path).budget_bytes(2)
        record(tmp_path, "out-of-memory.json", ending(measured=sizes))
        found = with_memory(ENDING, tmp_path, since_s=0.0)
        assert found is not None
        assert found.evidence[-1] == "so tensors of a rank may take 9.313e-10 GiB"
    sizes = {"free_bytes": 2**30}
    record(tmp_path, "failure-rank-0.json", RECORD | {"memory": sizes})
    assert read_failed_rank(tmp_path).budget_bytes(2) is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"measured": {"limit_bytes": 10**400}}, {"peak_bytes": 10**400}, {"budget_bytes": -(10**400)}),
        *({"peak_bytes_by_kind": {"forward": 10**400}}, {"settings": {"plan.tp": [2]}}, {"rank": "0"}),
    ],
)
def test_what_no_memory_has_says_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    record(tmp_path, "out-of-memory.json", ending(**changes))
    assert with_memory(ENDING, tmp_path, since_s=0.0) == ENDING
    record(tmp_path, "out-of-memory.json", ending())
    assert with_memory(ENDING, tmp_path, since_s=0.0) != ENDING

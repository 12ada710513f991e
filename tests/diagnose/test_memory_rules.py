"""Rules of memory, on events with exactly known figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import COMPUTE, findings, only, write_events

from unisono.diagnose import diagnose, read_run
from unisono.profile import RankProfile
from unisono.profile.rank_profile import GrowingAllocation, profile_folder

GIB = 2.0**30


@pytest.mark.parametrize(
    ("mib_per_step", "steps", "severity"),
    [(2.0, 300, "critical"), (0.5, 300, "warning"), (0.1, 300, None), (2.0, 150, None)],
)
def test_memory_that_grows(tmp_path: Path, mib_per_step: float, steps: int, severity: str | None) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {
            "mem/now_bytes": 8 * GIB + (mib_per_step * 2**20 * step if rank == 1 else 0),
            "mem/limit_bytes": 32 * GIB,
        }

    found = findings(tmp_path, lambda rank, step: COMPUTE, steps=steps, fields_of=memory)
    assert [(one.id, one.severity, one.ranks) for one in found] == ([("MEM03", severity, (1,))] if severity else [])
    if severity:
        assert f"grows by {mib_per_step:.3g} MiB a step" in found[0].evidence[0]
        left_steps = (24 * 1024 - mib_per_step * steps) / mib_per_step
        assert f"after {left_steps:,.0f} more steps" in found[0].evidence[1]


def test_caches_that_fill_are_no_growth(tmp_path: Path) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {"mem/now_bytes": GIB * min(4.0, 1 + step / 100), "mem/limit_bytes": 8 * GIB}

    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=600, fields_of=memory) == []


@pytest.mark.parametrize(
    ("stacks", "grows", "texts"),
    [
        (False, (), ("unisono profile RUN_DIR --now --steps 5 --stacks",)),
        (True, (), ("in the 3 profiled steps no line's tensors, arrays or objects stayed",)),
        (
            True,
            (
                ("tensor", "own.py:7", "forward", 1.5),
                ("object", "own.py:9", "", 0.5),
                ("tensor", "x.py:1", "other", 0.1),
            ),
            ("tensors (forward) of own.py:7 stay: 1.5 MiB a step", "objects of own.py:9 stay: 0.5 MiB a step"),
        ),
    ],
)
def test_lines_whose_memory_grows(tmp_path: Path, stacks: bool, grows: Any, texts: tuple[str, ...]) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {"mem/now_bytes": 8 * GIB + 2 * 2**20 * step * rank, "mem/limit_bytes": 32 * GIB}

    lines = tuple(
        GrowingAllocation(kind=kind, source=source, phase=phase, bytes_per_step=mib * 2**20)
        for kind, source, phase, mib in grows
    )
    run = write_events(tmp_path, lambda rank, step: COMPUTE, steps=300, fields_of=memory)
    for rank in (0, 1):
        path = profile_folder(run, 5) / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = lines if rank else ()
        made = RankProfile(rank=rank, num_steps=3, wall_s=1.0, has_stacks=stacks, grows=seen)
        path.write_bytes(made.to_bytes())
    (finding,) = diagnose(read_run(run))
    assert finding.id == "MEM03"
    assert len(finding.evidence) == 2 + len(texts)
    assert all(text in line for text, line in zip(texts, finding.evidence[2:], strict=True))


@pytest.mark.parametrize(("peak", "severity"), [(91, "warning"), (97, "critical")])
def test_memory_that_is_nearly_full(tmp_path: Path, peak: int, severity: str) -> None:
    plan = {"sync": {"kind": "local"}, "batch": {"micro_batch": 8}}
    memory = {"mem/peak_bytes": peak << 30, "mem/limit_bytes": 100 << 30}
    finding = only(tmp_path, lambda rank, step: COMPUTE, ranks=1, plan=plan, fields=memory)
    assert (finding.id, finding.severity, finding.patch) == ("MEM01", severity, {"plan.micro_batch": 4})
    assert f"{peak} of 100 GiB" in finding.evidence[0]


@pytest.mark.parametrize(
    ("hosts", "device", "gib", "ranks", "severity"),
    [
        (["n1"] * 4, "cpu", [3.9] * 4, (), "critical"),
        (["n1"] * 4, "cpu", [3.7] * 4, (), "warning"),
        (["n1"] * 4, "cpu", [3.5] * 4, (), None),
        (["n1", "n2", "n1", "n2"], "cpu", [7.5, 3.9, 7.5, 3.9], (0, 2), "warning"),
        (["n1", "n2", "n3", "n4"], "cpu", [3.9] * 4, (), None),
        (["n1"] * 4, "cuda:0", [3.9] * 4, (), None),
        (["n1"] * 4, "cuda:0", [3.9, 15.6, 3.9, 3.9], (1,), "critical"),
    ],
)
def test_ranks_on_the_cpu_share_the_memory_of_their_host(
    tmp_path: Path, hosts: list[str], device: str, gib: list[float], ranks: tuple[int, ...], severity: str | None
) -> None:
    found = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        ranks=4,
        start_of=lambda rank: {"host": hosts[rank], "device": device},
        fields_of=lambda rank, step: {"mem/peak_bytes": gib[rank] * GIB, "mem/limit_bytes": 16 * GIB},
    )
    assert [(one.id, one.severity, one.ranks) for one in found] == ([("MEM01", severity, ranks)] if severity else [])


def test_the_memory_of_a_host_names_the_rank_that_uses_most(tmp_path: Path) -> None:
    finding = only(
        tmp_path,
        lambda rank, step: COMPUTE,
        start={"host": "n1", "device": "cpu"},
        fields_of=lambda rank, step: {"mem/peak_bytes": (4 + 8 * rank) * GIB, "mem/limit_bytes": 16 * GIB},
    )
    assert finding.evidence == (
        "ranks 0, 1 (host n1) have together used 16 of 16 GiB (100%)",
        "rank 1 has used most of it, 12 GiB",
    )


@pytest.mark.parametrize(
    ("device", "mib", "ranks", "severity", "first"),
    [
        # of 32 GiB 1 % in 1,000 steps is 0.33 MiB a step
        ("cpu", [0.2, 0.2, 0.2, 0.0], (0, 1, 2), "warning", "ranks 0, 1, 2 (host n1) grow together by 0.6 MiB a step"),
        ("cpu", [0.5] * 4, (), "critical", "ranks 0, 1, 2, 3 (host n1) grow together by 2 MiB a step"),
        ("cpu", [0.01, 2.0, 0.0, 0.0], (1,), "critical", "rank 1 grows by 2 MiB a step"),
        ("cuda:0", [0.2, 0.2, 0.2, 0.0], (), None, ""),
    ],
)
def test_memory_of_a_host_that_grows(
    tmp_path: Path, device: str, mib: list[float], ranks: tuple[int, ...], severity: str | None, first: str
) -> None:
    found = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        ranks=4,
        steps=300,
        start={"host": "n1", "device": device},
        fields_of=lambda rank, step: {"mem/now_bytes": GIB + mib[rank] * 2**20 * step, "mem/limit_bytes": 32 * GIB},
    )
    assert [(one.id, one.severity, one.ranks) for one in found] == ([("MEM03", severity, ranks)] if severity else [])
    if severity:
        assert found[0].evidence[0].startswith(first)
        left_steps = (28 * 1024 - sum(mib) * 300) / sum(mib)
        assert found[0].evidence[1] == f"the 32 GiB of 4 ranks would be full after {left_steps:,.0f} more steps"


def test_a_smaller_micro_batch_divides_the_global_batch(tmp_path: Path) -> None:
    plan = {"sync": {"kind": "local"}, "batch": {"micro_batch": 9}}
    memory = {"mem/peak_bytes": 95 << 30, "mem/limit_bytes": 100 << 30}
    assert only(tmp_path, lambda rank, step: COMPUTE, ranks=1, plan=plan, fields=memory).patch == {
        "plan.micro_batch": 3
    }


@pytest.mark.parametrize(
    ("reserved", "retries", "severity"), [(50, 0, None), (58, 0, "warning"), (58, 3, "critical"), (70, 0, "critical")]
)
def test_fragmented_device_memory(tmp_path: Path, reserved: int, retries: int, severity: str | None) -> None:
    def fields(rank: int, step: int) -> Mapping[str, Any]:
        gib = 2**30
        return {
            "mem/peak_bytes": 30 * gib if rank else 45 * gib,
            "mem/peak_reserved_bytes": reserved * gib,
            "mem/limit_bytes": 90 * gib,
            "mem/alloc_retries": retries * rank,
        }

    found = [
        finding for finding in findings(tmp_path, lambda rank, step: COMPUTE, fields_of=fields) if finding.id == "MEM02"
    ]
    assert [(finding.ranks, finding.severity) for finding in found] == ([((1,), severity)] if severity else [])


def test_a_retried_allocation_is_near_out_of_memory(tmp_path: Path) -> None:
    fields = {"mem/peak_bytes": 50, "mem/peak_reserved_bytes": 60, "mem/limit_bytes": 100, "mem/alloc_retries": 2}
    finding = only(tmp_path, lambda rank, step: COMPUTE, fields=fields)
    assert (finding.id, finding.severity) == ("MEM01", "critical")
    assert "2 allocations found no free memory at first" in finding.evidence

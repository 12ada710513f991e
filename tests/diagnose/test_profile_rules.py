"""Rules of profiles, on profiles with exactly known times: thresholds, costs, patches, and silence without their cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_streams import write_events
from traces import TraceBuilder

from unisono.diagnose import Finding, RunFacts, diagnose, read_run, read_trace_facts
from unisono.profile import RankProfile
from unisono.profile.rank_profile import (
    Collective,
    CompileCounts,
    KernelTime,
    LaunchTime,
    MatrixProduct,
    MemoryProfile,
    Overlap,
    Pattern,
    StepTime,
    SyncPoint,
    profile_folder,
)

STEPS = tuple(StepTime(step=step, start_s=(step - 5) / 10, wall_s=0.1) for step in range(5, 15))
HEALTHY = LaunchTime(compute_s=0.9, work_s=0.8, num_operators=5_000, num_kernels=0, num_short=900)


def profile(rank: int = 0, **changes: Any) -> RankProfile:
    """Ten steps that take 1 s together."""
    return RankProfile(**{"rank": rank, "num_steps": 10, "wall_s": 1.0, "steps": STEPS, "launch": HEALTHY, **changes})


def found(*profiles: RankProfile, settings: Mapping[str, Any] | None = None, **plan: Any) -> dict[str, Finding]:
    facts = RunFacts(ranks=(), profiles=profiles, settings=settings or {}, plan=plan)
    return {finding.id: finding for finding in diagnose(facts)}


def test_a_healthy_profile_has_no_findings() -> None:
    overlap = (Overlap(axis="dp", total_s=0.3, exposed_s=0.04),)
    syncs = (SyncPoint(kind="item", phase="other", calls=20, total_s=0.0),)
    memory = MemoryProfile(peak_bytes=500, limit_bytes=1000)
    healthy = profile(overlaps=overlap, syncs=syncs, memory=memory, recompute_s=0.04)
    assert found(healthy, profile(rank=1)) == {}
    assert found(RankProfile()) == {}
    assert found() == {}


@pytest.mark.parametrize(
    ("exposed", "severity"), [(0.04, None), (0.059, None), (0.07, "warning"), (0.11, "warning"), (0.13, "critical")]
)
def test_exposed_gradient_sums(exposed: float, severity: str | None) -> None:
    row = Collective(
        name="all_reduce",
        axis="dp",
        group_size=2,
        calls=40,
        num_bytes=2**30,
        total_s=0.2,
        algorithm_bytes_per_s=5e9,
        bus_bytes_per_s=5e9,
    )
    overlap = (Overlap(axis="dp", total_s=0.2, exposed_s=exposed), Overlap(axis="tp", total_s=0.2, exposed_s=0.2))
    finding = found(profile(overlaps=overlap, collectives=(row,))).get("COMM02")
    assert (None if finding is None else finding.severity) == severity
    if finding is not None:
        assert finding.cost_frac == pytest.approx(exposed)
        assert "bus bandwidth 5 GB/s" in finding.evidence[1]


def test_who_waits_for_a_slow_rank_is_not_the_network() -> None:
    waits, slow = (Overlap(axis="dp", total_s=0.5, exposed_s=share) for share in (0.45, 0.02))
    assert "COMM02" not in found(profile(overlaps=(waits,)), profile(rank=1, overlaps=(slow,)))


@pytest.mark.parametrize(("work", "severity"), [(0.45, None), (0.35, "warning"), (0.1, "critical")])
def test_small_operators_on_the_cpu(work: float, severity: str | None) -> None:
    launch = LaunchTime(compute_s=0.9, work_s=work, num_operators=5_000, num_kernels=0, num_short=4_000)
    finding = found(profile(launch=launch)).get("LAUNCH01")
    assert (None if finding is None else finding.severity) == severity
    if finding is not None:
        assert finding.cost_frac == pytest.approx(0.9 - work)
        assert finding.evidence[1] == "500 operators a step, 400 of which take less than 10 µs"
    # recording the stacks makes the calls longer
    assert "LAUNCH01" not in found(profile(launch=launch, has_stacks=True))


@pytest.mark.parametrize(
    ("work", "short", "severity"),
    [(0.88, 900, None), (0.85, 900, "warning"), (0.7, 900, "critical"), (0.7, 400, None)],
)
def test_small_kernels(work: float, short: int, severity: str | None) -> None:
    launch = LaunchTime(compute_s=0.9, work_s=work, num_operators=5_000, num_kernels=1_000, num_short=short)
    finding = found(profile(launch=launch, device="cuda")).get("LAUNCH01")
    assert (None if finding is None else finding.severity) == severity


def test_a_larger_micro_batch_where_memory_allows_it() -> None:
    launch = LaunchTime(compute_s=0.9, work_s=0.3, num_operators=5_000, num_kernels=0, num_short=4_000)
    batch = {"micro_batch": 4, "accumulation": 8}
    room = MemoryProfile(peak_bytes=500, limit_bytes=1000, at_peak={"activations": 300})
    full = MemoryProfile(peak_bytes=600, limit_bytes=1000, at_peak={"activations": 300})
    finding = found(profile(launch=launch, memory=room), batch=batch)["LAUNCH01"]
    assert (finding.patch, finding.expected_gain) == ({"plan.micro_batch": 8}, pytest.approx(0.3))
    roomy = MemoryProfile(peak_bytes=100, limit_bytes=1000, at_peak={"activations": 50})
    # 60 % of calls are 43 % with half of them, and 27 % with a quarter: below three quarters of the threshold
    assert found(profile(launch=launch, memory=roomy), batch=batch)["LAUNCH01"].patch == {"plan.micro_batch": 16}
    assert found(profile(launch=launch, memory=MemoryProfile()), batch=batch)["LAUNCH01"].patch == {}
    assert found(profile(launch=launch, memory=full), batch=batch)["LAUNCH01"].patch == {}
    assert found(profile(launch=launch, memory=room), batch=batch | {"accumulation": 1})["LAUNCH01"].patch == {}


def with_ranks(
    folder: Path, *profiles: RankProfile, gib: float, device: str = "cpu", **plan: Any
) -> dict[str, Finding]:
    """Findings of a run with two ranks on one host, which have used ``gib`` of 16 GiB each, and these profiles."""
    memory = {"mem/peak_bytes": gib * 2**30, "mem/limit_bytes": 2**34}
    start = {"host": "n1", "device": device}
    run = write_events(folder, lambda rank, step: {"forward": 0.1}, start=start, fields=memory)
    facts = replace(read_run(run), profiles=profiles, plan={"sync": {"kind": "dist_sync"}, **plan})
    return {finding.id: finding for finding in diagnose(facts)}


@pytest.mark.parametrize(
    ("gib", "device", "micro_batch"),
    [
        (1.0, "cpu", 16),
        (6.0, "cpu", 8),  # 12 GiB, and 1 GiB for each micro-batch more: 85 % are 13.6 GiB
        (6.5, "cpu", 0),
        (7.8, "cpu", 0),
        (7.8, "cuda:0", 16),
        (15.6, "cuda:0", 0),
    ],
)
def test_the_memory_of_the_run_limits_a_larger_micro_batch(
    tmp_path: Path, gib: float, device: str, micro_batch: int
) -> None:
    launch = LaunchTime(compute_s=0.9, work_s=0.3, num_operators=5_000, num_kernels=0, num_short=4_000)
    memory = MemoryProfile(peak_bytes=2**30, limit_bytes=2**34, at_peak={"activations": 2**29})
    seen = [profile(rank, launch=launch, memory=memory) for rank in (0, 1)]
    batch = {"micro_batch": 4, "accumulation": 8}
    finding = with_ranks(tmp_path / "both", *seen, gib=gib, device=device, batch=batch)["LAUNCH01"]
    assert finding.patch == ({"plan.micro_batch": micro_batch} if micro_batch else {})
    if device != "cpu":  # one profile does not tell how the other rank's memory grows
        finding = with_ranks(tmp_path / "one", seen[0], gib=gib, device=device, batch=batch)["LAUNCH01"]
        assert finding.patch == {}


@pytest.mark.parametrize(("calls", "severity"), [(20, None), (21, "warning"), (200, "warning"), (201, "critical")])
def test_reads_from_tensors(calls: int, severity: str | None) -> None:
    points = (
        SyncPoint(kind="item", phase="other", calls=calls, total_s=0.05, source="own.py:7"),
        SyncPoint(kind="item", phase="eval", calls=500, total_s=0.5, source="own.py:9"),
        SyncPoint(kind="tolist", phase="other", calls=500, total_s=0.5, source="unisono/train/metrics_reader.py:5"),
    )
    finding = found(profile(syncs=points, has_stacks=True)).get("SYNC01")
    assert (None if finding is None else finding.severity) == severity
    if finding is not None:
        assert finding.evidence[1] == f"own.py:7 (item): {calls / 10:.3g} a step"
        assert finding.cost_frac == pytest.approx(0.05)


def test_calls_of_reads_cost_reads_and_not_launches() -> None:
    """Of 5,000 operators 4,000 are 2,000 reads, of two operators each."""
    launch = LaunchTime(compute_s=0.9, work_s=0.1, num_operators=5_000, num_kernels=0, num_short=4_000)
    points = (SyncPoint(kind="item", phase="other", calls=2_000, total_s=0.05),)
    findings = found(profile(launch=launch, syncs=points))
    assert set(findings) == {"SYNC01"}
    assert findings["SYNC01"].cost_frac == pytest.approx(0.8 * 0.8)
    few = (SyncPoint(kind="item", phase="other", calls=500, total_s=0.05),)
    findings = found(profile(launch=launch, syncs=few))
    assert findings["SYNC01"].cost_frac == pytest.approx(0.8 * 0.2)
    assert findings["LAUNCH01"].cost_frac == pytest.approx(0.8 * 0.8)


def test_the_rank_that_reads_is_named() -> None:
    points = (SyncPoint(kind="item", phase="other", calls=500, total_s=0.05),)
    assert found(profile(), profile(rank=1, syncs=points))["SYNC01"].ranks == (1,)
    assert found(profile(syncs=points), profile(rank=1, syncs=points))["SYNC01"].ranks == ()


def test_reads_of_a_trace_without_steps_are_not_counted_by_step() -> None:
    points = (SyncPoint(kind="item", phase="other", calls=900, total_s=0.05),)
    assert "SYNC01" not in found(profile(syncs=points, num_steps=0))


@pytest.mark.parametrize(("skipped", "is_found"), [(3, True), (4, False), (14, False), (15, True)])
def test_reads_of_the_search_for_nan_are_not_the_users(tmp_path: Path, skipped: int, is_found: bool) -> None:
    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "skipped_step", "loss": "NaN", "grad_norm": "NaN"}] if step == skipped else []

    run = write_events(tmp_path, lambda rank, step: {"forward": 0.1}, extra=extra)
    points = (SyncPoint(kind="item", phase="other", calls=500, total_s=0.05),)
    facts = replace(read_run(run), profiles=(profile(syncs=points),))  # of steps 5 to 14
    assert ("SYNC01" in {finding.id for finding in diagnose(facts)}) == is_found


RECOMPUTES = {
    "recompute_s": 0.2,
    "memory": MemoryProfile(peak_bytes=200, limit_bytes=1000, at_peak={"activations": 100}),
}


@pytest.mark.parametrize(("share", "severity"), [(0.04, None), (0.06, "warning"), (0.15, "critical")])
def test_recompute_while_memory_is_free(share: float, severity: str | None) -> None:
    finding = found(profile(**RECOMPUTES | {"recompute_s": share})).get("RECOMP01")
    assert (None if finding is None else finding.severity) == severity


@pytest.mark.parametrize(
    ("blocks", "mode", "patch", "gain"),
    [
        (4, "full", {"plan.recompute": "none"}, 0.2),  # 20 % and 3 times 10 %
        (9, "full", {}, 0.0),  # no other mode removes the finding
        (9, "selective", {}, 0.0),
        (None, "full", {}, 0.0),
    ],
)
def test_less_recompute_as_memory_allows(blocks: int | None, mode: str, patch: dict[str, str], gain: float) -> None:
    settings = {} if blocks is None else {"model.num_layers": blocks}
    finding = found(profile(**RECOMPUTES), settings=settings, recompute={"mode": mode})["RECOMP01"]
    assert (finding.patch, finding.expected_gain) == (patch, pytest.approx(gain))


def test_recompute_in_full_memory_and_in_unknown_memory_is_none() -> None:
    assert found(profile(**RECOMPUTES | {"memory": MemoryProfile(peak_bytes=760, limit_bytes=1000)})) == {}
    assert found(profile(**RECOMPUTES | {"memory": MemoryProfile(peak_bytes=760)})) == {}


@pytest.mark.parametrize(
    ("gib", "device", "used"),
    [(5.0, "cpu", "62%"), (6.2, "cpu", None), (6.2, "cuda:0", "39%"), (12.2, "cuda:0", None), (1.0, "cpu", "25%")],
)
def test_recompute_where_ranks_share_their_memory(tmp_path: Path, gib: float, device: str, used: str | None) -> None:
    """Tensors of 2 GiB on each rank."""
    memory = MemoryProfile(peak_bytes=2**31, limit_bytes=2**34, at_peak={"activations": 2**30})
    seen = [profile(rank, recompute_s=0.2, memory=memory) for rank in (0, 1)]
    finding = with_ranks(tmp_path, *seen, gib=gib, device=device).get("RECOMP01")
    assert (None if finding is None else finding.evidence[1]) == (used and f"{used} of the memory is in use")


def test_compilations_after_the_first_steps() -> None:
    some = profile(rank=1, compiled=CompileCounts(compilations=3, total_s=0.4, graph_breaks=2))
    finding = found(profile(), some)["COMP01"]
    assert (finding.severity, finding.cost_frac, finding.ranks) == ("warning", 0.4, (1,))
    assert finding.evidence == ("3 compilations in 10 steps of steps 5 to 14, 0.4 s", "2 breaks of graphs")
    assert found(profile(compiled=CompileCounts(compilations=8)))["COMP01"].severity == "critical"


def test_compilations_of_a_foreign_trace_may_be_the_first() -> None:
    compiled = CompileCounts(compilations=9, total_s=0.98)
    finding = found(profile(is_foreign=True, compiled=compiled))["COMP01"]
    assert (finding.severity, finding.confidence) == ("warning", 0.4)
    assert "compiled again" not in finding.title
    assert "COMP01" in found(profile(is_foreign=True, compiled=compiled, num_steps=0, steps=()))
    assert "COMP01" not in found(profile(is_foreign=True, compiled=compiled, num_steps=1, steps=STEPS[:1]))


@pytest.mark.parametrize(("wait", "severity"), [(0.04, None), (0.06, "warning"), (0.3, "critical")])
def test_waits_for_a_loader_of_another_program(wait: float, severity: str | None) -> None:
    finding = found(profile(is_foreign=True, loader_wait_s=wait)).get("DATA01")
    assert (None if finding is None else finding.severity) == severity
    # a run is judged by its events
    assert "DATA01" not in found(profile(loader_wait_s=wait))


def test_a_foreign_trace_is_told_nothing_of_our_settings() -> None:
    launch = LaunchTime(compute_s=0.9, work_s=0.1, num_operators=5_000, num_kernels=0, num_short=4_000)
    points = (SyncPoint(kind="item", phase="other", calls=50, total_s=0.05),)
    overlap = (Overlap(axis="dp", total_s=0.2, exposed_s=0.2),)
    made = {"launch": launch, "syncs": points, "overlaps": overlap}
    ours, foreign = found(profile(**made)), found(profile(is_foreign=True, **made))
    assert "sync.bucket_bytes" in ours["COMM02"].advice
    assert "bucket_cap_mb" in foreign["COMM02"].advice
    assert "with_stack=True" in foreign["SYNC01"].evidence[-1]
    assert "plan." in ours["LAUNCH01"].advice
    for finding in foreign.values():
        assert "plan." not in finding.advice
        assert "--stacks" not in " ".join(finding.evidence)


def test_without_marks_of_steps_nothing_is_counted_by_step() -> None:
    launch = LaunchTime(compute_s=0.9, work_s=0.1, num_operators=5_000, num_kernels=0, num_short=4_000)

    def calls(num_steps: int) -> str:
        return found(profile(is_foreign=True, launch=launch, steps=(), num_steps=num_steps))["LAUNCH01"].evidence[1]

    assert calls(0) == "5,000 operators, 4,000 of which take less than 10 µs"
    assert calls(10) == "500 operators an update of the optimizer, 400 of which take less than 10 µs"


def test_sizes_that_accelerators_pad() -> None:
    odd = MatrixProduct(name="aten::mm", batch=1, m=4096, k=512, n=50257, calls=30, total_s=0.3)
    even = MatrixProduct(name="aten::mm", batch=1, m=4096, k=512, n=512, calls=30, total_s=0.4)
    small = MatrixProduct(name="aten::mm", batch=1, m=7, k=7, n=7, calls=30, total_s=0.01)
    kernels = (KernelTime(name="gemm", calls=9, total_s=0.8),)
    settings = {"model.vocab_size": 50257}
    finding = found(profile(products=(even, odd), kernels=kernels, device="cuda"), settings=settings)["UTIL02"]
    assert (finding.severity, finding.patch) == ("warning", {"model.vocab_size": 50304})
    assert found(profile(products=(odd, even), kernels=kernels, device="cuda"))["UTIL02"].severity == "critical"
    assert found(profile(products=(even, small), kernels=kernels, device="cuda")) == {}
    assert found(profile(products=(odd,))) == {}  # the CPU


@pytest.mark.parametrize(("kind", "code"), [("attention", "FUSE01"), ("norm", "FUSE02")])
def test_operators_that_a_fused_one_replaces(kind: str, code: str) -> None:
    def of(element_s: float) -> dict[str, Finding]:
        return found(
            profile(patterns=(Pattern(kind=kind, calls=4, total_s=0.5, element_s=element_s, example=("a", "b")),))
        )

    assert of(0.02) == {}
    assert (of(0.1)[code].severity, of(0.2)[code].severity) == ("warning", "critical")
    assert of(0.1)[code].cost_frac == pytest.approx(0.1)


def test_the_last_profile_of_a_run_is_judged(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06})
    for step, made in ((5, profile(compiled=CompileCounts(compilations=9))), (20, profile())):
        folder = profile_folder(run, step)
        folder.mkdir(parents=True)
        (folder / "rank-0.json").write_bytes(made.to_bytes())
    assert diagnose(read_run(run)) == []
    (profile_folder(run, 20) / "rank-0.json").write_bytes(b"{")
    facts = read_run(run)
    assert (diagnose(facts), len(facts.notes)) == ([], 1)
    for path in profile_folder(run, 20).iterdir():
        path.unlink()
    assert [finding.id for finding in diagnose(read_run(run))] == ["COMP01"]


def test_profiled_steps_are_no_readings_of_the_diagnosis(tmp_path: Path) -> None:
    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "profile", "step": step, "first_step": 10}] if step == 12 else []

    facts = read_run(write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06}, extra=extra))
    assert set(range(3, 41)) - set(facts.common_steps().tolist()) == {
        9,
        10,
        11,
        12,
        13,
    }  # 9 warms up, 13 waits for the stop


def test_a_foreign_trace(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for step in range(3):
        trace.step(step, 1000 * step, 1000).op("aten::mm", 1000 * step, 400)
        for at in range(4):
            trace.frame("own.py(4): accuracy", 1000 * step + 500 + 20 * at, 15)
            trace.op("aten::_local_scalar_dense", 1000 * step + 501 + 20 * at, 10)
    facts = read_trace_facts(trace.write(tmp_path / "trace.json.gz"))
    finding = next(finding for finding in diagnose(facts) if finding.id == "SYNC01")
    assert finding.evidence[1] == "own.py(4): accuracy (_local_scalar_dense): 4 a step"

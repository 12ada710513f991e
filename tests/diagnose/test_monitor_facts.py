"""What the monitor saw explains why a rank is slow, or why training waits for data; samples that are wrong say nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import COMPUTE, findings, only, together, write_events

from unisono.diagnose import Finding, read_run
from unisono.diagnose.monitor_facts import MIN_SAMPLES, read_monitor
from unisono.observe.events import MAX_COUNT

Sample = Callable[[int, int], Mapping[str, Any]]  # (rank, step) -> figures without ``sys/``


def sampled(sample: Sample, every: int = 4) -> Any:
    """A ``system`` event every few steps."""

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        figures = {f"sys/{name}": value for name, value in sample(rank, step).items()}
        return [{"kind": "system", **figures}] if step % every == 0 else []

    return extra


def slow_rank(folder: Path, sample: Sample, *, ranks: int = 4, **options: Any) -> Finding:
    """The finding of a run whose rank 2 is slow."""
    work = {rank: {**COMPUTE, "forward": 0.05 if rank == 2 else 0.02} for rank in range(ranks)}
    hosts = {"start_of": lambda rank: {"host": f"n{rank // 2}"}}
    found = only(folder, together(work), ranks=ranks, extra=sampled(sample), **{**hosts, **options})
    assert (found.id, found.ranks) == ("BAL01", (2,))
    return found


def test_the_host_of_a_slow_rank_is_named(tmp_path: Path) -> None:
    found = slow_rank(tmp_path, lambda rank, step: {"process_cpus": 1.0, "core_wait_frac": 0.01})
    assert "without waiting, rank 2 (host n1) takes 1.40 times as long" in found.evidence[0]
    assert len(found.evidence) == 3
    assert found.advice.startswith("look at that host")


def test_a_device_that_is_throttled(tmp_path: Path) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        slowed = rank == 2 and step % 20 != 0  # in 8 of 10 samples
        text = {"device_slowdowns": "hardware thermal slowdown" if step < 36 else "power brake"} if slowed else {}
        return {"device_throttled": float(slowed), **text, "device_clock_hz": 1e9 if rank == 2 else 1.9e9} | MAX_CLOCK

    found = slow_rank(tmp_path, sample)
    assert found.evidence[3:] == (
        "its device is throttled in 80% of the samples (hardware thermal slowdown), that of the other ranks in 0%",
        "the clock of its device is 50% of the highest, that of the other ranks 95%",
    )
    assert found.advice == "look at the cooling and the power of that device (unisono doctor shows its state)"


MAX_CLOCK = {"device_max_clock_hz": 2e9}


def test_devices_that_are_all_throttled_explain_no_slow_rank(tmp_path: Path) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        return {"device_throttled": 1, "device_slowdowns": "power brake", "device_clock_hz": 1e9} | MAX_CLOCK

    assert len(slow_rank(tmp_path, sample).evidence) == 3


def test_a_lower_clock_without_a_reason(tmp_path: Path) -> None:
    found = slow_rank(tmp_path, lambda rank, step: {"device_clock_hz": 1e9 if rank == 2 else 2e9} | MAX_CLOCK)
    assert found.evidence[3:] == ("the clock of its device is 50% of the highest, that of the other ranks 100%",)
    assert found.advice.startswith("look at why the clock")


def test_cores_that_others_take(tmp_path: Path) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        host = {"cpu_frac": 0.99 if rank == 2 else 0.4} if rank % 2 == 0 else {}
        return {"core_wait_frac": 0.45 if rank == 2 else 0.02, "process_cpus": 1.0, **host}

    found = slow_rank(tmp_path, sample)
    assert found.evidence[3:] == (
        "its training thread waits for a core for 45% of the time, that of the other ranks for 2%: other threads or processes "
        "take its cores; the processors of its host are busy for 99% of the time",
    )
    assert found.advice == "end what else runs on that host, or give the rank cores of its own"


@pytest.mark.parametrize(("busy", "own", "is_named"), [(0.97, 0.8, True), (0.5, 0.8, False), (0.97, 1.9, False)])
def test_cores_that_others_take_on_a_system_that_does_not_tell_waits(
    tmp_path: Path, busy: float, own: float, is_named: bool
) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        # rank 3 samples the host of ranks 2 and 3
        return {"process_cpus": own if rank == 2 else 2.0, **({"cpu_frac": busy} if rank in (0, 3) else {})}

    evidence = slow_rank(tmp_path, sample).evidence[3:]
    text = "its process keeps 0.8 CPUs busy, that of the other ranks 2: other processes take its cores; the processors of its "
    assert evidence == ((text + "host are busy for 97% of the time",) if is_named else ())


def test_the_host_of_another_rank_is_not_taken_for_one_that_is_not_known(tmp_path: Path) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        return {"process_cpus": 0.8 if rank == 2 else 2.0, **({"cpu_frac": 0.99} if rank == 0 else {})}

    found = slow_rank(tmp_path, sample, start_of=lambda rank: {})
    assert len(found.evidence) == 3
    assert "(host" not in found.evidence[0]


def test_what_was_measured_before_comes_with_it(tmp_path: Path) -> None:
    rates = {"start_of": lambda rank: {"host": "n", "baseline_flops_per_s": 1e12}}
    found = slow_rank(tmp_path, lambda rank, step: {"device_throttled": float(rank == 2)}, **rates)
    assert "throttled in 100%" in found.evidence[3]
    assert "the node itself is not that slow" in found.evidence[4]
    assert found.advice.startswith("look at the cooling")


def test_a_rank_that_became_slower_when_its_device_was_throttled(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        return together({0: COMPUTE, 1: {**COMPUTE, "other": 0.005 + 0.025 * (step > 50)}})(rank, step)

    def sample(rank: int, step: int) -> Mapping[str, Any]:
        slowed = rank == 1 and step > 50
        return {"device_throttled": float(slowed), **({"device_slowdowns": "power brake"} if slowed else {})}

    found = only(tmp_path, times, steps=62, extra=sampled(sample, every=2), start={"host": "n7"})
    assert (found.id, found.ranks) == ("BAL02", (1,))
    assert "rank 1 (host n7) takes 1.33 times as long" in found.evidence[0]
    assert found.evidence[2:] == (
        "its device is throttled in 100% of the samples (power brake), that of earlier steps in 0%",
    )
    assert found.advice.startswith("look at the cooling")


@pytest.mark.parametrize(
    ("busy", "workers", "patch", "advice"),
    [
        (0.4, 2, {"loader.num_workers": 3}, "more workers: the host has idle cores"),
        (0.8, 2, {"loader.num_workers": 3}, "more workers, if the host has idle cores; else "),
        (
            0.97,
            2,
            {},
            "no core is left for more workers: data that is tokenised, decoded or transformed before the run",
        ),
        (0.97, -1, {}, "no core is left for more workers: "),
        (0.4, -1, {}, "loader.num_workers=-1 has added the workers that made steps faster: "),
        (0.97, 0, {"loader.num_workers": -1}, "let workers make batches ahead"),
    ],
)
def test_a_data_bound_run_gets_more_workers_where_there_are_cores(
    tmp_path: Path, busy: float, workers: int, patch: Mapping[str, Any], advice: str
) -> None:
    settings = {"loader.num_workers": workers, "loader.worker_kind": "auto" if workers < 0 else "process"}
    times = {**COMPUTE, "data_wait": 0.025}
    extra = sampled(lambda rank, step: {"cpu_frac": busy})
    found = only(tmp_path, lambda rank, step: times, ranks=1, settings=settings, extra=extra)
    assert (found.id, found.patch) == ("DATA01", patch)
    assert found.advice.startswith(advice)
    assert f"the processors of the host are busy for {busy:.0%} of the time" in found.evidence


def test_more_workers_do_not_help_a_disk(tmp_path: Path) -> None:
    figures = {"cpu_frac": 0.3, "iowait_frac": 0.4, "disk_read_bytes_per_s": 1.5e8}
    found = only(
        tmp_path,
        lambda rank, step: {**COMPUTE, "data_wait": 0.025},
        ranks=1,
        settings={"loader.num_workers": 2, "loader.worker_kind": "process"},
        extra=sampled(lambda rank, step: figures),
    )
    assert (found.id, found.patch) == ("DATA01", {})
    assert found.advice.startswith("more workers would wait for the disk too: data packed before the run")
    assert (
        "the processors of the host are busy for 30% of the time, and wait for the disk for 40% of it; 150 MB/s are read"
        in found.evidence
    )


def test_the_busiest_host_decides(tmp_path: Path) -> None:
    found = only(
        tmp_path,
        lambda rank, step: {**COMPUTE, "data_wait": 0.025},
        settings={"loader.num_workers": 2},
        extra=sampled(lambda rank, step: {"cpu_frac": 0.2 + 0.75 * rank}),
        start_of=lambda rank: {"host": f"n{rank}"},
    )
    assert found.patch == {}
    assert "the processors of the busiest host are busy for 95% of the time" in found.evidence


def test_a_few_samples_say_nothing(tmp_path: Path) -> None:
    def sample(rank: int, step: int) -> Mapping[str, Any]:
        return {"device_throttled": float(rank == 2), "core_wait_frac": 0.9 * (rank == 2)} if step > 32 else {}

    assert len(slow_rank(tmp_path, sample).evidence) == 3
    assert MIN_SAMPLES > 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 10**400, "much", None, [1], {"a": 1}, True, "NaN"])
@pytest.mark.parametrize(
    "name", ["device_throttled", "core_wait_frac", "cpu_frac", "device_slowdowns", "device_max_clock_hz"]
)
def test_samples_of_others_are_no_trouble(tmp_path: Path, name: str, value: Any) -> None:
    figures = {"device_clock_hz": 1e9, "device_max_clock_hz": 0.0, "process_cpus": 1.0, name: value}
    assert len(slow_rank(tmp_path, lambda rank, step: figures, ranks=3).evidence) == 3


@pytest.mark.parametrize("step", [None, "x", -1, 2.5, 10**30, MAX_COUNT])
def test_a_sample_of_no_step_is_left_out(step: Any) -> None:
    samples = read_monitor([{"kind": "system", "step": step, "sys/cpu_frac": 0.5}], 0)
    assert (len(samples.steps), samples.slowdowns) == (0, ())


def test_samples_are_those_of_the_last_attempt_after_its_first_readings(tmp_path: Path) -> None:
    write_events(tmp_path, lambda rank, step: COMPUTE, ranks=1, extra=sampled(lambda rank, step: {"cpu_frac": 0.5}, 1))
    (rank,) = read_run(tmp_path).ranks
    assert rank.monitor.steps.tolist() == list(range(3, 41))
    assert rank.monitor.mean("cpu_frac") == pytest.approx(0.5)
    assert rank.monitor.between(10, 19).steps.tolist() == list(range(10, 20))
    assert rank.monitor.mean("process_cpus") is None


@pytest.mark.parametrize("host", [3, None, ["n"], {"a": 1}])
def test_a_host_that_is_no_name(tmp_path: Path, host: Any) -> None:
    found = slow_rank(tmp_path, lambda rank, step: {}, start_of=lambda rank: {"host": host})
    assert "(host" not in found.evidence[0]


def test_a_healthy_run_stays_without_findings_whatever_the_load(tmp_path: Path) -> None:
    load = {"cpu_frac": 1.0, "device_throttled": 1.0, "core_wait_frac": 0.9}
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=sampled(lambda rank, step: load)) == []

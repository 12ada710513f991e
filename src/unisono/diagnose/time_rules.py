"""Rules of what makes steps longer.

Costs are shares of the time of a step. Ranks that step together meet in every step: the rank that waits least for communication
arrived last. Its wait is the cost of communication; what the others wait beyond that is the cost of its slowness. So a slow rank
is not mistaken for a slow network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.diagnose.figures import (
    DATA_WAIT,
    MAX_SAMPLES,
    MIN_READINGS,
    busy_frac,
    chosen_ranks,
    excess_over_others,
    has_enough_readings,
    highest_of_hosts,
    host_busy_frac,
    last_arriver_wait_frac,
    lower_median,
    lower_medians,
    milliseconds,
    named_host,
    named_ranks,
    plan_group,
    setting_text,
    severity_of,
    shares_of,
    standing_out,
)
from unisono.diagnose.finding import Finding
from unisono.diagnose.monitor_facts import MIN_SAMPLES, SATURATED_FRAC, HostCause, host_cause
from unisono.diagnose.run_facts import COMPUTE_PHASES, LOADER_STAGES, Floats, RunFacts
from unisono.diagnose.server_rules import busiest_server
from unisono.observe.events import MAX_COUNT
from unisono.observe.link_events import uses_by_axis
from unisono.observe.meters import COMM_AXES

_STEADY_FRAC: Final = 0.7  # of the readings in which a rank is slower than the others, for it to be called slow
_MOST_OF_WAIT: Final = 0.8
_FEW_FRAC: Final = 0.05  # of the readings
_MANY_READINGS: Final = 20  # of which a few are no chance
_SAME_FRAC: Final = 0.1  # two shares that differ by less count as equal
_LIKE_WORST: Final = 0.5  # of the slowdown of the worst rank, for another rank to be named with it
_UNSAMPLED_CONFIDENCE: Final = 0.4  # of a slowdown of which the monitor says nothing
_MUCH_SLOWER: Final = 0.75  # the fastest part of the run over the last one
_LEAST_SLOWDOWN: Final = 0.03  # of a step now; less does not matter
_DISK_BOUND_FRAC: Final = 0.1  # of the time of a host's processors, idle with a request to the disk under way
_SHOWN_WAIT_FRAC: Final = 0.05
_IDLE_FRAC: Final = 0.7  # of a host's processors that are busy, below which more workers have cores
_LEAST_BYTES: Final = 1000  # a step: less is sums of single numbers
_BUBBLE: Final = (0.15, 0.30)  # warning, critical
_SAVE_STALL: Final = (0.01, 0.05)
# shares of the cost that a patch is expected to bring
_OF_SAVES: Final = 0.5  # what stays is the copy to the host's memory
_OF_SAVES_ON_CPU: Final = 0.25  # where the thread that writes also takes processors from the steps
_OF_COLLECTIONS: Final = 0.9
_SAVE_STALL_AIM: Final = 0.005  # what rarer saves shall leave: saves do not all take equally long
_COMM_ADVICE: Final = {
    "dp": "more samples per rank and step (plan.global_batch) make fewer exchanges of the same size; plan.compression makes "
    "those of gradients smaller",
    "cp": "longer parts of the sequence per rank (a smaller plan.cp), on one host",
    "tp": "ranks of tp on one host, or a smaller plan.tp",
    "ep": "ranks of ep on one host, or a smaller plan.ep",
    "pp": "stages that share no parameters (untied embeddings)",
}
_PAUSE_ADVICE: Final = (
    "find what stands still at these steps: workers that start (loader.worker_kind=thread or process tries no other kind), a "
    "disk or network that others use, a transform that waits"
)
_MOST_ADDED: Final = 4  # times as many workers: what more would bring is seen in the next run
_LESS_WORK: Final = (
    "data that is tokenised, decoded or transformed before the run (unisono data pack), or cheaper transforms"
)
_PHASE_WORDS: Final = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "h2d": "copies to the device",
    "other": "code between steps",
}
_STAGE_NAMES: Final = {"read": "reading", "transform": "transforms", "collate": "collating"}
_STAGE_ADVICE: Final = {
    "read": "data packed before the run (unisono data pack), a faster disk, or data.cache_gib for slow storage",
    "transform": "cheaper transforms, or data that is transformed before the run",
    "collate": "a cheaper collate_fn, or samples of one size, which are stacked",
}


def data_bound(facts: RunFacts) -> Iterator[Finding]:
    """DATA01: all ranks wait for data. DATA02: one rank waits longer than the others."""
    if not has_enough_readings(facts):
        return
    shares = shares_of(facts, "data_wait")
    cost = lower_median(shares)
    if severity := severity_of(cost, *DATA_WAIT):
        pauses = _pauses(facts)
        steady_cost, advice = cost if pauses is None else pauses.wait_frac_without, _PAUSE_ADVICE
        patch: dict[str, Any] = {}
        gain = 0.0
        if pauses is None or steady_cost >= DATA_WAIT[0]:
            patch, gain, advice = _loader_patch(facts, steady_cost)
        yield Finding(
            id="DATA01",
            title="training waits for data",
            severity=severity,
            cost_frac=cost,
            confidence=0.9,
            evidence=(
                f"each step waits {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)} for its batch{_of_ranks(shares)}",
                *(() if pauses is None else (pauses.text,)),
                *_loader_work(facts),
                *_busy_text(facts),
                *setting_text(facts, "loader.num_workers"),
            ),
            advice=advice,
            patch=patch,
            expected_gain=gain if pauses is None else gain * pauses.other_time_frac,
        )
    excess = excess_over_others(shares)
    worst = int(excess.argmax())
    if severity := severity_of(float(excess[worst]), 0.10, 0.20):
        ranks = chosen_ranks(facts, excess >= 0.10)
        yield Finding(
            id="DATA02",
            title=f"{named_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} longer for data than the others",
            severity=severity,
            cost_frac=float(excess[worst]),
            confidence=0.9,
            ranks=ranks,
            evidence=(
                f"rank {facts.rank_numbers[worst]} waits {milliseconds(facts, shares[worst])} a step for data, the others "
                f"{milliseconds(facts, float(shares[worst] - excess[worst]))}; each step takes {milliseconds(facts, 1.0)}",
            ),
            advice="compare the disk or network storage of that host, and the sizes of its samples, with the others'",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pauses:
    """The few readings that have most of the wait for data: they have a cause of their own.

    Attributes:
        text: Them, in words.
        wait_frac_without: The wait's share of the time of the other readings.
        other_time_frac: The share of the time that the other readings have.
    """

    text: str
    wait_frac_without: float
    other_time_frac: float


def _pauses(facts: RunFacts) -> _Pauses | None:
    """The pauses of the first rank; None where its wait is spread over many readings."""
    rank = facts.ranks[0]
    waits, wall_s = rank.phase_s["data_wait"], rank.wall_s
    order = np.argsort(-waits, kind="stable")
    count = int(np.searchsorted(np.cumsum(waits[order]), _MOST_OF_WAIT * waits.sum())) + 1
    if len(waits) < _MANY_READINGS or count > _FEW_FRAC * len(waits):
        return None
    ends = ", ".join(str(step) for step in sorted(rank.steps[order[: min(count, 5)]].tolist()))
    others = order[count:]
    return _Pauses(
        text=f"{_MOST_OF_WAIT:.0%} of that is in {count} of {len(waits)} readings, which end with step "
        f"{ends}{', …' if count > 5 else ''}: pauses, such as workers that start or storage that stands still, rather than "
        "slow work",
        wait_frac_without=float(waits[others].sum() / max(1e-12, wall_s[others].sum())),
        other_time_frac=float(wall_s[others].sum() / max(1e-12, wall_s.sum())),
    )


def _loader_work(facts: RunFacts) -> Iterator[str]:
    """Time of the loader's workers for a batch, by stage, as the mean over ranks; nothing where it is not known."""
    total = _stage_shares(facts)
    if total:
        stages = ", ".join(f"{_STAGE_NAMES[stage]} {milliseconds(facts, share)}" for stage, share in total.items())
        yield f"the loader's work on it: {stages}"


def _busy_text(facts: RunFacts) -> Iterator[str]:
    busy = busy_frac(facts.ranks)
    if busy is not None:
        hosts = len({rank.host for rank in facts.ranks})
        text = f"the processors of the {'host' if hosts == 1 else 'busiest host'} are busy for {busy:.0%} of the time"
        waits = highest_of_hosts(facts.ranks, "iowait_frac") or 0.0
        if waits >= _SHOWN_WAIT_FRAC:
            rate = highest_of_hosts(facts.ranks, "disk_read_bytes_per_s") or 0.0
            text += f", and wait for the disk for {waits:.0%} of it; {rate / 1e6:,.3g} MB/s are read"
        yield text


def _stage_shares(facts: RunFacts) -> dict[str, float]:
    """Time of the loader's workers in each stage over the time of a step, most first; empty where none is known."""
    ranks = [rank for rank in facts.ranks if rank.loader_s and rank.wall_s.sum() > 0]
    shares = {
        stage: float(np.mean([rank.loader_s[stage].sum() / rank.wall_s.sum() for rank in ranks])) if ranks else 0.0
        for stage in LOADER_STAGES
    }
    return {stage: share for stage, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}


def _loader_patch(facts: RunFacts, cost: float) -> tuple[dict[str, Any], float, str]:
    """Settings that hide the wait, the share of a step's time that they save, and advice."""
    workers = facts.settings.get("loader.num_workers")
    compute, busy = 1.0 - cost, busy_frac(facts.ranks)
    if workers == 0:
        # one worker makes the next batch while this one is computed: at least that much of the wait is hidden
        return (
            {"loader.num_workers": -1},
            min(cost, compute),
            "let workers make batches ahead: loader.num_workers=-1 finds kind and number while running",
        )
    if busy is not None and busy >= SATURATED_FRAC:
        stage = next(iter(_stage_shares(facts)), "")
        advice = _STAGE_ADVICE["collate"] if stage == "collate" else _LESS_WORK
        return {}, 0.0, f"no core is left for more workers: {advice}"
    waits_for_disk = highest_of_hosts(facts.ranks, "iowait_frac")
    if waits_for_disk is not None and waits_for_disk >= _DISK_BOUND_FRAC:
        return {}, 0.0, f"more workers would wait for the disk too: {_STAGE_ADVICE['read']}"
    if isinstance(workers, int) and workers > 0:
        # the workers are busy all the time, so they set the pace: add workers until the computation does
        wanted = math.ceil(1.1 * workers / compute) if compute > 0 else _MOST_ADDED * workers
        more = max(workers + 1, min(wanted, _MOST_ADDED * workers))
        return (
            {"loader.num_workers": more},
            0.9 * (1.0 - max(compute, workers / more)),
            "more workers: the host has idle cores"
            if busy is not None and busy < _IDLE_FRAC
            else f"more workers, if the host has idle cores; else {_stage_advice(facts)}",
        )
    if workers == -1:
        return {}, 0.0, f"loader.num_workers=-1 has added the workers that made steps faster: {_stage_advice(facts)}"
    return {}, 0.0, f"workers that make batches ahead, as many as hide it: {_stage_advice(facts)}"


def _stage_advice(facts: RunFacts) -> str:
    """Advice that shortens the longest stage of the loader's work."""
    stage = next(iter(_stage_shares(facts)), "")
    return _STAGE_ADVICE.get(stage, f"{_STAGE_ADVICE['transform']}; or {_STAGE_ADVICE['read']}")


def copy_bound(facts: RunFacts) -> Iterator[Finding]:
    """H2D01: steps wait for copies of batches to the device."""
    if not has_enough_readings(facts):
        return
    cost = lower_median(shares_of(facts, "h2d"))
    if severity := severity_of(cost, 0.03, 0.10):
        yield Finding(
            id="H2D01",
            title="steps wait for copies to the device",
            severity=severity,
            cost_frac=cost,
            confidence=0.8,
            evidence=(
                f"copying a batch takes {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)}",
                *setting_text(facts, "loader.num_workers"),
            ),
            advice="smaller batches in bytes: integers and uint8 images, which the model converts on the device; "
            "loader.num_workers=-1, whose batches are copied ahead from page-locked memory",
        )


def exposed_communication(facts: RunFacts) -> Iterator[Finding]:
    """COMM01: ranks wait for communication that no computation hides, without the wait for a slow rank."""
    if not has_enough_readings(facts) or len(facts.ranks) < 2 or busiest_server(facts) is not None:  # SRV01
        return
    if facts.steps_together:
        cost = last_arriver_wait_frac(facts, "comm_exposed")
    else:
        cost = lower_median(shares_of(facts, "comm_exposed"))
    if severity := severity_of(cost, 0.10, 0.25):
        axes = _axis_shares(facts)
        axis, *_ = axes or ["dp"]
        mesh = [f"{name} {size}" for name, size in _mesh(facts) if size > 1]
        yield Finding(
            id="COMM01",
            title=f"steps wait for communication along {axis}" if axes else "steps wait for communication",
            severity=severity,
            cost_frac=cost,
            confidence=0.9 if axes or len(mesh) <= 1 else 0.7,
            evidence=(
                f"each step waits {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)} for communication that no "
                "computation hides" + (f"; mesh: {', '.join(mesh)}" if mesh else ""),
                *(
                    [f"by axis: {', '.join(f'{name} {milliseconds(facts, share)}' for name, share in axes.items())}"]
                    if axes
                    else []
                ),
                *_traffic_texts(facts),
            ),
            advice=_COMM_ADVICE[axis],
        )


def _axis_shares(facts: RunFacts) -> dict[str, float]:
    """Share of each axis in the time of a step, the largest first, on the rank that waits least in each reading."""
    if not facts.steps_together:
        return {}
    least = facts.phase_s("comm_exposed").argmin(axis=0)
    readings, total = np.arange(len(least)), facts.wall_s().mean(axis=0).sum()
    shares = {axis: float(facts.phase_s(f"comm_exposed_{axis}")[least, readings].sum() / total) for axis in COMM_AXES}
    return {axis: share for axis, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}


def _traffic_texts(facts: RunFacts) -> Iterator[str]:
    """Traffic by axis, of the rank that sends most along it."""
    of_ranks = [uses_by_axis(rank.axes) for rank in facts.ranks]
    for axis in COMM_AXES:
        known = [uses[axis] for uses in of_ranks if axis in uses]
        if not known:
            continue
        use = max(known, key=lambda use: use.wire_bytes)
        main = use.main
        if use.wire_bytes < _LEAST_BYTES * main.steps:
            continue
        where = f"{main.transport}, {main.ranks} ranks" + (f" on {main.hosts} hosts" if main.hosts > 1 else "")
        text = (
            f"{axis}: {use.wire_bytes / main.steps / 1e6:.3g} MB a step over {where}; "
            f"{use.wire_bytes / main.wall_s / 1e6:,.3g} MB/s"
        )
        if use.expected_s:
            rate = use.wire_bytes / use.expected_s
            text += f", {use.used_frac:.0%} of the {rate / 1e6:,.3g} MB/s that unisono doctor --bench measured"
        yield text


def pipeline_bubble(facts: RunFacts) -> Iterator[Finding]:
    """PP01: every stage waits for the others, because there are few micro-batches."""
    if not has_enough_readings(facts) or not facts.steps_together:
        return
    cost = last_arriver_wait_frac(facts, "bubble")
    if severity := severity_of(cost, *_BUBBLE):
        patch, gain, formula = _bubble_patch(facts, cost)
        yield Finding(
            id="PP01",
            title="pipeline stages wait for each other",
            severity=severity,
            cost_frac=cost,
            confidence=0.8,
            evidence=(
                f"the stage that waits least waits {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)}",
                *formula,
            ),
            advice="more micro-batches (a smaller plan.micro_batch, or a larger plan.global_batch), or a schedule with shorter "
            "bubbles (plan.schedule: interleaved, zbv)",
            patch=patch,
            expected_gain=gain,
        )


def _bubble_patch(facts: RunFacts, cost: float) -> tuple[dict[str, Any], float, tuple[str, ...]]:
    """More micro-batches, the share of a step's time that they save, and what the schedule itself costs.

    The idle share of gpipe and 1f1b, whose stages take equally long, is that of Narayanan et al. 2021, section 2.2.
    """
    batch, stages = plan_group(facts, "batch"), plan_group(facts, "mesh").get("pp")
    passes, micro_batch = batch.get("accumulation"), batch.get("micro_batch")
    sizes = (stages, passes, micro_batch)
    if plan_group(facts, "pipeline").get("schedule") not in ("gpipe", "1f1b"):
        return {}, 0.0, ()
    if not all(isinstance(size, int) and 0 < size < MAX_SAMPLES for size in sizes):
        return {}, 0.0, ()
    stages, passes, micro_batch = cast("tuple[int, int, int]", sizes)

    def idle_frac(micro_batch_size: int) -> float:
        return (stages - 1) / (passes * micro_batch // micro_batch_size + stages - 1)

    expected = idle_frac(micro_batch)
    formula = (
        f"{stages} stages that take equally long are idle for {expected:.0%} of a step of {passes} micro-batches",
    )
    parts = [size for size in range(micro_batch - 1, 0, -1) if micro_batch % size == 0]
    if not parts or not expected:
        return {}, 0.0, formula
    smaller = next((size for size in parts if idle_frac(size) < _BUBBLE[0]), parts[-1])
    return {"plan.micro_batch": smaller}, cost * (1 - idle_frac(smaller) / expected), formula


def stragglers(facts: RunFacts) -> Iterator[Finding]:
    """BAL01: one rank computes longer than the others, which wait for it."""
    if not has_enough_readings(facts) or len(facts.ranks) < 2 or not facts.steps_together:
        return
    compute_s = facts.phase_s(*COMPUTE_PHASES)
    totals = compute_s.sum(axis=1)
    scores = totals.min() / totals
    slow_in = (compute_s > 1.05 * lower_medians(compute_s)).mean(axis=1)  # share of the readings
    is_slow = (scores < 0.9) & (slow_in >= _STEADY_FRAC)
    if not is_slow.any():
        return
    excess = np.where(is_slow, excess_over_others(totals), 0.0)
    worst = int(excess.argmax())
    extra = {phase: excess_over_others(facts.phase_s(phase).sum(axis=1))[worst] for phase in COMPUTE_PHASES}
    phase = max(extra, key=lambda name: extra[name])
    ranks = chosen_ranks(facts, is_slow)
    cost = float(excess[worst] / facts.wall_s().mean(axis=0).sum())
    cause = _host_cause(facts, worst, ~is_slow)
    measured, advice = _baselines(facts, worst, int(totals.argmin()), float(scores[worst]), cause)
    if phase == "other" and not cause.advice:
        advice = f"look at what that rank does between steps: the body of the loop, callbacks; else {advice}"
    yield Finding(
        id="BAL01",
        title=f"{named_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} slower than the others",
        severity="critical" if scores[worst] < 0.75 else "warning",
        cost_frac=cost,
        confidence=float(slow_in[worst]),
        ranks=ranks,
        evidence=(
            f"without waiting, rank {facts.rank_numbers[worst]}{named_host(facts.ranks[worst])} takes {1 / scores[worst]:.2f} "
            "times as long for a step as the fastest rank",
            f"{milliseconds(facts, cost)} of {milliseconds(facts, 1.0)} per step, most of it in {_PHASE_WORDS.get(phase, phase)}",
            f"it is slower than the others in {slow_in[worst]:.0%} of the readings",
            *cause.evidence,
            *measured,
        ),
        advice=advice,
    )


def _host_cause(facts: RunFacts, slow: int, others: NDArray[np.bool_]) -> HostCause:
    """What the monitor saw on the rank of the row ``slow`` and not on the ``others`` [ranks]."""
    rank = facts.ranks[slow]
    usual = [other.monitor for other, is_other in zip(facts.ranks, others, strict=True) if is_other]
    return host_cause(rank.monitor, usual, host_busy_frac(facts, rank), "of the other ranks")


def _baselines(facts: RunFacts, slow: int, fast: int, score: float, cause: HostCause) -> tuple[tuple[str, ...], str]:
    """Evidence from what ``unisono doctor --bench`` measured on the nodes of the rows ``slow`` and ``fast``, and advice."""
    advice = cause.advice or (
        "look at that host: clocks and throttling, other processes, cores of the rank; with a pipeline, at the layers of its "
        "stage"
    )
    rates = [facts.ranks[row].baseline_flops_per_s for row in (slow, fast)]
    if not all(rates):
        return (), advice
    ratio, text = rates[0] / rates[1], " and ".join(f"{rate / 1e12:.3g}" for rate in rates)
    measured = f"unisono doctor --bench measured {text} TFLOP/s on the nodes of ranks {{}} and {{}}"
    measured = measured.format(facts.rank_numbers[slow], facts.rank_numbers[fast])
    if ratio <= score + _SAME_FRAC:
        return (
            f"{measured}: that node was as slow before",
        ), "another node for that rank, or one of the same kind for all"
    return (f"{measured}: the node itself is not that slow",), advice


def own_slowdown(facts: RunFacts) -> Iterator[Finding]:
    """BAL02: a rank computes longer for a step now than it did earlier in the run."""
    if not has_enough_readings(facts) or len(facts.common_steps()) < 5 * MIN_READINGS:
        return
    compute_s = facts.phase_s(*COMPUTE_PHASES)
    parts = np.array_split(compute_s, 5, axis=1)
    medians = np.array([np.median(part, axis=1) for part in parts])  # [parts, ranks]
    best, now = medians[:-1].min(axis=0), medians[-1]
    scores = best / np.maximum(now, 1e-12)
    slow_in = (parts[-1] > 1.05 * best[:, None]).mean(axis=1)  # share of the last readings
    is_slow = (scores < 0.9) & (slow_in >= _STEADY_FRAC)
    if not is_slow.any():
        return
    worst = int(np.where(is_slow, now - best, 0.0).argmax())
    last_wall_s = np.array_split(facts.wall_s().mean(axis=0), 5)[-1]
    cost = float((now - best)[worst] / last_wall_s.mean())
    if cost < _LEAST_SLOWDOWN:
        return
    ranks = chosen_ranks(facts, is_slow & (now - best >= _LIKE_WORST * (now - best)[worst]))
    rank, since = facts.ranks[worst], int(np.array_split(facts.common_steps(), 5)[-1][0])
    now_samples, usual = rank.monitor.between(since, MAX_COUNT), rank.monitor.between(0, since - 1)
    cause = host_cause(now_samples, [usual], host_busy_frac(facts, rank), "of earlier steps")
    # a busy host slows all that runs on it, and only samples tell the run's own slowness from that
    is_sampled = len(now_samples.steps) >= MIN_SAMPLES
    if not is_sampled and scores[worst] >= _MUCH_SLOWER:
        return
    yield Finding(
        id="BAL02",
        title="steps take longer than earlier in the run",
        severity="critical" if scores[worst] < _MUCH_SLOWER and is_sampled else "warning",
        cost_frac=min(cost, 1.0),
        confidence=(0.8 if is_sampled else _UNSAMPLED_CONFIDENCE) * float(slow_in[worst]),
        ranks=ranks if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"without waiting, rank {rank.rank}{named_host(rank)} takes {1 / scores[worst]:.2f} times as long for a step as in "
            "the fastest fifth of the run",
            f"that is {cost:.0%} of the time of a step now",
            *cause.evidence,
            *([] if is_sampled else [_unsampled_text(len(now_samples.steps))]),
        ),
        advice=cause.advice
        or "look at that host: clocks and throttling (unisono top), other processes; and at what grows with the steps: lists, "
        "caches, sequences that become longer",
    )


def _unsampled_text(num_samples: int) -> str:
    have = "there are no samples" if not num_samples else f"there are fewer than {MIN_SAMPLES} samples"
    return f"the host may be busy with something else: {have} of the monitor (observe.monitor_every_s) of these steps"


def garbage_collection(facts: RunFacts) -> Iterator[Finding]:
    """GC01: Python's garbage collector interrupts the steps."""
    if not has_enough_readings(facts):
        return
    shares = np.array([rank.gc_s.sum() / rank.wall_s.sum() if len(rank.gc_s) else 0.0 for rank in facts.ranks])
    worst = int(shares.argmax())
    cost = float(shares[worst])
    if severity := severity_of(cost, 0.03, 0.10):
        is_default = facts.settings.get("train.gc_every_steps") == 0
        yield Finding(
            id="GC01",
            title="Python's garbage collector interrupts the steps",
            severity=severity,
            cost_frac=cost,
            confidence=0.95,
            ranks=standing_out(facts, shares),
            evidence=(
                f"on rank {facts.rank_numbers[worst]} collections take {milliseconds(facts, cost)} of {milliseconds(facts, 1.0)}",
                *(["each rank collects at its own time, and the others wait for it"] if len(shares) > 1 else []),
                *setting_text(facts, "train.gc_every_steps"),
            ),
            advice="collect at fixed steps (train.gc_every_steps), without the objects that exist at the start; keep fewer "
            "Python objects: arrays instead of lists of samples",
            patch={"train.gc_every_steps": 100} if is_default else {},
            expected_gain=_OF_COLLECTIONS * cost if is_default else 0.0,
        )


def save_stall(facts: RunFacts) -> Iterator[Finding]:
    """CKPT01: training stands still while checkpoints are saved."""
    if not has_enough_readings(facts):
        return
    shares = shares_of(facts, "ckpt_stall")
    cost = float(shares.max())
    if severity := severity_of(cost, *_SAVE_STALL):
        every = facts.settings.get("checkpoint.every_steps")
        patch: dict[str, Any] = {}
        gain = 0.0
        is_asynchronous = facts.settings.get("checkpoint.asynchronous") is True
        if facts.settings.get("checkpoint.asynchronous") is False:
            on_cpu = plan_group(facts, "mesh").get("device") == "cpu"
            patch, gain = {"checkpoint.asynchronous": True}, cost * (_OF_SAVES_ON_CPU if on_cpu else _OF_SAVES)
        elif isinstance(every, int) and every > 0:
            # a step is the stall's share and the rest: with factor times as many steps to a save the share is below the warning
            factor = math.ceil(cost * (1 - _SAVE_STALL_AIM) / (_SAVE_STALL_AIM * (1 - cost))) if cost < 1 else 1
            if factor > 1:
                patch, gain = {"checkpoint.every_steps": every * factor}, cost * (1 - 1 / factor)
        yield Finding(
            id="CKPT01",
            title="training stands still while it saves",
            severity=severity,
            cost_frac=cost,
            confidence=0.95,
            ranks=standing_out(facts, shares),
            evidence=(
                f"saving takes {cost:.1%} of the time{_of_ranks(shares)}",
                *setting_text(facts, "checkpoint.every_steps"),
                *setting_text(facts, "checkpoint.asynchronous"),
            ),
            advice=("" if is_asynchronous else "save in the background (checkpoint.asynchronous), ")
            + "save less often (checkpoint.every_steps), or to a faster disk",
            patch=patch,
            expected_gain=gain,
        )


def _of_ranks(shares: Floats) -> str:
    return f" ({shares.min():.0%} to {shares.max():.0%} by rank)" if len(shares) > 1 else ""


def _mesh(facts: RunFacts) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in plan_group(facts, "mesh").items() if isinstance(size, int)]

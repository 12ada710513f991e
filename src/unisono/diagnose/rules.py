"""The rules of a diagnosis, and the entry point that runs them all.

Costs are shares of the time of a step. Ranks that step together meet in every step: the rank that waits least for communication
arrived last. What it waits is what communication costs; what the others wait longer is the cost of its slowness. So a slow rank
is not taken for a slow network.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.diagnose.finding import Finding, Rule, Severity
from unisono.diagnose.run_facts import ALL_PHASES, Floats, RankFacts, RunFacts, SkippedStep

RULE_GROUP: Final = "unisono.rules"
MIN_READINGS: Final = 8  # fewer say nothing about the time of a step
_COMPUTE: Final = tuple(
    phase for phase in ALL_PHASES if phase not in ("data_wait", "comm_exposed", "ckpt_stall", "eval")
)
_STEADY_FRAC: Final = 0.7  # of the readings in which a rank is slower than the others, for it to be called slow
_MOST_SAMPLES: Final = 1 << 20  # of a micro-batch, in events that anybody may have written
_LOG: Final = logging.getLogger("unisono.diagnose")


def diagnose(facts: RunFacts) -> list[Finding]:
    """All findings of all rules, the most costly first."""
    findings = [finding for rule in (*RULES, *_plugged_rules()) for finding in rule(facts)]
    return sorted(findings, key=lambda finding: (-finding.cost_frac, finding.severity != "critical", finding.id))


def _plugged_rules() -> Iterator[Rule]:
    """Rules of other packages; one that cannot be imported, or fails, is left out with a warning."""
    for entry in entry_points(group=RULE_GROUP):
        package = entry.dist.name if entry.dist is not None else entry.value

        def guarded(facts: RunFacts, entry: Any = entry, package: str = package) -> list[Finding]:
            try:
                return list(entry.load()(facts))
            except Exception as error:
                _LOG.warning("rule %s of %s was left out: %s: %s", entry.name, package, type(error).__name__, error)
                return []

        yield guarded


# --- time ------------------------------------------------------------------------------------------------------------


def data_bound(facts: RunFacts) -> Iterator[Finding]:
    """DATA01: all ranks wait for data. DATA02: one rank waits longer than the others."""
    if not _is_timed(facts):
        return
    shares = _shares(facts, "data_wait")
    cost = _lower_median(shares)
    if severity := _severity(cost, 0.05, 0.20):
        patch, gain, advice = _loader_patch(facts, cost)
        yield Finding(
            id="DATA01",
            title="training waits for data",
            severity=severity,
            cost_frac=cost,
            confidence=0.9,
            evidence=(
                f"each step waits {_ms(facts, cost)} of {_ms(facts, 1.0)} for its batch{_of_ranks(shares)}",
                *_setting(facts, "loader.num_workers"),
            ),
            advice=advice,
            patch=patch,
            expected_gain=gain,
        )
    excess = _excess(shares)
    worst = int(excess.argmax())
    if severity := _severity(float(excess[worst]), 0.10, 0.20):
        ranks = _ranks_of(facts, excess >= 0.10)
        yield Finding(
            id="DATA02",
            title=f"{_listed(ranks)} {'waits' if len(ranks) == 1 else 'wait'} longer for data than the others",
            severity=severity,
            cost_frac=float(excess[worst]),
            confidence=0.9,
            ranks=ranks,
            evidence=(
                f"rank {facts.rank_numbers[worst]} waits {_ms(facts, shares[worst])} a step for data, the others "
                f"{_ms(facts, float(shares[worst] - excess[worst]))}; each step takes {_ms(facts, 1.0)}",
            ),
            advice="compare the disk or network storage of that host, and the sizes of its samples, with the others'",
        )


def _loader_patch(facts: RunFacts, cost: float) -> tuple[dict[str, Any], float, str]:
    """Settings that hide the wait, the share of a step's time that they save, and advice."""
    workers = facts.settings.get("loader.num_workers")
    compute = 1.0 - cost
    if workers == 0:
        # one worker makes the next batch while this one is computed: at least that much of the wait is hidden
        return (
            {"loader.num_workers": -1},
            min(cost, compute),
            "let workers make batches ahead: loader.num_workers=-1 finds kind and number while running",
        )
    if isinstance(workers, int) and workers > 0 and facts.settings.get("loader.worker_kind") != "auto":
        # the workers are busy all the time, so a step takes as long as they take: more of them, until compute is longer
        wanted = math.ceil(1.1 * workers / compute) if compute > 0 else 2 * workers
        return (
            {"loader.num_workers": max(workers + 1, min(wanted, 8 * workers))},
            cost * 0.9,
            "more workers, if the host has idle cores; else cheaper transforms, or data packed before the run",
        )
    return (
        {},
        0.0,
        "the number of workers is tuned already: pack the data before the run (unisono data pack), use cheaper transforms, or "
        "move the files to a faster disk",
    )


def exposed_communication(facts: RunFacts) -> Iterator[Finding]:
    """COMM01: ranks wait for communication that no computation hides, without the wait for a slow rank."""
    if not _is_timed(facts) or len(facts.ranks) < 2:
        return
    if facts.steps_together:
        waits = facts.phase_s("comm_exposed")
        cost = float(waits.min(axis=0).sum() / facts.wall_s().mean(axis=0).sum())
    else:
        cost = _lower_median(_shares(facts, "comm_exposed"))
    if severity := _severity(cost, 0.10, 0.25):
        axes = [f"{axis} {size}" for axis, size in _mesh(facts) if size > 1]
        yield Finding(
            id="COMM01",
            title="steps wait for communication",
            severity=severity,
            cost_frac=cost,
            confidence=0.9 if len(axes) <= 1 else 0.7,
            evidence=(
                f"each step waits {_ms(facts, cost)} of {_ms(facts, 1.0)} for communication that no computation hides"
                + (f"; mesh: {', '.join(axes)}" if axes else ""),
            ),
            advice="more samples per rank and step (plan.global_batch) make fewer exchanges of the same size; plan.compression "
            "makes them smaller; ranks of tp and ep belong on one host",
        )


def stragglers(facts: RunFacts) -> Iterator[Finding]:
    """BAL01: one rank computes longer than the others, which wait for it."""
    if not _is_timed(facts) or len(facts.ranks) < 2 or not facts.steps_together:
        return
    own = facts.phase_s(*_COMPUTE)
    totals = own.sum(axis=1)
    scores = totals.min() / totals
    slow_in = (own > 1.05 * _lower_medians(own)).mean(axis=1)  # share of the readings
    is_slow = (scores < 0.9) & (slow_in >= _STEADY_FRAC)
    if not is_slow.any():
        return
    excess = np.where(is_slow, _excess(totals), 0.0)
    worst = int(excess.argmax())
    extra = {phase: _excess(facts.phase_s(phase).sum(axis=1))[worst] for phase in _COMPUTE}
    phase = max(extra, key=lambda name: extra[name])
    ranks = _ranks_of(facts, is_slow)
    cost = float(excess[worst] / facts.wall_s().mean(axis=0).sum())
    yield Finding(
        id="BAL01",
        title=f"{_listed(ranks)} {'is' if len(ranks) == 1 else 'are'} slower than the others",
        severity="critical" if scores[worst] < 0.75 else "warning",
        cost_frac=cost,
        confidence=float(slow_in[worst]),
        ranks=ranks,
        evidence=(
            f"without waiting, rank {facts.rank_numbers[worst]} takes {1 / scores[worst]:.2f} times as long for a step as the "
            "fastest rank",
            f"{_ms(facts, cost)} of {_ms(facts, 1.0)} per step, most of it in {_PHASE_WORDS.get(phase, phase)}",
            f"it is slower than the others in {slow_in[worst]:.0%} of the readings",
        ),
        advice="look at that host: clocks and throttling, other processes, cores of the rank; with a pipeline, at the layers of "
        "its stage",
    )


def save_stall(facts: RunFacts) -> Iterator[Finding]:
    """CKPT01: training stands still while checkpoints are saved."""
    if not _is_timed(facts):
        return
    cost = float(_shares(facts, "ckpt_stall").max())
    if severity := _severity(cost, 0.01, 0.05):
        every = facts.settings.get("checkpoint.every_steps")
        patch: dict[str, Any] = {}
        gain = 0.0
        if facts.settings.get("checkpoint.asynchronous") is False:
            patch, gain = {"checkpoint.asynchronous": True}, cost / 2
        elif isinstance(every, int) and every > 0:
            factor = math.ceil(cost / 0.01)
            patch, gain = {"checkpoint.every_steps": every * factor}, cost * (1 - 1 / factor)
        yield Finding(
            id="CKPT01",
            title="training stands still while it saves",
            severity=severity,
            cost_frac=cost,
            confidence=0.95,
            evidence=(
                f"saving takes {cost:.1%} of the time",
                *_setting(facts, "checkpoint.every_steps"),
                *_setting(facts, "checkpoint.asynchronous"),
            ),
            advice="save in the background (checkpoint.asynchronous), less often (checkpoint.every_steps), or to a faster disk",
            patch=patch,
            expected_gain=gain,
        )


# --- memory and numbers ----------------------------------------------------------------------------------------------


def near_out_of_memory(facts: RunFacts) -> Iterator[Finding]:
    """MEM01: the largest memory in use is near the limit."""
    used = {rank.rank: rank.peak_bytes / rank.limit_bytes for rank in facts.ranks if rank.limit_bytes > 0}
    near = {rank: share for rank, share in used.items() if share >= 0.90}
    if not near:
        return
    worst = max(near, key=lambda rank: near[rank])
    peak = next(rank for rank in facts.ranks if rank.rank == worst)
    micro_batch = _group(facts, "batch").get("micro_batch")
    patch: dict[str, Any] = {}
    if isinstance(micro_batch, int) and 1 < micro_batch < _MOST_SAMPLES:
        # a divisor: any other number may not divide the global batch
        patch = {"plan.micro_batch": next(n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0)}
    yield Finding(
        id="MEM01",
        title="memory is nearly full",
        severity="critical" if near[worst] >= 0.96 else "warning",
        cost_frac=0.0,
        confidence=0.9,
        ranks=tuple(sorted(near)) if len(near) < len(facts.ranks) else (),
        evidence=(
            f"rank {worst} has used {peak.peak_bytes / 2**30:.3g} of {peak.limit_bytes / 2**30:.3g} GiB ({near[worst]:.0%})",
        ),
        advice="a smaller micro-batch (the global batch and its gradients stay the same), plan.recompute, or dp_shard over more "
        "ranks",
        patch=patch,
    )


def non_finite_steps(facts: RunFacts) -> Iterator[Finding]:
    """NUM01: losses or gradients that are no numbers."""
    skipped = [
        (rank.rank, step) for rank in facts.ranks for step in rank.skipped if not math.isfinite(step.loss)
    ]  # a finite loss with an infinite norm is how fp16 finds its loss scale
    if not skipped:
        return
    numbers = sorted({step.step for _, step in skipped})
    num_steps = max(rank.num_steps for rank in facts.ranks)
    share = len(numbers) / max(1, num_steps)
    causes = [
        (rank, step) for rank, step in skipped if step.rank_loss is not None and not math.isfinite(step.rank_loss)
    ]
    ranks = tuple(sorted({rank for rank, _ in causes}))
    yield Finding(
        id="NUM01",
        title="the loss is no number in some steps",
        severity="critical" if share >= 0.03 else "warning",
        cost_frac=min(1.0, share),
        confidence=0.95 if causes else 0.7,
        ranks=ranks if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"{len(numbers)} of {num_steps} steps were skipped: {_first(numbers)}",
            *(_sample_text(rank, step) for rank, step in causes[:3]),
        ),
        advice="read these samples (loader order is fixed by the seed); if they are sound, a lower optim.lr, a longer warm-up or "
        "plan.precision=fp32",
    )


RULES: Final[Sequence[Rule]] = (
    data_bound,
    exposed_communication,
    stragglers,
    save_stall,
    near_out_of_memory,
    non_finite_steps,
)

# --- figures ---------------------------------------------------------------------------------------------------------

_PHASE_WORDS: Final = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "h2d": "copies to the device",
    "other": "code between steps",
}


def _is_timed(facts: RunFacts) -> bool:
    """Whether there are enough readings to judge the time of a step."""
    if not facts.ranks:
        return False
    readings = len(facts.common_steps()) if facts.steps_together else min(len(rank.steps) for rank in facts.ranks)
    return readings >= MIN_READINGS


def _shares(facts: RunFacts, phase: str) -> Floats:
    """Share of a phase in the time of each rank [ranks]."""
    return np.array([rank.phase_s[phase].sum() / rank.wall_s.sum() for rank in facts.ranks])


def _lower_medians(values: Floats) -> Floats:
    """The median over ranks [ranks, …] -> […]; of an even number the lower of the two in the middle, so that one of two ranks
    is no majority."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def _lower_median(values: Floats) -> float:
    return float(_lower_medians(values))


def _excess(values: Floats) -> Floats:
    """How far each value is above the lower median of the others [ranks]; 0 for a single one."""
    count = len(values)
    if count < 2:
        return np.zeros(count)
    order = np.argsort(values, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    middle = (count - 2) // 2  # in the sorted values of the others
    return values - values[order][middle + (place <= middle)]


def _severity(share: float, warning: float, critical: float) -> Severity | None:
    return "critical" if share >= critical else "warning" if share >= warning else None


def _ms(facts: RunFacts, share: float) -> str:
    """A share of the time of a step, in milliseconds."""
    rank: RankFacts = facts.ranks[0]
    steps = int(rank.steps[-1] - rank.steps[0]) / max(1, len(rank.steps) - 1)  # in a reading
    return f"{1000 * share * float(rank.wall_s.mean()) / max(1.0, steps):.3g} ms"


def _of_ranks(shares: Floats) -> str:
    return f" ({shares.min():.0%} to {shares.max():.0%} by rank)" if len(shares) > 1 else ""


def _ranks_of(facts: RunFacts, chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(rank for rank, is_chosen in zip(facts.rank_numbers, chosen, strict=True) if is_chosen)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_first(ranks)}"


def _setting(facts: RunFacts, name: str) -> tuple[str, ...]:
    return (f"{name} is {facts.settings[name]}",) if name in facts.settings else ()


def _group(facts: RunFacts, name: str) -> dict[str, Any]:
    group = facts.plan.get(name)
    return cast("dict[str, Any]", group) if isinstance(group, dict) else {}


def _mesh(facts: RunFacts) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in _group(facts, "mesh").items() if isinstance(size, int)]


def _first(numbers: Iterable[int], count: int = 5) -> str:
    listed = list(numbers)
    return ", ".join(map(str, listed[:count])) + (", …" if len(listed) > count else "")


def _sample_text(rank: int, step: SkippedStep) -> str:
    samples = f"; its samples are {_first(step.sample_ids)}" if step.sample_ids else ""
    return f"step {step.step}: the losses of rank {rank} alone sum to {step.rank_loss}{samples}"

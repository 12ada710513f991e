"""Rules of a short profile: of a run's last one, or of any trace of PyTorch's profiler.

Costs are shares of the profiled steps. Where ranks differ, a cost is that of the rank that has least of it or the lower median:
one slow rank, for which the others wait, is no cause of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from unisono.diagnose.figures import DATA_WAIT, larger_micro_batches, lower_median, plan_group, severity_of
from unisono.diagnose.finding import Finding
from unisono.diagnose.memory_pools import memory_pools
from unisono.diagnose.run_facts import RunFacts
from unisono.profile.rank_profile import Overlap, RankProfile, SyncPoint
from unisono.profile.source_files import is_own

_MODEL_AXES: Final = frozenset({"cp", "tp", "ep", "pp"})
_LAUNCH_CPU: Final = (0.50, 0.75)  # warning, critical; an operator on the CPU is its own kernel
_LAUNCH_DEVICE: Final = (0.03, 0.15)
_OPERATORS_OF_READ: Final = 2  # aten::item, and aten::_local_scalar_dense in it
_SHORT_FRAC: Final = 0.5  # of the kernels, for launches to be the cause of idle time
_RECOMPUTE: Final = (0.05, 0.15)
_FULL_FRAC: Final = 0.75  # of the memory in use: recompute is needed
_FUSED: Final = (0.03, 0.15)
_OUTSIDE_STEP: Final = ("eval", "ckpt_stall", "data_wait")  # phases whose reads from tensors delay no step
# what a run and the trace of another program are told, by ``is_foreign``
_BUCKETS: Final = ("sync.bucket_bytes in the strategy file, plan.file", "bucket_cap_mb of DistributedDataParallel")
_STACKS: Final = (
    "a profile with --stacks names the lines",
    "a trace with stacks (torch.profiler.profile(with_stack=True)) names the functions that read",
)
_FUSED_ADVICE: Final = {
    "attention": (
        "FUSE01",
        "attention is written as single operators",
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=…) in place of product, softmax and "
        "product: it does not keep the scores, [heads, queries, keys]",
    ),
    "norm": (
        "FUSE02",
        "a norm is written as single operators",
        "torch.nn.functional.rms_norm or layer_norm in place of mean, root and product",
    ),
}


def _profiles(facts: RunFacts) -> list[RankProfile]:
    return [profile for profile in facts.profiles if profile.wall_s > 0]


def _share(profiles: Sequence[RankProfile], seconds: Callable[[RankProfile], float]) -> float:
    """A time's share of the profile, in the lower median of ranks."""
    return min(1.0, max(0.0, lower_median(np.array([seconds(profile) / profile.wall_s for profile in profiles]))))


def _steps_text(profile: RankProfile) -> str:
    numbers = [step.step for step in profile.steps if step.step >= 0]
    if not numbers:
        return "of the trace"
    return f"of steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"of step {numbers[0]}"


def _each(profile: RankProfile) -> str:
    """What counts are divided by in a sentence, such as `` a step``; empty for a trace that marks neither steps nor updates."""
    return " a step" if profile.steps else " an update of the optimizer" if profile.num_steps else ""


def loader_waits(facts: RunFacts) -> Iterator[Finding]:
    """DATA01 of a trace of another program, which has no events: it waits in the DataLoader's ``__next__``."""
    for profile in _profiles(facts):
        cost = min(1.0, profile.loader_wait_s / profile.wall_s)
        if not profile.is_foreign or (severity := severity_of(cost, *DATA_WAIT)) is None:
            continue
        waits = next((phase for phase in profile.phases if phase.name == "data_wait"), None)
        is_marked = bool(profile.steps)
        yield Finding(
            id="DATA01",
            title="training waits for data",
            severity=severity,
            cost_frac=cost,
            confidence=0.9 if is_marked else 0.7,
            evidence=(
                f"{cost:.0%} {_steps_text(profile)} is inside of the DataLoader's __next__"
                + (", without the time in which kernels run" if profile.kernels else ""),
                *(
                    (f"{waits.calls} waits of {1e3 * waits.total_s / waits.calls:.3g} ms",)
                    if waits and waits.calls
                    else ()
                ),
                *(() if is_marked else ("no steps are marked: the first wait may include the start of workers",)),
            ),
            advice="more workers (num_workers of the DataLoader), if cores are free; data that is tokenised, decoded or "
            "transformed before the run (packed data), or cheaper transforms",
        )


def exposed_gradient_sums(facts: RunFacts) -> Iterator[Finding]:
    """COMM02: collectives over data ranks do not overlap with computation."""
    found: list[tuple[float, Overlap, RankProfile]] = []
    for profile in _profiles(facts):
        data = [overlap for overlap in profile.overlaps if overlap.axis not in _MODEL_AXES]
        if data:
            total = sum(overlap.total_s for overlap in data)
            exposed = sum(overlap.exposed_s for overlap in data)
            row = Overlap(axis=data[0].axis, total_s=total, exposed_s=exposed)
            found.append((exposed / profile.wall_s, row, profile))
    if not found:
        return
    share, row, profile = min(found, key=lambda item: item[0])  # the rank that arrived last waits for no other
    hidden = 1 - row.exposed_s / row.total_s if row.total_s > 0 else 1.0
    if share < 0.05 or hidden >= 0.70:
        return
    kinds = [c for c in profile.collectives if c.axis not in _MODEL_AXES and c.can_overlap][:3]
    yield Finding(
        id="COMM02",
        title="sums over data ranks are not hidden behind computation",
        severity="critical" if hidden < 0.40 else "warning",
        cost_frac=min(1.0, share),
        confidence=0.8,
        evidence=(
            f"{hidden:.0%} of {1e3 * row.total_s:.3g} ms of communication {_steps_text(profile)} overlaps with computation",
            *(
                f"{c.name} over {c.group_size} ranks: {c.calls} calls, {c.num_bytes / 2**20:.3g} MiB, "
                f"bus bandwidth {c.bus_bytes_per_s / 1e9:.3g} GB/s"
                for c in kinds
            ),
        ),
        advice=f"larger buckets ({_BUCKETS[profile.is_foreign]}) where there are many small sums, smaller ones where a few come "
        "last; sums in the last micro-batch only; more samples per rank and step"
        + ("" if profile.is_foreign else " (plan.global_batch)"),
    )


def launch_bound(facts: RunFacts) -> Iterator[Finding]:
    """LAUNCH01: the calls of operators take longer than their work. Nothing of a profile with Python's stacks, whose recording
    makes the calls several times as long."""
    profiles = _profiles(facts)
    if any(profile.has_stacks for profile in profiles):
        return
    if not profiles or not all(profile.launch.num_operators for profile in profiles):
        return
    on_device = any(profile.launch.num_kernels for profile in profiles)
    cost = _share(profiles, lambda profile: _calls_s(profile) * (1.0 - _reads_frac(profile)))
    launch = profiles[0].launch
    if on_device and launch.num_short < _SHORT_FRAC * launch.num_kernels:
        return
    if (severity := severity_of(cost, *(_LAUNCH_DEVICE if on_device else _LAUNCH_CPU))) is None:
        return
    steps, each = max(1, profiles[0].num_steps), _each(profiles[0])
    patch, gain = _fewer_calls(facts, profiles, cost, (_LAUNCH_DEVICE if on_device else _LAUNCH_CPU)[0])
    yield Finding(
        id="LAUNCH01",
        title="steps are bound by the calls of small operators",
        severity=severity,
        cost_frac=cost,
        confidence=0.7,
        evidence=(
            f"{cost:.0%} {_steps_text(profiles[0])} "
            + (
                "the device has nothing to run"
                if on_device
                else "is outside of operators that work for 10 µs or longer at a stretch"
            ),
            f"{launch.num_operators // steps:,} operators{each}"
            + (
                f", {launch.num_kernels // steps:,} kernels, of which {launch.num_short / launch.num_kernels:.0%} take less "
                "than 10 µs"
                if on_device
                else f", {launch.num_short // steps:,} of which take less than 10 µs"
            ),
        ),
        advice="larger micro-batches or models; torch.compile"
        + ("" if profiles[0].is_foreign else " (plan.compile=regional)")
        + ", which joins operators; a fused optimizer",
        patch=patch,
        expected_gain=gain,
    )


def _calls_s(profile: RankProfile) -> float:
    """Time outside of work: on the CPU that of calls, which torch and Python take."""
    return max(0.0, profile.launch.compute_s - profile.launch.work_s)


def _reads_frac(profile: RankProfile) -> float:
    """Share of the operators on the CPU that are reads of the user's code from tensors; their calls cost SYNC01, not LAUNCH01."""
    launch = profile.launch
    if launch.num_kernels or not launch.num_operators:
        return 0.0
    calls = sum(point.calls for point in profile.syncs if _is_of_user(point))
    return min(1.0, _OPERATORS_OF_READ * calls / launch.num_operators)


def _fewer_calls(
    facts: RunFacts, profiles: Sequence[RankProfile], cost: float, warning: float
) -> tuple[dict[str, Any], float]:
    """A larger micro-batch where a step has several and the memory allows it; the share of time that it saves.

    Calls become fewer by its factor, and the work stays: the smallest factor that leaves no warning, else the largest.
    """

    pools = memory_pools(facts.ranks, profiles)

    def fits(factor: int) -> bool:
        return all(pool.peak_bytes + (factor - 1) * pool.activation_bytes <= 0.85 * pool.limit_bytes for pool in pools)

    is_known = all(pool.profiles for pool in pools) and all(profile.memory.peak_bytes > 0 for profile in profiles)
    factors = larger_micro_batches(facts, fits) if is_known else ()
    if not factors:
        return {}, 0.0
    factor = next((f for f in factors if cost / f / (1 - cost + cost / f) < 0.75 * warning), factors[-1])
    return {"plan.micro_batch": factor * plan_group(facts, "batch")["micro_batch"]}, cost * (1 - 1 / factor)


def synchronisations(facts: RunFacts) -> Iterator[Finding]:
    """SYNC01: the host reads numbers from the device many times a step."""
    profiles = [profile for profile in _profiles(facts) if profile.num_steps and not _is_searched(facts, profile)]
    found = [(profile, [point for point in profile.syncs if _is_of_user(point)]) for profile in profiles]
    if not found:
        return
    profile, points = max(found, key=lambda item: sum(point.calls for point in item[1]) / item[0].num_steps)
    per_step = sum(point.calls for point in points) / profile.num_steps
    if per_step <= 2:
        return
    on_device = profile.device != "cpu"
    sources: dict[str, int] = {}
    for point in points:
        text = f"{point.source or f'in phase {point.phase}'} ({point.kind.removeprefix('aten::')})"
        sources[text] = sources.get(text, 0) + point.calls
    each = _each(profile)
    lines = sorted(sources.items(), key=lambda item: -item[1])[:5]
    read_s = sum(point.total_s for point in points)
    if not profile.has_stacks:  # whose recording makes calls longer
        read_s = max(read_s, _calls_s(profile) * _reads_frac(profile))
    yield Finding(
        id="SYNC01",
        title="numbers are read from tensors in every step",
        severity="critical" if per_step > 20 else "warning",
        cost_frac=min(1.0, read_s / profile.wall_s),
        ranks=_standing_out_by_reads(found),
        confidence=0.9 if on_device else 0.6,
        evidence=(
            f"{per_step:.3g} times{each}{'' if on_device else '; an accelerator would wait for each'}",
            *(f"{text}: {calls / profile.num_steps:.3g}{each}" for text, calls in lines),
            *(() if profile.has_stacks else (_STACKS[profile.is_foreign],)),
        ),
        advice="keep losses and metrics as tensors and read them every few steps; torch.where in place of an if on a tensor; "
        "sizes from .shape, not from .item()",
    )


def _is_searched(facts: RunFacts, profile: RankProfile) -> bool:
    """Whether a profiled step was skipped, or the one before the first: each operator is read then to find the first NaN."""
    skipped = {step.step for rank in facts.ranks for step in rank.skipped}
    return any(not skipped.isdisjoint((step.step - 1, step.step)) for step in profile.steps)


def _standing_out_by_reads(found: Sequence[tuple[RankProfile, list[SyncPoint]]]) -> tuple[int, ...]:
    """The ranks that read more than twice as often as the lower median of all; none where all read as often."""
    reads = np.array([sum(point.calls for point in points) / profile.num_steps for profile, points in found])
    usual = lower_median(reads)
    return tuple(profile.rank for (profile, _), count in zip(found, reads, strict=True) if count > 2 * usual + 2)


def _is_of_user(point: SyncPoint) -> bool:
    """Whether the read is in a step and not the library's own, which happens at its declared cadence only."""
    return point.phase not in _OUTSIDE_STEP and not is_own(point.source)


def wasted_recompute(facts: RunFacts) -> Iterator[Finding]:
    """RECOMP01: activations are computed again although there is memory for them."""
    profiles = _profiles(facts)
    if not profiles:
        return
    share = _share(profiles, lambda profile: profile.recompute_s)
    used = _used_memory(facts, profiles)
    severity = severity_of(share, *_RECOMPUTE)
    if severity is None or used is None or used >= _FULL_FRAC:
        return
    patch: dict[str, Any] = {}
    gain = 0.0
    predicted = _memory_without_recompute(facts, profiles)
    evidence = [
        f"{share:.0%} {_steps_text(profiles[0])} is spent on forward operators inside of the backward pass",
        f"{used:.0%} of the memory is in use",
    ]
    if predicted is not None and predicted < 0.90:
        patch, gain = {"plan.recompute": "none"}, share
        evidence.append(f"without recompute it would be {predicted:.0%}")
    yield Finding(
        id="RECOMP01",
        title="activations are computed again although memory is free",
        severity=severity,
        cost_frac=share,
        confidence=0.9 if predicted is not None else 0.7,
        evidence=tuple(evidence),
        advice="plan.recompute=none, or selective, which keeps the results of matrix products and attention; or fewer blocks",
        patch=patch,
        expected_gain=gain,
    )


def _used_memory(facts: RunFacts, profiles: Sequence[RankProfile]) -> float | None:
    """Largest share of a memory in use by the ranks that share it; None where no limit is known."""
    pools = memory_pools(facts.ranks, profiles)
    return max((pool.used_frac for pool in pools if pool.limit_bytes > 0), default=None)


def _memory_without_recompute(facts: RunFacts, profiles: Sequence[RankProfile]) -> float | None:
    """An upper bound of the share of the memory in use without recompute; None where the number of blocks is not known.

    As if all activations at the peak were of one block, and each block kept as many.
    """
    blocks = facts.settings.get("model.num_layers")
    used = _used_memory(facts, profiles)
    pools = [
        pool
        for pool in memory_pools(facts.ranks, profiles)
        if pool.limit_bytes > 0 and any("activations" in profile.memory.at_peak for profile in pool.profiles)
    ]
    if not isinstance(blocks, int) or not 0 < blocks < 10_000 or used is None or not pools:
        return None
    return used + max((blocks - 1) * pool.activation_bytes / pool.limit_bytes for pool in pools)


def recompiles(facts: RunFacts) -> Iterator[Finding]:
    """COMP01: torch.compile compiles in steps that should only run."""
    profiles = [profile for profile in _profiles(facts) if profile.compiled.compilations > 0]
    if not profiles:
        return
    worst = max(profiles, key=lambda profile: profile.compiled.compilations)
    counts = worst.compiled
    if worst.is_foreign:
        yield from _foreign_compilations(worst)
        return
    yield Finding(
        id="COMP01",
        title="code is compiled again after the first steps",
        severity="critical" if counts.compilations >= 8 else "warning",
        cost_frac=min(1.0, counts.total_s / worst.wall_s),
        confidence=0.9,
        ranks=tuple(profile.rank for profile in profiles) if 1 < len(facts.profiles) != len(profiles) else (),
        evidence=(
            f"{counts.compilations} compilations in {max(1, worst.num_steps)} steps {_steps_text(worst)}"
            + (f", {counts.total_s:.3g} s" if counts.total_s else ""),
            *((f"{counts.graph_breaks} breaks of graphs",) if counts.graph_breaks > 0 else ()),
        ),
        advice="inputs of few shapes: fixed lengths or buckets of lengths, no last batch of another size; torch.compile("
        "dynamic=True); TORCH_LOGS=recompiles says which guard failed",
    )


def _foreign_compilations(profile: RankProfile) -> Iterator[Finding]:
    """COMP01 of a trace of another program, which may begin with its first step: of one step nothing can be said."""
    if profile.num_steps == 1:
        return
    counts = profile.compiled
    yield Finding(
        id="COMP01",
        title="the trace contains compilations of torch.compile",
        severity="warning",
        cost_frac=min(1.0, counts.total_s / profile.wall_s),
        confidence=0.4,
        evidence=(
            f"{counts.compilations} compilations"
            + (f" in {profile.num_steps} steps" if profile.num_steps else "")
            + f", {counts.total_s:.3g} s",
            "if the trace begins with the program's first step, they are expected",
        ),
        advice="profile later steps (torch.profiler.schedule with wait and warmup); if these compile too: inputs of few shapes, "
        "torch.compile(dynamic=True); TORCH_LOGS=recompiles says which guard failed",
    )


def odd_sizes(facts: RunFacts) -> Iterator[Finding]:
    """UTIL02: matrix products whose sizes accelerators pad."""
    for profile in _profiles(facts)[:1]:
        kernels_s = sum(kernel.total_s for kernel in profile.kernels)
        if profile.device == "cpu" or kernels_s <= 0:
            return
        odd = [
            p for p in profile.products if any(size % 8 for size in (p.m, p.k, p.n)) and p.total_s >= 0.05 * kernels_s
        ]
        if not odd:
            return
        share = sum(product.total_s for product in odd) / kernels_s
        vocab = facts.settings.get("model.vocab_size")
        is_padded = isinstance(vocab, int) and vocab % 8 and any(vocab in (p.m, p.k, p.n) for p in odd)
        yield Finding(
            id="UTIL02",
            title="matrix products have sizes that are no multiples of 8",
            severity="critical" if odd[0] is profile.products[0] else "warning",
            cost_frac=0.0,
            confidence=0.7,
            evidence=(
                f"they take {share:.0%} of the kernels' time",
                *(f"[{p.m}, {p.k}] x [{p.k}, {p.n}], {p.calls} times: {1e3 * p.total_s:.3g} ms" for p in odd[:3]),
            ),
            advice="sizes of vocabulary, model and feed-forward layers, divided by the ranks of tensor parallelism, that are "
            "multiples of 64, or at least of 8; samples padded to such a length",
            patch={"model.vocab_size": -(-int(vocab) // 64) * 64} if isinstance(vocab, int) and is_padded else {},
        )


def unfused_operators(facts: RunFacts) -> Iterator[Finding]:
    """FUSE01, FUSE02: attention or a norm that is written by hand, where torch has one operator."""
    profiles = _profiles(facts)
    for kind, (code, title, advice) in _FUSED_ADVICE.items():
        matches = [(profile, p) for profile in profiles for p in profile.patterns if p.kind == kind]
        if not matches:
            continue
        profile, pattern = min(matches, key=lambda item: item[1].element_s / item[0].wall_s)
        cost = pattern.element_s / profile.wall_s
        if severity := severity_of(cost, *_FUSED):
            yield Finding(
                id=code,
                title=title,
                severity=severity,
                cost_frac=min(1.0, cost),
                confidence=0.8,
                evidence=(
                    f"{pattern.calls} times {_steps_text(profile)}: {', '.join(pattern.example)}"
                    + (f" of {pattern.shapes}" if pattern.shapes else ""),
                    f"all of it takes {pattern.total_s / profile.wall_s:.0%} of the time, "
                    f"{cost:.0%} outside of matrix products",
                ),
                advice=advice,
            )

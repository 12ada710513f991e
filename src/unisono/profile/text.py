"""The tables of a profile, and a profile as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.profile.rank_profile import MEMORY_CATEGORIES, RankProfile
from unisono.profile.source_files import marked

_ROWS = 12
_NAME = 60


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """Cells as text; the first column names what its row is of."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def profile_text(profiles: Sequence[RankProfile]) -> Iterator[str]:
    """The tables of the first rank, and the times of all."""
    if not profiles:
        return
    profile = profiles[0]
    steps = profile.steps
    yield (
        f"steps {steps[0].step} to {steps[-1].step}, {len(profiles)} "
        f"{'rank' if len(profiles) == 1 else 'ranks'}, {profile.device}"
        if steps
        else f"{profile.wall_s:.3g} s without marks of steps, {profile.device}"
    )
    if profile.has_stacks:
        yield (
            "recorded with Python's stacks: outside of operators most of the time is the profiler's own, such as of the phase "
            "'other' and of gaps between operators"
        )
    for other in profiles if len(profiles) > 1 else ():
        each = ", ".join(f"{1e3 * step.wall_s:.1f}" for step in other.steps)
        clock = f"{1e3 * other.clock.offset_s:+.3f} ms ± {1e3 * other.clock.error_s:.3f}"
        yield f"  rank {other.rank}: {each} ms a step; clock {clock}"
    yield from (f"note: {note}" for other in profiles for note in other.notes)
    for table in profile_tables(profile):
        yield from _aligned(table)
    memory = profile.memory
    if memory.peak_bytes:
        limit = f" of {memory.limit_bytes / 2**30:.3g} GiB" if memory.limit_bytes else ""
        yield f"peak {memory.peak_bytes / 2**20:.1f} MiB of tensors{limit}"
    yield from _counts(profile)


def profile_tables(profile: RankProfile) -> Iterator[ProfileTable]:
    """Phases, operators, kernels, collectives, reads from tensors and memory of one rank; those that have rows."""
    wall = profile.wall_s or 1.0
    device = bool(profile.kernels)
    tables = (
        ProfileTable(
            (f"phase (rank {profile.rank})", "ms", "%"),
            [(p.name, f"{1e3 * p.total_s:.2f}", f"{p.total_s / wall:.1%}") for p in profile.phases],
        ),
        ProfileTable(
            ("operator", "calls", "self ms", "total ms", *(("device ms",) if device else ()), "shapes"),
            [
                (
                    op.name[:_NAME],
                    str(op.calls),
                    f"{1e3 * op.self_s:.2f}",
                    f"{1e3 * op.total_s:.2f}",
                    *((f"{1e3 * op.device_s:.2f}",) if device else ()),
                    op.shapes[0][:_NAME] if op.shapes else "",
                )
                for op in profile.operators[:_ROWS]
            ],
        ),
        ProfileTable(
            ("kernel", "calls", "ms"),
            [(k.name[:_NAME], str(k.calls), f"{1e3 * k.total_s:.2f}") for k in profile.kernels[:_ROWS]],
        ),
        ProfileTable(
            ("collective", "axis", "ranks", "calls", "MiB", "ms", "bus GB/s"),
            [
                (
                    c.name,
                    c.axis,
                    str(c.group_size or "?"),
                    str(c.calls),
                    f"{c.num_bytes / 2**20:.3g}",
                    f"{1e3 * c.total_s:.2f}",
                    f"{c.bus_bytes_per_s / 1e9:.3g}",
                )
                for c in profile.collectives[:_ROWS]
            ],
        ),
        ProfileTable(
            ("overlap", "ms", "exposed ms"),
            [(o.axis, f"{1e3 * o.total_s:.2f}", f"{1e3 * o.exposed_s:.2f}") for o in profile.overlaps],
        ),
        ProfileTable(
            ("reads from tensors", "phase", "calls", "ms", "source"),
            [
                (s.kind, s.phase, str(s.calls), f"{1e3 * s.total_s:.2f}", marked(s.source) or "?")
                for s in profile.syncs[:_ROWS]
            ],
        ),
        ProfileTable(
            ("memory at its peak", "MiB", "planned MiB"),
            [
                (
                    name,
                    f"{profile.memory.at_peak[name] / 2**20:.2f}",
                    f"{profile.memory.planned[name] / 2**20:.2f}" if name in profile.memory.planned else "",
                )
                for name in MEMORY_CATEGORIES
                if name in profile.memory.at_peak
            ],
        ),
        ProfileTable(
            ("memory that stays", "phase", "MiB a step", "source"),
            [(g.kind, g.phase, f"{g.bytes_per_step / 2**20:.3g}", marked(g.source)) for g in profile.grows[:_ROWS]],
        ),
    )
    return (table for table in tables if table.rows)


def _counts(profile: RankProfile) -> Iterator[str]:
    launch, counts = profile.launch, profile.compiled
    if launch.compute_s:
        share = 1 - launch.work_s / launch.compute_s
        what = "idle device" if launch.num_kernels else "calls of operators and gaps between them"
        yield f"{what}: {share:.0%} of {1e3 * launch.compute_s:.1f} ms of computation, {launch.num_operators:,} operators"
    if profile.recompute_s:
        yield f"recompute: {1e3 * profile.recompute_s:.2f} ms, {profile.recompute_s / (profile.wall_s or 1):.1%}"
    if counts.compilations or counts.graph_breaks > 0:
        breaks = f", {counts.graph_breaks} breaks of graphs" if counts.graph_breaks > 0 else ""
        yield f"torch.compile: {counts.compilations} compilations{breaks}"
    for pattern in profile.patterns:
        yield f"{pattern.kind} by single operators: {pattern.calls} times, {1e3 * pattern.total_s:.2f} ms"


def _aligned(table: ProfileTable) -> Iterator[str]:
    cells = [table.head, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.head))]
    yield ""
    for row in cells:
        first, *others = row
        text = "  ".join(text.rjust(width) for text, width in zip(others[:-1], widths[1:-1], strict=True))
        last = others[-1] if table.head[-1] in ("shapes", "source") else others[-1].rjust(widths[-1])
        yield f"{first.ljust(widths[0])}  {text}{'  ' if text else ''}{last}".rstrip()

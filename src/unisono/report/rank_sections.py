"""Sections about ranks: where a step's time goes, memory and plan, communication, pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from unisono.diagnose import RankFacts, RunFacts
from unisono.diagnose.figures import per_step, plan_group
from unisono.diagnose.run_facts import HELD_CATEGORIES, LOADER_STAGES
from unisono.observe.formatting import percent
from unisono.observe.history import Floats
from unisono.observe.link_events import AxisTraffic, LinkTraffic
from unisono.observe.meters import ALL_PHASES, COMM_AXES, COMM_PHASES
from unisono.observe.run_summary import format_gib, short_number, short_time
from unisono.report.bars import MAX_ROWS, plain, stacked_bars
from unisono.report.charts import PHASE_COLOURS
from unisono.report.section import Section, Table
from unisono.sanitize import printable

_STAGE_COLOURS: Final = {"read": "#1f6feb", "transform": "#d29922", "collate": "#8250df"}
_MEMORY_COLOURS: Final = {
    "parameters": "#1f6feb",
    "gradients": "#4c9be8",
    "optimizer": "#8250df",
    "more than planned": "#afb8c1",
}


def step_section(facts: RunFacts) -> Section | None:
    """The time of a step by phase, of each rank; None without readings."""
    ranks = [rank for rank in facts.ranks if len(rank.steps) > 1]
    if not ranks:
        return None
    shown, left_out = _shown(ranks)
    axes = [phase for phase in COMM_PHASES if any(rank.phase_s[phase].any() for rank in shown)]
    phases = [phase for phase in ALL_PHASES if phase != "comm_exposed" or not axes]
    place = ALL_PHASES.index("comm_exposed")
    phases = [*phases[:place], *axes, *phases[place:]] if axes else phases
    milliseconds = {phase: [1000 * _step_s(rank, phase) for rank in shown] for phase in phases}
    chart = stacked_bars(
        "steps",
        [f"rank {rank.rank}" for rank in shown],
        milliseconds,
        x_title="ms of a step",
        unit="ms",
        colours=PHASE_COLOURS,
    )
    note = "Mean over the steps of the last attempt after its first ones, evaluations and checkpoints spread over all steps."
    return Section(title="The step of each rank", note=note + _left_out_note(left_out), charts=[chart])


def _step_s(rank: RankFacts, phase: str) -> float:
    """Seconds of a phase in one step."""
    return per_step(rank, rank.phase_s[phase])


def _shown(ranks: Sequence[RankFacts]) -> tuple[list[RankFacts], int]:
    """The ranks that a chart has room for: of many those that compute shortest and longest; and how many are left out."""
    if len(ranks) <= MAX_ROWS:
        return list(ranks), 0
    order = np.argsort(
        [rank.phase_s["forward"].mean() + rank.phase_s["backward"].mean() for rank in ranks], kind="stable"
    )
    chosen = sorted([*order[: MAX_ROWS // 2].tolist(), *order[-(MAX_ROWS // 2) :].tolist()])
    return [ranks[place] for place in chosen], len(ranks) - len(chosen)


def _left_out_note(left_out: int) -> str:
    return f" Of {left_out + MAX_ROWS} ranks those that compute shortest and longest." if left_out else ""


def memory_section(facts: RunFacts) -> Section | None:
    """Bytes that each rank holds by the plan, and the most that was in use; None where either is not known."""
    ranks = [rank for rank in facts.ranks if rank.peak_bytes and rank.held_bytes]
    if not ranks:
        return None
    shown, left_out = _shown(ranks)
    held = [rank.held_bytes for rank in shown]
    planned = [sum(each.values()) for each in held]
    series: dict[str, list[float]] = {name: [each.get(name, 0.0) / 2**30 for each in held] for name in HELD_CATEGORIES}
    series["more than planned"] = [
        max(0.0, rank.peak_bytes - plan) / 2**30 for rank, plan in zip(shown, planned, strict=True)
    ]
    chart = stacked_bars(
        "memory",
        [f"rank {rank.rank}" for rank in shown],
        series,
        x_title="GiB, up to the most in use",
        unit="GiB",
        colours=_MEMORY_COLOURS,
    )
    rows = [
        [
            str(rank.rank),
            *(format_gib(each.get(name, 0.0)) for name in HELD_CATEGORIES),
            format_gib(plan),
            format_gib(rank.peak_bytes),
            format_gib(max(0.0, rank.peak_bytes - plan)),
            f"{format_gib(rank.limit_bytes)} ({percent(rank.peak_bytes / rank.limit_bytes)})"
            if rank.limit_bytes
            else "",
        ]
        for rank, each, plan in zip(shown, held, planned, strict=True)
    ]
    head = ("rank", *HELD_CATEGORIES, "planned", "most in use", "more than planned", "there is (used)")
    note = (
        "Parameters, gradients and optimizer state as the plan counts them. The rest is activations, buffers and "
        "temporary tensors; on the CPU also the interpreter, libraries and loaded data."
    )
    return Section(
        title="Memory and plan",
        note=note + _left_out_note(left_out),
        charts=[chart],
        tables=[Table(head=head, rows=rows)],
    )


def loading_section(facts: RunFacts) -> Section | None:
    """Time of the loader's workers for a step, by stage, and the rank's wait for its batch; None where it is not known."""
    ranks = [rank for rank in facts.ranks if len(rank.steps) > 1 and any(each.any() for each in rank.loader_s.values())]
    if not ranks:
        return None
    shown, left_out = _shown(ranks)
    names = [f"rank {rank.rank}" for rank in shown]
    work = {stage: [1000 * per_step(rank, rank.loader_s[stage]) for rank in shown] for stage in LOADER_STAGES}
    waits = [1000 * _step_s(rank, "data_wait") for rank in shown]
    chart = stacked_bars("loading", names, work, x_title="ms of work for a step", unit="ms", colours=_STAGE_COLOURS)
    rows = [
        [name, *(short_time(work[stage][place] / 1000) for stage in LOADER_STAGES), short_time(waits[place] / 1000)]
        for place, name in enumerate(names)
    ]
    note = (
        "Work of the loader's workers, several of which may be busy at the same time: the data set's reading and decoding, "
        "transforms, and making batches. A rank waits if its batch is not ready when it needs it."
    )
    return Section(
        title="Loading data",
        note=note + _left_out_note(left_out),
        charts=[chart],
        tables=[Table(head=("", *LOADER_STAGES, "waited"), rows=rows)],
    )


def communication_section(facts: RunFacts) -> Section | None:
    """Traffic by axis of the mesh and by peer, and waiting for it; None where there is neither."""
    charts: list[dict[str, Any]] = []
    tables: list[Table] = []
    by_axis = {rank.rank: rank.axes for rank in facts.ranks if rank.axes}
    if by_axis:
        tables.append(_axis_table(facts))
    # what servers exchange is by peer only; of the other kinds both name the same bytes
    columns = {
        rank: {_axis_name(each): each.wire_bytes / each.steps / 2**20 for each in axes}
        for rank, axes in by_axis.items()
    } or {
        rank.rank: {_peer_name(link): (link.sent_bytes + link.received_bytes) / 2**20 for link in rank.links}
        for rank in facts.ranks
        if rank.links
    }
    if len(columns) > 1:
        charts.append(_matrix(columns, "MiB a step" if by_axis else "MiB"))
    if any(rank.links for rank in facts.ranks):
        rows = [
            [str(rank.rank), _peer_name(link), *_traffic(link)]
            for rank in [rank for rank in facts.ranks if rank.links][:MAX_ROWS]
            for link in sorted(rank.links, key=lambda link: link.peer)
        ]
        head = ("rank", "peer", "sent", "received", "sent per second", "received per second")
        tables.append(Table(head=head, rows=rows[:MAX_ROWS], left_out=max(0, len(rows) - MAX_ROWS)))
    axes = [phase for phase in COMM_PHASES if any(rank.phase_s[phase].any() for rank in facts.ranks)]
    if axes:
        shown, left_out = _shown([rank for rank in facts.ranks if len(rank.steps) > 1])
        rows = [
            [
                str(rank.rank),
                *(cell for phase in axes for cell in (short_time(_step_s(rank, phase)), _share(rank, phase))),
            ]
            for rank in shown
        ]
        names = [phase.removeprefix("comm_exposed_") for phase in axes]
        head = ("rank", *(text for name in names for text in (f"exposed, {name}", "of a step")))
        tables.append(Table(head=head, rows=rows, left_out=left_out))
    if not tables:
        return None
    note = (
        "Exposed communication is what a rank waits for others while it computes nothing, by the axis of the plan. "
        "Bytes are those of the last attempt, where the run counts them: the payload of collectives, and what a ring sends of it "
        "on the wire. Used is the time that the link was measured to need for them (unisono doctor --bench), of all time."
    )
    return Section(title="Communication", note=note, charts=charts, tables=tables)


def _axis_table(facts: RunFacts) -> Table:
    """Traffic by axis and group, as the mean over the ranks that have any; the exposed time of an axis in its first row."""
    kinds: dict[tuple[str, str, str, int, int], list[AxisTraffic]] = {}
    for each in (each for rank in facts.ranks for each in rank.axes if each.steps and each.wall_s):
        kinds.setdefault((each.axis, each.group, each.transport, each.ranks, each.hosts), []).append(each)
    rows: list[list[str]] = []
    seen: set[str] = set()
    timed = [rank for rank in facts.ranks if len(rank.steps) > 1]
    for (axis, *_), group in sorted(kinds.items(), key=lambda item: COMM_AXES.index(item[0][0])):
        first, wall_s = group[0], sum(each.wall_s for each in group)
        steps, wire_bytes = sum(each.steps for each in group), sum(each.wire_bytes for each in group)
        expected_s = sum(each.expected_s for each in group) if all(each.expected_s for each in group) else 0.0
        exposed = ["", ""]
        if axis not in seen and timed:
            phase = f"comm_exposed_{axis}"
            share = sum(float(rank.phase_s[phase].sum()) for rank in timed) / sum(
                float(rank.wall_s.sum()) for rank in timed
            )
            exposed = [short_time(float(np.mean([_step_s(rank, phase) for rank in timed]))), percent(share)]
        seen.add(axis)
        rows.append(
            [
                axis,
                plain(printable(first.group)),
                str(first.ranks) + (f" on {first.hosts} hosts" if first.hosts > 1 else ""),
                plain(printable(first.transport)),
                f"{sum(each.collectives for each in group) / steps:.3g}",
                f"{short_number(sum(each.payload_bytes for each in group) / steps)}B",
                f"{short_number(wire_bytes / steps)}B",
                f"{short_number(wire_bytes / wall_s)}B/s",
                f"{short_number(wire_bytes / expected_s)}B/s" if expected_s else "",
                percent(expected_s / wall_s) if expected_s else "",
                *exposed,
            ]
        )
    head = (
        *(
            "axis",
            "group",
            "ranks",
            "transport",
            "collectives a step",
            "payload a step",
            "wire a step",
            "wire per second",
        ),
        *("measured", "used", "exposed a step", "of a step"),
    )
    return Table(head=head, rows=rows[:MAX_ROWS], left_out=max(0, len(rows) - MAX_ROWS))


def _axis_name(traffic: AxisTraffic) -> str:
    return plain(printable(f"{traffic.axis}: {traffic.group}" if traffic.group != traffic.axis else traffic.axis))


def _peer_name(link: LinkTraffic) -> str:
    return plain(printable(link.peer))[:100]


def _traffic(link: LinkTraffic) -> list[str]:
    rates = [
        f"{short_number(count / link.wall_s)}B/s" if link.wall_s > 0 else ""
        for count in (link.sent_bytes, link.received_bytes)
    ]
    return [format_gib(link.sent_bytes), format_gib(link.received_bytes), *rates]


def _share(rank: RankFacts, phase: str) -> str:
    return percent(float(rank.phase_s[phase].sum() / rank.wall_s.sum()))


def _matrix(columns: Mapping[int, Mapping[str, float]], unit: str) -> dict[str, Any]:
    """Bytes, in ``unit``, that each rank exchanged by axis or with each peer."""
    ranks, names = sorted(columns), list(dict.fromkeys(name for row in columns.values() for name in sorted(row)))
    chart = {
        "type": "heatmap",
        "z": [[float(f"{columns[rank].get(name, 0.0):.4g}") for name in names] for rank in ranks],
        "x": names,
        "y": [f"rank {rank}" for rank in ranks],
        "colorscale": "Blues",
        "reversescale": True,
        "colorbar": {"title": {"text": unit}},
        "hovertemplate": f"%{{y}} and %{{x}}: %{{z}} {unit}<extra></extra>",
    }
    layout = {
        "height": max(200, min(600, 130 + 24 * len(ranks))),
        "margin": {"l": 20, "r": 20, "t": 40, "b": 60},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
    }
    return {"id": "links", "data": [chart], "layout": layout}


def pipeline_section(facts: RunFacts) -> Section | None:
    """Shares of computing and waiting of each pipeline stage; None without a pipeline."""
    stages = plan_group(facts, "mesh").get("pp")
    ranks = [rank for rank in facts.ranks if len(rank.steps) > 1]
    world = len(facts.ranks)
    if not isinstance(stages, int) or not 1 < stages <= world or world % stages or not ranks:
        return None
    width = world // stages  # ranks are row-major over the mesh, pp first
    members = [[rank for rank in ranks if rank.rank // width == stage] for stage in range(stages)][:MAX_ROWS]
    phases = ("forward", "backward", "bubble", "comm_exposed", "optimizer", "other")
    shares: dict[str, list[float]] = {}
    for phase in phases:
        shares[phase] = [100 * _stage_share(stage, phase) for stage in members]
    names = [
        f"stage {stage}" + (f" (rank {ranks_of[0].rank})" if len(ranks_of) == 1 else f" ({len(ranks_of)} ranks)")
        for stage, ranks_of in enumerate(members)
    ]
    chart = stacked_bars("stages", names, shares, x_title="% of the time of a step", unit="%", colours=PHASE_COLOURS)
    head = ("stage", *(phase.replace("_", " ") for phase in phases))
    rows = [[name, *(f"{shares[phase][place]:.1f}%" for phase in phases)] for place, name in enumerate(names)]
    schedule = printable(str(plan_group(facts, "pipeline").get("schedule", "")))
    note = (
        f"Schedule {schedule}. A bubble is waiting for activations or gradients of another stage, and for their "
        "transfer."
    )
    return Section(title="Pipeline stages", note=note, charts=[chart], tables=[Table(head=head, rows=rows)])


def _stage_share(ranks: Sequence[RankFacts], phase: str) -> float:
    seconds: Floats = np.array([rank.phase_s[phase].sum() for rank in ranks])
    total_s: Floats = np.array([rank.wall_s.sum() for rank in ranks])
    return float(seconds.sum() / total_s.sum()) if len(ranks) and total_s.sum() > 0 else 0.0

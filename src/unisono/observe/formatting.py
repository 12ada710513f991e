"""Formats events and run summaries as lines of text. Pure functions without a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from unisono.observe.events import number
from unisono.observe.nonfinite_events import origin_of
from unisono.observe.run_summary import (
    RunSummary,
    duration,
    format_gib,
    goodput_text,
    short_number,
    short_time,
    sparkline,
)
from unisono.sanitize import printable

Fields = Mapping[str, Any]

_SHORT: Final = {"tokens": "tok"}

# name in the line, field of a step event, format
_KEY_VALUES: Final[tuple[tuple[str, str, str], ...]] = (
    ("loss", "train/loss", ".4f"),
    ("lr", "train/lr", ".3g"),
    ("grad_norm", "train/grad_norm", ".3g"),
    ("tokens_total", "train/tokens_total", ".0f"),
    ("skipped_steps", "train/skipped_steps", ".0f"),
    ("epoch", "train/epoch", ".0f"),
    ("epochs_total", "epochs_total", ".0f"),
    ("step_s", "perf/step_s", ".4g"),
    ("tokens_per_s", "perf/tokens_per_s", ".0f"),
    ("tokens_per_s_device", "perf/tokens_per_s_device", ".0f"),
    ("tflops_device", "perf/tflops_device", ".3g"),
    ("mfu", "perf/mfu", ".3f"),
    ("matmul_ceiling_frac", "perf/matmul_ceiling_frac", ".3f"),
    ("data_wait_frac", "time/data_wait_frac", ".3f"),
    ("comm_exposed_frac", "time/comm_exposed_frac", ".3f"),
    ("ckpt_stall_frac", "time/ckpt_stall_frac", ".3f"),
    ("mem_peak_bytes", "mem/peak_bytes", ".0f"),
    ("mem_limit_bytes", "mem/limit_bytes", ".0f"),
    ("eta_s", "eta_s", ".0f"),
)


def unit_of(event: Fields) -> str:
    """The unit of a run's throughput, such as tokens, which is also the one of events without a unit."""
    return str(event.get("unit") or "tokens")


def key_value_line(event: Fields) -> str:
    """Format a ``step`` event as ``step=120 steps_total=5000 loss=3.2100 ...``; missing fields are left out."""
    unit = unit_of(event)
    parts = [f"step={event['step']}"]
    if "steps_total" in event:
        parts.append(f"steps_total={event['steps_total']}")
    for name, field, form in _KEY_VALUES:
        value = number(event.get(field))
        if value is not None and not (name == "tokens_total" and unit != "tokens"):
            parts.append(f"{name.replace('tokens', unit)}={value:{form}}")
    return " ".join(parts)


def status_lines(event: Fields, width: int, *, max_lines: int = 2, warnings: Sequence[str] = ()) -> list[str]:
    """Format a ``step`` event in ``max_lines`` lines of ``width`` characters, dropping the least important parts."""
    parts = list(_status_parts(event))
    if warnings:
        parts.append((1, "warn " + " ".join(dict.fromkeys(warnings))))
    while len(parts) > 1 and not _fits(_fill(parts, width), width, max_lines):
        parts.remove(max(parts, key=lambda part: part[0]))
    return [printable(line)[: max(0, width)] for line in _fill(parts, width)]


def _fill(parts: Sequence[tuple[int, str]], width: int) -> list[str]:
    lines: list[str] = []
    for _, text in parts:
        if lines and len(lines[-1]) + 3 + len(text) <= width:
            lines[-1] += " | " + text
        else:
            lines.append(text)
    return lines


def _fits(lines: Sequence[str], width: int, max_lines: int) -> bool:
    return len(lines) <= max_lines and all(len(line) <= width for line in lines)


def _status_parts(event: Fields) -> Iterator[tuple[int, str]]:
    """(priority, text) of each part in the order of the line; the part with the highest number is dropped first."""

    def value(field: str) -> float | None:
        return number(event.get(field))

    total_steps = event.get("steps_total")
    has_total = isinstance(total_steps, int) and total_steps > 0
    yield 0, f"step {event['step']}" + (f"/{total_steps} {100 * event['step'] / total_steps:.1f}%" if has_total else "")
    if (epoch := value("train/epoch")) is not None:
        epochs = value("epochs_total")
        yield 7, f"epoch {epoch:.0f}" + (f"/{epochs:.0f}" if epochs is not None else "")
    if (loss := value("train/loss")) is not None:
        yield 2, f"loss {loss:.4g}"
    if (lr := value("train/lr")) is not None:
        yield 6, f"lr {lr:.2e}"
    if (norm := value("train/grad_norm")) is not None:
        yield 9, f"gnorm {norm:.2g}"
    if (speed := value("perf/tokens_per_s")) is not None:
        device = value("perf/tokens_per_s_device")
        per_device = f" ({short_number(device)}/dev)" if device is not None and device < 0.99 * speed else ""
        yield 3, f"{short_number(speed)} {_SHORT.get(unit := unit_of(event), unit)}/s{per_device}"
    if (mfu := value("perf/mfu")) is not None:
        yield 5, f"mfu {percent(mfu)}"
    elif (measured := value("perf/matmul_ceiling_frac")) is not None:
        yield 5, f"{percent(measured)} of matmul ceiling"
    shares: list[str] = []
    for label, phase in (("data", "data_wait"), ("comm exposed", "comm_exposed"), ("ckpt", "ckpt_stall")):
        frac = value(f"time/{phase}_frac")
        if frac is not None and (frac > 0 or phase != "comm_exposed"):
            shares.append(f"{label} {percent(frac)}")
    if shares:
        yield 7, " ".join(shares)
    if (peak := value("mem/peak_bytes")) is not None:
        limit = value("mem/limit_bytes")
        yield 8, f"mem peak {format_gib(peak)}" + (f" of {format_gib(limit)}" if limit is not None else "")
    if skipped := value("train/skipped_steps"):
        yield 4, f"skipped {skipped:.0f}"
    if (eta := value("eta_s")) is not None:
        yield 4, f"eta {duration(eta)}"


def percent(fraction: float) -> str:
    """Format 0.034 as ``3%``; values below 0.95% get one decimal."""
    if not math.isfinite(fraction):
        return "?"
    value = 100 * fraction
    return f"{value:.1f}%" if 0 < value < 0.95 else f"{value:.0f}%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A line that stays on the console. ``level`` is info, notice or warning; the status line shows ``code``."""

    level: str
    text: str
    code: str = ""


def event_message(event: Fields) -> Message | None:
    """The console's message for an event other than ``step``, or None if it shows none."""
    kind = event["kind"]
    level, write = _MESSAGES.get(kind, ("", None))
    text = write(event) if write is not None else None
    if text is None:
        return None
    code = str(event.get("code", "")) if kind in ("notice", "warning") else ""
    if not code and kind in _SHOWN_ONCE:
        code = kind
    return Message(level=level, text=printable(text), code=printable(code))


def _eval(event: Fields) -> str:
    metrics = [
        f"{name.removeprefix('eval/')}={value:.4g}"
        for name, raw in event.items()
        if name.startswith("eval/") and (value := number(raw)) is not None
    ]
    if (total := event.get("samples_total")) is not None:
        metrics.append(f"({event.get('samples')} of {total} samples)")
    return " ".join(["eval", f"step={event.get('step', '?')}", *metrics])


def _run_start(event: Fields) -> str | None:
    parameters = number(event.get("parameters"))
    if parameters is None or "plan_text" not in event:
        return None
    data = cast("Fields", event.get("data") or {})
    why = f" ({event['precision_why']})" if event.get("precision_why") else ""
    corpus = f"; {data['corpus']}, {short_number(float(data['train_tokens']))} tokens" if "train_tokens" in data else ""
    packed = _packing(cast("Fields", data["packing"])) if data.get("packing") else ""
    held = _held(cast("Fields", event["held_bytes"])) if event.get("held_bytes") else ""
    epoch = f"; {event['steps_per_epoch']} steps per epoch" if event.get("steps_per_epoch") else ""
    recipe = f"; {event['optimization']}" if event.get("optimization") else ""
    trained = number(event.get("parameters_trained"))
    part = f" ({short_number(trained)} trained)" if trained is not None and trained != parameters else ""
    return (
        f"{short_number(parameters)} parameters{part} on {event['plan_text']}{why}{held}{epoch}{corpus}{packed}{recipe}"
    )


def _held(count_bytes: Fields) -> str:
    """Memory that the plan predicts for this rank's parameters, gradients and optimizer state."""
    held = {name: format_gib(float(count)) for name, count in count_bytes.items()}
    return f"; held here: parameters {held['parameters']}, gradients {held['gradients']}, optimizer {held['optimizer']}"


def _rules_inferred(event: Fields) -> str:
    """Layers sharded by inferred rules, and layers that are replicated with the reason."""
    rules = cast("list[Fields]", event.get("rules") or [])
    reasons = cast("Fields", event.get("left") or {})
    sharded = ", ".join(str(rule["module"]) for rule in rules)
    replicated = "".join(f"; {name} is replicated: {why}" for name, why in reasons.items())
    return f"rules of tensor parallelism inferred for {sharded}{replicated}"


def _placements(event: Fields) -> str:
    """Parameters sharded over tp, and those of which other axes are named, with their dims; and those replicated over tp."""
    placed = cast("dict[str, list[str | None]]", event.get("placed") or {})
    parts: list[str] = []
    for axis in ("tp", "dp_shard", "ep"):
        if sharded := [f"{name} (dim {dims.index(axis)})" for name, dims in placed.items() if axis in dims]:
            parts.append(f"sharded over {axis}: {', '.join(sharded)}")
    if any("tp" in dims for dims in placed.values()):
        replicated = ", ".join(name for name, dims in placed.items() if "tp" not in dims)
        parts.append(f"replicated: {replicated or 'none'}")
    return "; ".join(parts)


def _packing(stats: Fields) -> str:
    """Waste and split documents of packing, compared with windows of the plain stream."""
    return (
        f"; packed: {stats['waste_frac']:.2%} of positions without a target, {stats['cut_documents']} of "
        f"{stats['documents']} documents cut (as a stream {stats['stream_waste_frac']:.2%}, {stats['stream_cut_documents']})"
    )


def _compiled(event: Fields) -> str | None:
    seconds = number(event.get("first_step_s"))
    return None if seconds is None else f"compiled: the first step took {duration(seconds)}"


def _profile(event: Fields) -> str | None:
    first, last, folder = number(event.get("first_step")), number(event.get("step")), event.get("folder")
    if first is None or last is None:
        return None
    steps = f"steps {first:.0f} to {last:.0f}"
    if error := event.get("error"):
        return f"{steps} have no complete profile: {error}"
    return f"profiled {steps}: {folder}"


def _resumed(event: Fields) -> str:
    source = event.get("checkpoint") or event.get("path")
    origin = f" from {source}" if source else ""
    differences = cast("list[object]", event.get("differences") or [])
    if (more := len(differences) - _DIFFERENCES) > 1:  # another kind of plan.sync gives one for each parameter
        differences = [*differences[:_DIFFERENCES], f"{more} more, in the event log"]
    weaker = f"; later steps are not those of the saved run: {'; '.join(map(str, differences))}" if differences else ""
    return f"resumed at step {event.get('step', '?')}{origin}{weaker}"


def _started_over(event: Fields) -> str:
    return "starts again at step 0: there is no checkpoint that it could resume from"


def _compression(event: Fields) -> str | None:
    """The codec that ``auto`` chose, or a doubt about the configured one."""
    if event.get("why") == "as asked":
        return None
    return f"compression {event.get('asked')}: {event.get('why')}"


def _servers(event: Fields) -> str:
    """A parameter server's message about lost state."""
    return str(event.get("message") or "")


def _notice(event: Fields) -> str:
    code = str(event.get("code", "notice"))
    said = "; ".join([str(event.get("what")), *(f"{part}: {event.get(part)}" for part in ("why", "cost", "fix"))])
    return f"{code}: {said}"


def _warning(event: Fields) -> str:
    code = str(event.get("code", ""))
    said = str(event.get("message") or event.get("text") or "")
    return f"{code}: {said}" if code else said


def _sink_failed(event: Fields) -> str:
    sink = event.get("sink")
    after = "it was detached; the events file is complete"
    if sink == "events":
        after = "events are lost until writing works again"
    return f"sink {sink} failed ({event.get('error')}); {after}; training continues"


def _checkpoint_failed(event: Fields) -> str:
    at = f" at step {event['step']}" if "step" in event else ""
    return f"checkpoint{at} failed: {_reason(event)}; the one before stays valid"


def _upload_failed(event: Fields) -> str:
    return f"upload of the checkpoint of step {event.get('step')} failed: {_reason(event)}; it is in the run's folder"


def _downloaded(event: Fields) -> str:
    return f"checkpoint of step {event.get('step')} downloaded to {event.get('path')}"


def _quarantined(event: Fields) -> str:
    name = event.get("checkpoint") or event.get("path") or event.get("step")
    return f"checkpoint {name} is damaged and was quarantined: {_reason(event)}"


def _skipped(event: Fields) -> str:
    shown = [("loss", number(event.get("loss"))), ("gradient norm", number(event.get("grad_norm")))]
    why = ", ".join(f"{name} {value:.4g}" for name, value in shown if value is not None) or _reason(event)
    return f"step {event.get('step', '?')} skipped on all ranks: {why}"


def _nonfinite(event: Fields) -> str | None:
    origin = origin_of(dict(event))
    if origin is None:
        return None
    ids = origin.sample_ids
    shown = f"; samples {', '.join(map(str, ids[:5]))}{', …' if len(ids) > 5 else ''}" if ids else ""
    return f"step {origin.step}: first {origin.value}: {origin.place}{shown}"


def _corruption(event: Fields) -> str:
    ranks = event.get("ranks")
    shown = ", ".join(map(str, cast("list[object]", ranks)[:8])) if isinstance(ranks, list) else "?"
    place = f"{event.get('tensor', '?')} of rank {shown}"
    return f"step {event.get('step', '?')}: silent corruption in {place}: {event.get('evidence', '?')}"


def _data_skipped(event: Fields) -> str:
    samples = cast("list[object]", event.get("samples") or [])
    shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
    return f"step {event.get('step', '?')}: samples {shown} could not be read and weigh 0; further ones are in the event log"


def _run_end(event: Fields) -> str | None:
    if "error" not in event:
        return None
    said = str(event.get("message") or "").split("\n")[0]
    return f"the run failed at step {event.get('step', '?')}: {event['error']}: {said}"


def _preempt(event: Fields) -> str:
    by = event.get("signal") or event.get("reason") or "a stop request"
    return f"stopping at step {event.get('step', '?')} on {by}; the state is being saved"


def _early_stop(event: Fields) -> str:
    best, patience = number(event.get("best_loss")), event.get("patience")
    better = "that is finite" if best is None else f"below {best:.4g}"
    why = f"no eval loss {better} in {patience} evaluations" if patience else _reason(event)
    return f"stopped early at step {event.get('step', '?')}: {why}"


def _events_lost(event: Fields) -> str:
    return f"{event.get('lines')} event(s) could not be written and are lost"


def _reason(event: Fields) -> str:
    return str(event.get("error") or event.get("reason") or "no reason given")


_DIFFERENCES: Final = 5  # differences of a resumed run shown on the console

# kinds whose name is the code of their message
_SHOWN_ONCE: Final = frozenset({"rules_inferred", "placements", "compression", "notice", "data_skipped"})

# kind of event → level and text of its message; None for no message
_MESSAGES: Final[Mapping[str, tuple[str, Callable[[Fields], str | None]]]] = {
    "run_start": ("info", _run_start),
    "rules_inferred": ("notice", _rules_inferred),
    "placements": ("notice", _placements),
    "compiled": ("info", _compiled),
    "profile": ("info", _profile),
    "eval": ("info", _eval),
    "resumed": ("info", _resumed),
    "started_over": ("info", _started_over),
    "compression": ("notice", _compression),
    "servers": ("warning", _servers),
    "notice": ("notice", _notice),
    "warning": ("warning", _warning),
    "sink_failed": ("warning", _sink_failed),
    "checkpoint_failed": ("warning", _checkpoint_failed),
    "checkpoint_upload_failed": ("warning", _upload_failed),
    "checkpoint_downloaded": ("info", _downloaded),
    "checkpoint_quarantined": ("warning", _quarantined),
    "skipped_step": ("warning", _skipped),
    "nonfinite": ("warning", _nonfinite),
    "corruption": ("warning", _corruption),
    "data_skipped": ("warning", _data_skipped),
    "preempt": ("warning", _preempt),
    "early_stop": ("info", _early_stop),
    "events_lost": ("warning", _events_lost),
    "run_end": ("warning", _run_end),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEndFacts:
    """Facts for the summary that the events do not hold.

    Attributes:
        sample_text: Text that the trained model generated; empty for none.
        report_path: Path of the written report; None if there is none.
        export_path: Path of the exported model; None if there is none.
        best: Held-out loss, step and path of the best checkpoint; None if it is that of the last step, or there is none.
        next_commands: Command lines that the summary proposes.
    """

    sample_text: str = ""
    report_path: Path | None = None
    export_path: Path | None = None
    best: tuple[float, int, Path] | None = None
    next_commands: Sequence[str] = ()


_ENDINGS: Final = {
    "finished": "Finished",
    "stopped early": "Stopped early after",
    "left": "Left by its script after",
    "preempted": "Preempted at",
    "failed": "Failed after",
    "interrupted": "Interrupted after",
}


def run_verdict(summary: RunSummary) -> str:
    """One sentence: how the run ended, its losses and its speed."""
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    parts = [f"{_ENDINGS[summary.state]} {summary.steps}{total} steps in {duration(summary.wall_s)}"]
    if summary.attempts > 1:
        parts[0] += f" ({summary.attempts} attempts)"
    if summary.train_loss is not None:
        parts.append(f"train loss {summary.train_loss:.4g}")
    if "loss" in summary.eval_metrics:
        parts.append(f"eval loss {summary.eval_metrics['loss']:.4g}")
    if summary.bits_per_byte is not None:
        parts.append(f"{summary.bits_per_byte:.3f} bits per byte")
    if summary.tokens_per_s is not None:
        parts.append(f"{short_number(summary.tokens_per_s)} {summary.unit}/s")
    if summary.skipped_steps:
        parts.append(f"{summary.skipped_steps} step{'s' if summary.skipped_steps > 1 else ''} skipped")
    return ", ".join(parts)


def summary_lines(
    summary: RunSummary, facts: RunEndFacts, width: int, *, ascii_only: bool = False
) -> list[tuple[str, str]]:
    """Format the summary of a run as (label, text) rows.

    Args:
        width: Columns of the terminal; only the loss curve is fitted to it.
        ascii_only: Draw the curve with ASCII characters.
    """
    rows = [("result", run_verdict(summary)), ("speed", _speed(summary)), ("time", _time(summary.time_frac))]
    if summary.goodput is not None:
        rows.append(("goodput", goodput_text(summary.goodput)))
    rows += [("link", _link(link)) for link in summary.links]
    # the sums of gradients are those of the link to all ranks
    shown = [
        row for row in summary.axes if row.get("group") != "all" and not (summary.links and row.get("axis") == "dp")
    ]
    rows += [("link", _axis_link(row)) for row in shown]
    if len(values := summary.losses):
        ends = f"  {values[0]:.4g} -> {values[-1]:.4g}"
        rows.append(("loss", sparkline(values, max(8, min(60, width - 10 - len(ends))), ascii_only=ascii_only) + ends))
    sample = printable(facts.sample_text, newlines=True).expandtabs(4).strip("\n")
    rows += [("sample", f"| {line}") for line in sample.split("\n")] if sample else []
    for label, path in (("report", facts.report_path), ("export", facts.export_path)):
        if path is not None:
            rows.append((label, printable(str(path))))
    if facts.best is not None:
        loss, step, path = facts.best
        told = f"the lowest eval loss of a checkpoint, {loss:.4g}, was at step {step}: {path}"
        rows += [("best", printable(told)), ("best", "unisono eval and unisono checkpoint export take it with --best")]
    rows += [("try next", printable(command)) for command in facts.next_commands]
    return [(label, text) for label, text in rows if text]


def _speed(summary: RunSummary) -> str:
    parts: list[str] = []
    total, device = summary.tokens_per_s, summary.tokens_per_s_device
    if total is not None:
        several = device is not None and device < 0.99 * total
        parts.append(
            f"{short_number(total)} {summary.unit}/s"
            + (f" ({short_number(device or 0.0)} per device)" if several else "")
        )
    if summary.step_s is not None:
        parts.append(f"{short_time(summary.step_s)} per step")
    if summary.utilization is not None:
        name, value = summary.utilization
        parts.append(f"MFU {percent(value)}" if name == "mfu" else f"{percent(value)} of the measured matmul ceiling")
    if summary.peak_bytes is not None:
        parts.append(f"peak memory {format_gib(summary.peak_bytes)}")
    return ", ".join(parts)


def _link(link: Fields) -> str:
    """``gloo: sent 41.2MB/s, received 41.2MB/s, 12% of what doctor --bench measured``."""
    sent, received = (short_number(link[f"{way}_bytes_per_s"]) for way in ("sent", "received"))
    return f"{printable(str(link['peer']))}: sent {sent}B/s, received {received}B/s{_used(link)}"


def _axis_link(row: Fields) -> str:
    """``dp (shard, gloo): 41.2MB/s on the wire, 12% of what doctor --bench measured``."""
    names = [str(row.get(name)) for name in ("group", "transport") if row.get(name) != row.get("axis")]
    rate = short_number(number(row.get("wire_bytes_per_s")) or 0.0)
    return f"{printable(str(row.get('axis')))} ({printable(', '.join(names))}): {rate}B/s on the wire{_used(row)}"


def _used(link: Fields) -> str:
    used_frac = number(link.get("used_frac"))
    return "" if used_frac is None else f", {percent(used_frac)} of what doctor --bench measured"


def _time(time_frac: Mapping[str, float]) -> str:
    ordered = sorted(time_frac.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {percent(frac)}" for name, frac in ordered if frac >= 0.0005)

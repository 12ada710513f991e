"""Formats events and run summaries as lines of text. Pure functions without a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from unisono.observe.events import number
from unisono.observe.run_summary import RunSummary, duration, format_gib, short_number, short_time, sparkline
from unisono.observe.sanitize import printable

Fields = Mapping[str, Any]

# name in the line, field of a step event, format
_KEY_VALUES: Final[tuple[tuple[str, str, str], ...]] = (
    ("loss", "train/loss", ".4f"),
    ("lr", "train/lr", ".3g"),
    ("grad_norm", "train/grad_norm", ".3g"),
    ("tokens_total", "train/tokens_total", ".0f"),
    ("skipped_steps", "train/skipped_steps", ".0f"),
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


def key_value_line(event: Fields) -> str:
    """Format a ``step`` event as ``step=120 steps_total=5000 loss=3.2100 ...``; missing fields are left out."""
    parts = [f"step={event['step']}"]
    if "steps_total" in event:
        parts.append(f"steps_total={event['steps_total']}")
    for name, field, form in _KEY_VALUES:
        value = number(event.get(field))
        if value is not None:
            parts.append(f"{name}={value:{form}}")
    return " ".join(parts)


def status_lines(event: Fields, width: int, *, max_lines: int = 2, warnings: Sequence[str] = ()) -> list[str]:
    """Format a ``step`` event in ``max_lines`` lines of ``width`` characters, dropping the least important parts."""
    parts = [part for part in (make(event) for make in _STATUS_PARTS) if part is not None]
    if warnings:
        parts.append(_Part(1, "warn " + " ".join(dict.fromkeys(warnings))))
    while len(parts) > 1 and not _fits(_fill(parts, width), width, max_lines):
        parts.remove(max(parts, key=lambda part: part.rank))
    return [printable(line)[: max(0, width)] for line in _fill(parts, width)]


def _fill(parts: Sequence[_Part], width: int) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part.text) <= width:
            lines[-1] += " | " + part.text
        else:
            lines.append(part.text)
    return lines


def _fits(lines: Sequence[str], width: int, max_lines: int) -> bool:
    return len(lines) <= max_lines and all(len(line) <= width for line in lines)


@dataclass(frozen=True, slots=True)
class _Part:
    rank: int  # the highest rank is dropped first
    text: str


def _step_part(event: Fields) -> _Part:
    total = event.get("steps_total")
    if not isinstance(total, int) or total <= 0:
        return _Part(0, f"step {event['step']}")
    return _Part(0, f"step {event['step']}/{total} {100 * event['step'] / total:.1f}%")


def _loss_part(event: Fields) -> _Part | None:
    loss = number(event.get("train/loss"))
    highest = number(event.get("train/loss_max"))
    beside = f" (max {highest:.3g})" if highest is not None else ""
    return None if loss is None else _Part(2, f"loss {loss:.4g}{beside}")


def _speed_part(event: Fields) -> _Part | None:
    total, device = number(event.get("perf/tokens_per_s")), number(event.get("perf/tokens_per_s_device"))
    if total is None:
        return None
    several = device is not None and device < 0.99 * total
    return _Part(
        3, f"{short_number(total)} tok/s" + (f" ({short_number(device)}/dev)" if several and device is not None else "")
    )


def _utilization_part(event: Fields) -> _Part | None:
    mfu, measured = number(event.get("perf/mfu")), number(event.get("perf/matmul_ceiling_frac"))
    if mfu is not None:
        return _Part(5, f"mfu {percent(mfu)}")
    return None if measured is None else _Part(5, f"{percent(measured)} of matmul ceiling")


def _time_part(event: Fields) -> _Part | None:
    shown: list[str] = []
    for label, phase in (("data", "data_wait"), ("comm exposed", "comm_exposed"), ("ckpt", "ckpt_stall")):
        frac = number(event.get(f"time/{phase}_frac"))
        if frac is not None and (frac > 0 or phase != "comm_exposed"):
            shown.append(f"{label} {percent(frac)}")
    return _Part(7, " ".join(shown)) if shown else None


def _memory_part(event: Fields) -> _Part | None:
    peak, limit = number(event.get("mem/peak_bytes")), number(event.get("mem/limit_bytes"))
    if peak is None:
        return None
    return _Part(8, f"mem peak {format_gib(peak)}" + (f" of {format_gib(limit)}" if limit is not None else ""))


def _value_part(rank: int, label: str, field: str, write: Callable[[float], str]) -> Callable[[Fields], _Part | None]:
    def make(event: Fields) -> _Part | None:
        value = number(event.get(field))
        return None if value is None else _Part(rank, f"{label} {write(value)}")

    return make


def _skipped_part(event: Fields) -> _Part | None:
    skipped = number(event.get("train/skipped_steps"))
    return _Part(4, f"skipped {skipped:.0f}") if skipped else None


_STATUS_PARTS: Final[tuple[Callable[[Fields], _Part | None], ...]] = (
    _step_part,
    _loss_part,
    _value_part(6, "lr", "train/lr", lambda value: f"{value:.2e}"),
    _value_part(9, "gnorm", "train/grad_norm", lambda value: f"{value:.2g}"),
    _speed_part,
    _utilization_part,
    _time_part,
    _memory_part,
    _skipped_part,
    _value_part(4, "eta", "eta_s", duration),
)


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
    make = _MESSAGES.get(event["kind"])
    message = make(event) if make is not None else None
    return message and Message(level=message.level, text=printable(message.text), code=printable(message.code))


def _eval(event: Fields) -> Message:
    metrics = [
        f"{name.removeprefix('eval/')}={value:.4g}"
        for name, raw in event.items()
        if name.startswith("eval/") and (value := number(raw)) is not None
    ]
    return Message(level="info", text=" ".join(["eval", f"step={event.get('step', '?')}", *metrics]))


def _run_start(event: Fields) -> Message | None:
    parameters = number(event.get("parameters"))
    if parameters is None or "plan_text" not in event:
        return None
    data = cast("Fields", event.get("data") or {})
    why = f" ({event['precision_why']})" if event.get("precision_why") else ""
    corpus = f"; {data['corpus']}, {short_number(float(data['train_tokens']))} tokens" if "train_tokens" in data else ""
    packed = _packing(cast("Fields", data["packing"])) if data.get("packing") else ""
    held = _held(cast("Fields", event["held_bytes"])) if event.get("held_bytes") else ""
    return Message(
        level="info", text=f"{short_number(parameters)} parameters on {event['plan_text']}{why}{held}{corpus}{packed}"
    )


def _held(count_bytes: Fields) -> str:
    """Memory that the plan predicts for this rank's parameters, gradients and optimizer state."""
    held = {name: format_gib(float(count)) for name, count in count_bytes.items()}
    return f"; held here: parameters {held['parameters']}, gradients {held['gradients']}, optimizer {held['optimizer']}"


def _rules_inferred(event: Fields) -> Message:
    """Layers sharded by inferred rules, and layers that stay whole with the reason."""
    rules = cast("list[Fields]", event.get("rules") or [])
    left = cast("Fields", event.get("left") or {})
    cut = ", ".join(str(rule["module"]) for rule in rules)
    whole = "".join(f"; {name} stays whole: {why}" for name, why in left.items())
    return Message(level="notice", text=f"rules of tensor parallelism inferred for {cut}{whole}", code="rules_inferred")


def _placements(event: Fields) -> Message:
    """Parameters sharded over tp with their dim, and parameters that stay whole."""
    placed = cast("dict[str, list[str | None]]", event.get("placed") or {})
    cut = ", ".join(f"{name} (dim {dims.index('tp')})" for name, dims in placed.items() if "tp" in dims)
    whole = ", ".join(name for name, dims in placed.items() if "tp" not in dims)
    return Message(
        level="notice", text=f"placed over tp: {cut}; whole on every rank: {whole or 'none'}", code="placements"
    )


def _packing(stats: Fields) -> str:
    """Waste and cut documents of packing, compared with windows of the plain stream."""
    return (
        f"; packed: {stats['waste_frac']:.2%} of positions without a target, {stats['cut_documents']} of "
        f"{stats['documents']} documents cut (as a stream {stats['stream_waste_frac']:.2%}, {stats['stream_cut_documents']})"
    )


def _compiled(event: Fields) -> Message | None:
    seconds = number(event.get("first_step_s"))
    return None if seconds is None else Message(level="info", text=f"compiled: the first step took {duration(seconds)}")


def _resumed(event: Fields) -> Message:
    source = event.get("checkpoint") or event.get("path")
    origin = f" from {source}" if source else ""
    differences = cast("list[object]", event.get("differences") or [])
    if (more := len(differences) - _DIFFERENCES) > 1:  # another kind of plan.sync gives one for each parameter
        differences = [*differences[:_DIFFERENCES], f"{more} more, in the event log"]
    weaker = f"; not bit-exact, because of {'; '.join(map(str, differences))}" if differences else ""
    return Message(level="info", text=f"resumed at step {event.get('step', '?')}{origin}{weaker}")


def _compression(event: Fields) -> Message | None:
    """The codec that ``auto`` chose, or a doubt about the configured one."""
    if event.get("why") == "as asked":
        return None
    return Message(level="notice", text=f"compression {event.get('asked')}: {event.get('why')}", code="compression")


def _servers(event: Fields) -> Message:
    """A parameter server's message about lost state."""
    return Message(level="warning", text=str(event.get("message") or ""))


def _notice(event: Fields) -> Message:
    code = str(event.get("code", "notice"))
    said = "; ".join([str(event.get("what")), *(f"{part}: {event.get(part)}" for part in ("why", "cost", "fix"))])
    return Message(level="notice", code=code, text=f"{code}: {said}")


def _warning(event: Fields) -> Message:
    code = str(event.get("code", ""))
    said = str(event.get("message") or event.get("text") or "")
    return Message(level="warning", code=code, text=f"{code}: {said}" if code else said)


def _sink_failed(event: Fields) -> Message:
    sink = event.get("sink")
    after = "it was detached; the events file is complete"
    if sink == "events":
        after = "events are lost until writing works again"
    return Message(level="warning", text=f"sink {sink} failed ({event.get('error')}); {after}; training goes on")


def _checkpoint_failed(event: Fields) -> Message:
    at = f" at step {event['step']}" if "step" in event else ""
    return Message(level="warning", text=f"checkpoint{at} failed: {_reason(event)}; the one before stays valid")


def _quarantined(event: Fields) -> Message:
    name = event.get("checkpoint") or event.get("path") or event.get("step")
    return Message(level="warning", text=f"checkpoint {name} is damaged and was set aside: {_reason(event)}")


def _skipped(event: Fields) -> Message:
    shown = [("loss", number(event.get("loss"))), ("gradient norm", number(event.get("grad_norm")))]
    why = ", ".join(f"{name} {value:.4g}" for name, value in shown if value is not None) or _reason(event)
    return Message(level="warning", text=f"step {event.get('step', '?')} skipped on all ranks: {why}")


def _data_skipped(event: Fields) -> Message:
    samples = cast("list[object]", event.get("samples") or [])
    shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
    text = f"step {event.get('step', '?')}: samples {shown} could not be read and weigh 0; further ones are in the event log"
    return Message(level="warning", text=text, code="data_skipped")


def _run_end(event: Fields) -> Message | None:
    if "error" not in event:
        return None
    said = str(event.get("message") or "").split("\n")[0]
    return Message(level="warning", text=f"the run failed at step {event.get('step', '?')}: {event['error']}: {said}")


def _preempt(event: Fields) -> Message:
    by = event.get("signal") or event.get("reason") or "a stop request"
    return Message(level="warning", text=f"stopping at step {event.get('step', '?')} on {by}; the state is being saved")


def _early_stop(event: Fields) -> Message:
    best, patience = number(event.get("best_loss")), event.get("patience")
    why = _reason(event) if best is None else f"no eval loss below {best:.4g} in {patience} evaluations"
    return Message(level="info", text=f"stopped early at step {event.get('step', '?')}: {why}")


def _events_lost(event: Fields) -> Message:
    return Message(level="warning", text=f"{event.get('lines')} event(s) could not be written and are lost")


def _reason(event: Fields) -> str:
    return str(event.get("error") or event.get("reason") or "no reason given")


_DIFFERENCES: Final = 5  # differences of a resumed run shown on the console

_MESSAGES: Final[Mapping[str, Callable[[Fields], Message | None]]] = {
    "run_start": _run_start,
    "rules_inferred": _rules_inferred,
    "placements": _placements,
    "compiled": _compiled,
    "eval": _eval,
    "resumed": _resumed,
    "compression": _compression,
    "servers": _servers,
    "notice": _notice,
    "warning": _warning,
    "sink_failed": _sink_failed,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_quarantined": _quarantined,
    "skipped_step": _skipped,
    "data_skipped": _data_skipped,
    "preempt": _preempt,
    "early_stop": _early_stop,
    "events_lost": _events_lost,
    "run_end": _run_end,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEndFacts:
    """Facts for the summary that the events do not hold: sample, paths of report and export, next commands."""

    sample_text: str = ""
    report_path: Path | None = None
    export_path: Path | None = None
    next_commands: Sequence[str] = ()


_ENDINGS: Final = {
    "finished": "Finished",
    "stopped early": "Stopped early after",
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
        parts.append(f"{short_number(summary.tokens_per_s)} tokens/s")
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
    rows += [("link", _link(link)) for link in summary.links]
    if summary.losses:
        values = [loss for _, loss in summary.losses]
        ends = f"  {values[0]:.4g} -> {values[-1]:.4g}"
        rows.append(("loss", sparkline(values, max(8, min(60, width - 10 - len(ends))), ascii_only=ascii_only) + ends))
    sample = printable(facts.sample_text, newlines=True).strip("\n")
    rows += [("sample", f"| {line}") for line in sample.split("\n")] if sample else []
    for label, path in (("report", facts.report_path), ("export", facts.export_path)):
        if path is not None:
            rows.append((label, printable(str(path))))
    rows += [("try next", printable(command)) for command in facts.next_commands]
    return [(label, text) for label, text in rows if text]


def _speed(summary: RunSummary) -> str:
    parts: list[str] = []
    total, device = summary.tokens_per_s, summary.tokens_per_s_device
    if total is not None:
        several = device is not None and device < 0.99 * total
        parts.append(
            f"{short_number(total)} tokens/s" + (f" ({short_number(device or 0.0)} per device)" if several else "")
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
    """``127.0.0.1:4711: sent 41.2MB/s, received 41.2MB/s``."""
    sent, received = (short_number(link[f"{way}_bytes_per_s"]) for way in ("sent", "received"))
    return f"{printable(str(link['peer']))}: sent {sent}B/s, received {received}B/s"


def _time(time_frac: Mapping[str, float]) -> str:
    ordered = sorted(time_frac.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {percent(frac)}" for name, frac in ordered if frac >= 0.0005)

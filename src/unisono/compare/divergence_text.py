"""The first divergence of two runs as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unisono.compare.divergence import Divergence, TensorSummary
from unisono.compare.first_difference import FirstDifference
from unisono.sanitize import printable

_SHOWN_SETTINGS: Final = 20


def divergence_lines(found: FirstDifference) -> Iterator[str]:
    """The result of a search, as lines."""
    yield f"A  {printable(str(found.a))}"
    yield f"B  {printable(str(found.b))}"
    yield ""
    alike = "are alike up to rounding" if found.is_rounded else "have the same losses and gradient norms"
    if found.history_step is None:
        yield f"the {found.common_steps} steps that both have {alike}"
    else:
        yield f"the first step whose loss or gradient norm differs: {found.history_step}"
    if found.replayed_steps:
        before = f", after {_steps(found.run_up_steps)} from the checkpoint" if found.run_up_steps else ""
        yield f"replayed of each run: {_steps(found.replayed_steps)}{before}"
    yield ""
    if found.divergence is not None:
        yield from _divergence(found.divergence)
    elif found.verdict == "identical":
        yield "no divergence" + ("" if found.is_rounded else ": checkpoints of the same steps have the same bits too")
    elif found.is_rounded:
        yield "no divergence beyond rounding in the replayed steps, and the histories differ by more: rounding that has"
        yield "grown over many steps, a device, code or data that have changed since, or an operation that is not deterministic"
    else:
        yield "no divergence in the replays, which the histories have: it came from a device, from code or data that have changed"
        yield "since, or from an operation that is not deterministic"
    if found.settings:
        yield ""
        yield "settings that differ"
        yield from (
            f"  {printable(each.key)}: {each.a or 'none'} -> {each.b or 'none'}"
            for each in found.settings[:_SHOWN_SETTINGS]
        )
        if len(found.settings) > _SHOWN_SETTINGS:
            yield f"  {len(found.settings) - _SHOWN_SETTINGS} more, with --json"
    if found.notes:
        yield ""
        yield from (printable(note) for note in found.notes)


def _divergence(found: Divergence) -> Iterator[str]:
    yield f"first divergence: step {found.step}, {found.phase}" + (f", rank {found.rank}" if found.rank else "")
    call = f" (call {found.call + 1})" if found.call else ""
    facts = {
        "layer": printable(found.layer) + call if found.layer else "",
        "operator": printable(found.operator),
        "tensor": printable(found.tensor),
        "micro-batch": str(found.micro_batch) if found.micro_batch else "",
        "samples": ", ".join(str(sample) for sample in found.samples),
    }
    yield from (f"  {name:<12}{text}" for name, text in facts.items() if text)
    for letter, summary in (("A", found.a), ("B", found.b)):
        if summary is not None:
            yield f"  {letter:<12}{_summary(summary)}"
    if (size := found.size) is not None:
        relative = f", relative norm {size.relative:.3g}" if size.relative is not None else ""
        largest = f", largest {size.max_abs:.3g}" if size.max_abs is not None else ""
        yield f"  {'difference':<12}{size.differing} of {size.elements} elements{largest}{relative}"
        yield f"  {'first at':<12}{list(size.at)}: {size.a!r} in A, {size.b!r} in B"
    if found.tolerance is not None:
        yield f"  {'rounding':<12}a relative norm of up to {found.tolerance:.3g}"
    yield from (
        f"  {'because' if number == 0 else '':<12}{printable(text)}" for number, text in enumerate(found.because)
    )


def _summary(summary: TensorSummary) -> str:
    norm = "norm is no number" if summary.norm is None else f"norm {summary.norm:.9g}"
    largest = "" if summary.max_abs is None else f", largest {summary.max_abs:.6g}"
    return f"{summary.dtype} {list(summary.shape)}, {norm}{largest}"


def _steps(count: int) -> str:
    return f"{count} {'step' if count == 1 else 'steps'}"

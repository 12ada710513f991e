"""A predicted layout as lines of text, and its fields as JSON types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from unisono.planner.layout import Layout
    from unisono.planner.simulate import Prediction

_LAYOUT = (
    *("precision", "num_devices", "dp", "zero", "dp_shard", "tp", "pp", "stages_per_rank", "schedule", "cut"),
    *("layers_per_stage", "cp", "ep"),
    *("micro_batch", "global_batch", "seq_len", "recompute", "recomputed_blocks", "offload"),
)


def layout_facts(layout: Layout) -> dict[str, Any]:
    """The layout with what was assumed, as JSON types."""
    values = {name: getattr(layout, name) for name in _LAYOUT} | {"dp_shard": layout.state_ranks // layout.cp or 1}
    values |= {
        "layers_per_stage": list(layout.layers_per_stage),
        "recomputed_blocks": list(layout.recomputed_blocks),
        "keeps": list(layout.keeps),
    }
    return {"device": layout.device.name, "params": layout.model.params, **values}


def prediction_lines(layout: Layout, prediction: Prediction) -> Iterator[str]:
    """The layout, its step time and memory, and what they consist of."""
    from unisono.observe.run_summary import format_gib
    from unisono.planner.layout import KEPT_BY_RUNS
    from unisono.planner.step_time import efficiency_key, fitted_constants

    step_s, factor = prediction.step_s, 1 + prediction.spread
    said = {name: value for name, value in layout_facts(layout).items() if value not in ([], None)}
    if layout.keeps == KEPT_BY_RUNS:  # goes without saying
        del said["keeps"]
    yield " ".join(f"{name}={_text(value)}" for name, value in said.items() if value is not False)
    if layout.pp > 1 and not layout.stages_per_rank:
        yield f"stages per rank are not given (notes=VP=1): {fitted_constants().stages_per_rank:.2g} are assumed"
    yield f"step {step_s:.4g} s; nine of ten such runs lie between {step_s / factor:.4g} and {step_s * factor:.4g} s"
    if efficiency_key(layout) not in fitted_constants().efficiency:
        yield f"no published run was used for {efficiency_key(layout)}; the interval is that of other devices"
    yield (
        f"{prediction.tokens_per_s:,.0f} tokens/s, {_tflops(prediction.model_flops_per_s)} TFLOP/s of each device, "
        f"{prediction.utilization:.1%} of its peak"
    )
    yield from _parts(prediction.parts_s, step_s)
    yield from _memory(layout, prediction)
    if layout.offload:
        yield f"  {'on the host':<18}{format_gib(prediction.host_bytes):>10}"


def _text(value: Any) -> str:
    """A field of a layout, as the columns of ``plan simulate`` have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, cast("list[int]", value)))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tflops(flops_per_s: float) -> str:
    """Whole ones, or two digits of those of a CPU."""
    return f"{flops_per_s / 1e12:,.0f}" if flops_per_s >= 1e13 else f"{flops_per_s / 1e12:.2g}"


def _parts(parts_s: Mapping[str, float], step_s: float) -> Iterator[str]:
    from unisono.planner.number_sources import LAYOUT_SOURCES

    for name, seconds in sorted(parts_s.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * step_s:
            yield f"  {name.replace('_', ' '):<18}{seconds:>10.4g} s  {seconds / step_s:>6.1%}  {LAYOUT_SOURCES[name].kind}"


def _memory(layout: Layout, prediction: Prediction) -> Iterator[str]:
    """The memory of the device that needs most, and what it consists of."""
    from unisono.observe.run_summary import format_gib
    from unisono.planner.number_sources import LAYOUT_SOURCES

    peak, has = prediction.peak_bytes, layout.device.memory_bytes
    yield f"memory {format_gib(peak)} of {format_gib(has)}" + (
        ", which does not fit" if prediction.needed_bytes > has else ""
    )
    for name, size in sorted(prediction.memory.items(), key=lambda item: -item[1]):
        if size >= 0.001 * peak:
            yield f"  {name.replace('_', ' '):<18}{format_gib(size):>10}    {size / peak:>6.1%}  {LAYOUT_SOURCES[name].kind}"

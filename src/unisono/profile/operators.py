"""Tables of operators, kernels and matrix products, synchronisation points, and operators that a fused one can replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.profile.host_events import HostEvents, PythonFrames
from unisono.profile.intervals import Counts, Floats
from unisono.profile.rank_profile import KernelTime, MatrixProduct, OperatorTime, Pattern, SyncPoint
from unisono.profile.trace_file import KERNEL, OPERATOR, RUNTIME, Trace, json_list

MAX_ROWS: Final = 50
_MAX_PRODUCTS: Final = 20
_PRODUCTS: Final = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_WAITING_OPERATORS: Final = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
_WAITING_CALLS: Final = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "hipStreamSynchronize"}
)
_PRODUCT_NAMES: Final = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "mm", "addmm", "linear"}
)  # of attention; linear would be a projection, which ends the search
_MOVES: Final = frozenset(
    {
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "expand",
        "unsqueeze",
        "squeeze",
        "to",
        "t",
        "clone",
        "copy_",
    }
)
_WATCH: Final = "PythonDispatchMode"  # what watches operators, as a profile with stacks does
_SOFTMAX_REACH: Final = 8  # operators between a product and the softmax, apart from those that only move data
_NORM_REACH: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTimes:
    """Time of kernels by the host event that launched them [host events], and all kernels' places in the trace."""

    launched_us: Floats
    kernels: Counts


def device_times(trace: Trace, host: HostEvents) -> DeviceTimes:
    """Time of kernels by the operator that launched them, through the number that launch and kernel share."""
    launched = np.zeros(len(host.place))
    kernels = trace.of_kind(KERNEL)
    if len(kernels):
        duration = dict(zip(trace.correlation[kernels].tolist(), trace.duration_us[kernels].tolist(), strict=True))
        calls = np.flatnonzero(trace.kind[host.place] == RUNTIME)
        for at in calls.tolist():
            took = duration.get(int(trace.correlation[host.place[at]]))
            if took is not None and trace.correlation[host.place[at]] >= 0:
                target = int(host.parent[at])
                launched[target if target >= 0 else at] += took
    return DeviceTimes(launched_us=launched, kernels=kernels)


def subtree_sums(host: HostEvents, values: Floats) -> Floats:
    """The sum of ``values`` over each event and all inside it [host events]."""
    sums = values.copy()
    for at in range(len(sums) - 1, -1, -1):  # children come after their parents
        if host.parent[at] >= 0:
            sums[host.parent[at]] += sums[at]
    return sums


def operator_table(
    trace: Trace, host: HostEvents, device: DeviceTimes, within: NDArray[np.bool_]
) -> tuple[OperatorTime, ...]:
    """Operators by name, most time of their own first: on the host, or if there are kernels, on the device."""
    operators = within & (trace.kind[host.place] == OPERATOR) & ~trace.named(lambda name: name == _WATCH)[host.place]
    chosen = np.flatnonzero(operators)
    names = trace.name[host.place[chosen]]
    size = len(trace.names)
    if not len(chosen):
        return ()
    own_us, device_us = host.self_us[chosen], device.launched_us[chosen]
    calls = np.bincount(names, minlength=size)
    own = np.bincount(names, weights=own_us, minlength=size)
    total = np.bincount(names, weights=trace.duration_us[host.place[chosen]], minlength=size)
    on_device = np.bincount(names, weights=device_us, minlength=size)
    rank_by = on_device if len(device.kernels) else own
    top = [name for name in np.argsort(-rank_by, kind="stable")[:MAX_ROWS].tolist() if calls[name]]
    shapes = trace.shape[host.place[chosen]]
    return tuple(
        OperatorTime(
            name=trace.names[name],
            calls=int(calls[name]),
            total_s=float(total[name]) / 1e6,
            self_s=float(own[name]) / 1e6,
            device_s=float(on_device[name]) / 1e6,
            shapes=_top_shapes(trace, shapes[names == name], (own_us + device_us)[names == name]),
        )
        for name in top
    )


def _top_shapes(trace: Trace, shapes: NDArray[np.int32], times: Floats) -> tuple[str, ...]:
    known = shapes >= 0
    if not known.any():
        return ()
    sums = np.bincount(shapes[known], weights=times[known])
    return tuple(trace.shapes[at][:200] for at in np.argsort(-sums, kind="stable")[:3].tolist() if sums[at] > 0)


def kernel_table(trace: Trace, kernels: Counts) -> tuple[KernelTime, ...]:
    """Kernels by name, most time first."""
    if not len(kernels):
        return ()
    names = trace.name[kernels]
    calls, total = np.bincount(names), np.bincount(names, weights=trace.duration_us[kernels])
    top = [name for name in np.argsort(-total, kind="stable")[:MAX_ROWS].tolist() if calls[name]]
    return tuple(
        KernelTime(name=trace.names[name], calls=int(calls[name]), total_s=float(total[name]) / 1e6) for name in top
    )


def product_table(
    trace: Trace, host: HostEvents, device: DeviceTimes, within: NDArray[np.bool_]
) -> tuple[MatrixProduct, ...]:
    """Matrix products by shape, most time first."""
    found: dict[tuple[str, int, int, int, int], list[float]] = {}
    parsed: dict[int, list[Any]] = {}
    is_product = trace.named(lambda name: name in _PRODUCTS)[host.place] & within
    spent = subtree_sums(host, device.launched_us) if len(device.kernels) else trace.duration_us[host.place]
    for at in np.flatnonzero(is_product).tolist():
        place = int(host.place[at])
        shape, name = int(trace.shape[place]), trace.names[trace.name[place]]
        if shape < 0:
            continue
        if shape not in parsed:
            parsed[shape] = json_list(trace.shapes[shape])
        sizes = _product_sizes(parsed[shape], _PRODUCTS[name])
        if sizes is not None:
            entry = found.setdefault((name, *sizes), [0, 0.0])
            entry[0] += 1
            entry[1] += float(spent[at])
    rows = [
        MatrixProduct(name=name, batch=batch, m=m, k=k, n=n, calls=int(calls), total_s=total / 1e6)
        for (name, batch, m, k, n), (calls, total) in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.total_s)[:_MAX_PRODUCTS])


def _product_sizes(dims: list[Any], first: int) -> tuple[int, int, int, int] | None:
    """Batch, m, k and n of the factors, which are inputs ``first`` and the next; None if they are no matrices."""
    if len(dims) < first + 2:
        return None
    one, other = dims[first], dims[first + 1]
    if not isinstance(one, list) or not isinstance(other, list):
        return None
    one, other = cast("list[Any]", one), cast("list[Any]", other)
    if len(one) != len(other) or len(one) not in (2, 3) or not all(isinstance(size, int) for size in (*one, *other)):
        return None
    return (one[0] if len(one) == 3 else 1), one[-2], one[-1], other[-1]


def sync_points(
    trace: Trace, host: HostEvents, frames: PythonFrames, within: NDArray[np.bool_]
) -> tuple[SyncPoint, ...]:
    """Where the training threads wait for the device, or read a number, which waits on an accelerator; most calls first.

    On the CPU, an optimizer's reading of its own numbers is left out: they lie in host memory on any device.
    """
    has_device = bool((trace.kind == KERNEL).any())
    operators = trace.named(lambda name: name in _WAITING_OPERATORS)[host.place] & (trace.kind[host.place] == OPERATOR)
    calls = trace.named(lambda name: name in _WAITING_CALLS)[host.place] & (trace.kind[host.place] == RUNTIME)
    found: dict[tuple[str, str, str], list[float]] = {}
    for at in np.flatnonzero(within & host.is_training & (operators | calls)).tolist():
        above = int(host.parent[at])
        while above >= 0 and not operators[above]:
            above = int(host.parent[above])
        phase = host.phases[int(host.phase[at])]
        if above >= 0 or (phase == "optimizer" and not has_device):
            continue
        place = int(host.place[at])
        source = frames.source(int(trace.thread[place]), float(trace.start_us[place]))
        entry = found.setdefault((trace.names[trace.name[place]], phase, source), [0, 0.0])
        entry[0] += 1
        entry[1] += float(trace.duration_us[place])
    points = [
        SyncPoint(kind=kind, phase=phase, calls=int(count), total_s=total / 1e6, source=source)
        for (kind, phase, source), (count, total) in found.items()
    ]
    return tuple(sorted(points, key=lambda point: -point.calls)[:MAX_ROWS])


# --- operators that one fused operator replaces -----------------------------------------------------------------------


def patterns(trace: Trace, host: HostEvents, device: DeviceTimes, within: NDArray[np.bool_]) -> tuple[Pattern, ...]:
    """Attention and norms that are written as single operators, in forward passes."""
    others = [at for at, name in enumerate(host.phases) if name in ("optimizer", "data_wait")]
    chosen = np.flatnonzero(
        within
        & host.is_root
        & ~host.in_backward
        & (trace.thread[host.place] == host.main_thread)
        & ~np.isin(host.phase, others)
    )
    names = [trace.names[name].partition("::")[2] for name in trace.name[host.place[chosen]].tolist()]
    sequence = _Sequence(trace, host, device, chosen, names)
    found: list[Pattern] = []
    for kind, runs in (("attention", _attentions(names)), ("norm", _norms(names))):
        if runs:
            found.append(sequence.pattern(kind, runs))
    return tuple(found)


def _attentions(names: Sequence[str]) -> list[tuple[int, int, int]]:
    """First, middle and last place of each product, softmax, product."""
    found: list[tuple[int, int, int]] = []
    for at, name in enumerate(names):
        if name not in ("softmax", "_softmax"):
            continue
        first = _nearest_product(names, at, -1)
        last = _nearest_product(names, at, 1)
        if first is not None and last is not None:
            found.append((first, at, last))
    return found


def _nearest_product(names: Sequence[str], at: int, step: int) -> int | None:
    left = _SOFTMAX_REACH
    at += step
    while 0 <= at < len(names) and left:
        name = names[at]
        if name in _PRODUCT_NAMES:
            return None if name in ("linear", "addmm", "mm") else at
        left -= name not in _MOVES
        at += step
    return None


def _norms(names: Sequence[str]) -> list[tuple[int, int, int]]:
    """First, root and last place of each mean (or variance), root, product: a layer norm or root-mean-square norm."""
    found: list[tuple[int, int, int]] = []
    for at, name in enumerate(names):
        if name not in ("rsqrt", "sqrt"):
            continue
        before = [n for n in range(max(0, at - _NORM_REACH), at) if names[n] in ("mean", "var", "var_mean", "std")]
        squares = any(names[n] in ("var", "var_mean") for n in before) or any(
            names[n] in ("pow", "square", "mul") for n in range(max(0, at - _NORM_REACH), at)
        )
        last = next((n for n in range(at + 1, min(len(names), at + 3)) if names[n] in ("mul", "div")), None)
        if before and squares and last is not None and (not found or before[0] > found[-1][2]):
            scaled = last + 1 if last + 1 < len(names) and names[last + 1] in ("mul", "add") else last
            found.append((before[0], at, scaled))
    return found


class _Sequence:
    """The forward operators of the training thread, and what their backward passes take."""

    def __init__(
        self, trace: Trace, host: HostEvents, device: DeviceTimes, chosen: Counts, names: Sequence[str]
    ) -> None:
        self._trace, self._host, self._chosen, self._names = trace, host, chosen, names
        self._times = subtree_sums(host, device.launched_us) if len(device.kernels) else trace.duration_us[host.place]
        # a root's numbers of autograd are those of the operators inside it: from its own to before that of the next
        place = host.place
        backward = np.flatnonzero((trace.sequence[place] >= 0) & (trace.sequence[place] % 2 == 1))
        engine = backward[trace.named(lambda name: name.startswith("autograd::engine"))[place[backward]]]
        self._backward: Mapping[int, float] = dict(
            zip((trace.sequence[place[engine]] // 2).tolist(), self._times[engine].tolist(), strict=True)
        )

    def pattern(self, kind: str, runs: Sequence[tuple[int, int, int]]) -> Pattern:
        total = element = 0.0
        for first, _, last in runs:
            for at in range(first, last + 1):
                took = float(self._times[self._chosen[at]]) + self._backward_us(at)
                total += took
                element += 0.0 if self._names[at] in _PRODUCT_NAMES else took
        first, middle, last = runs[0]
        shape = int(self._trace.shape[self._host.place[self._chosen[middle]]])
        return Pattern(
            kind=kind,
            calls=len(runs),
            total_s=total / 1e6,
            element_s=element / 1e6,
            example=tuple(self._names[first : last + 1]),
            shapes=self._trace.shapes[shape][:200] if shape >= 0 else "",
        )

    def _backward_us(self, at: int) -> float:
        """Time of the backward pass of the operator: of the numbers that it and the operators inside it have."""
        trace, host = self._trace, self._host
        event = int(self._chosen[at])
        first = int(trace.sequence[host.place[event]])
        if first < 0:
            return 0.0
        end = trace.end_us[host.place[event]]
        numbers = {first // 2}
        inner = event + 1
        while inner < len(host.place) and host.parent[inner] >= event and trace.start_us[host.place[inner]] <= end:
            if trace.sequence[host.place[inner]] >= 0:
                numbers.add(int(trace.sequence[host.place[inner]]) // 2)
            inner += 1
        return sum(self._backward.get(number, 0.0) for number in numbers)

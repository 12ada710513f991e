"""Compares a step of two runs whose layouts differ: whole tensors, put together from the ranks, up to rounding. Imports no torch.

Compared are weights, moments, outputs of modules by sample, losses, reduced gradients and updated moments. Sums are made in
another order in another layout, so a relative difference counts if it is above a tolerance: 4 sqrt(k) (u + v sqrt(n)), where u is
the unit roundoff of the coarser precision, v that of fp32, in which sums are made, n the terms of the longest sum (tokens or
features), and k the number of operators before the tensor. A sum of n rounded terms is off by v sqrt(n) in the mean square
(Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019), its result is rounded once more, k independent
ones are off by sqrt(k) times that, and 4 stands for four deviations.

Gradients and moments are measured by at least a thousandth of the largest of their kind, as those that would be 0 in exact
arithmetic are rounding alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.compare.alignment import unequal_items
from unisono.compare.divergence import DifferenceSize, Divergence, TensorSummary, difference_size, finite_or_none
from unisono.compare.step_record import FORWARD, LOSS, OPTIMIZER, START, SYNC, Entry, StepRecord, read_values

_UNIT: Final = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}
_DEVIATIONS: Final = 4.0
_FLOOR: Final = 1e-3  # of the largest norm of a kind
_RANK_FIELDS: Final = frozenset({"pp_rank", "dp_replicate_rank", "dp_shard_rank", "cp_rank", "tp_rank", "data_rank"})
_MAX_NAMED: Final = 4  # tensors that a note names
_SEPARATE: Final = frozenset({"guard", "meter", "scaler"})  # state that is no tensor of the model

Key = tuple[str, str, str, int, int]  # kind, layer, tensor, call, place


@dataclass(kw_only=True, slots=True)
class WholeTensor:
    """A tensor of all ranks: its ``value`` in float64, the ``phase``, the ``dtype`` and the operators before it."""

    phase: str
    value: NDArray[np.float64]
    dtype: str
    operators: int


@dataclass(kw_only=True, slots=True)
class WholeStep:
    """The whole tensors of a step in order, and the keys of those that could not be assembled from the ranks."""

    tensors: dict[Key, WholeTensor] = field(default_factory=dict[Key, WholeTensor])
    incomplete: list[Key] = field(default_factory=list[Key])


def layout_of(record: StepRecord) -> dict[str, int | str | bool]:
    """The layout without this rank's coordinates: runs of equal layouts can be compared bit by bit."""
    return {name: value for name, value in record.layout.items() if name not in _RANK_FIELDS}


def unit_roundoff(record: StepRecord) -> float:
    """Unit roundoff of the products of a run."""
    precision = str(record.layout.get("precision", "fp32"))
    return _UNIT["tf32" if precision == "fp32" and record.layout.get("tf32") else precision]


def first_whole_divergence(
    a: Sequence[StepRecord], b: Sequence[StepRecord], folders: tuple[Path, Path]
) -> tuple[Divergence | None, list[str]]:
    """The first whole tensor that differs by more than rounding, and notes about what was not compared."""
    notes: list[str] = []
    ids = [sorted(sample for record in _data_parts(run) for sample in record.sample_ids) for run in (a, b)]
    step = a[0].step
    if ids[0] != ids[1]:
        differ = sorted(set(ids[0]) ^ set(ids[1]))
        because = (
            f"sample {differ[0]} is in the batch of one of the runs alone" if differ else "samples occur more often"
        )
        return Divergence(step=step, phase="data", tensor="sample ids", rank=None, because=(because,)), notes
    mine, its = (_whole_step(run, folder) for run, folder in zip((a, b), folders, strict=True))
    unit = max(unit_roundoff(a[0]), unit_roundoff(b[0]))
    terms = _longest_sum(mine)
    floors = _floors(mine)
    left_out = [*mine.incomplete, *its.incomplete]
    for key, tensor in mine.tensors.items():
        other = its.tensors.get(key)
        if other is None or other.value.shape != tensor.value.shape:
            left_out.append(key)
            continue
        if tensor.phase == OPTIMIZER and (found := _hyperparameter_divergence(a[0], b[0])) is not None:
            return found, _notes(notes, left_out)
        size = difference_size(tensor.value, other.value)
        tolerance = _DEVIATIONS * math.sqrt(max(1, tensor.operators)) * (unit + _UNIT["fp32"] * math.sqrt(terms))
        if size is None or not _exceeds_rounding(
            tensor, other, tolerance, floors.get((key[0], key[2].partition("/")[0]), 0.0)
        ):
            continue
        return _divergence(a, b, key, (tensor, other), size, tolerance), _notes(notes, left_out)
    return _hyperparameter_divergence(a[0], b[0]), _notes(notes, left_out)


def _whole_step(records: Sequence[StepRecord], folder: Path) -> WholeStep:
    whole = WholeStep()
    by_key: dict[Key, list[tuple[StepRecord, Entry]]] = defaultdict(list)
    operators: dict[Key, int] = {}
    for record in records:
        count = 0
        for entry in record.entries:
            count += entry.kind == "operator"
            if entry.kind in ("state", "output", "loss", "gradient", "updated"):
                key = entry.kind, entry.layer, entry.tensor, entry.call, entry.place
                operators.setdefault(key, count)
                by_key[key].append((record, entry))
    order = {START: 0, FORWARD: 1, LOSS: 2, SYNC: 3, OPTIMIZER: 4}
    for key in sorted(by_key, key=lambda key: order.get(by_key[key][0][1].phase, 9)):
        parts = by_key[key]
        entry = parts[0][1]
        prefix = entry.tensor.partition("/")[0]
        if entry.phase not in order or prefix in _SEPARATE or (key[0] == "updated" and prefix != "optim"):
            continue
        value = _assemble(parts, folder)
        if value is None:
            whole.incomplete.append(key)
        else:
            whole.tensors[key] = WholeTensor(
                phase=entry.phase, value=value, dtype=entry.dtype, operators=operators[key]
            )
    return whole


def _assemble(parts: Sequence[tuple[StepRecord, Entry]], folder: Path) -> NDArray[np.float64] | None:
    """The whole tensor from its parts; None where values were not kept, or the parts cannot be assembled."""
    kind = parts[0][1].kind
    if kind == "output":
        return _rows_by_sample(parts, folder)
    if kind == "loss":
        values = [_values(folder, record, entry) for record, entry in parts if not record.layout.get("tp_rank")]
        complete = [value for value in values if value is not None]
        return None if len(complete) < len(values) else np.asarray(sum(complete), np.float64)
    whole: NDArray[np.float64] | None = None
    for record, entry in parts:
        value = _values(folder, record, entry)
        if value is None:
            return None
        if entry.shard is None:
            return value
        if whole is None:
            whole = np.full(entry.shard.global_shape, np.nan)
        for bounds, offset in entry.shard.blocks:
            block = value[tuple(slice(low, high) for low, high in bounds)]
            whole[tuple(slice(at, at + size) for at, size in zip(offset, block.shape, strict=True))] = block
    return whole


def _rows_by_sample(parts: Sequence[tuple[StepRecord, Entry]], folder: Path) -> NDArray[np.float64] | None:
    """The rows of all samples, by id."""
    rows: list[tuple[int, NDArray[np.float64]]] = []
    for record, entry in parts:
        if record.layout.get("tp_rank") or record.layout.get("cp_rank"):
            continue
        value = _values(folder, record, entry)
        count = record.rows[entry.micro_batch] if entry.micro_batch < len(record.rows) else 0
        if value is None or not value.ndim or not count or value.shape[0] % count:
            return None
        before = sum(record.rows[: entry.micro_batch])
        ids = record.sample_ids[before : before + count]
        rows += zip(ids, value.reshape(count, -1), strict=False)
    if not rows or len({row.shape for _, row in rows}) > 1:
        return None
    return np.stack([row for _, row in sorted(rows, key=lambda item: item[0])])


def _values(folder: Path, record: StepRecord, entry: Entry) -> NDArray[np.float64] | None:
    value = read_values(folder, record, entry)
    return None if value is None else value.astype(np.float64)


def _data_parts(records: Sequence[StepRecord]) -> Iterator[StepRecord]:
    """One record of each share of the batch."""
    seen: set[Any] = set()
    for record in records:
        if (rank := record.layout.get("data_rank")) not in seen:
            seen.add(rank)
            yield record


def _longest_sum(step: WholeStep) -> int:
    shapes = [tensor.value.shape for tensor in step.tensors.values() if tensor.value.ndim]
    return max((max(shape[0], shape[-1], math.prod(shape) // max(1, shape[-1])) for shape in shapes), default=1)


def _floors(step: WholeStep) -> Mapping[tuple[str, str], float]:
    """The least norm by which a difference is measured, by kind of tensor."""
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for (kind, _, name, _, _), tensor in step.tensors.items():
        if kind in ("gradient", "updated"):
            place = kind, name.partition("/")[0] if kind == "updated" else ""
            largest[place] = max(largest[place], float(np.linalg.norm(tensor.value)))
    gradients = largest.get(("gradient", ""), 0.0)
    return {place: _FLOOR * norm for place, norm in largest.items()} | {
        ("gradient", name.partition("/")[0]): _FLOOR * gradients
        for (kind, _, name, _, _) in step.tensors
        if kind == "gradient"
    }


def _exceeds_rounding(a: WholeTensor, b: WholeTensor, tolerance: float, floor: float) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        distance = float(np.linalg.norm(a.value - b.value))
    scale = max(float(np.linalg.norm(a.value)), float(np.linalg.norm(b.value)), floor)
    return not distance <= tolerance * scale  # NaN is above


def _divergence(
    a: Sequence[StepRecord],
    b: Sequence[StepRecord],
    key: Key,
    tensors: tuple[WholeTensor, WholeTensor],
    size: DifferenceSize,
    tolerance: float,
) -> Divergence:
    _, layer, name, call, _ = key
    module = a[0].modules.get(layer, "")
    because: list[str] = []
    if "Dropout" in module and tensors[0].phase == FORWARD:
        because.append("data ranks draw their own random numbers: dropout differs with the layout")
    for setting in dict.fromkeys([*a[0].code, *b[0].code]):
        pairs = unequal_items(a[0].code.get(setting, {}), b[0].code.get(setting, {}))
        because += [f"{setting}: {text} differs" for text, _, _ in pairs]
    return Divergence(
        step=a[0].step,
        phase=tensors[0].phase,
        layer=layer,
        call=call,
        tensor=name,
        rank=None,
        a=_summary(tensors[0]),
        b=_summary(tensors[1]),
        size=size,
        tolerance=tolerance,
        because=tuple(because),
    )


def _summary(tensor: WholeTensor) -> TensorSummary:
    value = tensor.value
    norm, largest = float(np.linalg.norm(value)), float(np.abs(value).max(initial=0.0))
    return TensorSummary(
        operator="",
        arguments="",
        shape=tuple(value.shape),
        dtype=tensor.dtype,
        norm=finite_or_none(norm),
        max_abs=finite_or_none(largest),
    )


def _hyperparameter_divergence(a: StepRecord, b: StepRecord) -> Divergence | None:
    """The first value that the update reads and that differs."""
    found = [(name, x, y) for name, x, y in unequal_items(a.hyperparameters, b.hyperparameters)]
    if not found:
        return None
    because = tuple(f"{name}: {x} in A, {y} in B" for name, x, y in found)
    return Divergence(step=a.step, phase=OPTIMIZER, tensor=found[0][0], rank=None, because=because)


def _notes(notes: list[str], left_out: Sequence[Key]) -> list[str]:
    texts = [
        "not compared: single operators, gradients of activations, random generators and updated weights (an adaptive optimizer "
        "makes a whole step of the rounding of a tiny gradient)"
    ]
    if left_out:
        names = list(dict.fromkeys(key[2] or f"output of {key[1] or 'the model'}" for key in left_out))
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        texts.append(
            f"not compared: {', '.join(names[:_MAX_NAMED])}{more}: no rank has them whole, the other run has them in another "
            "shape, or their values were too large to be kept"
        )
    return [*notes, *texts]

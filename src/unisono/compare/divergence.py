"""The first divergence of two runs, as a value: where it is, how large it is, and what may have caused it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.compare.step_record import Entry, StepRecord

_MAX_SAMPLES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """One run's tensor.

    Attributes:
        operator: The operator that made it; empty for a tensor that no single one made.
        arguments: Arguments of the operator that are no tensors.
        shape: Its shape.
        dtype: Such as ``float32``.
        norm: Its Euclidean norm; None where it is no number.
        max_abs: Largest magnitude of an element; None likewise.
    """

    operator: str
    arguments: str
    shape: tuple[int, ...]
    dtype: str
    norm: float | None
    max_abs: float | None

    @staticmethod
    def of(entry: Entry) -> TensorSummary:
        """The summary of an entry."""
        return TensorSummary(
            operator=entry.operator,
            arguments=entry.arguments,
            shape=tuple(entry.shape),
            dtype=entry.dtype,
            norm=entry.norm,
            max_abs=entry.max_abs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceSize:
    """The difference of two tensors of one shape.

    Attributes:
        differing: Number of elements that differ.
        elements: Number of elements.
        max_abs: Largest difference of an element; None where one is no number.
        relative: Norm of the difference divided by the norm of the first tensor; None where it is not defined.
        at: Index of the first element that differs.
        a: The element there in the first run.
        b: The element there in the second run.
    """

    differing: int
    elements: int
    max_abs: float | None
    relative: float | None
    at: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first tensor in which two runs differ.

    Attributes:
        step: Number of the step, from 1.
        phase: ``data``, ``weights at start``, ``random state``, ``forward``, ``loss``, ``backward``, ``gradient
            synchronisation`` or ``optimizer``.
        layer: Name of the innermost module; empty outside of all modules.
        call: Number of earlier calls of the module with this micro-batch.
        operator: The operator whose result differs, of the first run; empty for other tensors.
        tensor: Name of the entry of the batch, the parameter or the state; empty for a result without a name.
        micro_batch: Number of the micro-batch, from 0.
        rank: The rank on which it is first; None for whole tensors of several ranks.
        a: The tensor of the first run; None where that run has none there.
        b: The tensor of the second run, likewise.
        size: Size of the difference; None where their values were not kept or have other shapes.
        tolerance: The largest relative difference that counts as rounding; None where bits were compared.
        samples: Ids of samples in whose rows they differ.
        because: Differences of the two runs that act on this tensor, a sentence each.
    """

    step: int
    phase: str
    layer: str = ""
    call: int = 0
    operator: str = ""
    tensor: str = ""
    micro_batch: int = 0
    rank: int | None = 0
    a: TensorSummary | None = None
    b: TensorSummary | None = None
    size: DifferenceSize | None = None
    tolerance: float | None = None
    samples: tuple[int, ...] = ()
    because: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)


def difference_size(a: NDArray[Any], b: NDArray[Any]) -> DifferenceSize | None:
    """The difference of two arrays, by bits and by value; None where their shapes differ or all bits are the same."""
    if a.shape != b.shape or not a.size:
        return None
    if a.dtype == b.dtype:
        bytes_differ = np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)
        differ = bytes_differ.reshape(a.size, -1).any(1)
    else:
        differ = (a != b).reshape(-1)
    places = np.flatnonzero(differ)
    if not len(places):
        return None
    wide_a, wide_b = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.abs(wide_a - wide_b)
        norm, norm_a = float(np.linalg.norm(distances)), float(np.linalg.norm(wide_a))
    first = int(places[0])
    at = tuple(int(index) for index in np.unravel_index(first, a.shape)) if a.shape else ()
    return DifferenceSize(
        differing=len(places),
        elements=a.size,
        max_abs=finite_or_none(float(distances.max())),
        relative=finite_or_none(norm / norm_a) if norm_a else None,
        at=at,
        a=float(wide_a[first]),
        b=float(wide_b[first]),
    )


def differing_samples(record: StepRecord, entry: Entry, a: NDArray[Any], b: NDArray[Any]) -> tuple[int, ...]:
    """The samples in whose rows two tensors of a micro-batch differ; empty where rows are not known."""
    before = sum(record.rows[: entry.micro_batch])
    rows = record.rows[entry.micro_batch] if entry.micro_batch < len(record.rows) else 0
    if a.shape != b.shape or not a.ndim or not rows or a.shape[0] % rows or not a.size:
        return ()
    with np.errstate(invalid="ignore"):
        differ = ((a != b) & ~((a != a) & (b != b))).reshape(rows, -1).any(1)
    if differ.all() and rows > 1:
        return ()  # all of them tells nothing
    ids = record.sample_ids[before : before + rows]
    return tuple(ids[row] for row in np.flatnonzero(differ) if row < len(ids))[:_MAX_SAMPLES]


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None

"""Aligns two records of a step and finds the first entry whose bits differ. For runs of one layout. Imports no torch.

Entries are aligned by phase, micro-batch, module call, operator and name. Where the programs differ, a module call whose outputs
have the same bits in both runs ends the difference: inside of it they computed the same in two ways. So do the losses of an
objective, the gradients of a backward pass and the tensors of an update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from unisono.compare.divergence import Divergence, TensorSummary, difference_size, differing_samples
from unisono.compare.step_record import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER, PHASES, Entry, StepRecord, read_values

_RESULTS: Final = {LOSS: "loss", BACKWARD: "gradient", OPTIMIZER: "updated"}  # kinds of entries that end a phase


def first_divergence(a: Sequence[StepRecord], b: Sequence[StepRecord], folders: tuple[Path, Path]) -> Divergence | None:
    """The first entry that differs in a step, over all ranks; None where all bits are the same.

    Args:
        a: Records of the first run, by rank.
        b: Those of the second.
        folders: Where the values of each run are.
    """
    found: list[tuple[int, int, Divergence]] = []
    for mine, its in zip(a, b, strict=True):
        if mine.sample_ids != its.sample_ids:
            place = next(
                (n for n, (x, y) in enumerate(zip(mine.sample_ids, its.sample_ids, strict=False)) if x != y),
                min(len(mine.sample_ids), len(its.sample_ids)),
            )
            ids = [str(one.sample_ids[place]) if place < len(one.sample_ids) else "none" for one in (mine, its)]
            text = f"row {place} of the batch is sample {ids[0]} in A and {ids[1]} in B"
            found.append(
                (0, -1, Divergence(step=mine.step, phase=DATA, tensor="sample ids", rank=mine.rank, because=(text,)))
            )
            continue
        pair = first_mismatch(mine.entries, its.entries)
        if pair is not None:
            place = min(at for at in (pair[0], pair[1]) if at is not None)
            entries = tuple(None if at is None else one.entries[at] for at, one in zip(pair, (mine, its), strict=True))
            phase = PHASES.index(next(entry.phase for entry in entries if entry is not None))
            found.append((phase, place, describe(mine, its, entries, folders)))
    return min(found, key=lambda item: item[:2], default=(0, 0, None))[2]


def first_mismatch(a: Sequence[Entry], b: Sequence[Entry]) -> tuple[int | None, int | None] | None:
    """Indices of the first entries that differ, with None for an entry that a record lacks; None if all are equal."""
    i = j = 0
    outputs: Mapping[Any, Sequence[int]] | None = None
    while i < len(a) and j < len(b):
        if a[i].key == b[j].key:
            if a[i].bits != b[j].bits:
                return i, j
            i, j = i + 1, j + 1
            continue
        outputs = _outputs(b) if outputs is None else outputs
        realigned = _realigned(a, b, i, j, outputs)
        if realigned is None:
            return i, j
        i, j = realigned
    if i == len(a) and j == len(b):
        return None
    return (i if i < len(a) else None), (j if j < len(b) else None)


def _outputs(entries: Sequence[Entry]) -> Mapping[Any, Sequence[int]]:
    places: dict[Any, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        if entry.kind == "output":
            places[entry.key].append(place)
    return places


def _realigned(
    a: Sequence[Entry], b: Sequence[Entry], i: int, j: int, outputs: Mapping[Any, Sequence[int]]
) -> tuple[int, int] | None:
    """Where both records continue with the same entries, after ``i`` and ``j`` differ; None if the results have other bits.

    That is after the first module call that encloses either entry, and outside of modules at the end of the phase.
    """
    if a[i].phase != b[j].phase:
        return None
    if a[i].phase != FORWARD:
        return _realigned_at_results(a, b, i, j)
    layers = {layer for entry in (a[i], b[j]) for layer in _ancestors(entry.layer)}
    for place in range(i, len(a)):
        entry = a[place]
        if entry.phase != FORWARD or entry.micro_batch != a[i].micro_batch:
            return None
        if entry.kind != "output" or entry.layer not in layers:
            continue
        for other in outputs.get(entry.key, ()):
            if other >= j:
                return (place + 1, other + 1) if b[other].bits == entry.bits else None
    return None


def _realigned_at_results(a: Sequence[Entry], b: Sequence[Entry], i: int, j: int) -> tuple[int, int] | None:
    """Indices of the next results of the phase, if all of them have the same bits in both; else None."""
    kind = _RESULTS.get(a[i].phase)
    starts = [
        next((place for place in range(at, len(run)) if run[place].kind == kind), None) for run, at in ((a, i), (b, j))
    ]
    if starts[0] is None or starts[1] is None:
        return None
    results = [
        [(entry.key, entry.bits) for entry in takewhile(lambda entry: entry.kind == kind, run[start:])]
        for run, start in zip((a, b), starts, strict=True)
    ]
    return (starts[0], starts[1]) if results[0] == results[1] else None


def _ancestors(layer: str) -> Iterator[str]:
    """The modules that enclose ``layer``, from the model to itself."""
    yield ""
    parts = layer.split(".") if layer else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def describe(
    a: StepRecord,
    b: StepRecord,
    entries: tuple[Entry | None, ...],
    folders: tuple[Path, Path],
) -> Divergence:
    """The divergence of two entries, with its size and possible causes."""
    mine, its = entries
    entry = mine if mine is not None else its
    assert entry is not None
    size, samples, because = None, (), list[str]()
    if mine is not None and its is not None and mine.key == its.key:
        values = read_values(folders[0], a, mine), read_values(folders[1], b, its)
        if values[0] is not None and values[1] is not None:
            size = difference_size(values[0], values[1])
            if entry.phase in (DATA, FORWARD, LOSS):
                samples = differing_samples(a, entry, values[0], values[1])
        if mine.dtype != its.dtype or mine.shape != its.shape:
            because.append(f"it is {mine.dtype} {list(mine.shape)} in A and {its.dtype} {list(its.shape)} in B")
        if mine.arguments != its.arguments:
            because.append(
                f"arguments of {mine.operator}: {mine.arguments or 'none'} in A, {its.arguments or 'none'} in B"
            )
    else:
        because.append(f"A has {_name(mine)} where B has {_name(its)}")
    because += causes(a, b, entry)
    return Divergence(
        step=a.step,
        phase=entry.phase,
        layer=entry.layer,
        call=entry.call,
        operator=entry.operator or ("" if its is None else its.operator),
        tensor=entry.tensor,
        micro_batch=entry.micro_batch,
        rank=a.rank,
        a=None if mine is None else TensorSummary.of(mine),
        b=None if its is None else TensorSummary.of(its),
        size=size,
        samples=samples,
        because=tuple(because),
    )


def causes(a: StepRecord, b: StepRecord, entry: Entry) -> list[str]:
    """Differences of the runs that act on an entry: its modules, recorded code, the optimizer's settings."""
    texts: list[str] = []
    if entry.phase == OPTIMIZER or entry.tensor == "divisor of the gradients":
        texts += [f"{name}: {x} in A, {y} in B" for name, x, y in unequal_items(a.hyperparameters, b.hyperparameters)]
        return texts
    if entry.layer:
        for layer in _ancestors(entry.layer):
            x, y = a.modules.get(layer), b.modules.get(layer)
            if layer and x != y:
                texts.append(f"{layer} is {x} in A, {y} in B")
    for setting in dict.fromkeys([*a.code, *b.code]):
        for text, x, y in unequal_items(a.code.get(setting, {}), b.code.get(setting, {})):
            is_digest = any(one.startswith(("code:", "data:")) for one in (x, y))
            texts.append(f"{setting}: {text} " + ("differs" if is_digest else f"is {x} in A, {y} in B"))
    return texts


def unequal_items(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Name and both values of each item that differs; ``none`` where a mapping lacks it."""
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name, "none"), b.get(name, "none")
        if x != y:
            yield name, x, y


def _name(entry: Entry | None) -> str:
    if entry is None:
        return "nothing more"
    what = entry.operator or (f"the output of {entry.layer or 'the model'}" if entry.kind == "output" else entry.tensor)
    shown = f"({entry.arguments})" if entry.arguments and entry.operator else ""
    return f"{what}{shown} in {entry.layer}" if entry.layer and entry.kind == "operator" else f"{what}{shown}"

"""The one schema into which files are brought: of each column the type that all its values become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unisono.quality.columns.scan import EMPTY, OTHER_TEXT, ColumnFacts, FileFacts
from unisono.quality.columns.schema import SchemaColumn, image_mode, mode_of, text_encoding
from unisono.quality.columns.table_cells import KINDS, is_dictionary, stored_kind

_NUMBERS: Final = ("int", "float")
_DTYPES: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}  # of Arrow's names that are others
_ARROW: Final = {dtype: name for name, dtype in _DTYPES.items()}
_INTS: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A column of the schema.

    Attributes:
        kind: Type of its values: bool, int, float, string, bytes, list, object, other, or null for one without values.
        stored: The type in files of Parquet, as Arrow names it; empty if any of the kind will do.
        mode: Of images in bytes; empty if the column has none.
        encoding: Of texts in bytes, as ``ColumnFacts.contents`` names it; empty if the column has none, or it is not known.
        null_texts: Texts that stand for no value; none in a column of texts.
    """

    kind: str
    stored: str = ""
    mode: str = ""
    encoding: str = ""
    null_texts: tuple[str, ...] = ()


def targets_of(
    facts: Sequence[FileFacts], schema: Sequence[SchemaColumn], null_texts: tuple[str, ...] = ()
) -> dict[str, Target]:
    """The columns of all files by name.

    A column has the type that the schema names, but for numbers: ints become floats if a file has floats, and the widest type of
    Parquet's files is taken, so that no number is lost. Where the schema names a mixture, the most frequent type of its values is
    taken.
    """
    targets: dict[str, Target] = {}
    for column in schema:
        having = [found.columns[column.name] for found in facts if column.name in found.columns]
        kind = _kind(column, having)
        mode = image_mode(column.contents) if kind == "bytes" else ""
        encoding = text_encoding(column.contents) if kind == "bytes" else ""
        targets[column.name] = Target(
            kind=kind,
            stored=_stored(kind, column.type, having),
            mode=mode,
            encoding="" if encoding == OTHER_TEXT else encoding,
            null_texts=() if kind == "string" else null_texts,
        )
    return targets


def deviates(column: ColumnFacts, target: Target, rows: int) -> bool:
    """Whether a file of so many rows has cells in the column that are absent, or not of the target's kind, mode and encoding."""
    kinds = {kind for kind in column.counts if kind != "null"}
    has_null_texts = bool(target.null_texts) and column.has_null_texts
    if kinds - {target.kind} or column.has_bare_numbers or has_null_texts or sum(column.counts.values()) < rows:
        return True
    if target.encoding and column.contents.keys() - {target.encoding, EMPTY}:
        return True
    return bool(target.mode) and any(mode_of(content) != target.mode for content in column.contents)


def _kind(column: SchemaColumn, having: Sequence[ColumnFacts]) -> str:
    counts: Counter[str] = Counter()
    for each in having:
        counts.update({kind: count for kind, count in each.counts.items() if kind != "null"})
    kind = column.type
    if kind.startswith("mixed"):
        joined = Counter(counts)
        joined["float"] += joined.pop("int", 0)
        kind = max(joined, key=lambda name: joined[name])
    if kind in _NUMBERS:
        return "float" if counts["float"] else "int"
    return kind if kind in KINDS else "other"


def _stored(kind: str, type_name: str, having: Sequence[ColumnFacts]) -> str:
    """The type in files of Parquet: of numbers the widest, else the most frequent one of the kind."""
    declared = [each.stored for each in having if each.stored not in ("", "null")]
    if kind in _NUMBERS:
        return _widest(kind, declared)
    counts = Counter(
        stored
        for stored in declared
        if kind == "null" or (stored == type_name if kind == "other" else stored_kind(stored) == kind)
    )
    plain = [stored for stored in counts if not is_dictionary(stored)]
    if len(counts) > 1:  # what is coded in some files only is not coded
        return max(plain, key=lambda stored: counts[stored], default="")
    return next(iter(counts), "")


def _widest(kind: str, stored: Sequence[str]) -> str:
    """The narrowest type that has all numbers of these types; int64 and float64 where there is none."""
    names = {_DTYPES.get(name, name) for name in stored}
    dtypes: list[Any] = [np.dtype(name) for name in names if name in (*_INTS, *_DTYPES.values())]
    if not dtypes:
        return ""
    found = np.result_type(*dtypes)
    if (kind == "float") != (found.kind == "f"):
        found = np.dtype("float64" if kind == "float" else "int64")
    return _ARROW.get(found.name, found.name)

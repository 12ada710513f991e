"""Schema of a data set of tables: what most of its files have, and which file differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.quality.columns.scan import EMPTY, NO_TEXT, TEXTS, UTF8, UTF8_BOM, ColumnFacts, FileFacts

_NO_IMAGE = (*NO_TEXT, *TEXTS, EMPTY)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaColumn:
    """A column of the data set.

    Attributes:
        name: Its name.
        type: That of most files, of equals of the first: bool, int, float, string, bytes, list, object, what the file calls
            it, ``mixed: …``, or null for a column without values.
        files: Number of files that have it.
        missing: Cells without a value: null, empty in CSV, or not in their row; in files that have the column.
        contents: Cells of each content of bytes, such as ``JPEG RGB`` or ``text, UTF-8``.
        is_numeric_text: Whether all values are strings, each the text of a number.
    """

    name: str
    type: str
    files: int
    missing: int
    contents: dict[str, int]
    is_numeric_text: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a file is not as the others.

    Attributes:
        file: Its name.
        column: The column; empty if it is the encoding of the whole file.
        kind: ``missing``, ``extra``, ``type``, ``mixed``, ``image`` or ``encoding``.
        given: What the file has.
        expected: What most files have; empty if the column is extra or mixed.
        count: Cells that differ; of a whole file its rows.
        row: The first of them; None if there is no single one.
    """

    file: str
    column: str
    kind: str
    given: str
    expected: str
    count: int
    row: int | None


def column_type(column: ColumnFacts) -> str:
    """The type of a file's column: that of its values. Ints among floats are floats."""
    kinds = [kind for kind in column.counts if kind != "null"]
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    if len(kinds) > 1:
        return f"mixed: {', '.join(sorted(kinds))}"
    if kinds == ["other"]:
        return column.stored
    return kinds[0] if kinds else "null"


def schema_of(facts: Sequence[FileFacts]) -> list[SchemaColumn]:
    """The columns of all files, in the order in which they appear."""
    columns: list[SchemaColumn] = []
    for name in dict.fromkeys(name for found in facts for name in found.columns):
        having = [(found, found.columns[name]) for found in facts if name in found.columns]
        contents: Counter[str] = Counter()
        for _, column in having:
            contents.update({content: count for content, (count, _) in column.contents.items()})
        kinds = {kind for _, column in having for kind in column.counts if kind != "null"}
        columns.append(
            SchemaColumn(
                name=name,
                type=_usual(column_type(column) for _, column in having),
                files=len(having),
                missing=sum(
                    found.rows - sum(column.counts.values()) + column.counts.get("null", 0) for found, column in having
                ),
                contents=dict(contents.most_common()),
                is_numeric_text=kinds == {"string"} and all(column.is_number_text for _, column in having),
            )
        )
    return columns


def differences_of(
    names: Sequence[str], facts: Sequence[FileFacts], schema: Sequence[SchemaColumn]
) -> list[Difference]:
    """All differences, file by file. A file without rows and columns, as an empty one of JSONL, has none.

    A column belongs to the schema if more than half of the files have it; if half do, the first file decides. A column without
    values fits every type.

    Args:
        names: Of the files.
        facts: Of the files.
        schema: Of the data set.
    """
    with_columns = [found for found in facts if found.columns]
    expected = {column.name: column for column in schema if _is_usual(column, with_columns)}
    stored = {name: _usual_stored(name, with_columns) for name in expected}
    encoding = usual_encoding(with_columns)
    found_differences: list[Difference] = []
    for file, found in zip(names, facts, strict=True):
        if found.encoding not in ("", encoding) and (found.columns or found.encoding not in (UTF8, UTF8_BOM)):
            found_differences.append(_difference(file, "", "encoding", found.encoding, encoding, found.rows))
        if not found.columns:
            continue
        for name, column in expected.items():
            if name in found.columns:
                found_differences += _in_column(file, name, found.columns[name], column, stored[name])
            else:
                found_differences.append(_difference(file, name, "missing", "no such column", column.type, found.rows))
        for name, column in found.columns.items():
            if name not in expected:
                found_differences.append(_difference(file, name, "extra", column_type(column), "", found.rows))
                found_differences += _mixed(file, name, column)
    return found_differences


def _in_column(
    file: str, name: str, column: ColumnFacts, expected: SchemaColumn, stored: Mapping[bool, str]
) -> Iterator[Difference]:
    given = column_type(column)
    values = sum(column.counts.values()) - column.counts.get("null", 0)
    if given.startswith("mixed"):
        yield from _mixed(file, name, column)
    elif "null" not in (given, expected.type):
        if given != expected.type:
            first = next(row for kind, (row, _) in column.first.items() if kind != "null")
            yield _difference(file, name, "type", given, expected.type, values, first)
        elif column.stored != stored[bool(column.stored)]:
            yield _difference(file, name, "type", column.stored, stored[bool(column.stored)], values)
    mode = image_mode(expected.contents)
    if mode:
        for content, (count, first) in column.contents.items():
            if mode_of(content) != mode:
                yield _difference(file, name, "image", content, f"images of mode {mode}", count, first)
    encoding = text_encoding(expected.contents)
    if encoding:
        for content, (count, first) in column.contents.items():
            if content not in (encoding, EMPTY):
                yield _difference(file, name, "encoding", content, encoding, count, first)


def _mixed(file: str, name: str, column: ColumnFacts) -> Iterator[Difference]:
    """The rarest kind of a column with values of several."""
    if column_type(column).startswith("mixed"):
        kinds = {kind: count for kind, count in column.counts.items() if kind != "null"}
        rarest = min(kinds, key=lambda kind: kinds[kind])
        row, value = column.first[rarest]
        shown = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        yield _difference(file, name, "mixed", f"{shown}; first {rarest}: {value}", "", kinds[rarest], row)


def _difference(
    file: str, column: str, kind: str, given: str, expected: str, count: int, row: int | None = None
) -> Difference:
    return Difference(file=file, column=column, kind=kind, given=given, expected=expected, count=count, row=row)


def _is_usual(column: SchemaColumn, facts: Sequence[FileFacts]) -> bool:
    return 2 * column.files > len(facts) or (2 * column.files == len(facts) and column.name in facts[0].columns)


def _usual(types: Any) -> str:
    """The most frequent type, of equals the first. One type is better than a mixture, and any than no value."""
    counts: Counter[str] = Counter(types)
    best = [kind for kind in counts if kind != "null" and not kind.startswith("mixed")]
    best = best or [kind for kind in counts if kind != "null"] or list(counts)
    return max(best, key=lambda kind: counts[kind])


def _usual_stored(name: str, facts: Sequence[FileFacts]) -> dict[bool, str]:
    """The most frequent type that files declare, under True; files that declare none, under False, have none."""
    counts = Counter(found.columns[name].stored for found in facts if name in found.columns)
    declared = {stored: count for stored, count in counts.items() if stored not in ("", "null")}
    return {False: "", True: max(declared, key=lambda stored: declared[stored], default="")}


def image_mode(contents: Mapping[str, int]) -> str:
    """The mode of most images; empty if most values are no images."""
    modes: Counter[str] = Counter()
    for content, count in contents.items():
        modes[mode_of(content)] += count
    images = sum(count for mode, count in modes.items() if mode)
    if 2 * images <= sum(modes.values()):
        return ""
    return max((mode for mode in modes if mode), key=lambda mode: modes[mode])


def text_encoding(contents: Mapping[str, int]) -> str:
    """The content of most texts, such as ``text, UTF-8``; empty if most values are no texts."""
    texts = {content: count for content, count in contents.items() if content in TEXTS}
    values = sum(count for content, count in contents.items() if content != EMPTY)
    return max(texts, key=lambda content: texts[content]) if 2 * sum(texts.values()) > values else ""


def usual_encoding(facts: Sequence[FileFacts]) -> str:
    """The encoding of most files of text, of equals that of the first; empty without such files."""
    counts = Counter(found.encoding for found in facts if found.encoding)
    return max(counts, key=lambda encoding: counts[encoding], default="")


def mode_of(content: str) -> str:
    """The mode of an image by its content, such as ``JPEG RGB``; empty of other contents."""
    return "" if content in _NO_IMAGE else content.partition(" ")[2]

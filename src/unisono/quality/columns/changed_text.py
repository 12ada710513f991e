"""Write JSONL and CSV with changed cells. All other bytes of a row stay, and rows without changes stay as they are."""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unisono.data.convert.formats.csv import read_records
from unisono.quality.columns.file_change import FileChange
from unisono.quality.columns.table_cells import FLOAT, INT, NULL, csv_kind, decoded
from unisono.quality.json_members import json_members, with_values
from unisono.storage.files import new_file, open_regular
from unisono.storage.json_lines import as_json

_NULL: Final = "null"
_Cell = tuple[str, bool]  # the text, and whether it stands in quotes


def write_jsonl(change: FileChange, path: Path) -> None:
    """Write a file of JSONL. Masked values, and fields that a row has not, are null.

    Raises:
        DataError: A value cannot be cast without loss.
    """
    with open_regular(change.file.path) as source, new_file(path) as copy:
        copy.write(codecs.BOM_UTF8 if change.has_bom else b"")
        for row, (line, masked) in enumerate(zip(source, change.masked_columns(), strict=True)):
            line = line if row else line.removeprefix(codecs.BOM_UTF8)
            new = _changed_line(change, row, line, masked) if masked or change.deviating else line
            if new is not None:
                copy.write(new)


def _changed_line(change: FileChange, row: int, line: bytes, masked: Collection[str]) -> bytes | None:
    """None if the row is left out."""
    text = line.decode("utf-8", "surrogatepass")
    members, end = json_members(text)
    values = {name: decoded(members[name].value) for name in change.deviating if name in members}
    texts = {name: text[members[name].begin : members[name].end] for name in {*values, *masked}}
    cast = change.recast_row(row, values, masked, texts)
    if cast is None:
        return None
    new = {name: _json_text(value) for name, value in cast.items()}
    for name in masked:
        change.mask(row, name, texts[name])
        new[name] = _NULL
    missing = [name for name in change.targets if name not in members]
    for name in missing:
        change.count(name, "added")
    if not new and not missing:
        return line
    return with_values(text, members, end, new, missing).encode("utf-8", "surrogatepass")


def _json_text(value: Any) -> str:
    return as_json({"base64": b64encode(value).decode()} if isinstance(value, bytes) else value).decode()


def write_csv(change: FileChange, path: Path) -> None:
    """Write a file of CSV. Masked values, and cells of columns that the file has not, are empty.

    Raises:
        DataError: A value cannot be cast without loss.
    """
    records = read_records(change.file.path)
    _, _, header, record = next(records)
    names = [text for text, _ in header]
    is_same = names == list(change.columns)
    missing = [name for name in change.columns if name not in names]
    whole_header = {name: (name, _needs_quotes(name)) for name in missing} | dict(zip(names, header, strict=True))
    with new_file(path) as copy:
        copy.write(codecs.BOM_UTF8 if change.has_bom else b"")
        copy.write(record if is_same else _record([whole_header[name] for name in change.columns], record))
        for row, ((_, _, cells, record), masked) in enumerate(zip(records, change.masked_columns(), strict=True)):
            new_cells = _changed_cells(change, row, dict(zip(names, cells, strict=True)), masked)
            if new_cells is None:
                continue
            for name in missing:
                change.count(name, "added")
            if is_same and not new_cells:
                copy.write(record)
            else:
                whole = {**dict(zip(names, cells, strict=True)), **new_cells}
                copy.write(_record([whole.get(name, ("", False)) for name in change.columns], record))


def _changed_cells(
    change: FileChange, row: int, cells: Mapping[str, _Cell], masked: Collection[str]
) -> dict[str, _Cell] | None:
    """The cells of a row that become others; None if the row is left out."""
    if not masked and not change.deviating:
        return {}
    values = {name: _value(*cells[name]) for name in change.deviating if name in cells}
    texts = {name: cells[name][0] for name in {*values, *masked}}
    cast = change.recast_row(row, values, masked, texts)
    if cast is None:
        return None
    new = {name: _cell(value) for name, value in cast.items()}
    for name in masked:
        change.mask(row, name, texts[name])
        new[name] = ("", False)
    return new


def _cell(value: Any) -> _Cell:
    if value is None:
        return "", False
    return (value, True) if isinstance(value, str) else (repr(value), False)


def _value(text: str, in_quotes: bool) -> Any:
    kind = csv_kind(text, in_quotes)
    if kind == NULL:
        return None
    return int(text) if kind == INT else float(text) if kind == FLOAT else text


def _record(cells: Sequence[_Cell], like: bytes | bytearray) -> bytes:
    """A record with the line end of another."""
    texts = ['"' + text.replace('"', '""') + '"' if in_quotes else text for text, in_quotes in cells]
    return ",".join(texts).encode() + (b"\r\n" if like.endswith(b"\r\n") else b"\n")


def _needs_quotes(text: str) -> bool:
    return any(sign in text for sign in '",\r\n\ufeff')

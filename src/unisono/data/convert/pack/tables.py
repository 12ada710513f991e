"""Pack the rows of a table, or the results of a function, into ``.rec``, ``.mindrecord`` and the other writable formats.

With a schema each row is checked against it. A ``.rec`` then holds typed bytes (``record_schema``), and the schema is written to
``TARGET.schema``. Without one, a row of a ``.rec`` is one payload of bytes with numbers as side columns.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.convert.formats.table import unreadable_error, unwritable_error
from unisono.data.convert.pack.image_listing import BadInput
from unisono.data.convert.pack.pack_job import (
    UNSPLIT,
    PackJob,
    PackOptions,
    PackResult,
    check_suffix,
    cut_by_bytes,
    file_stamps,
    run_pack_job,
)
from unisono.data.convert.pack.record_schema import RecordSchema, rows_of
from unisono.data.convert.pack.resumable_shards import InputSource, PackedInput, ShardSeries
from unisono.data.convert.pack.worker import find_function, function_maker, given_parts, make_records, worker_count
from unisono.data.convert.table_files import Row, Table, open_table, write_table
from unisono.errors import DataError
from unisono.storage.files import file_digest

_TARGETS = (".rec", ".mindrecord", ".jsonl", ".parquet", ".tar", ".csv")


def pack_rows(
    source: Path,
    target: Path,
    *,
    columns: Mapping[str, str] | None = None,
    payload: str | None = None,
    schema: RecordSchema | None = None,
    base64: Collection[str] = (),
    arrays: Collection[str] = (),
    pack: PackOptions | None = None,
) -> PackResult:
    """Pack the rows of a table in any readable format.

    ``columns``: field → new name, in this order; other fields are dropped. ``payload``: the field (by its new name) that is the
    payload of a ``.rec``: bytes, or a string as UTF-8. ``schema``: see the module. ``base64``, ``arrays``: see ``open_table``.
    Raises DataError for an unsuitable source or target; ``pack.on_error`` "skip" leaves out rows that do not fit payload or
    schema.
    """
    pack = pack or PackOptions()
    check_suffix(target, _TARGETS, "rows")
    _check_payload(target, payload, schema, pack)
    identity = {
        "rows": str(source.absolute()),
        "files": file_stamps(source),
        "columns": list(columns.items()) if columns else None,
        "payload": payload,
        "schema": schema and schema.text,
        "base64": sorted(base64),
        "arrays": sorted(arrays),
        "shard_bytes": pack.shard_bytes,
        "on_error": pack.on_error,
    }

    def packed(start: int) -> Generator[PackedInput]:
        table = open_table(source, columns=list(columns) if columns else None, base64=base64, arrays=arrays)
        for number, row in enumerate(islice(table.rows, start, None), start):
            if columns:
                row = {columns[name]: value for name, value in row.items()}
            try:
                if schema is not None:
                    record = schema.encode(row)
                    yield PackedInput(records=(_target_row(record, schema, target),), size=len(record))
                    continue
                row = row if payload is None else _with_payload(row, payload)
            except DataError as error:
                yield PackedInput(bad=BadInput(path=f"{source.name}: row {number}", reason=given_parts(error)))
            else:
                yield PackedInput(records=(row,), size=sum(map(_size, row.values())))

    image = open_table(source, base64=base64, arrays=arrays).image if schema is None else None
    if image is not None and columns:
        image = columns.get(image)
    series = _series(target, packed, schema, pack, image=image)
    return run_pack_job(_job(str(source), target, identity, schema, pack), [series])


def pack_function(
    name: str, target: Path, schema: RecordSchema, *, items: Path | None = None, pack: PackOptions | None = None
) -> PackResult:
    """Pack the rows, mappings of ``schema``'s fields, that ``module:function`` returns.

    With ``items``, a text file, worker processes call the function with each line that is not empty; it returns one row or
    several. Without, it is called once, in this process, and yields all rows. When a killed call is repeated, the function must
    give the same rows; a change of its file is detected, a change of what it reads is not. ``pack.on_error`` "skip" leaves out
    rows that do not fit, and items for which it raises. Raises DataError.
    """
    pack = pack or PackOptions()
    check_suffix(target, _TARGETS, "python")
    function = find_function(name)
    lines = None if items is None else [line for line in _item_lines(items) if line]
    file = getattr(sys.modules[function.__module__], "__file__", None)
    identity = {
        "function": [name, file_digest(Path(file).resolve()) if file else None],
        "items": lines,
        "schema": schema.text,
        "shard_bytes": pack.shard_bytes,
        "on_error": pack.on_error,
    }

    def mapped(start: int) -> Generator[PackedInput]:
        assert lines is not None
        inputs = ((line, line.encode()) for line in lines[start:])
        workers = worker_count(pack.workers, len(lines))
        make = function_maker(name, schema)
        with closing(make_records(inputs, make, ["function", name, schema.text], workers=workers)) as answers:
            for line, answer in answers:
                if answer.reason:
                    yield PackedInput(bad=BadInput(path=line, reason=answer.reason))
                else:
                    rows = [_target_row(record, schema, target) for record in answer.records]
                    yield PackedInput(records=rows, size=sum(map(len, answer.records)))

    def generated(start: int) -> Generator[PackedInput]:
        for number, row in enumerate(islice(function(), start, None), start):
            try:
                record = schema.encode(rows_of(row)[0] if isinstance(row, Mapping) else _no_mapping(row))
            except DataError as error:
                yield PackedInput(bad=BadInput(path=f"{name}: row {number}", reason=given_parts(error)))
            else:
                yield PackedInput(records=(_target_row(record, schema, target),), size=len(record))

    source, total = (generated, None) if lines is None else (mapped, len(lines))
    series = _series(target, source, schema, pack, total=total)
    return run_pack_job(_job(name, target, identity, schema, pack), [series])


def _check_payload(target: Path, payload: str | None, schema: RecordSchema | None, pack: PackOptions) -> None:
    if payload is not None and (target.suffix != ".rec" or schema is not None):
        raise unwritable_error(
            f"payload {payload!r} for {target.name}", "a .rec without a schema has a payload", "leave it out"
        )
    if pack.on_error == "skip" and payload is None and schema is None:
        raise unwritable_error(
            "--on-error skip for rows without payload or schema",
            "a row is left out where it does not fit what is stated; damaged files end the reading",
            "--schema, or leave it out",
        )


def _series(
    target: Path,
    source: InputSource,
    schema: RecordSchema | None,
    pack: PackOptions,
    *,
    total: int | None = None,
    image: str | None = None,
) -> ShardSeries:
    fields = schema.fields if schema is not None and target.suffix != ".rec" else None

    def file(number: int) -> str:
        if target.suffix != ".mindrecord":
            return f"part{target.suffix}"
        return target.name if pack.shard_bytes is None else f"{target.stem}-{number:05d}.mindrecord"

    return ShardSeries(
        name=UNSPLIT,
        source=source,
        file=file,
        write=lambda path, rows: _write(path, Table(rows=rows, schema=fields, image=image)),
        cut=cut_by_bytes(pack.shard_bytes),
        total=total,
    )


def _job(
    source: str, target: Path, identity: Mapping[str, Any], schema: RecordSchema | None, pack: PackOptions
) -> PackJob:
    side_files = {".schema": f"{schema.text}\n"} if schema is not None and target.suffix == ".rec" else {}
    return PackJob(source=source, target=target, identity=identity, on_error=pack.on_error, side_files=side_files)


def _write(path: Path, table: Table) -> None:
    write_table(path, table)


def _target_row(record: bytes, schema: RecordSchema, target: Path) -> Row:
    """The row for the target's format, its values converted to the schema's types."""
    return {"data": record} if target.suffix == ".rec" else schema.decode(record)


def _with_payload(row: Row, field: str) -> Row:
    value = row.get(field)
    if not isinstance(value, str | bytes):
        raise unreadable_error(
            f"payload {field!r}: {type(value).__name__}", "a payload is bytes or a string", "another field"
        )
    return row if isinstance(value, bytes) else {**row, field: value.encode()}


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes) else 8


def _no_mapping(row: Any) -> Mapping[str, Any]:
    raise unreadable_error(
        f"a row that is a {type(row).__name__}", "a row is a mapping of field names to values", "a dict"
    )


def _item_lines(items: Path) -> Sequence[str]:
    try:
        return items.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_error(
            f"{items}: {error}", "items are the lines of a text file in UTF-8", "another file"
        ) from error

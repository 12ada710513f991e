"""Rows of a table, or what a function makes of items, to ``.rec``, ``.mindrecord`` and the other formats that are written.

With a schema each row is checked against it. A ``.rec`` then holds it as typed bytes (``layout``), whose schema is written to
``TARGET.schema``; without one a row of a ``.rec`` is one payload of bytes and numbers beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.convert.formats import Row, Table, open_table, write_table
from unisono.data.convert.formats.detection import files_of
from unisono.data.convert.formats.table import unreadable_error, unwritable_error
from unisono.data.convert.pack.image_listing import BadInput
from unisono.data.convert.pack.pack_job import (
    UNSPLIT,
    OnError,
    PackJob,
    PackResult,
    check_suffix,
    cut_by_bytes,
    run_pack_job,
)
from unisono.data.convert.pack.record_schema import RecordSchema, rows_of
from unisono.data.convert.pack.resumable_shards import InputSource, PackedInput, ShardSeries, file_digest
from unisono.data.convert.pack.worker import find_function, function_maker, make_records, worker_count
from unisono.errors import DataError

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
    shard_bytes: int | None = None,
    on_error: OnError = "fail",
) -> PackResult:
    """Pack the rows of a table of any format that is read.

    ``columns``: field → its new name, in this order; others are left. ``payload``: the field (by its new name) that is the
    payload of a ``.rec``: bytes, or a string as UTF-8. ``schema``: see the module. ``base64``, ``arrays``: see ``open_table``.
    Files end with the row that fills ``shard_bytes`` of values. Raises DataError for what the source or the target
    does not allow; ``on_error`` "skip" leaves out rows that do not fit payload or schema.
    """
    check_suffix(target, _TARGETS, "rows")
    if payload is not None and (target.suffix != ".rec" or schema is not None):
        raise unwritable_error(
            f"payload {payload!r} for {target.name}", "a .rec without a schema has a payload", "leave it out"
        )
    if on_error == "skip" and payload is None and schema is None:
        raise unwritable_error(
            "--on-error skip for rows without payload or schema",
            "a row is left out where it does not fit what is stated; damaged files end the reading",
            "--schema, or leave it out",
        )
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files_of(source) if path.exists()]
    identity = {
        "rows": str(source.absolute()),
        "files": stamps,
        "columns": list(columns.items()) if columns else None,
        "payload": payload,
        "schema": schema and schema.text,
        "base64": sorted(base64),
        "arrays": sorted(arrays),
        "shard_bytes": shard_bytes,
        "on_error": on_error,
    }
    convert = _as_payload(payload) if payload is not None else None

    def made(start: int) -> Generator[PackedInput]:
        table = open_table(source, columns=list(columns) if columns else None, base64=base64, arrays=arrays)
        for number, row in enumerate(islice(table.rows, start, None), start):
            if columns:
                row = {columns[name]: value for name, value in row.items()}
            try:
                if schema is not None:
                    record = schema.encode(row)
                    yield PackedInput(records=(_typed(record, schema, target),), size=len(record))
                    continue
                row = row if convert is None else convert(row)
            except DataError as error:
                reason = "; ".join(problem.given for problem in error.problems)
                yield PackedInput(bad=BadInput(path=f"{source.name}: row {number}", reason=reason))
            else:
                yield PackedInput(records=(row,), size=sum(map(_size, row.values())))

    image = open_table(source, base64=base64, arrays=arrays).image if schema is None else None
    if image is not None and columns:
        image = columns.get(image)
    return _run(str(source), target, identity, made, schema, shard_bytes, on_error, image=image)


def pack_function(
    name: str,
    target: Path,
    schema: RecordSchema,
    *,
    items: Path | None = None,
    shard_bytes: int | None = None,
    workers: int | None = None,
    on_error: OnError = "fail",
) -> PackResult:
    """Pack the rows, mappings of ``schema``'s fields, that ``module:function`` gives.

    With ``items``, a text file, the function is called with each line that is not empty, by ``workers`` processes, and gives one
    row, or several. Without, it is called once, here, and gives all rows one by one. After a kill it must give the same
    rows again; that its file has changed is seen, what it reads is not looked at. ``on_error`` "skip" leaves out items for
    which it raises, and rows that do not fit. Raises DataError.
    """
    check_suffix(target, _TARGETS, "python")
    function = find_function(name)
    lines = None if items is None else [line for line in _item_lines(items) if line]
    file = getattr(sys.modules[function.__module__], "__file__", None)
    identity = {
        "function": [name, file_digest(Path(file)) if file else None],
        "items": lines,
        "schema": schema.text,
        "shard_bytes": shard_bytes,
        "on_error": on_error,
    }

    def mapped(start: int) -> Generator[PackedInput]:
        assert lines is not None
        inputs = ((line, line.encode()) for line in lines[start:])
        count = worker_count(workers, len(lines))
        make = function_maker(name, schema)
        with closing(make_records(inputs, make, ["function", name, schema.text], workers=count)) as answers:
            for line, done in answers:
                if done.reason:
                    yield PackedInput(bad=BadInput(path=line, reason=done.reason))
                else:
                    rows = [_typed(record, schema, target) for record in done.records]
                    yield PackedInput(records=rows, size=sum(map(len, done.records)))

    def generated(start: int) -> Generator[PackedInput]:
        for number, row in enumerate(islice(function(), start, None), start):
            try:
                record = schema.encode(rows_of(row)[0] if isinstance(row, Mapping) else _no_mapping(row))
            except DataError as error:
                reason = "; ".join(problem.given for problem in error.problems)
                yield PackedInput(bad=BadInput(path=f"{name}: row {number}", reason=reason))
            else:
                yield PackedInput(records=(_typed(record, schema, target),), size=len(record))

    source = generated if lines is None else mapped
    total = None if lines is None else len(lines)
    return _run(name, target, identity, source, schema, shard_bytes, on_error, total=total)


def _run(
    name: str,
    target: Path,
    identity: Mapping[str, Any],
    source: InputSource,
    schema: RecordSchema | None,
    shard_bytes: int | None,
    on_error: OnError,
    *,
    total: int | None = None,
    image: str | None = None,
) -> PackResult:
    typed = schema is not None and target.suffix == ".rec"
    fields = schema.fields if schema is not None and not typed else None

    def file(number: int) -> str:
        if target.suffix != ".mindrecord":
            return f"part{target.suffix}"
        return target.name if shard_bytes is None else f"{target.stem}-{number:05d}.mindrecord"

    series = ShardSeries(
        name=UNSPLIT,
        source=source,
        file=file,
        write=lambda path, rows: _write(path, Table(rows=rows, schema=fields, image=image)),
        cut=cut_by_bytes(shard_bytes),
        total=total,
    )
    beside = {".schema": f"{schema.text}\n"} if schema is not None and typed else {}
    job = PackJob(source=name, target=target, identity=identity, on_error=on_error, side_files=beside)
    return run_pack_job(job, [series])


def _write(path: Path, table: Table) -> None:
    write_table(path, table)


def _typed(record: bytes, schema: RecordSchema, target: Path) -> Row:
    """The row that the target's format gets; its values have gone through the schema's types."""
    return {"data": record} if target.suffix == ".rec" else schema.decode(record)


def _as_payload(field: str) -> Any:
    def convert(row: Row) -> Row:
        value = row.get(field)
        if not isinstance(value, str | bytes):
            raise unreadable_error(
                f"payload {field!r}: {type(value).__name__}", "a payload is bytes or a string", "another field"
            )
        return row if isinstance(value, bytes) else {**row, field: value.encode()}

    return convert


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

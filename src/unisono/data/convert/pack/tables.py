"""Pack the rows of a table, or the results of a function, into ``.rec``, ``.mindrecord`` and the other writable formats.

With a schema each row is checked against it. A ``.rec`` then holds typed bytes (``record_schema``), and the schema is written to
``TARGET.schema``. Without one, a row of a ``.rec`` is one payload of bytes with numbers as side columns.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

from unisono.data.cleaning_record import cleaning_file
from unisono.data.convert.formats.table import row_bytes, unreadable_error, unwritable_error
from unisono.data.convert.pack.pack_job import (
    PackJob,
    PackOptions,
    PackResult,
    check_suffix,
    cut_by_bytes,
    file_stamps,
    run_pack_job,
)
from unisono.data.convert.pack.partial_target import BadInput, InputSource, PackedInput, ShardSeries
from unisono.data.convert.pack.record_schema import RecordSchema
from unisono.data.convert.pack.worker import find_function, given_parts, make_records, worker_count
from unisono.data.convert.table_files import Row, Table, open_table, write_table
from unisono.errors import DataError
from unisono.storage.files import file_digest
from unisono.storage.limits import MAX_LIST_BYTES, LimitError, read_limited

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

    Args:
        source: The table, or one file of its set.
        target: The file to write: .rec, .mindrecord, .jsonl, .parquet, .tar or .csv; several shards append a number to
            its stem.
        columns: Field → new name, in this order; other fields are dropped. By default all fields under their names.
        payload: The field (by its new name) that is the payload of a ``.rec``: bytes, or a string as UTF-8.
        schema: Types that each row must have. A ``.rec`` then holds typed bytes (``RecordSchema``), and the schema is
            written to ``TARGET.schema``. By default the rows' own types.
        base64: Columns of a CSV file that hold bytes as base64.
        arrays: Features of ``tf.Example`` that are arrays even with one value.
        pack: Size of the files and the treatment of bad inputs; with ``pack.on_error`` "skip" rows that do not fit
            payload or schema are left out.

    Raises:
        DataError: The source or target is unsuitable, or a row does not fit.
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
    }

    def packed_row(row: Row) -> PackedInput:
        if columns:
            row = {columns[name]: value for name, value in row.items()}
        if schema is not None:
            return _packed_records([schema.encode(row)], schema, target)
        row = row if payload is None else _with_payload(row, payload)
        return PackedInput(records=(row,), size=row_bytes(row))

    def packed(start: int) -> Generator[PackedInput]:
        table = open_table(source, columns=list(columns) if columns else None, base64=base64, arrays=arrays)
        return _packed_rows(table.rows, start, source.name, packed_row)

    image = open_table(source, base64=base64, arrays=arrays).image if schema is None else None
    if image is not None and columns:
        image = columns.get(image)
    return _run(str(source), target, identity, packed, schema, pack, sources=[source], image=image)


def pack_function(
    name: str, target: Path, schema: RecordSchema, *, items: Path | None = None, pack: PackOptions | None = None
) -> PackResult:
    """Pack the rows that a function returns; each is a mapping of ``schema``'s fields.

    When a killed call is repeated, the function must give the same rows. A change of its file is detected, a change of
    the data it reads is not.

    Args:
        name: The function, as ``module:function``.
        target: The file to write: .rec, .mindrecord, .jsonl, .parquet, .tar or .csv; several shards append a number to
            its stem.
        schema: Types that each row must have.
        items: A text file. Worker processes call the function with each line that is not empty; it returns one row or
            several. By default the function is called once, without arguments, in this process, and yields all rows.
        pack: Size of the files, workers and the treatment of bad inputs; with ``pack.on_error`` "skip" rows that do not
            fit, and items for which the function raises, are left out.

    Raises:
        DataError: The function is not found, the target is unsuitable, a row does not fit, or with ``items`` the function
            raises. Without ``items`` the function's own errors are not caught.
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
    }

    def mapped(start: int) -> Generator[PackedInput]:
        assert lines is not None
        inputs = ((line, line.encode()) for line in lines[start:])
        workers = worker_count(pack.workers, len(lines))
        with closing(make_records(inputs, ["function", name, schema.text], workers=workers)) as answers:
            for line, answer in answers:
                if answer.reason:
                    yield PackedInput(bad=BadInput(path=line, reason=answer.reason))
                else:
                    yield _packed_records(answer.records, schema, target)

    def packed_row(row: Any) -> PackedInput:
        if not isinstance(row, Mapping):
            raise unreadable_error(
                f"a row that is a {type(row).__name__}", "a row is a mapping of field names to values", "a dict"
            )
        return _packed_records([schema.encode(cast("Row", row))], schema, target)

    def generated(start: int) -> Generator[PackedInput]:
        return _packed_rows(function(), start, name, packed_row)

    packed, total = (generated, None) if lines is None else (mapped, len(lines))
    sources = [] if items is None else [items]
    return _run(name, target, identity, packed, schema, pack, sources=sources, total=total)


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


def _run(
    source: str,
    target: Path,
    identity: Mapping[str, Any],
    packed: InputSource,
    schema: RecordSchema | None,
    pack: PackOptions,
    *,
    sources: Sequence[Path],
    total: int | None = None,
    image: str | None = None,
) -> PackResult:
    fields = schema.fields if schema is not None and target.suffix != ".rec" else None

    def file(number: int) -> str:
        if target.suffix != ".mindrecord":
            return f"part{target.suffix}"
        return target.name if pack.shard_bytes is None else f"{target.stem}-{number:05d}.mindrecord"

    series = ShardSeries(
        source=packed,
        file=file,
        write=lambda path, rows: write_table(path, Table(rows=rows, schema=fields, image=image)),
        cut=cut_by_bytes(pack.shard_bytes),
        total=total,
    )
    job = PackJob(
        source=source,
        target=target,
        identity={**identity, "shard_bytes": pack.shard_bytes},
        on_error=pack.on_error,
        side_files=cleaning_file(sources)
        | ({".schema": f"{schema.text}\n"} if schema is not None and target.suffix == ".rec" else {}),
    )
    return run_pack_job(job, [series])


def _packed_rows(
    rows: Iterable[Any], start: int, name: str, pack_row: Callable[[Any], PackedInput]
) -> Generator[PackedInput]:
    """The outcome of each of ``rows`` from number ``start`` on; one for which ``pack_row`` raises DataError is bad."""
    for number, row in enumerate(islice(rows, start, None), start):
        try:
            outcome = pack_row(row)
        except DataError as error:
            outcome = PackedInput(bad=BadInput(path=f"{name}: row {number}", reason=given_parts(error)))
        yield outcome


def _packed_records(records: Sequence[bytes], schema: RecordSchema, target: Path) -> PackedInput:
    """Encoded records as rows for the target's format, their values converted to the schema's types."""
    rows = [{"data": record} if target.suffix == ".rec" else schema.decode(record) for record in records]
    return PackedInput(records=rows, size=sum(map(len, records)))


def _with_payload(row: Row, field: str) -> Row:
    value = row.get(field)
    if not isinstance(value, str | bytes):
        raise unreadable_error(
            f"payload {field!r}: {type(value).__name__}", "a payload is bytes or a string", "another field"
        )
    return row if isinstance(value, bytes) else {**row, field: value.encode()}


def _item_lines(items: Path) -> Sequence[str]:
    try:
        content = read_limited(items, MAX_LIST_BYTES)
        with io.TextIOWrapper(io.BytesIO(content), "utf-8") as text:  # which takes any ends of lines
            return text.read().split("\n")
    except (OSError, UnicodeDecodeError, LimitError) as error:
        raise unreadable_error(
            f"{items}: {error}", "items are the lines of a text file in UTF-8", "another file"
        ) from error

"""``unisono data``: pack, inspect, verify, repair, reshard and convert record files; clean and split data sets."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import ExpandedPath, FiniteRange, common_options, print_json, print_result
from unisono.cli.data_balance import balance_classes
from unisono.cli.data_columns import check_table_columns
from unisono.cli.data_common import source_of
from unisono.cli.data_labels import find_labels, relabel_documents
from unisono.cli.data_pack import pack
from unisono.cli.data_quality import clean_documents, dedup_documents, find_leaking, print_recipe, split_documents
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import DataError

if TYPE_CHECKING:
    from unisono.data.recordio.maintenance import Finding
    from unisono.data.tokens.shards import TokenSet

_SHOWN = 20  # findings and labels that fit on a screen


@click.group("data")
def command() -> None:
    """Pack record files, look into them, check, mend, rearrange and convert them; clean and split data sets, find
    leaks."""


command.add_command(pack)
command.add_command(clean_documents)
command.add_command(print_recipe)
command.add_command(dedup_documents)
command.add_command(find_leaking)
command.add_command(split_documents)
command.add_command(balance_classes)
command.add_command(find_labels)
command.add_command(relabel_documents)
command.add_command(check_table_columns)


@command.command("verify")
@click.argument("files", nargs=-1, required=True, type=ExpandedPath(path_type=Path))
@common_options
def verify_files(files: tuple[Path, ...], as_json: bool) -> int:
    """Read all of FILES and their indexes and name all that is not as written. Each file counts by itself.

    RecordIO, MindRecord, token shards, and the tables that convert reads. Exit code 1 if anything is wrong.
    """
    from unisono.data.convert.checking import verify_file

    reports = {path: verify_file(path) for path in files}
    bad = any(report.findings for report in reports.values())
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for path, report in reports.items():
        facts = {"records": report.records, "bytes": report.bytes, "checksums": report.checksums}
        findings = [_finding(finding) for finding in report.findings]
        rows.append({"path": str(path), "ok": not findings, **facts, "findings": findings})
        checksums = (
            f"checksums {report.checksums}" if report.checksums else "no checksums: changed payloads cannot be seen"
        )
        state = f"{'bad' if findings else 'ok':<4} {path}"
        lines.append(f"{state}  {report.records:,} records, {report.bytes:,} bytes, {checksums}")
        lines += _listed(report.findings, "findings")
    print_result(as_json, {"ok": not bad, "files": rows}, lines)
    return int(bad)


@command.command("repair")
@click.argument("source", type=ExpandedPath(path_type=Path))
@click.argument("target", type=ExpandedPath(path_type=Path))
@common_options
@sigterm_interrupts()
def repair_file(source: Path, target: Path, as_json: bool) -> None:
    """Write what can be saved of SOURCE (RecordIO) to TARGET, a new file, and name what is lost."""
    from unisono.data.convert.checking import repair_file

    result = repair_file(source, target)
    lost = [_finding(finding) for finding in result.lost]
    text = f"{target}: {result.saved:,} records saved, {result.mended:,} of them mended, {len(lost):,} lost"
    value = {"path": str(target), "saved": result.saved, "mended": result.mended, "lost": lost}
    print_result(as_json, value, [text, *_listed(result.lost, "lost records")])


@command.command("reindex")
@click.argument("files", nargs=-1, required=True, type=ExpandedPath(path_type=Path))
@common_options
@sigterm_interrupts()
def reindex_files(files: tuple[Path, ...], as_json: bool) -> None:
    """Write the indexes of FILES (RecordIO) anew, trusting each file as it is."""
    from unisono.data.convert.checking import require_kind
    from unisono.data.convert.file_kind import RECORDIO
    from unisono.data.recordio.maintenance import reindex

    for path in files:
        require_kind(path, (RECORDIO,), "reindex", "unisono data convert writes a new file with its index")
    dropped = {str(path): reindex(path) for path in files}
    rows = [{"path": path, "not_kept": losses} for path, losses in dropped.items()]
    lines: list[str] = []
    for path, losses in dropped.items():
        lines += [f"ok   {path}", *(f"     not kept: {loss}" for loss in losses)]
    print_result(as_json, {"files": rows}, lines)


@command.command("convert")
@click.argument("source", type=ExpandedPath(path_type=Path))
@click.argument("target", type=ExpandedPath(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Take the place of a TARGET that exists.")
@click.option("--column", "columns", multiple=True, metavar="NAME", help="Only this field; again for each.")
@click.option(
    "--base64", multiple=True, metavar="NAME", help="A field of bytes that CSV has as base64; again for each."
)
@click.option("--array", "arrays", multiple=True, metavar="NAME", help="A feature of TFRecord that is always an array.")
@click.option(
    "--kept-rows",
    metavar="FOLDER",
    type=ExpandedPath(path_type=Path),
    help="Only the rows that unisono data clean, dedup, split, leak or relabel kept in FOLDER.",
)
@common_options
@sigterm_interrupts()
def convert_file(
    source: Path,
    target: Path,
    overwrite: bool,
    columns: tuple[str, ...],
    base64: tuple[str, ...],
    arrays: tuple[str, ...],
    kept_rows: Path | None,
    as_json: bool,
) -> None:
    """Write the rows of SOURCE to TARGET; nothing is dropped or cast. The names say the formats.

    Read and written: .rec, .mindrecord, .jsonl, .parquet, .tar (webdataset) and .csv. Only read: .tar.gz, .tfrecord, MNIST's
    …-idx3-ubyte (also .gz) and CIFAR's .bin. One file of a set (name-00000-of-00005…) stands for all of it. Pictures of MNIST
    and CIFAR become PNG in .rec, behind MXNet's image header, and in .mindrecord; elsewhere they are arrays of uint8. A
    folder with one table stands for the table, also one of results of clean, split or relabel.
    """
    from unisono.data.convert.table_files import convert

    count = convert(
        source_of(source, "convert", str(target), is_table=True),
        target,
        overwrite=overwrite,
        columns=list(columns) or None,
        base64=list(base64),
        arrays=list(arrays),
        kept_rows=kept_rows,
    )
    print_result(as_json, {"path": str(target), "rows": count}, f"{target}: {count:,} rows")


@command.command("shard")
@click.argument("files", nargs=-1, required=True, type=ExpandedPath(path_type=Path))
@click.option("--into", "prefix", required=True, type=ExpandedPath(path_type=Path), help="Beginning of the new names.")
@click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True, help="How many; 1 merges.")
@common_options
@sigterm_interrupts()
def shard_files(files: tuple[Path, ...], prefix: Path, shards: int, as_json: bool) -> None:
    """Write all records of FILES (RecordIO), in order, to new files of equal numbers of records."""
    from unisono.data.convert.checking import require_kind
    from unisono.data.convert.file_kind import RECORDIO
    from unisono.data.recordio.maintenance import rearrange

    for path in files:
        require_kind(path, (RECORDIO,), "shard", f"unisono data convert {path} {path.stem}.rec, then shard that")
    paths = [str(path) for path in rearrange(files, prefix, shards)]
    print_result(as_json, {"files": paths}, paths)


@command.command("inspect")
@click.argument("file", type=ExpandedPath(path_type=Path))
@click.option("--sheet", type=ExpandedPath(path_type=Path), help="Write a PNG here of up to 64 images of a .rec.")
@common_options
def inspect_file(file: Path, sheet: Path | None, as_json: bool) -> None:
    """Show what FILE holds.

    Of RecordIO counts, sizes, side columns and the first records; of a token shard its vocabulary and first documents; of other
    formats fields and first rows.
    """
    from unisono.data.convert.file_kind import RECORDIO, TOKENS, file_kind
    from unisono.data.recordio import RecordFile

    kind = file_kind(file)
    if sheet is not None:
        from unisono.data.convert.pack import record_sheet as drawn
        from unisono.storage.files import write_atomically

        write_atomically(sheet, drawn(file))
    if kind == TOKENS:
        _inspect_tokens(file, as_json)
        return
    if kind != RECORDIO:
        _inspect_rows(file, as_json)
        return
    records = RecordFile(file)
    lengths = records.lengths
    sizes: dict[str, int] = {}
    if len(records):
        sizes = {"least": int(lengths.min()), "mean": int(lengths.mean()), "most": int(lengths.max())}
    side = {name: _column(column) for name, column in (records.side.items() if len(records) else ())}
    first = [
        {"key": int(records.keys[number]), "bytes": int(lengths[number]), "begins": records.read(number)[:32].hex()}
        for number in range(min(len(records), 5))
    ]
    size = file.stat().st_size
    facts = {"path": str(file), "records": len(records), "bytes": size, "checksums": records.checksums}
    lines = [f"{file}: {len(records):,} records, {size:,} bytes, checksums {records.checksums}"]
    if sizes:
        lines.append(f"payloads of {sizes['least']:,} to {sizes['most']:,} bytes, {sizes['mean']:,} on average")
    for name, column in side.items():
        unit = " values" if column["dtype"].startswith("arrays") else ""
        lines.append(f"side column {name}: {column['dtype']}, {column['least']:g} to {column['most']:g}{unit}")
    lines += [f"  key {row['key']:>8}  {row['bytes']:>10,} bytes  {row['begins']}" for row in first]
    print_result(as_json, {**facts, "payload_bytes": sizes, "side": side, "first": first}, lines)


@command.command("stats")
@click.argument("file", type=ExpandedPath(path_type=Path))
@common_options
def file_stats(file: Path, as_json: bool) -> None:
    """Count what FILE holds: of RecordIO sizes, labels and image sizes; of a token shard documents and their lengths."""
    from unisono.data.convert.pack import record_stats

    stats = record_stats(file)
    labels = [{"label": label, "count": count} for label, count in stats.labels.items()]
    lines = [f"{file}: {stats.records:,} records, {stats.bytes:,} bytes"]
    if stats.sampled:
        lines.append(
            f"labels and image sizes are of {stats.sampled:,} records, evenly spread: no side columns have them"
        )
    for name, spread in stats.spreads.items():
        shares = f"10 % below {spread.p10:g}, half below {spread.median:g}, 90 % below {spread.p90:g}"
        lines.append(f"{name}: {spread.least:g} to {spread.most:g}, mean {spread.mean:g}, {shares}")
    ranked = sorted(stats.labels.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"label {label:g}: {count:,}" for label, count in ranked[:_SHOWN]]
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN:,} labels more (all are in --json)")
    print_result(as_json, {"path": str(file), **asdict(stats), "labels": labels}, lines)


@command.command("bench")
@click.argument("file", type=ExpandedPath(path_type=Path))
@click.option("--seconds", default=1.0, show_default=True, type=FiniteRange(min=0.05), help="Of each of three repeats.")
@click.option(
    "--size", default=224, show_default=True, type=click.IntRange(min=1), help="Side of the crops, in pixels."
)
@common_options
def bench(file: Path, seconds: float, size: int, as_json: bool) -> None:
    """Measure how fast FILE is read here, and images of RecordIO decoded and loaded."""
    from unisono.data.loading.throughput import measure_throughput

    rates = measure_throughput(file, seconds=seconds, size=size)
    rows = [{"what": rate.name, "per_s": rate.per_s, "bytes_per_s": rate.bytes_per_s} for rate in rates]
    lines: list[str] = []
    for rate in rates:
        bandwidth = f", {rate.bytes_per_s / 1e6:,.0f} MB/s" if rate.bytes_per_s else ""
        lines.append(f"{rate.name}: {rate.per_s:,.0f} /s{bandwidth}")
    last = rates[-1]
    lines.append(
        f"A training loop on this machine that takes fewer than {last.per_s:,.0f} samples/s does not wait ({last.name})."
    )
    print_result(as_json, {"path": str(file), "rates": rows}, lines)


@command.command("cat")
@click.argument("file", type=ExpandedPath(path_type=Path))
@click.option("--index", "number", type=int, required=True, help="Which record, from 0; negative from the end.")
@common_options
def cat_record(file: Path, number: int, as_json: bool) -> None:
    """Write one record's payload to standard output, with --json in base64.

    A file or pipe gets its bytes as they are; a terminal its text, with control characters as \\x1b.

    Of a token shard the ids of a document, of other formats the row, as JSON.
    """
    from unisono.data.convert.file_kind import RECORDIO, TOKENS, file_kind
    from unisono.data.recordio import RecordFile

    kind = file_kind(file)
    if kind == TOKENS:
        _cat_document(file, number, as_json)
        return
    if kind != RECORDIO:
        _cat_row(file, number, as_json)
        return
    records = RecordFile(file)
    _check_number(file, number, len(records), "record")
    payload = records.read(number)
    if as_json:
        import base64

        print_json({"index": number, "bytes": len(payload), "base64": base64.b64encode(payload).decode()})
    elif sys.stdout.isatty():
        echo(payload.decode(errors="backslashreplace"))
    else:
        click.echo(payload, nl=False)


def _column(column: Any) -> dict[str, Any]:
    """Type of a side column, and range of its numbers or array sizes."""
    from unisono.data.recordio.index import RaggedColumn

    if isinstance(column, RaggedColumn):
        sizes = [len(array) for array in column.tolist()]
        return {"dtype": f"arrays of {column[0].dtype}", "least": min(sizes), "most": max(sizes)}
    return {"dtype": str(column.dtype), "least": column.min().item(), "most": column.max().item()}


def _check_number(file: Path, number: int, count: int, unit: str) -> None:
    if not -count <= number < count:
        raise DataError(
            given=f"{unit} {number} of {file}",
            rule=f"it holds {count} {unit}s, counted from 0",
            consequence="nothing was written",
            nearest=f"--index {count - 1} is the last one" if count else f"a file that holds {unit}s",
        )


def _inspect_tokens(file: Path, as_json: bool) -> None:
    from unisono.data.tokens.shards import open_tokens

    tokens = open_tokens([file])
    facts = {
        "tokens": tokens.num_tokens,
        "documents": tokens.num_documents,
        "text_bytes": tokens.text_bytes,
        "vocab_size": tokens.vocab_size,
        "end_of_document": tokens.end_of_document,
    }
    first = [_document(tokens, number)[:16] for number in range(min(tokens.num_documents, 5))]
    lines = [
        f"{file}: token shard, {tokens.num_tokens:,} tokens of {tokens.text_bytes:,} bytes of text",
        f"{tokens.num_documents:,} documents, each ended by id {tokens.end_of_document} of a vocabulary of {tokens.vocab_size:,}",
        *(f"  document {number}: {' '.join(map(str, ids))}" for number, ids in enumerate(first)),
    ]
    print_result(as_json, {"path": str(file), "bytes": file.stat().st_size, **facts, "first": first}, lines)


def _cat_document(file: Path, number: int, as_json: bool) -> None:
    from unisono.data.tokens.shards import open_tokens

    tokens = open_tokens([file])
    _check_number(file, number, tokens.num_documents, "document")
    ids = _document(tokens, number % tokens.num_documents)
    print_result(as_json, {"index": number, "tokens": ids}, json.dumps(ids))


def _document(tokens: TokenSet, number: int) -> list[int]:
    """The ids of a document of the set's one shard, without the id that ends it."""
    (shard,) = tokens.shards
    end = shard.starts[number + 1] if number + 1 < shard.starts.size else shard.tokens.size
    return shard.tokens[shard.starts[number] : end - 1].tolist()


def _inspect_rows(file: Path, as_json: bool) -> None:
    from itertools import islice

    from unisono.data.convert.formats.table import OtherFields, describe_value, field_type_of
    from unisono.data.convert.table_files import open_table

    others: OtherFields = {}
    table = open_table(file, others=others)
    first = list(islice(table.rows, 5))
    kinds = {name: field_type_of(name, value) for row in first for name, value in row.items()}
    fields = table.schema or kinds
    rows = [{name: describe_value(value) for name, value in row.items()} for row in first]
    size = file.stat().st_size
    types = {name: {"type": field.type, "shape": field.shape} for name, field in fields.items()}
    types |= {name: {"type": field.type, "shape": None} for name, field in others.items()}
    lines = [f"{file}: {size:,} bytes, rows of {len(types)} fields"]
    for name, field in fields.items():
        if name not in others:
            lines.append(f"field {name}: {field.type}{'' if field.shape is None else f' {list(field.shape)}'}")
    lines += [f"field {name}: {field.type}, which runs and convert do not read" for name, field in others.items()]
    for number, row in enumerate(rows):
        lines.append(f"  row {number}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
    print_result(as_json, {"path": str(file), "bytes": size, "fields": types, "first": rows}, lines)


def _cat_row(file: Path, number: int, as_json: bool) -> None:
    from itertools import islice

    from unisono.data.convert.formats.jsonl import to_line
    from unisono.data.convert.table_files import open_table

    row = next(islice(open_table(file).rows, number, None), None) if number >= 0 else None
    if row is None:
        raise DataError(
            given=f"row {number} of {file}",
            rule="rows are read one after the other, counted from 0",
            consequence="nothing was written",
            nearest="--index 0 is the first one",
        )
    try:
        line = to_line(row)
    except ValueError as error:
        raise DataError(
            given=f"row {number} of {file}: {error}",
            rule="JSON has finite numbers only",
            consequence="nothing was written",
            nearest=f"unisono data inspect {file}",
        ) from error
    print_result(as_json, {"index": number, "row": json.loads(line)}, line)


def _finding(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding) | {"path": str(finding.path)}
    return {name: None if value == -1 else value for name, value in fields.items()}


def _listed(findings: Sequence[Finding], name: str) -> list[str]:
    lines = [f"     {finding}" for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"     and {len(findings) - _SHOWN:,} more (--json has all {name})")
    return lines

"""Verify, repair and reindex a data file of any kind, or refuse what its kind cannot have."""

from __future__ import annotations

from pathlib import Path

from unisono.data.convert.file_kind import MINDRECORD, RECORDIO, TOKENS, file_kind
from unisono.data.convert.formats import jsonl, parquet
from unisono.data.convert.formats.table import OtherFields
from unisono.data.convert.table_files import open_file
from unisono.data.mindrecord import MindRecordFile
from unisono.data.mindrecord.encryption import is_encrypted
from unisono.data.recordio import maintenance
from unisono.data.recordio.maintenance import Finding, RepairReport, VerifyReport
from unisono.data.sidecar import verify_sidecar
from unisono.data.tokens.shards import open_tokens
from unisono.errors import DataError

_CHECKSUMS = {".tfrecord": "written", ".tfrecords": "written"}


def verify_file(path: Path) -> VerifyReport:
    """Read all of a file and its index and report the damage.

    A file of a set is verified by itself. In a table, such as CSV, damage ends the reading: later rows are not counted.

    Raises:
        DataError: The file is missing, of no known kind, or encrypted.
    """
    kind = file_kind(path)
    if kind == RECORDIO:
        return maintenance.verify(path)
    if kind == TOKENS:
        return _verify_tokens(path)
    if kind == MINDRECORD:
        return _verify_mindrecord(path)
    rows, findings, others = 0, list[Finding](), OtherFields()
    try:
        if kind == ".parquet":  # all columns, those of types that no row can hold too
            for batch in parquet.read_batches(path)[1]:
                rows += batch.num_rows
        else:
            for _ in open_file(path, kind, others=others).rows:
                rows += 1
    except DataError as error:
        findings = _findings(path, error)
    for field in others.values():
        if field.type == jsonl.BASE64:  # any other is a value of JSON
            findings += _findings(path, field.error)
    return _report(path, rows, findings, checksums=_CHECKSUMS.get(kind, ""))


def repair_file(path: Path, target: Path) -> RepairReport:
    """Write the records of a RecordIO file that can be saved to ``target``. Raises DataError for any other kind."""
    require_kind(path, (RECORDIO,), "repair", "a whole copy of the file, or the source that it was written from")
    return maintenance.repair(path, target)


def require_kind(path: Path, kinds: tuple[str, ...], verb: str, nearest: str) -> str:
    """The kind of a file, which is one of ``kinds``.

    Args:
        path: The file.
        kinds: The kinds that ``verb`` works on, of ``KINDS``.
        verb: The name of the operation.
        nearest: What to do with a file of another kind.

    Raises:
        DataError: The file is missing, of no known kind, or of none of ``kinds``.
    """
    kind = file_kind(path)
    if kind not in kinds:
        raise DataError(
            given=f"{path}, which is {_NAMES.get(kind, f'a table ({kind})')}",
            rule=f"{verb} works on {' and '.join(_PLURALS[name] for name in kinds)}",
            consequence="nothing was read or written",
            nearest=nearest,
        )
    return kind


_NAMES = {RECORDIO: "a RecordIO file", MINDRECORD: "a MindRecord file", TOKENS: "a token shard"}
_PLURALS = {RECORDIO: "RecordIO files", MINDRECORD: "MindRecord files", TOKENS: "token shards"}


def _verify_tokens(path: Path) -> VerifyReport:
    try:
        tokens = open_tokens([path])
    except DataError as error:
        return _report(path, 0, _findings(path, error), checksums="written")
    (shard,) = tokens.shards
    problems = verify_sidecar(shard.sidecar, shard.tokens)
    findings = _findings(path, DataError(*problems)) if problems else []
    return _report(path, tokens.num_documents, findings, checksums="written")


def _verify_mindrecord(path: Path) -> VerifyReport:
    findings: list[Finding] = []
    if is_encrypted(path):
        raise DataError(
            given=f"{path}, which is encrypted",
            rule="verify reads the rows, and they need the key of MindSpore's set_enc_key",
            consequence="nothing was read",
            nearest="MindRecordFile(path, key=...) in Python",
        )
    try:
        file = MindRecordFile([path])
    except DataError as error:
        return _report(path, 0, _findings(path, error), checksums="")
    for number in range(len(file)):
        try:
            file.read(number)
        except DataError as error:
            findings += _findings(path, error, record=number)
    return _report(path, len(file), findings, checksums="")


def _report(path: Path, records: int, findings: list[Finding], *, checksums: str) -> VerifyReport:
    return VerifyReport(records=records, bytes=path.stat().st_size, checksums=checksums, findings=findings)


def _findings(path: Path, error: DataError, *, record: int = -1) -> list[Finding]:
    """The problems of an error as findings without offsets: their text has the place as far as it is known."""
    return [
        Finding(path=path, record=record, what=problem.given.removeprefix(f"{path}: ")) for problem in error.problems
    ]

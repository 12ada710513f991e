"""Kind of a data file: by its first bytes where they are decisive, else by its name.

    .rec           begins with the magic word of RecordIO
    .mindrecord    a JSON header behind its u64 length, or MindSpore's mark of encryption at the end
    .parquet       begins with PAR1
    tokens         a ``.bin`` with a sidecar beside it
    idx            MNIST's names, which have no suffix
    any other      the suffix of a table format

MindSpore writes files under any name, so content goes first. A damaged file keeps the kind
of its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from unisono.data.convert.formats.idx import NAME as IDX_NAME
from unisono.data.mindrecord.encryption import is_encrypted
from unisono.data.mindrecord.header import begins_like_header
from unisono.data.recordio.framing import MAGIC_BYTES
from unisono.data.sidecar import MAGIC as SIDECAR_MAGIC
from unisono.errors import DataError
from unisono.storage.files import open_regular

RECORDIO: Final = ".rec"
MINDRECORD: Final = ".mindrecord"
TOKENS: Final = "tokens"
TABLES: Final = (".jsonl", ".parquet", ".tar", ".csv", ".tar.gz", ".tfrecord", ".tfrecords", "idx", ".bin")
INDEX_SUFFIXES: Final = (".idx", ".uidx", ".idx.old", ".db")  # of files beside data, which are made of these
KINDS: Final = (RECORDIO, MINDRECORD, TOKENS, *TABLES)
SHARD_NAME: Final = re.compile(r"(.*)-([0-9]{5,9})-of-([0-9]{5,9})(.*)")
_MINDRECORD_NAME: Final = re.compile(r".*\.mindrecord[0-9]{0,4}", re.IGNORECASE)
_HEAD_BYTES: Final = 16
_SQLITE: Final = b"SQLite format 3\0"


def file_kind(path: Path) -> str:
    """The kind of an existing file, one of ``KINDS``.

    Raises:
        DataError: There is no such file, it is a folder or an index, or neither content nor name is of a known kind.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        nearest = "one of the files in it" if os.path.isdir(path) else "the path of a data file"
        raise _unknown(f"{path}: {error.strerror}", "a data file is a file that can be read", nearest) from error
    if head.startswith(MAGIC_BYTES):
        return RECORDIO
    if head.startswith(b"PAR1"):
        return ".parquet"
    if begins_like_header(path, head) or is_encrypted(path):
        return MINDRECORD
    if head.startswith((SIDECAR_MAGIC, _SQLITE)):
        raise _unknown(f"{path}, which is an index", "an index is read through its data file", "the file beside it")
    if _is_token_shard(path):
        return TOKENS
    kind = kind_of_name(path)
    if kind not in KINDS:
        raise _unknown(
            f"{path}, whose content and suffix {path.suffix!r} are of no known kind",
            f"a data file is RecordIO, MindRecord, a token shard, or a table: {', '.join(TABLES)}",
            "a file of one of these kinds, or its name with the suffix of its kind",
        )
    return kind


def kind_of_name(path: Path) -> str:
    """The suffix that names the format of a table, in lower case; ``idx`` for MNIST's files. The file need not exist."""
    match = SHARD_NAME.fullmatch(path.name)
    name = path.name if match is None else match[1] + match[4]
    if IDX_NAME.fullmatch(name):
        return "idx"
    if _MINDRECORD_NAME.fullmatch(name):
        return MINDRECORD
    if name.lower().endswith(".tar.gz"):
        return ".tar.gz"
    return Path(name).suffix.lower()


def beside_target(path: str | Path, suffix: str) -> Path | None:
    """The file ``TARGET`` + ``suffix`` beside a file that was packed into ``TARGET``; None if it is not there.

    ``TARGET`` is one of ``targets_of`` the file; one that is not the file itself is no file.
    """
    own, *others = targets_of(path)
    targets = [own, *(target for target in others if not os.path.exists(target))]
    beside = (Path(f"{target}{suffix}") for target in targets)
    return next((file for file in beside if os.path.exists(file)), None)


def targets_of(path: str | Path) -> tuple[str, str, str]:
    """What a file may have been packed into: itself, its name without the number of a shard (``name-00000-of-00005.rec``), and
    that without the part of a split (``name-train.rec``)."""
    own = str(path)
    whole = re.sub(r"-\d{5}(-of-\d{5})?(\.[a-zA-Z]+)$", r"\2", own)
    return own, whole, re.sub(r"-[^-/]+(\.[a-zA-Z]+)$", r"\1", whole)


def _is_token_shard(path: Path) -> bool:
    # a damaged sidecar is still one
    sidecar = path.with_suffix(".idx")
    if path.suffix.lower() != ".bin" or not os.path.isfile(sidecar):
        return False
    with open_regular(sidecar) as file:
        return file.read(len(SIDECAR_MAGIC)) == SIDECAR_MAGIC


def _unknown(given: str, rule: str, nearest: str) -> DataError:
    return DataError(given=given, rule=rule, consequence="nothing was read or written", nearest=nearest)

"""Pack text into token shards for ``open_tokens``. Documents are files, lines, or a column of a table."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from unisono.data.cleaning_record import cleaning_file
from unisono.data.convert.file_kind import kind_of_name
from unisono.data.convert.formats.table import describe_value, unreadable_error, unwritable_error
from unisono.data.convert.pack.pack_job import (
    PackJob,
    PackOptions,
    PackResult,
    check_suffix,
    cut_by_bytes,
    file_stamps,
    run_pack_job,
)
from unisono.data.convert.pack.partial_target import BadInput, PackedInput, ShardSeries
from unisono.data.convert.table_files import open_table, read_formats
from unisono.data.tokens.corpus import CHANGED, Corpus, UndecodableError, corpus_at, read_text
from unisono.data.tokens.encoding import Document, default_workers, encode_documents
from unisono.data.tokens.shards import TokenWriter
from unisono.data.tokens.tokenizer import BYTES, Encoded, Tokenizer, load_tokenizer
from unisono.storage.files import is_inside

_SHARD_BYTES = 1 << 29  # by default
_SHARD_TOKENS = 1 << 62  # no limit: here ``cut`` ends shards by bytes


def pack_text(
    source: Path,
    target: Path,
    *,
    tokenizer: str = BYTES,
    lines: bool = False,
    column: str | None = None,
    pack: PackOptions | None = None,
) -> PackResult:
    """Tokenize documents into token shards ``STEM-NNNNN.bin`` and ``.idx``, which ``open_tokens`` opens.

    Args:
        source: A text file, a folder of them in the order of their paths, or with ``column`` a table.
        target: ``STEM.bin``, from which the shards have their names.
        tokenizer: "bytes", or a Hugging Face ``tokenizer.json`` or its folder.
        lines: Whether each line that is not empty is a document. By default each file is one.
        column: The field of a table whose text in each row is a document. By default ``source`` is text.
        pack: Size of the files, workers and the treatment of bad inputs.

    Raises:
        DataError: Input is not UTF-8 text, unless ``pack.on_error`` is "skip"; the source or target is unsuitable.
        ExtraError: The tokenizer's package is not installed.
    """
    pack = pack or PackOptions()
    shard_bytes = _SHARD_BYTES if pack.shard_bytes is None else pack.shard_bytes
    check_suffix(target, (".bin",), "text")
    _check_source(source, target, lines, column)
    loaded = load_tokenizer(tokenizer)
    total = None
    if column is None:
        corpus = corpus_at(source)
        stamps = [(file.path, file.size, file.mtime_ns) for file in corpus.files]
        texts = partial(_file_texts, corpus, lines)
        total = None if lines else len(corpus.files)
    else:
        stamps = file_stamps(source)
        texts = partial(_column_texts, source, column)
    identity = {
        "text": str(source.absolute()),
        "files": stamps,
        "tokenizer": loaded.fingerprint,
        "lines": lines,
        "column": column,
        "shard_bytes": shard_bytes,
    }
    text_bytes = sum(size for _, size, _ in stamps)
    workers = default_workers(loaded, text_bytes) if pack.workers is None else pack.workers

    series = ShardSeries(
        source=lambda start: _encoded(islice(texts(), start, None), loaded, workers),
        file=lambda _: "part.bin",
        write=lambda path, records: _write(path, records, loaded),
        cut=cut_by_bytes(shard_bytes),
        total=total,
    )
    job = PackJob(
        source=str(source),
        target=target,
        identity=identity,
        on_error=pack.on_error,
        side_files=cleaning_file([source]),
    )
    return run_pack_job(job, [series], numbered=True)


def _check_source(source: Path, target: Path, lines: bool, column: str | None) -> None:
    if column is None and not lines and os.path.isfile(source) and kind_of_name(source) in read_formats():
        raise unreadable_error(
            f"{source} as one document of text",
            "of a table a field is the text",
            "--text-column NAME; or --lines for its lines",
        )
    if os.path.isdir(source) and is_inside(source, target):
        raise unwritable_error(
            f"{target} inside of {source}", "every file of the folder is text to be packed", "a target outside of it"
        )


def _file_texts(corpus: Corpus, lines: bool) -> Iterator[str | BadInput]:
    for file in corpus.files:
        try:
            with corpus.open(file) as opened:
                content = opened.read(file.size + 1)
            if len(content) != file.size:
                raise OSError(errno.ESTALE, CHANGED)
            text = read_text(content, python_source=file.path.endswith(".py"))
        except OSError as error:
            yield BadInput(path=file.path, reason=f"it cannot be read: {error.strerror}")
        except UndecodableError as error:
            yield BadInput(path=file.path, reason=str(error))
        else:
            if lines:
                yield from text.replace("\r\n", "\n").removesuffix("\n").split("\n")
            else:
                yield text


def _column_texts(source: Path, column: str) -> Iterator[str | BadInput]:
    for number, row in enumerate(open_table(source, columns=[column]).rows):
        value = row[column]
        if isinstance(value, str):
            yield value
        else:
            yield BadInput(path=f"{source.name}: row {number}", reason=f"{describe_value(value)}, no text")


def _encoded(texts: Iterator[str | BadInput], tokenizer: Tokenizer, workers: int) -> Generator[PackedInput]:
    """The outcome of each text, in order; bad and empty texts wait here for their turn and are not tokenized."""
    waiting: deque[tuple[int, PackedInput]] = deque()

    def documents() -> Iterator[Document]:
        for number, text in enumerate(texts):
            if isinstance(text, BadInput):
                waiting.append((number, PackedInput(bad=text)))
            elif not text:
                waiting.append((number, PackedInput()))
            else:
                yield str(number), text

    with closing(encode_documents(documents(), tokenizer, workers=workers)) as encoded:
        for number, document in encoded:
            while waiting and waiting[0][0] < int(number):
                yield waiting.popleft()[1]
            size = (document.ids.size + 1) * (2 if tokenizer.vocab_size <= 1 << 16 else 4)
            yield PackedInput(records=(document,), size=size)
    for _, outcome in waiting:
        yield outcome


def _write(path: Path, documents: Iterator[Encoded], tokenizer: Tokenizer) -> None:
    """One shard, always number 0 of its folder."""
    with TokenWriter(
        path.parent,
        path.stem,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        shard_tokens=_SHARD_TOKENS,
    ) as writer:
        for document in documents:
            writer.add(document.ids, document.token_bytes)

"""Text to token shards that ``open_tokens`` reads: files, lines, or a column of a table, each a document."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from unisono.data.convert.formats import open_table, read_formats
from unisono.data.convert.formats.detection import files_of, format_of
from unisono.data.convert.formats.table import shorten, unreadable_error, unwritable_error
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
from unisono.data.convert.pack.resumable_shards import PackedInput, ShardSeries
from unisono.data.convert.pack.worker import worker_count
from unisono.data.tokens.corpus import Corpus, UndecodableError, find_corpus, read_text
from unisono.data.tokens.encoding import Document, encode_documents
from unisono.data.tokens.shards import TokenWriter
from unisono.data.tokens.tokenizer import BYTES, Encoded, Tokenizer, load_tokenizer

_WORKER_BYTES = 1 << 23  # text for which a process more is worth its start
_SHARD_TOKENS = 1 << 62  # here shards end by bytes, where ``cut`` says so


def pack_text(
    source: Path,
    target: Path,
    *,
    tokenizer: str = BYTES,
    lines: bool = False,
    column: str | None = None,
    shard_bytes: int | None = 1 << 29,
    workers: int | None = None,
    on_error: OnError = "fail",
) -> PackResult:
    """Tokenize the documents of ``source`` into ``STEM-NNNNN.bin`` and ``.idx``, ``target`` being ``STEM.bin``.

    A file, or each file of a folder in the order of their paths, is one document, or with ``lines`` each of its lines that
    is not empty; of a table (``column`` names the field) each row is one. Shards end with the document that fills
    ``shard_bytes``. ``workers``: tokenizing processes, 0 = this one. Raises DataError for what is not UTF-8 text unless
    ``on_error`` is "skip".
    """
    check_suffix(target, (".bin",), "text")
    if column is None and not lines and source.is_file() and format_of(source) in read_formats():
        raise unreadable_error(
            f"{source} as one document of text",
            "of a table a field is the text",
            "--text-column NAME; or --lines for its lines",
        )
    if source.is_dir() and target.resolve().is_relative_to(source.resolve()):
        raise unwritable_error(
            f"{target} inside of {source}", "every file of the folder is text to be packed", "a target outside of it"
        )
    loaded = load_tokenizer(tokenizer)
    if column is None:
        corpus = find_corpus(str(source))
        stamps: list[Any] = [(file.path, file.size, file.mtime_ns) for file in corpus.files]
        size = sum(file.size for file in corpus.files)
        total = None if lines else len(corpus.files)
    else:
        corpus = None
        stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files_of(source)]
        size, total = sum(stamp[1] for stamp in stamps), None
    identity = {
        "text": str(source.absolute()),
        "files": stamps,
        "tokenizer": loaded.fingerprint,
        "lines": lines,
        "column": column,
        "shard_bytes": shard_bytes,
        "on_error": on_error,
    }
    processes = worker_count(workers, 0 if loaded.name == BYTES else 64 * (size // _WORKER_BYTES))

    def documents() -> Iterator[str | BadInput]:
        return _column_texts(source, column) if column is not None else _file_texts(corpus, lines)

    series = ShardSeries(
        name=UNSPLIT,
        source=lambda start: _encoded(islice(documents(), start, None), loaded, processes),
        file=lambda _: "part.bin",
        write=lambda path, records: _write(path, records, loaded),
        cut=cut_by_bytes(shard_bytes),
        total=total,
    )
    return run_pack_job(
        PackJob(source=str(source), target=target, identity=identity, on_error=on_error), [series], numbered=True
    )


def _file_texts(corpus: Corpus | None, lines: bool) -> Iterator[str | BadInput]:
    assert corpus is not None
    for file in corpus.files:
        try:
            text = read_text((corpus.root / file.path).read_bytes(), python_source=file.path.endswith(".py"))
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
        yield (
            value
            if isinstance(value, str)
            else BadInput(path=f"{source.name}: row {number}", reason=f"{shorten(value)}, no text")
        )


def _encoded(texts: Iterator[str | BadInput], tokenizer: Tokenizer, workers: int) -> Generator[PackedInput]:
    """What each text became, in order; what is bad or empty is not sent to the tokenizer, and waits here for its turn."""
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
    for _, made in waiting:
        yield made


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

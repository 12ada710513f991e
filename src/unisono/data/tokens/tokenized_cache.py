"""The cache of tokenized corpora: text is read, split, tokenized and stored once.

    cache/listing-<hash of the corpus' path>.json      digests of files by path, size and times, so that a second run does not
                                                       read unchanged files
    cache/tokens-<hash of all inputs>/                 train-NNNNN.bin/.idx, eval-NNNNN.bin/.idx, set.json
    cache/tokens-….lock                                held while that folder is being built
    cache/tokens-….part/                               the folder being built

A folder is built under another name and renamed when it is complete, so a killed build leaves nothing that counts. The next call
continues from its finished shards, to the same bytes. Processes that start together (the ranks of a job) wait for one
builder; on a file system without locks each builds its own and the first rename wins. A damaged folder is built again, and
the result reports it. The index of packed samples is written beside the shards by the first call that needs it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.kept_rows import kept_of_file, read_kept_rows
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.per_file_arrays import stamp_of
from unisono.data.recordio.remote_file import is_url
from unisono.data.sources.remote import local_path
from unisono.data.tokens.corpus import (
    CHANGED,
    Corpus,
    SourceFile,
    UndecodableError,
    empty_split_error,
    find_corpus,
    held_out_files,
    read_text,
    split_text,
    undecodable_error,
    unreadable_file_error,
)
from unisono.data.tokens.encoding import Document, default_workers, encode_documents
from unisono.data.tokens.packing import PackedWindows, PackingStats, pack_tokens
from unisono.data.tokens.shards import TokenSet, TokenWriter, open_tokens, shard_path
from unisono.data.tokens.table_texts import check_text_column, row_texts
from unisono.data.tokens.tokenizer import Tokenizer, load_tokenizer
from unisono.errors import DataError
from unisono.sanitize import without_credentials
from unisono.storage.directory import commit_directory
from unisono.storage.files import file_lock, open_regular, write_atomically
from unisono.storage.limits import MAX_JSON_BYTES, decode_json, read_open
from unisono.storage.ownership import make_own_folder, read_own_json, untrusted_reason

_FORMAT = 1
_SPLITS = ("train", "eval")
_VERIFY_BYTES = 1 << 28  # sets up to this size are verified completely when opened, in some tens of milliseconds
_PROGRESS_S = 5.0
_FRESH_NS = 2_000_000_000  # a file changed this shortly before it was read may change again within its time stamp
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReport:
    """The outcome of preparing a corpus: its documents, tokens and bytes of text, and the files left out."""

    corpus: str
    tokenizer: str
    train_documents: int
    train_tokens: int
    train_bytes: int
    eval_documents: int
    eval_tokens: int
    eval_bytes: int
    empty_files: int
    skipped: tuple[tuple[str, str], ...]  # (path, reason): files of the standard library that are not text
    packing: PackingStats | None = None  # of the train part, where samples are packed


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCorpus:
    """The token sets of a corpus, as ``prepare_corpus`` opens them.

    Attributes:
        train: Tokens to train on.
        eval: Held-out tokens; its shards have the bytes of text per token.
        tokenizer: The tokenizer of both sets.
        report: Numbers of documents, tokens and bytes, skipped files, and for packed samples the statistics of packing.
        folder: The folder of the sets, in the cache.
        from_cache: Whether this call built nothing.
        rebuild_reason: Damage of a cached folder or index that was replaced; empty if none was.
    """

    train: TokenSet
    eval: TokenSet
    tokenizer: Tokenizer
    report: CorpusReport
    folder: Path
    from_cache: bool
    rebuild_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredSet:
    """The content of ``set.json``."""

    shards: dict[str, list[str]]
    fingerprints: dict[str, str]
    report: CorpusReport


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Everything a token set depends on."""

    corpus: Corpus
    digests: dict[str, str]  # of files, by path
    tokenizer: Tokenizer
    eval_frac: float
    text_column: str
    rows: dict[str, NDArray[np.int64]]  # kept rows, by path, of tables of which others are left out

    def digest(self) -> str:
        """Hash of all inputs, which names the cache folder."""
        content = (_FORMAT, self.tokenizer.fingerprint, self.eval_frac, self.corpus.skip_undecodable)
        content += (self.text_column,) if self.text_column else ()
        if self.rows:
            digests = sorted((path, xxhash.xxh3_128_hexdigest(rows.tobytes())) for path, rows in self.rows.items())
            content += (digests,)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((*content, sorted(self.digests.items()))))


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileDigest:
    """An entry of the listing: a file's size and times when its digest was taken."""

    file: SourceFile
    digest: str


_SET: Final = msgspec.json.Decoder(_StoredSet)
_LISTING: Final = msgspec.json.Decoder(list[_FileDigest])


def prepare_corpus(options: DataOptions, cache_dir: Path | None = None) -> PreparedCorpus:
    """Tokenize ``options.corpus`` into token sets; the first call builds them, later ones find them in the cache.

    Concurrent calls are safe: one builds, and where files can be locked the others wait. A killed build continues from
    its finished shards. Progress is logged to ``unisono`` at level info.

    Args:
        options: Corpus, tokenizer and held-out share; with ``packing="best_fit"`` also the length of the packed
            samples. Corpus and tokenizer behind URLs are copied into the cache.
        cache_dir: Folder of the cache. By default ``options.cache_dir``, or if that is empty ``unisono`` in the user's
            cache folder.

    Raises:
        DataError: The corpus is missing, empty or not text, the tokenizer is invalid, or the cache folder cannot be
            written.
        ExtraError: The tokenizer's package is not installed.
    """
    cache = cache_dir or (Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(os.environ))
    tokenizer = load_tokenizer(local_path(options.tokenizer, cache / "sources"))
    corpus = find_corpus(local_path(options.corpus, cache / "sources"))
    if is_url(options.corpus):
        corpus = replace(corpus, name=without_credentials(options.corpus))
    corpus, rows = (corpus, {}) if options.train_kept_rows is None else _kept_part(corpus, options.train_kept_rows)
    check_text_column(corpus, options.text_column)
    try:
        make_own_folder(cache, option="data.cache_dir")
        inputs = _Inputs(
            corpus=corpus,
            digests=_digests(corpus, cache),
            tokenizer=tokenizer,
            eval_frac=options.eval_frac,
            text_column=options.text_column,
            rows=rows,
        )
        prepared = _find_or_build(cache / f"tokens-{inputs.digest()}", inputs)
        return _with_packing(prepared, options.seq_len) if options.packing == "best_fit" else prepared
    except OSError as error:
        raise DataError(
            given=f"the cache folder {cache} cannot be written: {error.strerror}",
            rule="prepared data is kept in a folder this user can write, with room for 2 to 8 bytes per token",
            consequence="the corpus was not prepared",
            nearest="set cache_dir in the data section to another folder, or free space there",
        ) from error


def _kept_part(corpus: Corpus, folder: str) -> tuple[Corpus, dict[str, NDArray[np.int64]]]:
    """The corpus without files of which no row is kept, and the kept rows of those of which some are."""
    kept = read_kept_rows(folder)
    files, some = list[SourceFile](), dict[str, NDArray[np.int64]]()
    for file in corpus.files:
        rows, total = kept_of_file(kept, corpus.root / file.path, stamp_of(file.size, file.mtime_ns))
        if len(rows):
            files.append(file)
        if 0 < len(rows) < total:
            some[file.path] = rows
    if not files:
        raise empty_split_error(replace(corpus, files=()), "train")
    return replace(corpus, files=tuple(files)), some


def _find_or_build(folder: Path, inputs: _Inputs) -> PreparedCorpus:
    foreign = _foreign(folder)  # made by an earlier version under umask 002, or changed later
    if (folder / "set.json").exists() and not foreign:
        with suppress(DataError):  # a damaged folder is opened again, and reported, under the lock
            return _open(folder, inputs, from_cache=True)
    with file_lock(folder.with_suffix(".lock")) as exclusive:
        damage = _foreign(folder)
        if folder.exists() and not damage:
            try:
                return _open(folder, inputs, from_cache=True)
            except DataError as error:
                damage = "; ".join(problem.given for problem in error.problems)
        if damage:
            _remove(folder)
        if exclusive:
            for leftover in folder.parent.glob(f"{folder.name}.*-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        _build(folder, inputs, exclusive)
        return _open(folder, inputs, from_cache=False, rebuild_reason=damage)


def _foreign(folder: Path) -> str:
    """Why another user can have written a prepared folder or a file in it; empty if none can, or there is none."""
    reason = untrusted_reason(folder)
    if reason or not folder.is_dir():
        return reason
    return next(filter(None, map(untrusted_reason, sorted(folder.iterdir()))), "")


def _with_packing(prepared: PreparedCorpus, seq_len: int) -> PreparedCorpus:
    """Write the packing index of the train part and add its statistics to the report."""
    with file_lock(prepared.folder.with_suffix(".lock")):
        damage = pack_tokens(prepared.train, seq_len)
    stats = PackedWindows(prepared.train, seq_len=seq_len).stats
    return replace(
        prepared,
        report=replace(prepared.report, packing=stats),
        rebuild_reason="; ".join([*([prepared.rebuild_reason] if prepared.rebuild_reason else []), *damage]),
    )


def _digests(corpus: Corpus, cache: Path) -> dict[str, str]:
    """xxh3-128 of every file by path; taken from the listing of an earlier run if size and times are unchanged."""
    path = cache / f"listing-{xxhash.xxh3_64_hexdigest(os.fsencode(corpus.root.absolute()))}.json"
    earlier: dict[str, _FileDigest] = {}
    with suppress(OSError, ValueError):  # no listing, or not one of ours: take every digest anew
        earlier = {entry.file.path: entry for entry in read_own_json(path, _LISTING.decode)}
    settled_ns = time.time_ns() - _FRESH_NS
    entries: list[_FileDigest] = []
    for file in corpus.files:
        before = earlier.get(file.path)
        if before is not None and before.file == file:
            entries.append(before)
        else:
            entries.append(_FileDigest(file=file, digest=xxhash.xxh3_128_hexdigest(_read(corpus, file))))
    settled = [entry for entry in entries if max(entry.file.mtime_ns, entry.file.ctime_ns) < settled_ns]
    if settled != list(earlier.values()):
        with suppress(OSError):  # only speed is lost; a folder that cannot be written is reported when it matters
            write_atomically(path, msgspec.json.encode(settled))
    return {entry.file.path: entry.digest for entry in entries}


def _build(folder: Path, inputs: _Inputs, exclusive: bool) -> None:
    """Write ``folder`` completely or not at all.

    ``exclusive``: no other process writes it, so the finished shards of an interrupted build remain for the next call.
    """
    temporary = folder.with_name(f"{folder.name}.part" if exclusive else f"{folder.name}.tmp-{secrets.token_hex(4)}")
    if _foreign(temporary):
        _remove(temporary)
    temporary.mkdir(mode=0o700, exist_ok=exclusive)  # the corpus may be private
    try:
        paths, skipped = _write_shards(temporary, inputs)
        if skipped and not inputs.corpus.skip_undecodable:
            raise undecodable_error(skipped)
        for split in _SPLITS:
            if not paths[split]:
                raise empty_split_error(inputs.corpus, split)
        try:
            commit_directory(temporary, folder, manifest=("set.json", _set_content(inputs, paths, skipped)))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # without locks another process may be first; its set is the same
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        # A DataError means that the corpus is at fault: the next call will have another.
        if not exclusive or isinstance(error, DataError) or not any(temporary.glob("*.bin")):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_shards(folder: Path, inputs: _Inputs) -> tuple[dict[str, list[Path]], list[tuple[str, str]]]:
    """Encode the documents that are not in finished shards; returns paths by split, and (path, reason) of skipped files."""
    tokenizer = inputs.tokenizer
    finished = _finished_shards(folder)
    skipped: list[tuple[str, str]] = []
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                TokenWriter(
                    folder,
                    split,
                    vocab_size=tokenizer.vocab_size,
                    end_of_document=tokenizer.end_of_document,
                    token_bytes=split == "eval",
                    finished=finished[split],
                )
            )
            for split in _SPLITS
        }
        done = {split: open_tokens(paths).num_documents if paths else 0 for split, paths in finished.items()}
        text_bytes = sum(file.size for file in inputs.corpus.files)
        progress = _EncodingProgress(text_bytes)
        documents = progress.leave_out(_documents(inputs, skipped), done)
        encoded = encode_documents(documents, tokenizer, workers=default_workers(tokenizer, text_bytes))
        stack.enter_context(closing(encoded))
        for split, document in encoded:
            writers[split].add(document.ids, document.token_bytes)
            progress.add(int(document.token_bytes.sum()))
    return {split: writer.paths for split, writer in writers.items()}, skipped


def _set_content(inputs: _Inputs, paths: dict[str, list[Path]], skipped: list[tuple[str, str]]) -> bytes:
    """The content of ``set.json``: its digest, a line feed, JSON."""
    train, evaluation = (open_tokens(paths[split]) for split in _SPLITS)
    report = CorpusReport(
        corpus=inputs.corpus.name,
        tokenizer=inputs.tokenizer.name,
        train_documents=train.num_documents,
        train_tokens=train.num_tokens,
        train_bytes=train.text_bytes,
        eval_documents=evaluation.num_documents,
        eval_tokens=evaluation.num_tokens,
        eval_bytes=evaluation.text_bytes,
        empty_files=sum(file.size == 0 for file in inputs.corpus.files),
        skipped=tuple(skipped),
    )
    shards = {split: [path.name for path in paths[split]] for split in _SPLITS}
    fingerprints = {"train": train.fingerprint, "eval": evaluation.fingerprint}
    content = msgspec.json.encode(_StoredSet(shards=shards, fingerprints=fingerprints, report=report))
    return xxhash.xxh3_128_hexdigest(content).encode() + b"\n" + content


def _finished_shards(folder: Path) -> dict[str, list[Path]]:
    """The complete and undamaged shards of an interrupted build, in order; deletes all other files."""
    finished: dict[str, list[Path]] = {split: [] for split in _SPLITS}
    for split, paths in finished.items():
        with suppress(DataError):  # a damaged shard, and those after it, are written again
            while (path := shard_path(folder, split, len(paths))).exists() and not open_tokens([path]).verify():
                paths.append(path)
    shards = [path for paths in finished.values() for path in paths]
    for other in set(folder.iterdir()) - {*shards, *(path.with_suffix(".idx") for path in shards)}:
        other.unlink()
    if shards:
        _LOG.info("%s: %d finished shards are reused", folder, len(shards))
    return finished


class _EncodingProgress:
    """Logs the progress of encoding every few seconds: documents, MB of text, MB/s, time left."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._documents = self._bytes = self._kept_bytes = 0
        self._begin = self._last_log_s = time.monotonic()

    def leave_out(self, documents: Iterator[Document], done: dict[str, int]) -> Iterator[Document]:
        """``documents`` without the first ``done`` of each split, which are counted as encoded."""
        for split, text in documents:
            if done[split]:
                done[split] -= 1
                self._documents += 1
                self._kept_bytes += len(text.encode())
            else:
                yield split, text

    def add(self, text_bytes: int) -> None:
        self._documents += 1
        self._bytes += text_bytes
        now = time.monotonic()
        if now - self._last_log_s < _PROGRESS_S:
            return
        self._last_log_s = now
        rate = max(1.0, self._bytes / (now - self._begin))
        done = self._bytes + self._kept_bytes
        _LOG.info(
            "encoding: %d documents, %.1f of %.1f MB of text, %.2f MB/s, %.0f s left",
            self._documents, done / 1e6, self._total_bytes / 1e6, rate / 1e6, max(0, self._total_bytes - done) / rate,
        )  # fmt: skip


def _open(folder: Path, inputs: _Inputs, *, from_cache: bool, rebuild_reason: str = "") -> PreparedCorpus:
    """Open a built folder. Raises DataError for any damage."""
    path = folder / "set.json"
    try:
        with open_regular(path) as file:
            digest, _, content = read_open(file, MAX_JSON_BYTES).partition(b"\n")
        if xxhash.xxh3_128_hexdigest(content).encode() != digest:
            raise _damaged(f"{path} does not match its digest")
        stored: _StoredSet = decode_json(content, _SET.decode)
        sets = {split: open_tokens([folder / name for name in stored.shards[split]]) for split in _SPLITS}
    except (FileNotFoundError, IsADirectoryError, PermissionError, ValueError, KeyError) as error:
        raise _damaged(f"{path}: {error}") from error
    if {split: sets[split].fingerprint for split in _SPLITS} != stored.fingerprints:
        raise _damaged(f"{folder} holds shards of another set")
    stored_bytes = sum(shard.tokens.nbytes for tokens in sets.values() for shard in tokens.shards)
    if stored_bytes <= _VERIFY_BYTES:
        problems = [problem for split in _SPLITS for problem in sets[split].verify()]
        if problems:
            raise DataError(*problems)
    return PreparedCorpus(
        train=sets["train"],
        eval=sets["eval"],
        tokenizer=inputs.tokenizer,
        # the set may have been built from a copy elsewhere
        report=replace(stored.report, corpus=inputs.corpus.name, tokenizer=inputs.tokenizer.name),
        folder=folder,
        from_cache=from_cache,
        rebuild_reason=rebuild_reason,
    )


def _documents(inputs: _Inputs, skipped: list[tuple[str, str]]) -> Iterator[Document]:
    """(split, text) of every document, in the order of the files; adds files that are not text to ``skipped``."""
    corpus, eval_frac = inputs.corpus, inputs.eval_frac
    files = [file for file in corpus.files if file.size]
    paths = [file.path for file in files]
    held_out = held_out_files(paths, eval_frac) if len(paths) > 1 else frozenset[str]()
    for path, file in zip(paths, files, strict=True):
        raw = _read(corpus, file)
        if xxhash.xxh3_128_hexdigest(raw) != inputs.digests[path]:
            raise unreadable_file_error(corpus.root / path, CHANGED)
        if inputs.text_column:
            rows = _rows(path, inputs, "eval" if path in held_out else "train", alone=len(paths) == 1)
            yield from _unchanged(rows, corpus, file)
            continue
        try:
            text = read_text(raw, python_source=path.endswith(".py"))
        except UndecodableError as error:
            skipped.append((path, str(error)))
            continue
        if len(paths) == 1:
            parts = zip(_SPLITS, split_text(text, eval_frac), strict=True)
        else:
            parts = iter([("eval" if path in held_out else "train", text)])
        yield from ((split, part) for split, part in parts if part)


def _rows(path: str, inputs: _Inputs, split: str, *, alone: bool) -> Iterator[Document]:
    """(split, text) of every row that has text; of a file that is ``alone``, rows are held out by hash of their number."""
    texts = partial(row_texts, inputs.corpus.root / path, inputs.text_column)
    if path in inputs.rows:
        texts = partial(texts, kept=inputs.rows[path])
    held_out = frozenset[str]()
    if alone:
        numbers = [str(number) for number, text in enumerate(texts()) if text]
        held_out = held_out_files(numbers, inputs.eval_frac) if len(numbers) > 1 else held_out
    for number, text in enumerate(texts()):
        if text:
            yield ("eval" if str(number) in held_out else split), text


def _unchanged(rows: Iterator[Document], corpus: Corpus, file: SourceFile) -> Iterator[Document]:
    """``rows``, which a reader of tables takes from the path of ``file``.

    Raises DataError unless that path leads to the listed file before the first row and after the last: its folder may be
    exchanged by a link. Nothing of a failed build is kept.
    """
    path = corpus.root / file.path
    with _open_listed(corpus, file) as opened:  # as long as it is open no other file gets its number
        _check_same(path, opened)
        yield from rows
        _check_same(path, opened)


def _check_same(path: Path, opened: BinaryIO) -> None:
    try:
        now, then = path.stat(), os.fstat(opened.fileno())
    except OSError as error:
        raise unreadable_file_error(path, error.strerror) from error
    if not os.path.samestat(now, then) or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
        raise unreadable_file_error(path, CHANGED)


def _read(corpus: Corpus, file: SourceFile) -> bytes:
    """The bytes of a file. Raises DataError as ``_open_listed``."""
    with _open_listed(corpus, file) as opened:
        try:
            return opened.read()
        except OSError as error:
            raise unreadable_file_error(corpus.root / file.path, error.strerror) from error


def _open_listed(corpus: Corpus, file: SourceFile) -> BinaryIO:
    """Open a file. Raises DataError if it is not the one that was listed, such as a link that leads elsewhere now."""
    try:
        return corpus.open(file)
    except OSError as error:
        raise unreadable_file_error(corpus.root / file.path, error.strerror) from error


def _remove(folder: Path) -> None:
    """Rename a damaged folder, then delete it: a killed deletion does not leave half of it under its name."""
    trash = folder.with_name(f"{folder.name}.bad-{secrets.token_hex(4)}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _damaged(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a prepared folder is read as it was written, every byte",
        consequence="nothing of it is used",
        nearest="delete the folder; it is built again from the corpus",
    )

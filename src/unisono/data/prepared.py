"""From options to token sets, once: text is read, split, tokenized and kept in a cache folder.

    cache/listing-<hash of the corpus' place>.json     digests of files by path, size and times, so that a second run
                                                       looks at the files without reading them
    cache/tokens-<hash of everything that matters>/    train-NNNNN.bin/.idx, eval-NNNNN.bin/.idx, set.json
    cache/tokens-….lock                                held while that folder is being built

A folder is built under a temporary name and renamed when complete, so a process killed half-way leaves nothing that
counts. Processes that start together (the ranks of a job) wait for one builder; where the file system has no locks each
builds its own and the first rename wins. A cached folder that turns out damaged is built again, and the result says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from unisono.data.corpus import (
    Corpus,
    SourceFile,
    UndecodableError,
    cut_text,
    find_corpus,
    held_out,
    no_text,
    read_text,
    undecodable,
    unreadable,
)
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.sidecar import sync_folder, write_atomically
from unisono.data.tokenizer import Tokenizer, load_tokenizer
from unisono.data.tokens import TokenSet, TokenWriter, open_tokens
from unisono.errors import DataError, Problem

_FORMAT = 1
_SPLITS = ("train", "eval")
_ENCODE_CHARS = 1 << 23  # text given to the tokenizer at once
_VERIFY_BYTES = 1 << 28  # sets up to this size are verified whole on opening: at most some tens of milliseconds
_FRESH_NS = 2_000_000_000  # a file changed this shortly before it was read may change again within its time stamp


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a corpus."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Token sets ready to be read. ``eval`` carries the bytes of text per token."""

    train: TokenSet
    eval: TokenSet
    tokenizer: Tokenizer
    report: Report
    folder: Path
    cached: bool  # found ready, nothing was built by this call
    rebuilt_because: str  # why a cached folder was not good; empty otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """The content of ``set.json``: its shards, and what they must add up to."""

    shards: dict[str, list[str]]
    fingerprints: dict[str, str]
    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A file of the listing, as it was when its digest was taken."""

    file: SourceFile
    digest: str


def prepare(options: DataOptions, cache_dir: Path | None = None) -> Prepared:
    """Token sets of ``options.corpus``; built on the first call, found in the cache by every later one.

    ``cache_dir`` defaults to ``options.cache_dir``, and that to the user's cache folder. Any number of processes may
    call this at once. Raises ``DataError`` for a corpus that is missing, empty or not text, a bad tokenizer, a cache
    folder that cannot be written; ``ExtraError`` for a tokenizer whose package is missing.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    corpus = find_corpus(options.corpus)
    cache = cache_dir or (Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(os.environ))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        digests = _digests(corpus, cache)
        folder = cache / f"tokens-{_key(corpus, digests, tokenizer, options.eval_frac)}"
        if (folder / "set.json").exists():
            with suppress(DataError):  # a damaged one is met again, and said, under the lock
                return _open(folder, corpus, tokenizer, cached=True)
        with _lock(folder.with_suffix(".lock")) as alone:
            damage = ""
            if folder.exists():
                try:
                    return _open(folder, corpus, tokenizer, cached=True)
                except DataError as error:
                    damage = "; ".join(problem.given for problem in error.problems)
                    _remove(folder)
            if alone:
                for leftover in cache.glob(f"{folder.name}.*-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _build(folder, corpus, digests, tokenizer, options.eval_frac)
            return _open(folder, corpus, tokenizer, cached=False, rebuilt_because=damage)
    except OSError as error:
        raise DataError(
            Problem(
                given=f"the cache folder {cache} cannot be written: {error.strerror}",
                rule="prepared data is kept in a folder this user can write, with room for 2 to 8 bytes per token",
                consequence="the corpus was not prepared",
                nearest="set cache_dir in the data section to another folder, or free space there",
            )
        ) from error


def _digests(corpus: Corpus, cache: Path) -> dict[str, str]:
    """xxh3-128 of every file, taken from the listing of an earlier run where size and times are as they were."""
    path = cache / f"listing-{xxhash.xxh3_64_hexdigest(os.fsencode(corpus.root.absolute()))}.json"
    known: dict[str, _Seen] = {}
    with suppress(FileNotFoundError, msgspec.DecodeError):  # no listing, or not one of ours: take every digest anew
        known = {seen.file.path: seen for seen in msgspec.json.decode(path.read_bytes(), type=list[_Seen])}
    settled_ns = time.time_ns() - _FRESH_NS
    seen_now: list[_Seen] = []
    for file in corpus.files:
        before = known.get(file.path)
        if before is not None and before.file == file:
            seen_now.append(before)
        else:
            seen_now.append(_Seen(file=file, digest=xxhash.xxh3_128_hexdigest(_read(corpus, file.path))))
    settled = [seen for seen in seen_now if max(seen.file.mtime_ns, seen.file.ctime_ns) < settled_ns]
    if settled != list(known.values()):
        with suppress(OSError):  # only speed is lost; a folder that cannot be written is reported when it matters
            write_atomically(path, msgspec.json.encode(settled))
    return {seen.file.path: seen.digest for seen in seen_now}


def _key(corpus: Corpus, digests: dict[str, str], tokenizer: Tokenizer, eval_frac: float) -> str:
    """Hash of everything the token sets depend on."""
    parts = (_FORMAT, tokenizer.fingerprint, eval_frac, corpus.skip_undecodable, sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def _build(folder: Path, corpus: Corpus, digests: dict[str, str], tokenizer: Tokenizer, eval_frac: float) -> None:
    """Write ``folder`` whole, or not at all."""
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        skipped: list[tuple[str, str]] = []
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(
                    TokenWriter(
                        temporary,
                        split,
                        vocab_size=tokenizer.vocab_size,
                        end_of_document=tokenizer.end_of_document,
                        token_bytes=split == "eval",
                    )
                )
                for split in _SPLITS
            }
            for batch in _batches(_documents(corpus, digests, eval_frac, skipped)):
                encoded = tokenizer.encode([text for _, text in batch])
                for (split, _), document in zip(batch, encoded, strict=True):
                    writers[split].add(document.ids, document.token_bytes)
        if skipped and not corpus.skip_undecodable:
            raise undecodable(skipped)
        for split in _SPLITS:
            if not writers[split].paths:
                raise no_text(corpus, split)
        sets = {split: open_tokens(writers[split].paths) for split in _SPLITS}
        report = Report(
            corpus=corpus.name,
            tokenizer=tokenizer.name,
            train_documents=sets["train"].documents,
            train_tokens=sets["train"].tokens,
            train_bytes=sets["train"].text_bytes,
            eval_documents=sets["eval"].documents,
            eval_tokens=sets["eval"].tokens,
            eval_bytes=sets["eval"].text_bytes,
            empty_files=sum(file.size == 0 for file in corpus.files),
            skipped=tuple(skipped),
        )
        content = msgspec.json.encode(
            _Stored(
                shards={split: [path.name for path in writers[split].paths] for split in _SPLITS},
                fingerprints={split: sets[split].fingerprint for split in _SPLITS},
                report=report,
            )
        )
        write_atomically(temporary / "set.json", xxhash.xxh3_128_hexdigest(content).encode(), b"\n", content)
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # without locks another process may be first; its set is the same
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer, *, cached: bool, rebuilt_because: str = "") -> Prepared:
    """Open a built folder; raises ``DataError`` where anything in it is not as it was written."""
    path = folder / "set.json"
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(content).encode() != digest:
            raise _damaged(f"{path} does not match its digest")
        stored = msgspec.json.decode(content, type=_Stored)
        sets = {split: open_tokens([folder / name for name in stored.shards[split]]) for split in _SPLITS}
    except (FileNotFoundError, msgspec.DecodeError, KeyError) as error:
        raise _damaged(f"{path}: {error}") from error
    if {split: sets[split].fingerprint for split in _SPLITS} != stored.fingerprints:
        raise _damaged(f"{folder} holds shards of another set")
    stored_bytes = sum(shard.tokens.nbytes for tokens in sets.values() for shard in tokens.shards)
    if stored_bytes <= _VERIFY_BYTES:
        problems = [problem for split in _SPLITS for problem in sets[split].verify()]
        if problems:
            raise DataError(*problems)
    return Prepared(
        train=sets["train"],
        eval=sets["eval"],
        tokenizer=tokenizer,
        report=replace(stored.report, corpus=corpus.name, tokenizer=tokenizer.name),  # a set may be built elsewhere
        folder=folder,
        cached=cached,
        rebuilt_because=rebuilt_because,
    )


def _documents(
    corpus: Corpus, digests: dict[str, str], eval_frac: float, skipped: list[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """(split, text) of every document, in the order of the files; what is not text is added to ``skipped``."""
    paths = [file.path for file in corpus.files if file.size]
    held = held_out(paths, eval_frac) if len(paths) > 1 else frozenset[str]()
    for path in paths:
        raw = _read(corpus, path)
        if xxhash.xxh3_128_hexdigest(raw) != digests[path]:
            raise unreadable(corpus.root / path, "it changes while it is being read")
        try:
            text = read_text(raw, python_source=path.endswith(".py"))
        except UndecodableError as error:
            skipped.append((path, str(error)))
            continue
        if len(paths) == 1:
            parts = zip(_SPLITS, cut_text(text, eval_frac), strict=True)
        else:
            parts = iter([("eval" if path in held else "train", text)])
        yield from ((split, part) for split, part in parts if part)


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document[1])
        if chars >= _ENCODE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _read(corpus: Corpus, path: str) -> bytes:
    try:
        return (corpus.root / path).read_bytes()
    except OSError as error:
        raise unreadable(corpus.root / path, error.strerror) from error


def _remove(folder: Path) -> None:
    """Take a damaged folder out of the way in one step, then delete it: a killed deletion leaves no half of it."""
    trash = folder.with_name(f"{folder.name}.bad-{secrets.token_hex(4)}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Generator[bool]:
    """Hold an exclusive lock on ``path``; yields whether the file system granted one. Ends with the process."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            alone = False
        yield alone


def _damaged(given: str) -> DataError:
    return DataError(
        Problem(
            given=given,
            rule="a prepared folder is read as it was written, every byte",
            consequence="nothing of it is used",
            nearest="delete the folder; it is built again from the corpus",
        )
    )

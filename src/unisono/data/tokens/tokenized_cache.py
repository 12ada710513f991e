"""From options to token sets, once: text is read, split, tokenized and kept in a cache folder.

    cache/listing-<hash of the corpus' place>.json     digests of files by path, size and times, so that a second run
                                                       looks at the files without reading them
    cache/tokens-<hash of everything that matters>/    train-NNNNN.bin/.idx, eval-NNNNN.bin/.idx, set.json
    cache/tokens-….lock                                held while that folder is being built
    cache/tokens-….part/                               what is being built

A folder is built under another name and renamed when complete, so a process killed half-way leaves nothing that counts.
The shards it had finished are taken over by the next call, which goes on from there to the same bytes. Processes that
start together (the ranks of a job) wait for one builder; where the file system has no locks each builds its own and the
first rename wins. A cached folder that turns out damaged is built again, and the result says so. Packed samples
(``packing``) are indexed beside the shards on the first call that asks for them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from unisono.data.loading.cpu_cores import allowed_cores
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.tokens.corpus import (
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
from unisono.data.tokens.encoding import Document, encode_documents
from unisono.data.tokens.packing import PackedWindows, PackingStats, pack_tokens
from unisono.data.tokens.shards import TokenSet, TokenWriter, open_tokens, shard_path
from unisono.data.tokens.tokenizer import BYTES, Tokenizer, load_tokenizer
from unisono.errors import DataError
from unisono.storage.files import sync_folder, write_atomically

_FORMAT = 1
_SPLITS = ("train", "eval")
_VERIFY_BYTES = 1 << 28  # sets up to this size are verified whole on opening: at most some tens of milliseconds
_WORKER_BYTES = 1 << 23  # text for which a process more is worth its start, about a third of a second
_PROGRESS_S = 5.0
_FRESH_NS = 2_000_000_000  # a file changed this shortly before it was read may change again within its time stamp
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReport:
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
    packing: PackingStats | None = None  # of the train part, where samples are packed


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCorpus:
    """Token sets ready to be read. ``eval`` carries the bytes of text per token."""

    train: TokenSet
    eval: TokenSet
    tokenizer: Tokenizer
    report: CorpusReport
    folder: Path
    from_cache: bool  # found ready, nothing was built by this call
    rebuild_reason: str  # why a cached folder was not good; empty otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredSet:
    """The content of ``set.json``: its shards, and what they must add up to."""

    shards: dict[str, list[str]]
    fingerprints: dict[str, str]
    report: CorpusReport


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileDigest:
    """A file of the listing, as it was when its digest was taken."""

    file: SourceFile
    digest: str


def prepare_corpus(options: DataOptions, cache_dir: Path | None = None) -> PreparedCorpus:
    """Token sets of ``options.corpus``; built on the first call, found in the cache by every later one.

    ``cache_dir`` defaults to ``options.cache_dir``, and that to the user's cache folder. Any number of processes may
    call this at once. Progress is logged to ``unisono`` at level info every few seconds. Raises ``DataError`` for a corpus
    that is missing, empty or not text, a bad tokenizer, a cache folder that cannot be written; ``ExtraError`` for a
    tokenizer whose package is missing.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    corpus = find_corpus(options.corpus)
    cache = cache_dir or (Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(os.environ))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        digests = _digests(corpus, cache)
        folder = cache / f"tokens-{_key(corpus, digests, tokenizer, options.eval_frac)}"
        ready = _find_or_build(folder, corpus, digests, tokenizer, options.eval_frac)
        return _with_packing(ready, options.seq_len) if options.packing == "best_fit" else ready
    except OSError as error:
        raise DataError(
            given=f"the cache folder {cache} cannot be written: {error.strerror}",
            rule="prepared data is kept in a folder this user can write, with room for 2 to 8 bytes per token",
            consequence="the corpus was not prepared",
            nearest="set cache_dir in the data section to another folder, or free space there",
        ) from error


def _find_or_build(
    folder: Path, corpus: Corpus, digests: dict[str, str], tokenizer: Tokenizer, eval_frac: float
) -> PreparedCorpus:
    if (folder / "set.json").exists():
        with suppress(DataError):  # a damaged one is met again, and said, under the lock
            return _open(folder, corpus, tokenizer, cached=True)
    with _locked(folder.with_suffix(".lock")) as alone:
        damage = ""
        if folder.exists():
            try:
                return _open(folder, corpus, tokenizer, cached=True)
            except DataError as error:
                damage = "; ".join(problem.given for problem in error.problems)
                _remove(folder)
        if alone:
            for leftover in folder.parent.glob(f"{folder.name}.*-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        _build(folder, corpus, digests, tokenizer, eval_frac, alone)
        return _open(folder, corpus, tokenizer, cached=False, rebuilt_because=damage)


def _with_packing(ready: PreparedCorpus, seq_len: int) -> PreparedCorpus:
    """The same with the train part's samples indexed."""
    with _locked(ready.folder.with_suffix(".lock")):
        damage = pack_tokens(ready.train, seq_len)
    stats = PackedWindows(ready.train, seq_len=seq_len).stats
    return replace(
        ready,
        report=replace(ready.report, packing=stats),
        rebuild_reason="; ".join([*([ready.rebuild_reason] if ready.rebuild_reason else []), *damage]),
    )


def _digests(corpus: Corpus, cache: Path) -> dict[str, str]:
    """xxh3-128 of every file, taken from the listing of an earlier run where size and times are as they were."""
    path = cache / f"listing-{xxhash.xxh3_64_hexdigest(os.fsencode(corpus.root.absolute()))}.json"
    known: dict[str, _FileDigest] = {}
    with suppress(FileNotFoundError, msgspec.DecodeError):  # no listing, or not one of ours: take every digest anew
        known = {seen.file.path: seen for seen in msgspec.json.decode(path.read_bytes(), type=list[_FileDigest])}
    settled_ns = time.time_ns() - _FRESH_NS
    seen_now: list[_FileDigest] = []
    for file in corpus.files:
        before = known.get(file.path)
        if before is not None and before.file == file:
            seen_now.append(before)
        else:
            seen_now.append(_FileDigest(file=file, digest=xxhash.xxh3_128_hexdigest(_read(corpus, file.path))))
    settled = [seen for seen in seen_now if max(seen.file.mtime_ns, seen.file.ctime_ns) < settled_ns]
    if settled != list(known.values()):
        with suppress(OSError):  # only speed is lost; a folder that cannot be written is reported when it matters
            write_atomically(path, msgspec.json.encode(settled))
    return {seen.file.path: seen.digest for seen in seen_now}


def _key(corpus: Corpus, digests: dict[str, str], tokenizer: Tokenizer, eval_frac: float) -> str:
    """Hash of everything the token sets depend on."""
    parts = (_FORMAT, tokenizer.fingerprint, eval_frac, corpus.skip_undecodable, sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def _build(
    folder: Path, corpus: Corpus, digests: dict[str, str], tokenizer: Tokenizer, eval_frac: float, alone: bool
) -> None:
    """Write ``folder`` whole, or not at all; ``alone`` = no other process does, so finished shards are kept for later."""
    temporary = folder.with_name(f"{folder.name}.part" if alone else f"{folder.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir(exist_ok=alone)
    try:
        finished = _finished_shards(temporary)
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
                        finished=finished[split],
                    )
                )
                for split in _SPLITS
            }
            done = {split: open_tokens(paths).num_documents if paths else 0 for split, paths in finished.items()}
            progress = _EncodingProgress(sum(file.size for file in corpus.files))
            left = progress.leave_out(_documents(corpus, digests, eval_frac, skipped), done)
            encoded = stack.enter_context(
                closing(encode_documents(left, tokenizer, workers=_workers(tokenizer, corpus)))
            )
            for split, document in encoded:
                writers[split].add(document.ids, document.token_bytes)
                progress.add(int(document.token_bytes.sum()))
        if skipped and not corpus.skip_undecodable:
            raise undecodable_error(skipped)
        for split in _SPLITS:
            if not writers[split].paths:
                raise empty_split_error(corpus, split)
        sets = {split: open_tokens(writers[split].paths) for split in _SPLITS}
        report = CorpusReport(
            corpus=corpus.name,
            tokenizer=tokenizer.name,
            train_documents=sets["train"].num_documents,
            train_tokens=sets["train"].num_tokens,
            train_bytes=sets["train"].text_bytes,
            eval_documents=sets["eval"].num_documents,
            eval_tokens=sets["eval"].num_tokens,
            eval_bytes=sets["eval"].text_bytes,
            empty_files=sum(file.size == 0 for file in corpus.files),
            skipped=tuple(skipped),
        )
        content = msgspec.json.encode(
            _StoredSet(
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
            # without locks another process may be first; its set is the same
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(folder.parent)
    except BaseException as error:
        # With a DataError the corpus is at fault: when this is called again it will be another.
        if not alone or isinstance(error, DataError) or not any(temporary.glob("*.bin")):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _finished_shards(folder: Path) -> dict[str, list[Path]]:
    """The shards that a build cut short has left complete and sound, in order; what else it left is deleted."""
    finished: dict[str, list[Path]] = {split: [] for split in _SPLITS}
    kept: set[Path] = set()
    for split, paths in finished.items():
        with suppress(DataError):  # a damaged one, and those after it, are made again
            while (path := shard_path(folder, split, len(paths))).exists() and not open_tokens([path]).verify():
                paths.append(path)
                kept |= {path, path.with_suffix(".idx")}
    for other in set(folder.iterdir()) - kept:
        other.unlink()
    if kept:
        _LOG.info("%s: %d finished shards are taken over", folder, len(kept) // 2)
    return finished


def _workers(tokenizer: Tokenizer, corpus: Corpus) -> int:
    """Processes that encode: none for bytes, which are copied faster than sent, or for little text."""
    if tokenizer.name == BYTES:
        return 0
    workers = min(allowed_cores(), sum(file.size for file in corpus.files) // _WORKER_BYTES)
    return workers if workers > 1 else 0


class _EncodingProgress:
    """Counts what is encoded and says so every few seconds: documents, MB of text, MB/s, time left."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._documents = self._bytes = self._kept_bytes = 0
        self._begin = self._said = time.monotonic()

    def leave_out(self, documents: Iterator[Document], done: dict[str, int]) -> Iterator[Document]:
        """``documents`` without the first ``done`` of each split, which count as text that need not be encoded."""
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
        if now - self._said < _PROGRESS_S:
            return
        self._said = now
        rate = max(1.0, self._bytes / (now - self._begin))
        done = self._bytes + self._kept_bytes
        _LOG.info(
            "encoding: %d documents, %.1f of %.1f MB of text, %.2f MB/s, %.0f s left",
            self._documents, done / 1e6, self._total_bytes / 1e6, rate / 1e6, max(0, self._total_bytes - done) / rate,
        )  # fmt: skip


def _open(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, *, cached: bool, rebuilt_because: str = ""
) -> PreparedCorpus:
    """Open a built folder; raises ``DataError`` where anything in it is not as it was written."""
    path = folder / "set.json"
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(content).encode() != digest:
            raise _damaged(f"{path} does not match its digest")
        stored = msgspec.json.decode(content, type=_StoredSet)
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
    return PreparedCorpus(
        train=sets["train"],
        eval=sets["eval"],
        tokenizer=tokenizer,
        report=replace(stored.report, corpus=corpus.name, tokenizer=tokenizer.name),  # a set may be built elsewhere
        folder=folder,
        from_cache=cached,
        rebuild_reason=rebuilt_because,
    )


def _documents(
    corpus: Corpus, digests: dict[str, str], eval_frac: float, skipped: list[tuple[str, str]]
) -> Iterator[Document]:
    """(split, text) of every document, in the order of the files; what is not text is added to ``skipped``."""
    paths = [file.path for file in corpus.files if file.size]
    held = held_out_files(paths, eval_frac) if len(paths) > 1 else frozenset[str]()
    for path in paths:
        raw = _read(corpus, path)
        if xxhash.xxh3_128_hexdigest(raw) != digests[path]:
            raise unreadable_file_error(corpus.root / path, "it changes while it is being read")
        try:
            text = read_text(raw, python_source=path.endswith(".py"))
        except UndecodableError as error:
            skipped.append((path, str(error)))
            continue
        if len(paths) == 1:
            parts = zip(_SPLITS, split_text(text, eval_frac), strict=True)
        else:
            parts = iter([("eval" if path in held else "train", text)])
        yield from ((split, part) for split, part in parts if part)


def _read(corpus: Corpus, path: str) -> bytes:
    try:
        return (corpus.root / path).read_bytes()
    except OSError as error:
        raise unreadable_file_error(corpus.root / path, error.strerror) from error


def _remove(folder: Path) -> None:
    """Take a damaged folder out of the way in one step, then delete it: a killed deletion leaves no half of it."""
    trash = folder.with_name(f"{folder.name}.bad-{secrets.token_hex(4)}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Generator[bool]:
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
        given=given,
        rule="a prepared folder is read as it was written, every byte",
        consequence="nothing of it is used",
        nearest="delete the folder; it is built again from the corpus",
    )

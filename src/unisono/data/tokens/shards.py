"""Token shards: raw little-endian arrays of token ids, each with a sidecar. Several shards form a set.

``name-00000.bin`` contains only uint16 ids (uint32 if the vocabulary needs it): concatenated documents, each ended by the
end-of-document id. ``name-00000.idx`` is its sidecar (``data.sidecar``): document starts, digests, the vocabulary and,
optionally, the bytes of text per token. A document never spans two shards. Any tool that maps a raw array can read the payload.

Not here: samples (``windows``), tokens from text (``tokenized_cache``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.sidecar import (
    PayloadInfo,
    Sidecar,
    damaged_sidecar_error,
    map_array,
    open_sidecar,
    read_facts,
    verify_sidecar,
    write_sidecar,
)
from unisono.errors import DataError, Problem
from unisono.storage.files import open_new, sync_folder

_KIND = "tokens"
_SHARD_TOKENS = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShardFacts:
    """The facts in a token shard's sidecar; the field names are stored."""

    vocab_size: int
    end_of_document: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """One opened shard; every array is a read-only view of a mapped file."""

    tokens: NDArray[Any]  # [tokens] uint16 or uint32
    starts: NDArray[np.int64]  # [documents] index of each document's first token
    token_bytes: NDArray[np.uint32] | None  # [tokens] bytes of text per token
    facts: TokenShardFacts
    sidecar: Sidecar


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSet:
    """Shards read as one stream of token ids; ``open_tokens`` opens one.

    Attributes:
        shards: The opened shards, in the order of the stream.
        num_tokens: Token ids in all shards, with the end-of-document ids.
        num_documents: Documents in all shards.
        text_bytes: Bytes of UTF-8 text that the tokens encode.
        vocab_size: Ids are below it.
        end_of_document: Id that ends each document.
        fingerprint: Digest of the shards' sidecars, which changes with their content and order.
    """

    shards: tuple[TokenShard, ...]
    num_tokens: int
    num_documents: int
    text_bytes: int
    vocab_size: int
    end_of_document: int
    fingerprint: str

    def verify(self) -> list[Problem]:
        """Read every byte of every shard and compare digests; returns an empty list if all is as written."""
        return [problem for shard in self.shards for problem in verify_sidecar(shard.sidecar, shard.tokens)]


def open_tokens(paths: Sequence[Path]) -> TokenSet:
    """Open token shards as one set. O(1) per shard: checks sizes and head digests, and reads no tokens.

    Args:
        paths: The ``.bin`` files, in the order of the stream; each has its ``.idx`` beside it.

    Raises:
        DataError: There is no shard, a file is missing, truncated or damaged, or shards have different vocabularies.
    """
    if not paths:
        raise DataError(
            given="a token set of no shards",
            rule="a set has at least one shard",
            consequence="there is nothing to read",
            nearest="the paths of the .bin files",
        )
    shards = tuple(_open_shard(path) for path in paths)
    vocabularies = {(s.facts.vocab_size, s.facts.end_of_document) for s in shards}
    if len(vocabularies) > 1:
        raise DataError(
            given=f"shards of {len(vocabularies)} vocabularies: {sorted(vocabularies)} (size, end of document)",
            rule="shards of one set are written by one tokenizer",
            consequence="the same id would stand for different text",
            nearest="open them as separate sets",
        )
    return TokenSet(
        shards=shards,
        num_tokens=sum(s.tokens.size for s in shards),
        num_documents=sum(s.starts.size for s in shards),
        text_bytes=sum(s.facts.text_bytes for s in shards),
        vocab_size=shards[0].facts.vocab_size,
        end_of_document=shards[0].facts.end_of_document,
        fingerprint="tokens:" + xxhash.xxh3_128("".join(s.sidecar.digest for s in shards).encode()).hexdigest(),
    )


def check_token_bytes(tokens: TokenSet, name: str) -> None:
    """Raise DataError if a shard has no bytes of text per token, which ``target_bytes`` needs."""
    if any(shard.token_bytes is None for shard in tokens.shards):
        raise DataError(
            given=f"{name} data without a count of text bytes per token",
            rule="target_bytes needs shards written with token_bytes",
            consequence="bits per byte cannot be computed",
            nearest="write the shards with TokenWriter(..., token_bytes=True), as the eval split is",
        )


def shard_path(folder: Path, name: str, number: int) -> Path:
    """Path of shard ``number`` of a set."""
    return folder / f"{name}-{number:05d}.bin"


class TokenWriter:
    """Writes a set of shards ``folder/name-NNNNN.bin``; leaving the ``with`` block normally commits the last one.

    A payload is written under a temporary name and synced, its sidecar is put in place, and then it is renamed: a
    ``.bin`` file is always complete. ``add(ids, token_bytes)`` appends one document.

    Args:
        folder: Existing folder of the shards.
        name: Name of the set, such as train.
        vocab_size: Number of ids; up to 65,536 they are stored as uint16, else as uint32.
        end_of_document: Id written after each document.
        token_bytes: Whether to store the bytes of text per token, which ``target_bytes`` needs.
        shard_tokens: Tokens of one shard at most. A document is never cut: a longer one has a shard of its own.
        finished: Shards that an earlier writer committed, which come before the new ones.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        vocab_size: int,
        end_of_document: int,
        token_bytes: bool = False,
        shard_tokens: int = _SHARD_TOKENS,
        finished: Sequence[Path] = (),
    ) -> None:
        self.paths: list[Path] = list(finished)
        self._folder = folder
        self._name = name
        self._vocab_size = vocab_size
        self._end_of_document = end_of_document
        self._with_bytes = token_bytes
        self._shard_tokens = shard_tokens
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._open: _UnfinishedShard | None = None

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._open is not None:
            if kind is None:
                self._commit(self._open)
            else:
                self._open.file.close()
                self._open.temporary.unlink(missing_ok=True)
            self._open = None

    def add(self, ids: NDArray[Any], token_bytes: NDArray[Any]) -> None:
        """Append one document: its ids without the end-of-document id, and the bytes of text per id.

        Raises DataError for ids outside the vocabulary.
        """
        shard = self._open
        if shard is not None and shard.tokens + ids.size + 1 > self._shard_tokens:
            self._commit(shard)
            shard = None
        if shard is None:
            shard = self._open = _UnfinishedShard(shard_path(self._folder, self._name, len(self.paths)))
        block = np.append(ids, self._end_of_document)
        if int(block.min()) < 0 or int(block.max()) >= self._vocab_size:
            raise DataError(
                given=f"token ids {int(block.min())}..{int(block.max())}",
                rule=f"token ids lie in [0, {self._vocab_size}), the tokenizer's vocabulary",
                consequence="the document was not written",
                nearest="the vocab_size of the tokenizer that made them",
            )
        raw = block.astype(self._dtype).tobytes()
        shard.file.write(raw)
        shard.hash.update(raw)
        shard.starts.append(shard.tokens)
        shard.tokens += block.size
        shard.text_bytes += int(token_bytes.sum())
        if self._with_bytes:
            shard.token_bytes.append(np.append(token_bytes, 0).astype(np.uint32))

    def _commit(self, shard: _UnfinishedShard) -> None:
        shard.file.flush()
        os.fsync(shard.file.fileno())
        shard.file.close()
        columns: dict[str, NDArray[Any]] = {"starts": np.array(shard.starts, np.uint64)}
        if self._with_bytes:
            columns["token_bytes"] = np.concatenate(shard.token_bytes)
        payload = PayloadInfo(
            bytes=shard.tokens * self._dtype.itemsize, dtype=self._dtype.str, xxh3_128=shard.hash.hexdigest()
        )
        facts = TokenShardFacts(
            vocab_size=self._vocab_size, end_of_document=self._end_of_document, text_bytes=shard.text_bytes
        )
        write_sidecar(shard.path.with_suffix(".idx"), kind=_KIND, payload=payload, columns=columns, facts=asdict(facts))
        shard.temporary.replace(shard.path)
        sync_folder(self._folder)
        self.paths.append(shard.path)


class _UnfinishedShard:
    """The shard being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + ".tmp")
        self.temporary.unlink(missing_ok=True)  # of a process that was killed
        self.file: IO[Any] = open_new(self.temporary)
        self.hash = xxhash.xxh3_128()
        self.starts: list[int] = []
        self.token_bytes: list[NDArray[np.uint32]] = []
        self.tokens = 0
        self.text_bytes = 0


def _open_shard(path: Path) -> TokenShard:
    sidecar = open_sidecar(path.with_suffix(".idx"), kind=_KIND)
    payload = sidecar.head.payload
    size = path.stat().st_size if os.path.exists(path) else None
    if size is None:
        raise damaged_sidecar_error(path, "it is missing, its sidecar is there")
    if size != payload.bytes:
        raise damaged_sidecar_error(path, f"it has {size} bytes where its sidecar says {payload.bytes}")
    tokens = map_array(path, payload.dtype, count=payload.bytes // np.dtype(payload.dtype).itemsize)
    dtypes = {name: (column.dtype.str, column.size) for name, column in sidecar.columns.items()}
    if dtypes.get("starts", ("", 0))[0] != "<u8" or dtypes.get("token_bytes", ("<u4", tokens.size)) != (
        "<u4",
        tokens.size,
    ):
        raise damaged_sidecar_error(sidecar.path, f"it has columns {dtypes}, not those of a token shard")
    return TokenShard(
        tokens=tokens,
        # The same bits as signed integers: to compare uint64 with int64, numpy would copy the column to float64.
        starts=sidecar.columns["starts"].view("<i8"),
        token_bytes=sidecar.columns.get("token_bytes"),
        facts=read_facts(sidecar, TokenShardFacts),
        sidecar=sidecar,
    )

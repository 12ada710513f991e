"""Best-fit packing of whole documents into samples (Ding et al. 2024, "Fewer Truncations Improve Language Modeling").

A document of n tokens, with its end-of-document token, has n - 1 slots: tokens followed by another. A sample has T = ``seq_len``
slots. A document of more than T slots is cut into pieces of T slots and a remainder; no other document is cut. A piece of T slots
is a sample. Remainders are placed longest first, each into the fullest sample with enough free slots. A piece of s slots reads
s + 1 tokens: the last target of one piece is the first token of the next, and every token of a document but its first is a target
exactly once. No target crosses from one document to another.

Each block of 4096 consecutive documents of a shard is packed independently, as a function of its documents' lengths. The result
is written once, beside the shard:

    name-00000.best_fit-<T>.idx   sidecar of kind "packing": piece_starts uint64 (token of the shard), piece_lengths uint32
                                  (slots), bin_pieces uint64 (sample i has the pieces bin_pieces[i] … bin_pieces[i + 1] - 1)

Opening is O(1), and reading a sample costs only its pieces. Packing leaves some slots empty; ``PackedWindows.stats`` compares
this waste with that of plain windows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch, Ids
from unisono.data.options import Boundaries
from unisono.data.sidecar import Sidecar, damaged_columns, open_sidecar, read_facts, write_sidecar
from unisono.data.tokens.shards import TokenSet, TokenShard, check_token_bytes
from unisono.errors import DataError

BLOCK_DOCUMENTS = 4096

_KIND = "packing"
_COLUMNS = {"piece_starts": "<u8", "piece_lengths": "<u4", "bin_pieces": "<u8"}
_VERIFY_BYTES = 1 << 28  # indices up to this size are verified whole before they are used again
_BIN_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingStats:
    """Costs and benefits of packing. Waste is the share of slots whose target has weight 0 (with boundaries "mask"). A document
    is cut if its slots are in more than one sample."""

    documents: int
    samples: int
    waste_frac: float
    cut_documents: int
    stream_samples: int  # and the same with plain windows (``TokenWindows``)
    stream_waste_frac: float
    stream_cut_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackingFacts:
    """The source of an index, and sums over it; the field names are stored."""

    shard: str  # digest of the shard's sidecar
    offset: int  # tokens of the set before the shard, by which plain windows are aligned
    seq_len: int
    block_documents: int
    slots: int
    cut_documents: int
    stream_cut_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackingIndex:
    """The opened index of one shard; the columns are read-only views of a mapped file."""

    starts: Ids  # [pieces]
    lengths: NDArray[np.uint32]  # [pieces]
    bins: Ids  # [samples + 1]
    facts: _PackingFacts
    sidecar: Sidecar

    def __len__(self) -> int:
        return self.bins.size - 1


def pack_documents(slots: Ids, seq_len: int) -> tuple[Ids, Ids, Ids, Ids]:
    """Pack documents of ``slots`` [documents] into samples of ``seq_len`` slots.

    Returns (documents, begins, lengths) [pieces] in the order of the samples, ``begins`` in slots from the document's first,
    and the number of pieces per sample [samples]. Documents without a slot have no piece.
    """
    num_full, rest = np.divmod(slots, seq_len)
    documents = np.repeat(np.arange(slots.size), num_full)
    begins = (np.arange(documents.size) - np.repeat(np.cumsum(num_full) - num_full, num_full)) * seq_len
    by_length = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]
    bins = np.array(_best_fit(rest[by_length].tolist(), seq_len), np.int64)
    in_bins = np.argsort(bins, kind="stable")
    rests = by_length[in_bins]
    return (
        np.concatenate([documents, rests]),
        np.concatenate([begins, num_full[rests] * seq_len]),
        np.concatenate([np.full(documents.size, seq_len, np.int64), rest[rests]]),
        np.concatenate([np.ones(documents.size, np.int64), np.bincount(bins)]),
    )


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The bin of each length, longest first: the fullest bin with enough free space (the earliest of equals), else a new one."""
    open_bins: list[int] = []  # free space and number of each bin that is not full, as one sortable integer
    chosen: list[int] = []
    num_bins = 0
    for length in lengths:
        place = bisect_left(open_bins, length << _BIN_BITS)
        if place < len(open_bins):
            free, number = divmod(open_bins.pop(place), 1 << _BIN_BITS)
        else:
            free, number = capacity, num_bins
            num_bins += 1
        chosen.append(number)
        if free > length:
            insort(open_bins, (free - length) << _BIN_BITS | number)
    return chosen


def pack_tokens(tokens: TokenSet, seq_len: int) -> list[str]:
    """Write the missing and damaged packing indices of ``tokens``, which ``PackedWindows`` reads.

    Takes the memory of one shard's index: 12 bytes per document and 8 per sample. Concurrent processes write the same
    file, each atomically.

    Args:
        tokens: The token set; each index is written beside its shard.
        seq_len: Tokens of one sample.

    Returns:
        The reasons for replacing existing indices; empty if none was damaged.

    Raises:
        OSError: The shards' folder cannot be written.

    Source:
        Best-fit packing: Ding et al. 2024, arXiv:2404.10830.
    """
    replaced: list[str] = []
    offset = 0
    for shard in tokens.shards:
        if _index_path(shard, seq_len).exists():
            try:
                _verify(_open(shard, offset, seq_len))
            except DataError as error:
                replaced.extend(problem.given for problem in error.problems)
                _write(shard, offset, seq_len)
        else:
            _write(shard, offset, seq_len)
        offset += shard.tokens.size
    return replaced


class PackedWindows:
    """A ``Dataset`` of samples packed from whole documents, with the arrays of ``TokenWindows``.

    Reads the index that ``pack_tokens`` writes. Empty slots are at a sample's end: the end-of-document id with weight
    0, as a document of their own. Positions count from the first token of a piece. With boundaries "ignore" there are
    no positions and documents, and the pieces of a sample attend to each other; no target crosses documents either way.
    The end-of-document token is a target, never an input.

    Args:
        tokens: The token set, whose shards have an index for ``seq_len``.
        seq_len: Tokens of one sample.
        boundaries: "mask" gives each sample the positions and numbers of its documents, so that attention stays within
            a document; "ignore" gives neither.
        target_bytes: Whether samples have ``target_bytes``, the bytes of text of each target.
        name: Name of the data in errors (train, eval).

    Raises:
        DataError: An index is missing, damaged or of other shards, no document has two tokens, or ``target_bytes`` is
            set and the shards have no bytes per token.
    """

    def __init__(
        self,
        tokens: TokenSet,
        *,
        seq_len: int,
        boundaries: Boundaries = "mask",
        target_bytes: bool = False,
        name: str = "train",
    ) -> None:
        ends = np.cumsum([shard.tokens.size for shard in tokens.shards], dtype=np.int64).tolist()
        self._packed = [
            _open(shard, end - shard.tokens.size, seq_len) for shard, end in zip(tokens.shards, ends, strict=True)
        ]
        self._ends = np.cumsum([len(packed) for packed in self._packed], dtype=np.int64)
        if not len(self):
            raise DataError(
                given=f"{name} data of {tokens.num_documents} documents, each of at most one token",
                rule="a sample needs a document of two tokens or more, the closing one included",
                consequence="there is nothing to predict",
                nearest="a corpus with more text",
            )
        if target_bytes:
            check_token_bytes(tokens, name)
        self.fingerprint = f"best_fit:{seq_len}:{BLOCK_DOCUMENTS}:{boundaries}:{tokens.fingerprint}"
        self.seq_len = seq_len
        self.tokens = tokens
        self.stats = self._measure()
        self._boundaries = boundaries
        self._target_bytes = target_bytes

    def __repr__(self) -> str:
        return f"PackedWindows({len(self)} samples of {self.seq_len} tokens)"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Ids) -> Batch:
        """Samples by number, with the arrays of ``TokenWindows``."""
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples are numbered 0..{len(self) - 1}, asked for {indices.min()}..{indices.max()}")
        shard_of = np.searchsorted(self._ends, indices, side="right")
        touched: list[int] = np.unique(shard_of).tolist()
        if len(touched) <= 1:
            return self._read(touched[0] if touched else 0, indices)
        rows = [np.flatnonzero(shard_of == number) for number in touched]
        parts = [self._read(number, indices[own_rows]) for number, own_rows in zip(touched, rows, strict=True)]
        order = np.argsort(np.concatenate(rows))
        return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}

    def _read(self, number: int, indices: Ids) -> Batch:
        """Samples of one shard, vectorised over samples and pieces."""
        shard, packed = self.tokens.shards[number], self._packed[number]
        bins = indices - (self._ends[number] - len(packed))
        shape = (bins.size, self.seq_len)
        low = packed.bins[bins]
        counts = packed.bins[bins + 1] - low
        # Each row gets one more piece, its empty slots (often none): then the lengths fill the rows exactly.
        ends = np.cumsum(counts + 1)
        first = ends - counts - 1
        empty = np.zeros(int(counts.sum()) + bins.size, np.bool_)
        empty[ends - 1] = True
        pieces = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        starts, lengths = np.zeros(empty.size, np.int64), np.zeros(empty.size, np.int64)
        starts[~empty], lengths[~empty] = packed.starts[pieces], packed.lengths[pieces]
        filled = np.cumsum(lengths)[ends - 1]
        lengths[ends - 1] = self.seq_len - np.diff(filled, prepend=0)

        heads = np.cumsum(lengths) - lengths  # flat place of each piece's first slot
        places = np.arange(bins.size * self.seq_len)
        source = places + np.repeat(starts - heads, lengths)
        following = source + 1
        unused = np.repeat(empty, lengths)
        batch: Batch = {}
        # Only empty slots can point outside the shard.
        for name, where in (("tokens", source), ("targets", following)):
            flat = shard.tokens.take(where, mode="clip").astype(np.int64)
            flat[unused] = self.tokens.end_of_document
            batch[name] = flat.reshape(shape)
        batch["weights"] = (~unused).astype(np.float32).reshape(shape)
        if self._boundaries == "mask":
            numbers = np.arange(empty.size) - np.repeat(first, counts + 1)
            batch["positions"] = (places - np.repeat(heads, lengths)).reshape(shape)
            batch["documents"] = np.repeat(numbers.astype(np.int32), lengths).reshape(shape)
        if self._target_bytes and shard.token_bytes is not None:
            sizes = shard.token_bytes.take(following, mode="clip").astype(np.float32).reshape(shape)
            batch["target_bytes"] = sizes * batch["weights"]
        return batch

    def _measure(self) -> PackingStats:
        facts = [packed.facts for packed in self._packed]
        slots = sum(shard.slots for shard in facts)
        stream_samples = -(-(self.tokens.num_tokens - 1) // self.seq_len)
        return PackingStats(
            documents=self.tokens.num_documents,
            samples=len(self),
            waste_frac=1 - slots / (len(self) * self.seq_len),
            cut_documents=sum(shard.cut_documents for shard in facts),
            stream_samples=stream_samples,
            stream_waste_frac=1 - slots / (stream_samples * self.seq_len),
            stream_cut_documents=sum(shard.stream_cut_documents for shard in facts),
        )


def _index_path(shard: TokenShard, seq_len: int) -> Path:
    return shard.sidecar.path.with_suffix(f".best_fit-{seq_len}.idx")


def _write(shard: TokenShard, offset: int, seq_len: int) -> None:
    """Pack a shard's documents block by block and write the index."""
    ends = np.append(shard.starts[1:], shard.tokens.size)
    slots = ends - shard.starts - 1
    starts: list[NDArray[np.uint64]] = []
    lengths: list[NDArray[np.uint32]] = []
    counts: list[Ids] = [np.zeros(1, np.int64)]
    for low in range(0, slots.size, BLOCK_DOCUMENTS):
        documents, begins, taken, per_bin = pack_documents(slots[low : low + BLOCK_DOCUMENTS], seq_len)
        starts.append((shard.starts[low + documents] + begins).astype(np.uint64))
        lengths.append(taken.astype(np.uint32))
        counts.append(per_bin)
    # Plain windows cut a document if its first and last slots are in different windows.
    window_of_first = (shard.starts + offset) // seq_len
    window_of_last = (ends - 2 + offset) // seq_len
    facts = _PackingFacts(
        shard=shard.sidecar.digest,
        offset=offset,
        seq_len=seq_len,
        block_documents=BLOCK_DOCUMENTS,
        slots=int(slots.sum()),
        cut_documents=int(np.count_nonzero(slots > seq_len)),
        stream_cut_documents=int(np.count_nonzero(window_of_first < window_of_last)),
    )
    write_sidecar(
        _index_path(shard, seq_len),
        kind=_KIND,
        payload=shard.sidecar.head.payload,
        columns={
            "piece_starts": np.concatenate(starts),
            "piece_lengths": np.concatenate(lengths),
            "bin_pieces": np.cumsum(np.concatenate(counts)).astype(np.uint64),
        },
        facts=asdict(facts),
    )


def _open(shard: TokenShard, offset: int, seq_len: int) -> _PackingIndex:
    """Open the index of a shard. O(1): checks heads and sizes."""
    path = _index_path(shard, seq_len)
    sidecar = open_sidecar(path, kind=_KIND)
    columns = sidecar.columns
    if {name: column.dtype.str for name, column in columns.items()} != _COLUMNS:
        raise _unusable(f"{path} has columns {sorted(columns)}, not those of packed documents")
    facts = read_facts(sidecar, _PackingFacts)
    made_from = (facts.shard, facts.offset, facts.seq_len, facts.block_documents)
    if made_from != (shard.sidecar.digest, offset, seq_len, BLOCK_DOCUMENTS):
        raise _unusable(f"{path} was made from another shard or with other settings")
    # The same bits as signed integers: numpy would convert a mix of uint64 and int64 to float64.
    bins = columns["bin_pieces"].view("<i8")
    starts, lengths = columns["piece_starts"].view("<i8"), columns["piece_lengths"]
    if not (bins.size and bins[0] == 0 and bins[-1] == starts.size == lengths.size):
        raise _unusable(f"{path} has {starts.size} pieces, {lengths.size} lengths and {bins.size} ends of samples")
    return _PackingIndex(starts=starts, lengths=lengths, bins=bins, facts=facts, sidecar=sidecar)


def _verify(packed: _PackingIndex) -> None:
    """Raise DataError for a damaged column; large indices are not read."""
    if sum(column.nbytes for column in packed.sidecar.columns.values()) > _VERIFY_BYTES:
        return
    if names := damaged_columns(packed.sidecar):
        raise _unusable(f"{packed.sidecar.path}: column {names[0]!r} does not match its digest")


def _unusable(given: str) -> DataError:
    return DataError(
        given=given,
        rule="an index of packed documents is read as it was written, for the shard it was made from",
        consequence="no packed sample can be read",
        nearest="unisono.data.tokens.packing.pack_tokens(tokens, seq_len) writes it again",
    )

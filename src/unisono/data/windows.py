"""Samples of a language model: windows of ``seq_len`` tokens over the stream of a token set, aware of documents.

Window ``i`` reads tokens ``[i·T, (i+1)·T)`` and predicts each one's successor, so every token of the stream but the
first is a target exactly once and no remainder is dropped: the last window is padded, with weight 0.

Arrays of ``read`` (B windows, T = seq_len):

    tokens        int64    [B, T]
    targets       int64    [B, T]  the next token
    weights       float32  [B, T]  1, or 0 where the target must not count: padding, and with boundaries "mask" the
                                   first token of another document, which nothing in this document can predict; the
                                   end-of-document token is predicted like any other
    positions     int64    [B, T]  place in the document or, for one that began earlier, in the window ("mask" only)
    documents     int32    [B, T]  number of the document within its window, from 0                    ("mask" only)
    target_bytes  float32  [B, T]  bytes of text the target stands for, 0 where its weight is 0        (on request)

Bits per byte = Σ loss · weights / ln 2 / Σ target_bytes, exact for any tokenizer and any subset of windows: a token
stands for the bytes of its document from the end of the token before to its own end, so the bytes of a document's
tokens add up to the document; the end-of-document token stands for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.data.options import Boundaries
from unisono.data.tokens import Shard, TokenSet
from unisono.errors import DataError, Problem

Ids = NDArray[np.int64]

_NONE = np.empty(0, np.int64)


class TokenWindows:
    """A ``Dataset`` of windows over ``tokens``. Raises ``DataError`` where the set is shorter than one window.

    ``name`` says in errors which data is meant (train, eval). Reading is vectorised over windows; only the few windows
    that run over the end of a shard are put together one by one.
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
        if tokens.tokens < seq_len + 1:
            raise DataError(
                Problem(
                    given=f"{name} data of {tokens.tokens} tokens with seq_len {seq_len}",
                    rule="the data holds at least one window: seq_len tokens and the one that follows",
                    consequence="there is no sample to read",
                    nearest=f"seq_len <= {tokens.tokens - 1}, or more text"
                    if tokens.tokens > 2
                    else "a corpus with more text",
                )
            )
        if target_bytes and any(shard.token_bytes is None for shard in tokens.shards):
            raise DataError(
                Problem(
                    given=f"{name} data without a count of text bytes per token",
                    rule="target_bytes needs shards written with token_bytes",
                    consequence="bits per byte cannot be computed",
                    nearest="write the shards with TokenWriter(..., token_bytes=True), as the eval split is",
                )
            )
        self.fingerprint = f"windows:{seq_len}:{boundaries}:{tokens.fingerprint}"
        self.seq_len = seq_len
        self.tokens = tokens
        self._boundaries = boundaries
        self._target_bytes = target_bytes
        self._ends = np.cumsum([shard.tokens.size for shard in tokens.shards], dtype=np.int64)
        self._grids = [
            _Grid.over(shard, end - shard.tokens.size, seq_len)
            for shard, end in zip(tokens.shards, self._ends.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return -(-(self.tokens.tokens - 1) // self.seq_len)

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """The windows ``indices`` as the arrays above."""
        first, last = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
        if first < 0 or last >= len(self):
            raise IndexError(f"windows are numbered 0..{len(self) - 1}, asked for {first}..{last}")
        shape = (indices.size, self.seq_len)
        batch: Batch = {
            "tokens": np.empty(shape, np.int64),
            "targets": np.empty(shape, np.int64),
            "weights": np.ones(shape, np.float32),
        }
        if self._target_bytes:
            batch["target_bytes"] = np.empty(shape, np.float32)
        starts = indices * self.seq_len
        number = self._shard_of(first * self.seq_len)
        if last * self.seq_len + self.seq_len < self._ends[number]:
            edges = [self._read_inside(number, starts, np.arange(indices.size), batch)]
        else:
            edges = self._read_across(starts, batch)
        if self._boundaries == "mask":
            begins = np.sort(np.concatenate(edges))
            batch["weights"].reshape(-1)[begins] = 0
            batch["positions"], batch["documents"] = _segments(begins, shape)
        if self._target_bytes:
            batch["target_bytes"] *= batch["weights"]
        return batch

    def _read_inside(self, number: int, starts: Ids, rows: Ids, batch: Batch) -> Ids:
        """Fill ``rows`` of ``batch`` with windows that lie whole in one shard; returns their edges (see ``_Grid``)."""
        grid, local = self._grids[number], starts - (self._ends[number] - self.tokens.shards[number].tokens.size)
        where = slice(None) if rows.size == len(batch["tokens"]) else rows
        grid.read_tokens(local, where, batch["tokens"], batch["targets"])
        if self._target_bytes:
            grid.read_bytes(local, where, batch["target_bytes"])
        return grid.edges(local, rows) if self._boundaries == "mask" else _NONE

    def _read_across(self, starts: Ids, batch: Batch) -> list[Ids]:
        """Fill ``batch`` from several shards; returns the windows' edges."""
        shard_of = np.searchsorted(self._ends, starts, side="right")
        inside = starts + self.seq_len < self._ends[shard_of]
        touched: list[int] = np.unique(shard_of[inside]).tolist()
        edges: list[Ids] = []
        for number in touched:
            rows = np.flatnonzero(inside & (shard_of == number))
            edges.append(self._read_inside(number, starts[rows], rows, batch))
        alone: list[int] = np.flatnonzero(~inside).tolist()
        for row in alone:
            start = int(starts[row])
            stream, sizes, begins = self._assemble(start)
            batch["tokens"][row], batch["targets"][row] = stream[:-1], stream[1:]
            batch["weights"][row, max(0, self.tokens.tokens - start - 1) :] = 0
            if self._target_bytes:
                batch["target_bytes"][row] = sizes[1:]
            edges.append(row * self.seq_len + begins[begins > 0] - 1)
        return edges

    def _shard_of(self, token: int) -> int:
        return int(np.searchsorted(self._ends, token, side="right"))

    def _assemble(self, start: int) -> tuple[Ids, NDArray[np.float32], Ids]:
        """One window over the end of a shard or of the stream: T + 1 tokens, their bytes, where documents begin."""
        length = self.seq_len + 1
        stream = np.full(length, self.tokens.end_of_document, np.int64)
        sizes = np.zeros(length, np.float32)
        begins: list[Ids] = []
        filled = 0
        while filled < length and start + filled < self.tokens.tokens:
            number = self._shard_of(start + filled)
            shard = self.tokens.shards[number]
            local = start + filled - (int(self._ends[number]) - shard.tokens.size)
            part = shard.tokens[local : local + length - filled]
            stream[filled : filled + part.size] = part
            if shard.token_bytes is not None:
                sizes[filled : filled + part.size] = shard.token_bytes[local : local + part.size]
            low, high = np.searchsorted(shard.starts, [local, local + part.size])
            begins.append(shard.starts[low:high] - local + filled)
            filled += part.size
        if filled < length:
            begins.append(np.array([filled], np.int64))  # padding counts as a document of its own
        return stream, sizes, np.concatenate(begins)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """The windows that lie whole in one shard, as rows of a contiguous array: one copy per window, no index per token.

    The first window of a shard begins ``phase`` tokens in, because windows count from the start of the set. An edge is a
    flat place ``row · T + j - 1`` in the batch where token j of the row's window, j in 1..T, begins a document.
    """

    shard: Shard
    phase: int
    seq_len: int
    tokens: NDArray[Any]  # [rows, T] view
    token_bytes: NDArray[Any] | None  # [rows, T] view

    @staticmethod
    def over(shard: Shard, offset: int, seq_len: int) -> _Grid:
        phase = -offset % seq_len
        rows = max(0, shard.tokens.size - phase) // seq_len
        view = slice(phase, phase + rows * seq_len)
        return _Grid(
            shard=shard,
            phase=phase,
            seq_len=seq_len,
            tokens=shard.tokens[view].reshape(rows, seq_len),
            token_bytes=None if shard.token_bytes is None else shard.token_bytes[view].reshape(rows, seq_len),
        )

    def read_tokens(self, local: Ids, where: slice | Ids, tokens: Ids, targets: Ids) -> None:
        """Fill rows ``where`` with the windows that begin at shard-local tokens ``local``."""
        raw = self.tokens.take((local - self.phase) // self.seq_len, axis=0)  # [B, T]
        tokens[where] = raw
        targets[where, :-1] = raw[:, 1:]
        targets[where, -1] = self.shard.tokens[local + self.seq_len]

    def read_bytes(self, local: Ids, where: slice | Ids, sizes: NDArray[np.float32]) -> None:
        """Fill rows ``where`` with the bytes each target stands for."""
        if self.token_bytes is not None and self.shard.token_bytes is not None:
            sizes[where, :-1] = self.token_bytes.take((local - self.phase) // self.seq_len, axis=0)[:, 1:]
            sizes[where, -1] = self.shard.token_bytes[local + self.seq_len]

    def edges(self, local: Ids, rows: Ids) -> Ids:
        """The edges of windows that begin at ``local``, for the batch's ``rows``."""
        low = np.searchsorted(self.shard.starts, local, side="right")
        counts = np.searchsorted(self.shard.starts, local + self.seq_len, side="right") - low
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self.shard.starts[np.repeat(low, counts) + within]
        return np.repeat(rows * self.seq_len - local, counts) + starts - 1


def _segments(edges: Ids, shape: tuple[int, int]) -> tuple[Ids, NDArray[np.int32]]:
    """Positions and document numbers [B, T] from the sorted edges of a batch."""
    num_rows, length = shape
    places = np.arange(num_rows * length)
    rows = places[::length]
    # Flat place of each segment's first token: every row begins one. An edge at j = T is a target, no token of its row.
    heads = np.sort(np.concatenate([rows, edges[(edges + 1) % length != 0] + 1]))
    lengths = np.append(heads[1:], places.size) - heads
    numbers = np.arange(heads.size) - np.searchsorted(heads, heads - heads % length)
    places -= np.repeat(heads, lengths)
    return places.reshape(shape), np.repeat(numbers.astype(np.int32), lengths).reshape(shape)

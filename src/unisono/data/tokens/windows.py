"""Samples of a language model: document-aware windows of ``seq_len`` tokens over the stream of a token set.

Window ``i`` reads tokens ``[i·S, i·S + T)``; the target of each is its successor. The last window is padded, with weight 0. By
default the stride S is T: every token of the stream but the first is a target exactly once. With a smaller stride windows
overlap; with stride 1 a window starts at each token, as in nanoGPT.

Arrays of ``read`` (B windows, T = seq_len):

    tokens        int64    [B, T]
    targets       int64    [B, T]  the next token
    weights       float32  [B, T]  1; 0 for padding and, with boundaries "mask", for the first token of the next document, which
                                   this document does not predict; the end-of-document token counts like any other
    positions     int64    [B, T]  position in the document or, if it began earlier, in the window     ("mask" only)
    documents     int32    [B, T]  number of the document within its window, from 0                    ("mask" only)
    target_bytes  float32  [B, T]  bytes of text of the target, 0 where its weight is 0                (on request)

Bits per byte = Σ loss · weights / ln 2 / Σ target_bytes, exact for any tokenizer and any subset of windows: a token has the bytes
of its document from the end of the previous token to its own end, in sum the document; the end-of-document token has none.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from unisono.data.dataset import Batch, Ids
from unisono.data.options import Boundaries
from unisono.data.tokens.shards import TokenSet, TokenShard, check_token_bytes
from unisono.errors import DataError

_NO_IDS = np.empty(0, np.int64)


class TokenWindows:
    """A ``Dataset`` of windows of ``seq_len`` tokens over the stream of a token set.

    A window has ``tokens``, ``targets`` (the next tokens) and ``weights``, each [seq_len], and as asked for
    ``positions``, ``documents`` and ``target_bytes``. The last window is padded, with weight 0. Reading is vectorised
    over windows; only windows that span shards are assembled one by one.

    Args:
        tokens: The token set.
        seq_len: Tokens of one window.
        boundaries: "mask" gives each window the positions and numbers of its documents, so that attention stays within
            a document, and does not predict a document's first token from the previous document. "ignore" reads one
            stream.
        target_bytes: Whether samples have ``target_bytes``, the bytes of text of each target, for bits per byte.
        stride: Tokens from the start of a window to that of the next, from 1 to ``seq_len``. By default ``seq_len``:
            windows do not overlap. With 1 a window starts at each token, as in nanoGPT.
        name: Name of the data in errors (train, eval).

    Raises:
        DataError: The set is shorter than one window and its next token, the stride is out of range, or
            ``target_bytes`` is set and the shards have no bytes per token.
    """

    def __init__(
        self,
        tokens: TokenSet,
        *,
        seq_len: int,
        boundaries: Boundaries = "mask",
        target_bytes: bool = False,
        stride: int | None = None,
        name: str = "train",
    ) -> None:
        stride = seq_len if stride is None else stride
        if not 1 <= stride <= seq_len:
            raise DataError(
                given=f"{name} windows of {seq_len} tokens every {stride}",
                rule="a stride is at least 1 and at most seq_len",
                consequence="tokens would be skipped, or all windows would be the same",
                nearest=f"stride={min(max(stride, 1), seq_len)}",
            )
        if tokens.num_tokens < seq_len + 1:
            raise DataError(
                given=f"{name} data of {tokens.num_tokens} tokens with seq_len {seq_len}",
                rule="the data holds at least one window: seq_len tokens and the one that follows",
                consequence="there is no sample to read",
                nearest=f"seq_len <= {tokens.num_tokens - 1}, or more text"
                if tokens.num_tokens > 2
                else "a corpus with more text",
            )
        if target_bytes:
            check_token_bytes(tokens, name)
        every = "" if stride == seq_len else f":every {stride}"
        self.fingerprint = f"windows:{seq_len}{every}:{boundaries}:{tokens.fingerprint}"
        self.seq_len = seq_len
        self._stride = stride
        self._count = -(-(tokens.num_tokens - 1 - seq_len) // stride) + 1
        self.tokens = tokens
        self._boundaries = boundaries
        self.has_target_bytes = target_bytes
        self._ends = np.cumsum([shard.tokens.size for shard in tokens.shards], dtype=np.int64)
        self._grids = [
            _ShardWindows.over(shard, end - shard.tokens.size, seq_len, stride)
            for shard, end in zip(tokens.shards, self._ends.tolist(), strict=True)
        ]
        self._firsts = [grid.first for grid in self._grids]
        self._columns = np.arange(seq_len)

    def __repr__(self) -> str:
        return f"TokenWindows({len(self)} samples of {self.seq_len} tokens)"

    def __len__(self) -> int:
        return self._count

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Windows by number, with the arrays of the module's table."""
        numbers: list[int] = indices.tolist()  # for a short batch Python's min and max are faster than numpy's
        first, last = min(numbers, default=0), max(numbers, default=0)
        if first < 0 or last >= self._count:
            raise IndexError(f"windows are numbered 0..{self._count - 1}, asked for {first}..{last}")
        masks = self._boundaries == "mask"
        grid = self._grids[bisect_right(self._firsts, first) - 1]
        if first >= grid.first and last < grid.first + len(grid.windows):
            rows = indices - grid.first
            batch = grid.read(rows, target_bytes=self.has_target_bytes)
            heads = grid.heads(rows) if masks else None
        else:
            batch, heads = self._read_across(indices)
        if heads is not None:
            _mark_documents(batch, *heads, self._columns)
        if self.has_target_bytes:
            batch["target_bytes"] *= batch["weights"]
        return batch

    def _read_across(self, indices: Ids) -> tuple[Batch, tuple[Ids, Ids] | None]:
        """Windows of several shards, or across a shard's end, and with boundaries "mask" ``_ShardWindows.heads``."""
        shape = (indices.size, self.seq_len)
        batch: Batch = {
            "tokens": np.empty(shape, np.int64),
            "targets": np.empty(shape, np.int64),
            "weights": np.ones(shape, np.float32),
        }
        if self.has_target_bytes:
            batch["target_bytes"] = np.empty(shape, np.float32)
        heads: list[Ids] = [_NO_IDS] * indices.size
        alone = np.ones(indices.size, np.bool_)
        grid_of = np.searchsorted(self._firsts, indices, side="right") - 1
        touched: list[int] = np.unique(grid_of).tolist()
        for number in touched:
            grid = self._grids[number]
            rows = np.flatnonzero((grid_of == number) & (indices < grid.first + len(grid.windows)))
            alone[rows] = False
            for name, array in grid.read(indices[rows] - grid.first, target_bytes=self.has_target_bytes).items():
                batch[name][rows] = array
            if self._boundaries == "mask":
                columns, counts = grid.heads(indices[rows] - grid.first)
                ends: list[int] = counts.cumsum().tolist()
                for row, begin, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
                    heads[row] = columns[begin:end]
        outside_grids: list[int] = np.flatnonzero(alone).tolist()
        for row in outside_grids:
            start = int(indices[row]) * self._stride
            stream, sizes, begins = self._assemble(start)
            batch["tokens"][row], batch["targets"][row] = stream[:-1], stream[1:]
            batch["weights"][row, max(0, self.tokens.num_tokens - start - 1) :] = 0
            if self.has_target_bytes:
                batch["target_bytes"][row] = sizes[1:]
            heads[row] = np.concatenate([[0], begins[begins > 0]])
        if self._boundaries == "ignore":
            return batch, None
        return batch, (np.concatenate([_NO_IDS, *heads]), np.array([columns.size for columns in heads], np.int64))

    def _assemble(self, start: int) -> tuple[Ids, NDArray[np.float32], Ids]:
        """One window across the end of a shard or of the stream: T + 1 tokens, their bytes, and the starts of documents."""
        length = self.seq_len + 1
        stream = np.full(length, self.tokens.end_of_document, np.int64)
        sizes = np.zeros(length, np.float32)
        begins: list[Ids] = []
        filled = 0
        while filled < length and start + filled < self.tokens.num_tokens:
            number = int(np.searchsorted(self._ends, start + filled, side="right"))
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
class _ShardWindows:
    """The windows entirely within one shard, as rows of a strided view: window ``first + i`` of the set is row i.

    A row has T + 1 tokens and starts S tokens after the previous one.
    """

    first: int
    phase: int  # first token of row 0 in the shard; windows are aligned to the start of the set
    stride: int
    starts: Ids  # [documents]
    windows: NDArray[Any]  # [rows, T + 1] view
    token_bytes: NDArray[Any] | None  # [rows, T + 1] view

    @staticmethod
    def over(shard: TokenShard, offset: int, seq_len: int, stride: int) -> _ShardWindows:
        phase = -offset % stride

        def rows(array: NDArray[Any]) -> NDArray[Any]:
            if array.size <= phase + seq_len:
                return np.empty((0, seq_len + 1), array.dtype)
            return sliding_window_view(array[phase:], seq_len + 1)[::stride]

        return _ShardWindows(
            first=(offset + phase) // stride,
            phase=phase,
            stride=stride,
            starts=shard.starts if shard.starts.size else np.zeros(1, np.int64),
            windows=rows(shard.tokens),
            token_bytes=None if shard.token_bytes is None else rows(shard.token_bytes),
        )

    def read(self, rows: Ids, *, target_bytes: bool) -> Batch:
        """Tokens, targets, weights of 1 and, on request, the bytes of each target."""
        raw = self.windows[rows]  # [B, T + 1]
        tokens = raw[:, :-1].astype(np.int64)
        weights = np.empty(tokens.shape, np.float32)
        weights.fill(1)
        batch: Batch = {"tokens": tokens, "targets": raw[:, 1:].astype(np.int64), "weights": weights}
        if target_bytes and self.token_bytes is not None:
            batch["target_bytes"] = self.token_bytes[rows][:, 1:].astype(np.float32)
        return batch

    def heads(self, rows: Ids) -> tuple[Ids, Ids]:
        """Where documents begin in windows ``rows``: [heads] columns, those of each window in order, and [B] how many it has.

        A window's first head is 0, whether or not a document starts there; its last can be T, the target of the last token.
        """
        length = self.windows.shape[1] - 1
        local = self.phase + rows * self.stride
        low = self.starts.searchsorted(local, side="right")
        counts = self.starts.searchsorted(local + length, side="right")
        counts += 1
        counts -= low
        firsts = counts.cumsum()
        firsts -= counts
        # methods and few calls: for a short batch each call of numpy takes longer than its elements
        low -= firsts
        low -= 1
        within = low.repeat(counts)
        within += np.arange(within.size)
        columns = self.starts[within]
        columns -= local.repeat(counts)
        columns[firsts] = 0
        return columns, counts


def _mark_documents(batch: Batch, columns: Ids, counts: Ids, row: Ids) -> None:
    """Add positions and documents to a batch, and set the weights of the first tokens of documents to 0.

    Args:
        batch: Has weights [B, T].
        columns, counts: As ``_ShardWindows.heads`` returns them.
        row: 0, 1, … T - 1.
    """
    shape = (counts.size, row.size)
    size = counts.size * row.size
    firsts = counts.cumsum()
    firsts -= counts
    numbers = np.arange(columns.size)
    numbers -= firsts.repeat(counts)
    bounds = np.empty(columns.size + 1, np.int64)
    bounds[-1] = size
    heads = bounds[:-1]
    heads[:] = np.arange(0, size, row.size).repeat(counts)
    heads += columns
    batch["weights"].reshape(-1)[heads[numbers > 0] - 1] = 0
    lengths = bounds[1:] - heads  # 0 of a head in column T
    positions = columns.repeat(lengths).reshape(shape)
    np.subtract(row, positions, out=positions)
    batch["positions"], batch["documents"] = positions, numbers.astype(np.int32).repeat(lengths).reshape(shape)

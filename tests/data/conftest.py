"""Token sets made from plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from unisono.data.tokens.shards import TokenSet, TokenWriter, open_tokens

MakeTokens = Callable[..., TokenSet]


@pytest.fixture
def make_tokens(tmp_path: Path) -> MakeTokens:
    """make_tokens(documents, vocab_size=…, shard_tokens=…, token_bytes=…): each document a list of ids, closed by the
    last id of the vocabulary."""
    count = 0

    def make(
        documents: Sequence[Sequence[int]],
        *,
        vocab_size: int = 257,
        shard_tokens: int = 1 << 28,
        token_bytes: bool = True,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> TokenSet:
        nonlocal count
        count += 1
        folder = tmp_path / f"set-{count}"
        folder.mkdir()
        writer = TokenWriter(
            folder,
            "part",
            vocab_size=vocab_size,
            end_of_document=vocab_size - 1,
            token_bytes=token_bytes,
            shard_tokens=shard_tokens,
        )
        with writer:
            for number, document in enumerate(documents):
                ids = np.array(document, np.int64)
                widths = np.ones(ids.size, np.int64) if sizes is None else np.array(sizes[number], np.int64)
                writer.add(ids, widths)
        return open_tokens(writer.paths)

    return make

"""A baseline for language models: counts of pairs of neighbouring tokens.

With the byte tokenizer this is the byte-bigram model. For another tokenizer prepare the same corpus once more with
``tokenizer="bytes"``: the split depends on paths only, so the held-out text is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

_READ_TOKENS = 1 << 20
_MAX_VOCAB = 4096  # counts are a square table


def bigram_bits_per_byte(train: TokenWindows, evaluation: TokenWindows, *, add: float = 0.1) -> float:
    """Bits per byte of a bigram model, a baseline for language models: each token is predicted from the one before it.

    The model is p(b | a) = (count(a, b) + add) / (count(a) + add · vocabulary). Pairs are the tokens and targets of the
    windows; targets of weight 0 are skipped, as in training. Memory grows with the square of the vocabulary.

    Args:
        train: Windows whose pairs are counted.
        evaluation: Windows that are predicted; need ``target_bytes=True`` and the tokenizer of ``train``.
        add: Count added to every pair (additive smoothing), above 0. 0.1 is the best of 1, 0.3, 0.1, … 0.001 on CPython
            3.11's library (3.472 bits per byte; 1 gives 3.474).

    Returns:
        Σ -log2 p(target) over all targets of ``evaluation``, divided by their bytes of text.

    Raises:
        DataError: The vocabulary has more than 4096 ids.
    """
    vocab = train.tokens.vocab_size
    if max(vocab, evaluation.tokens.vocab_size) > _MAX_VOCAB:
        raise DataError(
            given=f"a bigram table for {vocab} tokens",
            rule=f"the vocabulary has at most {_MAX_VOCAB} tokens",
            consequence="the table of pairs would not fit",
            nearest="prepare the same corpus with tokenizer 'bytes'",
        )
    counts, _ = _count_pairs(train, vocab)
    eval_counts, text_bytes = _count_pairs(evaluation, vocab)
    log_probs = np.log2(counts + add) - np.log2(counts.sum(axis=1, keepdims=True) + add * vocab)
    return float(-(eval_counts * log_probs).sum() / text_bytes)


def _count_pairs(windows: TokenWindows, vocab: int) -> tuple[NDArray[np.int64], float]:
    """Counts of each (token, target) pair, [vocab, vocab], and the bytes of text of the targets."""
    counts = np.zeros(vocab * vocab, np.int64)
    text_bytes = 0.0
    rows = max(1, _READ_TOKENS // windows.seq_len)
    for low in range(0, len(windows), rows):
        batch = windows.read(np.arange(low, min(low + rows, len(windows)), dtype=np.int64))
        pairs = batch["tokens"] * vocab + batch["targets"]
        counts += np.bincount(pairs[batch["weights"] > 0], minlength=vocab * vocab)
        text_bytes += float(batch["target_bytes"].sum(dtype=np.float64)) if "target_bytes" in batch else 0.0
    return counts.reshape(vocab, vocab), text_bytes

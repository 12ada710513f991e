"""The bigram model equals one counted in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from unisono.data.tokens.bigram_baseline import bigram_bits_per_byte
from unisono.data.tokens.shards import TokenSet
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

MakeTokens = Callable[..., TokenSet]
TRAIN = ["the cat sat on the mat", "a cat ate the hat", "b"]
HELD_OUT = ["the hat sat", "a mat"]


def slow(train: list[str], held_out: list[str], add: float) -> float:
    def pairs(texts: list[str]) -> list[tuple[int, int]]:
        return [pair for text in texts for pair in pairwise([*text.encode(), 256])]

    counts = Counter(pairs(train))
    firsts = Counter(first for first, _ in pairs(train))
    bits = sum(-math.log2((counts[p] + add) / (firsts[p[0]] + add * 257)) for p in pairs(held_out))
    return bits / sum(len(text) - 1 for text in held_out)  # the first byte of a text is nobody's successor


@pytest.mark.parametrize("seq_len", [2, 5, 16])
def test_equals_plain_counting(make_tokens: MakeTokens, seq_len: int) -> None:
    train = TokenWindows(make_tokens([list(text.encode()) for text in TRAIN]), seq_len=seq_len)
    held_out = TokenWindows(
        make_tokens([list(text.encode()) for text in HELD_OUT]), seq_len=seq_len, target_bytes=True, name="eval"
    )
    for add in (1.0, 0.1):
        assert bigram_bits_per_byte(train, held_out, add=add) == pytest.approx(slow(TRAIN, HELD_OUT, add), rel=1e-12)


def test_an_untrained_table_is_uniform(make_tokens: MakeTokens) -> None:
    train = TokenWindows(make_tokens([[7] * 50]), seq_len=4)
    held_out = TokenWindows(make_tokens([[1] * 101]), seq_len=4, target_bytes=True)
    assert bigram_bits_per_byte(train, held_out) == pytest.approx(math.log2(257) * 101 / 100)


def test_a_vocabulary_too_large_to_count(make_tokens: MakeTokens) -> None:
    large = TokenWindows(make_tokens([[1] * 10], vocab_size=5000), seq_len=4, target_bytes=True)
    with pytest.raises(DataError) as caught:
        bigram_bits_per_byte(large, large)
    assert str(caught.value) == (
        "a bigram table for 5000 tokens\n"
        "  rule: the vocabulary has at most 4096 tokens\n"
        "  so:   the table of pairs would not fit\n"
        "  try:  prepare the same corpus with tokenizer 'bytes'"
    )

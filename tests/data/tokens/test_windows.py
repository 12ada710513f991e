"""Windows equal a slow, obvious construction, token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.data.tokens.shards import TokenSet
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

MakeTokens = Callable[..., TokenSet]
END = 256


def slow_window(
    documents: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], seq_len: int, start: int, *, mask: bool
) -> dict[str, list[float]]:
    """One window, built from the definition."""
    stream: list[tuple[int, int, int]] = []  # (token, document, bytes)
    for d, (document, widths) in enumerate(zip(documents, sizes, strict=True)):
        stream += [(token, d, width) for token, width in zip([*document, END], [*widths, 0], strict=True)]
    stream += [(END, len(documents), 0)] * (seq_len + 1)
    total = sum(len(d) + 1 for d in documents)
    out: dict[str, list[float]] = {
        name: [] for name in ("tokens", "targets", "weights", "positions", "documents", "target_bytes")
    }
    position = segment = 0
    for j in range(seq_len):
        here = start + j
        (token, document, _), (target, target_document, width) = stream[here], stream[here + 1]
        if j and stream[here - 1][1] != document:
            position, segment = 0, segment + 1
        real = here + 1 < total
        weight = float(real and (not mask or target_document == document))
        row = (token, target, weight, position, segment, width * weight)
        for name, value in zip(out, row, strict=True):
            out[name].append(value)
        position += 1
    return out


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_windows_equal_the_definition(make_tokens: MakeTokens, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=20))
    documents = [rng.integers(0, 256, n).tolist() for n in lengths]
    sizes = [rng.integers(0, 9, n).tolist() for n in lengths]
    total = sum(lengths) + len(lengths)
    seq_len = data.draw(st.integers(1, min(40, total - 1))) if total > 2 else 1
    if total < 2:
        return
    mask = data.draw(st.booleans())
    tokens = make_tokens(documents, sizes=sizes, shard_tokens=data.draw(st.sampled_from([7, 30, 90, 1 << 20])))
    stride = data.draw(st.one_of(st.none(), st.integers(1, seq_len)))
    windows = TokenWindows(
        tokens, seq_len=seq_len, stride=stride, boundaries="mask" if mask else "ignore", target_bytes=True
    )
    stride = seq_len if stride is None else stride
    covered = (len(windows) - 1) * stride + seq_len
    assert covered >= total - 1 > covered - stride, "no target is left out and no window is more than is needed"
    asked = rng.integers(0, len(windows), data.draw(st.integers(1, 12)))
    got = windows.read(asked)
    want = [slow_window(documents, sizes, seq_len, int(i) * stride, mask=mask) for i in asked]
    names = set(got)
    assert names == {"tokens", "targets", "weights", "target_bytes"} | ({"positions", "documents"} if mask else set())
    for name, value in got.items():
        assert value.tolist() == [row[name] for row in want], name


def test_dtypes_and_memory(make_tokens: MakeTokens) -> None:
    windows = TokenWindows(make_tokens([list(range(100))]), seq_len=8, target_bytes=True)
    batch = windows.read(np.array([0, 1]))
    assert {name: (value.dtype.str, value.shape) for name, value in batch.items()} == {
        "tokens": ("<i8", (2, 8)),
        "targets": ("<i8", (2, 8)),
        "weights": ("<f4", (2, 8)),
        "positions": ("<i8", (2, 8)),
        "documents": ("<i4", (2, 8)),
        "target_bytes": ("<f4", (2, 8)),
    }
    assert all(value.flags.writeable and value.flags.c_contiguous for value in batch.values())
    assert all(v.size == 0 for v in windows.read(np.array([], np.int64)).values())


@pytest.mark.parametrize("shard_tokens", [50, 1 << 20])
def test_every_token_but_the_first_is_a_target_once(make_tokens: MakeTokens, shard_tokens: int) -> None:
    documents = [[n] * n for n in range(1, 30)]
    tokens = make_tokens(documents, shard_tokens=shard_tokens)
    stream = [token for document in documents for token in [*document, END]]
    predictable = [token for document in documents for token in [*document, END][1:]]
    for seq_len in (1, 7, 64, len(stream) - 1):
        ignore = read_all(TokenWindows(tokens, seq_len=seq_len, boundaries="ignore"))
        assert ignore["targets"][ignore["weights"] > 0].tolist() == stream[1:]
        mask = read_all(TokenWindows(tokens, seq_len=seq_len, target_bytes=True))
        assert mask["targets"][mask["weights"] > 0].tolist() == predictable
        assert mask["target_bytes"].sum() == sum(map(len, documents)) - len(documents)


def read_all(windows: TokenWindows) -> dict[str, np.ndarray]:
    return windows.read(np.arange(len(windows)))


def test_reading_many_windows_calls_no_more_python_than_few(make_tokens: MakeTokens) -> None:
    """The floor: no work in Python per window or per token."""
    tokens = make_tokens([[1] * n for n in (3, 500, 40, 9000, 1, 1, 1, 5000) * 4], shard_tokens=40_000)
    windows = TokenWindows(tokens, seq_len=16, target_bytes=True)
    fast = np.array([i for i in range(len(windows)) if not crosses(tokens, 16, i)])

    def calls(count: int) -> int:
        events = 0

        def count_event(frame: Any, event: str, argument: Any) -> None:
            nonlocal events
            events += event in ("call", "c_call")

        chosen = fast[np.linspace(0, fast.size - 1, count).astype(int)]
        sys.setprofile(count_event)
        try:
            windows.read(chosen)
        finally:
            sys.setprofile(None)
        return events

    few, many = calls(16), calls(2048)
    assert 0 < many <= few + 10, (few, many)


def crosses(tokens: TokenSet, seq_len: int, window: int) -> bool:
    ends = np.cumsum([shard.tokens.size for shard in tokens.shards])
    return bool(((window * seq_len < ends) & (ends <= (window + 1) * seq_len)).any())


def test_fingerprint_names_what_a_sample_depends_on(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(100))])
    prints = {
        TokenWindows(tokens, seq_len=8).fingerprint,
        TokenWindows(tokens, seq_len=9).fingerprint,
        TokenWindows(tokens, seq_len=8, boundaries="ignore").fingerprint,
        TokenWindows(tokens, seq_len=8, stride=1).fingerprint,
        TokenWindows(make_tokens([list(range(101))]), seq_len=8).fingerprint,
    }
    assert len(prints) == 5
    assert TokenWindows(tokens, seq_len=8, stride=8).fingerprint in prints


@pytest.mark.parametrize(("stride", "nearest"), [(0, 1), (-3, 1), (9, 8)])
def test_a_stride_that_leaves_tokens_out(make_tokens: MakeTokens, stride: int, nearest: int) -> None:
    with pytest.raises(DataError) as caught:
        TokenWindows(make_tokens([list(range(30))]), seq_len=8, stride=stride)
    assert str(caught.value) == (
        f"train windows of 8 tokens every {stride}\n"
        "  rule: a stride is at least 1 and at most seq_len\n"
        "  so:   tokens would be skipped, or all windows would be the same\n"
        f"  try:  stride={nearest}"
    )


def test_data_shorter_than_one_window(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(9))])
    assert len(TokenWindows(tokens, seq_len=9)) == 1
    with pytest.raises(DataError) as caught:
        TokenWindows(tokens, seq_len=10, name="eval")
    assert str(caught.value) == (
        "eval data of 10 tokens with seq_len 10\n"
        "  rule: the data holds at least one window: seq_len tokens and the one that follows\n"
        "  so:   there is no sample to read\n"
        "  try:  seq_len <= 9, or more text"
    )
    with pytest.raises(DataError, match=r"try:  a corpus with more text"):
        TokenWindows(make_tokens([[1]]), seq_len=4)


def test_text_bytes_must_have_been_counted(make_tokens: MakeTokens) -> None:
    with pytest.raises(DataError, match="train data without a count of text bytes per token"):
        TokenWindows(make_tokens([[1, 2, 3]], token_bytes=False), seq_len=2, target_bytes=True)


def test_windows_outside_the_set(make_tokens: MakeTokens) -> None:
    windows = TokenWindows(make_tokens([list(range(9))]), seq_len=3)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=r"windows are numbered 0\.\.2, asked for"):
            windows.read(np.array([0, bad]))

"""Packed samples hold every predictable token once, whole documents where they fit, and say what that costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.data.options import DataOptions
from unisono.data.tokens import packing as module
from unisono.data.tokens.packing import PackedWindows, pack_documents, pack_tokens
from unisono.data.tokens.shards import TokenSet, open_tokens
from unisono.data.tokens.tokenized_cache import prepare_corpus
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError
from unisono.observe.formatting import event_message
from unisono.train.build import build_data
from unisono.train.config import RunConfig

MakeTokens = Callable[..., TokenSet]
END = 9999
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def slow_bins(slots: list[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Best-fit decreasing by its definition: bins of (document, begin, length); the fullest bin is looked for one by one."""
    bins = [[(d, k * seq_len, seq_len)] for d, n in enumerate(slots) for k in range(n // seq_len)]
    rests = [(d, n - n % seq_len, n % seq_len) for d, n in enumerate(slots) if n % seq_len]
    opened: list[list[tuple[int, int, int]]] = []
    for rest in sorted(rests, key=lambda rest: -rest[2]):
        fitting = [b for b in opened if sum(piece[2] for piece in b) + rest[2] <= seq_len]
        if fitting:
            max(fitting, key=lambda b: sum(piece[2] for piece in b)).append(rest)
        else:
            opened.append([rest])
    return bins + opened


@quick
@given(slots=st.lists(st.integers(0, 50), max_size=60), seq_len=st.integers(1, 24))
def test_a_block_equals_the_definition(slots: list[int], seq_len: int) -> None:
    documents, begins, lengths, counts = pack_documents(np.array(slots, np.int64), seq_len)
    pieces = list(zip(documents.tolist(), begins.tolist(), lengths.tolist(), strict=True))
    ends = np.cumsum(counts).tolist()
    assert [pieces[low:high] for low, high in pairwise([0, *ends])] == slow_bins(slots, seq_len)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, so that a token names its place."""
    ids = iter(range(sum(lengths)))
    return [[next(ids) for _ in range(length)] for length in lengths]


@quick
@given(data=st.data())
def test_every_token_but_a_documents_first_is_a_target_once(make_tokens: MakeTokens, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=30))
    seq_len = data.draw(st.integers(1, 40))
    if not any(lengths):
        return
    documents = numbered(lengths)
    tokens = make_tokens(documents, vocab_size=END + 1, shard_tokens=data.draw(st.sampled_from([20, 150, 1 << 20])))
    assert pack_tokens(tokens, seq_len) == []
    windows = PackedWindows(tokens, seq_len=seq_len, target_bytes=True)
    order = np.random.default_rng(len(lengths)).permutation(len(windows))
    batch = windows.read(order)
    counts = batch["weights"] > 0
    got = sorted(zip(batch["tokens"][counts].tolist(), batch["targets"][counts].tolist(), strict=True))
    assert got == sorted(pair for document in documents for pair in pairwise([*document, END]))
    place = {token: i for document in documents for i, token in enumerate(document)}
    assert batch["positions"][counts].tolist() == [place[t] % seq_len for t in batch["tokens"][counts].tolist()]
    assert batch["target_bytes"].sum() == sum(max(0, n - 1) for n in lengths)
    assert (batch["target_bytes"][~counts] == 0).all()
    for row, weights in enumerate(batch["weights"]):
        filled = int(weights.sum())
        assert weights[:filled].all(), "empty slots are at the end"
        assert (batch["tokens"][row, filled:] == END).all()
        assert (batch["targets"][row, filled:] == END).all()
        # a document's number changes where its positions begin again, and nowhere else
        steps = np.diff(batch["documents"][row])
        assert batch["documents"][row, 0] == 0
        assert set(steps.tolist()) <= {0, 1}
        assert ((batch["positions"][row, 1:] == 0) == (steps == 1)).all()
    for number, row in enumerate(order.tolist()):
        alone = windows.read(np.array([row]))
        assert all((alone[name][0] == array[number]).all() for name, array in batch.items())


def test_a_document_that_fits_is_never_cut(make_tokens: MakeTokens) -> None:
    rng = np.random.default_rng(0)
    documents = numbered(rng.integers(1, 65, 100).tolist())
    tokens = make_tokens(documents, vocab_size=END + 1)
    pack_tokens(tokens, 64)
    batch = PackedWindows(tokens, seq_len=64).read(np.arange(len(PackedWindows(tokens, seq_len=64))))
    rows = {token: row for row, tokens in enumerate(batch["tokens"].tolist()) for token in tokens if token != END}
    assert all(len({rows[token] for token in document}) == 1 for document in documents)


def test_stats_are_what_the_samples_are(make_tokens: MakeTokens) -> None:
    rng = np.random.default_rng(1)
    documents = numbered([32, *(int(n) for n in rng.integers(0, 90, 79))])  # 32: its closing token begins a window
    tokens = make_tokens(documents, vocab_size=END + 1, shard_tokens=500)
    assert len(tokens.shards) > 3
    pack_tokens(tokens, 32)
    packed, plain = PackedWindows(tokens, seq_len=32), TokenWindows(tokens, seq_len=32)

    def measured(windows: PackedWindows | TokenWindows) -> tuple[int, float, int]:
        batch = windows.read(np.arange(len(windows)))
        rows: dict[int, set[int]] = {}
        document_of = {token: d for d, document in enumerate(documents) for token in document}
        counts = batch["weights"] > 0
        for row, column in zip(*np.nonzero(counts), strict=True):
            rows.setdefault(document_of[int(batch["tokens"][row, column])], set()).add(int(row))
        return len(windows), 1 - float(batch["weights"].mean()), sum(len(each) > 1 for each in rows.values())

    stats = packed.stats
    assert (stats.samples, stats.cut_documents) == measured(packed)[::2]
    assert (stats.stream_samples, stats.stream_cut_documents) == measured(plain)[::2]
    assert stats.waste_frac == pytest.approx(measured(packed)[1])
    assert stats.stream_waste_frac == pytest.approx(measured(plain)[1])
    assert stats.documents == 80
    assert stats.cut_documents < stats.stream_cut_documents


def test_blocks_are_packed_each_by_itself(make_tokens: MakeTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 8)
    documents = numbered([5, 9, 3, 14, 7, 2, 11, 6] * 3)
    tokens = make_tokens(documents, vocab_size=END + 1)
    pack_tokens(tokens, 16)
    windows = PackedWindows(tokens, seq_len=16)
    block = make_tokens(documents[8:16], vocab_size=END + 1)
    pack_tokens(block, 16)
    alone = PackedWindows(block, seq_len=16)
    assert len(windows) == 3 * len(alone)
    second = windows.read(len(alone) + np.arange(len(alone)))
    assert all((second[name] == array).all() for name, array in alone.read(np.arange(len(alone))).items())


def test_dtypes_and_memory(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(100)), [1] * 5])
    pack_tokens(tokens, 8)
    batch = PackedWindows(tokens, seq_len=8, target_bytes=True).read(np.array([0, 1]))
    like = TokenWindows(tokens, seq_len=8, target_bytes=True).read(np.array([0, 1]))
    assert {name: (v.dtype, v.shape) for name, v in batch.items()} == {
        name: (v.dtype, v.shape) for name, v in like.items()
    }
    assert all(value.flags.writeable and value.flags.c_contiguous for value in batch.values())
    assert all(v.size == 0 for v in PackedWindows(tokens, seq_len=8).read(np.array([], np.int64)).values())
    ignore = PackedWindows(tokens, seq_len=8, boundaries="ignore").read(np.array([0, 1]))
    assert set(ignore) == {"tokens", "targets", "weights"}
    assert all((array == batch[name]).all() for name, array in ignore.items())


def test_reading_many_samples_calls_no_more_python_than_few(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([[1] * n for n in (3, 50, 40, 90, 1, 1, 1, 20) * 100])
    pack_tokens(tokens, 64)
    windows = PackedWindows(tokens, seq_len=64, target_bytes=True)

    def calls(count: int) -> int:
        events = 0

        def count_event(frame: Any, event: str, argument: Any) -> None:
            nonlocal events
            events += event in ("call", "c_call")

        asked = np.arange(count)
        sys.setprofile(count_event)
        try:
            windows.read(asked)
        finally:
            sys.setprofile(None)
        return events

    assert 0 < calls(300) <= calls(3) + 10


def test_fingerprint_names_what_a_sample_depends_on(make_tokens: MakeTokens) -> None:
    tokens, other = make_tokens([list(range(100))]), make_tokens([list(range(101))])
    for each, seq_len in ((tokens, 8), (tokens, 9), (other, 8)):
        pack_tokens(each, seq_len)
    prints = {
        PackedWindows(tokens, seq_len=8).fingerprint,
        PackedWindows(tokens, seq_len=9).fingerprint,
        PackedWindows(tokens, seq_len=8, boundaries="ignore").fingerprint,
        PackedWindows(other, seq_len=8).fingerprint,
        TokenWindows(tokens, seq_len=8).fingerprint,
    }
    assert len(prints) == 5


def index_of(tokens: TokenSet, seq_len: int) -> Path:
    return tokens.shards[0].sidecar.path.with_suffix(f".best_fit-{seq_len}.idx")


def test_what_is_there_is_kept_and_what_is_damaged_is_written_again(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(100)), [1] * 5])
    pack_tokens(tokens, 8)
    path = index_of(tokens, 8)
    good, written = path.read_bytes(), path.stat().st_mtime_ns
    assert pack_tokens(tokens, 8) == []
    assert path.stat().st_mtime_ns == written
    flipped = bytearray(good)
    flipped[-64] ^= 1
    for bad, why in (
        (bytes(flipped), "column 'bin_pieces' does not match its digest"),
        (good[:-8], f"it has {len(good) - 8} bytes where its head says {len(good)}"),
        (b"", "it does not begin like a sidecar"),
    ):
        path.write_bytes(bad)
        (reason,) = pack_tokens(tokens, 8)
        assert why in reason
        assert path.read_bytes() == good


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for n in range(30):
        (root / f"file-{n}.txt").write_text(f"text of file {n}\n" * (n + 1))
    return root


def test_a_corpus_is_packed_once(corpus: Path, tmp_path: Path) -> None:
    stream = DataOptions(corpus=str(corpus), eval_frac=0.2, seq_len=128)
    options = replace(stream, packing="best_fit")
    plain = prepare_corpus(stream, tmp_path / "cache")
    assert plain.report.packing is None
    packed = prepare_corpus(options, tmp_path / "cache")
    assert packed.from_cache, "the shards are the same"
    assert packed.folder == plain.folder
    windows = PackedWindows(packed.train, seq_len=128)
    assert packed.report.packing == windows.stats
    path = index_of(packed.train, 128)
    assert path.parent == packed.folder
    written = path.stat().st_mtime_ns
    again = prepare_corpus(options, tmp_path / "cache")
    assert (again.report, again.rebuild_reason) == (packed.report, "")
    assert path.stat().st_mtime_ns == written
    path.write_bytes(b"")
    assert prepare_corpus(options, tmp_path / "cache").rebuild_reason == f"{path}: it does not begin like a sidecar"
    assert prepare_corpus(replace(options, seq_len=64), tmp_path / "cache").report.packing != packed.report.packing


def test_a_run_trains_on_windows_at_any_offset(corpus: Path, tmp_path: Path) -> None:
    options = DataOptions(corpus=str(corpus), eval_frac=0.2, seq_len=64, packing="sliding", cache_dir=str(tmp_path))
    data = build_data(replace(RunConfig(), data=options))
    assert data.prepared is not None
    assert len(data.train) == data.prepared.train.num_tokens - 64
    assert len(data.held_out) < data.prepared.eval.num_tokens / 60, "held-out tokens are targets once"


def test_a_run_trains_on_packed_samples_and_says_what_they_cost(corpus: Path, tmp_path: Path) -> None:
    options = DataOptions(corpus=str(corpus), eval_frac=0.2, seq_len=128, packing="best_fit", cache_dir=str(tmp_path))
    data = build_data(replace(RunConfig(), data=options))
    assert isinstance(data.train, PackedWindows)
    assert isinstance(data.held_out, TokenWindows), "runs of either packing are measured alike"
    assert data.prepared is not None
    start = {"kind": "run_start", "parameters": 1e6, "plan_text": "cpu", "data": asdict(data.prepared.report)}
    said = event_message(start)
    stats = data.train.stats
    assert said is not None
    assert said.text.endswith(
        f"; packed: {stats.waste_frac:.2%} of positions without a target, {stats.cut_documents} of {stats.documents} "
        f"documents cut (as a stream {stats.stream_waste_frac:.2%}, {stats.stream_cut_documents})"
    )
    assert 0 < stats.waste_frac < 0.1


def test_an_index_of_another_shard_is_not_used(make_tokens: MakeTokens) -> None:
    tokens, other = make_tokens([list(range(100))]), make_tokens([list(range(101))])
    pack_tokens(tokens, 8)
    shutil.copy(index_of(tokens, 8), index_of(other, 8))
    with pytest.raises(DataError) as caught:
        PackedWindows(other, seq_len=8)
    assert str(caught.value) == (
        f"{index_of(other, 8)} was made from another shard or with other settings\n"
        "  rule: an index of packed documents is read as it was written, for the shard it was made from\n"
        "  so:   no packed sample can be read\n"
        "  try:  unisono.data.tokens.packing.pack_tokens(tokens, seq_len) writes it again"
    )
    assert pack_tokens(other, 8) == [f"{index_of(other, 8)} was made from another shard or with other settings"]
    assert len(PackedWindows(other, seq_len=8)) == 13
    with pytest.raises(DataError, match=r"best_fit-9\.idx: it cannot be read: No such file or directory"):
        PackedWindows(other, seq_len=9)
    moved = replace(tokens, shards=(other.shards[0], tokens.shards[0]), num_tokens=tokens.num_tokens + other.num_tokens)
    assert pack_tokens(moved, 8) == [f"{index_of(tokens, 8)} was made from another shard or with other settings"]


def test_nothing_to_predict(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([[], []])
    pack_tokens(tokens, 4)
    with pytest.raises(DataError) as caught:
        PackedWindows(tokens, seq_len=4)
    assert str(caught.value) == (
        "train data of 2 documents, each of at most one token\n"
        "  rule: a sample needs a document of two tokens or more, the closing one included\n"
        "  so:   there is nothing to predict\n"
        "  try:  a corpus with more text"
    )
    tokens = make_tokens([[1, 2, 3]], token_bytes=False)
    pack_tokens(tokens, 2)
    with pytest.raises(DataError, match="train data without a count of text bytes per token"):
        PackedWindows(tokens, seq_len=2, target_bytes=True)


def test_samples_outside_the_set(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(9))])
    pack_tokens(tokens, 3)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=r"samples are numbered 0\.\.2, asked for"):
            PackedWindows(tokens, seq_len=3).read(np.array([0, bad]))


def test_opening_reads_no_column(make_tokens: MakeTokens) -> None:
    """Resuming costs the same for any number of documents: a damaged column is met when its samples are, not before."""
    tokens = make_tokens([[1] * 5] * 50)
    pack_tokens(tokens, 8)
    path = index_of(tokens, 8)
    content = bytearray(path.read_bytes())
    start = content.index(np.arange(0, 30, 6, dtype="<u8").tobytes())
    content[start : start + 8] = b"\x01" + bytes(7)
    path.write_bytes(content)
    assert len(PackedWindows(open_tokens([tokens.shards[0].sidecar.path.with_suffix(".bin")]), seq_len=8)) > 0

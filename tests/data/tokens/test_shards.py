"""Token shards come back as written; damage is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unisono.data.tokens.shards import TokenSet, TokenWriter, open_tokens
from unisono.errors import DataError

MakeTokens = Callable[..., TokenSet]


def paths_of(tokens: TokenSet) -> list[Path]:
    return [shard.sidecar.path.with_suffix(".bin") for shard in tokens.shards]


def test_one_shard(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([[1, 2, 3], [], [4]])
    assert (tokens.num_tokens, tokens.num_documents, tokens.text_bytes) == (7, 3, 4)
    assert (tokens.vocab_size, tokens.end_of_document) == (257, 256)
    (shard,) = tokens.shards
    assert shard.tokens.dtype == np.dtype("<u2")
    assert shard.tokens.tolist() == [1, 2, 3, 256, 256, 4, 256]
    assert shard.starts.tolist() == [0, 4, 5]
    assert shard.token_bytes is not None
    assert shard.token_bytes.tolist() == [1, 1, 1, 0, 0, 1, 0]
    (path,) = paths_of(tokens)
    assert np.fromfile(path, "<u2").tolist() == shard.tokens.tolist(), "the payload is a plain array"
    assert sorted(p.name for p in path.parent.iterdir()) == ["part-00000.bin", "part-00000.idx"]
    assert tokens.verify() == []


def test_wide_vocabularies_take_four_bytes(make_tokens: MakeTokens) -> None:
    assert make_tokens([[0]], vocab_size=1 << 16).shards[0].tokens.dtype == np.dtype("<u2")
    tokens = make_tokens([[0, 1 << 16]], vocab_size=(1 << 16) + 2)
    assert tokens.shards[0].tokens.dtype == np.dtype("<u4")
    assert tokens.shards[0].tokens.tolist() == [0, 1 << 16, (1 << 16) + 1]


def test_a_document_never_spans_shards(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([[1] * 3, [2] * 4, [3] * 30, [4], [5]], shard_tokens=10)
    assert [s.tokens.tolist() for s in tokens.shards] == [
        [1, 1, 1, 256, 2, 2, 2, 2, 256],
        [3] * 30 + [256],
        [4, 256, 5, 256],
    ]
    assert [s.starts.tolist() for s in tokens.shards] == [[0, 4], [0], [0, 2]]
    assert tokens.num_tokens == 44
    assert tokens.num_documents == 5


def test_fingerprint_names_content_and_order(make_tokens: MakeTokens) -> None:
    first = make_tokens([[1, 2], [3]], shard_tokens=4)
    assert first.fingerprint == make_tokens([[1, 2], [3]], shard_tokens=4).fingerprint
    assert first.fingerprint != make_tokens([[1, 2], [4]], shard_tokens=4).fingerprint
    assert first.fingerprint != open_tokens(paths_of(first)[::-1]).fingerprint


def test_ids_outside_the_vocabulary_are_refused(make_tokens: MakeTokens) -> None:
    with pytest.raises(DataError, match=r"token ids 5\.\.300\n  rule: token ids lie in \[0, 257\)"):
        make_tokens([[5, 300]])


def add_all(writer: TokenWriter, ids: list[int]) -> None:
    for token in ids:
        writer.add(np.array([token]), np.array([1]))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "part", vocab_size=257, end_of_document=256)
    with pytest.raises(DataError, match="token ids lie in"), writer:
        add_all(writer, [1, 999])
    assert list(tmp_path.iterdir()) == []
    assert writer.paths == []


def test_every_flipped_payload_byte_is_found_by_verify(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(50))])
    (path,) = paths_of(tokens)
    good = path.read_bytes()
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        (problem,) = open_tokens([path]).verify()
        assert problem.given == f"{path.with_suffix('.idx')}: the payload beside it does not match its digest"


def test_missing_and_cut_files(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([list(range(50))])
    (path,) = paths_of(tokens)
    good = path.read_bytes()
    path.write_bytes(good[:-2])
    with pytest.raises(DataError) as caught:
        open_tokens([path])
    assert str(caught.value) == (
        f"{path}: it has 100 bytes where its sidecar says 102\n"
        "  rule: a shard and its sidecar are read as they were written, every byte\n"
        "  so:   nothing of this shard is used\n"
        "  try:  write the shard again; prepared corpora are rebuilt when their folder is deleted"
    )
    path.unlink()
    with pytest.raises(DataError, match="is missing, its sidecar is there"):
        open_tokens([path])
    path.write_bytes(good)
    path.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"\.idx: it cannot be read: No such file"):
        open_tokens([path])


def test_shards_of_two_vocabularies_or_none(make_tokens: MakeTokens) -> None:
    mixed = paths_of(make_tokens([[1]])) + paths_of(make_tokens([[1]], vocab_size=300))
    with pytest.raises(DataError, match=r"shards of 2 vocabularies: \[\(257, 256\), \(300, 299\)\]"):
        open_tokens(mixed)
    with pytest.raises(DataError, match="a token set of no shards"):
        open_tokens([])


def test_a_sidecar_of_other_columns_is_refused(tmp_path: Path) -> None:
    from unisono.data.sidecar import PayloadInfo, digest_of, write_sidecar

    ids = np.array([1, 256], "<u2")
    ids.tofile(tmp_path / "a.bin")
    payload = PayloadInfo(bytes=4, dtype="<u2", xxh3_128=digest_of(ids))
    facts: dict[str, str | int] = {"vocab_size": 257, "end_of_document": 256, "text_bytes": 1}
    starts = np.array([0], np.uint64)
    for columns in ({}, {"starts": starts.astype(np.uint32)}, {"starts": starts, "token_bytes": np.ones(3, np.uint32)}):
        write_sidecar(tmp_path / "a.idx", kind="tokens", payload=payload, columns=columns, facts=facts)
        with pytest.raises(DataError, match="not those of a token shard"):
            open_tokens([tmp_path / "a.bin"])
    write_sidecar(tmp_path / "a.idx", kind="tokens", payload=payload, columns={"starts": starts}, facts={"x": 1})
    with pytest.raises(DataError, match="has unexpected facts: Object missing required field `vocab_size`"):
        open_tokens([tmp_path / "a.bin"])

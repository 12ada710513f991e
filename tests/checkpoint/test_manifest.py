from __future__ import annotations

import json

import pytest

from unisono.checkpoint.manifest import (
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    decode,
    digest,
    encode,
    encode_commit_marker,
    shard_name,
    versions,
)
from unisono.errors import CheckpointError

FILE = shard_name(0, 1)


def manifest(**changes):
    pieces = (
        PieceEntry(file=FILE, key="w[0:2,0:3]", offset=(0, 0), shape=(2, 3)),
        PieceEntry(file=FILE, key="w[2:4,0:3]", offset=(2, 0), shape=(2, 3)),
    )
    values = {
        "step": 12,
        "world": 1,
        "attempt": 1,
        "score": 0.25,
        "versions": versions(),
        "meta": {"text": "grüße\n", "list": [1, 2.5, None, True], "deep": {"a": {}}},
        "files": {FILE: FileEntry(bytes=10, digest="00" * 16)},
        "tensors": {"w": TensorEntry(shape=(4, 3), dtype="F32", pieces=pieces)},
    }
    return Manifest(**(values | changes))


def test_round_trip_is_exact_and_every_tensor_has_a_line():
    data = encode(manifest())
    assert decode(data) == manifest()
    assert json.loads(data)["meta"]["list"] == [1, 2.5, None, True]
    assert sum(line.lstrip().startswith(b'"w": {') for line in data.splitlines()) == 1
    assert decode(encode(manifest(files={}, tensors={}))).tensors == {}


def test_the_seal_follows_from_the_manifest():
    data = encode(manifest())
    assert json.loads(encode_commit_marker(data, 12)) == {"schema": 1, "step": 12, "manifest": digest(data)}
    assert encode_commit_marker(data, 12) != encode_commit_marker(data + b" ", 12)


def test_a_newer_schema_is_an_error_that_says_what_to_do():
    text = encode(manifest()).replace(b'"schema": 1', b'"schema": 2').replace(b'"world"', b'"planets"')
    with pytest.raises(CheckpointError) as caught:
        decode(text)
    assert str(caught.value) == (
        "a checkpoint of schema 2\n"
        "  rule: this unisono reads schema 1\n"
        "  so:   it was not loaded, and left as it is\n"
        "  try:  install the unisono that wrote it, or a newer one"
    )


def tensor(**changes):
    values = {"file": FILE, "key": "w", "offset": (0,), "shape": (3,)}
    return {"w": TensorEntry(shape=(3,), dtype="F32", pieces=(PieceEntry(**(values | changes)),))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"files": {"../../etc/passwd": FileEntry(bytes=1, digest="")}},
            "'../../etc/passwd' is no name of a shard file",
        ),
        ({"tensors": tensor(file="shard-00001-of-00002.safetensors")}, "is not listed"),
        ({"tensors": tensor(offset=(0, 0))}, "another number of dims"),
        ({"tensors": tensor(offset=(1,))}, "lies outside"),
        ({"tensors": tensor(offset=(-1,))}, "lies outside"),
        ({"tensors": tensor(shape=(2,))}, "do not make up"),
        ({"tensors": {"w": TensorEntry(shape=(), dtype="F32", pieces=())}}, "0 pieces do not make up"),
        ({"tensors": {"w": TensorEntry(shape=(), dtype="F5", pieces=())}}, "unknown dtype 'F5'"),
    ],
)
def test_a_manifest_whose_numbers_make_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        decode(encode(manifest(**changes)))


def test_pieces_on_top_of_each_other_are_refused():
    piece = PieceEntry(file=FILE, key="w", offset=(0,), shape=(2,))
    entry = TensorEntry(shape=(4,), dtype="F32", pieces=(piece, piece))
    with pytest.raises(ValueError, match="do not make up"):
        decode(encode(manifest(tensors={"w": entry})))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": "one"}', b'{"schema": 1}', b'{"step": 1}']
)
def test_anything_else_is_refused_too(data):
    with pytest.raises(ValueError, match=r"JSON|Expected|missing|truncated|utf-8"):
        decode(data)

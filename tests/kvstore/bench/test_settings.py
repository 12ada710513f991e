"""Sizes, sets of keys, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest

from unisono.errors import ConfigError
from unisono.kvstore.bench.settings import BenchSettings, nbytes_of, shapes_of, split_repeated


def test_the_sets_have_the_published_numbers_of_parameters() -> None:
    for name, keys, elements, largest in (
        ("resnet50", 161, 25_557_032, (512, 512, 3, 3)),
        ("bert-base", 199, 109_482_240, (30522, 768)),
    ):
        shapes = shapes_of(name)
        assert (len(shapes), nbytes_of(shapes)) == (keys, 4 * elements)
        assert max(shapes.values(), key=lambda shape: nbytes_of({"one": shape})) == largest


def test_sizes() -> None:
    assert shapes_of("1KB") == {"value": (250,)}
    assert shapes_of("1.5 MiB") == {"value": (393_216,)}
    assert split_repeated(["1KB,2KB", "1KB", " 3MB "]) == ("1KB", "2KB", "3MB")


@pytest.mark.parametrize("size", ["3B", "9GiB", "ten", "1XB", "-4B", "nan", ""])
def test_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=r"it is 4B to 8GiB, or one of resnet50, bert-base"):
        shapes_of(size)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BenchSettings(kinds=("dist_asink", "local"), sizes=("resnet5",), codecs=("int8",))
    text = str(caught.value)
    for part in ("kind 'dist_asink'", "dist_async", "size 'resnet5'", "resnet50", "codecs int8 for dist_asink, local"):
        assert part in text
    with pytest.raises(ConfigError, match=r"codec 'powersgd:2' for dist_async"):
        BenchSettings(codecs=("powersgd:2",))
    with pytest.raises(ConfigError, match=r"compression = 'int9'\n(.*\n)*  try:  did you mean 'int8'"):
        BenchSettings(codecs=("none", "int9"))


def test_settings_travel_as_json() -> None:
    settings = BenchSettings(kinds=("local",), sizes=("1KB",), rounds=2)
    assert msgspec.json.decode(json.dumps(asdict(settings)), type=BenchSettings) == settings

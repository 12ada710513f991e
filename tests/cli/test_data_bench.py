"""``unisono data bench`` measures what is there, and says what a loop could take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from unisono.cli.main import cli
from unisono.data.image import encode_jpeg
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, ["data", "bench", "--seconds", "0.05", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_plain_records(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(100):
            writer.write(bytes(1000 + number))
    told = json.loads(run(str(tmp_path / "a.rec"), "--json"))["rates"]
    assert [rate["what"] for rate in told] == [
        "random reads, first pass",
        "random reads",
        "random reads, checksum each",
    ]
    for rate in told:
        assert rate["per_s"] > 0
        # Both rates are rounded quotients by the same measured time: only their last digits may differ.
        assert rate["bytes_per_s"] / rate["per_s"] == pytest.approx(1049.5, rel=1e-12)


def test_images(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 255, (60, 80, 3), np.uint8)
            writer.write(pack_header(ImageHeader(label=number), encode_jpeg(pixels)))
    text = run(str(tmp_path / "a.rec"), "--size", "32")
    assert "images decoded whole, one thread: " in text
    assert "loader, random crops to 32, 1 threads: " in text
    assert text.splitlines()[-1].startswith("A training loop on this machine that takes fewer than ")

"""The files at an address, in the order in which the samples of the data set are numbered."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from unisono.data.convert.table_files import Table, write_table
from unisono.data.sources import open_source, source_files


@pytest.mark.parametrize("given", [["b.jsonl", "a.jsonl"], "*.jsonl", ["set-00001-of-00002.jsonl", "a.jsonl"]])
def test_files_are_in_the_order_of_the_samples(tmp_path: Path, given: str | list[str]) -> None:
    names = ["a.jsonl", "b.jsonl", "set-00000-of-00002.jsonl", "set-00001-of-00002.jsonl"]
    for number, name in enumerate(names):
        rows = [{"n": 10 * number + row} for row in range(number + 1)]
        write_table(tmp_path / name, Table(rows=rows), is_shard=True)
    paths = [str(tmp_path / name) for name in ([given] if isinstance(given, str) else given)]
    address = paths[0] if len(paths) == 1 else paths
    data = open_source(address, cache_dir=tmp_path / "cache")
    numbers = data.read(np.arange(len(data)))["n"].tolist()
    files = source_files(address, tmp_path / "cache")
    assert all(os.path.dirname(file) == str(tmp_path) for file in files)
    single = [Path(file) for file in files]
    of_files = [10 * names.index(file.name) + row for file in single for row in range(names.index(file.name) + 1)]
    assert of_files == numbers

"""What the tracker ``csv`` finds in place of its table: files of somebody else, and damage."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from unisono.errors import ConfigError
from unisono.observe.events import Event
from unisono.observe.sinks.csv_file import CsvSink


def step(number: int, **fields: float) -> Event:
    return {"kind": "step", "t": 1000.0 + number, "attempt": 1, "step": number, **fields}


@pytest.mark.parametrize(
    "content", [b"precious data, no newline", b"a,b\n1,2\n3,4 last", b"step,kind,attempt,t\xff\n1\n2"]
)
def test_csv_of_somebody_else_keeps_its_last_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"the file is as it was"):
        CsvSink(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_folder_in_place_of_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(ConfigError, match="which is no regular file"):
        CsvSink(tmp_path / "metrics.csv")


DAMAGE = [
    b"# best run so far\n",
    b'2,"step,1,1002.0,0.5\n',
    b"\0\0\0\0\n",
    b"\xff\xfe\n",
    b"2,step,1,1002.0,0.5,7\n",
    b"2,step\n",
]


@pytest.mark.parametrize("line", [*DAMAGE, b"a note without a newline"])
def test_csv_moves_lines_that_are_no_rows_and_goes_on(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, beside = tmp_path / "metrics.csv", tmp_path / "metrics.csv.damaged"
    sink = CsvSink(path)
    sink.write(step(1, **{"train/loss": 0.5}))
    sink.close()
    whole = path.read_bytes()
    beside.write_bytes(b"earlier\n")
    path.write_bytes(whole + b"\n" + line + (b"2,step,1,1002.0,0.25\n3,st" if line.endswith(b"\n") else b""))
    sink = CsvSink(path)
    sink.write(step(3, **{"train/loss": 0.125, "train/lr": 0.5}))  # a new column: all rows are read again
    sink.close()
    steps = ["1", "2", "3"] if line.endswith(b"\n") else ["1", "3"]
    assert steps_in(path) == steps
    assert beside.read_bytes() == b"earlier\n" + line.rstrip(b"\n") + b"\n"
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has lines that are no rows of the table: 1, first line 4; moved to metrics.csv.damaged"
    ]
    caplog.clear()
    CsvSink(path).close()
    assert not caplog.records


def steps_in(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file)]


def test_csv_is_as_it_was_where_damaged_lines_cannot_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    CsvSink(path).close()
    content = path.read_bytes() + b"# a note\n1,st"
    path.write_bytes(content)
    (tmp_path / "metrics.csv.damaged").mkdir()
    with pytest.raises(ConfigError, match=r"no rows of the table: 1, first line 2; and .* cannot be written: EISDIR"):
        CsvSink(path)
    assert path.read_bytes() == content

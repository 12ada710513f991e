"""A field of JSONL that some rows lack, and one that no row has: then its name is wrong, and nothing is left out for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.errors import DataError
from unisono.quality.documents import find_documents
from unisono.quality.file_meter import UNMETERED
from unisono.quality.json_rows import NoValue, json_rows
from unisono.quality.row_keys import class_of, row_keys


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x", "b": {"deep": 1}}\n{"a": null}\nno JSON\n{"c": 1}\n')
    return path


def test_rows_without_the_field_are_told_from_those_that_cannot_be_read(lines: Path) -> None:
    kinds = [type(row) for row in json_rows(lines, "a", UNMETERED)]
    assert kinds == [dict, NoValue, DataError, NoValue]


@pytest.mark.parametrize("field", ["a", "c"])
def test_a_field_of_one_row_is_there(lines: Path, field: str) -> None:
    assert sum(isinstance(row, dict) for row in json_rows(lines, field, UNMETERED)) == 1


def test_a_field_of_no_row_is_an_error_also_where_documents_without_a_text_are_left_out(lines: Path) -> None:
    said = r"column 'txet', which no row of .*a\.jsonl has\n.*\n.*\n  try:  one of: a, b"
    with pytest.raises(DataError, match=said):
        list(row_keys(lines, ".jsonl", "txet", class_of))
    with pytest.raises(DataError, match=said):
        list(find_documents([lines], column="txet", skips_unreadable=True).read(lambda count: None))


def test_a_field_with_values_that_no_row_can_hold_is_there(lines: Path) -> None:
    assert [type(row) for row in json_rows(lines, "b", UNMETERED)] == [DataError, NoValue, DataError, NoValue]


def test_the_only_string_of_the_first_row_is_the_text_whatever_its_other_fields_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "one", "meta": {"k": 1}, "n": null}\n{"content": "two"}\n')
    documents = find_documents([path], column=None)
    assert [each.content for each in documents.read(lambda count: None)] == [b"one", b"two"]


def test_several_strings_are_not_clear(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "one", "b": "two"}\n')
    with pytest.raises(DataError, match=r"whose fields are 'a', 'b'(.|\n)*--column NAME"):
        list(find_documents([path], column=None).read(lambda count: None))

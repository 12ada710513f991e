"""JSON of any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.storage.json_lines import as_json, json_line, write_json_lines

VALUES = ["plain", "\u00fc \u4e2d", "\ud800x", {"\udfff": ["\u00fc", 1.5, None]}, ""]


@pytest.mark.parametrize("value", VALUES)
def test_any_text_comes_back(value: object) -> None:
    assert json.loads(as_json(value)) == json.loads(as_json(value, indent=1)) == value


def test_escapes_only_where_utf8_lacks_a_character() -> None:
    assert as_json("\u00fc") == b'"\xc3\xbc"'
    assert json_line({"a": "\ud800"}) == b'{"a": "\\ud800"}\n'


def test_a_line_for_each_record(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", iter(VALUES))
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()] == VALUES

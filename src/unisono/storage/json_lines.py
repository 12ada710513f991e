"""JSON of any text, also of lone surrogates, which UTF-8 does not have; and files with a line of JSON for each record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.storage.files import new_file


def as_json(value: Any, *, indent: int | None = None) -> bytes:
    """A value as JSON in UTF-8, with escapes only where they are needed: of lone surrogates, all characters beyond ASCII."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent).encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent).encode()


def json_line(record: Any) -> bytes:
    """A record as a line of JSON, with its line end."""
    return as_json(record) + b"\n"


def write_json_lines(path: Path, records: Iterable[Any]) -> None:
    """Write a new file with a line of JSON for each record."""
    with new_file(path) as file:
        file.writelines(map(json_line, records))

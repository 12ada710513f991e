"""Change values of a JSON object in its text. All other bytes stay: numbers, blanks, NaN and escapes as they were written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unisono.storage.json_lines import as_json

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_JSON: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Member:
    """A field of a JSON object: its value, and where that stands in the text."""

    value: Any
    begin: int
    end: int


def json_members(text: str) -> tuple[dict[str, Member], int]:
    """The fields of the object that is the text, in their order, and where the last of them ends. The text is valid JSON."""
    members: dict[str, Member] = {}
    end = text.index("{") + 1
    at = _skip(text, end)
    while text[at] != "}":
        name, at = _JSON.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # behind the colon
        value, end = _JSON.raw_decode(text, begin)
        members[name] = Member(value, begin, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members, end


def with_values(
    text: str, members: Mapping[str, Member], end: int, new: Mapping[str, str], missing: Sequence[str] = ()
) -> str:
    """The text of an object with other values, and with fields of null behind the last one.

    Args:
        text: The object.
        members: Its fields, in their order.
        end: Where the last one ends.
        new: New values by name, as JSON.
        missing: Names of new fields.
    """
    parts: list[str] = []
    at = 0
    for name, member in members.items():
        if name in new:
            parts += [text[at : member.begin], new[name]]
            at = member.end
    parts.append(text[at:end])
    for number, name in enumerate(missing):
        parts.append(f"{', ' if members or number else ''}{as_json(name).decode()}: null")
    return "".join([*parts, text[end:]])


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()

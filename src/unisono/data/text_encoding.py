"""Text that is not UTF-8: the encoding that its bytes show, and the command that makes UTF-8 of its file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

_MARKS: Final = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_HEAD_BYTES: Final = 256
_LIKELY: Final = (
    "WINDOWS-1252"  # where nothing shows the encoding: that of most text of Western Europe which is not UTF-8
)


def encoding_of(text: bytes) -> str:
    """The name that iconv has for UTF-16 or UTF-32, if a text begins so; empty of any other.

    A byte-order mark shows it, or else the zero bytes that Latin letters and spaces have there, always at the same places.
    """
    for mark, name in _MARKS:
        if text.startswith(mark):
            return name
    head = text[: min(_HEAD_BYTES, len(text) // 4 * 4)]
    units = len(head) // 4
    first, second, third, fourth = (head[place::4].count(0) for place in range(4))
    if not units:
        return ""
    if (fourth, first) == (units, 0) and 2 * third > units:
        return "UTF-32LE"
    if (first, fourth) == (units, 0) and 2 * second > units:
        return "UTF-32BE"
    if not first + third and 2 * (second + fourth) > units:  # a quarter of the characters
        return "UTF-16LE"
    return "UTF-16BE" if not second + fourth and 2 * (first + third) > units else ""


def conversion_command(path: Path, text: bytes) -> str:
    """The command that makes UTF-8 of a file, of which ``text`` is a part, with a remark where nothing shows its encoding."""
    name = encoding_of(text)
    target = f"{path.stem}.utf-8{path.suffix}"
    command = f"iconv -f {name or _LIKELY} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(target)}"
    return command if name else f"{command} (if it is Western European; iconv -l names other encodings)"

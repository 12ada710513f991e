"""One TOML file: its values and the line on which each key stands.

``tomllib`` validates the text and gives the values, but no line numbers. ``key_lines`` therefore scans the same text a
second time for keys and line ends. It relies on valid text.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import ConfigError, Problem
from unisono.sanitize import shorten
from unisono.storage.limits import MAX_CONFIG_BYTES, MAX_CONFIG_KEYS, MAX_KEY_PARTS, LimitError, read_limited

KeyPath = tuple[str, ...]

# where a key can begin, so that each part of a text is searched once
_LONG_KEY = re.compile(
    rf"""(?:^|[\[{{{{,])[ \t]*(?:(?:[\w-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_KEY_PARTS}}}""",
    re.MULTILINE,
)
NOTHING_STARTED = "nothing was started"


def config_problem(given: str, rule: str, nearest: str) -> Problem:
    """The problem of a configuration that was refused before anything was started."""
    return Problem(given=given, rule=rule, consequence=NOTHING_STARTED, nearest=nearest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """Values of one file as nested dicts; ``lines`` holds the line of every key and of every prefix of one."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def where(self, key: KeyPath) -> str:
        """``path:line`` of the key."""
        return f"{self.path}:{self.lines[key]}"


def read_toml(path: Path) -> TomlFile:
    """Read a file, or raise a ConfigError that shows the line at fault. Raises OSError if it cannot be read."""
    text = _text(path)
    if _LONG_KEY.search(text):  # for tomllib such a key takes a time that is quadratic in its parts
        raise ConfigError(_no_configuration(path, f"a key of more than {MAX_KEY_PARTS} parts"))
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and int() on thousands of digits
        raise ConfigError(_syntax_problem(path, text, str(error))) from None
    except RecursionError:
        raise ConfigError(_no_configuration(path, "arrays or tables nested hundreds deep")) from None
    try:
        return TomlFile(path=path, values=values, lines=key_lines(text))
    except LimitError as error:
        raise ConfigError(_no_configuration(path, str(error))) from None


def read_config_file(path: Path) -> bytes:
    """The bytes of a configuration, TOML or Python. Raises ConfigError if there are too many, OSError if it cannot be read."""
    try:
        return read_limited(path, MAX_CONFIG_BYTES)
    except LimitError as error:
        raise ConfigError(_no_configuration(path, str(error))) from None


def _text(path: Path) -> str:
    raw = read_config_file(path)
    if raw.startswith(b"\xef\xbb\xbf"):
        given, rule, how = (
            "starts with a byte order mark",
            "TOML is UTF-8 without a byte order mark",
            "without the mark",
        )
    elif not raw.strip():
        given, rule = "the file is empty", "a configuration file has at least a comment"
        how = "with one line: # all defaults"
    else:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            given = f"byte 0x{raw[error.start]:02x} on line {line} is not UTF-8"
            rule, how = "TOML is UTF-8", "as UTF-8"
    raise ConfigError(config_problem(f"{path}: {given}", rule, f"save the file {how}"))


def _no_configuration(path: Path, what: str) -> Problem:
    rule = (
        f"a configuration has at most {MAX_CONFIG_BYTES:,} bytes, {MAX_CONFIG_KEYS:,} keys and {MAX_KEY_PARTS} parts in a key, "
        "and nests as deep as its sections"
    )
    nearest = "move data into files of its own; for a new configuration, begin with what unisono init writes"
    return config_problem(f"{path}: {what}", rule, nearest)


def _syntax_problem(path: Path, text: str, message: str) -> Problem:
    """Locate a syntax error: tomllib names the place in its message, and calls the last line ``end of document``."""
    lines = text.replace("\r\n", "\n").split("\n")
    reason, _, place = message.partition(" (at ")
    position = re.match(r"line (\d+), column (\d+)", place)
    row = int(position[1]) if position else len(text.rstrip().split("\n"))
    given = f"{path}:{row}: {shorten(lines[row - 1].strip())}"
    if re.match("Cannot (overwrite|declare|mutate)|Duplicate", reason):
        rule, nearest = "a key or a table is set once in a file", "keep one of the two"
        first = _first_of_twice("\n".join(lines[:row]))
        if first and first != row:
            nearest = f"keep this one or the one on line {first}"
    else:
        column = f" (column {position[2]})" if position else " (at the end of the file)"
        rule, nearest = f"TOML: {reason}{column}", 'write key = value, with text in "quotes"'
    return config_problem(given, rule, nearest)


def _first_of_twice(text: str) -> int | None:
    """The line on which the last key of ``text`` was set before; None if it cannot be found."""
    try:
        *earlier, (last, _) = _keys(text)
    except ValueError:
        return None
    same = (line for key, line in earlier if key == last)
    around = (line for key, line in earlier if key[: len(last)] == last or last[: len(key)] == key)
    return next(same, next(around, None))


# ---------------------------------------------------------------------------------------------- lines

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_BARE_VALUE = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The first line (from 1) on which each key path of a valid TOML text, or a prefix of it, appears.

    Raises LimitError for more keys than a configuration has.
    """
    lines: dict[KeyPath, int] = {}
    for key, line in _keys(text):
        if len(lines) > MAX_CONFIG_KEYS:
            raise LimitError(f"more than {MAX_CONFIG_KEYS:,} keys")
        for length in range(1, len(key) + 1):
            lines.setdefault(key[:length], line)
    return lines


def _keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Every key and table header in order of appearance."""
    cursor = _Cursor(text)
    table: KeyPath = ()
    while cursor.skip_blank():
        if cursor.at("["):
            cursor.position += 2 if cursor.at("[[") else 1
            table, line = cursor.key()
            cursor.position = text.index("]", cursor.position) + 1
            if cursor.at("]"):
                cursor.position += 1
            yield table, line
        else:
            yield from cursor.pair(table)


@dataclass(slots=True)
class _Cursor:
    """A position in TOML text that moves over one token at a time."""

    text: str
    position: int = 0
    line_ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.line_ends = [match.end() for match in re.finditer("\n", self.text)]

    def at(self, token: str) -> bool:
        return self.text.startswith(token, self.position)

    def skip_blank(self) -> bool:
        """Go over spaces, line ends and comments; False at the end of the text."""
        self.take(_BLANK)
        return self.position < len(self.text)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[0]

    def key(self) -> tuple[KeyPath, int]:
        """A dotted key, and its line."""
        self.skip_blank()
        line = bisect_right(self.line_ends, self.position) + 1
        parts: list[str] = []
        while True:
            quoted = self.take(_STRING)
            bare = self.take(_BARE_KEY) if quoted is None else None
            parts.append(bare or str(tomllib.loads(f"key = {quoted}")["key"]))
            if self.take(_DOT) is None:
                return tuple(parts), line

    def pair(self, table: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        """``key = value`` inside ``table``."""
        key, line = self.key()
        yield table + key, line
        self.position = self.text.index("=", self.position) + 1
        yield from self.value(table + key)

    def value(self, key: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        """Go over one value; only inline tables hold further keys."""
        self.skip_blank()
        if self.at("[") or self.at("{"):
            table = self.at("{")
            self.position += 1
            while self.skip_blank() and not (self.at("]") or self.at("}")):
                if self.at(","):
                    self.position += 1
                else:
                    yield from self.pair(key) if table else self.value(key)
            self.position += 1
        elif self.take(_STRING) is None:
            self.take(_BARE_VALUE)

"""Lines of keys, and files that are no TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from unisono.config.toml_file import key_lines, read_toml
from unisono.errors import ConfigError

TRICKY = '''\
# fake = 1
a = 1 # b = 2
"quoted key" = "x = 1 # no comment"
'lit.eral' = 'c:\\'
dotted . "in \\u0041".c = [ # comment ] with "quotes
    { x = 1, y = { z = "}" } }, # [fake]
    """
[fake]
fake = 2
\\""" still inside """", 3,
]
[ table . sub ] # comment
multi = \'\'\'
key = "not a key"
[also.not]\'\'\'\'\'
inline = { one = 1, two.three = [1, 2], "f o" = """x""" }
when = 1979-05-27 07:32:00
[[many]]
n = 1
[[many]]
n = 2
[table]
last = -inf
'''


def test_lines_of_a_tricky_file():
    tomllib.loads(TRICKY)
    assert key_lines(TRICKY) == {
        ("a",): 2,
        ("quoted key",): 3,
        ("lit.eral",): 4,
        ("dotted",): 5,
        ("dotted", "in A"): 5,
        ("dotted", "in A", "c"): 5,
        ("dotted", "in A", "c", "x"): 6,
        ("dotted", "in A", "c", "y"): 6,
        ("dotted", "in A", "c", "y", "z"): 6,
        ("table",): 12,
        ("table", "sub"): 12,
        ("table", "sub", "multi"): 13,
        ("table", "sub", "inline"): 16,
        ("table", "sub", "inline", "one"): 16,
        ("table", "sub", "inline", "two"): 16,
        ("table", "sub", "inline", "two", "three"): 16,
        ("table", "sub", "inline", "f o"): 16,
        ("table", "sub", "when"): 17,
        ("many",): 18,
        ("many", "n"): 19,
        ("table", "last"): 23,
    }


def test_lines_with_carriage_returns_and_odd_separators():
    text = 'a = "\u2028\x85"\r\n\r\n[b]\r\nc = 1\r\n'
    assert key_lines(text) == {("a",): 1, ("b",): 3, ("b", "c"): 4}


names = st.sampled_from(["a", "b-1", "_", "7", "x y", "ü", "dot.ted", 'q"uote', "", "[x]", "#", "="])
values = st.sampled_from(
    [
        "1",
        "-inf",
        "true",
        "1979-05-27 07:32:00",
        '"# no = comment"',
        '"\\"[x]\\\\"',
        "'\\'",
        "''",
        '""',
        '"""\nfake = 1\n[fake]\n# """',
        '"""""two"""""',
        "'''\n'\nfake = '' '''",
        "[]",
        "[\n  1, # ] \n  2,\n]",
        "[[\"]\"], ['['],\n []]",
        "{}",
    ]
)
blanks = st.sampled_from(["", "\n", "# comment = 1\n", "  \n\t\n", "\n#[x]\n"])
tables = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=3).map(tuple),
        st.dictionaries(names, values, max_size=4),
        st.dictionaries(names, st.dictionaries(names, values.filter(lambda v: "\n" not in v), max_size=3), max_size=2),
    ),
    max_size=4,
)


def _spelled(name: str, bare: bool) -> str:
    if bare and name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name):
        return name
    return '"' + name.replace('"', '\\"').replace("ü", "\\u00fc") + '"'


@settings(max_examples=50, deadline=None)
@given(tables, st.data())
def test_lines_of_any_valid_file(written: list[Any], data: st.DataObject):
    """Write a file and note the line of each key on the way; the scanner must find the same."""
    text, expected = "", {}

    def note(path: tuple[str, ...], line: int) -> None:
        for length in range(1, len(path) + 1):
            expected.setdefault(path[:length], line)

    def key(*path: str) -> str:
        dot = data.draw(st.sampled_from([".", " . "]))
        return dot.join(_spelled(name, data.draw(st.booleans())) for name in path)

    for table, plain, inline in written:
        text += data.draw(blanks)
        note(table, text.count("\n") + 1)
        text += f"[{key(*table)}] # x = 1\n"
        for name, value in plain.items():
            text += data.draw(blanks)
            note((*table, name), text.count("\n") + 1)
            text += f"{key(name)} = {value} # y = 2\n"
        for name, members in inline.items():
            line = text.count("\n") + 1
            note((*table, name), line)
            for member in members:
                note((*table, name, member), line)
            text += f"{key(name)} = {{{', '.join(f'{key(m)} = {v}' for m, v in members.items())}}}\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        reject()  # a table twice, or a table under a value
    assert key_lines(text) == expected


def _fails(path: Path, content: bytes) -> tuple[str, str, str]:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    (problem,) = caught.value.problems
    assert problem.consequence == "nothing was started"
    return problem.given, problem.rule, problem.nearest


QUOTES = 'write key = value, with text in "quotes"'
TWICE = "a key or a table is set once in a file"


@pytest.mark.parametrize(
    ("content", "given", "rule", "nearest"),
    [
        (b"a = 1\nlr = = 3\nb = 2", ":2: lr = = 3", "TOML: Invalid value (column 6)", QUOTES),
        (b"name = gpt", ":1: name = gpt", "TOML: Invalid value (column 8)", QUOTES),
        (b"a = 1\nx = [1,\n2\n", ":3: 2", "TOML: Unclosed array (at the end of the file)", QUOTES),
        (b"a = 1" * 40, ":1: " + "a = 1" * 15 + "a = …", None, QUOTES),
        (b"a = 1\n[b]\nx = 1\nx = 2\n", ":4: x = 2", TWICE, "keep this one or the one on line 3"),
        (b"a = 1\n\na = 2", ":3: a = 2", TWICE, "keep this one or the one on line 1"),
        (b"[b]\nx = 1\n[c]\n[b]\ny = 1\n", ":4: [b]", TWICE, "keep this one or the one on line 1"),
        (b"b.x = 1\n[b]\ny = 1\n", ":2: [b]", TWICE, "keep this one or the one on line 1"),
        (b"b = { x = 1 }\nb.y = 1\n", ":2: b.y = 1", TWICE, "keep this one or the one on line 1"),
        (b"b = {x = 1, x = 2, y = 3}\n", ":1: b = {x = 1, x = 2, y = 3}", TWICE, "keep one of the two"),
        (
            b"",
            ": the file is empty",
            "a configuration file has at least a comment",
            "save the file with one line: # all defaults",
        ),
        (b" \n\t\n", ": the file is empty", None, None),
        (
            b"\xef\xbb\xbfa = 1",
            ": starts with a byte order mark",
            "TOML is UTF-8 without a byte order mark",
            "save the file without the mark",
        ),
        (b'a = 1\nb = "\xe9"', ": byte 0xe9 on line 2 is not UTF-8", "TOML is UTF-8", "save the file as UTF-8"),
        (b"a\x00 = 1\n", None, None, None),
        (b"\x80\x04", ": byte 0x80 on line 1 is not UTF-8", None, None),
        (
            b"x = " + b"[" * 100_000,
            ": arrays or tables nested hundreds deep",
            "a configuration has at most 1,048,576 bytes, 4,096 keys and 100 parts in a key, and nests as deep as its sections",
            "move data into files of its own; for a new configuration, begin with what unisono init writes",
        ),
    ],
)
def test_files_that_are_no_toml(
    tmp_path: Path, content: bytes, given: str | None, rule: str | None, nearest: str | None
):
    path = tmp_path / "run.toml"
    found = _fails(path, content)
    if given is not None:
        assert found[0] == f"{path}{given}"
    if rule is not None:
        assert found[1] == rule
    if nearest is not None:
        assert found[2] == nearest


def test_thousands_of_digits(tmp_path: Path):
    given, rule, _ = _fails(tmp_path / "run.toml", b"seed = " + b"9" * 5000)
    assert given == f"{tmp_path}/run.toml:1: seed = {'9' * 72}…"
    assert rule.startswith("TOML: Exceeds the limit (4300 digits) for integer string conversion")

"""Texts in other encodings than UTF-8: which one is seen, and that the command which is named makes UTF-8 of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from unisono.data.convert.table_files import open_table
from unisono.data.text_encoding import conversion_command, encoding_of
from unisono.data.tokens.corpus import UndecodableError, read_text
from unisono.errors import DataError
from unisono.quality.clean import clean
from unisono.quality.options import CleanRecipe, DuplicateOptions, FilterOptions, only_dedup

TEXT = "Grüße: naïve café\n"
EXACT = only_dedup(DuplicateOptions(near=0.0))
NAMES = {
    "utf-8": "",
    "utf-8-sig": "",
    "utf-16": "UTF-16",
    "utf-32": "UTF-32",
    "utf-16-le": "UTF-16LE",
    "utf-16-be": "UTF-16BE",
    "utf-32-le": "UTF-32LE",
    "utf-32-be": "UTF-32BE",
    "latin-1": "",
    "cp1252": "",
}


@pytest.mark.parametrize("codec", NAMES)
def test_which_encoding_is_seen(codec: str) -> None:
    for text in (TEXT, TEXT * 100, '{"a": 1}', '{"text": "привет, мир"}'):
        if codec not in ("latin-1", "cp1252") or text.isascii() or text.startswith("G"):
            assert encoding_of(text.encode(codec)) == NAMES[codec]
    for text in (b"", b"a", b"a\0", b"\0\0\0\0", bytes(range(256)), b"one\0two\0\0three" * 9):
        assert encoding_of(text) == ""


def converted(folder: Path, error: DataError, target: str) -> str:
    """What the command in an error makes of the file."""
    (problem,) = error.problems
    command = (
        problem.nearest.removeprefix("the file in UTF-8: ").partition("; --on-error")[0].partition(" (if it is")[0]
    )
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return (folder / target).read_text(encoding="utf-8")


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a b.jsonl", '{"text": "one"}\n{"text": "Grüße"}\n'),
        ("a b.csv", "text,n\none,1\nGrüße,2\n"),
        ("a b.txt", "one\nGrüße\n"),
    ],
)
def test_the_command_that_is_named_converts_a_file(tmp_path: Path, codec: str, name: str, content: str) -> None:
    source = tmp_path / name
    source.write_bytes(content.encode(codec))
    with pytest.raises(DataError) as caught:
        clean([source], tmp_path / "out", EXACT)
    said = str(caught.value)
    assert str(source) in said
    if codec == "cp1252":
        assert f"byte {content.encode(codec).index(0xFC)}, 0xfc, is not UTF-8" in said
        assert name.endswith("txt") or "line " in said
    else:
        assert f"it is {NAMES[codec]}, not UTF-8" in said
    target = source.with_name(f"{source.stem}.utf-8{source.suffix}")
    assert converted(tmp_path, caught.value, target.name) == content
    assert clean([target], tmp_path / "good", EXACT).kept == (1 if name.endswith("txt") else 2)
    if not name.endswith("txt"):
        with pytest.raises(DataError, match="not UTF-8"):
            list(open_table(source).rows)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_lines_of_another_encoding_are_no_documents_to_skip(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "one"}\n{"text": "two"}\n'.encode(codec))
    with pytest.raises(DataError, match="not UTF-8"):
        clean([tmp_path / "a.jsonl"], tmp_path / "out", EXACT, skips_unreadable=True)


def test_a_line_that_is_not_utf_8_can_be_skipped(tmp_path: Path) -> None:
    lines = [b'{"text": "one"}', '{"text": "Grüße"}'.encode("latin-1"), b'{"text": "two"}', b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", EXACT, skips_unreadable=True)
    assert (result.kept, result.dropped) == (2, {"unreadable": 1})
    assert "line 2 at offset 16: byte 28, 0xfc, is not UTF-8" in (tmp_path / "out" / "dropped.jsonl").read_text()


def test_a_byte_order_mark_of_utf_8_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one \\r\\n two", "n": 1.50}\n')
    recipe = CleanRecipe(filter=FilterOptions(enabled=False), dedup=DuplicateOptions(near=0.0))
    clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    assert (tmp_path / "out" / "data" / "a.jsonl").read_bytes() == b'{"text": "one\\n two", "n": 1.50}\n'


def test_a_corpus_names_the_encoding() -> None:
    with pytest.raises(UndecodableError, match="it is UTF-16LE, not utf-8"):
        read_text("only ASCII".encode("utf-16-le"), python_source=False)


def test_names_of_files_are_quoted_for_the_shell() -> None:
    assert conversion_command(Path("/data/it's; rm -rf x.csv"), b"\xff") == (
        "iconv -f WINDOWS-1252 -t UTF-8 '/data/it'\"'\"'s; rm -rf x.csv' > 'it'\"'\"'s; rm -rf x.utf-8.csv'"
        " (if it is Western European; iconv -l names other encodings)"
    )

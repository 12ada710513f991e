"""The list of files and their split are functions of the paths; what is not text is named."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.tokens.corpus import UndecodableError, find_corpus, held_out_files, read_text, split_text
from unisono.errors import DataError


def test_the_standard_library_is_source_only() -> None:
    corpus = find_corpus("stdlib")
    paths = [file.path for file in corpus.files]
    assert corpus.root == Path(sysconfig.get_path("stdlib"))
    assert paths == sorted(paths)
    assert len(paths) > 300
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(paths)
    parts = {part for path in paths for part in path.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
    assert all(path.endswith(".py") for path in paths)
    assert not any("_sysconfigdata" in path for path in paths)
    assert find_corpus("stdlib") == corpus


def test_a_folder_leaves_hidden_files_out_and_follows_links_that_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("b.txt", "a/z.txt", "a/.hidden", ".git/config", "__pycache__/x.pyc", "test/kept.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "linked.txt").symlink_to(root / "a/.hidden")
    (root / "loop").symlink_to(root)
    corpus = find_corpus(str(root))
    assert [file.path for file in corpus.files] == ["a/z.txt", "b.txt", "linked.txt", "test/kept.txt"]
    assert [file.size for file in corpus.files] == [7, 5, 9, 13]


def test_links_to_folders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    for name in ("a/one", "two", "three", "four", ".hidden"):
        (root / name).symlink_to(tmp_path)
    with pytest.raises(DataError) as caught:
        find_corpus(str(root))
    hidden = "1 hidden file(s) or folder(s), which are left out: .hidden"
    links = "4 link(s) to folders, which are not followed: a/one, four, three, two"
    assert (
        caught.value.problems[0].given
        == f"corpus '{root}': the folder {root} holds no files, only {links} and {hidden}"
    )
    assert not caplog.records
    (root / "text.txt").write_text("text")
    find_corpus(str(root))
    assert [(record.name, record.levelname) for record in caplog.records] == [("unisono.data", "WARNING")] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"corpus '{root}': it has {links}",
        f"corpus '{root}': it has {hidden}",
    ]


def test_what_is_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe', which is neither a folder nor a regular file"):
        find_corpus(str(tmp_path / "pipe"))


@pytest.mark.parametrize("target", ["../elsewhere.txt", "/etc/hostname", "inner/../../elsewhere.txt", "chain"])
def test_a_link_that_leads_out_of_a_corpus_is_refused(tmp_path: Path, target: str) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (tmp_path / "elsewhere.txt").write_text("secret")
    (root / ".chain").symlink_to("../elsewhere.txt")
    (root / "b.txt").symlink_to(".chain" if target == "chain" else target)
    with pytest.raises(DataError) as caught:
        find_corpus(str(root))
    outside = "/etc/hostname" if target == "/etc/hostname" else tmp_path / "elsewhere.txt"
    assert str(caught.value) == (
        f"{root}/b.txt, a link to {outside}\n"
        f"  rule: the files of a data set lie in its folder, {root}, links followed\n"
        "  so:   nothing was read; no file is left out silently\n"
        "  try:  a copy with the files in place of the links ('cp -rL FOLDER COPY'), or remove the link"
    )


def test_the_corpus_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.txt").write_text("text")
    (tmp_path / "folder").symlink_to("root")
    (tmp_path / "file.txt").symlink_to("root/a.txt")
    assert [file.path for file in find_corpus(str(tmp_path / "folder")).files] == ["a.txt"]
    assert [file.size for file in find_corpus(str(tmp_path / "file.txt")).files] == [4]


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    corpus = find_corpus(str(tmp_path / "a.txt"))
    assert [(file.path, corpus.root) for file in corpus.files] == [("a.txt", tmp_path)]


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as caught:
        find_corpus(str(tmp_path / "no" / "where"))
    assert str(caught.value) == (
        f"corpus '{tmp_path}/no/where': no file or folder {tmp_path}/no/where\n"
        "  rule: the corpus is 'stdlib', a folder of text files or one text file\n"
        "  so:   there is nothing to train on\n"
        f"  try:  the nearest folder that exists is {tmp_path}; 'stdlib' always exists"
    )
    with pytest.raises(DataError) as caught:
        find_corpus(str(tmp_path))
    assert str(caught.value) == (
        f"corpus '{tmp_path}': the folder {tmp_path} holds no files\n"
        "  rule: a corpus has at least one file with text in it\n"
        "  so:   there is nothing to train on\n"
        "  try:  'stdlib', or the path of a folder or file with text"
    )
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"which has no \.py files \(a zipped or stripped interpreter\)"):
        find_corpus("stdlib")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError) as caught:
        find_corpus(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/dangling cannot be read: No such file or directory\n"
        "  rule: every file of a folder of data is readable, regular, and named in UTF-8\n"
        "  so:   nothing was read; no file is left out silently\n"
        "  try:  repair or remove it, or another folder"
    )
    (tmp_path / "dangling").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe cannot be read: it is not a regular file"):
        find_corpus(str(tmp_path))
    (tmp_path / "pipe").unlink()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(DataError, match=r"\?\.txt cannot be read: its name is not UTF-8"):
        find_corpus(str(tmp_path))


PATHS = st.lists(st.text("abc/.é", min_size=1), min_size=2, max_size=200, unique=True)


@given(paths=PATHS, eval_frac=st.floats(0.01, 0.5))
def test_both_parts_get_something(paths: list[str], eval_frac: float) -> None:
    held = held_out_files(paths, eval_frac)
    assert 0 < len(held) < len(paths)
    assert held <= set(paths)
    assert held == held_out_files(paths[::-1], eval_frac)


def test_adding_a_file_moves_no_other_and_the_share_is_as_asked() -> None:
    paths = [f"pkg/mod_{n}.py" for n in range(20_000)]
    held = held_out_files(paths, 0.05)
    assert 900 < len(held) < 1100
    assert held_out_files([*paths, "pkg/new.py"], 0.05) - {"pkg/new.py"} == held
    assert held < held_out_files(paths, 0.1)


def test_the_split_is_the_same_everywhere() -> None:
    paths = [f"{name}.py" for name in ("abc", "argparse", "ast", "json/decoder", "os", "random", "re/_parser", "é")]
    assert sorted(held_out_files(paths, 0.4)) == ["argparse.py", "json/decoder.py", "os.py", "re/_parser.py"]


@given(text=st.text("ab\n", min_size=2), eval_frac=st.floats(0.01, 0.5))
def test_a_single_text_is_cut_in_two(text: str, eval_frac: float) -> None:
    train, held = split_text(text, eval_frac)
    assert train + held == text
    assert len(held) <= int(len(text) * eval_frac)


def test_a_single_text_is_cut_between_lines() -> None:
    text = "".join(f"line {n}\n" for n in range(100))
    train, held = split_text(text, 0.1)
    assert train.endswith("\n")
    assert held.startswith("line 9")
    assert 0.08 < len(held) / len(text) <= 0.1


def test_encodings() -> None:
    assert read_text("é\r\n".encode(), python_source=False) == "é\r\n"
    assert read_text(b"\xef\xbb\xbfa", python_source=False) == "a"
    assert read_text(b"\xef\xbb\xbfa", python_source=True) == "a"
    assert read_text(b"# -*- coding: latin-1 -*-\n\xe9", python_source=True) == "# -*- coding: latin-1 -*-\né"
    with pytest.raises(UndecodableError, match=r"^byte 26 is not utf-8$"):
        read_text(b"# -*- coding: latin-1 -*-\n\xe9", python_source=False)
    with pytest.raises(UndecodableError, match=r"invalid or missing encoding declaration|invalid start byte"):
        read_text(b"\xe9 = 1\n", python_source=True)
    with pytest.raises(UndecodableError, match="unknown encoding: klingon"):
        read_text(b"# coding: klingon\n", python_source=True)

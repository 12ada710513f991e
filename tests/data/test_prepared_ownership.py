"""Prepared data that others could have changed are made again; a link that is exchanged after the listing is not followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from modes import umask, writable_by_others

from unisono.data.convert.pack import PackOptions, token_text
from unisono.data.convert.pack.token_text import pack_text
from unisono.data.options import DataOptions
from unisono.data.sources.converted import converted
from unisono.data.tokens import tokenized_cache
from unisono.data.tokens.corpus import Corpus, SourceFile
from unisono.data.tokens.tokenized_cache import prepare_corpus
from unisono.errors import DataError
from unisono.tasks.columns import resolve_task
from unisono.tasks.options import TaskOptions


@pytest.fixture
def corpus(tmp_path: Path) -> DataOptions:
    for number in range(8):
        path = tmp_path / f"corpus/{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}\n" * 20)
    return DataOptions(corpus=str(tmp_path / "corpus"), eval_frac=0.2)


def test_prepared_tokens_that_others_could_write_are_made_again(corpus: DataOptions, tmp_path: Path) -> None:
    with umask(0):
        first = prepare_corpus(corpus, tmp_path / "cache")
    assert writable_by_others(tmp_path / "cache") == {}
    first.folder.chmod(0o777)
    second = prepare_corpus(corpus, tmp_path / "cache")
    assert not second.from_cache
    assert second.rebuild_reason == f"{first.folder} can be written by others (mode 777)"
    assert second.train.fingerprint == first.train.fingerprint
    assert prepare_corpus(corpus, tmp_path / "cache").from_cache


def test_an_unfinished_folder_that_others_could_write_is_not_continued(corpus: DataOptions, tmp_path: Path) -> None:
    folder = prepare_corpus(corpus, tmp_path / "cache").folder
    folder.rename(folder.with_name(f"{folder.name}.part"))
    folder.with_name(f"{folder.name}.part").chmod(0o777)
    (folder.with_name(f"{folder.name}.part") / "planted").touch()
    prepared = prepare_corpus(corpus, tmp_path / "cache")
    assert not (prepared.folder / "planted").exists()


def test_a_listing_that_others_could_write_is_not_read(
    corpus: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized_cache, "_FRESH_NS", -3_600_000_000_000)
    first = prepare_corpus(corpus, tmp_path / "cache")
    (listing,) = (tmp_path / "cache").glob("listing-*.json")
    entries = json.loads(listing.read_text())
    entries[0]["digest"] = "0" * 32
    listing.write_text(json.dumps(entries))
    listing.chmod(0o666)
    assert prepare_corpus(corpus, tmp_path / "cache").train.fingerprint == first.train.fingerprint


def test_copied_rows_that_others_could_write_are_copied_again(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a\n1\n")
    calls: list[int] = []

    def rows(_):  # type: ignore[no-untyped-def]
        calls.append(1)
        yield {"a": 1}

    with umask(0):
        converted([source], rows, tmp_path / "cache")
    assert writable_by_others(tmp_path / "cache") == {}
    (copy,) = (tmp_path / "cache").glob("rows-*.rec")
    converted([source], rows, tmp_path / "cache")
    assert len(calls) == 1
    copy.chmod(0o666)
    converted([source], rows, tmp_path / "cache")
    assert len(calls) == 2


def test_columns_that_others_could_write_are_read_from_the_data_again(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{n},{n % 3}\n" for n in range(30)))
    data = DataOptions(train=(str(tmp_path / "rows.csv"),), cache_dir=str(tmp_path / "cache"))
    task = TaskOptions(kind="table", target="y", inputs=("x",))
    with umask(0):
        first = resolve_task(task, data)
    assert writable_by_others(tmp_path / "cache") == {}
    (kept,) = (tmp_path / "cache").glob("columns-*.json")
    kept.write_text(kept.read_text().replace('"inputs": ["x"]', '"inputs": ["planted"]'))
    assert resolve_task(task, data).inputs == ("planted",), "one's own file is used"
    kept.chmod(0o666)
    assert resolve_task(task, data) == first


def test_a_link_that_leads_elsewhere_after_the_listing_is_not_read(
    corpus: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, find = Path(corpus.corpus, "link.txt"), tokenized_cache.find_corpus
    link.symlink_to("0.txt")
    (tmp_path / "secret").write_text("a secret of this user")

    def found_then_changed(name: str):  # type: ignore[no-untyped-def]
        listed = find(name)
        link.unlink()
        link.symlink_to(tmp_path / "secret")
        return listed

    monkeypatch.setattr(tokenized_cache, "find_corpus", found_then_changed)
    with pytest.raises(DataError, match=r"link\.txt cannot be read: it leads out of "):
        prepare_corpus(corpus, tmp_path / "cache")


@pytest.fixture
def exchange(tmp_path: Path) -> Callable[[], None]:
    """A corpus ``shared`` with the folder ``a``; the call puts a link to a private folder, with like files, in its place."""
    for folder, text in (("shared/a", "public\n"), ("private", "secret\n")):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("key.txt", "more.txt"):
            (tmp_path / folder / name).write_text(text * 40)
            os.utime(tmp_path / folder / name, (1e9, 1e9))

    def exchanged() -> None:
        (tmp_path / "shared/a").rename(tmp_path / "away")
        (tmp_path / "shared/a").symlink_to(tmp_path / "private")

    return exchanged


def listed_then(module: object, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``change`` between the listing of a corpus and its reading by ``module``."""
    name = "corpus_at" if hasattr(module, "corpus_at") else "find_corpus"
    find = getattr(module, name)

    def found_then_changed(path: str | Path):  # type: ignore[no-untyped-def]
        listed = find(path)
        change()
        return listed

    monkeypatch.setattr(module, name, found_then_changed)


def test_a_folder_that_becomes_a_link_after_the_listing_is_not_read(
    exchange: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed_then(tokenized_cache, exchange, monkeypatch)
    with pytest.raises(DataError, match=r"a/key\.txt cannot be read: it leads out of "):
        prepare_corpus(DataOptions(corpus=str(tmp_path / "shared")), tmp_path / "cache")


def test_text_of_a_folder_that_becomes_a_link_is_not_packed(
    exchange: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed_then(token_text, exchange, monkeypatch)
    packed = pack_text(tmp_path / "shared", tmp_path / "t.bin", pack=PackOptions(on_error="skip", workers=0))
    assert [each.path for each in packed.bad] == ["a/key.txt", "a/more.txt"]
    assert packed.bad[0].reason == f"it cannot be read: it leads out of {tmp_path / 'shared'}"


def test_a_text_that_changes_after_the_listing_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("old")

    def change() -> None:
        (tmp_path / "texts/a.txt").write_text("new")
        os.utime(tmp_path / "texts/a.txt", (1, 1))

    listed_then(token_text, change, monkeypatch)
    packed = pack_text(tmp_path / "texts", tmp_path / "t.bin", pack=PackOptions(on_error="skip", workers=0))
    assert [(bad.path, bad.reason) for bad in packed.bad] == [
        ("a.txt", "it cannot be read: it has changed since it was listed")
    ]


@pytest.mark.parametrize("when", ["before the rows", "between the rows"])
def test_a_table_that_is_exchanged_while_it_is_read_is_refused(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("shared/a", "public"), ("private", "secret")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rows.csv").write_text("text\n" + f"{text}\n" * 40)
        os.utime(tmp_path / folder / "rows.csv", (1e9, 1e9))
    read, texts, reads = tokenized_cache._read, tokenized_cache.row_texts, list[Path]()  # pyright: ignore[reportPrivateUsage]

    def exchange() -> None:
        if not (tmp_path / "shared/a").is_symlink():
            (tmp_path / "shared/a").rename(tmp_path / "away")
            (tmp_path / "shared/a").symlink_to(tmp_path / "private")

    def read_then_exchanged(corpus: Corpus, file: SourceFile) -> bytes:
        content = read(corpus, file)
        reads.append(corpus.root / file.path)
        if len(reads) == 2:  # the first is for the digest
            exchange()
        return content

    def exchanged_between(path: Path, column: str) -> Iterator[str]:
        exchange()
        yield from texts(path, column)

    if when == "before the rows":
        monkeypatch.setattr(tokenized_cache, "_read", read_then_exchanged)
    else:
        monkeypatch.setattr(tokenized_cache, "row_texts", exchanged_between)
    options = DataOptions(corpus=str(tmp_path / "shared"), text_column="text")
    with pytest.raises(DataError, match=r"rows\.csv cannot be read: it (leads out of|has changed since it was listed)"):
        prepare_corpus(options, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("tokens-") and path.is_dir()]


@pytest.mark.parametrize("name", ["set.json", "train-00000.bin", "eval-00000.idx"])
def test_a_prepared_file_that_others_could_write_is_made_again(name: str, corpus: DataOptions, tmp_path: Path) -> None:
    first = prepare_corpus(corpus, tmp_path / "cache")
    (first.folder / name).chmod(0o666)
    second = prepare_corpus(corpus, tmp_path / "cache")
    assert second.rebuild_reason == f"{first.folder / name} can be written by others (mode 666)"
    assert prepare_corpus(corpus, tmp_path / "cache").from_cache


def test_an_unfinished_file_that_others_could_write_is_not_continued(
    corpus: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_corpus(corpus, tmp_path / "cache").folder
    part = folder.with_name(f"{folder.name}.part")
    folder.rename(part)
    (part / "train-00000.bin").chmod(0o666)
    finished = tokenized_cache._finished_shards  # pyright: ignore[reportPrivateUsage]
    taken: list[Path] = []

    def noted(folder: Path):  # type: ignore[no-untyped-def]
        found = finished(folder)
        taken.extend(path for paths in found.values() for path in paths)
        return found

    monkeypatch.setattr(tokenized_cache, "_finished_shards", noted)
    prepare_corpus(corpus, tmp_path / "cache")
    assert not taken


def test_a_pipe_in_place_of_a_set_is_made_again(corpus: DataOptions, tmp_path: Path) -> None:
    folder = prepare_corpus(corpus, tmp_path / "cache").folder
    (folder / "set.json").unlink()
    os.mkfifo(folder / "set.json", 0o600)
    assert "not a regular file" in prepare_corpus(corpus, tmp_path / "cache").rebuild_reason

"""A corpus is prepared once, whole or not at all, by any number of processes, and damage is met."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from unisono.data.convert.table_files import convert
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.tokens import tokenized_cache as module
from unisono.data.tokens.bigram_baseline import bigram_bits_per_byte
from unisono.data.tokens.tokenized_cache import PreparedCorpus, prepare_corpus
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Thirty files last changed an hour ago."""
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for n in range(30):
        path = root / ("sub" if n % 2 else ".") / f"file-{n}.txt"
        path.write_text(f"text of file {n}\n" * (n + 1))
        settle(path)
    return root


def settle(path: Path) -> None:
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))


def options(corpus: Path, **changes: object) -> DataOptions:
    return DataOptions(corpus=str(corpus), eval_frac=0.2, **changes)  # type: ignore[arg-type]


def documents(prepared: PreparedCorpus) -> tuple[list[str], list[str]]:
    """All texts of the train and the eval part, read from the shards."""
    texts: list[list[str]] = []
    for tokens in (prepared.train, prepared.eval):
        stream = np.concatenate([shard.tokens for shard in tokens.shards])
        ends = np.flatnonzero(stream == tokens.end_of_document)
        assert ends[-1] == stream.size - 1
        texts.append([prepared.tokenizer.decode(part.tolist()) for part in np.split(stream, ends + 1)[:-1]])
    return texts[0], texts[1]


def test_all_text_arrives_once(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare_corpus(options(corpus), tmp_path / "cache")
    train, held = documents(prepared)
    assert sorted(train + held) == sorted(path.read_text() for path in corpus.rglob("*.txt"))
    assert train
    assert held
    report = prepared.report
    assert (report.train_documents, report.eval_documents) == (len(train), len(held))
    assert report.train_bytes + report.eval_bytes == sum(path.stat().st_size for path in corpus.rglob("*.txt"))
    assert report.train_tokens == prepared.train.num_tokens == report.train_bytes + len(train)
    assert (report.skipped, report.empty_files, report.tokenizer) == ((), 0, "bytes")
    assert not prepared.from_cache
    assert prepared.rebuild_reason == ""


def test_the_second_time_nothing_is_read(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH_NS", -3_600_000_000_000)  # the files' ctime is now, whatever utime says
    first = prepare_corpus(options(corpus), tmp_path / "cache")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "cache").rglob("*"))

    def refuse(*_: object) -> bytes:
        raise AssertionError("a file of the corpus was read again")

    monkeypatch.setattr(module, "_read", refuse)
    second = prepare_corpus(options(corpus), tmp_path / "cache")
    assert second.from_cache
    assert second.report == first.report
    assert (second.train.fingerprint, second.eval.fingerprint) == (first.train.fingerprint, first.eval.fingerprint)
    assert before == sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "cache").rglob("*"))


def test_files_changed_just_now_are_read_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_corpus(options(corpus), tmp_path / "cache")
    read: list[str] = []
    monkeypatch.setattr(module, "_read", lambda c, file: read.append(file.path) or (c.root / file.path).read_bytes())
    assert prepare_corpus(options(corpus), tmp_path / "cache").from_cache
    assert len(read) == 30, "their time stamps may be too coarse to show a later change"


def test_every_change_is_noticed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH_NS", -3_600_000_000_000)
    cache = tmp_path / "cache"
    seen = {prepare_corpus(options(corpus), cache).train.fingerprint}
    victim = next(
        p
        for p in sorted(corpus.rglob("*.txt"))
        if p.read_text() in documents(prepare_corpus(options(corpus), cache))[0]
    )
    stamp = victim.stat()
    same_size = victim.read_text().replace("text", "TEXT")
    victim.write_text(same_size)
    os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # even size and mtime are as before
    for change in (lambda: None, lambda: victim.write_text("longer " * 50), victim.unlink):
        change()
        prepared = prepare_corpus(options(corpus), cache)
        assert not prepared.from_cache
        seen.add(prepared.train.fingerprint)
    assert len(seen) == 4
    assert not prepare_corpus(DataOptions(corpus=str(corpus), eval_frac=0.4), cache).from_cache


def test_a_cache_of_another_place_holds_the_same(corpus: Path, tmp_path: Path) -> None:
    first = prepare_corpus(options(corpus), tmp_path / "one")
    shutil.copytree(corpus, tmp_path / "copy")
    second = prepare_corpus(options(tmp_path / "copy"), tmp_path / "two")
    assert first.train.fingerprint == second.train.fingerprint
    assert first.eval.fingerprint == second.eval.fingerprint
    assert first.folder.name == second.folder.name
    third = prepare_corpus(options(tmp_path / "copy"), tmp_path / "one")
    assert third.from_cache, "what counts is the content"
    assert third.report.corpus == str(tmp_path / "copy")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/unisono")
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/unisono"
    assert default_cache_dir({}) == Path.home() / ".cache/unisono"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare_corpus(options(corpus)).folder.parent == tmp_path / "xdg" / "unisono"
    assert prepare_corpus(options(corpus, cache_dir=str(tmp_path / "own"))).folder.parent == tmp_path / "own"


def test_one_file_is_cut_in_two(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    train, held = documents(prepare_corpus(options(tmp_path / "a.txt"), tmp_path / "cache"))
    assert train[0] + held[0] == text
    assert (len(train), len(held)) == (1, 1)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "empty.txt").touch()
    prepared = prepare_corpus(options(folder), tmp_path / "cache")
    assert documents(prepared) == (train, held)
    assert prepared.report.empty_files == 1


def test_no_text_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty.txt").touch()
    with pytest.raises(DataError) as caught:
        prepare_corpus(options(folder), tmp_path / "cache")
    assert str(caught.value) == (
        f"corpus '{folder}': 1 file(s), 0 bytes, no text for the train part\n"
        "  rule: a corpus has at least one file with text in it\n"
        "  so:   there is nothing to train on\n"
        "  try:  'stdlib', or the path of a folder or file with text"
    )
    (folder / "empty.txt").write_text("x")
    with pytest.raises(DataError, match=r"1 file\(s\), 1 bytes, no text for the eval part"):
        prepare_corpus(options(folder), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens-*.tmp-*"))


def test_files_that_are_not_text_are_named_all_at_once(corpus: Path, tmp_path: Path) -> None:
    for n in range(7):
        (corpus / f"bad-{n}.txt").write_bytes(b"ok so far \xff")
    with pytest.raises(DataError) as caught:
        prepare_corpus(options(corpus), tmp_path / "cache")
    assert str(caught.value) == (
        "7 file(s) of the corpus are not text: bad-0.txt: byte 10 is not utf-8; bad-1.txt: byte 10 is not utf-8; "
        "bad-2.txt: byte 10 is not utf-8; bad-3.txt: byte 10 is not utf-8; bad-4.txt: byte 10 is not utf-8; and 2 more\n"
        "  rule: files are UTF-8 (Python source: the encoding it declares)\n"
        "  so:   the corpus was not prepared; no file is left out silently\n"
        "  try:  convert them (iconv -f ENCODING -t UTF-8 IN > OUT), or point the corpus at a folder that holds text only"
    )
    assert not list((tmp_path / "cache").glob("tokens-*/"))


def test_the_standard_library_skips_and_reports_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in corpus.rglob("*.txt"):
        path.rename(path.with_suffix(".py"))
    (corpus / "bad.py").write_bytes(b"\xff\n")
    (corpus / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(corpus))
    prepared = prepare_corpus(DataOptions(), tmp_path / "cache")
    assert [path for path, _ in prepared.report.skipped] == ["bad.py"]
    train, held = documents(prepared)
    assert "# coding: latin-1\n# é\n" in train + held


def test_a_file_that_changes_while_it_is_read(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter(range(1000))
    monkeypatch.setattr(module, "_read", lambda *_: f"version {next(reads)}".encode())
    with pytest.raises(DataError, match=r"file-0\.txt cannot be read: it has changed since it was listed"):
        prepare_corpus(options(corpus), tmp_path / "cache")


def test_a_tokenizer_file(corpus: Path, tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    backend.train_from_iterator([path.read_text() for path in corpus.rglob("*.txt")], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    plain = prepare_corpus(options(corpus), tmp_path / "cache")
    prepared = prepare_corpus(options(corpus, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "cache")
    assert prepared.folder != plain.folder
    assert prepared.eval.num_tokens < plain.eval.num_tokens
    assert prepared.report.eval_bytes == plain.report.eval_bytes, "the same files are held out, and bytes are bytes"
    windows = TokenWindows(prepared.eval, seq_len=8, boundaries="ignore", target_bytes=True)
    first_token = int(prepared.eval.shards[0].token_bytes[0])  # type: ignore[index]
    total = windows.read(np.arange(len(windows)))["target_bytes"].sum()
    assert total == prepared.report.eval_bytes - first_token


def test_a_corpus_at_an_address(corpus: Path, tmp_path: Path) -> None:
    """The same texts are held out; hidden files, such as another process's unfinished copies, are none of the corpus."""
    (corpus / ".hidden").write_text("no text of the corpus")
    local = prepare_corpus(options(corpus), tmp_path / "cache")
    cache = tmp_path / "another"
    remote = prepare_corpus(DataOptions(corpus=f"file://{corpus}", eval_frac=0.2), cache)
    assert documents(remote) == documents(local)
    assert remote.report.corpus == f"file://{corpus}"
    assert prepare_corpus(DataOptions(corpus=f"file://{corpus}", eval_frac=0.2), cache).from_cache
    (copy,) = (cache / "sources").iterdir()
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == sorted(
        path.relative_to(corpus) for path in corpus.rglob("*")
    )
    (corpus / "file-0.txt").write_text("another text\n")
    changed = prepare_corpus(DataOptions(corpus=f"file://{corpus}", eval_frac=0.2), cache)
    assert "another text\n" in {text for texts in documents(changed) for text in texts}
    one = prepare_corpus(DataOptions(corpus=f"file://{corpus}/file-28.txt", eval_frac=0.2), cache)
    assert "".join(text for texts in documents(one) for text in texts) == (corpus / "file-28.txt").read_text()
    # another process waits for the same copies with locks that are no files of the corpus
    assert not [path for path in (cache / "sources").rglob("*") if "lock" in path.name]


def damage_of(folder: Path, cut: bool) -> list[tuple[str, bytes]]:
    return [
        (p.name, p.read_bytes()[:-1] if cut else flip(p.read_bytes())) for p in sorted(folder.iterdir()) if p.is_file()
    ]


def flip(content: bytes) -> bytes:
    middle = 60 if len(content) > 60 else len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_cache_is_built_again_and_said(corpus: Path, tmp_path: Path, cut: bool) -> None:
    cache = tmp_path / "cache"
    good = prepare_corpus(options(corpus), cache)
    texts, damaged = documents(good), damage_of(good.folder, cut)
    assert [name for name, _ in damaged] == [
        "eval-00000.bin", "eval-00000.idx", "set.json", "train-00000.bin", "train-00000.idx",
    ]  # fmt: skip
    for name, content in damaged:
        (good.folder / name).write_bytes(content)
        again = prepare_corpus(options(corpus), cache)
        assert not again.from_cache
        assert name.split(".")[0] in again.rebuild_reason, (name, again.rebuild_reason)
        assert documents(again) == texts
        assert prepare_corpus(options(corpus), cache).from_cache
    for name, _ in damaged:
        (good.folder / name).unlink()
        assert prepare_corpus(options(corpus), cache).rebuild_reason
    assert not list(cache.glob("*.bad-*"))


def test_shards_of_another_set_are_noticed(corpus: Path, tmp_path: Path) -> None:
    one = prepare_corpus(options(corpus), tmp_path / "cache")
    other = prepare_corpus(DataOptions(corpus=str(corpus), eval_frac=0.5), tmp_path / "cache")
    for suffix in (".bin", ".idx"):
        shutil.copy(other.folder / f"train-00000{suffix}", one.folder)
    assert "holds shards of another set" in prepare_corpus(options(corpus), tmp_path / "cache").rebuild_reason


def test_large_sets_are_checked_in_parts_only(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = prepare_corpus(options(corpus), tmp_path / "cache")
    monkeypatch.setattr(module, "_VERIFY_BYTES", 10)
    path = good.folder / "train-00000.bin"
    path.write_bytes(flip(path.read_bytes()))
    prepared = prepare_corpus(options(corpus), tmp_path / "cache")
    assert prepared.from_cache
    (problem,) = prepared.train.verify()
    assert "the payload beside it does not match its digest" in problem.given


def test_a_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught:
        prepare_corpus(options(corpus), tmp_path / "file" / "cache")
    assert str(caught.value) == (
        f"the cache folder {tmp_path}/file/cache cannot be written: Not a directory\n"
        "  rule: prepared data is kept in a folder this user can write, with room for 2 to 8 bytes per token\n"
        "  so:   the corpus was not prepared\n"
        "  try:  set cache_dir in the data section to another folder, or free space there"
    )


CHILD = """
import os, resource, sys, time
from pathlib import Path
from unisono.data.tokens import tokenized_cache
from unisono.data.options import DataOptions
corpus, cache, how = sys.argv[1:]
def run(cache):
    prepared = tokenized_cache.prepare_corpus(DataOptions(corpus=corpus, eval_frac=0.2), Path(cache))
    print(prepared.from_cache, prepared.train.fingerprint, prepared.eval.fingerprint)
def killed_at_sync(left, cache):
    real = os.fsync
    def fsync(handle):
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        real(handle)
    os.fsync = fsync
    run(cache)
    os._exit(0)
if how == "kill":
    for number in range(100):
        pid = os.fork() or killed_at_sync(number, f"{cache}-{number}")
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        if status == 0:
            break
else:
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    if how == "slowly":
        build = tokenized_cache._build
        tokenized_cache._build = lambda *arguments: (time.sleep(0.5), build(*arguments))
    print("ready", flush=True)
    sys.stdin.readline()
    run(cache)
"""


def child(corpus: Path, cache: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(corpus), str(cache), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_sync_the_next_call_is_right(corpus: Path, tmp_path: Path) -> None:
    want = prepare_corpus(options(corpus), tmp_path / "undisturbed")
    outcomes, errors = child(corpus, tmp_path / "cache", "kill").communicate()
    *killed, last = [int(line) for line in outcomes.split("\n") if line.lstrip("-").isdigit()]
    assert last == 0, errors
    assert set(killed) == {-signal.SIGKILL}
    assert len(killed) >= 8, "payload, sidecar and folder of two parts, the listing, set.json, the cache folder"
    for number in range(len(killed)):
        cache = tmp_path / f"cache-{number}"
        prepared = prepare_corpus(options(corpus), cache)
        assert not prepared.rebuild_reason, "what a killed process leaves is never taken for a finished set"
        assert prepared.train.fingerprint == want.train.fingerprint
        assert prepared.eval.fingerprint == want.eval.fingerprint
        assert not [p.name for p in cache.iterdir() if ".tmp-" in p.name and p.name.startswith("tokens-")]


def test_disk_full_is_said_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    process = child(corpus, tmp_path / "cache", "limit")
    _, errors = process.communicate("go\n")
    assert process.returncode == 1
    assert "DataError: the cache folder" in errors
    assert "cannot be written: File too large" in errors
    assert not [p for p in (tmp_path / "cache").rglob("*") if "tmp" in p.name or p.suffix == ".bin"]
    assert not prepare_corpus(options(corpus), tmp_path / "cache").rebuild_reason


def test_processes_that_start_together_build_once(corpus: Path, tmp_path: Path) -> None:
    processes = [child(corpus, tmp_path / "cache", "slowly") for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(answer[0] for answer in answers) == ["False", "True", "True", "True"]
    assert len({tuple(answer[1:]) for answer in answers}) == 1


def test_without_locks_the_first_rename_wins(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    together = threading.Barrier(3)
    build = module._build

    def meet(*arguments: object) -> None:
        together.wait(timeout=60)
        build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_build", meet)
    results: list[PreparedCorpus] = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare_corpus(options(corpus), tmp_path / "cache")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(r.train.fingerprint, r.eval.fingerprint) for r in results}) == 1
    assert len(results) == 3
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_the_standard_library(tmp_path: Path) -> None:
    prepared = prepare_corpus(DataOptions(), tmp_path)
    assert prepared.report.corpus.startswith("standard library of ")
    assert prepared.report.train_documents > 300
    assert 0.01 < prepared.report.eval_bytes / prepared.report.train_bytes < 0.15
    assert prepared.train.verify() == prepared.eval.verify() == []
    train = TokenWindows(prepared.train, seq_len=256)
    held_out = TokenWindows(prepared.eval, seq_len=256, target_bytes=True, name="eval")
    assert 3.0 < bigram_bits_per_byte(train, held_out) < 4.0


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "folder"])
def test_tables_without_a_column_are_no_text(tmp_path: Path, name: str) -> None:
    files = [tmp_path / name] if name != "folder" else [tmp_path / name / "a.jsonl", tmp_path / name / "b.parquet"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("text,name\none,two\n" if name == "x.csv" else '{"text": "one", "name": "two"}\n' * 100)
    kinds = ", ".join(sorted(file.suffix for file in files))
    with pytest.raises(DataError) as caught:
        prepare_corpus(DataOptions(corpus=str(tmp_path / name)), cache_dir=tmp_path / "cache")
    assert str(caught.value) == (
        f"corpus {tmp_path}/{name}: {kinds} files without data.text_column\n"
        "  rule: the corpus is plain text, each file of it a document, or a column of tables, each row of it a document\n"
        "  so:   the model would learn the syntax of the format, so nothing was prepared\n"
        "  try:  data.text_column, one of: text, name"
    )
    assert not (tmp_path / "cache").exists()


def rows_of(path: Path, rows: list[dict[str, object]]) -> Path:
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if lines != path:
        convert(lines, path, overwrite=True)
        lines.unlink()
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_column_of_a_table_is_the_corpus(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": f"n{i}", "text": f"text {i}\nof {i}", "title": f"title {i}"} for i in range(40)] + [
        {"id": "e", "text": "", "title": "none"}
    ]
    file = rows_of(tmp_path / f"x{suffix}", rows)
    cache = tmp_path / "cache"
    prepared = prepare_corpus(DataOptions(corpus=str(file), text_column="text", eval_frac=0.2), cache_dir=cache)
    train, held_out = documents(prepared)
    assert sorted(train + held_out) == sorted(row["text"] for row in rows if row["text"])
    assert 1 <= len(held_out) <= 16
    # another column is another set; the first one is found again
    titles = prepare_corpus(DataOptions(corpus=str(file), text_column="title", eval_frac=0.2), cache_dir=cache)
    assert titles.folder != prepared.folder
    assert set(documents(titles)[0]) <= {row["title"] for row in rows}
    assert prepare_corpus(DataOptions(corpus=str(file), text_column="text", eval_frac=0.2), cache_dir=cache).from_cache
    # rows added later move no other
    rows_of(file, [*rows, *({"id": "m", "text": f"more {i}", "title": "t"} for i in range(3))])
    settle(file)
    more = prepare_corpus(DataOptions(corpus=str(file), text_column="text", eval_frac=0.2), cache_dir=cache)
    assert set(held_out) <= set(documents(more)[1])


def test_of_several_tables_whole_files_are_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(3):
        rows_of(folder / f"{number}.jsonl", [{"text": f"{number} {i}"} for i in range(5)])
    options = DataOptions(corpus=str(folder), text_column="text")
    train, held_out = documents(prepare_corpus(options, cache_dir=tmp_path / "cache"))
    assert (len(train), len(held_out)) == (10, 5)
    (folder / "README.md").write_text("not a table")
    with pytest.raises(DataError) as caught:
        prepare_corpus(options, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(
        f"data.text_column 'text' with README.md of corpus {folder}\n  rule: a column is read"
    )
    assert "try:  leave data.text_column out, or move them to another folder" in str(caught.value)


def test_rows_without_text_are_named(tmp_path: Path) -> None:
    # other columns may hold anything
    file = rows_of(
        tmp_path / "x.jsonl", [{"text": "a", "meta": {"url": None}}, {"text": 4}, {"text": 5}, {"text": "b"}]
    )
    with pytest.raises(DataError) as caught:
        prepare_corpus(DataOptions(corpus=str(file), text_column="text"), cache_dir=tmp_path / "cache")
    assert str(caught.value) == (
        f"2 row(s) of {file} have no text in column 'text': row 1: 4 (int); row 2: 5 (int)\n"
        "  rule: data.text_column is a text in every row; rows are counted from 0\n"
        "  so:   the corpus was not prepared; no row is left out silently\n"
        "  try:  another column, or a file without these rows (an empty text is left out)"
    )
    null = rows_of(tmp_path / "z.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match=r"line 2 at offset 14: field 'text': null is no number, string"):
        prepare_corpus(DataOptions(corpus=str(null), text_column="text"), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens-*[!k]"))
    file = rows_of(tmp_path / "y.jsonl", [{"text": "a", "title": "t"}, {"title": "b"}])
    with pytest.raises(DataError, match="has no column 'text'"):
        prepare_corpus(DataOptions(corpus=str(file), text_column="text"), cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match=r"has no column 'texts'\n(.*\n)*  try:  did you mean 'text'"):
        prepare_corpus(DataOptions(corpus=str(file), text_column="texts"), cache_dir=tmp_path / "cache")

"""Text becomes the same shards in any number of processes, however often that is cut short, and nothing is left over."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from unisono.data.options import DataOptions
from unisono.data.tokens import encoding
from unisono.data.tokens import tokenized_cache as module
from unisono.data.tokens.encoding import encode_documents
from unisono.data.tokens.shards import TokenWriter
from unisono.data.tokens.tokenized_cache import prepare_corpus
from unisono.data.tokens.tokenizer import ByteTokenizer, Encoded, Tokenizer, load_tokenizer
from unisono.errors import DataError, UnisonoError

DOCUMENTS = [(("train", "eval")[n % 5 == 0], f"text {n} é漢🙂 <|endoftext|>\n" * (n % 7 + 1)) for n in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator([text for _, text in DOCUMENTS], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture(autouse=True)
def no_process_stays() -> Generator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def plain(encoded: Iterable[tuple[str, Encoded]]) -> list[tuple[str, list[int], list[int]]]:
    return [(label, each.ids.tolist(), each.token_bytes.tolist()) for label, each in encoded]


@pytest.mark.parametrize("workers", [1, 3])
def test_order_and_content_do_not_depend_on_processes(
    tokenizer: Tokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_REQUEST_CHARS", 200)
    want = plain(encode_documents(DOCUMENTS, tokenizer, workers=0))
    assert [label for label, _, _ in want] == [label for label, _ in DOCUMENTS]
    assert [ids for _, ids, _ in want] == [tokenizer.encode([text])[0].ids.tolist() for _, text in DOCUMENTS]
    assert plain(encode_documents(DOCUMENTS, tokenizer, workers=workers)) == want


def test_little_is_read_ahead(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_REQUEST_CHARS", 1)
    taken = 0

    def endless() -> Generator[tuple[str, str]]:
        nonlocal taken
        while True:
            taken += 1
            yield "train", "abc"

    with closing(encode_documents(endless(), tokenizer, workers=2)) as encoded:
        for _ in range(10):
            next(encoded)
    assert taken == 10 + 2 * 2 - 1


def test_a_process_that_dies(tokenizer: Tokenizer) -> None:
    others = psutil.Process().children()

    def killing() -> Generator[tuple[str, str]]:
        while not (started := set(psutil.Process().children()) - set(others)):  # with its first request
            yield from DOCUMENTS
        for process in started:
            process.kill()
            while alive(process.pid):
                time.sleep(0.01)
        yield from DOCUMENTS

    with pytest.raises(UnisonoError) as caught:
        list(encode_documents(killing(), tokenizer, workers=1))
    assert str(caught.value) == (
        "a tokenizing process ended with exit code -9\n"
        "  rule: each process that encodes text runs until all of it is encoded\n"
        "  so:   the corpus was not prepared; finished shards are kept and not made again\n"
        "  try:  start again; where memory ran out, cut very large files: a file is one document, encoded at once"
    )
    assert caught.value.exit_code == 1


def test_a_tokenizer_file_that_changed_meanwhile(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Path(tokenizer.name).read_text())
    loaded = load_tokenizer(str(path))
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UnisonoError, match="a tokenizing process found another tokenizer: the file changed meanwhile"):
        list(encode_documents(DOCUMENTS, loaded, workers=1))


ENDLESS = """
import itertools, sys, psutil
from unisono.data.tokens import encoding
encoding._REQUEST_CHARS = 1000
tokenizer = encoding.load_tokenizer(sys.argv[1])
documents = itertools.cycle([("train", "some text " * 50)])
for number, _ in enumerate(encoding.encode_documents(documents, tokenizer, workers=2)):
    if number == 100:
        print(*[child.pid for child in psutil.Process().children()], flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_one_that_started_it(tokenizer: Tokenizer, how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, tokenizer.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as a terminal does
        else:
            parent.send_signal(how)
        _, errors = parent.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # one that did not listen
        parent.communicate()
    assert parent.returncode == -how
    assert errors.count("Traceback") == (how == signal.SIGINT), errors
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for n in range(40):
        (root / f"file-{n:02d}.txt").write_text(f"text of file {n}\n" * (n % 9 + 1))
    return root


def options(corpus: Path, tokenizer: Tokenizer) -> DataOptions:
    return DataOptions(corpus=str(corpus), tokenizer=tokenizer.name, eval_frac=0.3)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TokenWriter", partial(TokenWriter, shard_tokens=150))


@pytest.mark.usefixtures("small_shards")
def test_prepared_shards_do_not_depend_on_processes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = content(prepare_corpus(options(corpus, tokenizer), tmp_path / "one").folder)
    assert len(want) > 12
    monkeypatch.setattr(encoding, "_REQUEST_CHARS", 50)
    monkeypatch.setattr(module, "default_workers", lambda *_: 2)
    assert content(prepare_corpus(options(corpus, tokenizer), tmp_path / "two").folder) == want


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("after", [0, 9, 25, 39])
def test_a_build_cut_short_goes_on_from_its_finished_shards(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    want = content(prepare_corpus(options(corpus, tokenizer), tmp_path / "undisturbed").folder)
    encoded: list[str] = []

    def counted(
        documents: Iterable[tuple[str, str]], tokenizer: Tokenizer, *, workers: int
    ) -> Generator[tuple[str, Encoded]]:
        for label, each in encode_documents(documents, tokenizer, workers=workers):
            if stop_at is not None and len(encoded) == stop_at:
                raise KeyboardInterrupt
            encoded.append(label)
            yield label, each

    monkeypatch.setattr(module, "encode_documents", counted)
    stop_at: int | None = after
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(options(corpus, tokenizer), cache)
    (*parts,) = cache.glob("tokens-*.part")
    assert bool(parts) == (after > 0)
    left = content(parts[0]) if parts else {}
    assert all(name.endswith((".bin", ".idx")) for name in left), "shards that were begun are not kept"
    assert len(left) % 2 == 0
    first, encoded, stop_at = len(encoded), [], None
    prepared = prepare_corpus(options(corpus, tokenizer), cache)
    assert content(prepared.folder) == want
    kept = sum(path.suffix == ".bin" for path in map(Path, left))
    assert (len(encoded) < 40) == (kept > 0)
    assert first + len(encoded) >= 40
    assert not list(cache.glob("tokens-*.part"))


KILLED = """
import os, sys
from functools import partial
from pathlib import Path
from unisono.data.tokens import encoding, tokenized_cache
from unisono.data.options import DataOptions
corpus, tokenizer, cache = sys.argv[1:]
tokenized_cache.TokenWriter = partial(tokenized_cache.TokenWriter, shard_tokens=150)
tokenized_cache.default_workers = lambda *_: 2
encoding._REQUEST_CHARS = 50
real = tokenized_cache.encode_documents
def killed(*arguments, **keywords):
    for number, each in enumerate(real(*arguments, **keywords)):
        if number == 30:
            os.kill(os.getpid(), 9)
        yield each
tokenized_cache.encode_documents = killed
tokenized_cache.prepare_corpus(DataOptions(corpus=corpus, tokenizer=tokenizer, eval_frac=0.3), Path(cache))
"""


@pytest.mark.usefixtures("small_shards")
def test_a_killed_build_goes_on_to_the_same_bytes(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    want = content(prepare_corpus(options(corpus, tokenizer), tmp_path / "undisturbed").folder)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(corpus), tokenizer.name, str(cache)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    (part,) = cache.glob("tokens-*.part")
    assert list(part.glob("*.tmp")), "killed in the middle of a shard"
    written = {path.name: path.stat().st_mtime_ns for path in part.glob("*.bin")}
    assert len(written) > 3
    with caplog.at_level(logging.INFO, "unisono"):
        folder = prepare_corpus(options(corpus, tokenizer), cache).folder
    assert f"{len(written)} finished shards are reused" in caplog.text
    assert content(folder) == want
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written, "they were not written again"
    assert not list(cache.glob("tokens-*.*-*")) + list(cache.glob("tokens-*.part"))


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_of_a_build_cut_short_is_made_again(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = prepare_corpus(options(corpus, tokenizer), tmp_path / "cache")
    want = content(good.folder)
    part = good.folder.with_name(f"{good.folder.name}.part")
    good.folder.rename(part)
    damaged = part / "train-00002.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\xff\0")
    (part / "train-00099.bin.tmp").write_bytes(b"begun")
    with caplog.at_level(logging.INFO, "unisono"):
        assert content(prepare_corpus(options(corpus, tokenizer), tmp_path / "cache").folder) == want
    evals = sum(name.startswith("eval") and name.endswith(".bin") for name in want)
    assert f"{part}: {2 + evals} finished shards are reused" in caplog.text


@pytest.mark.usefixtures("small_shards")
def test_a_corpus_that_is_wrong_leaves_nothing(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (corpus / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"1 file\(s\) of the corpus are not text"):
        prepare_corpus(options(corpus, tokenizer), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens-*/"))


def test_progress_is_logged(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PROGRESS_S", 2.0)
    seconds = iter(np.arange(0, 100, 0.5).tolist())  # the clock: half a second per document
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    for path in corpus.iterdir():
        path.write_text("x" * 99_999 + "\n")
    with caplog.at_level(logging.INFO, "unisono"):
        prepare_corpus(options(corpus, ByteTokenizer()), tmp_path / "cache")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10
    assert lines[0] == "encoding: 4 documents, 0.4 of 4.0 MB of text, 0.20 MB/s, 18 s left"
    assert lines[-1] == "encoding: 40 documents, 4.0 of 4.0 MB of text, 0.20 MB/s, 0 s left"


def test_how_many_processes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    megabytes = (1, 9, 17, 30, 1000)
    assert [encoding.default_workers(tokenizer, size * 10**6) for size in megabytes] == [0, 0, 2, 3, 6]
    assert encoding.default_workers(ByteTokenizer(), 1000 * 10**6) == 0

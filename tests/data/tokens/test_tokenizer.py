"""Tokens come back as the text they were; every byte of a text is credited to one token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from unisono.data.tokens.tokenizer import ByteTokenizer, Tokenizer, check_vocab, load_tokenizer
from unisono.errors import DataError, ExtraError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SAMPLE = ["def f(x):\n    return x + 1\n", "naïve café — 日本語 🙂 text text text", "  spaces   \n\n\n and\ttabs "] * 4


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as GPT-2's, with truncation and padding switched on to see them switched off."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def word_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that changes the text, drops white space and has unknown words."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "text": 1, "x": 2, "</s>": 9}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    backend.save(str(path))
    return path


@given(text=TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    (encoded,) = tokenizer.encode([text])
    assert bytes(encoded.ids.tolist()) == text.encode()
    assert encoded.token_bytes.tolist() == [1] * len(text.encode())
    assert tokenizer.decode([*encoded.ids.tolist(), tokenizer.end_of_document]) == text


def test_bytes_that_are_no_text_are_shown() -> None:
    assert ByteTokenizer().decode([65, 0xC3, 256, 66]) == "A\ufffdB"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_byte_level_files_round_trip_and_count_every_byte(byte_level: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    for text, encoded in zip(texts, tokenizer.encode(texts), strict=True):
        assert encoded.token_bytes.sum() == len(text.encode())
        assert encoded.token_bytes.size == encoded.ids.size
        assert tokenizer.decode(encoded.ids.tolist()) == text
        assert encoded.ids.size == 0 or encoded.ids.max() < tokenizer.vocab_size


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(st.sampled_from(["text", "TÉXT", "x", "日本", " ", "\n", "🙂"]), min_size=1))
def test_a_tokenizer_that_rewrites_text_still_counts_every_byte(word_level: Path, words: list[str]) -> None:
    text = " ".join(words)
    (encoded,) = load_tokenizer(str(word_level)).encode([text])
    assert encoded.ids.size == 0 or encoded.token_bytes.sum() == len(text.encode())


def test_bytes_are_credited_from_end_to_end(word_level: Path) -> None:
    (encoded,) = load_tokenizer(str(word_level)).encode(["text  日本 x \n"])
    assert encoded.ids.tolist() == [1, 0, 2]
    assert encoded.token_bytes.tolist() == [4, 2 + 6, 2 + 2]


def test_facts_of_a_file(byte_level: Path, word_level: Path) -> None:
    bpe, words = load_tokenizer(str(byte_level)), load_tokenizer(str(word_level))
    assert (bpe.end_of_document, words.end_of_document) == (0, 9)
    assert words.vocab_size == 10, "ids may leave gaps: the size is the largest id and one"
    assert bpe.vocab_size == len(Backend.from_file(str(byte_level)).get_vocab())
    assert bpe.fingerprint != words.fingerprint
    assert bpe.fingerprint == load_tokenizer(str(byte_level)).fingerprint
    assert len(bpe.encode(["a b c d e f g h i j k l m n o p"])[0].ids) > 5, "truncation is off"
    assert 5 <= len(bpe.encode(["a b c"])[0].ids) < 64, "padding is off"


def test_text_that_looks_like_a_special_token_is_text(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    (encoded,) = tokenizer.encode(["a<|endoftext|>b"])
    assert tokenizer.end_of_document not in encoded.ids
    assert tokenizer.decode([*encoded.ids.tolist(), tokenizer.end_of_document]) == "a<|endoftext|>b"


def test_the_name_of_a_mask_token_is_that_token_where_it_is_asked_for(byte_level: Path, tmp_path: Path) -> None:
    vocab = {name: number for number, name in enumerate(("[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat"))}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    marks = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    backend.save(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(str(tmp_path))
    assert (
        own.encode_masked("a [MASK] sat <mask>", 99) == backend.encode("a [MASK] sat [MASK]").ids == [1, 4, 3, 6, 3, 2]
    )
    assert own.encode_masked("a [MASK] sat <mask>", 5) == [1, 4, 3, 6, 2]
    assert vocab["[MASK]"] not in own.encode_marked(["a [MASK] sat"], 99)[0]  # elsewhere it is text, also afterwards
    # without such a token it is the id behind the vocabulary
    assert ByteTokenizer().encode_masked("é[MASK]b<mask>", 9) == [256, 195, 169, 257, 98, 257]
    assert ByteTokenizer().encode_masked("é[MASK]b<mask>", 4) == [256, 195, 169, 257]
    file = load_tokenizer(str(byte_level))
    (left,), (right,) = file.encode(["def "]), file.encode([" return"])
    whole = [file.end_of_document, *left.ids.tolist(), file.vocab_size, *right.ids.tolist()]
    assert file.encode_masked("def [MASK] return", 99) == whole


def test_built_in_and_file_follow_one_protocol(byte_level: Path) -> None:
    tokenizers: list[Tokenizer] = [load_tokenizer("bytes"), load_tokenizer(str(byte_level))]
    for tokenizer in tokenizers:
        empty, some = tokenizer.encode(["", "text"])
        assert empty.ids.size == empty.token_bytes.size == 0
        assert some.ids.dtype == some.token_bytes.dtype == np.uint32
        assert tokenizer.name
        assert 0 <= tokenizer.end_of_document < tokenizer.vocab_size


def test_no_end_of_document(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value) == (
        f"tokenizer '{path}' has none of the tokens <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|eos|>, [EOS], [SEP]\n"
        "  rule: documents are separated by an end-of-document token\n"
        "  so:   the model could not tell where a document ends\n"
        f"  try:  tokenizers.Tokenizer.from_file('{path}'), .add_special_tokens(['<|endoftext|>']), .save"
    )
    backend = Backend.from_file(str(path))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path))
    assert load_tokenizer(str(path)).end_of_document == 2, "the advice works"


def test_not_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path / "none.json"))
    assert str(caught.value) == (
        f"tokenizer '{tmp_path}/none.json': no file {tmp_path}/none.json\n"
        "  rule: the tokenizer is 'bytes' or a tokenizer.json of the Hugging Face tokenizers package\n"
        "  so:   text cannot become tokens\n"
        "  try:  'bytes', the file that tokenizers.Tokenizer.save wrote, or a folder with a tokenizer.json"
    )
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"bad\.json': .*expected"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_missing_extra(byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExtraError) as caught:
        load_tokenizer(str(byte_level))
    assert str(caught.value) == (
        f"the tokenizer file '{byte_level}' needs the package 'tokenizers', which is not installed\n"
        "  rule: it comes with the extra 'hf'\n"
        "  so:   nothing was started\n"
        "  try:  pip install 'unisono[hf]'"
    )


def test_vocabulary_too_small_for_the_data() -> None:
    check_vocab(257, 257)
    check_vocab(320, 257)
    with pytest.raises(DataError) as caught:
        check_vocab(256, 257)
    assert str(caught.value) == (
        "a model vocabulary of 256 for data with 257 token ids\n"
        "  rule: the model's vocabulary is at least the tokenizer's\n"
        "  so:   ids 256..256 would have no embedding\n"
        "  try:  vocab_size 320, the next multiple of 64"
    )


def test_a_folder_stands_for_its_tokenizer(byte_level: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_level.read_bytes())
    assert load_tokenizer(str(folder)).fingerprint == load_tokenizer(str(byte_level)).fingerprint
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no file .*model/tokenizer\.json"):
        load_tokenizer(str(folder))


def test_a_tokenizer_at_an_address(byte_level: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory: Any = fsspec.filesystem("memory")
    memory.pipe("/bucket/model/tokenizer.json", byte_level.read_bytes())
    memory.pipe("/bucket/model/config.json", b"{}")
    for url in ("memory://bucket/model/tokenizer.json", "memory://bucket/model"):
        assert load_tokenizer(url).fingerprint == load_tokenizer(str(byte_level)).fingerprint
        assert load_tokenizer(url).name == url
    for url, what in (("memory://bucket/none.json", "does not exist"), ("memory://bucket/model/*", "is 2 files")):
        with pytest.raises(DataError) as caught:
            load_tokenizer(url)
        assert str(caught.value).startswith(
            f"{url}, which {what}\n  rule: the address is that of one file or folder\n  so:   nothing was opened\n  try:  "
        )


def test_what_the_caller_does_wrong_is_not_the_files_fault(byte_level: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    with pytest.raises(TypeError):
        tokenizer.encode([None])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        tokenizer.decode([2**40])

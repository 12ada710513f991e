"""Tokenizers: raw bytes, or a tokenizer file of Hugging Face's ``tokenizers`` package.

They add no marks or padding, and encode text that looks like a special token as text. The writer of token shards adds the
end-of-document id.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.options import default_cache_dir
from unisono.data.sources.remote import local_path
from unisono.errors import DataError, UnisonoError, missing_extra
from unisono.sanitize import quoted
from unisono.storage.files import MAX_SHOWN_PATH, look_up
from unisono.storage.limits import read_json

BYTES = "bytes"

# Names of the end-of-document token in published tokenizers, most specific first.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_PADDING_NAMES = ("[PAD]", "<pad>", "<|pad|>")
MASK_NAMES = ("[MASK]", "<mask>")  # also what stands for a hidden token in a text
_MASK = re.compile("|".join(map(re.escape, MASK_NAMES)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Token ids of one text, and the bytes of text per token, in sum the text's UTF-8 length."""

    ids: NDArray[np.uint32]  # [tokens]
    token_bytes: NDArray[np.uint32]  # [tokens]


class Tokenizer(Protocol):
    """Protocol of a tokenizer: encodes text to ids in ``[0, vocab_size)``.

    Attributes:
        name: Name for messages, as given to ``load_tokenizer``.
        vocab_size: Number of ids, with that of ``end_of_document``.
        end_of_document: Id written after each document.
        padding: Id that fills up a sample; models are told not to look at it.
        mask: Id that hides a token from a masked language model; ``vocab_size``, one more id, if there is none of its own.
        fingerprint: Changes whenever the encoding of a text could.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def mask(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Token ids of each text, without the end-of-document id."""
        ...

    def encode_marked(self, texts: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """Ids of one text, or of a pair, with special tokens as a model reads them, and 1 for each id of the second.

        There are at most ``length`` ids; the longer text of a pair is cut first.
        """
        ...

    def encode_words(self, words: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """Ids of the words of one text, with special tokens, and the word of each, -1 for a special token."""
        ...

    def encode_masked(self, text: str, length: int) -> list[int]:
        """Ids of one text as ``encode_marked``, in which the names of mask tokens, such as ``[MASK]``, are ``mask``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, without the end-of-document id; invalid UTF-8 becomes U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per UTF-8 byte, ids 0..255, and 256 for the end of a document.

    >>> ByteTokenizer().encode(["Aé"])[0].ids.tolist()
    [65, 195, 169]
    """

    name: str = BYTES
    vocab_size: int = 257
    end_of_document: int = 256
    padding: int = 256
    mask: int = 257
    fingerprint: str = "bytes-1"

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        raws = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return [Encoded(ids=raw.astype(np.uint32), token_bytes=np.ones(raw.size, np.uint32)) for raw in raws]

    def encode_marked(self, texts: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """See ``Tokenizer.encode_marked``: the end-of-document id is before each text."""
        parts = [list(text.encode()) for text in texts]
        _cut(parts, length - len(parts))
        marked = [[self.end_of_document, *part] for part in parts]
        return [i for part in marked for i in part], [second for second, part in enumerate(marked) for _ in part]

    def encode_words(self, words: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """See ``Tokenizer.encode_words``: the end-of-document id is first, and a space is before each other word."""
        ids, word_of = [self.end_of_document], [-1]
        for number, word in enumerate(words):
            raw = (b" " if number else b"") + word.encode()
            ids += raw
            word_of += [number] * len(raw)
        return ids[:length], word_of[:length]

    def encode_masked(self, text: str, length: int) -> list[int]:
        """See ``Tokenizer.encode_masked``."""
        return [self.end_of_document, *_with_masks(self, text)][:length]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``, opened by ``load_tokenizer``."""

    def __init__(self, name: str, backend: Any, *, fingerprint: str) -> None:
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        end = next((vocab[text] for text in _END_NAMES if text in vocab), None)
        if end is None:
            raise DataError(
                given=f"tokenizer {name!r} has none of the tokens {', '.join(_END_NAMES)}",
                rule="documents are separated by an end-of-document token",
                consequence="the model could not tell where a document ends",
                nearest=f"tokenizers.Tokenizer.from_file({name!r}), .add_special_tokens(['<|endoftext|>']), .save",
            )
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "<|endoftext|>" written in a text is text
        self.name = name
        self.vocab_size = max(vocab.values()) + 1
        self.end_of_document = end
        self.padding = next((vocab[text] for text in _PADDING_NAMES if text in vocab), end)
        self.mask = next((vocab[text] for text in MASK_NAMES if text in vocab), self.vocab_size)
        self.fingerprint = fingerprint
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See ``Tokenizer.encode``; the package encodes on its own threads."""
        with _errors_of_file(self.name):
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [
                Encoded(ids=np.array(e.ids, np.uint32), token_bytes=_token_bytes(text, e.offsets))
                for text, e in zip(texts, encodings, strict=True)
            ]

    def encode_marked(self, texts: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """See ``Tokenizer.encode_marked``; special tokens are those of the file's post-processor, else as for bytes."""
        with _errors_of_file(self.name):
            return self._encode_marked(texts, length)

    def encode_words(self, words: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        """See ``Tokenizer.encode_words``."""
        with _errors_of_file(self.name):
            return self._encode_words(words, length)

    def encode_masked(self, text: str, length: int) -> list[int]:
        """See ``Tokenizer.encode_masked``. Other special tokens of the file are read in the text, too."""
        if self.mask == self.vocab_size:  # it has no such token
            return [self.end_of_document, *_with_masks(self, text)][:length]
        name = self._backend.id_to_token(self.mask)
        self._backend.encode_special_tokens = False
        try:
            return self.encode_marked([name.join(_MASK.split(text))], length)[0]
        finally:
            self._backend.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        text_ids = [int(i) for i in ids if i != self.end_of_document]
        with _errors_of_file(self.name):
            return self._backend.decode(text_ids, skip_special_tokens=False)

    def _encode_marked(self, texts: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        num_special: int = self._backend.num_special_tokens_to_add(len(texts) > 1)
        if not num_special:
            parts = [encoded.ids.tolist() for encoded in self.encode(texts)]
            _cut(parts, length - len(parts))
            marked = [[self.end_of_document, *part] for part in parts]
            return [i for part in marked for i in part], [second for second, part in enumerate(marked) for _ in part]
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        for encoding, size in zip(
            encodings, _cut_sizes([len(e.ids) for e in encodings], length - num_special), strict=True
        ):
            encoding.truncate(size)
        whole = self._backend.post_process(*encodings, add_special_tokens=True)
        return list(whole.ids), list(whole.type_ids)

    def _encode_words(self, words: Sequence[str], length: int) -> tuple[list[int], list[int]]:
        special = self._backend.num_special_tokens_to_add(False)
        encoding = self._backend.encode(list(words), is_pretokenized=True, add_special_tokens=False)
        encoding.truncate(length - max(special, 1))
        if special:
            encoding = self._backend.post_process(encoding, add_special_tokens=True)
        word_of = [-1 if word is None else word for word in encoding.word_ids]
        return (list(encoding.ids), word_of) if special else ([self.end_of_document, *encoding.ids], [-1, *word_of])


def tokenizer_file(spec: str) -> Path:
    """The ``tokenizer.json`` that ``spec`` names, itself or by its folder; it need not exist."""
    path, _ = look_up(spec)
    return path / "tokenizer.json" if os.path.isdir(path) else path


def load_tokenizer(spec: str) -> Tokenizer:
    """Open a tokenizer by name or file.

    Args:
        spec: ``"bytes"``, one token per UTF-8 byte and 256 for the end of a document; or the path of a
            ``tokenizer.json`` of Hugging Face's tokenizers package, or of a folder that has one; or the URL of such a
            file or folder, which is copied into the user's cache folder.

    Raises:
        DataError: The file is missing or invalid, cannot be copied, or has no end-of-document token such as
            ``<|endoftext|>`` or ``</s>``.
        ExtraError: The tokenizers package, or that of the URL's filesystem, is not installed.
    """
    if spec == BYTES:
        return ByteTokenizer()
    path, fault = look_up(tokenizer_file(local_path(spec, default_cache_dir(os.environ) / "sources")))
    if fault:
        raise _no_tokenizer(f"tokenizer {quoted(spec, MAX_SHOWN_PATH)}: {fault}")
    if not path.is_file():
        raise _no_tokenizer(f"tokenizer {spec!r}: no file {path.absolute()}")
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise missing_extra("hf", "tokenizers", f"the tokenizer file {spec!r}") from error
    with _errors_of_file(spec):
        raw: bytes = read_json(path, lambda raw: raw)  # within the limits; the package decodes it
        backend = package.Tokenizer.from_buffer(raw)
        return FileTokenizer(spec, backend, fingerprint=f"hf-{xxhash.xxh3_128_hexdigest(raw)}")


@contextmanager
def _errors_of_file(name: str) -> Generator[None]:
    """Raise what the package raises as DataError: bare ``Exception``, and for a bug of it Rust's panic, no ``Exception``."""
    try:
        yield
    except (UnisonoError, TypeError, OverflowError):  # the latter two are the caller's
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _no_tokenizer(f"tokenizer {name!r}: {error}") from error


def check_vocab(model_vocab: int, tokenizer_vocab: int) -> None:
    """Raise DataError if a model has fewer embeddings than the tokenizer has ids.

    Args:
        model_vocab: Number of the model's embeddings.
        tokenizer_vocab: Number of the tokenizer's ids.
    """
    if model_vocab < tokenizer_vocab:
        raise DataError(
            given=f"a model vocabulary of {model_vocab} for data with {tokenizer_vocab} token ids",
            rule="the model's vocabulary is at least the tokenizer's",
            consequence=f"ids {model_vocab}..{tokenizer_vocab - 1} would have no embedding",
            nearest=f"vocab_size {-(-tokenizer_vocab // 64) * 64}, the next multiple of 64",
        )


def _with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, with ``mask`` between what is before and behind the name of a mask token."""
    ids: list[int] = []
    for number, encoded in enumerate(tokenizer.encode(_MASK.split(text))):
        ids += [tokenizer.mask] * (number > 0) + encoded.ids.tolist()
    return ids


def _cut_sizes(sizes: list[int], room: int) -> list[int]:
    """Sizes of the parts after the longer one gave up what exceeds ``room`` in sum."""
    if len(sizes) == 1:
        return [max(0, min(sizes[0], room))]
    half = room // 2
    first = min(sizes[0], max(room - sizes[1], half))
    return [max(0, first), max(0, min(sizes[1], room - first))]


def _cut(parts: list[list[int]], room: int) -> None:
    for part, size in zip(parts, _cut_sizes([len(part) for part in parts], room), strict=True):
        del part[size:]


def _token_bytes(text: str, offsets: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """UTF-8 bytes from the end of the previous token to each token's end; the last token takes the rest of the text."""
    if not offsets:
        return np.zeros(0, np.uint32)
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    byte_ends = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))
    ends[-1] = code_points.size
    return np.diff(byte_ends[ends], prepend=0).astype(np.uint32)


def _no_tokenizer(given: str) -> DataError:
    return DataError(
        given=given,
        rule="the tokenizer is 'bytes' or a tokenizer.json of the Hugging Face tokenizers package",
        consequence="text cannot become tokens",
        nearest="'bytes', the file that tokenizers.Tokenizer.save wrote, or a folder with a tokenizer.json",
    )

"""Open a MindRecord file: mapped, or decrypted in memory if it was encrypted by MindSpore's ``set_enc_key``.

    file    for every 64 MiB of plain text: i32 **big-endian** length and a block; then i32 0, seven bytes of mode, ``ENCRYPT``
    block   u32 0x7F3A5ED8 | 16 bytes GCM tag | u32 remaining bytes | u32 16 | 16 bytes of which 12 are the nonce
            | u32 length | cipher text

The plain text is never written to a file: it is in anonymous memory, which forked processes share. Index files are encrypted in
the same way.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unisono.data.mindrecord.header import damaged_error
from unisono.data.sidecar import map_array, view_of
from unisono.errors import DataError, missing_extra
from unisono.storage.files import open_regular, require_regular

_MODE: Final = b"AES-GCM"
_END: Final = b"ENCRYPT"
_LENGTH: Final = struct.Struct(">i")
_BLOCK: Final = struct.Struct("<I16sII16sI")
_MAGIC: Final = 0x7F3A5ED8
_NONCE_BYTES: Final = 12
_TRAILER_BYTES: Final = _LENGTH.size + len(_MODE) + len(_END)


def open_bytes(path: Path, key: str | None) -> memoryview:
    """All bytes of a file, read-only and decrypted. Raises DataError if file and key do not match."""
    try:
        require_regular(path)  # a pipe would pass for an empty file
        content = view_of(map_array(path, "|u1", count=path.stat().st_size))
    except (OSError, ValueError) as error:  # a name from a damaged header may be invalid
        raise DataError(
            given=f"{path}: {getattr(error, 'strerror', None) or error}",
            rule="a MindRecord file is a file that can be read, with all files of its set beside it",
            consequence="nothing was opened",
            nearest="the path of a MindRecord file, or a list of paths for some files of a set",
        ) from error
    zeros, mode, end = (bytes(part) for part in _trailer(content))
    encrypted = end == _END and zeros == bytes(_LENGTH.size)
    if encrypted and mode == _MODE and key is not None:
        return _decrypted(path, content, key)
    if not encrypted and key is None:
        return content
    if not encrypted:
        raise _unfit(f"{path}, which is not encrypted, and a key", "leave the key out")
    if mode != _MODE:
        raise _unfit(f"{path}, which is encrypted as {mode!r}", "decrypt it with the function that encrypted it")
    raise _unfit(f"{path}, which is encrypted, and no key", "key= the key given to MindSpore's set_enc_key")


def is_encrypted(path: Path) -> bool:
    """Whether a file ends with MindSpore's mark of encryption."""
    with open_regular(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TRAILER_BYTES))
        trailer = file.read()
    return trailer.startswith(bytes(_LENGTH.size)) and trailer.endswith(_END)


def _trailer(content: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """The last length, the mode and the end mark of an encrypted file."""
    last = content[-_TRAILER_BYTES:]
    return last[: _LENGTH.size], last[_LENGTH.size : -len(_END)], last[-len(_END) :]


def _decrypted(path: Path, content: memoryview, key: str) -> memoryview:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise missing_extra("mindrecord", "cryptography", f"reading {path}, which is encrypted,") from error
    if len(key.encode()) not in (16, 24, 32):
        raise _unfit(
            f"a key of {len(key.encode())} bytes for {path}", "the key of 16, 24 or 32 bytes that encrypted it"
        )
    cipher = AESGCM(key.encode())
    blocks = list(_blocks(path, content))
    plain = mmap.mmap(-1, max(1, sum(length for *_, length in blocks)))
    for offset, tag, nonce, begin, length in blocks:
        try:
            plain.write(cipher.decrypt(nonce, bytes(content[begin : begin + length]) + tag, None))
        except InvalidTag:
            raise _unfit(
                f"{path}: the block at offset {offset} does not have its tag under this key",
                "the key that encrypted it; if this is it, a whole copy of the file",
            ) from None
    return memoryview(plain).toreadonly()[: plain.tell()]


def _blocks(path: Path, content: memoryview) -> Iterator[tuple[int, bytes, bytes, int, int]]:
    """(offset, tag, nonce, start of the cipher text, its length) of each block."""
    at, stop = 0, len(content) - _TRAILER_BYTES
    while at < stop:
        (length,) = _LENGTH.unpack_from(content, at)
        begin = at + _LENGTH.size + _BLOCK.size
        if not _BLOCK.size <= length <= stop - at - _LENGTH.size:
            raise damaged_error(path, at, f"a block of {length} bytes, and {stop - at - _LENGTH.size} are left")
        fixed: Any = _BLOCK.unpack_from(content, at + _LENGTH.size)
        magic, tag, _, nonce_bytes, nonce, text_bytes = fixed
        if (magic, nonce_bytes, text_bytes) != (_MAGIC, len(nonce), length - _BLOCK.size):
            raise damaged_error(path, at, "what begins here is not the head of an encrypted block")
        yield at, tag, nonce[:_NONCE_BYTES], begin, text_bytes
        at += _LENGTH.size + length


def _unfit(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="an encrypted file is read with the key that encrypted it (AES-GCM), any other file without one",
        consequence="nothing was read",
        nearest=nearest,
    )

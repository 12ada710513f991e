"""CRC-32C (Castagnoli, RFC 3720 appendix B.4) in NumPy, and the masked form that TFRecord stores.

A CRC is linear: that of a block is the XOR of one table entry per byte and position, and that of two blocks is the XOR of the
second and of the first, shifted past it. All blocks of 256 bytes are looked up at once and then joined pairwise.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL: Final = 0x82F63B78
_BLOCK: Final = 256
_STRETCH: Final = 1 << 18  # bytes per lookup, which takes 8 times as much memory
_SHORT: Final = 64  # bytes, below which a loop is faster
_ONES: Final = 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The CRC-32C of the bytes."""
    if len(data) < _SHORT:
        table = _plain_table()
        crc = _ONES
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ _ONES
    # A register that starts with ones equals one that starts with zeros and has the first four bytes inverted. Leading zeros then
    # change nothing, so the first stretch may be padded with them.
    content = np.frombuffer(data, np.uint8).copy()
    content[:4] ^= 0xFF
    first = len(data) % _STRETCH or _STRETCH
    blocks = 1 << (-(-first // _BLOCK) - 1).bit_length()
    head = np.zeros(blocks * _BLOCK, np.uint8)
    head[-first:] = content[:first]
    crc = _raw(head)
    for begin in range(first, len(data), _STRETCH):
        moved = _moved(np.array([crc], np.uint32), _STRETCH)
        crc = int(moved[0]) ^ _raw(content[begin : begin + _STRETCH])
    return crc ^ _ONES


def masked_crc32c(crc: int) -> int:
    """A CRC as TFRecord stores it: masked, because a CRC of data that contains CRCs is weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


def _raw(content: NDArray[np.uint8]) -> int:
    """The CRC of 256 · 2^k bytes, with a register that starts with zeros and is not inverted."""
    places = content.reshape(-1, _BLOCK).astype(np.intp) + np.arange(_BLOCK) * 256  # [blocks, 256]
    crcs = np.bitwise_xor.reduce(_place_table().take(places), axis=1)  # [blocks]
    size = _BLOCK
    while len(crcs) > 1:
        crcs = _moved(crcs[0::2], size) ^ crcs[1::2]
        size *= 2
    return int(crcs[0])


def _moved(crcs: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Each register after ``count`` zero bytes, ``count`` a power of two."""
    table = _shift_table(count)  # [4, 256] one for each byte of the register
    parts = [table[byte][crcs >> np.uint32(8 * byte) & np.uint32(0xFF)] for byte in range(4)]
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]


@cache
def _plain_table() -> list[int]:
    table: list[int] = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


@cache
def _place_table() -> NDArray[np.uint32]:
    """[256 · 256] contribution of a byte value to the register, by its position in a block."""
    plain = np.array(_plain_table(), np.uint32)
    rows = [plain]
    for _ in range(_BLOCK - 1):  # one position further from the end: one more zero byte after it
        rows.append(plain[rows[-1] & np.uint32(0xFF)] ^ rows[-1] >> np.uint32(8))
    return np.concatenate(rows[::-1])


@cache
def _shift_table(count: int) -> NDArray[np.uint32]:
    values = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]  # [4, 256]
    if count == 1:
        return np.array(_plain_table(), np.uint32)[values & np.uint32(0xFF)] ^ values >> np.uint32(8)
    half = count // 2
    return _moved(_moved(values.reshape(-1), half), half).reshape(4, 256)

"""Limits on what a file from a stranger may make its reader do: one table, and bounded decoding of JSON.

Sizes in a file are compared with the file's own size first. These limits come after that, and are far above real data: what a few
bytes can ask for (a compressed page, a run of zeros, a list in a list in a list) has no other bound. Functions raise LimitError,
a ValueError that names the limit; each reader adds the file and makes its own four-part error of it.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from unisono.storage.files import open_regular

# one value, line, record, page, member or array, in bytes
MAX_RECORD_BYTES: Final = 1 << 28
# columns of a table, fields of a record, features of an example and the values of its lists, side columns of a record file
MAX_COLUMNS: Final = 1 << 16
# dims of an array: NumPy and torch have no more
MAX_DIMS: Final = 64
# compressed data: it becomes this many times its size. SMALL_FILE_BYTES are allowed to a file of any size, however small, as are
# the other SMALL_FILE_ limits
MAX_EXPANSION: Final = 200
SMALL_FILE_BYTES: Final = 16 << 20
# Parquet, whose runs of equal values take no space: rows for each byte of the file, and rows allowed to a file of any size; the
# same for bytes of values
MAX_ROWS_PER_BYTE: Final = 1_000
SMALL_FILE_ROWS: Final = 1 << 20
MAX_PARQUET_EXPANSION: Final = 10_000
SMALL_FILE_PARQUET_BYTES: Final = 1 << 28
# Parquet's metadata: bytes of a page's header and of any text, where pyarrow's own limits are 16 MiB and 100 MB; entries of any
# list; structs inside each other
MAX_PARQUET_HEADER_BYTES: Final = 1 << 24
MAX_PARQUET_TEXT_BYTES: Final = 64 << 20
MAX_PARQUET_ENTRIES: Final = 1 << 20
MAX_THRIFT_DEPTH: Final = 16
# Arrow, whose nulls take no space and whose booleans take a bit: values for each byte, beyond SMALL_FILE_ROWS
MAX_VALUES_PER_BYTE: Final = 64
# JSON: lists and objects inside each other, and in all; values in all, estimated by the commas; bytes of a file of
# metadata, and of a plan
MAX_JSON_DEPTH: Final = 100
MAX_JSON_LISTS: Final = 1 << 22
MAX_JSON_VALUES: Final = 1 << 24
MAX_JSON_BYTES: Final = 1 << 28
MAX_PLAN_BYTES: Final = 1 << 20
# a strategy file of MindSpore: bytes; numbers of one entry, operators and parameters in all
MAX_STRATEGY_BYTES: Final = 32 << 20
MAX_STRATEGY_DIMS: Final = 64
MAX_STRATEGY_ENTRIES: Final = 1 << 17
# a configuration: bytes, keys with those of its tables, parts of a dotted key; files beneath each other
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_CONFIG_KEYS: Final = 1 << 12
MAX_KEY_PARTS: Final = 100
MAX_CONFIG_FILES: Final = 30
# a configuration, a plan or a loader: samples of a step, since each rank holds the numbers of its samples
MAX_STEP_SAMPLES: Final = 1 << 26
# names of the classes beside packed records; labels of one image in a list
MAX_NAMES_BYTES: Final = 1 << 24
MAX_LABELS: Final = 1 << 16
# an image: pixels; scans of one JPEG, each a pass over all pixels, of which encoders write about ten
MAX_PIXELS: Final = 1 << 26
MAX_JPEG_SCANS: Final = 200
# files of one table: shards are counted in their names
MAX_TABLE_SHARDS: Final = 100_000
# dims of a tensor that a checkpoint has in pieces: pieces that do not line up take up to 2^dims steps each to compare
MAX_PIECE_DIMS: Final = 16
# CSV: characters of a number, of which no float64 needs more
MAX_NUMBER_CHARACTERS: Final = 400
# tar: all extra headers of one member, which hold its long name; all members of one sample
MAX_TAR_NAME_BYTES: Final = 1 << 16
MAX_TAR_SAMPLE_BYTES: Final = 1 << 29
# heads of sidecars, of MindRecord and of safetensors (the limit of its own library); files of a MindRecord set
MAX_SIDECAR_HEAD_BYTES: Final = 1 << 20
MAX_MINDRECORD_HEADER_BYTES: Final = 128 << 20
MAX_MINDRECORD_SHARDS: Final = 4096
MAX_SAFETENSORS_HEADER_BYTES: Final = 100_000_000
# files of weights: tensors; bytes of one that is stored sparse, at least, and for each byte of its values
MAX_TENSORS: Final = 1 << 20
MAX_TENSOR_BYTES: Final = 1 << 26
MAX_TENSOR_EXPANSION: Final = 1_000
# the folder of a pretrained model: bytes of each JSON file; layers of one or of a run, beyond which its tensors are counted
MAX_MODEL_CONFIG_BYTES: Final = 64 << 20
MAX_UNCOUNTED_LAYERS: Final = 1_000
# text that its reader takes whole: a hosts file, a schema, the first line of a table; a list of images, items or records' keys, a
# line for each
MAX_TEXT_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 2 << 30
# the identity of a packing job; the record of who works in a folder
MAX_JOB_BYTES: Final = 1 << 20
MAX_LOCK_RECORD_BYTES: Final = 1 << 12
# one event of a run
MAX_EVENT_BYTES: Final = 1 << 24
# a trace of a profiler: bytes after decompression, events, bytes of one event, different names or shapes, bytes of these and of
# collectives; the summary of one
MAX_TRACE_BYTES: Final = 16 << 30
MAX_TRACE_EVENTS: Final = 1 << 24
MAX_TRACE_EVENT_BYTES: Final = 16 << 20
MAX_TRACE_NAMES: Final = 1 << 20
MAX_TRACE_TEXT_BYTES: Final = 1 << 28
MAX_PROFILE_BYTES: Final = 16 << 20
# a pattern of module names, in characters
MAX_PATTERN: Final = 1_000
# a MindRecord file's SQLite index: bytes of a text in its schema; steps of SQLite's machine for each row, and steps
# allowed to a file of any size
MAX_SQL_BYTES: Final = 1 << 20
MAX_SQL_STEPS_PER_ROW: Final = 100
SMALL_FILE_SQL_STEPS: Final = 1 << 20


class LimitError(ValueError):
    """A limit of this module is exceeded; the message names it."""


_SHALLOW_BYTES: Final = 1 << 12  # nothing in so short a text is too deep for a decoder's stack
_PIECE_BYTES: Final = 1 << 20
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'",[]{}'))


def decode_json(
    data: bytes | memoryview,
    decode: Callable[[bytes], Any] = json.loads,
    *,
    max_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Decode JSON whose size, number of values and depth are within their limits.

    Args:
        data: The text, UTF-8.
        decode: The decoder, such as ``json.loads`` or that of ``msgspec``. It runs after the limits are checked.
        max_bytes: Most bytes of the text.

    Raises:
        LimitError: A limit is exceeded.
        ValueError: The decoder refuses the text (``msgspec.DecodeError`` is a ValueError too).
    """
    if len(data) > max_bytes:
        raise LimitError(f"more than {max_bytes:,} bytes of JSON")
    text = bytes(data)
    if len(text) > MAX_JSON_VALUES or (len(text) > _SHALLOW_BYTES and _has_lists(text, MAX_JSON_DEPTH)):
        _check_structure(text)
    try:
        return decode(text)
    except (RecursionError, UnicodeDecodeError) as error:  # the caller may be near Python's own limit
        raise ValueError(str(error)) from error
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        raise ValueError(f"a number of more than {sys.get_int_max_str_digits():,} digits cannot be read") from error


def read_json(path: Path, decode: Callable[[bytes], Any] = json.loads, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file, by ``decode_json``. No more than ``max_bytes`` are read.

    Raises:
        OSError: The file cannot be read, or is no regular one.
        ValueError: As ``decode_json``.
    """
    with open_regular(path) as file:
        return decode_json(read_open(file, max_bytes), decode, max_bytes=max_bytes)


def read_limited(path: Path, max_bytes: int, *, flags: int = 0) -> bytes:
    """All bytes of a file, at most ``max_bytes``. ``flags`` are those of ``os.open``, such as ``os.O_NOFOLLOW``.

    Raises:
        OSError: The file cannot be read, or is no regular one.
        LimitError: It has more bytes.
    """
    with open_regular(path, flags=flags) as file:
        return read_open(file, max_bytes)


def read_open(file: BinaryIO, max_bytes: int) -> bytes:
    """All bytes of an open regular file, from its position, at most ``max_bytes``. Takes memory for no more than it has.

    Raises:
        LimitError: It has more bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise LimitError(f"more than {max_bytes:,} bytes")
    content = file.read(size + 1)  # not all that the limit allows: a read takes its bytes beforehand
    if len(content) > size:  # it grows, or its file system does not know its size
        content += file.read(max_bytes + 1 - len(content)) if len(content) <= max_bytes else b""
    if len(content) > max_bytes:
        raise LimitError(f"more than {max_bytes:,} bytes")
    return content


def _has_lists(text: bytes, number: int) -> bool:
    """Whether there are more than ``number`` brackets that open a list or object, within strings too.

    A search for bytes, far faster than ``_check_structure``, which only texts with so many brackets need.
    """
    for bracket in (b"[", b"{"):
        at = text.find(bracket)
        while at >= 0:
            number -= 1
            if number < 0:
                return True
            at = text.find(bracket, at + 1)
    return False


def _check_structure(text: bytes) -> None:
    """Raise LimitError for too many lists, objects and values, strings left out, or for too many inside each other.

    Exact for valid JSON. Needs a few MiB, whatever the text.
    """
    import numpy as np  # not for the command line's start

    steps = np.zeros(256, np.int8)
    steps[[ord("["), ord("{")]] = 1
    steps[[ord("]"), ord("}")]] = -1
    depth = in_string = begin = lists = values = 0
    while begin < len(text):
        end = min(begin + _PIECE_BYTES, len(text))
        piece = text[begin:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and end < len(text):  # an escape goes on in the next piece
            end += 1
            piece = text[begin:end]
        if b"\\" in piece:
            piece = _ESCAPE.sub(b"", piece)
        structure = np.frombuffer(piece.translate(None, _NOT_STRUCTURE), np.uint8)
        quotes = np.cumsum(structure == ord('"')) + in_string
        outside = np.where(quotes % 2, 0, structure)
        changes = steps[outside]
        depths = np.cumsum(changes, dtype=np.int64) + depth
        lists += np.count_nonzero(changes == 1)
        values += np.count_nonzero(outside == ord(","))
        if depths.size:
            if int(depths.max()) > MAX_JSON_DEPTH:
                raise LimitError(f"JSON with more than {MAX_JSON_DEPTH} lists and objects inside each other")
            depth, in_string = int(depths[-1]), int(quotes[-1] % 2)
        if lists > MAX_JSON_LISTS:
            raise LimitError(f"JSON of more than {MAX_JSON_LISTS:,} lists and objects")
        if values > MAX_JSON_VALUES:
            raise LimitError(f"JSON of more than {MAX_JSON_VALUES:,} values")
        begin = end


def num_elements(shape: Sequence[int], item_bytes: int = 1) -> int:
    """The number of elements of an array of ``shape``.

    Raises:
        LimitError: It has more dims than arrays can have, a negative one, or its bytes (of ``item_bytes`` for an element,
            empty dims counted as 1) are not an int64.
    """
    if len(shape) > MAX_DIMS:
        raise LimitError(f"a shape of {len(shape):,} dims, where {MAX_DIMS} are the most")
    if any(dim < 0 or dim >> 63 for dim in shape) or math.prod(max(1, dim) for dim in shape) * item_bytes >> 63:
        raise LimitError(f"shape {[int(dim) if abs(dim) >> 64 == 0 else '…' for dim in shape]}, whose size is no int64")
    return math.prod(shape)


def check_count(number: int, what: str = "columns") -> None:
    """Raise LimitError for more than MAX_COLUMNS of what is counted, such as the columns of a row or the values of a list."""
    if number > MAX_COLUMNS:
        raise LimitError(f"{number:,} {what}, where {MAX_COLUMNS:,} are the most")


def check_expansion(num_bytes: int, stored_bytes: int) -> None:
    """Raise LimitError for a tensor of ``num_bytes`` of which a file stores so few that it is no model's."""
    most = max(MAX_TENSOR_BYTES, MAX_TENSOR_EXPANSION * stored_bytes)
    if num_bytes > most:
        raise LimitError(
            f"a sparse array of {num_bytes:,} bytes with {stored_bytes:,} of values, for which {most:,} are the most"
        )

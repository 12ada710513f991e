"""Values as another type, where nothing is lost. Functions raise ValueError, which says why, for any other value."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

import numpy as np

from unisono.data.convert.formats.csv import number_kind
from unisono.data.convert.formats.table import encode_png
from unisono.data.image.decoding import decode, image_format, undecoded_part
from unisono.data.recordio import pack_header, unpack_header
from unisono.errors import DataError
from unisono.quality.columns.scan import EMPTY, UTF8, UTF8_BOM, UTF16, content_of
from unisono.quality.columns.schema import mode_of
from unisono.quality.columns.table_cells import KINDS, kind_of
from unisono.quality.columns.targets import Target

_CODECS: Final = {UTF8: "utf-8", UTF8_BOM: "utf-8-sig", UTF16: "utf-16"}
_MODES: Final = ("RGB", "L")  # that images can be converted to


def recast(value: Any, target: Target, *, text: str = "", may_have_header: bool = False) -> tuple[Any, str] | None:
    """A value as one of a column of the schema, and what was done, such as ``int to float``; None if it fits as it is.

    Args:
        value: Of a row; None for no value, which fits everywhere.
        target: The column.
        text: A number as its file writes it, which becomes the string; by default as Python writes it.
        may_have_header: Whether an image in bytes may have MXNet's header before it.
    """
    kind = KINDS[kind_of(value)]
    if kind == "string" and value in target.null_texts:
        return None, "text to no value"
    if kind == "null" or (kind == target.kind and not (target.mode or target.encoding)):
        return None
    if kind == target.kind and target.encoding:
        return _text_in_encoding(value, target.encoding)
    if kind == target.kind:
        return _image_of_mode(value, target.mode, may_have_header=may_have_header)
    return _cast(value, target.kind, text), f"{kind} to {target.kind}"


def _cast(value: Any, kind: str, text: str) -> Any:
    if kind == "float" and isinstance(value, str):
        return _float_of_text(value)
    if kind == "float" and isinstance(value, int):
        return _float_of_int(value)
    if kind == "int" and isinstance(value, bool):
        return int(value)
    if kind == "int" and isinstance(value, str):
        if number_kind(value) != "int64":
            raise ValueError("it is no text of an int")
        return int(value)
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return text or repr(value)
    raise ValueError("there is no cast without loss")


def _float_of_int(value: int) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number != value:
        raise ValueError("float64 has no such number")
    return number


def _float_of_text(text: str) -> float:
    if not number_kind(text) or text.lstrip("-").isalpha():  # nan and inf
        raise ValueError("it is no text of a finite number")
    number = float(text)
    if Decimal(repr(number)) != Decimal(text):
        raise ValueError("float64 does not keep all its digits")
    return number


def _text_in_encoding(value: bytes, encoding: str) -> tuple[bytes, str] | None:
    """The text in another encoding; None if it has that one."""
    given = content_of(value, may_have_header=False)
    if given in (encoding, EMPTY):
        return None
    if given not in _CODECS:
        raise ValueError(f"it is {given}, and only UTF-8 and UTF-16 with a mark are known")
    return value.decode(_CODECS[given]).encode(_CODECS[encoding]), f"to {encoding}"


def _image_of_mode(value: bytes, mode: str, *, may_have_header: bool) -> tuple[bytes, str] | None:
    """The image as PNG with the pixels that a run decodes; None if it has that mode."""
    given = mode_of(content_of(value, may_have_header=may_have_header))
    if given == mode:
        return None
    if not given:
        raise ValueError("it is no image")
    if mode not in _MODES:
        raise ValueError(f"images are converted to {' and '.join(_MODES)}, and most are of mode {mode}")
    header, image = None, value
    if image_format(value) is None:  # else the image would begin here
        header, view = unpack_header(value)
        image = bytes(view)
    try:
        pixels = decode(image)
        if part := undecoded_part(image):
            raise ValueError(f"{part} would be lost")
    except DataError as error:
        raise ValueError("; ".join(problem.given for problem in error.problems)) from error
    if mode == "L":
        if np.any(pixels != pixels[:, :, :1]):
            raise ValueError("its colours would be lost")
        pixels = pixels[:, :, 0]
    new = encode_png(pixels)
    return new if header is None else pack_header(header, new), f"image {given} to {mode}"

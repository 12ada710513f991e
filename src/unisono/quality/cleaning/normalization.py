"""Text in one form: mended encoding, composed characters, line ends, no control characters, no blanks at ends of lines."""

from __future__ import annotations

import importlib
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Final

from unisono.errors import missing_extra
from unisono.quality.options import NormalizeOptions

_MAX_MARKS: Final = 30  # combining marks after a character that are kept (Unicode Standard Annex 15, stream-safe text)
_LINE_END: Final = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_SPACE: Final = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# neither shown nor part of a word: controls, the soft hyphen, marks of width zero that no script needs, lone surrogates
_UNSEEN: Final = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u2060-\u2064\ufeff\ud800-\udfff]")
_EMPTY_LINES: Final = re.compile("\n{3,}")


def normalized(text: str, options: NormalizeOptions) -> str:
    """The text after the step, which may be off. Raises ExtraError as ``normalize_text``."""
    return normalize_text(text, repairs_encoding=options.repairs_encoding) if options.enabled else text


def normalize_text(text: str, *, repairs_encoding: bool = False) -> str:
    """Bring text into one form, so that equal text is equal bytes. Applying it twice is as applying it once.

    Composed characters (NFC); one kind of line end, and of space within a line; no control characters, no spaces at the ends of
    lines, at most one empty line in a row, and none at either end of the text. Spaces at the begin of a line and tabs stay.

    Args:
        text: Any text, also with lone surrogates, which are removed.
        repairs_encoding: Whether UTF-8 that was decoded as another encoding (``Ã©`` for ``é``) is mended first, by ftfy.

    Raises:
        ExtraError: ftfy is not installed, and ``repairs_encoding`` is set.
    """
    if repairs_encoding:
        text = _fix_encoding()(text)
    text = _LINE_END.sub("\n", text)
    text = _UNSEEN.sub("", _SPACE.sub(" ", text))
    if not text.isascii():
        # NFC sorts the marks after a character by insertion, in quadratic time; some characters become several marks
        text = _with_few_marks(unicodedata.normalize("NFC", _with_few_marks(text)))
    text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return _EMPTY_LINES.sub("\n\n", text).strip("\n")


def _with_few_marks(text: str) -> str:
    return _many_marks().sub(lambda run: run[0][:_MAX_MARKS], text)


@cache
def _many_marks() -> re.Pattern[str]:
    marks = "".join(filter(_begins_with_mark, map(chr, range(0x300, sys.maxunicode + 1))))
    return re.compile(f"[{marks}]{{{_MAX_MARKS + 1},}}")


def _begins_with_mark(character: str) -> bool:
    """Whether the character, decomposed, begins with a mark: U+0F73 is none by itself, and becomes two."""
    first = unicodedata.decomposition(character).partition(" ")[0]
    return bool(unicodedata.combining(chr(int(first, 16)) if first and first[0] != "<" else character))


@cache
def _fix_encoding() -> Callable[[str], str]:
    try:
        return importlib.import_module("ftfy").fix_encoding
    except ImportError as error:
        raise missing_extra("quality", "ftfy", "mending of wrongly decoded text") from error

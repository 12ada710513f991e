"""The text of a run: the running interpreter's standard library, a folder, or one file. Nothing is downloaded.

The split of the files into train and eval is a function of their relative paths, so adding a file moves no other, except where
they are so few that one must be held out. The standard library's corpus leaves out tests, generated tables, caches and installed
packages.

Not here: archives, JSON, Parquet, files larger than memory. A file is read whole and is one document.
"""

from __future__ import annotations

import codecs
import errno
import io
import logging
import os
import platform
import stat
import sysconfig
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from unisono.data.cleaning_record import CLEANING_SUFFIX
from unisono.data.hidden_files import hidden_notice, is_hidden, may_be_data
from unisono.data.result_files import data_of_results
from unisono.data.text_encoding import encoding_of
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.files import MAX_SHOWN_PATH, is_inside, look_up, open_inside, open_regular

STDLIB = "stdlib"
_LOG: Final = logging.getLogger("unisono.data")

# Not source code of the standard library: tests, installed packages, output of this machine's build, generated tables (codecs)
# and texts (pydoc's topics: one file with more than half of the bytes that a split may hold out).
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    | {"encodings", "pydoc_data"}
)
_STDLIB_SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
CHANGED = "it has changed since it was listed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of the corpus, with size and times by which a change is detected."""

    path: str  # relative to the corpus' root, with forward slashes
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Files sorted by path.

    Attributes:
        name: For reports and errors.
        root: The folder of the files' paths.
        files: The files as they were listed.
        skip_undecodable: Whether files that are not text are left out.
        confined_to: The folder without links that the files lie in; empty if links may lead out.
    """

    name: str
    root: Path
    files: tuple[SourceFile, ...]
    skip_undecodable: bool
    confined_to: str = ""

    def open(self, file: SourceFile) -> BinaryIO:
        """Open a file for reading.

        Raises OSError, also if it has changed since it was listed, is not regular or lies outside now: a folder of its path may
        have become a link meanwhile.
        """
        path = self.root / file.path
        opened = open_inside(self.confined_to, path) if self.confined_to else open_regular(path)
        found = os.fstat(opened.fileno())
        if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
            opened.close()
            raise OSError(errno.ESTALE, CHANGED)
        return opened


class UndecodableError(Exception):
    """A file's bytes are not text in the encoding it declares."""


def find_corpus(corpus: str) -> Corpus:
    """List the files of the corpus of a run.

    Args:
        corpus: The setting ``data.corpus``: ``"stdlib"``, a folder, of results its ``data/``, or one file.

    Raises:
        DataError: As ``corpus_at``; or there is no such file or folder, or it has results without ``data/``.
    """
    if corpus == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"standard library of {platform.python_implementation()} {platform.python_version()}"
        files = tuple(_stat(root, path, may_lead_out=True) for path in _walk(root, stdlib=True)[0])
        if not files:
            raise _empty(f"the {name} at {root}, which has no .py files (a zipped or stripped interpreter)")
        return Corpus(name=name, root=root, files=files, skip_undecodable=True)
    path, fault = look_up(corpus)
    if fault:
        raise _no_corpus(f"corpus {quoted(corpus, MAX_SHOWN_PATH)}: {fault}", "'stdlib' always exists")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _no_corpus(f"corpus {corpus!r}, which is neither a folder nor a regular file", "a file with its content")
    if not path.exists():
        nearest = f"the nearest folder that exists is {_nearest_folder(path)}; 'stdlib' always exists"
        raise _no_corpus(f"corpus {corpus!r}: no file or folder {path.absolute()}", nearest)
    return _at(data_of_results(path), f"corpus {corpus!r}", _empty)


def corpus_at(path: Path) -> Corpus:
    """List the files of a folder, without its hidden files and folders, which a warning counts, or the one file at ``path``.

    Raises:
        DataError: It has no files, it cannot be read, or a link of it leads out of it.
    """
    return _at(path, str(path), _no_files)


def _at(path: Path, name: str, empty: Callable[[str], DataError]) -> Corpus:
    """The files at a path that is there; ``name`` is that of the path in messages, ``empty`` the error for a folder without."""
    if not path.is_dir():
        file = _stat(path.parent, path.name, may_lead_out=True)
        return Corpus(name=str(path), root=path.parent, files=(file,), skip_undecodable=False)
    confined_to = os.path.realpath(path)  # before the listing: the folder itself may be exchanged, too
    relatives, links, hidden = _walk(path, stdlib=False)
    files = tuple(_stat(path, relative, may_lead_out=False) for relative in relatives)
    unread: list[str] = []
    if links:
        unread.append(f"{len(links)} link(s) to folders, which are not followed: {listed(links, 100)}")
    if hidden:
        unread.append(hidden_notice(hidden))
    if not files:
        only = f", only {' and '.join(unread)}" if unread else ""
        raise empty(f"{name}: the folder {path.absolute()} holds no files{only}")
    for fact in unread:
        _LOG.warning("%s: it has %s", name, fact)
    return Corpus(name=str(path), root=path, files=files, skip_undecodable=False, confined_to=confined_to)


def read_text(raw: bytes, *, python_source: bool) -> str:
    """Decode a file: UTF-8, or the encoding that Python source declares (PEP 263). Line ends are kept.

    Raises ``UndecodableError``.
    """
    try:
        encoding = "utf-8"
        if python_source:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        if encoding == "utf-8" and (other := encoding_of(raw)):
            raise UndecodableError(f"it is {other}, not utf-8")
        return raw.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as error:
        raise UndecodableError(f"byte {error.start} is not {error.encoding}") from error
    except (SyntaxError, LookupError) as error:
        raise UndecodableError(str(error)) from error


def encode_source(text: str) -> bytes:
    """Encode Python source as it declares itself (PEP 263), so that ``read_text`` reads the same text. It is UTF-8 by default.

    Raises:
        UndecodableError: The declared encoding is not known, or has not all of the characters.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(text.encode()).readline)
        raw = text.encode(encoding)
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise UndecodableError(f"{error.encoding} has no {character!r} (U+{ord(character):04X})") from error
    except (SyntaxError, LookupError) as error:
        raise UndecodableError(str(error)) from error
    if read_text(raw, python_source=True) != text:
        raise UndecodableError(f"{encoding} does not keep it")
    return raw


def held_out_files(paths: Sequence[str], eval_frac: float) -> frozenset[str]:
    """The paths of the eval split: those whose hash is below ``eval_frac``, at least one and not all; needs two paths or more.

    The hash is xxh3-64 of the relative path in UTF-8, as a fraction of 2^64.
    """
    by_hash = sorted(paths, key=lambda path: (xxhash.xxh3_64_intdigest(path.encode()), path))
    below = sum(xxhash.xxh3_64_intdigest(path.encode()) < eval_frac * 2.0**64 for path in by_hash)
    return frozenset(by_hash[: min(max(below, 1), len(by_hash) - 1)])


def split_text(text: str, eval_frac: float) -> tuple[str, str]:
    """Split one text into (train, eval): eval is the tail from the first line that begins in the last ``eval_frac``."""
    cut = len(text) - int(len(text) * eval_frac)
    line = text.find("\n", cut - 1) + 1
    return (text[:line], text[line:]) if 0 < line < len(text) else (text[:cut], text[cut:])


def undecodable_error(problems: Sequence[tuple[str, str]]) -> DataError:
    """The error for files that are not text, all of them at once: (path, reason)."""
    shown = "; ".join(f"{path}: {reason}" for path, reason in problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return DataError(
        given=f"{len(problems)} file(s) of the corpus are not text: {shown}{more}",
        rule="files are UTF-8 (Python source: the encoding it declares)",
        consequence="the corpus was not prepared; no file is left out silently",
        nearest="convert them (iconv -f ENCODING -t UTF-8 IN > OUT), or point the corpus at a folder that holds text only",
    )


def _walk(root: Path, *, stdlib: bool) -> tuple[list[str], list[str], list[str]]:
    """Relative paths of the corpus' files, links to files among them, of links to folders, which are not followed, and of hidden
    files and folders, which are left out; sorted."""
    paths: list[str] = []
    links: list[str] = []
    hidden: list[str] = []
    for folder, folders, files in os.walk(root, onerror=_raise):
        hidden.extend(
            Path(folder, name).relative_to(root).as_posix() for name in (*folders, *files) if may_be_data(name)
        )
        folders[:] = [name for name in folders if not _skipped_folder(name, stdlib=stdlib)]
        links.extend(
            Path(folder, name).relative_to(root).as_posix() for name in folders if os.path.islink(Path(folder, name))
        )
        paths.extend(
            Path(folder, name).relative_to(root).as_posix() for name in files if not _skipped_file(name, stdlib=stdlib)
        )
    return sorted(paths), sorted(links), sorted(hidden)


def _skipped_folder(name: str, *, stdlib: bool) -> bool:
    if stdlib:
        return name in _STDLIB_SKIPPED_FOLDERS or name.startswith(_STDLIB_SKIPPED_PREFIXES)
    return is_hidden(name) or name == "__pycache__"


def _skipped_file(name: str, *, stdlib: bool) -> bool:
    if stdlib:
        return not name.endswith(".py") or name in _STDLIB_SKIPPED_FILES or name.startswith(_STDLIB_SKIPPED_PREFIXES)
    return is_hidden(name) or name.endswith(CLEANING_SUFFIX)


def _raise(error: OSError) -> None:
    raise unreadable_file_error(Path(error.filename), error.strerror) from error


def unreadable_file_error(path: Path, why: str | None) -> DataError:
    """The error for a file or folder that cannot be read."""
    return DataError(
        given=f"{path} cannot be read: {why}",
        rule="every file of a folder of data is readable, regular, and named in UTF-8",
        consequence="nothing was read; no file is left out silently",
        nearest="repair or remove it, or another folder",
    )


def _stat(root: Path, relative: str, *, may_lead_out: bool) -> SourceFile:
    """The facts of a file. Raises DataError if it is no regular file, or a link out of ``root`` that may not lead there."""
    path = root / relative
    try:
        relative.encode()
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            if not may_lead_out and not is_inside(root, path):
                raise _leads_out_error(root, path)
            status = path.stat()
    except UnicodeEncodeError as error:
        raise unreadable_file_error(
            Path(relative.encode(errors="replace").decode()), "its name is not UTF-8"
        ) from error
    except OSError as error:
        raise unreadable_file_error(path, error.strerror) from error
    if not stat.S_ISREG(status.st_mode):
        raise unreadable_file_error(path, "it is not a regular file")
    return SourceFile(path=relative, size=status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns)


def _leads_out_error(root: Path, path: Path) -> DataError:
    return DataError(
        given=f"{path}, a link to {os.path.realpath(path)}",
        rule=f"the files of a data set lie in its folder, {root}, links followed",
        consequence="nothing was read; no file is left out silently",
        nearest="a copy with the files in place of the links ('cp -rL FOLDER COPY'), or remove the link",
    )


def _no_corpus(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="the corpus is 'stdlib', a folder of text files or one text file",
        consequence="there is nothing to train on",
        nearest=nearest,
    )


def _empty(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a corpus has at least one file with text in it",
        consequence="there is nothing to train on",
        nearest="'stdlib', or the path of a folder or file with text",
    )


def _no_files(given: str) -> DataError:
    return DataError(
        given=given, rule="data are in files", consequence="nothing was read", nearest="a folder that has some"
    )


def empty_split_error(corpus: Corpus, part: str) -> DataError:
    """The error for a corpus without text for ``part``, train or eval."""
    size = sum(file.size for file in corpus.files)
    return _empty(f"corpus {corpus.name!r}: {len(corpus.files)} file(s), {size} bytes, no text for the {part} part")


def _nearest_folder(path: Path) -> Path:
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())

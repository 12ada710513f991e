"""List images with labels and order, and the bad ones as far as a cheap check shows.

    a folder    class = the folder of an image, numbered in the order of the folders' paths; images in the order of their paths.
                Both as in im2rec --recursive, but without hidden files and folders.
    a .lst      MXNet's: integer index, tab, label or labels, tab, path; in the order of its lines
    a .csv      path,label or path,label,label…, below a header line; a single column of names becomes classes, sorted

Reads the first bytes of each image and decodes none.
"""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from unisono.data.convert.formats.table import unreadable_error
from unisono.data.convert.pack.partial_target import BadInput
from unisono.data.hidden_files import is_hidden, may_be_data
from unisono.errors import DataError
from unisono.sanitize import quoted, shorten
from unisono.storage.files import is_inside, open_regular
from unisono.storage.limits import MAX_LABELS, MAX_LIST_BYTES, MAX_RECORD_BYTES, LimitError, read_limited

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".pgm"})
_BEGINNINGS: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"RIFF", b"BM", b"P")
_MAX_INTEGER: Final = 1 << 24  # up to which a 32-bit float holds every integer
_MAX_PATH: Final = 4096  # characters of a path in a report: no system takes more


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedImage:
    """An image to pack; ``name`` is its path from the root, with forward slashes, or its table and row."""

    name: str
    labels: tuple[float, ...]
    key: int
    stamp: tuple[int, int] = (0, 0)  # size and mtime_ns of a file, to detect a change

    def __str__(self) -> str:
        return self.name


@dataclass(kw_only=True, slots=True)
class ImageListing:
    """Images and bad inputs. ``classes``: names in the order of their labels, empty if labels are numbers."""

    root: Path
    samples: list[ListedImage] = field(default_factory=list[ListedImage])
    classes: list[str] = field(default_factory=list[str])
    bad: list[BadInput] = field(default_factory=list[BadInput])
    left_out: int = 0  # files of a folder without an image suffix, and hidden files and folders
    hidden: list[str] = field(default_factory=list[str])  # of these, paths of such that may be data

    def refuse(self, path: str, reason: str) -> None:
        """Add a bad input."""
        self.bad.append(BadInput(path=shorten(path, _MAX_PATH), reason=reason))


def list_images(source: Path, *, root: Path | None = None, follow_links: bool = False) -> ImageListing:
    """The images of a folder, a ``.lst`` or a ``.csv``; paths in lists are relative to ``root``, by default the list's folder.

    Links to folders, and links out of the folder, are bad inputs unless ``follow_links``. Raises DataError for any other
    source, or one without images.
    """
    if os.path.isdir(source):
        listing = ImageListing(root=source)
        _list_folder(listing, follow_links)
    else:
        listing = ImageListing(root=root or source.parent)
        if not os.path.isdir(listing.root):
            raise unreadable_error(f"--root {listing.root}, no folder", "paths are relative to a folder", "a folder")
        entries = _lst_entries(source, listing) if source.suffix == ".lst" else _csv_entries(source, listing)
        _take(listing, entries, follow_links)
    if not listing.samples and not listing.bad:
        raise _no_images(source)
    return listing


def image_files(folder: Path) -> list[Path]:
    """The images of a folder in the order of ``list_images``, of which not even the first bytes have been read.

    Raises:
        DataError: A folder cannot be read, a link leads out, or there are no images.
    """
    listing = ImageListing(root=folder)
    names = _sorted_names(listing, follow_links=False)
    if listing.bad:
        raise unreadable_error(
            f"{folder}: {listing.bad[0].path}: {listing.bad[0].reason}",
            "all images of a folder are read",
            "remove or repair it",
        )
    if not names:
        raise _no_images(folder)
    return [folder.joinpath(*parts) for parts in names]


def shuffle_by_hash(names: list[str], salt: str) -> list[int]:
    """Positions of ``names`` in the order of their keyed hashes (xxh3-64 of salt, line feed, name; then by name)."""
    hashes = [xxhash.xxh3_64_intdigest(f"{salt}\n{name}".encode()) for name in names]
    return sorted(range(len(names)), key=lambda at: (hashes[at], names[at]))


def label_problem(labels: Sequence[float]) -> str | None:
    """Why MXNet's header cannot hold these labels, or None. Its labels are 32-bit floats; fractions may be rounded."""
    large = [label for label in labels if label == label // 1 and abs(label) > _MAX_INTEGER]
    return f"label {large[0]:.0f}, which a 32-bit float does not hold" if large else None


def _list_folder(listing: ImageListing, follow_links: bool) -> None:
    paths = _sorted_names(listing, follow_links)
    folders = sorted({parts[:-1] for parts in paths})
    numbers = {folder: number for number, folder in enumerate(folders)}
    if folders != [()]:
        listing.classes = ["/".join(folder) or "." for folder in folders]
    for key, parts in enumerate(paths):
        _add(listing, "/".join(parts), (numbers[parts[:-1]],), key)


def _sorted_names(listing: ImageListing, follow_links: bool) -> list[tuple[str, ...]]:
    return sorted(_walk(listing, (), set(), follow_links), key=lambda parts: (parts[:-1], parts[-1]))


def _no_images(source: Path) -> DataError:
    return unreadable_error(
        f"{source}, which names no images",
        f"images are files named {', '.join(sorted(IMAGE_SUFFIXES))}",
        "a folder of images or of one folder per class, a .lst or a .csv",
    )


def _walk(listing: ImageListing, parts: tuple[str, ...], above: set[str], follow: bool) -> Iterator[tuple[str, ...]]:
    folder = listing.root.joinpath(*parts)
    real = os.path.realpath(folder)
    if real in above:
        listing.refuse("/".join(parts), "a link to a folder that it lies in")
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        listing.refuse("/".join(parts) or ".", f"the folder cannot be read: {error.strerror}")
        return
    for entry in entries:
        entry_parts = (*parts, entry.name)
        printable = entry.name.encode("utf-8", "backslashreplace").decode()
        if printable != entry.name:  # bytes that are not UTF-8 appear as lone surrogates
            listing.refuse("/".join((*parts, printable)), "its name is not UTF-8")
        elif is_hidden(entry.name):
            listing.left_out += 1
            if may_be_data(entry.name):
                listing.hidden.append("/".join(entry_parts))
        elif _is_folder(entry):
            if entry.is_symlink() and not follow:
                listing.refuse("/".join(entry_parts), "a link to a folder; --follow-links takes it")
            else:
                yield from _walk(listing, entry_parts, above | {real}, follow)
        elif Path(entry.name).suffix.lower() not in IMAGE_SUFFIXES:
            listing.left_out += 1
        elif entry.is_symlink() and not follow and not is_inside(listing.root, Path(entry.path)):
            listing.refuse("/".join(entry_parts), "a link that leads out; --follow-links takes it")
        else:
            yield entry_parts


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one. A link to itself is none: as a file it cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


ListEntry = tuple[str, tuple[float, ...], int, str]  # path, labels, key, where in the list


def _lst_entries(source: Path, listing: ImageListing) -> Iterator[ListEntry]:
    keys: set[int] = set()
    for number, line in enumerate(_lines(source), 1):
        if not line.strip():
            continue
        parts = line.split("\t")
        where = f"{source.name}:{number}"
        try:
            if len(parts) < 3 or len(parts) > MAX_LABELS:
                raise ValueError(f"{len(parts)} parts")
            key, labels = int(parts[0]), tuple(float(part) for part in parts[1:-1])
            if not 0 <= key < 1 << 63:
                raise ValueError(f"index {key}")
        except ValueError as error:
            listing.refuse(where, f"a line is index, tab, labels, tab, path: {shorten(str(error), 200)}")
            continue
        if key in keys:
            listing.refuse(where, f"index {key} appears twice")
            continue
        keys.add(key)
        yield parts[-1].strip(), labels, key, where


def _csv_entries(source: Path, listing: ImageListing) -> Iterator[ListEntry]:
    try:
        rows = list(csv.reader(_lines(source)))
    except csv.Error as error:
        raise unreadable_error(f"{source}: {error}", "a table of images is a CSV file", "another file") from error
    if not rows or rows[0][:1] != ["path"] or len(rows[0]) < 2:
        raise unreadable_error(
            f"{source}, whose first line is {quoted(','.join(rows[0])) if rows else 'missing'}",
            "a table of images begins with the line path,label (or path,label,label…)",
            "that line; other tables are packed by --kind rows",
        )
    body = [(number, row) for number, row in enumerate(rows[1:], 2) if row]
    for number, row in [line for line in body if len(line[1]) != len(rows[0])]:
        listing.refuse(f"{source.name}:{number}", f"{len(row)} cells under {len(rows[0])} names")
    body = [line for line in body if len(line[1]) == len(rows[0])]
    named = len(rows[0]) == 2 and not all(_is_number(row[1]) for _, row in body)
    if named:
        listing.classes = sorted({row[1] for _, row in body})
    numbers = {name: float(number) for number, name in enumerate(listing.classes)}
    for key, (number, row) in enumerate(body):
        where = f"{source.name}:{number}"
        if not named and not all(map(_is_number, row[1:])):
            listing.refuse(where, "several labels are numbers, all of them")
            continue
        yield row[0], (numbers[row[1]],) if named else tuple(map(float, row[1:])), key, where


def _take(listing: ImageListing, entries: Iterator[ListEntry], follow_links: bool) -> None:
    names: set[str] = set()
    for name, labels, key, where in entries:
        if "\0" in name:  # no path, and no call of the system takes it
            listing.refuse(where, "a path with a NUL byte")
        elif name in names:
            listing.refuse(where, f"{shorten(name, 255)} appears twice")
        elif not follow_links and not is_inside(listing.root, listing.root / name):
            listing.refuse(where, f"{shorten(name, 255)} lies outside of {listing.root}; --follow-links takes it")
        else:
            names.add(name)
            _add(listing, name, labels, key)


def _add(listing: ImageListing, name: str, labels: tuple[float, ...], key: int) -> None:
    path = listing.root / name
    if (reason := label_problem(labels)) is not None:
        listing.refuse(name, reason)
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a device may do something
            listing.refuse(name, "not a file")
            return
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            begin = file.read(8)
    except OSError as error:
        listing.refuse(name, f"it cannot be read: {error.strerror}")
        return
    if not begin.startswith(_BEGINNINGS):
        content = f"begins with {begin.hex(' ')}" if begin else "is empty"
        listing.refuse(name, f"not an image that is read here: it {content}")
    elif status.st_size > MAX_RECORD_BYTES:
        listing.refuse(name, f"{status.st_size:,} bytes, more than {MAX_RECORD_BYTES:,}")
    else:
        listing.samples.append(
            ListedImage(name=name, labels=labels, key=key, stamp=(status.st_size, status.st_mtime_ns))
        )


def _lines(source: Path) -> list[str]:
    try:
        content = read_limited(source, MAX_LIST_BYTES)
        with io.TextIOWrapper(io.BytesIO(content), "utf-8-sig") as text:  # which takes any ends of lines
            return text.read().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError, LimitError) as error:
        raise unreadable_error(
            f"{source}: {error}", "a list of images is a text file in UTF-8", "another file"
        ) from error


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False

"""Benchmarks that documents may not quote: their n-grams as hashes, and what a dropped document quotes.

A quote is a number of words in a row, which a benchmark has too. Words are those of ``duplicates.shingles``, so case and
punctuation make no difference. Items of fewer words than that are not looked for: they would be found anywhere.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.errors import DataError, Problem
from unisono.quality.cleaning.normalization import normalized
from unisono.quality.cleaning.personal_data import mask_personal_data
from unisono.quality.documents import NAME_COLUMN, Document, Documents, find_documents, require_text
from unisono.quality.duplicates.shingles import shingle_hashes, words_at
from unisono.quality.options import CleanRecipe
from unisono.quality.progress import SILENT, Advance, Progress
from unisono.quality.refused import refused
from unisono.sanitize import listed, quoted

_BATCH: Final = 256  # items that are hashed at once
_A_BENCHMARK: Final = "a benchmark of decontaminate.against"
_COLUMNS: Final = "decontaminate.columns with the fields of text of the benchmarks"
_LOG: Final = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmarks:
    """The n-grams of benchmarks. An item is one text of them: a file, or a field of a row.

    Attributes:
        hashes: Of the n-grams, sorted, each once, uint64 [ngrams].
        items: Number of the first item with each, int64 [ngrams].
        places: Number of the file, row, and number of the column of each item, int64 [items, 3]; -1 for the column of a file that
            is one text.
        files: Names of the files.
        columns: Names of the columns that were asked for; empty if the data's field is read.
        unchecked: Items of too few words, by the name of their file; only files that have some.
    """

    hashes: NDArray[np.uint64]
    items: NDArray[np.int64]
    places: NDArray[np.int64]
    files: tuple[str, ...]
    columns: tuple[str, ...]
    unchecked: dict[str, int]

    def hashes_digest(self) -> str:
        """xxh3-128 of the hashes, by which documents are dropped."""
        return xxhash.xxh3_128_hexdigest(self.hashes.tobytes())

    def digest(self) -> str:
        """xxh3-128 of all, by which a change of what is reported is seen."""
        names = json.dumps((self.files, self.columns, self.unchecked), sort_keys=True).encode()
        return xxhash.xxh3_128_hexdigest(
            b"".join((self.hashes.tobytes(), self.items.tobytes(), self.places.tobytes(), names))
        )

    def place(self, item: int) -> dict[str, Any]:
        """File and row of an item, and its column if the recipe names some."""
        file, row, column = self.places[item].tolist()
        place: dict[str, Any] = {"file": self.files[file], "row": row}
        return {**place, "column": self.columns[column]} if self.columns and column >= 0 else place


def read_benchmarks(recipe: CleanRecipe, column: str | None, progress: Progress = SILENT) -> Benchmarks:
    """Hash the n-grams of a recipe's benchmarks.

    Benchmarks are normalized and masked as the documents are: a quotation of one is to have its words.

    Args:
        recipe: The benchmarks, and the steps.
        column: Field of the text in tables of the data, and of the benchmarks if the recipe names none for them.
        progress: Receives the bytes that are read, those of all columns.

    Raises:
        DataError: A benchmark cannot be read, or a row of one has no text.
        ExtraError: The recipe repairs encodings, and the package for it is not installed.
    """
    options = recipe.decontaminate
    hashes, items = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    places: list[tuple[int, int, int]] = []
    unchecked: Counter[str] = Counter()
    files: tuple[str, ...] = ()
    names = (options.columns or (column,)) if options.against else ()
    for number, name in enumerate(names):
        # a document without a text is told as one of a benchmark, which nothing leaves out
        found = find_documents([Path(path) for path in options.against], column=name, skips_unreadable=True)
        require_text(found)
        if number == 0:
            progress.begin("reading benchmarks", found.total_bytes * len(names), "bytes")
        files, is_table = tuple(file.name for file in found.files), [file.corpus_entry is None for file in found.files]
        for batch in _batches(_items(found, progress.advance, is_first=number == 0)):
            texts = [prepared(item.content.decode("utf-8", "surrogatepass"), recipe) for item in batch]
            of_batch, offsets = shingle_hashes(texts, options.ngram)
            is_long = np.diff(shingle_hashes(texts, 1)[1]) >= options.ngram
            counts = np.diff(offsets)
            is_checked = np.repeat(is_long, counts)
            hashes.append(of_batch[is_checked])
            items.append(np.repeat(np.arange(len(places), len(places) + len(batch)), counts)[is_checked])
            places += [(item.file, item.row, number if is_table[item.file] else -1) for item in batch]
            unchecked.update(files[item.file] for item, long in zip(batch, is_long.tolist(), strict=True) if not long)
    of_all = np.concatenate(hashes)
    order = np.argsort(of_all, kind="stable")
    of_all = of_all[order]
    is_new = np.concatenate((np.ones(len(of_all[:1]), np.bool_), of_all[1:] != of_all[:-1]))
    benchmarks = Benchmarks(
        hashes=of_all[is_new],
        items=np.concatenate(items)[order][is_new],
        places=np.array(places, np.int64).reshape(-1, 3),
        files=files,
        columns=options.columns,
        unchecked=dict(sorted(unchecked.items())),
    )
    _warn_of_unchecked(benchmarks, options.ngram)
    return benchmarks


def prepared(text: str, recipe: CleanRecipe) -> str:
    """A text after the steps that change texts."""
    return mask_personal_data(normalized(text, recipe.normalize), recipe.mask.kinds)[0]


def shares_ngram(texts: Sequence[str], ngram: int, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each text shares an n-gram with a benchmark, bool [documents].

    Args:
        texts: Documents after the steps that change texts.
        ngram: Words in a row.
        hashes: Those of the benchmarks' n-grams, sorted; at least one.
    """
    found, offsets = shingle_hashes(texts, ngram)
    hits = np.concatenate(([0], np.cumsum(_is_among(found, hashes))))
    return hits[offsets[1:]] > hits[offsets[:-1]]


def quote_records(texts: Iterable[str], recipe: CleanRecipe, benchmarks: Benchmarks) -> Iterator[dict[str, Any]]:
    """Of each document that quotes a benchmark, the item and the first n-gram that both have, as words in lower case.

    Args:
        texts: The documents as they were read.
        recipe: The steps.
        benchmarks: Of the recipe.
    """
    ngram = recipe.decontaminate.ngram
    for text in texts:
        text = prepared(text, recipe)
        found, _ = shingle_hashes([text], ngram)
        at = int(np.argmax(_is_among(found, benchmarks.hashes)))
        item = int(benchmarks.items[np.searchsorted(benchmarks.hashes, found[at])])
        yield {"quote_of": benchmarks.place(item), "ngram": " ".join(words_at(text, at, ngram))}


def _items(documents: Documents, advance: Advance, *, is_first: bool) -> Iterator[Document]:
    """The items of one column; files that are one text each only with the first column.

    Raises:
        DataError: An item has no text, or the field of the text is not there or not clear.
    """
    try:
        for document in documents.read(advance):
            is_row = documents.files[document.file].corpus_entry is None
            if document.fault:
                raise refused(
                    f"{_A_BENCHMARK}: {document.fault}",
                    "each row of a benchmark has a text in each of decontaminate.columns, and each file is text in UTF-8",
                    _COLUMNS + ", or the benchmark without that row" if is_row else "the benchmark without that file",
                )
            if is_first or is_row:
                yield document
    except DataError as error:
        raise DataError(*(_of_benchmark(problem, documents.column) for problem in error.problems)) from error


def _of_benchmark(problem: Problem, column: str | None) -> Problem:
    """A problem of a table in which the field of the text is not there, or not clear, with the setting that names it."""
    if problem.nearest == NAME_COLUMN:
        return replace(problem, nearest=_COLUMNS)
    is_about_column = column is not None and f"column {quoted(column)} " in f"{problem.given} "
    if not is_about_column:
        return problem
    return replace(problem, given=f"{_A_BENCHMARK}: {problem.given}", nearest=f"{_COLUMNS}; {problem.nearest}")


def _batches(items: Iterator[Document]) -> Iterator[list[Document]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


def _is_among(found: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return hashes[np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)] == found


def _warn_of_unchecked(benchmarks: Benchmarks, ngram: int) -> None:
    if benchmarks.unchecked:
        _LOG.warning(
            "benchmarks: %d of %d items have fewer than %d words (decontaminate.ngram), so documents that quote them are not "
            "found: %s",
            sum(benchmarks.unchecked.values()),
            len(benchmarks.places),
            ngram,
            listed(f"{count:,} of {file}" for file, count in benchmarks.unchecked.items()),
        )

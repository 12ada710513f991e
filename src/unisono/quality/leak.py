"""Leakage: documents of evaluation sets that are in the training set too, or in another evaluation set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_facts
from unisono.data.per_file_arrays import require_array_names
from unisono.errors import DataError
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import find_documents
from unisono.quality.duplicates.comparison import near_documents
from unisono.quality.duplicates.near_duplicates import Duplicates, exact_duplicates, merged, redirect_copies
from unisono.quality.duplicates.sketch_folder import sketch_all
from unisono.quality.duplicates.sketches import sketch_version
from unisono.quality.job_folder import open_job
from unisono.quality.kept_rows import write_kept
from unisono.quality.options import DuplicateOptions, only_dedup, require_settings_of, with_crops
from unisono.quality.page import write_leak_page
from unisono.quality.progress import SILENT, Progress
from unisono.quality.shared_column import require_shared_column
from unisono.quality.unreadable import unreadable_documents, write_unreadable

_PAIRS_FILE: Final = "pairs.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitLeaks:
    """Leaks of one split.

    Attributes:
        path: Its path.
        documents: Number of its documents.
        unreadable: Of these, documents that could not be read and were left out.
        exact: Documents whose text is in a split before it.
        near: Documents that are near one of a split before it.
    """

    path: str
    documents: int
    unreadable: int
    exact: int
    near: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakResult:
    """Leaks of evaluation sets, as numbers and pairs.

    Attributes:
        splits: In the order given; the first, the training set, has no leaks.
        num_capped: Documents without a leak with more candidates than the limit, so some pairs were not compared.
        pairs: Each leaking document and the most similar document found in a split before it.
        options: What counted as a duplicate.
    """

    splits: tuple[SplitLeaks, ...]
    num_capped: int
    pairs: tuple[dict[str, Any], ...]
    options: DuplicateOptions


def find_leaks(
    train: Path,
    others: Sequence[Path],
    *,
    out: Path | None = None,
    options: DuplicateOptions | None = None,
    column: str | None = None,
    skips_unreadable: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> LeakResult:
    """Find documents of evaluation sets that are also in the training set, or in an evaluation set before them.

    Args:
        train: The training set: a table, a text file, an image or a folder of these.
        others: Evaluation sets.
        out: A new folder for ``pairs.jsonl``, ``report.html``, ``report.json``, and ``kept/``: the row indices of each file
            without its leaking documents, as ``.npy``; ``dropped.jsonl`` has those that were left out. None: nothing is written.
        options: What counts as the same document.
        column: Field of the text or image in tables; see ``find_documents``.
        skips_unreadable: Whether documents that cannot be read are left out, or an error.
        workers: Processes; 0 is this one; or the address of a Ray cluster. By default by cores and size. The result is the same.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it.
        DataError: There is no evaluation set, or a file is damaged, has no text, or has changed meanwhile.
        ExtraError: rensa is not installed.
    """
    options = options or DuplicateOptions()
    paths = [train, *others]
    if not others:
        raise DataError(
            given=f"{train} alone",
            rule="the documents of one set are looked for in another",
            consequence="nothing was compared",
            nearest="the evaluation sets behind it; unisono data dedup finds the duplicates within one set",
        )
    documents = find_documents(paths, column=column, skips_unreadable=skips_unreadable)
    require_shared_column(documents)
    options = with_crops(options, documents.content)
    require_settings_of(only_dedup(options), documents.content)
    sketch = sketch_version(options, documents.content)
    if out is not None:
        require_array_names(file.name for file in documents.files)
    identity = {"leak": asdict(options), "documents": documents.identity(), "sketch": sketch}
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory())) / "leak"
        job = stack.enter_context(open_job(folder, identity, paths, skips_unreadable=skips_unreadable))
        if job.is_done:
            result = job.result(LeakResult, pairs=())
            return replace(result, pairs=tuple(map(json.loads, (folder / _PAIRS_FILE).read_bytes().splitlines())))
        sketches = sketch_all(documents, job.sketches, only_dedup(options), workers=workers, progress=progress)
        documents.require_unchanged()
        faults = unreadable_documents(documents, sketches, drops=skips_unreadable)
        files, rows = sketches.places()
        split_of_file = np.repeat(np.arange(len(paths)), documents.files_of_path)
        split_of = split_of_file[files]
        exact = exact_duplicates(sketches)
        near, num_capped = near_documents(documents.content, sketches, options, exact.document, split_of, progress)
        leaks = _leaks(exact, near, split_of)
        places = DocumentPlaces(documents, files, rows)
        result = LeakResult(
            splits=tuple(_splits(paths, split_of, leaks, list(faults))),
            num_capped=num_capped,
            pairs=tuple(places.records(leaks)),
            options=options,
        )
        if out is not None:
            is_kept = sketches.reasons() == 0
            is_kept[leaks.document] = False
            counts = np.bincount(files, minlength=len(documents.files))
            progress.begin("writing", int(is_kept.sum()), "documents")
            write_kept(documents, job.new, is_kept, counts, index_only=True, advance=progress.advance)
            progress.begin("reporting", 1, "pages")
            places.write(job.new / _PAIRS_FILE, leaks)
            write_unreadable(job.new, places, faults)
            write_leak_page(job.new / "report.html", documents.content, result, leaks, places, faults)
            progress.advance(1)
            report = {name: value for name, value in asdict(result).items() if name != "pairs"}
            job.finish({**report, "inputs": cleaning_facts(map(str, paths))})
    return result


def _leaks(exact: Duplicates, near: Duplicates, split_of: NDArray[np.int64]) -> Duplicates:
    """All leaking documents: also copies, in their own split, of one that leaks."""
    crosses = split_of[exact.document] != split_of[exact.of]
    leaks = merged(near, exact.select(crosses))
    _, copies = redirect_copies(exact.select(~crosses), leaks)
    return merged(leaks, copies)


def _splits(
    paths: Sequence[Path], split_of: NDArray[np.int64], leaks: Duplicates, unreadable: Sequence[int]
) -> list[SplitLeaks]:
    sizes = np.bincount(split_of, minlength=len(paths))
    unread = np.bincount(split_of[list(unreadable)], minlength=len(paths))
    leaking = split_of[leaks.document]
    return [
        SplitLeaks(
            path=str(path),
            documents=int(sizes[split]),
            unreadable=int(unread[split]),
            exact=int(np.sum(leaks.exact[leaking == split])),
            near=int(np.sum(~leaks.exact[leaking == split])),
        )
        for split, path in enumerate(paths)
    ]

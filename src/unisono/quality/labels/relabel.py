"""Write a data set with the labels changed, and the documents dropped, that somebody has marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_facts
from unisono.errors import DataError
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Documents, find_documents
from unisono.quality.duplicates.sketch_folder import sketch_all
from unisono.quality.job_folder import open_job
from unisono.quality.kept_rows import require_writable, write_kept
from unisono.quality.labels.marks import Mark, read_marks
from unisono.quality.labels.page import write_relabel_page
from unisono.quality.labels.values import Labels, data_set_digest, read_labels
from unisono.quality.options import DuplicateOptions, only_dedup
from unisono.quality.progress import SILENT, Progress
from unisono.quality.refused import refused
from unisono.quality.unreadable import unreadable_documents, write_unreadable
from unisono.sanitize import quoted
from unisono.storage.files import file_digest
from unisono.storage.json_lines import write_json_lines

CHANGES_FILE: Final = "changes.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RelabelResult:
    """How many labels and documents changed.

    Attributes:
        documents: Number of documents.
        kept: Of these in the new data set.
        label: The field of the labels.
        changed: Documents with another label.
        unreadable: Documents that could not be read, or have no label, when the marks were made; they are left out, too.
        num_dropped: Documents that were marked so and are not in the new data set.
        confirmed: Documents whose label was marked as right.
        changes: Changed labels: ``[before, after, count]``, the most common first.
    """

    documents: int
    kept: int
    label: str
    changed: int
    unreadable: int
    num_dropped: int
    confirmed: int
    changes: tuple[tuple[str, str, int], ...]


def relabel(
    paths: Sequence[Path],
    out: Path,
    marks_path: Path,
    *,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> RelabelResult:
    """Write a copy of a data set in which marked labels are changed, and documents that are marked so are left out.

    The folder gets ``data/`` and ``kept/``, as ``clean`` writes them, ``changes.jsonl`` (each changed or dropped document: its
    file and row, its row in the new file, and its label before and after), ``report.json`` and ``report.html``. Documents that
    the search for labels left out as unreadable are left out here, too, and are in ``dropped.jsonl``. A file whose label is its
    folder goes into the folder of its new label. Its name gets ``-1``, ``-2`` and so on before the suffix where an input of that
    folder, or a file that has gone there before it, has the name.

    Args:
        paths: The data set that was marked: tables, images, or folders of these.
        out: A new folder; or that of the same job, which was killed and goes on, or is done already.
        marks_path: The file of marks.
        workers: Processes; 0 is this one; or the address of a Ray cluster. By default by cores and size. The result is the same.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it.
        DataError: The marks are damaged, or those of another data set; a file is damaged or has changed meanwhile, or its
            format is only read.
    """
    marks = read_marks(marks_path)
    documents = find_documents(paths, column=marks.text_column, skips_unreadable=marks.skips_unreadable)
    if marks.whole_rows:
        documents = replace(documents, excluded_column=marks.label, content="text")
    require_writable(documents)
    identity = {"relabel": file_digest(marks_path), "documents": documents.identity()}
    with open_job(out, identity, [*paths, marks_path]) as job:
        if job.is_done:
            return job.result(RelabelResult)
        only_exact = only_dedup(DuplicateOptions(near=0.0))
        sketches = sketch_all(documents, job.sketches, only_exact, workers=workers, progress=progress)
        labels = read_labels(documents, marks.label, sketches, progress=progress)
        faults = unreadable_documents(documents, sketches, drops=marks.skips_unreadable)
        if data_set_digest(documents, sketches, labels) != marks.data_set_digest:
            raise refused(
                f"{marks_path}, with marks of another data set than {', '.join(map(str, paths))}",
                "marks belong to the files, rows, texts and labels that they were made of",
                "the same inputs as in unisono data labels; or look through these: unisono data labels",
            )
        files, rows = sketches.places()
        counts = np.bincount(files, minlength=len(documents.files))
        marked = _by_document(marks.marks, documents, counts, labels)
        is_kept = sketches.reasons() == 0
        is_kept[[document for document, mark in marked.items() if mark.action == "drop"]] = False
        changed = [(document, mark) for document, mark in marked.items() if mark.action == "change"]
        new_names = _new_names(documents, [(int(files[document]), str(mark.to)) for document, mark in changed])
        new_labels = (
            (document, str(mark.to).encode("utf-8", "surrogatepass"))
            for document, mark in changed
            if int(files[document]) not in new_names
        )
        progress.begin("writing", int(is_kept.sum()), "documents")
        write_kept(
            documents,
            job.new,
            is_kept,
            counts,
            new_labels,
            label=marks.label,
            new_names=new_names,
            index_only=False,
            advance=progress.advance,
        )
        progress.begin("reporting", 1, "pages")
        write_json_lines(job.new / CHANGES_FILE, _lines(documents, marked, is_kept, files, rows, new_names))
        result = RelabelResult(
            documents=len(sketches),
            kept=int(is_kept.sum()),
            label=marks.label,
            changed=len(changed),
            unreadable=len(faults),
            num_dropped=sum(mark.action == "drop" for mark in marked.values()),
            confirmed=sum(mark.action == "keep" for mark in marked.values()),
            changes=_count_changes(changed),
        )
        places = DocumentPlaces(documents, files, rows)
        write_unreadable(job.new, places, faults)
        write_relabel_page(job.new / "report.html", out.name, result, labels.counts(), places, faults)
        progress.advance(1)
        documents.require_unchanged()
        job.finish({**asdict(result), "inputs": cleaning_facts(map(str, paths))})
    return result


def _by_document(
    marks: Sequence[Mark], documents: Documents, counts: NDArray[np.int64], labels: Labels
) -> dict[int, Mark]:
    """The mark of each document, in order.

    Raises:
        DataError: A mark is of no document, of another label than the document has, or changes it to what is no label.
    """
    numbers = {file.name: number for number, file in enumerate(documents.files)}
    begins = np.cumsum(counts) - counts
    found: dict[int, Mark] = {}
    for mark in marks:
        number = numbers.get(mark.file)
        if number is None or not 0 <= mark.row < counts[number]:
            raise _unfit(f"a mark of {quoted(mark.file)}, row {mark.row}, which is not there")
        document = int(begins[number]) + mark.row
        if labels.of[document] < 0 or labels.name(document) != mark.label:
            raise _unfit(f"a mark of the label {quoted(mark.label)} in {mark.file}, row {mark.row}, which has another")
        if mark.to is not None and mark.to not in labels.names:
            raise _unfit(f"a change to {quoted(mark.to)}, which no document has as its label")
        found[document] = mark
    return dict(sorted(found.items()))


def _new_names(documents: Documents, changed: Iterable[tuple[int, str]]) -> dict[int, str]:
    """New names of files that are one document, in the folders of their new labels.

    Args:
        documents: The data set.
        changed: Number of the file, and the new label, of each changed document.
    """
    taken = {file.name for file in documents.files}
    found: dict[int, str] = {}
    for number, label in changed:
        file = documents.files[number]
        if file.corpus_entry is None:
            continue
        entry = Path(file.corpus_entry[1].path)
        outer = Path(file.name.removesuffix(str(entry)))  # of several folders that were given, the name of its own
        if len(entry.parts) == 1:  # it lies in that folder directly, which is then the one of its label
            outer = outer.parent
        name = outer / label / entry.name
        others = (name.with_name(f"{name.stem}-{at}{name.suffix}") for at in count(1))
        found[number] = next(str(each) for each in chain([name], others) if str(each) not in taken)
        taken.add(found[number])
    return found


def _lines(
    documents: Documents,
    marked: Mapping[int, Mark],
    is_kept: NDArray[np.bool_],
    files: NDArray[np.int64],
    rows: NDArray[np.int64],
    new_names: Mapping[int, str],
) -> Iterator[dict[str, Any]]:
    """Lines of ``changes.jsonl``.

    Args:
        documents: The data set.
        marked: The mark of each document that has one.
        is_kept: Of each document, bool [documents].
        files: Number of each document's file, int64 [documents].
        rows: Its row there, int64 [documents].
        new_names: Of files that have another name now, by their number.
    """
    before = np.concatenate(([0], np.cumsum(is_kept)))  # kept documents before each
    for document, mark in marked.items():
        if mark.action == "keep":
            continue
        line = {"file": documents.files[files[document]].name, "row": int(rows[document]), "action": mark.action}
        if mark.action == "drop":
            yield line | {"label": mark.label}
            continue
        if (number := int(files[document])) in new_names:
            line["new_file"] = new_names[number]
        new_row = int(before[document] - before[document - int(rows[document])])
        yield line | {"new_row": new_row, "label": mark.label, "to": mark.to}


def _count_changes(changed: Sequence[tuple[int, Mark]]) -> tuple[tuple[str, str, int], ...]:
    counts: dict[tuple[str, str], int] = {}
    for _, mark in changed:
        pair = (mark.label, str(mark.to))
        counts[pair] = counts.get(pair, 0) + 1
    return tuple((before, after, count) for (before, after), count in sorted(counts.items(), key=lambda item: -item[1]))


def _unfit(given: str) -> DataError:
    return refused(
        given,
        "a mark names a document of the data set, its label, and another label of the data set",
        "the marks as the page of unisono data labels saved them",
    )

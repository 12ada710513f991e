"""Split a data set into parts so that no document of one part is in another, too."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_facts
from unisono.data.kept_rows import KEPT_FOLDER
from unisono.data.per_file_arrays import require_array_names
from unisono.data.result_files import DATA_FOLDER, DATA_SIZES
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Documents, find_documents
from unisono.quality.duplicates.clusters import find_clusters
from unisono.quality.duplicates.sketch_folder import Sketches, sketch_all
from unisono.quality.duplicates.sketches import sketch_version
from unisono.quality.field_values import read_values
from unisono.quality.job_folder import DROPPED_FILE, open_job
from unisono.quality.kept_rows import require_writable, write_kept
from unisono.quality.labels.values import read_labels
from unisono.quality.options import DuplicateOptions, only_dedup, require_settings_of, with_crops
from unisono.quality.page import write_split_page
from unisono.quality.progress import SILENT, Progress
from unisono.quality.refused import refused
from unisono.quality.row_keys import group_of
from unisono.quality.unreadable import unreadable_documents, write_unreadable
from unisono.sanitize import quoted

_FILES: Final = ("job.json", "report.json", "report.html", DROPPED_FILE, DATA_SIZES, ".lock")
# also the folders by which one result is told from several parts
_RESERVED: Final = ("work", DATA_FOLDER, KEPT_FOLDER, *_FILES)
_LOG: Final = logging.getLogger("unisono")
_ROUNDING: Final = 1e-6  # of sums of shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the data set.

    Attributes:
        name: Its folder.
        share: What was asked for, from 0 to 1.
        documents: Number of its documents.
        classes: Number of its documents of each class; empty without classes.
    """

    name: str
    share: float
    documents: int
    classes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitResult:
    """Parts of a data set, and the clusters that they keep together.

    Attributes:
        documents: Number of documents.
        unreadable: Of these, documents that could not be read and are in no part.
        clusters: Number of clusters, none of which is in two parts; a document alone is one.
        largest: Documents in the largest cluster.
        num_capped: Documents with more candidates than the limit, so some pairs were not compared.
        parts: In the order given.
        options: What counted as the same document.
    """

    documents: int
    unreadable: int
    clusters: int
    largest: int
    num_capped: int
    parts: tuple[Part, ...]
    options: DuplicateOptions


def split(
    paths: Sequence[Path],
    out: Path,
    parts: Mapping[str, Fraction],
    *,
    class_field: str | None = None,
    group_field: str | None = None,
    options: DuplicateOptions | None = None,
    column: str | None = None,
    skips_unreadable: bool = False,
    index_only: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> SplitResult:
    """Split a data set: documents that are the same, near each other or of one group go into the same part.

    The folder gets ``PART/data/`` and ``PART/kept/`` of each part, as ``clean`` writes them, ``report.json`` and ``report.html``,
    and ``dropped.jsonl`` if documents were left out.

    Args:
        paths: Tables, text files, images or folders of these.
        out: A new folder; or that of the same job, which was killed and goes on, or is done already.
        parts: The share of each part, by its name. They sum up to 1.
        class_field: Field whose values have the same shares in all parts, as far as clusters allow (stratified).
        group_field: Field whose values are in one part each, such as a user or a patient.
        options: What counts as the same document; its seed also draws which documents go where.
        column: Field of the text in tables; see ``find_documents``.
        skips_unreadable: Whether documents that cannot be read, or lack a field, are left out, or an error.
        index_only: Whether to write no ``data/``.
        workers: Processes; 0 is this one; or the address of a Ray cluster. By default by cores and size. The result is the same.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it.
        DataError: Shares do not sum up to 1, or a part has a name that the results need; a file is damaged, has no text or not
            the field, or has changed meanwhile.
        ExtraError: rensa is not installed.
    """
    options = options or DuplicateOptions()
    _check_parts(parts)
    documents = find_documents(paths, column=column, skips_unreadable=skips_unreadable)
    options = with_crops(options, documents.content)
    require_settings_of(only_dedup(options), documents.content, draws=True)
    sketch = sketch_version(options, documents.content)
    require_array_names(file.name for file in documents.files)
    if not index_only:
        require_writable(documents)
    identity = {
        "split": asdict(options),
        "parts": [[name, str(share)] for name, share in parts.items()],
        "fields": [class_field, group_field],
        "documents": documents.identity(),
        "index_only": index_only,
        "sketch": sketch,
    }
    with open_job(out, identity, paths, skips_unreadable=skips_unreadable) as job:
        if job.is_done:
            return job.result(SplitResult)
        sketches = sketch_all(documents, job.sketches, only_dedup(options), workers=workers, progress=progress)
        groups = None if group_field is None else _groups(documents, group_field, sketches, progress)
        classes, names = _classes(documents, class_field, sketches, progress)
        faults = unreadable_documents(documents, sketches, drops=skips_unreadable)
        is_read = sketches.reasons() == 0
        cluster_of, num_capped = find_clusters(documents.content, sketches, options, groups, progress)
        cluster_of = cluster_of[is_read]
        part_of = np.full(len(sketches), -1)
        shares = [float(share) for share in parts.values()]
        part_of[is_read] = assign_parts(cluster_of, classes[is_read], shares, options.seed)
        documents.require_unchanged()
        files, rows = sketches.places()
        counts = np.bincount(files, minlength=len(documents.files))
        progress.begin("writing", int(is_read.sum()), "documents")
        for number, name in enumerate(parts):
            of_part = part_of == number
            write_kept(documents, job.new / name, of_part, counts, index_only=index_only, advance=progress.advance)
        progress.begin("reporting", 1, "pages")
        sizes = np.unique(cluster_of, return_counts=True)[1]
        result = SplitResult(
            documents=len(sketches),
            unreadable=len(faults),
            clusters=len(sizes),
            largest=int(sizes.max(initial=0)),
            num_capped=num_capped,
            parts=tuple(
                Part(
                    name=name,
                    share=float(share),
                    documents=int(np.sum(part_of == number)),
                    classes=_counts(classes[part_of == number], names),
                )
                for number, (name, share) in enumerate(parts.items())
            ),
            options=options,
        )
        places = DocumentPlaces(documents, files, rows)
        write_unreadable(job.new, places, faults)
        write_split_page(job.new / "report.html", out.name, documents.content, result, places, faults)
        progress.advance(1)
        documents.require_unchanged()
        job.finish({**asdict(result), "inputs": cleaning_facts(map(str, paths))})
    for part in result.parts:
        if not part.documents:
            _LOG.warning("%s: the part %s has no documents: %s", out, quoted(part.name), why_empty(part, result))
    return result


def why_empty(part: Part, result: SplitResult) -> str:
    """Why a part has no documents, in words."""
    documents = result.documents - result.unreadable
    if not documents:
        return "the data set has none"
    if part.share * documents < 1 - _ROUNDING:
        return f"its share of {documents:,} is {part.share * documents:.2g}"
    return f"its share of {documents:,} is {part.share * documents:.4g}, and the clusters are too large for it"


def assign_parts(
    cluster_of: NDArray[np.int64], classes: NDArray[np.int64], shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """The number of each document's part, int64 [documents].

    Clusters go from the largest to the smallest. Each goes to the part where it lowers the squares of what is still needed most,
    of each class and of all documents, relative to the part's share. Clusters of one document then fill what each part needs of
    each class: without larger clusters, numbers of a class and of all documents differ by less than one from the part's share.
    Among clusters of one size the order is that of a keyed hash.

    Args:
        cluster_of: A document of each document's cluster, int64 [documents].
        classes: Number of each document's class, from 0, int64 [documents].
        shares: Of the parts; they sum up to 1.
        seed: Of the hash.

    Source:
        Largest first by what is needed is iterative stratification (Sechidis, Tsoumakas and Vlahavas 2011).
    """
    _, cluster, sizes = np.unique(cluster_of, return_inverse=True, return_counts=True)
    num_classes = int(classes.max(initial=-1)) + 1
    need = np.outer(shares, np.bincount(classes, minlength=num_classes))  # [parts, classes] documents
    total_need = need.sum(axis=1)
    part_of = np.zeros(len(cluster_of), np.int64)
    hashes = np.array(
        [xxhash.xxh3_64_intdigest(f"{seed} {document}".encode()) for document in range(len(cluster_of))], np.uint64
    )
    by_cluster = np.argsort(cluster, kind="stable")
    members = np.split(by_cluster, np.cumsum(sizes)[:-1]) if len(sizes) else []
    large = [number for number in range(len(sizes)) if sizes[number] > 1]
    for number in sorted(large, key=lambda number: (-sizes[number], hashes[members[number][0]])):
        size = int(sizes[number])
        of_class, counts = np.unique(classes[members[number]], return_counts=True)
        rise = counts @ counts + size**2 - 2 * (need[:, of_class] @ counts + total_need * size)
        part = int(np.argmin(rise / np.array(shares)))
        part_of[members[number]] = part
        need[part, of_class] -= counts
        total_need[part] -= size
    alone = np.flatnonzero(sizes[cluster] == 1)
    alone = alone[np.argsort(hashes[alone])]
    drawn, first = np.unique(classes[alone], return_index=True)
    drawn = drawn[np.argsort(first)]  # classes in the order of the hash, too
    alone = alone[np.argsort(classes[alone], kind="stable")]
    sizes_alone = np.bincount(classes[alone], minlength=num_classes)
    wanted = np.maximum(need[:, drawn].T, 0.0)
    wanted *= sizes_alone[drawn, None] / np.maximum(wanted.sum(axis=1, keepdims=True), _ROUNDING)
    begins = np.cumsum(sizes_alone) - sizes_alone
    for number, counts in zip(drawn.tolist(), round_to_totals(wanted, total_need), strict=True):
        begin = begins[number]
        part_of[alone[begin : begin + sizes_alone[number]]] = np.repeat(np.arange(len(shares)), counts)
    return part_of


def round_to_totals(wanted: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round a table up or down to whole numbers so that its rows keep their sums and its columns come near to ``totals``.

    What a row's rounding takes from a column, the next rows give back: if ``totals`` are the sums of the columns, these differ
    by less than one, as a rule.

    Args:
        wanted: Numbers from 0 on, float64 [rows, columns], whose rows sum up to whole numbers.
        totals: Wanted sums of the columns, float64 [columns].
    """
    counts = np.floor(wanted + _ROUNDING).astype(np.int64)
    can_rise = wanted - counts > _ROUNDING
    lacking = totals - wanted.sum(axis=0)
    for row, rises in enumerate(np.round(wanted.sum(axis=1)).astype(np.int64) - counts.sum(axis=1)):
        lacking += wanted[row] - counts[row]
        chosen = np.argsort(np.where(can_rise[row], -lacking, np.inf), kind="stable")[:rises]
        counts[row, chosen] += 1
        can_rise[row, chosen] = False
        lacking[chosen] -= 1
    return counts


def _groups(documents: Documents, field: str, sketches: Sketches, progress: Progress) -> NDArray[np.int64]:
    """The number of each document's group."""
    return read_values(documents, field, sketches, group_of, stage="reading groups", progress=progress)[0]


def _classes(
    documents: Documents, field: str | None, sketches: Sketches, progress: Progress
) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each document's class, and the names of the classes."""
    if field is None:
        return np.zeros(len(sketches), np.int64), []
    labels = read_labels(documents, field, sketches, stage="reading classes", progress=progress)
    return labels.of, list(labels.names)


def _counts(classes: NDArray[np.int64], names: Sequence[str]) -> dict[str, int]:
    found = Counter(classes.tolist())
    return {name: found[number] for number, name in enumerate(names)}


def _check_parts(parts: Mapping[str, Fraction]) -> None:
    if sum(parts.values()) != 1 or any(share <= 0 for share in parts.values()):
        given = ", ".join(f"{name}={float(share):g}" for name, share in parts.items())
        raise refused(f"parts {given}", "the shares of all parts are above 0 and sum up to 1", "train=0.9 test=0.1")
    for name in parts:
        if not name or name in (".", "..") or "/" in name or "\0" in name or name in _RESERVED:
            raise refused(
                f"a part {quoted(name)}",
                f"a part is the name of a folder, and none of {', '.join(_RESERVED)}",
                "train, valid or test",
            )

"""Reports of cleaned data sets, leaks and splits: how many documents, why, and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.distribution_charts import distribution_sections
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Content
from unisono.quality.duplicates.comparison import threshold_of
from unisono.quality.duplicates.near_duplicates import Duplicates
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically

if TYPE_CHECKING:
    from unisono.quality.clean import CleanResult
    from unisono.quality.leak import LeakResult
    from unisono.quality.split import SplitResult

_BLUE: Final = "#1f6feb"
_BINS: Final = 40
_MAX_BARS: Final = 50
_OF_REASON: Final = 5  # documents that are shown
_WORDS: Final = {
    "dedup.exact": "copies of the same content",
    "dedup.near": "near-duplicates",
    "decontaminate": "quotes of a benchmark",
}
_MAX_FAULTS: Final = 50
_LARGEST: Final = 20  # clusters that are listed
_PICTURED: Final = 24  # pairs of images
_HEADS: Final[dict[Content, str]] = {"text": "its text", "images": "its size"}
_ALIKE: Final[dict[Content, str]] = {"text": "share boilerplate", "images": "look alike"}


def write_clean_page(
    path: Path,
    name: str,
    content: Content,
    result: CleanResult,
    duplicates: Duplicates,
    places: DocumentPlaces,
    dropped: Mapping[str, NDArray[np.int64]],
    faults: Mapping[int, str],
) -> None:
    """Write the report of a data set that was cleaned to ``path``.

    Args:
        path: The file.
        name: Of the data set.
        content: What its documents are.
        result: What is shown.
        duplicates: Documents that were dropped as copies.
        places: Says where documents are.
        dropped: Documents that each limit or step dropped.
        faults: Why documents could not be read, by their number.
    """
    num_dropped = result.documents - result.kept
    figures = [Figure("documents", f"{result.documents:,}"), Figure("kept", f"{result.kept:,}")]
    figures += [Figure(_WORDS.get(reason, reason), f"{count:,}") for reason, count in result.dropped.items()]
    if result.changed:
        figures.append(Figure("kept, with another text", f"{result.changed:,}"))
    figures += [Figure(f"{kind} replaced", f"{count:,}") for kind, count in result.masked.items()]
    sections = [
        *distribution_sections(result.distributions, content),
        *_languages(result),
        *_similarities(duplicates, threshold_of(content, result.recipe.dedup)),
        *_clusters(duplicates),
        *_examples(places, duplicates, content),
        *_dropped(places, dropped, content),
        *unreadable_section(places, faults),
    ]
    if result.num_capped:
        note = (
            f"{result.num_capped:,} kept documents had more candidates than they were compared with. Such documents "
            f"{_ALIKE[content]}; a near-duplicate among them may have been kept."
        )
        sections.append(Section(title="Not compared", note=note))
    sections += _unchecked(result)
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"Cleaning of {printable(name)}",
        verdict=f"{num_dropped:,} of {result.documents:,} documents ({num_dropped / max(result.documents, 1):.1%}) were dropped.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def _dropped(places: DocumentPlaces, dropped: Mapping[str, NDArray[np.int64]], content: Content) -> list[Section]:
    """The first documents that each limit dropped."""
    documents = {
        reason: of_reason[:_OF_REASON].tolist()
        for reason, of_reason in dropped.items()
        if reason != "unreadable" and not reason.startswith("dedup.")
    }
    shown = [document for of_reason in documents.values() for document in of_reason]
    pictures: list[str] = []
    if content == "images" and shown:
        reasons = [reason.removeprefix("images.") for reason, of_reason in documents.items() for _ in of_reason]
        pictures = [places.picture(shown, reasons)]
    texts = places.texts(shown)
    rows = [
        [reason, *map(printable, texts[document])] for reason, of_reason in documents.items() for document in of_reason
    ]
    table = Table(head=("dropped by", "document", _HEADS[content]), rows=rows)
    section = Section(title="Dropped by a limit", note="The first of each.", pictures=pictures, tables=[table])
    return [section] if rows else []


def _languages(result: CleanResult) -> list[Section]:
    if not result.languages:
        return []
    total = sum(result.languages.values())
    rows = [[code, f"{count:,}", f"{count / total:.2%}"] for code, count in result.languages.items()]
    note = "Of the documents that pass all other limits of the filter."
    return [Section(title="Languages", note=note, tables=[Table(head=("language", "documents", "share"), rows=rows)])]


def _unchecked(result: CleanResult) -> list[Section]:
    """Items of benchmarks that are too short."""
    if not result.unchecked_items:
        return []
    note = (
        f"{sum(result.unchecked_items.values()):,} of {result.benchmark_items:,} items of the benchmarks have fewer than "
        f"{result.recipe.decontaminate.ngram} words. Documents that quote them were not looked for."
    )
    rows = [[printable(file), f"{count:,}"] for file, count in result.unchecked_items.items()]
    return [Section(title="Benchmarks", note=note, tables=[Table(head=("file", "items not looked for"), rows=rows)])]


def unreadable_section(places: DocumentPlaces, faults: Mapping[int, str]) -> list[Section]:
    """The first documents that could not be read, and why; no section if all could."""
    if not faults:
        return []
    shown = sorted(faults.items())[:_MAX_FAULTS]
    rows = [[printable(places.place_text(document)), printable(fault)] for document, fault in shown]
    table = Table(head=("document", "fault"), rows=rows, left_out=len(faults) - len(shown))
    return [Section(title="Not read", tables=[table])]


def _similarities(duplicates: Duplicates, near: float) -> list[Section]:
    values = duplicates.similarity[~duplicates.exact].tolist()
    if not values:
        return []
    bins = {"start": near, "end": 1.0, "size": max((1.0 - near) / _BINS, 1e-3)}
    data = [{"type": "histogram", "x": values, "xbins": bins, "marker": {"color": _BLUE}}]
    layout = curve_layout("", "near-duplicates", height=280) | {"xaxis": {"title": {"text": "similarity"}}}
    return [
        Section(title="Similarity of near-duplicates", charts=[{"id": "similarities", "data": data, "layout": layout}])
    ]


def _clusters(duplicates: Duplicates) -> list[Section]:
    if not len(duplicates):
        return []
    sizes, clusters = np.unique(np.unique(duplicates.of, return_counts=True)[1] + 1, return_counts=True)
    rows = [[f"{size:,}", f"{count:,}"] for size, count in zip(sizes[::-1], clusters[::-1], strict=True)]
    table = Table(
        head=("documents in a cluster", "clusters"), rows=rows[:_LARGEST], left_out=max(0, len(rows) - _LARGEST)
    )
    note = "A cluster is a document and the copies that point to it."
    return [Section(title="Clusters", note=note, tables=[table])]


def _examples(places: DocumentPlaces, duplicates: Duplicates, content: Content) -> list[Section]:
    """The first near-duplicates, each before the document that it is near."""
    examples = places.examples(duplicates)
    if not examples:
        return []
    pictures: list[str] = []
    if content == "images":
        near = duplicates.select(np.flatnonzero(~duplicates.exact)[:_PICTURED])
        both = np.stack((near.document, near.of), axis=1).ravel().tolist()
        captions = [caption for value in near.similarity.tolist() for caption in (f"{value:.3f}", "is near this")]
        pictures = [places.picture(both, captions)]
    rows = [
        [f"{example.similarity:.3f}", *map(printable, (example.place, example.text, example.of_place, example.of_text))]
        for example in examples
    ]
    table = Table(head=("similarity", "duplicate", _HEADS[content], "of", _HEADS[content]), rows=rows)
    note = "The first near-duplicates."
    return [Section(title="Examples", note=note, pictures=pictures, tables=[table])]


def write_leak_page(
    path: Path,
    content: Content,
    result: LeakResult,
    duplicates: Duplicates,
    places: DocumentPlaces,
    faults: Mapping[int, str],
) -> None:
    """Write the report of a search for leaks to ``path``.

    Args:
        path: The file.
        content: What documents are.
        result: What is shown.
        duplicates: The documents that leak.
        places: Says where documents are.
        faults: Why documents were left out as unreadable, by their number.
    """
    leaking = len(duplicates)
    evaluated = sum(split.documents for split in result.splits[1:])
    rows = [
        [printable(split.path), f"{split.documents:,}", f"{split.unreadable:,}", f"{split.exact:,}", f"{split.near:,}"]
        for split in result.splits
    ]
    head = ("set", "documents", "not read", "same content in a set before it", "near one of a set before it")
    table = Table(head=head, rows=rows)
    sections = [
        Section(title="Sets", tables=[table]),
        *_similarities(duplicates, threshold_of(content, result.options)),
        *_examples(places, duplicates, content),
        *unreadable_section(places, faults),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title="Leaks between sets",
        verdict=f"{leaking:,} of {evaluated:,} documents of the evaluation sets are in a set before theirs.",
        figures=[
            Figure("documents compared", f"{sum(split.documents - split.unreadable for split in result.splits):,}")
        ],
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def write_split_page(
    path: Path, name: str, content: Content, result: SplitResult, places: DocumentPlaces, faults: Mapping[int, str]
) -> None:
    """Write the report of a split to ``path``.

    Args:
        path: The file.
        name: Of the data set.
        content: What its documents are.
        result: The outcome.
        places: Says where documents are.
        faults: Why documents were left out as unreadable, by their number.
    """
    rows = [
        [
            printable(part.name),
            f"{part.share:.3%}",
            f"{part.documents / max(result.documents - result.unreadable, 1):.3%}",
            f"{part.documents:,}",
        ]
        for part in result.parts
    ]
    sections = [Section(title="Parts", tables=[Table(head=("part", "asked for", "is", "documents"), rows=rows)])]
    total = sum((Counter(part.classes) for part in result.parts), Counter[str]())
    if total:
        labels = [label for label, _ in total.most_common(_MAX_BARS)]
        data = [
            {
                "type": "bar",
                "name": printable(part.name),
                "x": [printable(label) for label in labels],
                "y": [part.classes[label] / max(part.documents, 1) for label in labels],
            }
            for part in result.parts
        ]
        layout = curve_layout("", "share of the part", height=320) | {"xaxis": {"type": "category"}, "barmode": "group"}
        sections.append(Section(title="Classes", charts=[{"id": "classes", "data": data, "layout": layout}]))
    sections += unreadable_section(places, faults)
    figures = [
        Figure("documents", f"{result.documents:,}"),
        Figure("clusters", f"{result.clusters:,}"),
        Figure("documents in the largest cluster", f"{result.largest:,}"),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"Parts of {printable(name)}",
        verdict=_split_verdict(content, result),
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def _split_verdict(content: Content, result: SplitResult) -> str:
    """What was kept within one part: the comparison finds nearly all near-duplicates, not all (``near_duplicates``)."""
    if not threshold_of(content, result.options):
        return "Documents with the same content are in one part. Near-duplicates were not looked for."
    capped = f"; {result.num_capped:,} that {_ALIKE[content]} may have more of them" if result.num_capped else ""
    return f"Near-duplicates that were found are in one part{capped}."

"""Clean a data set by a recipe: change texts, drop documents, say why. The inputs do not change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_facts
from unisono.data.image.decoding import image_format
from unisono.data.per_file_arrays import require_array_names
from unisono.quality.cleaning.benchmarks import quote_records, read_benchmarks
from unisono.quality.cleaning.languages import language_version
from unisono.quality.cleaning.measures import Distribution, distributions_of
from unisono.quality.cleaning.normalization import normalize_text
from unisono.quality.cleaning.personal_data import mask_personal_data
from unisono.quality.cleaning.steps import CONTAMINATED, MISNAMED, REASONS, UNREADABLE
from unisono.quality.cleaning.version import step_versions
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Content, find_documents
from unisono.quality.duplicates.comparison import near_documents
from unisono.quality.duplicates.near_duplicates import Duplicates, exact_duplicates, merged, redirect_copies
from unisono.quality.duplicates.sketch_folder import Sketches, sketch_all
from unisono.quality.duplicates.sketches import sketch_version
from unisono.quality.job_folder import DROPPED_FILE, open_job
from unisono.quality.kept_rows import require_writable, write_kept
from unisono.quality.options import CleanRecipe, require_settings_of
from unisono.quality.page import write_clean_page
from unisono.quality.progress import SILENT, Progress
from unisono.quality.unreadable import unreadable_documents, unreadable_record
from unisono.storage.json_lines import write_json_lines

EXACT: Final = "dedup.exact"
NEAR: Final = "dedup.near"
_REASONS: Final = (*REASONS, EXACT, NEAR)


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanResult:
    """How many documents were kept, dropped and changed, and why.

    Attributes:
        documents: Number of documents.
        kept: Of these in the new data set.
        dropped: Of these dropped, by the limit or step that did, in the order of the recipe.
        changed: Kept documents whose text is another now.
        masked: Pieces of personal data that were replaced in kept documents, by kind.
        languages: Documents of each language, the most first, of those that pass all other limits; empty if the recipe has none.
        num_capped: Kept documents with more candidates than the limit, so some pairs were not compared.
        benchmark_items: Texts of the benchmarks.
        unchecked_items: Of these such with too few words to be looked for, by the name of their file.
        recipe: The settings of all steps.
        recipe_hash: xxh3-128 of the recipe, with the hash of its benchmarks in place of their paths, and the versions of the
            cleaning code and of packages, as JSON with sorted keys.
        sketch: Algorithm of the signatures and its version; empty without near-duplicates.
        distributions: Histograms of the lengths, before and after, and of what each limit is compared with.
    """

    documents: int
    kept: int
    dropped: dict[str, int]
    changed: int
    masked: dict[str, int]
    languages: dict[str, int]
    num_capped: int
    benchmark_items: int
    unchecked_items: dict[str, int]
    recipe: CleanRecipe
    recipe_hash: str
    sketch: str
    distributions: tuple[Distribution, ...] = ()


def clean(
    paths: Sequence[Path],
    out: Path,
    recipe: CleanRecipe | None = None,
    *,
    column: str | None = None,
    skips_unreadable: bool = False,
    index_only: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> CleanResult:
    """Write a cleaned copy of a data set; of duplicates the first document is kept.

    The folder gets ``data/`` (files of the inputs' names and formats), ``kept/`` (row indices of each file, as ``.npy``),
    ``dropped.jsonl`` (each dropped document, and why), ``report.json`` and ``report.html``.

    Args:
        paths: Tables, text files, images or folders of these.
        out: A new folder; or that of the same job, which was killed and goes on, or is done already.
        recipe: The steps.
        column: Field of the text or image in tables; see ``find_documents``.
        skips_unreadable: Whether documents that cannot be read are dropped, or an error.
        index_only: Whether to write no ``data/``.
        workers: Processes; 0 is this one; or the address of a Ray cluster. By default by cores and size. The result is the same.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it; or a language is not known.
        DataError: A file is damaged, has no text, or has changed meanwhile.
        ExtraError: A package that a step needs is not installed.
    """
    recipe = recipe or CleanRecipe()
    documents = find_documents(paths, column=column, skips_unreadable=skips_unreadable)
    require_settings_of(recipe, documents.content)
    is_text = documents.content == "text"
    sketch = sketch_version(recipe.dedup, documents.content)
    language_model = language_version(recipe.filter) if is_text else ""
    require_array_names(file.name for file in documents.files)
    if not index_only:
        require_writable(documents)
    if is_text and recipe.normalize.enabled:
        normalize_text(
            "", repairs_encoding=recipe.normalize.repairs_encoding
        )  # a package that is missing leaves no folder
    benchmarks = read_benchmarks(recipe, column, progress)
    steps = {
        # the paths of benchmarks depend on the folder in which the command runs
        "recipe": asdict(replace(recipe, decontaminate=replace(recipe.decontaminate, against=()))),
        "benchmarks": benchmarks.hashes_digest(),
        "sketch": sketch,
        "language_model": language_model,
        "versions": step_versions(recipe),
    }
    identity = {
        **steps,
        "benchmark_items": benchmarks.digest(),
        "documents": documents.identity(),
        "index_only": index_only,
    }
    inputs = [*paths, *map(Path, recipe.decontaminate.against)]
    with open_job(out, identity, inputs, skips_unreadable=skips_unreadable) as job:
        if job.is_done:
            return job.result(CleanResult)
        sketches = sketch_all(
            documents, job.sketches, recipe, benchmark_hashes=benchmarks.hashes, workers=workers, progress=progress
        )
        documents.require_unchanged()
        drops = skips_unreadable or (not is_text and recipe.images.enabled)
        faults = unreadable_documents(documents, sketches, drops=drops)
        duplicates, num_capped = _duplicates(documents.content, sketches, recipe, progress)
        reasons = sketches.reasons()
        reasons[duplicates.document] = np.where(duplicates.exact, _REASONS.index(EXACT), _REASONS.index(NEAR))
        files, rows = sketches.places()
        counts = np.bincount(files, minlength=len(documents.files))
        dropped = {name: np.flatnonzero(reasons == number) for number, name in enumerate(_REASONS) if number}
        is_kept = reasons == 0
        progress.begin("writing", int(is_kept.sum()), "documents")
        changed = write_kept(
            documents,
            job.new,
            is_kept,
            counts,
            sketches.changed(),
            index_only=index_only,
            advance=progress.advance,
        )
        progress.begin("reporting", 1, "pages")
        result = CleanResult(
            documents=len(sketches),
            kept=int(is_kept.sum()),
            dropped={name: len(numbers) for name, numbers in dropped.items() if len(numbers)},
            changed=changed,
            masked=sketches.masked(is_kept),
            languages=_languages(sketches),
            num_capped=num_capped,
            benchmark_items=len(benchmarks.places),
            unchecked_items=benchmarks.unchecked,
            recipe=recipe,
            recipe_hash=xxhash.xxh3_128_hexdigest(json.dumps(steps, sort_keys=True).encode()),
            sketch=sketch,
            distributions=distributions_of(documents.content, sketches.measures_by_chunk(), is_kept, recipe),
        )
        # the report shows no personal data that the data set has no more
        places = DocumentPlaces(documents, files, rows, lambda text: mask_personal_data(text, recipe.mask.kinds)[0])
        quoting = dropped[CONTAMINATED]
        texts = documents.contents(list(zip(files[quoting].tolist(), rows[quoting].tolist(), strict=True)))
        quotes = quote_records((text for _, text in texts if isinstance(text, str)), recipe, benchmarks)
        misnamed = dropped[MISNAMED]
        images = documents.contents(list(zip(files[misnamed].tolist(), rows[misnamed].tolist(), strict=True)))
        formats = (image_format(image) for _, image in images if isinstance(image, bytes))
        write_json_lines(
            job.new / DROPPED_FILE, _dropped(reasons, sketches, places, duplicates, quotes, formats, faults)
        )
        page = job.new / "report.html"
        write_clean_page(page, out.name, documents.content, result, duplicates, places, dropped, faults)
        progress.advance(1)
        documents.require_unchanged()
        job.finish({**asdict(result), "inputs": cleaning_facts(map(str, paths))})
    return result


def _duplicates(
    content: Content, sketches: Sketches, recipe: CleanRecipe, progress: Progress
) -> tuple[Duplicates, int]:
    """Duplicates among the documents that are left, and how many had too many candidates."""
    exact = exact_duplicates(sketches)
    if not recipe.dedup.enabled:
        return exact.select(slice(0)), 0
    near, num_capped = near_documents(content, sketches, recipe.dedup, exact.document, progress=progress)
    return merged(*redirect_copies(exact, near), near), num_capped


def _languages(sketches: Sketches) -> dict[str, int]:
    """Documents of each language, the most first."""
    counts = Counter(code.decode() for code in sketches.languages().tolist() if code)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _dropped(
    reasons: NDArray[np.uint8],
    sketches: Sketches,
    places: DocumentPlaces,
    duplicates: Duplicates,
    quotes: Iterator[dict[str, Any]],
    formats: Iterator[str | None],
    faults: Mapping[int, str],
) -> Iterator[dict[str, Any]]:
    """A record of each dropped document: its place, the reason, and what explains it.

    Args:
        reasons: Of each document, uint8 [documents].
        sketches: Of all documents.
        places: Says where documents are.
        duplicates: Documents that were dropped as copies.
        quotes: What each document quotes that was dropped for it.
        formats: Format of each image that was dropped because its name has the suffix of another.
        faults: Why documents could not be read, by their number.
    """
    values, languages = sketches.values(), sketches.languages()
    copies = zip(duplicates.of.tolist(), duplicates.similarity.tolist(), strict=True)
    for document in np.flatnonzero(reasons).tolist():
        reason = _REASONS[reasons[document]]
        record = {**places.place(document), "reason": reason}
        if reason in (EXACT, NEAR):
            of, similarity = next(copies)
            record |= {"duplicate_of": places.place(of), "similarity": round(similarity, 4)}
        elif reason == CONTAMINATED:
            record |= next(quotes, {})  # none if the file has changed meanwhile, which ends the job
        elif reason == UNREADABLE:
            record = unreadable_record(places, document, faults[document])
        elif reason == MISNAMED:
            record["format"] = next(formats, None)
        elif reason.startswith(("filter.", "images.")):
            record["value"] = round(float(values[document]), 4)
            if languages[document]:
                record["language"] = languages[document].decode()
        yield record

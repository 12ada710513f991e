"""Find labels that are likely wrong: conflicts among similar documents, and suspects by the losses of a cross-validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from pathlib import Path
from typing import Any, Final

from unisono.data.sample_losses import read_losses
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Content
from unisono.quality.duplicates.sketch_folder import sketch_all
from unisono.quality.duplicates.sketches import sketch_version
from unisono.quality.job_folder import open_job
from unisono.quality.labels.conflicts import ConflictGroup, find_conflicts
from unisono.quality.labels.inputs import find_labelled_documents
from unisono.quality.labels.marks import MarkedData
from unisono.quality.labels.page import Card, Entry, write_label_page
from unisono.quality.labels.suspects import NO_SUSPECTS, LabelSuspects, find_losses_file, find_suspects
from unisono.quality.labels.values import Labels, data_set_digest, read_labels
from unisono.quality.options import DuplicateOptions, only_dedup, require_settings_of
from unisono.quality.progress import SILENT, Progress
from unisono.quality.unreadable import unreadable_documents, write_unreadable
from unisono.storage.files import file_digest
from unisono.storage.json_lines import write_json_lines

CONFLICTS_FILE: Final = "conflicts.jsonl"
SUSPECTS_FILE: Final = "suspects.jsonl"
MOST: Final = 200  # conflicts, and suspects, that the page shows
_NEAR_CHANCE: Final = 0.9
_MEMBERS: Final = 8  # documents of a conflict that the page shows


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsResult:
    """Labels that contradict each other or are likely wrong.

    Attributes:
        content: What documents are.
        documents: Number of documents.
        unreadable: Of these, documents that could not be read, or have no label, and were left out.
        label: The field of the labels.
        labels: Documents of each label, the most common one first.
        conflicts: Groups of documents that are the same or near each other and have different labels.
        in_conflict: Documents in these groups.
        num_capped: Texts or images with more candidates of other labels than the limit, so some pairs were not compared.
        ranked_by: ``probabilities``, ``losses``, or empty without either.
        evaluated: Documents that have a loss.
        mean_loss: Of these, by models that did not train on them; None without losses.
        chance_loss: The loss of models that know only the share of each label: the entropy of the shares; None unless there are
            probabilities.
        suspects: Of these, documents whose label is likely wrong.
        confusions: Suspects by label and suggested label: ``[label, suggested, count]``, the most common first.
        options: What counted as the same document.
    """

    content: Content
    documents: int
    unreadable: int
    label: str
    labels: dict[str, int]
    conflicts: int
    in_conflict: int
    num_capped: int
    ranked_by: str
    evaluated: int
    mean_loss: float | None
    chance_loss: float | None
    suspects: int
    confusions: tuple[tuple[str, str, int], ...]
    options: DuplicateOptions

    @property
    def is_near_chance(self) -> bool:
        """Whether the models hardly know more than the shares of the labels: what they contradict is not likely wrong then."""
        return (
            self.mean_loss is not None
            and self.chance_loss is not None
            and self.mean_loss > _NEAR_CHANCE * self.chance_loss
        )


def find_label_errors(
    paths: Sequence[Path],
    out: Path,
    label: str | None = None,
    *,
    losses: Path | None = None,
    options: DuplicateOptions | None = None,
    column: str | None = None,
    whole_rows: bool = False,
    skips_unreadable: bool = False,
    most: int = MOST,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> LabelsResult:
    """Find documents whose label is likely wrong.

    The folder gets ``conflicts.jsonl``, ``suspects.jsonl``, ``report.json`` and ``report.html``, where they can be marked, and
    ``dropped.jsonl`` if documents were left out.

    Args:
        paths: Tables, image records, folders of these, or folders of images.
        out: A new folder; or that of the same job, which was killed and goes on, or is done already.
        label: Field of the labels. By default ``targets``, that of data sets that have only one: files that are one document
            each, such as images, and image records.
        losses: A folder of ``unisono tune folds --sample-losses`` over the same files, or the file of losses itself.
        options: What counts as the same document.
        column: Field of the text or image; see ``find_documents``.
        whole_rows: Whether a document is its row without the label, for tables without text.
        skips_unreadable: Whether documents that cannot be read, or have no label, are left out, or an error.
        most: Conflicts, and suspects, that the page shows.
        workers: Processes; 0 is this one; or the address of a Ray cluster. By default by cores and size. The result is the same.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it; or settings are not for such data.
        DataError: A file is damaged, has no text, image or label, or has changed meanwhile; the losses are of other data.
        ExtraError: rensa is not installed.
    """
    options = options or DuplicateOptions()
    documents, label = find_labelled_documents(paths, label, column=column, whole_rows=whole_rows)
    documents = replace(documents, skips_unreadable=skips_unreadable)
    require_settings_of(only_dedup(options), documents.content)
    sketch = sketch_version(options, documents.content)
    found = None if losses is None else find_losses_file(losses)
    identity = {
        "labels": asdict(options),
        "field": label,
        "documents": documents.identity(),
        "whole_rows": whole_rows,
        "losses": None if found is None else file_digest(found),
        "most": most,
        "sketch": sketch,
    }
    with open_job(out, identity, paths, skips_unreadable=skips_unreadable) as job:
        if job.is_done:
            return job.result(LabelsResult)
        sketches = sketch_all(documents, job.sketches, only_dedup(options), workers=workers, progress=progress)
        labels = read_labels(documents, label, sketches, least=2, progress=progress)
        faults = unreadable_documents(documents, sketches, drops=skips_unreadable)
        files, rows = sketches.places()
        suspects = NO_SUSPECTS if found is None else find_suspects(read_losses(found), documents, files, labels)
        documents.require_unchanged()
        places = DocumentPlaces(documents, files, rows)
        groups, num_capped = find_conflicts(documents.content, sketches, options, labels.of, progress)
        progress.begin("reporting", 1, "pages")
        suspect_lines = (_suspect_line(suspects, rank, labels, places) for rank in range(len(suspects)))
        write_json_lines(job.new / CONFLICTS_FILE, (_conflict_line(group, labels, places) for group in groups))
        write_json_lines(job.new / SUSPECTS_FILE, suspect_lines)
        write_unreadable(job.new, places, faults)
        result = LabelsResult(
            content=documents.content,
            documents=len(sketches),
            unreadable=len(faults),
            label=label,
            labels=labels.counts(),
            conflicts=len(groups),
            in_conflict=sum(len(group.documents) for group in groups),
            num_capped=num_capped,
            ranked_by=suspects.ranked_by,
            evaluated=suspects.evaluated,
            mean_loss=suspects.mean_loss if suspects.evaluated else None,
            chance_loss=suspects.chance_loss,
            suspects=len(suspects),
            confusions=_confusions(suspects, labels),
            options=options,
        )
        marked = MarkedData(
            data_set_digest=data_set_digest(documents, sketches, labels),
            label=label,
            text_column=column,
            whole_rows=whole_rows,
            skips_unreadable=skips_unreadable,
        )
        shown = [_conflict_entry(group, labels, documents.content) for group in _clearest(groups)[:most]]
        shown += [_suspect_entry(suspects, rank, labels) for rank in range(min(len(suspects), most))]
        write_label_page(job.new / "report.html", out.name, result, marked, shown, labels, places, faults)
        progress.advance(1)
        documents.require_unchanged()
        job.finish(asdict(result))
    return result


def _suspect_line(suspects: LabelSuspects, rank: int, labels: Labels, places: DocumentPlaces) -> dict[str, Any]:
    """A line of ``suspects.jsonl``."""
    document = int(suspects.document[rank])
    line = {**places.place(document), "label": labels.name(document)}
    line |= {"loss": float(suspects.loss[rank]), "fold": int(suspects.fold[rank])}
    score = round(float(suspects.score[rank]), 6)
    if suspects.ranked_by == "losses":
        return line | {"z_score": score}
    return line | {
        "suggested": labels.names[suspects.suggested[rank]],
        "probability": round(float(suspects.own[rank]), 6),
        "suggested_probability": round(float(suspects.other[rank]), 6),
        "margin": score,
    }


def _suspect_entry(suspects: LabelSuspects, rank: int, labels: Labels) -> Entry:
    """A suspect as the page shows it, beside typical documents of the suggested label."""
    document, title = int(suspects.document[rank]), f"Suspect {rank + 1}"
    name = labels.name(document)
    if suspects.ranked_by == "losses":
        why = f"its loss is {float(suspects.score[rank]):.1f} deviations above the median of {name}"
        return Entry(title=title, why=why, cards=[Card(document=document, suggested=None)])
    suggested = int(suspects.suggested[rank])
    other, own = float(suspects.other[rank]), float(suspects.own[rank])
    return Entry(
        title=title,
        why=f"a model that did not train on it gives {labels.names[suggested]} {other:.3f}, and {name} {own:.3f}",
        cards=[Card(document=document, suggested=suggested)],
        beside=[other for other in suspects.typical[suggested] if other != document],
    )


def _confusions(suspects: LabelSuspects, labels: Labels) -> tuple[tuple[str, str, int], ...]:
    if suspects.ranked_by != "probabilities":
        return ()
    pairs = Counter(zip(labels.of[suspects.document].tolist(), suspects.suggested.tolist(), strict=True))
    names = labels.names
    return tuple((names[label], names[suggested], count) for (label, suggested), count in pairs.most_common())


def _clearest(groups: Iterable[ConflictGroup]) -> list[ConflictGroup]:
    """Groups with a majority first, and the most similar ones first."""
    return sorted(groups, key=lambda group: (group.majority is None, -max(group.similarity), group.documents[0]))


def _conflict_entry(group: ConflictGroup, labels: Labels, content: Content) -> Entry:
    members = _minority_first(group, labels)
    counts = ", ".join(f"{labels.names[number]} {count}" for number, count in group.counts.items())
    least = min(group.similarity)
    noun, same = ("images", "the same image") if content == "images" else ("texts", "the same text")
    how = same if least == 1 else f"{noun} with a similarity of {floor(100 * least) / 100:.2f} or more"
    return Entry(
        title=f"{len(members)} documents in conflict",
        why=f"{how}, with the labels {counts}",
        cards=[
            Card(document=document, suggested=group.suggested(int(labels.of[document])))
            for document in members[:_MEMBERS]
        ],
        left_out=max(0, len(members) - _MEMBERS),
    )


def _minority_first(group: ConflictGroup, labels: Labels) -> list[int]:
    """The documents of each label in turn, so that those that are shown have all labels; the rarest label first."""
    turns: Counter[int] = Counter()
    order: list[tuple[int, int, int]] = []
    for document in group.documents:
        number = int(labels.of[document])
        turns[number] += 1
        order.append((turns[number], group.counts[number], document))
    return [document for _, _, document in sorted(order)]


def _conflict_line(group: ConflictGroup, labels: Labels, places: DocumentPlaces) -> dict[str, Any]:
    majority = group.majority
    return {
        "labels": {labels.names[number]: count for number, count in group.counts.items()},
        "majority": None if majority is None else labels.names[majority],
        "documents": [
            {**places.place(document), "label": labels.name(document), "similarity": round(similarity, 4)}
            for document, similarity in zip(group.documents, group.similarity, strict=True)
        ],
    }

"""Pages of labels: suspects and conflicts with buttons that mark them, and what became of the marks.

A page has each picture once, whatever number of cards shows it: its script gives it to the cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unisono.quality.document_places import DocumentPlaces
from unisono.quality.labels.marks import VERSION, MarkedData
from unisono.quality.labels.values import Labels
from unisono.quality.page import unreadable_section
from unisono.report.charts import curve_layout
from unisono.report.html import json_in_script, render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically

if TYPE_CHECKING:
    from unisono.quality.labels.label_errors import LabelsResult
    from unisono.quality.labels.relabel import RelabelResult

_MAX_BARS: Final = 50
_MAX_ROWS: Final = 20
MAX_PICTURES: Final = 2000  # different ones on a page, of about 8 KB each

MARKING: Final = (
    SUMMARY
    + """<style>
.bar { position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--line); padding: .6rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: .75rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
.card.beside { border-style: dashed; }
.card p { margin: 0 0 .4rem; overflow-wrap: anywhere; }
.card pre { margin: 0 0 .5rem; max-height: 16rem; overflow-y: auto; }
.card img { display: block; width: 160px; height: 160px; margin: 0 0 .5rem; object-fit: contain; background: var(--box); }
button { font: inherit; font-size: .85rem; color: var(--ink); background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; padding: .2rem .6rem; cursor: pointer; overflow-wrap: anywhere; }
input { font: inherit; font-size: .85rem; color: var(--ink); background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .2rem .4rem; width: 9rem; }
button[aria-pressed="true"], input.chosen { color: var(--paper); background: var(--accent); border-color: var(--accent); }
</style>
{% macro content(card) %}{% if card.picture is none %}<pre>{{ card.text }}</pre>{% else %}
<img data-picture="{{ card.picture }}" alt="{{ card.place }}">{% endif %}{% endmacro %}
{% if entries %}<h2>Look through and mark</h2>
<p class="note">Nothing changes by a mark: unisono data relabel takes the file of marks and writes a new data set. Marks that
are not saved are lost when the page is closed.</p>
{% if pictures_left_out %}<p class="note">{{ pictures_left_out }} further pictures are not on this page.</p>
{% endif %}<div class="bar"><button id="save">Save marks</button> <span id="count"></span></div>
{% for entry in entries %}<h2>{{ entry.title }}</h2>
<p class="note">{{ entry.why }}.</p>
<div class="cards">
{% for card in entry.cards %}<div class="card" data-card="{{ card.number }}">
<p>{{ card.place }}</p>
{{ content(card) }}
<p>label: <b>{{ card.label }}</b></p>
<button data-action="keep">Keep</button>
{% if card.suggested is not none %}<button data-action="change">Change to {{ card.suggested }}</button>
{% endif %}<input list="label-names" placeholder="Another label" aria-label="Another label">
<button data-action="drop">Drop</button>
<button data-action="skip">Skip</button>
</div>
{% endfor %}{% for card in entry.beside %}<div class="card beside">
<p>{{ card.place }}, typical of its label</p>
{{ content(card) }}
<p>label: <b>{{ card.label }}</b></p>
</div>
{% endfor %}</div>
{% if entry.left_out %}<p class="note">{{ entry.left_out }} more documents of this conflict are in conflicts.jsonl.</p>
{% endif %}{% endfor %}<datalist id="label-names"></datalist>
<script type="application/json" id="marked-data">{{ marked_data }}</script>
<script type="application/json" id="pictures">{{ pictures }}</script>
{% endif %}"""
)

MARK_SCRIPT: Final = """
(() => {
  const source = document.getElementById("marked-data");
  if (!source) return;
  const {about, labels, documents} = JSON.parse(source.textContent), marks = new Map();
  document.getElementById("label-names").append(...labels.map(name => new Option(name, name)));
  const pictures = JSON.parse(document.getElementById("pictures").textContent);
  for (const image of document.querySelectorAll("[data-picture]")) image.src = pictures[image.dataset.picture];
  const cards = [...document.querySelectorAll("[data-card]")];
  let isSaved = true;
  const markOf = (card, action) => {
    const [file, row, label, to] = documents[card.dataset.card];
    return action === "change" ? {file, row, label, action, to} : {file, row, label, action};
  };
  const keyOf = mark => JSON.stringify([mark.file, mark.row]);
  const show = () => {
    for (const card of cards) {
      const found = marks.get(keyOf(markOf(card, "keep"))), input = card.querySelector("input");
      for (const button of card.querySelectorAll("button")) {
        const mark = markOf(card, button.dataset.action);
        button.setAttribute("aria-pressed", Boolean(found) && found.action === mark.action && found.to === mark.to);
      }
      const isOther = found?.action === "change" && found.to !== documents[card.dataset.card][3];
      input.classList.toggle("chosen", isOther);
      input.value = isOther ? found.to : "";
    }
    document.getElementById("count").textContent = `${marks.size} marked${isSaved ? "" : ", not saved"}`;
  };
  const take = (mark, isSkipped) => {
    if (isSkipped) marks.delete(keyOf(mark)); else marks.set(keyOf(mark), mark);
    isSaved = false;
    show();
  };
  for (const card of cards) {
    card.addEventListener("click", event => {
      const action = event.target.dataset.action;
      if (action) take(markOf(card, action), action === "skip");
    });
    card.querySelector("input").addEventListener("change", event => {
      const input = event.target, mark = markOf(card, "keep"), isKnown = labels.includes(input.value);
      input.setCustomValidity(isKnown || !input.value ? "" : "No document has this label");
      if (!input.reportValidity()) return;
      if (!input.value) take(mark, true);
      else take(input.value === mark.label ? mark : {...mark, action: "change", to: input.value}, false);
    });
  }
  document.getElementById("save").addEventListener("click", () => {
    const text = JSON.stringify({...about, marks: [...marks.values()]}, null, 1) + "\\n";
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
    link.download = "marks.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    isSaved = true;
    show();
  });
  addEventListener("beforeunload", event => { if (!isSaved) event.preventDefault(); });
  show();
})();
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A document that can be marked; ``suggested`` is the number of the label that it likely has, or None."""

    document: int
    suggested: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A suspect or a conflict.

    Attributes:
        title: Its heading.
        why: Why it is one, without a full stop.
        cards: Its documents.
        beside: Documents to compare them with.
        left_out: Documents that are not shown.
    """

    title: str
    why: str
    cards: Sequence[Card]
    beside: Sequence[int] = ()
    left_out: int = 0


def write_label_page(
    path: Path,
    name: str,
    result: LabelsResult,
    marked: MarkedData,
    entries: Sequence[Entry],
    labels: Labels,
    places: DocumentPlaces,
    faults: Mapping[int, str],
) -> None:
    """Write the page of suspects and conflicts to ``path``.

    Args:
        path: The file.
        name: Of the folder.
        result: What is shown.
        marked: The data set that marks are of.
        entries: What is shown.
        labels: Of the documents.
        places: Says where documents are, and their texts or pictures.
        faults: Why documents were left out as unreadable, by their number.
    """
    cards = [card for entry in entries for card in entry.cards]
    numbers = {id(card): number for number, card in enumerate(cards)}
    all_shown = list(dict.fromkeys(document for entry in entries for document in _documents_of(entry)))
    texts = places.texts(all_shown)
    pictures = places.pictures(all_shown[:MAX_PICTURES]) if result.content == "images" else {}

    def shown(document: int) -> dict[str, Any]:
        place, text = texts[document]
        return {
            "place": printable(place),
            "text": printable(text, newlines=True),
            "picture": document if document in pictures else None,
            "label": printable(labels.name(document)),
        }

    documents = [
        [*places.place(card.document).values(), labels.name(card.document), _name(labels, card.suggested)]
        for card in cards
    ]
    figures = [
        Figure("documents", f"{result.documents:,}"),
        Figure("labels", f"{len(result.labels):,}"),
        Figure("conflicts", f"{result.conflicts:,}"),
        Figure("documents in conflict", f"{result.in_conflict:,}"),
    ]
    if result.ranked_by:
        figures += [
            Figure("suspects", f"{result.suspects:,}"),
            Figure("documents with a loss", f"{result.evaluated:,}"),
        ]
    sections = [*_counts_section(result.labels), *_confusions_section(result), *unreadable_section(places, faults)]
    page = render_page(
        MARKING,
        [chart for section in sections for chart in section.charts],
        title=f"Labels of {printable(name)}",
        verdict=_verdict(result),
        scripts=[MARK_SCRIPT],
        figures=figures,
        sections=sections,
        entries=[
            {
                "title": printable(entry.title),
                "why": printable(entry.why),
                "cards": [
                    {
                        "number": numbers[id(card)],
                        "suggested": None if card.suggested is None else printable(labels.names[card.suggested]),
                        **shown(card.document),
                    }
                    for card in entry.cards
                ],
                "beside": [shown(document) for document in entry.beside],
                "left_out": entry.left_out,
            }
            for entry in entries
        ],
        marked_data=json_in_script(
            {
                "about": {"version": VERSION, **msgspec.to_builtins(marked)},
                "labels": list(labels.counts()),
                "documents": documents,
            }
        ),
        pictures=json_in_script(pictures),
        pictures_left_out=len(all_shown) - len(pictures) if result.content == "images" else 0,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def _documents_of(entry: Entry) -> list[int]:
    return [*(card.document for card in entry.cards), *entry.beside]


def _name(labels: Labels, number: int | None) -> str | None:
    return None if number is None else labels.names[number]


def _verdict(result: LabelsResult) -> str:
    conflicts = f"{result.in_conflict:,} of {result.documents:,} documents are in conflict with another label"
    if result.num_capped:
        why = "look alike" if result.content == "images" else "share boilerplate"
        conflicts += f", and perhaps some of {result.num_capped:,} that {why}"
    return conflicts + (f"; {result.suspects:,} labels are suspect by their loss." if result.ranked_by else ".")


def _counts_section(counts: Mapping[str, int]) -> list[Section]:
    names = list(counts)[:_MAX_BARS]
    data = [{"type": "bar", "x": [printable(name) for name in names], "y": [counts[name] for name in names]}]
    layout = curve_layout("", "documents", height=280) | {"xaxis": {"type": "category"}}
    return [Section(title="Labels", charts=[{"id": "labels", "data": data, "layout": layout}])] if names else []


def _confusions_section(result: LabelsResult) -> list[Section]:
    rows = [
        [printable(label), printable(suggested), f"{count:,}"]
        for label, suggested, count in result.confusions[:_MAX_ROWS]
    ]
    left_out = max(0, len(result.confusions) - _MAX_ROWS)
    table = Table(head=("label", "suggested", "suspects"), rows=rows, left_out=left_out)
    return [Section(title="Suspects by label", tables=[table])] if rows else []


def write_relabel_page(
    path: Path,
    name: str,
    result: RelabelResult,
    counts: Mapping[str, int],
    places: DocumentPlaces,
    faults: Mapping[int, str],
) -> None:
    """Write what became of marks to ``path``.

    Args:
        path: The file.
        name: Of the folder.
        result: The outcome.
        counts: Documents of each label before.
        places: Says where documents are.
        faults: Why documents were left out as unreadable, by their number.
    """
    rows = [[printable(label), printable(to), f"{count:,}"] for label, to, count in result.changes]
    table = Table(head=("label", "is now", "documents"), rows=rows)
    sections = [Section(title="Changed labels", tables=[table])] if rows else []
    sections += [*_counts_section(counts), *unreadable_section(places, faults)]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"New labels of {printable(name)}",
        verdict=f"{result.changed:,} labels were changed and {result.num_dropped:,} documents dropped.",
        figures=[
            Figure("documents", f"{result.documents:,}"),
            Figure("kept", f"{result.kept:,}"),
            Figure("labels confirmed", f"{result.confirmed:,}"),
        ],
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))

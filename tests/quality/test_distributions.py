"""Histograms of lengths and of what limits are compared with: each document counts once, wherever the job was cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import planted
import pytest
from pictures import blurred, jpeg, photograph, write_photographs
from report_pages import charts, words

from unisono.data.convert.table_files import Table, write_table
from unisono.quality.clean import CleanResult, clean
from unisono.quality.cleaning.measures import MEASURES, Distribution, distributions_of
from unisono.quality.duplicates import sketch_folder
from unisono.quality.options import CleanRecipe, DuplicateOptions, FilterOptions, ImageOptions, only_dedup

NO_DUPLICATES = DuplicateOptions(enabled=False)


def of(result: CleanResult, measure: str) -> Distribution:
    (found,) = [each for each in result.distributions if each.measure == measure]
    return found


def beyond(distribution: Distribution, limit: str) -> int:
    """Documents in bins that lie wholly beyond a limit; the limit is an edge."""
    at = distribution.edges.index(distribution.limits[limit])
    if limit.startswith("min_"):
        return sum(distribution.counts[:at]) + distribution.below
    return sum(distribution.counts[at:]) + distribution.above


def test_values_are_counted_part_by_part() -> None:
    names = MEASURES["text"]
    values = np.full((5, len(names)), np.nan)
    values[:, names.index("chars")] = [100, 120, 0, 10_000, np.nan]
    values[:, names.index("new_chars")] = [100, 50, 0, 10_000, np.nan]
    values[:, names.index("words")] = [9, 20, 0, 2e7, np.nan]
    recipe = CleanRecipe(filter=FilterOptions(min_words=10))
    is_kept = np.array([False, True, False, False, False])
    whole = distributions_of("text", [(0, values)], is_kept, recipe)
    assert distributions_of("text", [(0, values[:2]), (2, values[2:])], is_kept, recipe) == whole
    before, after, by_words = whole[:3]
    assert (before.measure, before.of, before.documents, before.below) == ("chars", "read", 4, 1)
    assert before.edges[:2] == (100, 133.4)
    assert before.counts == (2, *[0] * 15, 1)
    assert before.edges[-2:] == (10_000, 13_340)
    assert (after.measure, after.of, after.documents, after.counts) == ("new_chars", "kept", 1, (1,))
    assert by_words.limits == {"min_words": 10, "max_words": 100_000}
    assert (by_words.documents, by_words.below, by_words.above, sum(by_words.counts)) == (4, 1, 1, 2)
    assert all(each.documents == 0 and each.counts == each.edges == () for each in whole[3:])


def test_only_limits_that_are_on_have_a_histogram() -> None:
    recipe = CleanRecipe(filter=FilterOptions(min_words=0, max_words=0, max_symbol_ratio=0))
    found = distributions_of("text", [], np.zeros(0, np.bool_), recipe)
    measures = [each.measure for each in found]
    assert measures[:3] == ["chars", "new_chars", "mean_word_chars"]
    assert "words" not in measures
    assert "symbol_ratio" not in measures
    assert "language_prob" not in measures  # no language is looked for
    only = distributions_of("text", [], np.zeros(0, np.bool_), only_dedup(DuplicateOptions()))
    assert [each.measure for each in only] == ["chars", "new_chars"]
    images = CleanRecipe(images=ImageOptions(max_blur=0))
    measures = [each.measure for each in distributions_of("images", [], np.zeros(0, np.bool_), images)]
    assert measures == ["pixels", "pixels", "side_px", "contrast"]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_limit_is_seen_to_cut(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 16)
    rng = np.random.default_rng(0)
    long = planted.documents(40, rng, words=(60, 80))
    short = planted.documents(9, rng, words=(2, 9))
    symbols = ["#tag word " * 60] * 5
    texts = [*long, *short, *symbols, "  \r\n" * 30 + long[0] + " and more"]
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in texts]))
    recipe = CleanRecipe(filter=FilterOptions(min_words=10, min_mean_word_chars=0), dedup=NO_DUPLICATES)
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe, workers=workers)
    assert result.dropped == {"filter.min_words": 9, "filter.max_symbol_ratio": 5}
    assert of(result, "words").documents == 55
    assert beyond(of(result, "words"), "min_words") == 9
    assert of(result, "mean_word_chars").documents == of(result, "symbol_ratio").documents == 46
    assert beyond(of(result, "symbol_ratio"), "max_symbol_ratio") == 5
    assert of(result, "duplicate_5gram_frac").documents == 41
    assert (of(result, "chars").documents, of(result, "new_chars").documents) == (55, 41)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [each["counts"] for each in report["distributions"]] == [list(each.counts) for each in result.distributions]
    assert clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe) == result
    page = (tmp_path / "out/report.html").read_text()
    assert "each picture has the documents that pass all limits before it" in words(page)
    drawn = charts(page)
    assert [sum(bars["y"]) for bars in drawn["lengths"]["data"]] == [55, 41]
    assert [note["text"] for note in drawn["measure0"]["layout"]["annotations"]] == [
        "min 10",
        "max 100,000",
    ]
    assert drawn["measure0"]["layout"]["title"]["text"] == "words: 55 documents"
    assert [line["x0"] for line in drawn["measure0"]["layout"]["shapes"]] == [1, 5]  # powers of ten
    low, high = drawn["measure0"]["layout"]["xaxis"]["range"]
    assert low < 1
    assert high > 5
    assert drawn["measure2"]["layout"]["shapes"][0]["x0"] == 0.1


def test_lengths_after_are_those_of_the_kept_texts(tmp_path: Path) -> None:
    text = "one  \r\ntwo\r\n" * 20
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text}] * 3))
    recipe = CleanRecipe(filter=FilterOptions(enabled=False), dedup=DuplicateOptions(near=0.0))
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    new = json.loads((tmp_path / "out/data/a.jsonl").read_text())["text"]
    before, after = of(result, "chars"), of(result, "new_chars")
    assert before.edges[0] <= len(text) < before.edges[1]
    assert after.edges[0] <= len(new) < after.edges[1]
    assert (before.counts, after.counts) == ((3,), (1,))


def test_limits_of_images(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_photographs(folder, range(4))
    (folder / "blurred.jpg").write_bytes(jpeg(blurred(photograph(9))))
    (folder / "tiny.jpg").write_bytes(jpeg(photograph(8).resize((40, 20))))
    (folder / "broken.jpg").write_bytes(b"no image")
    result = clean([folder], tmp_path / "out", CleanRecipe(dedup=NO_DUPLICATES))
    assert result.dropped == {"unreadable": 1, "images.min_side_px": 1, "images.max_blur": 1}
    before, after, side, contrast, blur = result.distributions
    assert (before.documents, after.documents) == (6, 4)
    assert (side.documents, contrast.documents, blur.documents) == (6, 5, 5)
    assert side.counts[0] == 1
    assert side.edges[1] < side.limits["min_side_px"] == 32
    assert beyond(blur, "max_blur") == 1
    drawn = charts((tmp_path / "out/report.html").read_text())
    assert set(drawn) >= {"lengths", "measure0", "measure1", "measure2"}
    assert [note["text"] for note in drawn["measure2"]["layout"]["annotations"]] == ["max 0.65"]

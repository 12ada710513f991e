"""Duplicates found by sketches against all pairs compared one by one, and planted pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import planted
import pytest

from unisono.quality.documents import find_documents
from unisono.quality.duplicates.clusters import find_clusters
from unisono.quality.duplicates.near_duplicates import MAX_BUCKET, exact_duplicates, jaccard, near_duplicates
from unisono.quality.duplicates.shingles import shingle_hashes
from unisono.quality.duplicates.sketch_folder import Sketches, sketch_all
from unisono.quality.duplicates.sketches import MAX_SHINGLES, bands_and_rows
from unisono.quality.options import DuplicateOptions, only_dedup

rensa = pytest.importorskip("rensa")


def sketched(tmp_path: Path, texts: list[str]) -> Sketches:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "sketches").mkdir()
    return sketch_all(find_documents([source]), tmp_path / "sketches", only_dedup(DuplicateOptions()), workers=0)


def found(sketches: Sketches, near: float = 0.8) -> list[tuple[int, int, float]]:
    """(document, of, similarity) of each near-duplicate."""
    duplicates, _ = near_duplicates(sketches, near, exact_duplicates(sketches).document)
    assert not duplicates.exact.any()
    return list(zip(duplicates.document.tolist(), duplicates.of.tolist(), duplicates.similarity.tolist(), strict=True))


@pytest.mark.parametrize("near", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_pairs_at_the_threshold_become_candidates(near: float) -> None:
    bands, rows = bands_and_rows(near, 128)
    assert bands * rows <= 128
    assert 1 - (1 - near**rows) ** bands >= 0.995
    assert near == 1.0 or 1 - (1 - near ** (rows + 1)) ** (128 // (rows + 1)) < 0.995


def test_a_signature_too_short_for_the_threshold_has_one_value_per_band() -> None:
    assert bands_and_rows(0.1, 16) == (16, 1)


def with_copies(count: int, rng: np.random.Generator) -> list[str]:
    """Documents of which every fourth has a copy with edits, from none that is near to one that is barely changed."""
    texts = planted.documents(count, rng)
    copies = [planted.edited(text, int(rng.integers(1, 12)), rng) for text in texts[::4]]
    mixed = [*texts, *copies]
    return [mixed[number] for number in rng.permutation(len(mixed))]


def check_against_brute_force(tmp_path: Path, count: int, seed: int) -> None:
    texts = with_copies(count, np.random.default_rng(seed))
    pairs = planted.pairs_above(texts, 0.8)
    assert len(pairs) > count / 20
    duplicates = found(sketched(tmp_path, texts))
    for document, of, similarity in duplicates:
        assert (of, document) in pairs  # precision: they were compared by their shingles
        assert similarity == pytest.approx(planted.jaccard(texts[of], texts[document]))
    dropped = {document for document, _, _ in duplicates}
    assert not dropped & {of for _, of, _ in duplicates}
    remaining = [pair for pair in pairs if not dropped & set(pair)]
    assert 1 - len(remaining) / len(pairs) >= 0.97


def test_against_brute_force(tmp_path: Path) -> None:
    check_against_brute_force(tmp_path, 1200, seed=1)


@pytest.mark.full
def test_against_brute_force_with_ten_thousand_documents(tmp_path: Path) -> None:
    check_against_brute_force(tmp_path, 8000, seed=2)


@pytest.mark.full
def test_planted_pairs_among_a_hundred_thousand_documents(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    texts = planted.documents(98_000, rng)
    originals = rng.choice(len(texts), size=2000, replace=False)
    copies = [planted.edited(texts[number], int(rng.integers(1, 4)), rng) for number in originals]
    near = [planted.jaccard(texts[number], copy) >= 0.8 for number, copy in zip(originals, copies, strict=True)]
    duplicates = {document: of for document, of, _ in found(sketched(tmp_path, texts + copies))}
    expected = {len(texts) + number: int(originals[number]) for number in range(2000) if near[number]}
    assert len(expected) > 1000
    hits = sum(duplicates.get(copy) == original for copy, original in expected.items())
    assert hits / len(expected) >= 0.97
    assert all(planted.jaccard((texts + copies)[copy], (texts + copies)[of]) >= 0.8 for copy, of in duplicates.items())


def test_exact_copies_point_to_the_first(tmp_path: Path) -> None:
    copies = exact_duplicates(sketched(tmp_path, ["b", "a", "b", "", "a", "b", ""]))
    assert copies.document.tolist() == [2, 4, 5, 6]
    assert copies.of.tolist() == [0, 1, 0, 3]
    assert copies.exact.all()


def test_a_chain_of_small_differences_keeps_its_ends(tmp_path: Path) -> None:
    """Each text is near the one before it, and the last has little in common with the first."""
    words = [f"word{number}" for number in range(260)]
    texts = [" ".join(words[number * 8 : number * 8 + 120]) for number in range(16)]
    assert planted.jaccard(texts[0], texts[1]) >= 0.8
    assert planted.jaccard(texts[0], texts[-1]) == 0
    duplicates = found(sketched(tmp_path, texts))
    for document, of, _ in duplicates:
        assert planted.jaccard(texts[document], texts[of]) >= 0.8
    kept = set(range(16)) - {document for document, _, _ in duplicates}
    assert kept == {0, 2, 4, 6, 8, 10, 12, 14}


def test_texts_without_words_are_not_near(tmp_path: Path) -> None:
    assert found(sketched(tmp_path, ["…", "!", "?", "-"])) == []


def test_identical_rows_cost_one_comparison(tmp_path: Path) -> None:
    texts = ["the same line of a log file again and again"] * 20_000
    sketches = sketched(tmp_path, texts)
    copies = exact_duplicates(sketches)
    assert len(copies) == 19_999
    assert set(copies.of.tolist()) == {0}
    near, num_capped = near_duplicates(sketches, 0.8, copies.document)
    assert (len(near), num_capped) == (0, 0)


def test_many_documents_with_one_boilerplate_are_counted(tmp_path: Path) -> None:
    """They share most bands and are all different: a limited number is compared, which the result says."""
    rng = np.random.default_rng(4)
    boilerplate = planted.documents(1, rng, words=(150, 151))[0]
    texts = [f"{boilerplate} {part}" for part in planted.documents(2 * MAX_BUCKET, rng, words=(60, 61))]
    sketches = sketched(tmp_path, texts)
    duplicates, num_capped = near_duplicates(sketches, 0.8, np.zeros(0, np.int64))
    assert len(duplicates) == 0
    assert num_capped > 0


def family(rng: np.random.Generator, number: int) -> tuple[list[str], list[int], list[str]]:
    """Documents of one boilerplate that are below the limit, late ones of them, and copies of these with another word."""
    boilerplate = planted.documents(1, rng, words=(200, 201))[0]
    texts = [f"{boilerplate} {part}" for part in planted.documents(number, rng, words=(30, 31))]
    sources = sorted(rng.choice(np.arange(number // 2, number), 60, replace=False).tolist())
    copies = [" ".join("other" if i == 215 else word for i, word in enumerate(texts[at].split())) for at in sources]
    assert planted.jaccard(texts[0], texts[1]) < 0.8
    assert planted.jaccard(texts[sources[0]], copies[0]) > 0.95
    return texts, sources, copies


def test_copies_are_found_among_many_documents_with_one_boilerplate(tmp_path: Path) -> None:
    """Those before them share more bands with a copy than its source does, but bands that all share."""
    texts, sources, copies = family(np.random.default_rng(6), 3 * MAX_BUCKET)
    duplicates = found(sketched(tmp_path, [*texts, *copies]))
    assert [(document, of) for document, of, _ in duplicates] == [(len(texts) + i, at) for i, at in enumerate(sources)]


def test_documents_of_another_split_are_found_among_many_with_one_boilerplate(tmp_path: Path) -> None:
    texts, sources, copies = family(np.random.default_rng(7), 3 * MAX_BUCKET)
    sketches = sketched(tmp_path, [*texts, *copies])
    split_of = np.repeat([0, 1], [len(texts), len(copies)])
    duplicates, _ = near_duplicates(sketches, 0.8, np.zeros(0, np.int64), split_of)
    assert duplicates.of.tolist() == sources
    cluster_of, _ = find_clusters("text", sketches, DuplicateOptions(), None)
    assert cluster_of[len(texts) :].tolist() == sources


def test_only_left_out_documents_of_another_split_are_counted(tmp_path: Path) -> None:
    """A document that shares nothing is compared with all that there is for it, however alike the others are."""
    texts, _, _ = family(np.random.default_rng(8), 2 * MAX_BUCKET)
    alone = planted.documents(1, np.random.default_rng(9), words=(80, 81))
    split_of = np.repeat([0, 1], [len(texts), 1])
    duplicates, num_capped = near_duplicates(sketched(tmp_path, [*texts, *alone]), 0.8, np.zeros(0, np.int64), split_of)
    assert (len(duplicates), num_capped) == (0, 0)


def test_jaccard_of_sets_that_were_cut() -> None:
    rng = np.random.default_rng(5)
    values = rng.choice(1 << 32, size=220_000, replace=False).astype(np.uint32)
    first, second = np.sort(values[:200_000]), np.sort(values[20_000:])
    truth = 180_000 / 220_000
    assert jaccard(first[:MAX_SHINGLES], second[:MAX_SHINGLES]) == pytest.approx(truth, abs=0.005)
    assert jaccard(first[:MAX_SHINGLES], first[:MAX_SHINGLES]) == 1.0


def test_a_large_document_and_its_copy(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(300_000)]
    text = " ".join(words)
    words[100_000] = "other"
    ((_, _, similarity),) = found(sketched(tmp_path, [text, " ".join(words)]))
    assert similarity > 0.99
    assert len(shingle_hashes([text], 5)[0]) > MAX_SHINGLES


def test_documents_of_one_split_are_not_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    (text,) = planted.documents(1, rng)
    texts = [text, planted.edited(text, 1, rng), planted.edited(text, 1, rng), planted.edited(text, 1, rng)]
    sketches = sketched(tmp_path, texts)
    duplicates, _ = near_duplicates(sketches, 0.8, np.zeros(0, np.int64), np.array([0, 0, 1, 1]))
    assert duplicates.document.tolist() == [2, 3]
    assert set(duplicates.of.tolist()) <= {0, 1}

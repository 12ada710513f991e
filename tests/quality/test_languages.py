"""Documents in other languages are dropped, and the report counts all languages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from unisono.data.convert.table_files import Table, write_table
from unisono.errors import ConfigError, ExtraError
from unisono.quality import clean as clean_module
from unisono.quality.clean import clean
from unisono.quality.cleaning import languages
from unisono.quality.duplicates import sketch_folder
from unisono.quality.options import CleanRecipe, DuplicateOptions, FilterOptions, NormalizeOptions

TEXTS = {
    "en": "The old man walked down to the harbour every morning and talked to the fishermen about the weather.",
    "de": "Der alte Mann ging jeden Morgen zum Hafen hinunter und sprach mit den Fischern über das Wetter.",
    "fr": "Le vieil homme descendait chaque matin au port et parlait du temps avec les pêcheurs.",
    "es": "El viejo bajaba cada mañana al puerto y hablaba del tiempo con los pescadores.",
    "pl": "Stary człowiek schodził każdego ranka do portu i rozmawiał z rybakami o pogodzie.",
    "ru": "Старик каждое утро спускался в гавань и разговаривал с рыбаками о погоде.",
    "zh": "老人每天早晨走到港口,和渔民们谈论天气。",
    "ja": "老人は毎朝港まで歩いて行き、漁師たちと天気について話した。",
}
NO_LANGUAGE = "x 17 q 3.14 zz 0x7f"
DEDUP = DuplicateOptions(near=0.0)
_OFF = {"min_words": 1, "min_mean_word_chars": 0, "max_mean_word_chars": 0, "min_alphabetic_word_frac": 0}


def recipe(**options: object) -> CleanRecipe:
    return CleanRecipe(filter=FilterOptions(**_OFF | options), dedup=DEDUP)


def write(path: Path, *texts: str) -> Path:
    write_table(path, Table(rows=[{"text": text} for text in texts]))
    return path


@pytest.fixture
def model() -> None:
    """The package with the model."""
    pytest.importorskip("py3langid")


@pytest.mark.parametrize("code", TEXTS)
@pytest.mark.usefixtures("model")
def test_languages(code: str) -> None:
    language, score = languages.find_language(TEXTS[code])
    assert language == code
    assert 0.5 < score <= 1.0


@pytest.mark.parametrize("text", ["", "\ud800", "x"])
@pytest.mark.usefixtures("model")
def test_text_without_a_language_has_a_low_probability(text: str) -> None:
    assert languages.find_language(text)[1] < 0.1


@pytest.mark.usefixtures("model")
def test_only_the_begin_is_read() -> None:
    begin = TEXTS["de"] * 100
    assert languages.find_language(begin + TEXTS["en"] * 10_000) == languages.find_language(begin)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("model")
def test_other_languages_are_dropped(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 3)
    path = write(tmp_path / "a.jsonl", "", *TEXTS.values(), TEXTS["de"], NO_LANGUAGE)
    result = clean([path], tmp_path / "out", recipe(languages=("de", "en")), workers=workers)
    assert result.dropped == {"filter.min_words": 1, "filter.languages": 7, "dedup.exact": 1}
    assert sum(result.languages.values()) == 10
    assert next(iter(result.languages.items())) == ("de", 2)
    assert {code: result.languages[code] for code in TEXTS} == dict.fromkeys(TEXTS, 1) | {"de": 2}
    records = [json.loads(line) for line in (tmp_path / "out/dropped.jsonl").read_text().splitlines()]
    assert records[0] == {"file": "a.jsonl", "row": 0, "reason": "filter.min_words", "value": 0.0}
    for record, code in zip(records[1:7], list(TEXTS)[2:], strict=True):
        assert (record["reason"], record["language"]) == ("filter.languages", code)
        assert (code, record["value"]) == languages.find_language(TEXTS[code])
    assert "language" not in records[7]  # the copy
    page = (tmp_path / "out/report.html").read_text()
    assert re.search(r"Languages</h2>.*>de</t[dh]>\s*<t[dh][^>]*>2</t[dh]>\s*<t[dh][^>]*>20\.00%", page, re.DOTALL)


@pytest.mark.usefixtures("model")
def test_the_probability_of_a_language(tmp_path: Path) -> None:
    language, score = languages.find_language(NO_LANGUAGE)
    path = write(tmp_path / "a.jsonl", TEXTS["en"], NO_LANGUAGE)
    options = {"languages": ("en", language)}
    result = clean([path], tmp_path / "out", recipe(**options, min_language_prob=score + 1e-4))
    assert result.dropped == {"filter.min_language_prob": 1}
    (record,) = map(json.loads, (tmp_path / "out/dropped.jsonl").read_text().splitlines())
    assert (record["language"], record["value"]) == (language, score)
    assert clean([path], tmp_path / "all", recipe(**options, min_language_prob=score)).dropped == {}


def test_without_the_filter_no_language_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    path = write(tmp_path / "a.jsonl", *TEXTS.values())
    assert clean([path], tmp_path / "out", recipe()).languages == {}
    off = CleanRecipe(
        normalize=NormalizeOptions(enabled=False), filter=FilterOptions(enabled=False, languages=("de",)), dedup=DEDUP
    )
    assert clean([path], tmp_path / "off", off).kept == len(TEXTS)


@pytest.mark.parametrize(
    ("codes", "given", "nearest"),
    [
        (("en", "zh-CN", "DE"), "filter.languages with 'zh-CN', 'DE'", "'zh' for 'zh-CN', 'de' for 'DE'"),
        (("deu",), "filter.languages with 'deu'", "one of: ace, af, "),
    ],
)
@pytest.mark.usefixtures("model")
def test_languages_that_are_not_known(tmp_path: Path, codes: tuple[str, ...], given: str, nearest: str) -> None:
    path = write(tmp_path / "a.jsonl", *TEXTS.values())
    with pytest.raises(ConfigError) as error:
        clean([path], tmp_path / "out", recipe(languages=codes))
    assert given in str(error.value)
    assert f"try:  {nearest}" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("model")
def test_another_version_of_the_model_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS["de"])
    clean([path], tmp_path / "out", recipe(languages=("de",)))
    monkeypatch.setattr(clean_module, "language_version", lambda options: "py3langid 0.0.1")
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        clean([path], tmp_path / "out", recipe(languages=("de",)))


def test_the_filter_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    languages._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ExtraError, match=r"pip install 'unisono\[quality\]'"):
        clean([write(tmp_path / "a.jsonl", "a")], tmp_path / "out", recipe(languages=("de",)))
    assert not (tmp_path / "out").exists()

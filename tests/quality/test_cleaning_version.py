"""The version of the cleaning code: it says when a document becomes another than before, and it is part of a job's identity."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import ConfigError
from unisono.quality.clean import clean
from unisono.quality.cleaning import version as version_module
from unisono.quality.cleaning.benchmarks import read_benchmarks
from unisono.quality.cleaning.image_checks import check_image
from unisono.quality.cleaning.steps import REASONS, clean_documents
from unisono.quality.cleaning.version import CLEANING_VERSION
from unisono.quality.options import (
    MASK_KINDS,
    CleanRecipe,
    DecontaminateOptions,
    DuplicateOptions,
    FilterOptions,
    ImageOptions,
    MaskOptions,
    NormalizeOptions,
)

# BLAKE2b-128 of the outcome of ``outcome``, by version. A new outcome is a new line here and a new version in the code. With it
# come texts of which it makes something else; outcomes of versions before it are of the texts of their time.
OUTCOMES = {
    1: "f252d75740d00c25411f2fe0671250ef",
    2: "557913d085a1380c10b52c5313a75340",
    3: "731ac1d4e84b4f36c421321dddf5033c",
}

PROSE = (
    "The garden behind the house was quiet, and the old man who had built it sat under the tree that he liked most. "
    "He thought of nothing, or of the letters that he had never answered; the wind moved the leaves above him."
)
TEXTS = [
    PROSE,
    PROSE.replace("e", "e\u0301").replace(" ", "\u00a0"),
    "short",
    "",
    f"{PROSE}\r\n\r\n\r\n\r\nand more \t\r\n" * 2,
    " ".join("xyz" for _ in range(120)),
    "\n".join(f"- item number {number} of the list" for number in range(30)),
    "\n".join(f"line {number} goes on and on ..." for number in range(30)),
    " ".join(f"{number:04d}" for number in range(90)),
    " ".join("#tag" for _ in range(80)),
    " ".join("a" for _ in range(80)),
    " ".join("pneumonoultramicroscopic" for _ in range(80)),
    f"{PROSE} Write to jane@example.org or +49 30 901820, from 8.8.8.8, with 4111 1111 1111 1111 12/26.",
    f"{PROSE} The account is AT61 1904 3002 3457 3201 BIC: X, the key AKIAIOSFODNN7EXAMPLE.",
    f"{PROSE} Which of the planets of the sun has the most moons, and how many of them are larger than ours?",
    " ".join(["go on"] * 30 + [f"{'n' * 200}{number}" for number in range(2)]),
    f"{PROSE} Write to jörg@müller.de, or to 张三@例子.中国 with\n-----BEGIN PRIVATE KEY-----\n{'MIIEvQIBADAN' * 4}\n",
    f"{PROSE} \u0f40" + "\u0f73" * 40,
    "清晨的海湾里停着一条旧船，水手们坐在甲板上等待涨潮，谁也没有说话。岸上先传来一阵钟声，随后又是一阵。",
    f"{PROSE}\ud800\u200b\x00 中文和日本語のテキスト {PROSE}",
]
BENCHMARK = "Which of the planets of the sun has the most moons, and how many of them are larger than ours?"


def pictures() -> list[bytes]:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    noise, ramp = rng.integers(0, 256, (64, 80), np.uint8), np.tile(np.arange(80, dtype=np.uint8) * 3, (64, 1))
    encoded: list[bytes] = [b"no image"]
    for pixels in (noise, ramp, np.full((64, 64), 7, np.uint8), noise[:16, :16]):
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "PNG")
        encoded.append(file.getvalue())
    turned = image.Exif()
    turned[0x0112] = 6
    file = io.BytesIO()
    image.fromarray(ramp).save(file, "JPEG", exif=turned)
    return [*encoded, file.getvalue()]


def outcome(folder: Path) -> str:
    """All that the steps make of a small corpus, without those steps whose packages have versions of their own."""
    (folder / "benchmark.txt").write_text(BENCHMARK)
    kinds: list[object] = []
    for recipe in (
        CleanRecipe(
            filter=FilterOptions(min_words=20),
            mask=MaskOptions(kinds=MASK_KINDS),
            decontaminate=DecontaminateOptions(against=(str(folder / "benchmark.txt"),)),
        ),
        CleanRecipe(normalize=NormalizeOptions(enabled=False), filter=FilterOptions(min_words=20, max_words=95)),
    ):
        texts = [text.encode("utf-8", "surrogatepass") for text in TEXTS]
        cleaned = clean_documents([*texts, None], recipe, read_benchmarks(recipe, None).hashes)
        kinds.append([text.hex() for text in cleaned.texts])
        kinds.append([REASONS[number] for number in cleaned.reasons.tolist()])
        kinds.append([round(value, 6) for value in cleaned.values.tolist()])
        kinds.append(cleaned.masked.tolist())
    for suffix in (".png", ".jpg"):
        checked = [check_image(picture, suffix, ImageOptions()) for picture in pictures()]
        kinds.append([(each.failed, round(each.value, 4)) for each in checked])
        kinds.append([bool(each.thumbnail[:, 0].std() > each.thumbnail[0].std()) for each in checked])
    return hashlib.blake2b(json.dumps(kinds).encode(), digest_size=16).hexdigest()


def test_another_outcome_is_another_version(tmp_path: Path) -> None:
    found = outcome(tmp_path)
    assert OUTCOMES.get(CLEANING_VERSION) == found, (
        "what becomes of documents has changed: raise CLEANING_VERSION in quality/cleaning/version.py, and add its outcome here"
    )
    assert max(OUTCOMES) == CLEANING_VERSION
    assert len(set(OUTCOMES.values())) == len(OUTCOMES)


def write(path: Path) -> Path:
    path.write_text(json.dumps({"text": PROSE}) + "\n")
    return path


NO_PACKAGES = CleanRecipe(filter=FilterOptions(enabled=False), dedup=DuplicateOptions(near=0.0))


def test_another_version_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl")
    first = clean([path], tmp_path / "out", NO_PACKAGES)
    monkeypatch.setattr(version_module, "CLEANING_VERSION", CLEANING_VERSION + 1)
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        clean([path], tmp_path / "out", NO_PACKAGES)
    assert clean([path], tmp_path / "new", NO_PACKAGES).recipe_hash != first.recipe_hash


@pytest.mark.parametrize("repairs", [False, True])
def test_the_version_of_ftfy_counts_where_it_is_used(
    tmp_path: Path, repairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ftfy")
    recipe = CleanRecipe(
        normalize=NormalizeOptions(repairs_encoding=repairs), filter=NO_PACKAGES.filter, dedup=NO_PACKAGES.dedup
    )
    path = write(tmp_path / "a.jsonl")
    first = clean([path], tmp_path / "out", recipe)
    monkeypatch.setattr(version_module, "version", lambda name: f"0.0.1 of {name}")
    again = clean([path], tmp_path / "new", recipe)
    assert (again.recipe_hash == first.recipe_hash) is not repairs

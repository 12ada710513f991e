"""A whole recipe: steps, counts that add up, texts in every format, benchmarks that are quoted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from unisono.config import load_config
from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.errors import ConfigError, DataError
from unisono.quality.clean import clean
from unisono.quality.documents import find_documents
from unisono.quality.duplicates import sketch_folder
from unisono.quality.kept_rows import write_kept
from unisono.quality.options import (
    CleanRecipe,
    DecontaminateOptions,
    DuplicateOptions,
    FilterOptions,
    MaskOptions,
    NormalizeOptions,
    only_dedup,
)

pytest.importorskip("rensa")

RECIPE = CleanRecipe(filter=FilterOptions(min_words=3, min_mean_word_chars=0), mask=MaskOptions(kinds=("email",)))
TEXTS = [
    "short",
    "write\u00a0to me@example.org  \r\nor not",
    "nothing to change here",
    "nothing to  change here",
    "nothing to change here\n\n",
    "one two three four five six",
]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".mindrecord", ".rec"])
def test_texts_of_every_format(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    source = tmp_path / f"texts{suffix}"
    name = "data" if suffix == ".rec" else "text"
    rows = [{name: text.encode() if suffix == ".rec" else text, "n": number} for number, text in enumerate(TEXTS)]
    write_table(source, Table(rows=rows))
    result = clean([source], tmp_path / "out", RECIPE)
    kept = [dict(row) for row in open_table(tmp_path / "out" / "data" / source.name).rows]
    texts = {1: "write to <EMAIL>\nor not", 2: TEXTS[2], 5: TEXTS[5]}
    assert kept == [{name: text.encode() if suffix == ".rec" else text, "n": number} for number, text in texts.items()]
    assert (result.documents, result.kept, result.changed, result.masked) == (6, 3, 1, {"email": 1})
    assert result.dropped == {"filter.min_words": 1, "dedup.exact": 1, "dedup.near": 1}


@pytest.mark.parametrize(
    "rest",
    [
        b'"\\ud800": 1',
        b'"\xed\xa0\x80": 1',
        b'"s": NaN,  "t": [Infinity, -Infinity]',
        b'"s": "\\ud800", "n": 1.50, "o": {"a": null}',
    ],
)
def test_all_other_bytes_of_a_changed_line_stay(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{ %s ,"text": "one two\\u00a0three four\\r\\n"}\n' % rest)
    result = clean([path], tmp_path / "out", RECIPE, column="text")
    assert (result.kept, result.changed) == (1, 1)
    assert (tmp_path / "out" / "data" / "a.jsonl").read_bytes() == b'{ %s ,"text": "one two three four"}\n' % rest


def test_lone_surrogates_in_a_text_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two\\ud800 three four"}\n')
    assert clean([path], tmp_path / "out", RECIPE).changed == 1
    assert (tmp_path / "out" / "data" / "a.jsonl").read_text() == '{"text": "one two three four"}\n'


def test_a_line_that_has_changed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in ('{"other": 1}', '{"text": "on', "5"):
        path.write_text('{"text": "one"}\n')
        documents = find_documents([path], column="text")
        path.write_text(content)
        with pytest.raises(DataError, match=r"a\.jsonl, row 0, which has changed meanwhile"):
            write_kept(
                documents, tmp_path / "out", np.ones(1, np.bool_), np.array([1]), [(0, b"two")], index_only=False
            )


def test_only_what_was_replaced_in_kept_documents_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'text': TEXTS[1]})}\n" * 3)
    result = clean([path], tmp_path / "out", RECIPE)
    assert (result.kept, result.changed, result.masked) == (1, 1, {"email": 1})


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.encode())
    clean([tmp_path / "texts"], tmp_path / "out", RECIPE)
    data = tmp_path / "out" / "data"
    assert {path.name: path.read_bytes() for path in data.iterdir()} == {
        "1.txt": b"write to <EMAIL>\nor not",
        "2.txt": TEXTS[2].encode(),
        "5.txt": TEXTS[5].encode(),
    }


def test_other_fields_of_a_changed_line_stay_as_they_are(tmp_path: Path) -> None:
    line = b'{"score": 1.50, "text": "one  two\\r\\nthree ", "big": 12345678901234567890123, "meta": {"a": [null, 1e400]}}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    clean([tmp_path / "a.jsonl"], tmp_path / "out", RECIPE)
    assert (tmp_path / "out" / "data" / "a.jsonl").read_bytes() == (
        b'{"score": 1.50, "text": "one  two\\nthree", "big": 12345678901234567890123, "meta": {"a": [null, 1e400]}}\n'
    )


def test_counts_add_up_for_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 40)
    rng = np.random.default_rng(1)
    texts = planted.documents(300, rng, words=(20, 120))
    texts += (
        [planted.edited(text, 1, rng) for text in texts[:50]]
        + texts[50:80]
        + [f"{text} me@a.org" for text in texts[:20]]
    )
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in texts]))
    recipe = CleanRecipe(filter=FilterOptions(min_mean_word_chars=0), mask=MaskOptions(kinds=("email",)))
    results = [clean([tmp_path / "a.jsonl"], tmp_path / str(w) / "out", recipe, workers=w) for w in (0, 2)]
    assert results[0] == results[1]
    assert (tmp_path / "0/out/data/a.jsonl").read_bytes() == (tmp_path / "2/out/data/a.jsonl").read_bytes()
    assert (tmp_path / "0/out/dropped.jsonl").read_bytes() == (tmp_path / "2/out/dropped.jsonl").read_bytes()
    (result, _) = results
    dropped = read(tmp_path / "0/out/dropped.jsonl")
    assert result.documents == 400 == result.kept + len(dropped) == result.kept + sum(result.dropped.values())
    assert len((tmp_path / "0/out/data/a.jsonl").read_text().splitlines()) == result.kept
    assert len(np.load(tmp_path / "0/out/kept/a.jsonl.npy")) == result.kept
    assert {record["row"] for record in dropped}.isdisjoint(np.load(tmp_path / "0/out/kept/a.jsonl.npy").tolist())
    assert set(result.dropped) == {"filter.min_words", "dedup.exact", "dedup.near"}


def test_quotes_of_a_benchmark(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    question, other, *texts = planted.documents(8, rng, words=(40, 60))
    quote = " ".join([*texts[0].split(), *question.split()[10:23], *texts[1].split()])
    shorter = " ".join([*texts[0].split(), *question.split()[10:22], *texts[1].split()])
    recipe = CleanRecipe(
        filter=FilterOptions(enabled=False),
        decontaminate=DecontaminateOptions(against=(str(tmp_path / "bench.jsonl"),)),
        dedup=DuplicateOptions(enabled=False),
    )
    rows = [question, "a b c", other]
    write_table(tmp_path / "bench.jsonl", Table(rows=[{"text": text} for text in rows]))
    documents = [quote, shorter, texts[2], other.upper(), "so a b c", "a b c"]
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in documents]))
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    assert [record["row"] for record in read(tmp_path / "out/dropped.jsonl")] == [0, 3]
    assert result.dropped == {"decontaminate": 2}
    write_table(tmp_path / "bench.jsonl", Table(rows=[{"text": texts[2]}]))
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)


def test_benchmarks_are_normalized_and_masked_as_documents_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first, second, other = (text.split() for text in planted.documents(3, rng, words=(40, 60)))
    quotes = {
        "decomposed": " ".join([*first[:6], "Zu\u0308rich", *first[6:12]]),
        "composed": " ".join([*first[:6], "Z\u00fcrich", *first[6:12]]),
        "personal": " ".join([*second[:6], "me@example.org", *second[6:12]]),
    }
    recipe = CleanRecipe(
        filter=FilterOptions(enabled=False),
        mask=MaskOptions(kinds=("email",)),
        decontaminate=DecontaminateOptions(against=(str(tmp_path / "bench.jsonl"),)),
        dedup=DuplicateOptions(enabled=False),
    )
    write_table(tmp_path / "bench.jsonl", Table(rows=[{"text": quotes["decomposed"]}, {"text": quotes["personal"]}]))
    documents = [
        " ".join([*other, quotes["composed"], *other]),
        " ".join([*other, quotes["personal"], *other]),
        " ".join(other),
    ]
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in documents]))
    clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    assert [record["row"] for record in read(tmp_path / "out/dropped.jsonl")] == [0, 1]


def test_a_copy_of_a_document_that_is_not_kept_points_to_the_kept_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    (kept,) = planted.documents(1, rng, words=(80, 81))
    near = f"{kept} more"
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in (kept, near, near, kept)]))
    clean([tmp_path / "a.jsonl"], tmp_path / "out", only_dedup(DuplicateOptions()))
    dropped = read(tmp_path / "out/dropped.jsonl")
    assert [(record["row"], record["reason"], record["duplicate_of"]["row"]) for record in dropped] == [
        (1, "dedup.near", 0),
        (2, "dedup.near", 0),
        (3, "dedup.exact", 0),
    ]
    assert dropped[0]["similarity"] == dropped[1]["similarity"] < 1


def test_lines_whose_text_has_another_name(tmp_path: Path) -> None:
    lines = [{"n": number, "body": text} for number, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", RECIPE)
    assert (result.documents, result.kept, result.changed) == (6, 3, 1)
    assert read(tmp_path / "out/data/a.jsonl")[0] == {"n": 1, "body": "write to <EMAIL>\nor not"}


def test_steps_can_be_turned_off(tmp_path: Path) -> None:
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in [*TEXTS, TEXTS[0]]]))
    recipe = CleanRecipe(
        normalize=NormalizeOptions(enabled=False),
        filter=FilterOptions(enabled=False),
        dedup=DuplicateOptions(enabled=False),
    )
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    assert (result.kept, result.dropped, result.changed, result.sketch) == (7, {}, 0, "")
    assert (tmp_path / "out/data/a.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_a_recipe_file(tmp_path: Path) -> None:
    (tmp_path / "clean.toml").write_text('[mask]\nkinds = ["email", "ip"]\n[dedup]\nnear = 0.9\n')
    recipe = load_config(CleanRecipe, [tmp_path / "clean.toml"]).value
    assert recipe == CleanRecipe(mask=MaskOptions(kinds=("email", "ip")), dedup=DuplicateOptions(near=0.9))
    (tmp_path / "clean.toml").write_text('[mask]\nkinds = ["emial"]\n[dedupe]\nnear = 0.9\n')
    with pytest.raises(ConfigError) as error:
        load_config(CleanRecipe, [tmp_path / "clean.toml"])
    assert "2 problems" in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["filter.enabled=false", "filter.min_words=9999"],
        ["filter.min_language_prob=0.9"],
        ["normalize.enabled=false", "normalize.repairs_encoding=true"],
        ["decontaminate.ngram=20"],
        ['decontaminate.columns=["question"]'],
        ["images.enabled=false", "images.min_side_px=500"],
        ["dedup.enabled=false", "dedup.near=0.95"],
        ["dedup.near=0", "dedup.ngram=3"],
        ["dedup.image_near=0", "dedup.crops=true"],
    ],
)
def test_settings_that_would_do_nothing(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match="it would change nothing"):
        load_config(CleanRecipe, (), overrides=settings)


def test_a_benchmark_that_is_not_there(tmp_path: Path) -> None:
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": "a"}]))
    recipe = CleanRecipe(decontaminate=DecontaminateOptions(against=(str(tmp_path / "none"),)))
    with pytest.raises(DataError, match="it is not there"):
        clean([tmp_path / "a.jsonl"], tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_the_same_recipe_has_the_same_hash(tmp_path: Path) -> None:
    write_table(tmp_path / "a.jsonl", Table(rows=[{"text": text} for text in TEXTS]))
    first, again, other = (
        clean([tmp_path / "a.jsonl"], tmp_path / name, recipe)
        for name, recipe in (("1", RECIPE), ("2", RECIPE), ("3", CleanRecipe()))
    )
    assert first.recipe_hash == again.recipe_hash != other.recipe_hash
    assert clean([tmp_path / "a.jsonl"], tmp_path / "1", RECIPE) == first


def test_documents_that_cannot_be_read(tmp_path: Path) -> None:
    lines = [
        b'{"text": "one two three"}',
        b"no json",
        b'{"text": "\xff"}',
        b'{"body": 1}',
        b'{"text": 5}',
        b'{"text": "one two three"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match="line 2 at offset 26"):
        clean([tmp_path / "a.jsonl"], tmp_path / "first", RECIPE)
    result = clean([tmp_path / "a.jsonl"], tmp_path / "out", RECIPE, skips_unreadable=True)
    assert (result.documents, result.kept, result.dropped) == (6, 1, {"unreadable": 4, "dedup.exact": 1})
    assert (tmp_path / "out/data/a.jsonl").read_bytes() == lines[0] + b"\n"
    faults = [(record["row"], record.get("fault")) for record in read(tmp_path / "out/dropped.jsonl")]
    assert [row for row, _ in faults] == [1, 2, 3, 4, 5]
    assert all(fault for _, fault in faults[:4])
    assert "field 'text': 5 (int)" in str(faults[3][1])
    assert "no json" not in (tmp_path / "out/report.html").read_text()
    assert "line 2 at offset 26" in (tmp_path / "out/report.html").read_text()


def test_text_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"one two three")
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff\xfe\x00one two three")
    (tmp_path / "texts" / "c.py").write_bytes(b"# -*- coding: latin-1 -*-\n# gr\xfc\xdfe an dich hier")
    recipe = CleanRecipe(filter=FilterOptions(enabled=False))
    result = clean([tmp_path / "texts"], tmp_path / "out", recipe, skips_unreadable=True)
    assert (result.kept, result.dropped) == (2, {"unreadable": 1})
    assert sorted(path.name for path in (tmp_path / "out/data").iterdir()) == ["a.txt", "c.py"]


@pytest.mark.parametrize("coding", ["latin-1", "cp1252", "utf-8", "euc-jp"])
def test_changed_python_source_stays_in_the_encoding_that_it_declares(tmp_path: Path, coding: str) -> None:
    text = f"# -*- coding: {coding} -*-\nname = '{'日本' if coding == 'euc-jp' else 'Größe'}'"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_bytes(f"{text} \n".encode(coding))
    recipe = CleanRecipe(filter=FilterOptions(enabled=False))
    assert clean([tmp_path / "texts"], tmp_path / "out", recipe).changed == 1
    assert (tmp_path / "out/data/a.py").read_bytes() == text.encode(coding)
    compile((tmp_path / "out/data/a.py").read_bytes(), "a.py", "exec")
    again = clean([tmp_path / "out" / "data"], tmp_path / "again", recipe)
    assert (again.kept, again.changed) == (1, 0)


def test_python_source_whose_encoding_lacks_a_character(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    (tmp_path / "texts").mkdir()
    source = tmp_path / "texts" / "a.py"
    source.write_bytes("# coding: latin-1\n# it\u2019s here".encode())
    recipe = CleanRecipe(
        normalize=NormalizeOptions(repairs_encoding=True),
        filter=FilterOptions(enabled=False),
    )
    with pytest.raises(DataError) as error:
        clean([tmp_path / "texts"], tmp_path / "out", recipe)
    (problem,) = error.value.problems
    assert problem.given.startswith(f"{source}, whose new text cannot be written in the encoding that it declares: ")
    assert problem.given.endswith("has no '\u2019' (U+2019)")
    assert problem.consequence == "nothing was written"
    assert not (tmp_path / "out" / "data").exists()

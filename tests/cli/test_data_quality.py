"""``unisono data dedup`` and ``unisono data leak`` as a user types them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from commands import Desk, events_of, make_desk
from pictures import crop, jpeg, photograph, write_photographs
from procs import wait_until

from unisono.config import load_config
from unisono.data.cleaning_record import cleaning_facts
from unisono.quality.options import CleanRecipe

pytest.importorskip("rensa")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder of its own."""
    return make_desk(tmp_path / "desk", tmp_path / "cache")


TEXT = " ".join(f"word{number}" for number in range(120))
NEAR = TEXT.replace("word60 ", "other ")


def write(folder: Path, name: str, *texts: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_dedup(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT, "another text", NEAR, TEXT)
    done = desk.here("data", "dedup", "a.jsonl", "--out", "out")
    assert done.code == 0, done.err
    assert done.out == (
        "2 of 4 documents kept\n     1 dropped by dedup.exact\n     1 dropped by dedup.near\nreport: out/report.html\n"
    )
    as_json = desk.here("data", "dedup", "a.jsonl", "--out", "out", "--json").json
    assert (as_json["documents"], as_json["kept"]) == (4, 2)
    assert as_json["dropped"] == {"dedup.exact": 1, "dedup.near": 1}
    of_texts = {"enabled": True, "near": 0.8, "ngram": 5, "num_perm": 128, "seed": 0}
    assert as_json["recipe"]["dedup"] == {**of_texts, "image_near": 0.85, "crops": None}
    page = (desk.folder / "out" / "report.html").read_text()
    assert "2 of 4 documents (50.0%) were dropped." in page
    assert "a.jsonl, row 2" in page


def test_dedup_of_the_same_text_alone(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT, NEAR, TEXT)
    done = desk.here("data", "dedup", "a.jsonl", "--out", "out", "--exact", "--json")
    assert done.json["dropped"] == {"dedup.exact": 1}
    refused = desk.here("data", "dedup", "a.jsonl", "--out", "other", "--exact", "--near", "0.9")
    assert refused.code == 2
    assert "--exact and --near 0.9" in refused.err
    inert = desk.here("data", "leak", "a.jsonl", "a.jsonl", "--exact", "--num-perm", "64", "--ngram", "3")
    assert inert.code == 2
    assert "--exact and --ngram 3, --num-perm 64" in inert.err


def test_a_higher_similarity_keeps_more(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT, NEAR)
    for near, kept in (("0.8", 1), ("0.99", 2)):
        assert desk.here("data", "dedup", "a.jsonl", "--near", near, "--out", near, "--json").json["kept"] == kept


def test_other_words_per_shingle(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", "a b c d e f", "f e d c b a")
    for ngram, kept in (("1", 1), ("2", 2)):
        assert desk.here("data", "dedup", "a.jsonl", "--ngram", ngram, "--out", ngram, "--json").json["kept"] == kept


def test_leak(desk: Desk) -> None:
    write(desk.folder, "train.jsonl", TEXT, "one")
    write(desk.folder, "valid.jsonl", "two")
    write(desk.folder, "test.jsonl", "one", NEAR, "three")
    done = desk.here("data", "leak", "train.jsonl", "valid.jsonl", "test.jsonl", "--out", "leaks")
    assert done.code == 1, done.err
    assert done.out.splitlines() == [
        "ok   valid.jsonl: 1 documents, 0 with the same content as one of a set before it, 0 near one",
        "leak test.jsonl: 3 documents, 1 with the same content as one of a set before it, 1 near one",
        "     test.jsonl row 0 and train.jsonl row 1: same content",
        "     test.jsonl row 1 and train.jsonl row 0: similarity 0.917",
        "report: leaks/report.html",
    ]
    clean = desk.here("data", "leak", "train.jsonl", "valid.jsonl", "--json")
    assert clean.code == 0
    assert clean.json["pairs"] == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_stopped_says_how_to_go_on(desk: Desk, sent: signal.Signals) -> None:
    write(desk.folder, "a.jsonl", *(f"{TEXT} {number}" for number in range(40_000)))
    command = [sys.executable, "-m", "unisono", "data", "dedup", "a.jsonl", "--out", "out", "--workers", "1"]
    stopped = subprocess.Popen(
        command, cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = desk.folder / "out" / "work" / "sketches" / "chunks.jsonl"
    wait_until(lambda: stopped.poll() is not None or journal.exists(), "the first chunk")
    stopped.send_signal(sent)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 75, err
    assert "the same command goes on in out" in err
    assert not (desk.folder / "out" / "report.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "clean a.jsonl",
        "dedup a.jsonl",
        "leak a.jsonl b.jsonl",
        "split a.jsonl --part x=1",
        "labels a.jsonl --label label",
        "columns a.jsonl",
        "balance a.jsonl --label label",
    ],
)
def test_results_are_named_alike(desk: Desk, arguments: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        lines = [json.dumps({"text": f"{name} {number}", "label": "xy"[number % 2]}) for number in range(4)]
        (desk.folder / name).write_text("\n".join(lines) + "\n")
    found = desk.here("data", *arguments.split(), "--out", "results", "--json").json
    assert (found["out"], found["report"]) == ("results", "results/report.html")
    assert (desk.folder / found["report"]).is_file()
    written = json.loads((desk.folder / "results" / "report.json").read_text())
    assert not written.keys() & {"out", "report"}  # the folder may be moved


@pytest.mark.parametrize(
    "arguments",
    [
        "clean a.jsonl --out out",
        "dedup a.jsonl --out out",
        "leak a.jsonl a.jsonl",
        "split a.jsonl --part x=1 --out out",
        "labels a.jsonl --label text --out out",
        "relabel a.jsonl --marks marks.json --out out",
    ],
)
def test_a_cluster_needs_an_extra(desk: Desk, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write(desk.folder, "a.jsonl", "one two three")
    missing = desk.here("data", *arguments.split(), "--ray", "auto")
    assert missing.code == 2
    assert "try:  pip install 'unisono[scale]'" in missing.err
    both = desk.here("data", *arguments.split(), "--ray", "auto", "--workers", "2")
    assert both.code == 2
    assert "--workers 2 and --ray auto" in both.err
    client = desk.here("data", *arguments.split(), "--ray", "ray://head:10001")
    assert client.code == 2
    assert "--ray ray://head:10001" in client.err
    assert not (desk.folder / "out").exists()


def test_split(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT, NEAR, "one", "two", "three", "four")
    parts = ["--part", "train=2/3", "--part", "test=1/3"]
    done = desk.here("data", "split", "a.jsonl", "--out", "out", *parts)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "train: 4 documents, 66.67%",
        "test: 2 documents, 33.33%",
        "5 clusters, the largest of 2 documents",
        "report: out/report.html",
    ]
    train = (desk.folder / "out" / "train" / "data" / "a.jsonl").read_text()
    assert TEXT in train
    assert NEAR in train
    alone = desk.here("data", "split", "a.jsonl", "--out", "alone", "--exact", *parts, "--json").json
    assert alone["clusters"] == 6
    refused = desk.here("data", "split", "a.jsonl", "--out", "other", "--part", "train=0.5")
    assert refused.code == 2
    assert "sum up to 1" in refused.err


def test_clean(desk: Desk) -> None:
    (desk.folder / "clean.toml").write_text('[filter]\nmin_words = 3\n[mask]\nkinds = ["email"]\n[dedup]\nnear = 0.0\n')
    write(desk.folder, "a.jsonl", "one two", "write to  me@example.org \r\n or not", "one two three", "one two three")
    done = desk.here(
        "data", "clean", "a.jsonl", "--recipe", "clean.toml", "--set", "filter.min_mean_word_chars=2", "--out", "out"
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "2 of 4 documents kept",
        "     1 dropped by filter.min_words",
        "     1 dropped by dedup.exact",
        "     1 kept with another text",
        "     1 times email replaced",
        "report: out/report.html",
    ]
    lines = [json.loads(line) for line in (desk.folder / "out" / "data" / "a.jsonl").read_text().splitlines()]
    assert lines == [{"text": "write to  <EMAIL>\n or not"}, {"text": "one two three"}]
    dropped = [json.loads(line) for line in (desk.folder / "out" / "dropped.jsonl").read_text().splitlines()]
    assert dropped == [
        {"file": "a.jsonl", "row": 0, "reason": "filter.min_words", "value": 2.0},
        {
            "file": "a.jsonl",
            "row": 3,
            "reason": "dedup.exact",
            "duplicate_of": {"file": "a.jsonl", "row": 2},
            "similarity": 1.0,
        },
    ]
    assert "me@example.org" not in (desk.folder / "out" / "report.html").read_text()
    wrong = desk.here("data", "clean", "a.jsonl", "--out", "other", "--set", "filter.min_wrods=3")
    assert wrong.code == 2
    assert "min_words" in wrong.err


def test_a_run_records_the_recipe_of_its_data(desk: Desk, tmp_path: Path) -> None:
    (desk.folder / "corpus" / "copy.py").write_bytes((desk.folder / "corpus" / "m0.py").read_bytes())
    cleaned = desk.here("data", "dedup", "corpus", "--out", "unique", "--exact", "--json").json
    assert cleaned["dropped"] == {"dedup.exact": 1}
    done = desk.train(tmp_path / "run", f"--set=data.corpus={desk.folder / 'unique' / 'data'}")
    assert done.code == 0, done.err
    (start,) = [event for event in events_of(tmp_path / "run") if event["kind"] == "run_start"]
    (facts,) = start["cleaning"].values()
    assert facts == {
        **{name: cleaned[name] for name in ("recipe_hash", "documents", "kept", "dropped", "masked")},
        "inputs": {},
    }
    assert cleaned["recipe_hash"] in (tmp_path / "run" / "report.html").read_text()
    plain = desk.train(tmp_path / "other")
    assert plain.code == 0, plain.err
    assert all("cleaning" not in event for event in events_of(tmp_path / "other"))


def test_the_recipe_with_all_settings(desk: Desk) -> None:
    """It is the default one; with each # before a setting removed it is that, too, and has every setting."""
    text = desk.here("data", "recipe").out
    assert desk.here("data", "recipe", "--json").json == {"toml": text.rstrip("\n")}
    everything = re.sub(r"^# (\w+ = (?!\"other))", r"\1", text, flags=re.MULTILINE)
    for name, content in (("default.toml", text), ("all.toml", everything)):
        (desk.folder / name).write_text(content)
        assert load_config(CleanRecipe, [desk.folder / name]).value == CleanRecipe()
    named = tomllib.loads(everything)
    for section in fields(CleanRecipe):
        assert list(named[section.name]) == [setting.name for setting in fields(getattr(CleanRecipe(), section.name))]
    wrong = desk.here("data", "clean", "a.jsonl", "--out", "out", "--set", "filter.min_wrds=3")
    assert "try:  did you mean filter.min_words?; unisono data recipe prints all settings" in wrong.err


def test_clean_by_language(desk: Desk) -> None:
    pytest.importorskip("py3langid")
    english = "The old man walked down to the harbour every morning and talked to the fishermen."
    german = "Der alte Mann ging jeden Morgen zum Hafen hinunter und sprach mit den Fischern."
    write(desk.folder, "a.jsonl", english, german, english + " Nobody listened.")
    limits = ["--set", "filter.min_words=5", "--set", "dedup.near=0"]
    done = desk.here("data", "clean", "a.jsonl", "--out", "out", *limits, "--set", 'filter.languages=["en"]')
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "2 of 3 documents kept",
        "     1 dropped by filter.languages",
        "languages: en 2, de 1",
        "report: out/report.html",
    ]
    wrong = desk.here("data", "clean", "a.jsonl", "--out", "other", *limits, "--set", 'filter.languages=["en-GB"]')
    assert wrong.code == 2
    assert "'en' for 'en-GB'" in wrong.err
    assert not (desk.folder / "other").exists()


def test_clean_against_benchmarks(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "How many?", "answer": TEXT}, {"question": "Which of them?", "answer": "None."}]
    (desk.folder / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(desk.folder, "a.jsonl", f"some more {TEXT}", "another text")
    (desk.folder / "clean.toml").write_text(
        "filter.enabled = false\n[decontaminate]\nagainst = ['bench.jsonl']\ncolumns = ['question', 'answer']\n"
    )
    done = desk.here("data", "clean", "a.jsonl", "--recipe", "clean.toml", "--out", "out")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "1 of 2 documents kept",
        "     1 dropped by decontaminate",
        "3 of 4 items of benchmarks had too few words to be looked for",
        "report: out/report.html",
    ]
    assert "3 of 4 items have fewer than 13 words (decontaminate.ngram)" in caplog.text
    assert "3 of bench.jsonl" in caplog.text


def test_benchmarks_are_relative_to_the_file_that_names_them(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    write(desk.folder, "a.jsonl", f"some more {TEXT}", "another text")
    write(desk.folder, "bench.jsonl", "a benchmark in the current folder")
    write(desk.folder, "sub/bench.jsonl", TEXT)
    (desk.folder / "sub" / "base.toml").write_text("filter.enabled = false\ndecontaminate.against = ['bench.jsonl']\n")
    (desk.folder / "clean.toml").write_text("base = 'sub/base.toml'\n")
    found = [
        desk.here("data", "clean", "a.jsonl", "--recipe", recipe, "--out", out, "--json")
        for recipe, out in (("sub/base.toml", "1"), ("clean.toml", "2"))
    ]
    found.append(
        Desk(desk.folder / "sub", desk.cache).here(
            "data", "clean", "../a.jsonl", "--recipe", "base.toml", "--out", "../3", "--json"
        )
    )
    for done in found:
        assert done.code == 0, done.err
        assert done.json["dropped"] == {"decontaminate": 1}
    assert len({done.json["recipe_hash"] for done in found}) == 1
    monkeypatch.setenv("HOME", str(desk.folder / "sub"))
    (desk.folder / "home.toml").write_text("filter.enabled = false\ndecontaminate.against = ['~/bench.jsonl']\n")
    at_home = desk.here("data", "clean", "a.jsonl", "--recipe", "home.toml", "--out", "5", "--json")
    assert at_home.json["dropped"] == {"decontaminate": 1}
    given = ("--recipe", "sub/base.toml", "--set", 'decontaminate.against=["bench.jsonl"]')
    assert desk.here("data", "clean", "a.jsonl", *given, "--out", "4", "--json").json["dropped"] == {}


def test_images(desk: Desk) -> None:
    write_photographs(desk.folder / "train", range(12))
    write_photographs(desk.folder / "test", range(100, 104))
    (desk.folder / "test" / "part.jpg").write_bytes(jpeg(crop(photograph(3), 0)))
    (desk.folder / "train" / "broken.jpg").write_bytes(b"nothing")
    cleaned = desk.here("data", "clean", "train", "--out", "out")
    assert cleaned.code == 0, cleaned.err
    assert cleaned.out.startswith("12 of 13 documents kept\n     1 dropped by unreadable\n")
    found = desk.here("data", "leak", "out/data", "test", "--json")
    assert (found.code, [pair["duplicate_of"]["file"] for pair in found.json["pairs"]]) == (1, ["out/data/0003.jpg"])
    assert desk.here("data", "leak", "out/data", "test", "--no-crops").code == 0
    refused = desk.here("data", "dedup", "test", "--out", "no", "--ngram", "3")
    assert refused.code == 2
    assert "--ngram 3, for images" in refused.err


def test_images_of_a_split_do_not_leak(desk: Desk) -> None:
    write_photographs(desk.folder / "photos", range(40))
    for seed in range(0, 40, 4):
        (desk.folder / "photos" / f"part-{seed}.jpg").write_bytes(jpeg(crop(photograph(seed), seed, least=0.8)))
    done = desk.here("data", "split", "photos", "--out", "parts", "--part", "train=0.5", "--part", "test=0.5")
    assert done.code == 0, done.err
    found = desk.here("data", "leak", "parts/train/data", "parts/test/data", "--json")
    assert (found.code, found.json["pairs"]) == (0, [])
    apart = ("--out", "apart", "--no-crops", "--part", "train=0.5", "--part", "test=0.5")
    assert desk.here("data", "split", "photos", *apart).code == 0
    assert desk.here("data", "leak", "apart/train/data", "apart/test/data").code == 1


def test_the_recipe_of_data_that_are_split(desk: Desk) -> None:
    write(
        desk.folder,
        "a.jsonl",
        *(f"document {number} of several words" for number in range(8)),
        "document 1 of several words",
    )
    cleaned = desk.here("data", "dedup", "a.jsonl", "--out", "unique", "--exact", "--json").json
    parts = ("--part", "train=0.5", "--part", "test=0.5")
    assert desk.here("data", "split", "unique/data", "--out", "parts", "--exact", *parts).code == 0
    (facts,) = cleaning_facts([str(desk.folder / "parts" / "train" / "data" / "a.jsonl")]).values()
    assert [each["recipe_hash"] for each in facts["inputs"].values()] == [cleaned["recipe_hash"]]
    # a folder that is called data itself
    (desk.folder / "unique" / "data" / "data").mkdir()
    (facts,) = cleaning_facts([str(desk.folder / "unique" / "data" / "data" / "a.jsonl")]).values()
    assert facts["recipe_hash"] == cleaned["recipe_hash"]


def test_files_of_a_folder_that_are_left_out(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    write(desk.folder, "mixed/a.jsonl", "one two three")
    (desk.folder / "mixed" / "notes.txt").write_text("not read")
    (desk.folder / "mixed" / "a.classes.txt").write_text("of the table")
    done = desk.here("data", "dedup", "mixed", "--out", "out", "--exact")
    assert done.code == 0
    assert "1 files that are no tables are left out, such as 'notes.txt'" in caplog.text
    (desk.folder / "empty").mkdir()
    empty = desk.here("data", "dedup", "empty", "--out", "other")
    assert (empty.code, "empty holds no files" in empty.err) == (2, True)


@pytest.mark.parametrize(
    "command",
    [("clean", ""), ("leak", "a.jsonl", ""), ("columns", ""), ("labels", ""), ("balance", "")],
)
def test_an_input_without_a_name(desk: Desk, command: tuple[str, ...]) -> None:
    """As an empty variable of a shell gives it; it is not the current folder."""
    write(desk.folder, "a.jsonl", "one")
    refused = desk.here("data", *command, "--out", "out")
    assert (refused.code, "an input without a name" in refused.err) == (2, True)
    assert not (desk.folder / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        *(("data", verb, "a.jsonl") for verb in ("clean", "dedup", "columns", "labels", "balance")),
        ("data", "leak", "a.jsonl", "b.jsonl"),
        ("data", "split", "a.jsonl", "--part", "x=1"),
        ("data", "relabel", "a.jsonl", "--marks", "marks.json"),
        ("tune", "batch"),
    ],
)
def test_a_folder_of_results_without_a_name(desk: Desk, command: tuple[str, ...]) -> None:
    before = sorted(desk.folder.iterdir())
    refused = desk.here(*command, "--out", "")
    assert (refused.code, "--out without a name, ''" in refused.err) == (2, True)
    assert sorted(desk.folder.iterdir()) == before


def test_a_run_over_results_that_were_cut(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT, TEXT, "one two three", "four five six")
    assert desk.here("data", "dedup", "a.jsonl", "--out", "unique", "--exact").code == 0
    file = desk.folder / "unique" / "data" / "a.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    refused = desk.train("runs/cut", "--set", "data.corpus=unique/data", "--set", "data.text_column=text")
    assert (refused.code, "'a.jsonl' has" in refused.err) == (2, True)
    kept = desk.here("data", "convert", "a.jsonl", "b.jsonl", "--kept-rows", "unique", "--json")
    assert kept.code == 0, kept.err


def test_folders_of_results_as_inputs(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    write(desk.folder, "a.jsonl", TEXT, TEXT, "one", "two", "three", "four")
    assert desk.here("data", "dedup", "a.jsonl", "--out", "unique", "--exact").code == 0
    parts = ("--part", "train=0.6", "--part", "test=0.4", "--exact")
    split = desk.here("data", "split", "unique", "--out", "parts", *parts, "--json")
    assert [part["documents"] for part in split.json["parts"]] == [3, 2]
    assert "left out" not in caplog.text
    found = desk.here("data", "leak", "parts/train", "parts/test", "a.jsonl", "--exact", "--json").json
    assert [(each["documents"], each["exact"]) for each in found["splits"]] == [(3, 0), (2, 0), (6, 6)]
    assert {pair["duplicate_of"]["file"].split("/")[2] for pair in found["pairs"]} == {"data"}
    assert desk.here("data", "balance", "parts/train", "--label", "text", "--json").json["rows"] == 3
    index = desk.here("data", "split", "a.jsonl", "--out", "index", "--index-only", *parts)
    assert index.code == 0
    refused = desk.here("data", "leak", "index/train", "index/test")
    assert refused.code == 2
    assert "index/train, a folder of results without data/, with row indices alone" in refused.err
    assert "unisono data convert SOURCE NEW --kept-rows index/train" in refused.err
    whole = desk.here("data", "dedup", "parts", "--out", "other")
    assert (whole.code, "a part, as parts/test" in whole.err) == (2, True)
    assert desk.here("data", "balance", "index/train", "--label", "text").code == 2


@pytest.mark.parametrize("options", [("--near", "nan"), ("--exact", "--seed", "5"), ("--image-near", "inf")])
def test_options_that_are_refused(desk: Desk, options: tuple[str, ...]) -> None:
    write(desk.folder, "a.jsonl", "one two three")
    done = desk.here("data", "dedup", "a.jsonl", "--out", "out", *options)
    assert done.code == 2
    assert not (desk.folder / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("dedup", "a.jsonl", "--out", "out"),
        ("split", "a.jsonl", "--out", "out", "--part", "a=1"),
        ("leak", "a.jsonl", "b.jsonl"),
    ],
)
@pytest.mark.parametrize("option", ["--crops", "--no-crops"])
def test_crops_are_of_images(desk: Desk, command: tuple[str, ...], option: str) -> None:
    write(desk.folder, "a.jsonl", "one two three")
    write(desk.folder, "b.jsonl", "one two")
    done = desk.here("data", *command, option)
    assert done.code == 2
    assert f"unisono: {option}, for text\n" in done.err
    assert not (desk.folder / "out").exists()


def test_the_seed_of_signatures_is_of_texts(desk: Desk) -> None:
    """That of a split draws images, too."""
    write_photographs(desk.folder / "photos", range(6))
    write_photographs(desk.folder / "others", range(6, 8))
    for command in (
        ("dedup", "photos", "--seed", "9", "--out", "out"),
        ("leak", "photos", "others", "--seed", "9"),
        ("labels", "photos", "--seed", "9", "--out", "out"),
        ("clean", "photos", "--set", "dedup.seed=9", "--out", "out"),
    ):
        refused = desk.here("data", *command)
        assert refused.code == 2, command
        given = "dedup.seed = 9" if command[0] == "clean" else "--seed 9"
        assert f"unisono: {given}, for images\n" in refused.err
    parts = ("--part", "a=0.5", "--part", "b=0.5")
    assert desk.here("data", "split", "photos", "--seed", "9", "--out", "out", *parts).code == 0


def test_a_step_that_the_data_do_not_have_is_not_turned_off(desk: Desk) -> None:
    write(desk.folder, "a.jsonl", TEXT)
    write_photographs(desk.folder / "photos", range(3))
    for data, setting, content in (
        ("a.jsonl", "images.enabled", "text"),
        ("photos", "normalize.enabled", "images"),
        ("photos", "filter.enabled", "images"),
    ):
        refused = desk.here("data", "clean", data, "--set", f"{setting}=false", "--out", "no")
        assert refused.code == 2
        assert f"{setting} = false, for {content}" in refused.err
        assert not (desk.folder / "no").exists()


def test_options_of_rows(desk: Desk) -> None:
    rows = [
        {"body": f"words of row {number} that are its own", "user": number // 2, "label": number % 2}
        for number in range(12)
    ]
    lines = [json.dumps(row) for row in rows]
    (desk.folder / "a.jsonl").write_text("\n".join([*lines, "no JSON"]) + "\n")
    refused = desk.here("data", "dedup", "a.jsonl", "--out", "refused", "--column", "body", "--index-only")
    assert refused.code == 2
    done = desk.here(
        "data", "dedup", "a.jsonl", "--out", "out", "--column", "body", "--index-only", "--on-error", "skip"
    )
    assert done.code == 0, done.err
    assert sorted(path.name for path in (desk.folder / "out").iterdir()) == [
        ".lock",
        "dropped.jsonl",
        "job.json",
        "kept",
        "report.html",
        "report.json",
    ]
    assert np.load(desk.folder / "out" / "kept" / "a.jsonl.npy").tolist() == list(range(12))
    (desk.folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    parts = (
        "--part",
        "train=2/3",
        "--part",
        "test=1/3",
        "--group",
        "user",
        "--stratify",
        "label",
        "--exact",
        "--seed",
        "3",
    )
    assert desk.here("data", "split", "a.jsonl", "--out", "parts", *parts).code == 0
    split_rows = {
        name: [
            json.loads(line) for line in (desk.folder / "parts" / name / "data" / "a.jsonl").read_text().splitlines()
        ]
        for name in ("train", "test")
    }
    assert {name: len(rows) for name, rows in split_rows.items()} == {"train": 8, "test": 4}
    assert not {row["user"] for row in split_rows["train"]} & {row["user"] for row in split_rows["test"]}
    one = ("--out", "one", "--part", "train=0.5", "--part", "test=0.5", "--group", "text", "--exact")
    write(desk.folder, "same.jsonl", *["the same"] * 6)
    assert (
        "test: 0 documents, 0.00%; its share of 6 is 3, and the clusters are too large for it"
        in desk.here("data", "split", "same.jsonl", *one).out
    )


def test_what_cannot_be_read_is_left_out(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A job that failed at a bad row goes on in its folder."""
    rows = [json.dumps({"text": f"words of row {row}", "user": row // 2}) for row in range(8)]
    (desk.folder / "a.jsonl").write_text("\n".join([*rows, "no JSON", json.dumps({"text": "without a user"})]) + "\n")
    write(desk.folder, "test.jsonl", "words of row 3")
    leak = ["data", "leak", "a.jsonl", "test.jsonl", "--exact", "--out", "leaks"]
    split = [
        "data",
        "split",
        "a.jsonl",
        "--part",
        "x=1/2",
        "--part",
        "y=1/2",
        "--group",
        "user",
        "--exact",
        "--out",
        "parts",
    ]
    dedup = ["data", "dedup", "a.jsonl", "--exact", "--out", "unique"]
    for command, line in ((leak, "line 9"), (split, "line 9"), (dedup, "line 9")):
        failed = desk.here(*command)
        assert (failed.code, line in failed.err) == (2, True)
    found = desk.here(*leak, "--on-error", "skip")
    assert found.code == 1, found.err
    assert found.out.splitlines()[-2:] == [
        "1 documents could not be read and were left out",
        "report: leaks/report.html",
    ]
    assert [part["unreadable"] for part in desk.here(*leak, "--on-error", "skip", "--json").json["splits"]] == [1, 0]
    done = desk.here(*split, "--on-error", "skip")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "x: 4 documents, 50.00%",
        "y: 4 documents, 50.00%",
        "4 clusters, the largest of 2 documents",
        "2 documents could not be read and were left out",
        "report: parts/report.html",
    ]
    assert "2 documents that cannot be read are left out, the first is a.jsonl, row 8: " in caplog.text
    dropped = [json.loads(line) for line in (desk.folder / "parts" / "dropped.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in dropped] == [(8, "unreadable"), (9, "unreadable")]
    assert desk.here(*dedup, "--on-error", "skip", "--json").json["dropped"] == {"unreadable": 1}
    again = desk.here(*split)
    assert (again.code, "results of other inputs or settings" in again.err) == (2, True)


def test_parquet_with_columns_of_any_type(desk: Desk) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"text": [TEXT, "a@example.org", TEXT, None], "meta": [{"url": "x", "n": [1, None]}] * 3 + [None]})
    parquet.write_table(table, desk.folder / "a.parquet")
    recipe = ["--set", "filter.enabled=false", "--set", "dedup.near=0", "--set", 'mask.kinds=["email"]']
    done = desk.here("data", "clean", "a.parquet", *recipe, "--on-error", "skip", "--out", "out")
    assert done.code == 0, done.err
    assert done.out.splitlines()[:2] == ["2 of 4 documents kept", "     1 dropped by unreadable"]
    found = parquet.read_table(desk.folder / "out" / "data" / "a.parquet")
    assert found.schema.equals(table.schema)
    assert found.to_pylist() == [table.to_pylist()[0], {**table.to_pylist()[1], "text": "<EMAIL>"}]

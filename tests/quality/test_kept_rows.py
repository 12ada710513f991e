"""Rows that a data job kept: a run, a corpus and a conversion read these and no others, and refuse those of other files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_data

from unisono.data import DataOptions, Loader, LoaderOptions, prepare_corpus
from unisono.data.convert import Table, convert, open_table, write_table
from unisono.data.convert.pack import pack_text
from unisono.data.dataset import read_samples
from unisono.data.sources import open_source
from unisono.data.tokens.shards import TokenSet
from unisono.data.tokens.tokenizer import load_tokenizer
from unisono.errors import ConfigError, DataError
from unisono.quality.balance import balance
from unisono.quality.clean import clean
from unisono.quality.job_folder import open_job
from unisono.quality.leak import find_leaks
from unisono.quality.options import DuplicateOptions, only_dedup
from unisono.quality.split import split
from unisono.storage.directory import make_folder
from unisono.tasks.columns import resolve_task
from unisono.tasks.data import TaskData, language_data, predictor_data
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions

EXACT = only_dedup(DuplicateOptions(near=0.0))
# rows 3, 4 and 7 are copies; the class of row 3 is nowhere else
ROWS = [
    {"text": text, "label": label}
    for text, label in [
        *[("row a", "x"), ("row b", "y"), ("row c", "x"), ("row a", "odd"), ("row b", "y")],
        *[("row d", "x"), ("row e", "y"), ("row e", "y"), ("row f", "x"), ("row g", "y")],
    ]
]
KEPT = [0, 1, 2, 5, 6, 8, 9]


def table(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    path.parent.mkdir(exist_ok=True)
    write_table(path, Table(rows=ROWS if rows is None else rows))
    return path


def index(paths: list[Path], out: Path) -> Path:
    """A folder of kept rows, without data."""
    clean(paths, out, EXACT, index_only=True, column="text")
    assert not (out / "data").exists()
    return out


def opened(tmp_path: Path, train: Any, **changes: Any) -> tuple[TaskData, TaskOptions]:
    data = DataOptions(train=train, cache_dir=str(tmp_path / "cache"), **changes)
    task = resolve_task(TaskOptions(kind="text", target="label"), data)
    encode = load_tokenizer("bytes")
    return predictor_data(task, data, ImageOptions(), TextOptions(), tokenizer=encode, buckets=8), task


def language(options: DataOptions, *, held_out_only: bool = False) -> TaskData:
    encode: dict[str, Any] = {"tokenizer": load_tokenizer("bytes"), "places_targets": False, "mask": 0, "vocab_size": 0}
    return language_data(TaskOptions(), options, tokens=None, **encode, held_out_only=held_out_only)


def texts(data: Any) -> list[str]:
    return [bytes(sample["text"]).decode() for sample in read_samples(data, np.arange(len(data)))]


def documents(tokens: TokenSet) -> list[str]:
    ends = [np.append(shard.starts[1:], shard.tokens.size) for shard in tokens.shards]
    return [
        bytes(shard.tokens[begin : end - 1].tolist()).decode()
        for shard, of_shard in zip(tokens.shards, ends, strict=True)
        for begin, end in zip(shard.starts, of_shard, strict=True)
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "mindrecord", "tar"])
def test_each_format_is_read_and_converted(tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = table(tmp_path / f"a.{suffix}")
    rows = index([path], tmp_path / "kept")
    expected = [ROWS[row]["text"] for row in KEPT]
    assert texts(open_source(path, kept_rows=rows, cache_dir=tmp_path / "cache")) == expected
    assert convert(path, tmp_path / "b.jsonl", kept_rows=rows, columns=["text"]) == len(KEPT)
    assert [row["text"] for row in open_table(tmp_path / "b.jsonl").rows] == expected


def test_records(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write_table(path, Table(rows=[{"data": row["text"].encode(), "n": n} for n, row in enumerate(ROWS)]))
    clean([path], tmp_path / "kept", EXACT, index_only=True)
    found = open_source(path, kept_rows=tmp_path / "kept", cache_dir=tmp_path / "cache")
    assert [int(sample["n"]) for sample in read_samples(found, np.arange(len(found)))] == KEPT


def test_a_run_reads_the_kept_rows(tmp_path: Path) -> None:
    """The class of a dropped row is none of the task's, and held-out samples have their numbers among all rows."""
    path = table(tmp_path / "a.jsonl")
    rows = index([path], tmp_path / "kept")
    data, task = opened(tmp_path, str(path), kept_rows=str(rows), eval_frac=0.3)
    assert task.classes == ("x", "y")
    assert data.held_out_rows is not None
    held_out = data.held_out_rows.ids.tolist()
    assert (len(held_out), data.held_out_rows.total) == (2, 10)
    assert texts(data.train) == [ROWS[row]["text"] for row in KEPT if row not in held_out]
    whole, _ = opened(tmp_path, str(path), eval_frac=0.3)
    assert whole.train.fingerprint != data.train.fingerprint


def test_the_order_is_that_of_the_rows_alone_on_any_number_of_ranks(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl", [{"text": f"row {n % 40}", "label": "xy"[n % 2]} for n in range(80)])
    rows = index([path], tmp_path / "kept")
    convert(path, tmp_path / "b.jsonl", kept_rows=rows)
    here, _ = opened(tmp_path, str(path), kept_rows=str(rows))
    there, _ = opened(tmp_path, str(tmp_path / "b.jsonl"))
    assert texts(here.train) == texts(there.train)
    with Loader(there.train, seed=3, global_batch=8) as whole:
        expected = [whole.sample_ids(step).tolist() for step in range(10)]
    ranks = [Loader(here.train, seed=3, global_batch=8, rank=rank, world_size=2) for rank in range(2)]
    assert [ranks[0].sample_ids(step).tolist() + ranks[1].sample_ids(step).tolist() for step in range(10)] == expected


def test_worker_processes_make_the_same_batches(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl", [{"text": f"row {n % 40}", "label": "xy"[n % 2]} for n in range(80)])
    data, _ = opened(tmp_path, str(path), kept_rows=str(index([path], tmp_path / "kept")))
    options: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 2, "worker_kind": "process"}]
    batches: list[list[dict[str, Any]]] = []
    for option in options:
        settings: dict[str, Any] = {"global_batch": 8, "options": LoaderOptions(**option), "transform": data.transform}
        with Loader(data.train, seed=3, **settings) as loader:
            parts = [part for step in loader.iterate(0, 4) for part in step.micro_batches]
        batches.append([{name: entry.tolist() for name, entry in part.items()} for part in parts])
    assert batches[0] == batches[1]


def test_language_models_and_mixtures(tmp_path: Path) -> None:
    one, two = table(tmp_path / "one.jsonl"), table(tmp_path / "two.csv", [{"text": "row a"}, {"text": "row z"}])
    rows = index([one, two], tmp_path / "kept")
    given = DataOptions(
        train=(str(one), str(two)), kept_rows=(str(rows), str(rows)), eval=str(two), cache_dir=str(tmp_path / "cache")
    )
    for options in (given, replace(given, weights=(1.0, 1.0))):
        data = language(options)
        assert sorted(texts(data.train)) == sorted([*(ROWS[row]["text"] for row in KEPT), "row z"])
        assert len(data.held_out) == 1
    assert len(language(given, held_out_only=True).held_out) == 1


def test_weights_are_of_all_rows(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    rows = index([path], tmp_path / "kept")
    weights = np.arange(10, dtype=np.float64)
    np.save(tmp_path / "w.npy", weights)
    given = {"sample_weights": str(tmp_path / "w.npy"), "kept_rows": str(rows)}
    for held_out in ({"eval": str(path)}, {"eval_frac": 0.3}):
        data, _ = opened(tmp_path, str(path), **given, **held_out)
        assert data.held_out_rows is not None
        left = [row for row in KEPT if "eval" in held_out or row not in data.held_out_rows.ids]
        assert texts(data.train) == [ROWS[row]["text"] for row in left]
        with Loader(data.train, seed=0, global_batch=1, transform=data.transform) as loader:
            ids = np.concatenate([loader.sample_ids(step) for step in range(100 * len(left))])
        shares = np.bincount(ids, minlength=len(left)) / len(ids)
        assert shares.tolist() == pytest.approx((weights[left] / weights[left].sum()).tolist(), abs=0.02)
    balance([path], tmp_path / "balanced", field="label")
    opened(tmp_path, str(path), sample_weights=str(tmp_path / "balanced"), kept_rows=str(rows))


def test_images(tmp_path: Path) -> None:
    """One that cannot be read is dropped, and is then no error of the folder."""
    folder = task_data.write_images(tmp_path / "photos", per_class=3)
    (folder / "blue" / "copy.png").write_bytes((folder / "blue" / "0.png").read_bytes())
    (folder / "red" / "broken.png").write_bytes(b"nothing")
    clean([folder], tmp_path / "kept", EXACT, index_only=True, skips_unreadable=True)
    given: dict[str, Any] = {"eval": str(folder), "cache_dir": str(tmp_path / "cache")}
    data = DataOptions(train=str(folder), kept_rows=(str(tmp_path / "kept"), str(tmp_path / "kept")), **given)
    task = resolve_task(TaskOptions(kind="image"), data)
    found = predictor_data(task, data, ImageOptions(size=8), TextOptions(), tokenizer=None, buckets=8)
    assert (task.classes, len(found.train), len(found.held_out)) == (("blue", "red"), 6, 6)
    assert [found.train.location(n)[-5:] for n in range(6)] == ["0.png", "1.png", "2.png"] * 2  # pyright: ignore
    with pytest.raises(DataError, match=r"broken\.png"):
        resolve_task(TaskOptions(kind="image"), DataOptions(train=str(folder), **given))


def test_a_corpus_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, row in enumerate(ROWS):
        (folder / f"{number}.txt").write_text(row["text"])
    rows = index([folder], tmp_path / "kept")
    for number in (3, 4, 7):
        assert not np.load(rows / "kept" / f"{number}.txt.npy").size
    prepared = prepare_corpus(DataOptions(corpus=str(folder), kept_rows=str(rows), eval_frac=0.3), tmp_path / "cache")
    assert sorted(documents(prepared.train) + documents(prepared.eval)) == [ROWS[row]["text"] for row in KEPT]


@pytest.mark.parametrize("names", [("a.jsonl",), ("a.jsonl", "b.jsonl")])
def test_a_corpus_of_tables(tmp_path: Path, names: tuple[str, ...]) -> None:
    """A row without text is dropped, and is then no error of the corpus; of a second file all rows are copies."""
    folder = tmp_path / "tables"
    folder.mkdir()
    lines = [json.dumps(row) for row in [*ROWS, {"text": 5, "label": "x"}]]
    for name in names:
        (folder / name).write_text("\n".join(lines) + "\n")
    clean([folder], tmp_path / "kept", EXACT, index_only=True, skips_unreadable=True)
    options = DataOptions(corpus=str(folder), text_column="text", kept_rows=str(tmp_path / "kept"), eval_frac=0.3)
    prepared = prepare_corpus(options, tmp_path / "cache")
    assert sorted(documents(prepared.train) + documents(prepared.eval)) == [ROWS[row]["text"] for row in KEPT]
    assert prepare_corpus(options, tmp_path / "cache").from_cache
    with pytest.raises(DataError, match="row 10: "):
        prepare_corpus(replace(options, kept_rows=""), tmp_path / "cache")


def test_parts_of_a_split(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl", [{"text": f"row {n}", "label": "xy"[n % 2]} for n in range(20)])
    parts = {"train": Fraction(3, 4), "valid": Fraction(1, 4)}
    split([path], tmp_path / "parts", parts, options=DuplicateOptions(near=0.0), index_only=True)
    rows = (str(tmp_path / "parts" / "train"), str(tmp_path / "parts" / "valid"))
    data, _ = opened(tmp_path, str(path), eval=str(path), kept_rows=rows)
    valid = np.load(tmp_path / "parts" / "valid" / "kept" / "a.jsonl.npy").tolist()
    assert data.held_out_rows is not None
    assert (data.held_out_rows.ids.tolist(), data.held_out_rows.total, len(data.held_out)) == (valid, 20, 5)
    assert sorted([*(int(text.split()[1]) for text in texts(data.train)), *valid]) == list(range(20))


def test_held_out_rows_that_do_not_leak(tmp_path: Path) -> None:
    train = table(tmp_path / "train" / "a.jsonl")
    test = table(tmp_path / "test" / "a.jsonl", [{"text": text, "label": "x"} for text in ("row c", "row new")])
    find_leaks(train, [test], out=tmp_path / "leaks", options=DuplicateOptions(near=0.0))
    data, _ = opened(tmp_path, str(train), eval=str(test), kept_rows=("", str(tmp_path / "leaks")))
    assert (len(data.train), len(data.held_out)) == (10, 1)
    convert(test, tmp_path / "clean.jsonl", kept_rows=tmp_path / "leaks")
    assert [row["text"] for row in open_table(tmp_path / "clean.jsonl").rows] == ["row new"]


def test_rows_move_with_their_data(tmp_path: Path) -> None:
    path = table(tmp_path / "old" / "a.jsonl")
    index([path], tmp_path / "old-rows")
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old-rows").rename(tmp_path / "new-rows")
    moved = str(tmp_path / "new" / "a.jsonl")
    data, _ = opened(tmp_path, moved, eval=moved, kept_rows=str(tmp_path / "new-rows"))
    assert len(data.train) == len(KEPT)


def changed(path: Path, rows: Path) -> None:
    os.utime(path, ns=(0, 0))


def unlisted(path: Path, rows: Path) -> None:
    (rows / "kept" / "files.json").write_text("[]")


def damaged(path: Path, rows: Path) -> None:
    (rows / "kept" / "files.json").write_text("{")


def missing(path: Path, rows: Path) -> None:
    (rows / "kept" / "a.jsonl.npy").unlink()


def numbers(values: list[Any]) -> Callable[[Path, Path], None]:
    def write(path: Path, rows: Path) -> None:
        np.save(rows / "kept" / "a.jsonl.npy", np.array(values), allow_pickle=True)

    return write


def more_rows(path: Path, rows: Path) -> None:
    place = rows / "kept" / "files.json"
    (entry,) = json.loads(place.read_text())
    place.write_text(json.dumps([{**entry, "rows": 11}]))


def none_kept(path: Path, rows: Path) -> None:
    place = rows / "kept" / "files.json"
    (entry,) = json.loads(place.read_text())
    place.write_text(json.dumps([{**entry, "kept": 0}]))


UNFIT: list[tuple[Callable[[Path, Path], None], str]] = [
    (changed, "a.jsonl, which has changed since .*kept was written"),
    (unlisted, "a.jsonl, of which .*kept has no rows"),
    (damaged, "files.json cannot be read"),
    (missing, "a.jsonl.npy: "),
    (numbers([{}] * 7), "a.jsonl.npy: "),
    (numbers([0.5] * 7), "an array of float64"),
    (numbers([0, 1, 2]), "has not 7 numbers in order"),
    (numbers([0, 1, 2, 2, 3, 4, 5]), "has not 7 numbers in order"),
    (numbers([0, 1, 2, 3, 4, 5, 10]), "rows from 0 to 10, of 10"),
    (numbers([-1, 1, 2, 3, 4, 5, 6]), "rows from -1 to 6, of 10"),
    (more_rows, "11 rows of .*/a.*, which have 10"),
    (none_kept, "keeps no row of .*/a"),
]


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_rows_that_do_not_fit(tmp_path: Path, change: Callable[[Path, Path], None], message: str) -> None:
    path = table(tmp_path / "a.jsonl")
    rows = index([path], tmp_path / "kept")
    change(path, rows)
    with pytest.raises(DataError, match=message):
        opened(tmp_path, str(path), kept_rows=str(rows))
    with pytest.raises(DataError, match=message):
        convert(path, tmp_path / "b.jsonl", kept_rows=rows)
    assert not (tmp_path / "b.jsonl").exists()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="'nowhere': it does not exist"):
        opened(tmp_path, str(path), kept_rows="nowhere")
    rows = index([path], tmp_path / "kept")
    with pytest.raises(DataError, match="that of a part in it"):
        opened(tmp_path, str(path), kept_rows=str(rows / "kept"))


def test_data_without_rows(tmp_path: Path) -> None:
    rows = index([table(tmp_path / "a.jsonl")], tmp_path / "kept")
    with pytest.raises(DataError, match=r"of which .*kept has no rows"):
        opened(tmp_path, str(table(tmp_path / "b.jsonl")), kept_rows=str(rows))
    pack_text(tmp_path / "a.jsonl", tmp_path / "t.bin", column="text")
    with pytest.raises(ConfigError, match=r"data\.kept_rows .* with token shards"):
        language(DataOptions(train=str(tmp_path / "t-*.bin"), kept_rows=str(rows), cache_dir=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kept_rows": "kept"}, "kept_rows 'kept' with corpus 'stdlib'"),
        ({"kept_rows": ("kept", "other"), "train": "a.jsonl"}, "without data.eval"),
        ({"kept_rows": ("a", "b", "c"), "train": "a.jsonl", "eval": "b.jsonl"}, "rows of 3 folders"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], message: str) -> None:
    found = dict(DataOptions(**given).problems())
    assert message in found["kept_rows"].given


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("files.json/a.txt",), "'files.json/a.txt', of which the place of the rows"),
        (("x", "x.npy/y"), "'x', of which the place of the rows, 'x.npy', is taken"),
        (("sub/x", "sub/x.npy/z/y"), "'sub/x', of which the place of the rows"),
        (("k" * 231,), "whose name has 231 bytes"),
    ],
)
def test_names_whose_rows_have_no_place(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    for number, name in enumerate(files):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}")
    with pytest.raises(DataError, match=message):
        clean([tmp_path / "texts"], tmp_path / "out", EXACT)
    assert not (tmp_path / "out").exists()


def test_kept_lines_keep_values_that_no_row_holds(tmp_path: Path) -> None:
    lines = [f'{{"text": "{text}", "meta": {{"a": [1, null]}}}}\n' for text in ("one", "one", "two")]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    clean([tmp_path / "a.jsonl"], tmp_path / "out", EXACT, index_only=True)
    convert(tmp_path / "a.jsonl", tmp_path / "b.jsonl", kept_rows=tmp_path / "out")
    assert (tmp_path / "b.jsonl").read_text() == lines[0] + lines[2]


def test_names_beside_the_index_have_places(tmp_path: Path) -> None:
    for number, name in enumerate(("files.json", "sub/files.json", "x.npy.txt", "k" * 230)):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"text {number}")
    assert clean([tmp_path / "texts"], tmp_path / "out", EXACT).kept == 4


@pytest.mark.parametrize("name", ["k" * 300, "a", "a/b"])
def test_a_name_that_cannot_be_written_is_another_problem_than_room(tmp_path: Path, name: str) -> None:
    def write(out: Path) -> None:
        with open_job(out, {}, []) as job:
            (job.new / "a").write_text("a file where a folder is wanted")
            make_folder(job.new / name)

    with pytest.raises(ConfigError, match="try:  rename the file or folder of the inputs with that name"):
        write(tmp_path / "out")

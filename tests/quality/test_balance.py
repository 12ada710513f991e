"""``balance``: classes are counted in every format, and a run reads each class in its share of the weights."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_data
from PIL import Image

from unisono.data import Loader
from unisono.data.convert.pack import pack_images
from unisono.data.convert.table_files import Table, write_table
from unisono.data.dataset import read_samples
from unisono.data.options import DataOptions
from unisono.data.sample_weights import inverse_frequency, reads_per_epoch
from unisono.data.tokens.tokenizer import load_tokenizer
from unisono.errors import ConfigError, DataError
from unisono.quality.balance import BalanceResult, balance
from unisono.tasks.columns import resolve_task
from unisono.tasks.data import TaskData, predictor_data
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions

LABELS = ["cat"] * 60 + ["dog"] * 15 + ["owl"] * 5
COUNTS = {"cat": 60, "dog": 15, "owl": 5}


def rows(labels: list[Any] | None = None) -> list[dict[str, Any]]:
    labels = LABELS if labels is None else labels
    order = np.random.default_rng(0).permutation(len(labels))
    return [{"text": f"row {number}", "label": labels[number]} for number in order]


def table(path: Path, labels: list[Any] | None = None) -> Path:
    write_table(path, Table(rows=rows(labels)))
    return path


def opened(tmp_path: Path, train: Any, **changes: Any) -> tuple[TaskData, TaskOptions]:
    data = DataOptions(train=train, cache_dir=str(tmp_path / "cache"), **changes)
    task = resolve_task(TaskOptions(kind="text", target="label"), data)
    encode = load_tokenizer("bytes")
    return predictor_data(task, data, ImageOptions(), TextOptions(), tokenizer=encode, buckets=8), task


def drawn(data: TaskData, task: TaskOptions) -> dict[str, float]:
    """Samples of each class that the loader reads in an epoch, on average over 20."""
    with Loader(data.train, seed=0, global_batch=4, transform=data.transform) as loader:
        ids = np.concatenate([loader.sample_ids(step) for step in range(20 * len(data.train) // 4)])
    found = Counter(task.classes[int(sample["targets"])] for sample in read_samples(data.train, ids))
    return {name: count / 20 for name, count in found.items()}


def counts_of(result: BalanceResult) -> dict[str, int]:
    return {each.name: each.rows for each in result.classes}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "mindrecord"])
def test_each_format_of_tables(tmp_path: Path, suffix: str) -> None:
    path = table(tmp_path / f"a.{suffix}")
    result = balance([path], tmp_path / "out", field="label")
    assert counts_of(result) == COUNTS
    assert list(counts_of(result)) == ["cat", "dog", "owl"]
    assert (result.rows, result.unlabelled, result.imbalance) == (80, 0, 12.0)
    shares = np.array([60, 15, 5]) / 80
    assert result.effective_classes == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    weights = np.load(tmp_path / "out" / "weights" / f"a.{suffix}.npy")
    expected = {name: 80 / 3 / count for name, count in COUNTS.items()}
    assert weights.dtype == np.float64
    assert weights.tolist() == pytest.approx([expected[row["label"]] for row in rows()])
    assert [each.weighted_share for each in result.classes] == pytest.approx([1 / 3] * 3)


def test_records_with_a_side_column(tmp_path: Path) -> None:
    write_table(tmp_path / "a.rec", Table(rows=[{"data": b"x", "label": int(n % 4 == 0)} for n in range(40)]))
    result = balance([tmp_path / "a.rec"], field="label")
    assert counts_of(result) == {"0": 30, "1": 10}


def test_folders_of_images_and_their_records(tmp_path: Path) -> None:
    folder = task_data.write_images(tmp_path / "photos", per_class=4)
    (folder / "blue" / "0.png").unlink()
    pack_images(folder, tmp_path / "photos.rec")
    for path in (folder, tmp_path / "photos.rec"):
        result = balance([path], tmp_path / f"of-{path.name}")
        assert counts_of(result) == {"red": 4, "blue": 3}
        weights = np.load(tmp_path / f"of-{path.name}" / "weights" / f"{path.name}.npy")
        assert weights.sum() == pytest.approx(7)
    with pytest.raises(DataError, match="the label of an image is its folder"):
        balance([folder], field="label")


def test_what_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = task_data.write_images(tmp_path / "photos", per_class=4)
    (folder / "red" / "1.png").write_text("text")
    with pytest.raises(DataError, match=r"red/1\.png: not an image .*\n.*\n.*\n.*--on-error skip"):
        balance([folder], tmp_path / "out")
    assert counts_of(balance([folder], tmp_path / "out", skips_unreadable=True)) == {"blue": 4, "red": 3}
    assert "1 images that cannot be read are left out, the first is " in caplog.text
    assert len(np.load(tmp_path / "out" / "weights" / "photos.npy")) == 7  # a run has no number for it
    (tmp_path / "a.jsonl").write_text('{"label": "a"}\nno json\n{"label": 0.5}\n{"label": "b"}\n')
    result = balance([tmp_path / "a.jsonl"], tmp_path / "rows", field="label", skips_unreadable=True)
    assert (result.rows, result.unlabelled) == (4, 2)
    assert np.load(tmp_path / "rows" / "weights" / "a.jsonl.npy").tolist() == [2, 0, 0, 2]
    assert "2 rows that cannot be read" in caplog.text


def test_a_folder_of_texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "1.txt").write_text(name)
    with pytest.raises(DataError, match=r"1\.txt, a file of text(.|\n)*data labels and data split --stratify targets"):
        balance([tmp_path / "texts"])


def test_names_of_classes_and_rows_without_a_label(tmp_path: Path) -> None:
    lines = ['{"label": 1}', '{"label": 1.0}', '{"label": "1"}', '{"label": ""}', '{"label": null}', '{"x": [{}]}']
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"label": "b\\nc"}']) + "\n")
    result = balance([tmp_path / "a.jsonl"], tmp_path / "out", field="label")
    assert counts_of(result) == {"1": 3, "b\nc": 1}
    assert (result.rows, result.unlabelled) == (7, 3)
    weights = np.load(tmp_path / "out" / "weights" / "a.jsonl.npy").tolist()
    assert weights == pytest.approx([7 / 6] * 3 + [0.0] * 3 + [7 / 2])


def test_power_and_limit() -> None:
    counts = np.array([900, 90, 10])
    assert inverse_frequency(counts).tolist() == pytest.approx([1 / 900, 1 / 90, 1 / 10])
    root = reads_per_epoch(counts, 1000, power=0.5) * counts
    assert (root / root.sum()).tolist() == pytest.approx((np.sqrt(counts) / np.sqrt(counts).sum()).tolist())
    assert reads_per_epoch(counts, 1000, power=0.0).tolist() == [1.0, 1.0, 1.0]
    limited = reads_per_epoch(counts, 1000, max_repeats=5)
    assert limited.tolist() == pytest.approx([500 / 900, 5, 5])  # 50 + 450 + 500 reads
    assert reads_per_epoch(counts, 1000, max_repeats=1).tolist() == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"label": "a"}\n{"label": "b"}\n', {"field": "kind"}, "column 'kind', which no row of"),
        ('{"label": ["a", "b"]}\n', {"field": "label"}, "row 0, field 'label': .*list"),
        ('{"label": 0.5}\n', {"field": "label"}, "row 0, field 'label'"),
        (
            '{"label": 1}\n{"label": 1e999}\n',
            {"field": "label"},
            r"row 1, field 'label': inf .*\n.*one integer\n.*\n.*the field of the class",
        ),
        ('{"label": "a"}\nno json\n', {"field": "label"}, "line 2"),
        (
            '{"label": "a"}\n{"label": "b\\ud800"}\n',
            {"field": "label"},
            "row 1, field 'label': .*a lone surrogate at 1",
        ),
        ('{"a": ' * 1400 + "1" + "}" * 1400 + "\n", {"field": "label"}, "line 1 .*more than 100 lists and objects"),
        (
            '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
            {"field": "label"},
            "line 1 .*more than 100 lists and objects",
        ),
        ('{"label": "a"}\n{"label": ""}\n', {"field": "label", "max_repeats": 1}, "of which 1 have a label"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        balance([tmp_path / "a.jsonl"], tmp_path / "out", **options)
    assert not (tmp_path / "out" / "report.json").exists()


def test_other_fields_of_a_line_may_hold_any_value(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"label": "a", "s": NaN}\n{"label": null, "s": NaN}\n{"\\ud800": "\\udfff"}\n')
    result = balance([tmp_path / "a.jsonl"], field="label")
    assert counts_of(result) == {"a": 1}
    assert result.unlabelled == 2


def test_a_file_without_rows_beside_others(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").touch()
    assert balance([path, tmp_path / "b.jsonl"], field="label").classes == balance([path], field="label").classes
    with pytest.raises(DataError, match=r"b\.jsonl: 0 rows"):
        balance([tmp_path / "b.jsonl"], field="label")


def test_the_same_job_again_and_another_in_its_folder(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    first = balance([path], tmp_path / "out", field="label")
    assert balance([path], tmp_path / "out", field="label") == first
    assert re.search(r"<td[^>]*>cat</td>\s*<td[^>]*>60</td>", (tmp_path / "out" / "report.html").read_text())
    with pytest.raises(ConfigError, match="other inputs or settings"):
        balance([path], tmp_path / "out", field="label", power=0.5)


def test_too_many_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.quality.balance.MAX_CLASSES", 2)
    with pytest.raises(DataError, match="more than 2 different values"):
        balance([table(tmp_path / "a.jsonl")], field="label")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_run_reads_classes_in_their_shares(tmp_path: Path, suffix: str) -> None:
    path = table(tmp_path / f"a.{suffix}")
    balance([path], tmp_path / "out", field="label")
    data, task = opened(tmp_path, str(path), sample_weights=str(tmp_path / "out"), eval=str(path))
    assert drawn(data, task) == pytest.approx({"cat": 80 / 3, "dog": 80 / 3, "owl": 80 / 3}, abs=1)
    plain, _ = opened(tmp_path, str(path), eval=str(path))
    assert drawn(plain, task) == COUNTS


def test_held_out_samples_are_not_read(tmp_path: Path) -> None:
    """The weights are those of the samples that are left, in their order."""
    path = table(tmp_path / "a.jsonl")
    balance([path], tmp_path / "out", field="label", power=0.5)
    data, task = opened(tmp_path, str(path), sample_weights=str(tmp_path / "out"), eval_frac=0.2)
    assert (len(data.train), len(data.held_out)) == (64, 16)
    left = Counter(
        task.classes[int(sample["targets"])] for sample in read_samples(data.train, np.arange(len(data.train)))
    )
    reads = {name: left[name] / COUNTS[name] ** 0.5 for name in COUNTS}
    expected = {name: 64 * value / sum(reads.values()) for name, value in reads.items()}
    assert drawn(data, task) == pytest.approx(expected, abs=1)


def test_several_files_and_a_mixture(tmp_path: Path) -> None:
    one, two = table(tmp_path / "one.jsonl"), table(tmp_path / "two.csv", ["cat"] * 8 + ["owl"] * 32)
    balance([two, one], tmp_path / "out", field="label")  # in another order than the run's
    given = {"sample_weights": str(tmp_path / "out"), "eval": str(one)}
    data, task = opened(tmp_path, (str(one), str(two)), **given)
    third = 120 / 3
    assert drawn(data, task) == pytest.approx({"cat": third, "dog": third, "owl": third}, abs=1)
    mixed, task = opened(tmp_path, (str(one), str(two)), weights=(3.0, 1.0), **given)
    # of one.jsonl with the weights of both: 68 cats, 15 dogs and 37 owls in all
    first = np.array([60 / 68, 1, 5 / 37])
    second = np.array([8 / 68, 0, 32 / 37])
    expected = 120 * (0.75 * first / first.sum() + 0.25 * second / second.sum())
    assert drawn(mixed, task) == pytest.approx(dict(zip(("cat", "dog", "owl"), expected, strict=True)), abs=1.5)


def test_an_array_of_weights(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    np.save(tmp_path / "w.npy", np.array([row["label"] == "owl" for row in rows()], np.int64))
    data, task = opened(tmp_path, str(path), sample_weights=str(tmp_path / "w.npy"), eval=str(path))
    assert drawn(data, task) == {"owl": 80.0}


def test_weights_move_with_their_data(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    path = table(tmp_path / "old" / "a.jsonl")
    balance([path], tmp_path / "old-weights", field="label")
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old-weights").rename(tmp_path / "new-weights")
    moved = str(tmp_path / "new" / "a.jsonl")
    data, task = opened(tmp_path, moved, sample_weights=str(tmp_path / "new-weights"), eval=moved)
    assert drawn(data, task)["owl"] == pytest.approx(80 / 3, abs=1)


def changed(path: Path, out: Path) -> None:
    os.utime(path, ns=(0, 0))


def shorter(path: Path, out: Path) -> None:
    np.save(out / "weights" / "a.jsonl.npy", np.ones(79))


def negative(path: Path, out: Path) -> None:
    np.save(out / "weights" / "a.jsonl.npy", np.linspace(-1, 1, 80))


def zeros(path: Path, out: Path) -> None:
    np.save(out / "weights" / "a.jsonl.npy", np.zeros(80))


def objects(path: Path, out: Path) -> None:
    np.save(out / "weights" / "a.jsonl.npy", np.array([{}] * 80), allow_pickle=True)


def unlisted(path: Path, out: Path) -> None:
    (out / "weights" / "files.json").write_text("[]")


def damaged(path: Path, out: Path) -> None:
    (out / "weights" / "files.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed, "a.jsonl, which has changed since .*out was written"),
        (shorter, "79 weights for 80 samples"),
        (negative, "weights from -1.0 to 1.0"),
        (zeros, "all weights are 0"),
        (objects, "a.jsonl.npy: "),
        (unlisted, "a.jsonl, of which .*out has no weights"),
        (damaged, "files.json cannot be read"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Callable[[Path, Path], None], message: str) -> None:
    path, out = table(tmp_path / "a.jsonl"), tmp_path / "out"
    balance([path], out, field="label")
    change(path, out)
    with pytest.raises(DataError, match=message):
        opened(tmp_path, str(path), sample_weights=str(out), eval=str(path))


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    path = str(table(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match="'nowhere': it does not exist"):
        opened(tmp_path, path, sample_weights="nowhere", eval=path)


def test_order_on_one_and_two_ranks_and_other_weights(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl")
    fingerprints: list[str] = []
    for power in (1.0, 0.5):
        balance([path], tmp_path / f"out-{power}", field="label", power=power)
        data, _ = opened(tmp_path, str(path), sample_weights=str(tmp_path / f"out-{power}"))
        fingerprints.append(data.train.fingerprint)
        with Loader(data.train, seed=3, global_batch=8) as whole:
            expected = [whole.sample_ids(step).tolist() for step in range(20)]
        ranks = [Loader(data.train, seed=3, global_batch=8, rank=rank, world_size=2) for rank in range(2)]
        assert [
            ranks[0].sample_ids(step).tolist() + ranks[1].sample_ids(step).tolist() for step in range(20)
        ] == expected
    assert fingerprints[0] != fingerprints[1]


def test_images_change(tmp_path: Path) -> None:
    folder = task_data.write_images(tmp_path / "photos", per_class=2)
    balance([folder], tmp_path / "out")
    Image.new("RGB", (8, 8)).save(folder / "red" / "new.png")
    data = DataOptions(
        train=str(folder), eval=str(folder), sample_weights=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache")
    )
    task = resolve_task(TaskOptions(kind="image"), data)
    with pytest.raises(DataError, match="photos, which has changed since"):
        predictor_data(task, data, ImageOptions(size=8), TextOptions(), tokenizer=None, buckets=8)


def test_a_name_whose_weights_have_no_place(tmp_path: Path) -> None:
    (tmp_path / "files.json").mkdir()
    paths = [table(tmp_path / "files.json" / "a.jsonl"), table(tmp_path / "b.jsonl")]
    with pytest.raises(DataError, match=r"'files\.json/a\.jsonl', of which the place of the rows"):
        balance(paths, tmp_path / "out", field="label")
    assert not (tmp_path / "out").exists()
    assert counts_of(balance(paths, None, field="label")) == {name: 2 * count for name, count in COUNTS.items()}

"""Tasks on each format of samples, on numbers predicted from images and texts, and on mixtures."""

from __future__ import annotations

import base64
import io
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from commands import Desk
from PIL import Image
from source_files import write_arrow_folder, write_tar, write_tfrecord
from task_data import SMALL, write_images, write_reviews, write_table, write_tagged

from unisono.data.convert.table_files import convert
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header

STEPS = ("--set=plan.global_batch=16", "--set=train.steps=40", "--set=optim.lr=0.01", "--set=train.eval_every_steps=0")


def train(desk: Desk, run_dir: Path, *settings: str) -> dict[str, float]:
    """Train a run and evaluate it again; returns the evaluation."""
    done = desk.here("train", "--debug", "--json", f"--set=run.dir={run_dir}", *STEPS, *settings)
    assert done.code == 0, done.err
    again = desk.here("eval", str(run_dir), "--json")
    assert again.code == 0, again.err
    evaluation: dict[str, float] = json.loads(done.out)["evaluation"]
    assert json.loads(again.out)["evaluation"] == pytest.approx(evaluation, rel=1e-5, abs=1e-7)
    return evaluation


def write_bright(path: Path) -> Path:
    """Lines with an ``image`` of one gray value, its ``brightness`` from 0 to 1, and whether it is ``light``."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(48):
            value = int(rng.integers(0, 256))
            buffer = io.BytesIO()
            Image.new("RGB", (16, 16), (value, value, value)).save(buffer, "PNG")
            image = {"base64": base64.b64encode(buffer.getvalue()).decode()}
            file.write(json.dumps({"image": image, "brightness": value / 255, "light": int(value > 127)}) + "\n")
    return path


def write_stars(path: Path) -> Path:
    """Lines with a ``text`` and its ``stars``, which a single word tells."""
    words = (("bad", 1.0), ("fine", 3.0), ("great", 5.0))
    rows = ({"text": f"it was {words[i % 3][0]} {i}", "stars": words[i % 3][1]} for i in range(120))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_parquet_table_trains_as_its_lines_do(desk: Desk, tmp_path: Path) -> None:
    check_format(desk, tmp_path, ".parquet")


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".mindrecord", ".csv"])
def test_other_tables_train_as_their_lines_do(desk: Desk, tmp_path: Path, suffix: str) -> None:
    check_format(desk, tmp_path, suffix)


@pytest.mark.parametrize("kind", ["tar", "tfrecord", "arrow"])
def test_texts_that_others_wrote_train_as_their_lines_do(desk: Desk, tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    lines = write_reviews(tmp_path / "reviews.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    rows = [{"text": row["text"], "label": int(row["label"] == "pos")} for row in rows]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["--set=task.kind=text", "--set=data.seq_len=24", "--set=train.steps=12", *SMALL]
    expected = train(desk, tmp_path / "lines", *settings, f"--set=data.train={lines}")
    if kind == "tar":
        members = {
            f"{i:03d}.{ext}": row[key] for i, row in enumerate(rows) for ext, key in (("txt", "text"), ("cls", "label"))
        }
        data = write_tar(tmp_path / "a.tar", {name: str(value).encode() for name, value in members.items()})
        settings.append("--set=task.target=cls")
    elif kind == "tfrecord":
        data = write_tfrecord(tmp_path / "a.tfrecord", rows)
    else:
        labels: dict[str, object] = {"names": ["neg", "pos"], "_type": "ClassLabel"}
        data = write_arrow_folder(tmp_path / "arrow", pa.Table.from_pylist(rows), {"label": labels})
    assert train(desk, tmp_path / "run", *settings, f"--set=data.train={data}") == expected
    classes = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]["classes"]
    assert classes == (["neg", "pos"] if kind == "arrow" else ["0", "1"])


def check_format(desk: Desk, tmp_path: Path, suffix: str) -> None:
    lines = write_table(tmp_path / "table.jsonl")
    other = tmp_path / f"table{suffix}"
    convert(lines, other)
    settings = ("--set=task.kind=table", "--set=task.target=dear", '--set=task.inputs=["x","y","kind"]', *SMALL[:2])
    values = [
        train(desk, tmp_path / path.suffix[1:], *settings, f"--set=data.train={path}", "--set=train.steps=10")
        for path in (lines, other)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("are_numbers", [False, True])
def test_labels_of_words_as_lists(desk: Desk, tmp_path: Path, suffix: str, are_numbers: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = write_tagged(tmp_path / "texts.jsonl").read_text().splitlines()
    rows = [{name: text.split() for name, text in json.loads(line).items()} for line in lines]
    if are_numbers:
        rows = [row | {"tags": [["LOC", "O", "PER"].index(tag) for tag in row["tags"]]} for row in rows]
    data = tmp_path / f"lists{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # the texts with spaces have the same samples
    found = [
        train(
            desk,
            tmp_path / f"run-{path.name}",
            "--set=task.kind=sequence_labelling",
            f"--set=data.train={path}",
            "--set=data.seq_len=24",
            "--set=train.steps=12",
            *SMALL,
        )
        for path in (data, tmp_path / "texts.jsonl")
    ]
    assert found[0] == found[1]
    assert found[0]["accuracy"] > 0.4
    task = tomllib.loads((tmp_path / f"run-{data.name}" / "config.toml").read_text())["task"]
    assert task["classes"] == (["0", "1", "2"] if are_numbers else ["LOC", "O", "PER"])


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".mindrecord"])
def test_a_number_of_an_image(desk: Desk, tmp_path: Path, suffix: str) -> None:
    data = write_bright(tmp_path / "bright.jsonl")
    if suffix != ".jsonl":
        convert(data, data.with_suffix(suffix), columns=["image", "brightness"])
    values = train(
        desk,
        tmp_path / "run",
        "--set=task.kind=image",
        "--set=task.predicts=number",
        "--set=task.target=brightness",
        f"--set=data.train={data.with_suffix(suffix)}",
        "--set=image.size=16",
        "--set=components.model=resnet14",
        "--set=data.eval_frac=0.25",
    )
    assert values["r2"] > 0.5


def write_coloured(folder: Path) -> tuple[Path, Path]:
    """Images of one colour, and lists of them: with a float for the red, and with floats for red and green in other units."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    lines: tuple[list[str], list[str]] = ([], [])
    for at in range(64):
        red, green = rng.integers(0, 256, 2)
        Image.new("RGB", (16, 16), (int(red), int(green), 90)).save(folder / "images" / f"{at}.png")
        lines[0].append(f"{at}\t{red / 25.5:.4f}\timages/{at}.png\n")
        lines[1].append(f"{at}\t{red / 25.5:.4f}\t{green * 2 + 0.5:.1f}\timages/{at}.png\n")
    for name, written in zip(("one", "two"), lines, strict=True):
        (folder / f"{name}.lst").write_text("".join(written))
    return folder / "one.lst", folder / "two.lst"


@pytest.mark.full
def test_numbers_of_packed_images(desk: Desk, tmp_path: Path) -> None:
    """From a list with float labels to an evaluation: one label a record, and two, each in its own unit."""
    settings = (
        "--set=task.kind=image",
        "--set=task.predicts=number",
        "--set=image.size=8",
        "--set=image.crop=center",
        "--set=components.model=resnet14",
        "--set=data.eval_frac=0.25",
        "--set=train.steps=24",
    )
    found = []
    for listed in write_coloured(tmp_path):
        packed = listed.with_suffix(".rec")
        assert desk.here("data", "pack", str(listed), str(packed)).code == 0
        run_dir = tmp_path / f"run-{listed.stem}"
        found.append(train(desk, run_dir, *settings, f"--set=data.train={packed}"))
        written = tomllib.loads((run_dir / "config.toml").read_text())["task"]
        labels = np.loadtxt(listed, usecols=range(1, 2 + len(found) - 1), ndmin=2)
        assert np.atleast_1d(written["target_mean"]) == pytest.approx(labels.mean(0), rel=1e-4)
        assert np.atleast_1d(written["target_std"]) == pytest.approx(labels.std(0), rel=1e-4)
        exported = json.loads((run_dir / "export/task.json").read_text())
        assert exported["target_mean"] == written["target_mean"]
    one, two = found
    assert one["r2"] > 0.5
    assert two.keys() == {"loss", "mae/0", "mae/1", "rmse/0", "rmse/1", "r2/0", "r2/1"}
    assert min(two["r2/0"], two["r2/1"]) > 0.5
    assert two["rmse/1"] > 10 * two["rmse/0"]  # its unit is 51 times as fine


def test_a_label_that_is_no_class_is_refused(desk: Desk, tmp_path: Path) -> None:
    listed = write_coloured(tmp_path)[1]
    packed = tmp_path / "two.rec"
    assert desk.here("data", "pack", str(listed), str(packed)).code == 0
    label = ", ".join(str(float(np.float32(number))) for number in listed.read_text().split("\t")[1:3])
    done = desk.here(
        "train", "--debug", "--set=task.kind=image", f"--set=data.train={packed}", f"--set=run.dir={tmp_path}/run"
    )
    assert done.code == 2
    assert "two.rec: record 0 of " in done.err
    assert f"decode raised DataError: label [{label}]\n  rule: a class is one integer from 0\n" in done.err
    assert "  try:  task.predicts=number; " in done.err


@pytest.mark.full
def test_a_number_of_a_text(desk: Desk, tmp_path: Path) -> None:
    data = write_stars(tmp_path / "stars.jsonl")
    values = train(
        desk,
        tmp_path / "run",
        "--set=task.kind=text",
        "--set=task.predicts=number",
        "--set=task.target=stars",
        f"--set=data.train={data}",
        "--set=data.seq_len=24",
        "--set=train.steps=80",
        *SMALL,
    )
    assert values["r2"] > 0.8


@pytest.mark.full
def test_mixtures_of_texts_of_several_formats(desk: Desk, tmp_path: Path) -> None:
    one = write_reviews(tmp_path / "one.jsonl")
    two = tmp_path / "two.parquet"
    convert(one, two)
    values = train(
        desk,
        tmp_path / "run",
        "--set=task.kind=text",
        f'--set=data.train=["{one}", "{two}"]',
        "--set=data.weights=[3, 1]",
        f"--set=data.eval={one}",
        "--set=data.seq_len=24",
        *SMALL,
    )
    assert values["accuracy"] == 1


@pytest.mark.full
def test_records_folders_and_addresses_of_images_together(desk: Desk, tmp_path: Path) -> None:
    """Another number for the same class in the second source; all of it with a cache, balance and augmentation."""
    one, two = write_images(tmp_path / "one"), write_images(tmp_path / "two", per_class=4)
    (two / "azure").mkdir()
    Image.new("RGB", (20, 24), (0, 128, 255)).save(two / "azure/0.png")
    packed = tmp_path / "one.rec"
    assert desk.here("data", "pack", str(one), str(packed)).code == 0
    settings = (
        "--set=task.kind=image",
        "--set=components.model=resnet14",
        "--set=image.size=8",
        "--set=image.rotate_degrees=5",
        "--set=data.cache_gib=0.01",
        "--set=task.balance=true",
        f'--set=data.train=["{packed}", "file://{two}"]',
        f'--set=data.eval=["{one}", "{packed}"]',
        "--set=train.steps=16",
    )
    together = train(desk, tmp_path / "together", *settings)
    assert together["accuracy"] == 1
    mixed = train(desk, tmp_path / "mixed", *settings, "--set=data.weights=[3, 1]")
    assert mixed["accuracy"] == 1
    for name in ("together", "mixed"):
        written = tomllib.loads((tmp_path / name / "config.toml").read_text())
        assert written["task"]["classes"] == ["blue", "red", "azure"]


@pytest.mark.full
def test_image_records_with_one_label_or_a_list_of_one(desk: Desk, tmp_path: Path) -> None:
    data = write_bright(tmp_path / "bright.jsonl")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    found = []
    for name in ("one", "list"):
        with RecordWriter(tmp_path / f"{name}.rec") as writer:
            for row in rows:
                label = np.array([row["light"]], np.float32) if name == "list" else float(row["light"])
                writer.write(pack_header(ImageHeader(label=label), base64.b64decode(row["image"]["base64"])))
        settings = ("--set=task.kind=image", "--set=image.size=16", "--set=data.eval_frac=0.25", "--set=train.steps=12")
        found.append(
            train(
                desk,
                tmp_path / name,
                *settings,
                f"--set=data.train={tmp_path / name}.rec",
                "--set=components.model=resnet14",
            )
        )
    assert found[0] == found[1]
    assert found[0]["accuracy"] > 0.6


@pytest.mark.full
def test_records_without_an_image_header(desk: Desk, tmp_path: Path) -> None:
    data = write_bright(tmp_path / "bright.jsonl")
    records = tmp_path / "bright.rec"
    convert(data, records, columns=["image", "light"])
    settings = ("--set=task.kind=image", "--set=task.target=light", "--set=image.size=16", "--set=data.eval_frac=0.25")
    values = [
        train(
            desk,
            tmp_path / path.suffix[1:],
            *settings,
            f"--set=data.train={path}",
            f'--set=task.inputs=["{column}"]',
            "--set=components.model=resnet14",
            "--set=train.steps=12",
        )
        for path, column in ((data, "image"), (records, "data"))
    ]
    assert values[0] == values[1]
    assert values[0]["accuracy"] > 0.6

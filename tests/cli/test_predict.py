"""``unisono predict``: every task from raw files to rows of predictions, and what happens to rows that cannot be read."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Desk, Outcome
from PIL import Image
from task_data import SMALL, write_images, write_lines, write_reviews, write_table, write_tagged

from unisono.config import load_config
from unisono.data.image import image_records
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import RecordFile, unpack_header
from unisono.data.sources import open_source
from unisono.dist import JobSpec, join_world
from unisono.train.build import find_tokenizer
from unisono.train.config import RunConfig
from unisono.train.load import load_model

STEPS = (
    "--set=plan.precision=fp32",
    "--set=plan.global_batch=16",
    "--set=train.steps=6",
    "--set=optim.lr=0.01",
    "--set=train.eval_every_steps=0",
)
LENGTH = "--set=data.seq_len=40"
TABLE = ("--set=task.kind=table", '--set=task.inputs=["x","y","kind"]', *SMALL[:2])
TASKS: dict[str, tuple[Callable[[Path], Path], str, tuple[str, ...]]] = {
    "image": (
        write_images,
        "images",
        ("--set=task.kind=image", "--set=image.size=16", "--set=components.model=resnet14", "--set=optim.lr=1e-5"),
    ),
    "text": (write_reviews, "reviews.jsonl", ("--set=task.kind=text", LENGTH, *SMALL)),
    "words": (write_tagged, "tagged.jsonl", ("--set=task.kind=sequence_labelling", LENGTH, *SMALL)),
    "class": (write_table, "table.jsonl", (*TABLE, "--set=task.target=dear")),
    "number": (write_table, "table.jsonl", (*TABLE, "--set=task.target=price", "--set=task.predicts=number")),
    "language": (write_lines, "lines.jsonl", (LENGTH, *SMALL)),
    "masked": (write_lines, "lines.jsonl", ("--set=task.kind=masked_language_model", LENGTH, *SMALL)),
}
Run = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def run(shared_desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(task)``: the folder of a short run of it, and its held-out data, which are its training data too."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(task: str) -> tuple[Path, Path]:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            write, name, settings = TASKS[task]
            data = write(folder / name)
            given = [f"--set=data.train={data}", f"--set=data.eval={data}", f"--set=run.dir={folder / 'run'}"]
            done = shared_desk.here("train", "--debug", *given, *STEPS, *settings)
            assert done.code == 0, done.err
            made[task] = folder / "run", data
        return made[task]

    return make


def rows_of(done: Outcome) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def evaluation(desk: Desk, run_dir: Path) -> dict[str, float]:
    done = desk.here("eval", str(run_dir), "--json")
    assert done.code == 0, done.err
    return done.json["evaluation"]


@pytest.mark.parametrize("task", ["image", "text", "class"])
def test_classes_of_the_held_out_samples_have_the_loss_of_an_evaluation(desk: Desk, run: Run, task: str) -> None:
    run_dir, data = run(task)
    rows = rows_of(desk.here("predict", str(run_dir), str(data), "--top-k=2"))
    if task == "image":
        actual = [Path(row["file"]).parent.name for row in rows]
        assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
        assert {row["row"] for row in rows} == {None}
    else:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        actual = [line["label" if task == "text" else "dear"] for line in lines]
        assert [row["row"] for row in rows] == [*range(1, len(lines) + 1)]
        assert {row["file"] for row in rows} == {str(data)}
    values = evaluation(desk, run_dir)
    assert np.mean([row["class"] == name for row, name in zip(rows, actual, strict=True)]) == pytest.approx(
        values["accuracy"]
    )
    chances = [dict(zip(row["top_classes"], row["top_probabilities"], strict=True)) for row in rows]
    losses = [-math.log(of_row[name]) for of_row, name in zip(chances, actual, strict=True)]
    assert np.mean(losses) == pytest.approx(values["loss"], rel=1e-4)
    names = sorted(set(actual))
    assert {(row["class"], row["class_number"]) for row in rows} <= {(name, at) for at, name in enumerate(names)}


def test_numbers_are_in_the_units_of_the_target(desk: Desk, run: Run) -> None:
    run_dir, data = run("number")
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    prices = [json.loads(line)["price"] for line in data.read_text().splitlines()]
    errors = np.array([row["number"] for row in rows]) - prices
    values = evaluation(desk, run_dir)
    assert np.abs(errors).mean() == pytest.approx(values["mae"], rel=1e-5)
    assert np.sqrt((errors**2).mean()) == pytest.approx(values["rmse"], rel=1e-5)


def test_each_word_has_a_label(desk: Desk, run: Run) -> None:
    run_dir, data = run("words")
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    assert [" ".join(row["words"]) for row in rows] == [line["words"] for line in lines]
    pairs = [
        pair
        for row, line in zip(rows, lines, strict=True)
        for pair in zip(row["labels"], line["tags"].split(), strict=True)
    ]
    assert np.mean([label == tag for label, tag in pairs]) == pytest.approx(evaluation(desk, run_dir)["accuracy"])


def test_words_beyond_the_length_of_a_sample_have_no_label(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, _ = run("words")
    (tmp_path / "long.txt").write_text("Bob runs to Rome\n" + "Bob " * 30 + "\n\n")
    short, long, empty = rows_of(desk.here("predict", str(run_dir), str(tmp_path / "long.txt")))
    assert None not in short["labels"]
    # 40 tokens: a mark, Bob, and a space and Bob each
    assert [label is not None for label in long["labels"]] == [True] * 10 + [False] * 20
    assert len(long["words"]) == len(long["probabilities"]) == 30
    assert (empty["row"], empty["words"], empty["labels"]) == (3, [], [])


def test_texts_have_the_loss_of_an_evaluation_together(desk: Desk, run: Run) -> None:
    run_dir, data = run("language")
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    loss = sum(row["loss"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    values = evaluation(desk, run_dir)
    assert loss == pytest.approx(values["loss"], rel=1e-5)
    assert math.exp(loss) == pytest.approx(values["perplexity"], rel=1e-4)
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))
    text = json.loads(data.read_text().splitlines()[0])["text"]
    assert rows[0]["tokens"] == len(text)  # each byte but the first, and the end
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["loss"] * len(text) / math.log(2) / (len(text) - 1))


def test_a_document_of_a_corpus_is_read_in_the_windows_of_an_evaluation(desk: Desk, trained: Path) -> None:
    values = evaluation(desk, trained)
    rows = rows_of(desk.here("predict", str(trained), str(desk.folder / "corpus")))
    assert [Path(row["file"]).name for row in rows] == [f"m{number}.py" for number in range(6)]
    # the hash of their names holds one out
    assert [row for row in rows if row["bits_per_byte"] == pytest.approx(values["bits_per_byte"], rel=1e-5)]
    assert [row for row in rows if row["loss"] == pytest.approx(values["loss"], rel=1e-5)]


def test_windows_of_token_shards(desk: Desk, trained: Path, tmp_path: Path) -> None:
    for name in ("m0.py", "m1.py"):
        source, target = desk.folder / "corpus" / name, tmp_path / f"{name}.bin"
        assert desk.here("data", "pack", str(source), str(target), "--kind=text").code == 0
    rows = rows_of(desk.here("predict", str(trained), str(tmp_path)))
    assert [row["row"] for row in rows] == [*range(len(rows))]
    assert sum(row["tokens"] for row in rows) == sum(
        len((desk.folder / "corpus" / name).read_bytes()) for name in ("m0.py", "m1.py")
    )


def test_masks_are_filled_as_the_model_does(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, _ = run("masked")
    text = "the [MASK]at sat on <mask>he mat"
    (tmp_path / "masked.txt").write_text(f"{text}\n")
    (row,) = rows_of(desk.here("predict", str(run_dir), str(tmp_path / "masked.txt"), "--top-k=3"))
    config = load_config(RunConfig, [run_dir / "config.toml"]).value
    world = join_world(JobSpec(), device_type="cpu", timeout_s=60)
    model, _ = load_model(config, find_tokenizer(config), world, None)
    tokens = [256, *b"the ", 257, *b"at sat on ", 257, *b"he mat"]
    with torch.no_grad():
        chances = torch.softmax(model(tokens=torch.tensor([tokens])).logits().float(), -1)[0]
    for number, place in enumerate((5, 16)):
        assert tokens[place] == 257
        best, ids = chances[place, :257].topk(3)
        assert row["top_probabilities"][number] == pytest.approx(best.tolist(), rel=1e-4)
        assert row["filling_tokens"][number] == int(ids[0])
        assert row["top_fillings"][number][0] == row["fillings"][number]
        assert row["probabilities"][number] == row["top_probabilities"][number][0]


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_each_format_has_the_same_rows(desk: Desk, run: Run, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for task in ("text", "words", "number"):
        run_dir, data = run(task)
        rows = rows_of(desk.here("predict", str(run_dir), str(data)))
        for suffix in ("jsonl", "parquet", "rec"):
            out = tmp_path / f"{task}.{suffix}"
            done = desk.here("predict", str(run_dir), str(data), f"--out={out}", "--json")
            assert done.code == 0, done.err
            assert done.json == {
                "run_dir": str(run_dir),
                "step": 6,
                "samples": len(rows),
                "errors": 0,
                "out": str(out),
            }
        assert [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()] == rows
        assert pq.read_table(tmp_path / f"{task}.parquet").to_pylist() == [{**row, "error": None} for row in rows]
        records = RecordFile(tmp_path / f"{task}.rec")
        field = {"text": "class_number", "words": "label_numbers", "number": "number"}[task]
        for number, row in enumerate(rows):
            header, payload = unpack_header(records.read(number))
            assert header.id == number
            assert np.asarray(header.label).tolist() == pytest.approx(row[field], rel=1e-6)
            assert json.loads(bytes(payload)) == row
        names = tmp_path / f"{task}.rec.classes.txt"
        assert names.exists() == (task != "number")


def test_records_of_images_are_data_to_train_on(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, data = run("image")
    done = desk.here("predict", str(run_dir), str(data), f"--out={tmp_path / 'labelled.rec'}")
    assert done.code == 0, done.err
    assert done.out == f"step 6, 24 samples: {tmp_path / 'labelled.rec'}\n"
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    records = image_records([tmp_path / "labelled.rec"])
    for row, sample in zip(rows, records.samples(np.arange(24)), strict=True):
        assert int(sample["targets"]) == row["class_number"]
        assert sample["image"].tobytes() == Path(row["file"]).read_bytes()
    assert open_source(tmp_path / "labelled.rec").class_names == {"targets": ("blue", "red")}  # type: ignore[attr-defined]
    again = rows_of(desk.here("predict", str(run_dir), str(tmp_path / "labelled.rec")))
    assert [row["row"] for row in again] == [*range(24)]
    assert [row["probability"] for row in again] == pytest.approx([row["probability"] for row in rows])


def test_images_in_one_folder_one_image_and_images_of_a_table(desk: Desk, run: Run, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run_dir, data = run("image")
    found = {name: (data / name / "3.png").read_bytes() for name in ("blue", "red")}
    flat = tmp_path / "flat"
    flat.mkdir()
    for name, content in found.items():
        (flat / f"{name}.png").write_bytes(content)
    pq.write_table(pa.table({"image": [*found.values()], "notes": [None, {"a": 1}]}), tmp_path / "images.parquet")
    rows = rows_of(desk.here("predict", str(run_dir), str(flat)))
    assert [Path(row["file"]).name for row in rows] == ["blue.png", "red.png"]
    of_table = rows_of(desk.here("predict", str(run_dir), str(tmp_path / "images.parquet"), "--batch-size=1"))
    assert [(row["file"], row["row"]) for row in of_table] == [(str(tmp_path / "images.parquet"), at) for at in (1, 2)]
    (single,) = rows_of(desk.here("predict", str(run_dir), str(flat / "red.png")))
    assert single["probability"] == pytest.approx(rows[1]["probability"]) == pytest.approx(of_table[1]["probability"])


def test_tables_of_several_files_and_formats(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, data = run("class")
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        assert desk.here("data", "convert", str(data), str(folder / name)).code == 0
    several = rows_of(desk.here("predict", str(run_dir), str(folder)))
    assert [(Path(row["file"]).name, row["row"]) for row in several] == [
        (name, at + 1) for name in ("a.csv", "b.csv") for at in range(len(rows))
    ]
    assert [row["class"] for row in several] == 2 * [row["class"] for row in rows]
    names = [tmp_path / "set" / f"rows.mindrecord{number}" for number in range(2)]
    names[0].parent.mkdir()
    with MindRecordWriter(
        names[0].with_suffix(".mindrecord"), {"x": "float64", "y": "float64", "kind": "string"}, shards=2
    ) as writer:
        for line in data.read_text().splitlines()[:7]:
            writer.write({name: value for name, value in json.loads(line).items() if name in ("x", "y", "kind")})
    assert all(name.is_file() for name in names)
    of_set = rows_of(desk.here("predict", str(run_dir), str(names[0].parent)))
    assert [(row["file"], row["row"], row["class"]) for row in of_set] == [
        (str(names[0]), at, row["class"]) for at, row in enumerate([*rows[:7:2], *rows[1:7:2]])
    ]


def test_a_value_that_no_model_reads_is_an_error_of_its_row(desk: Desk, run: Run, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run_dir, _ = run("number")
    columns: dict[str, Any] = {
        "x": [1.0, 2.0, None],
        "y": [0.0, 0.0, 0.0],
        "kind": ["flat", "house", "flat"],
        "free": [None, {"a": 1}, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "nulls.parquet")
    rows = rows_of(desk.here("predict", str(run_dir), str(tmp_path / "nulls.parquet"), "--on-error=mark"))
    assert ["error" in row for row in rows] == [False, False, True]
    assert rows[2]["error"].startswith(f"column 'x' of row 3 of {tmp_path / 'nulls.parquet'}: double with nulls")


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(run: Run, tmp_path: Path) -> Path:
    """A table whose second row has no column ``kind``, third is no JSON, and fourth has a text for a number."""
    _, data = run("number")
    lines = data.read_text().splitlines()[:5]
    second, fourth = json.loads(lines[1]), json.loads(lines[3])
    del second["kind"]
    lines[1], lines[2], lines[3] = json.dumps(second), lines[2][:-5], json.dumps(fourth | {"x": "many"})
    (tmp_path / "damaged.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "damaged.jsonl"


def test_a_row_that_cannot_be_read_ends_it_with_its_place(desk: Desk, run: Run, damaged: Path, tmp_path: Path) -> None:
    run_dir, _ = run("number")
    for name in ("out.jsonl", "out.parquet", "out.rec"):
        done = desk.here("predict", str(run_dir), str(damaged), f"--out={tmp_path / name}")
        assert done.code == 2
        assert f"{damaged}:2: line 2 of {damaged} has no column 'kind'" in done.err
        assert "try:  add the field 'kind' to the row, which has " in done.err
        assert "--on-error mark" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.jsonl"]
    done = desk.here("predict", str(run_dir), str(damaged))
    assert done.code == 2
    assert [json.loads(line)["row"] for line in done.out.splitlines()] == [1]


def test_rows_that_cannot_be_read_are_marked(desk: Desk, run: Run, damaged: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run_dir, data = run("number")
    good = rows_of(desk.here("predict", str(run_dir), str(data)))
    rows = rows_of(desk.here("predict", str(run_dir), str(damaged), "--on-error=mark"))
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5]
    assert [rows[at]["number"] for at in (0, 4)] == pytest.approx([good[at]["number"] for at in (0, 4)], rel=1e-6)
    for row, why in zip(rows[1:4], ("column 'kind'", "line 3", "the text 'many'"), strict=True):
        assert "number" not in row
        assert why in row["error"]
    out = tmp_path / "out"
    told = desk.here("predict", str(run_dir), str(damaged), "--on-error=mark", f"--out={out}.parquet", "--json").json
    assert (told["samples"], told["errors"]) == (5, 3)
    table = pq.read_table(f"{out}.parquet").to_pylist()
    assert [row["number"] is None for row in table] == [row["error"] is not None for row in table] == [0, 1, 1, 1, 0]
    done = desk.here("predict", str(run_dir), str(damaged), "--on-error=mark", f"--out={out}.rec")
    assert done.out == f"step 6, 5 samples, of which 3 could not be read: {out}.rec\n"
    labels = [unpack_header(RecordFile(f"{out}.rec").read(at))[0].label for at in range(5)]
    assert [math.isnan(float(label)) for label in labels] == [False, True, True, True, False]


def test_a_broken_image_is_marked(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, data = run("image")
    folder = tmp_path / "images"
    folder.mkdir()
    whole = (data / "red" / "0.png").read_bytes()
    (folder / "a.png").write_bytes(whole[: len(whole) // 2])
    (folder / "b.png").write_bytes(whole)
    (folder / "c.png").write_bytes(b"")
    Image.new("RGBA", (20, 20)).save(folder / "d.png")
    done = desk.here("predict", str(run_dir), str(folder))
    assert (done.code, done.out) == (2, "")
    assert f"unisono: {folder / 'a.png'}: a PNG that ends" in done.err
    rows = rows_of(desk.here("predict", str(run_dir), str(folder), "--on-error=mark"))
    assert ["error" in row for row in rows] == [True, False, True, False]
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to("a.png")
    done = desk.here("predict", str(run_dir), str(folder))
    assert (done.code, f"{folder / 'a.png'}: Too many levels of symbolic links" in done.err) == (2, True), done.err
    rows = rows_of(desk.here("predict", str(run_dir), str(folder), "--on-error=mark"))
    assert ["error" in row for row in rows] == [True, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out=a.txt"], ".jsonl, .parquet, .rec"),
        (["--out=there.jsonl"], "a file that exists is not overwritten"),
        (["--json"], "predict already prints JSON lines; --json needs --out"),
        (["--top-k=2"], "--top-k 2 for predictions of number"),
        (["--threshold=0.2"], "--threshold 0.2 for predictions of number"),
        (["--collate-fn=a.py:f"], "--collate-fn a.py:f with INPUT"),
        (["--checkpoint=x", "--best"], "one checkpoint is chosen"),
    ],
)
def test_options_that_do_not_fit_are_refused(desk: Desk, run: Run, arguments: list[str], said: str) -> None:
    run_dir, data = run("number")
    (desk.folder / "there.jsonl").write_text("mine\n")
    done = desk.here("predict", str(run_dir), str(data), *arguments)
    assert done.code == 2
    assert said in done.err + done.out
    assert (desk.folder / "there.jsonl").read_text() == "mine\n"


def test_inputs_that_do_not_fit_are_refused(desk: Desk, run: Run, tmp_path: Path) -> None:
    run_dir, _ = run("number")
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.py").write_text("rows = [1.0]\n")
    for given, said in (
        ("nothing.csv", "does not exist"),
        (tmp_path / "folder", "a folder without tables"),
        (f"{tmp_path / 'data.py'}:rows", "data are those of its task"),
    ):
        done = desk.here("predict", str(run_dir), str(given))
        assert done.code == 2
        assert said in done.err


# --- one by one, several processes, and ends -------------------------------------------------------------------------


def started(desk: Desk, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unisono", *arguments],
        cwd=desk.folder,
        env=desk.child_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_each_line_of_standard_input_is_answered_at_once(desk: Desk, run: Run) -> None:
    run_dir, data = run("number")
    rows = rows_of(desk.here("predict", str(run_dir), str(data)))
    with started(desk, "predict", str(run_dir), "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number, line in enumerate(data.read_text().splitlines()[:3]):
            process.stdin.write(f"{line}\n")
            answer = json.loads(process.stdout.readline())  # before there is another line
            assert (answer["file"], answer["row"]) == ("-", number + 1)
            assert answer["number"] == pytest.approx(rows[number]["number"], rel=1e-6)
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_an_empty_line_is_no_path_of_an_image(desk: Desk, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, data = run("image")
    path = next(data.rglob("*.png"))

    def given() -> Any:
        return type("Input", (), {"buffer": io.BytesIO(f"{path}\n\n{path}\n".encode())})

    monkeypatch.setattr(sys, "stdin", given())
    refused = desk.here("predict", str(run_dir), "-")
    assert refused.code == 2
    assert "-:2: an empty line" in refused.err
    monkeypatch.setattr(sys, "stdin", given())
    marked = rows_of(desk.here("predict", str(run_dir), "-", "--on-error=mark"))
    assert [row["row"] for row in marked] == [1, 2, 3]
    assert marked[1]["error"].startswith("an empty line")


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_command_that_is_stopped_leaves_no_file(desk: Desk, run: Run, tmp_path: Path, sent: signal.Signals) -> None:
    run_dir, data = run("number")
    with started(desk, "predict", str(run_dir), "-", f"--out={tmp_path / 'out.jsonl'}") as process:
        assert process.stdin is not None
        process.stdin.write(data.read_text().splitlines()[0] + "\n")
        while not list(tmp_path.iterdir()):  # the file under its temporary name
            assert process.poll() is None
        process.send_signal(sent)
        assert process.wait(timeout=60) == 75
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_two_processes_write_what_one_does(desk: Desk, run: Run, damaged: Path, tmp_path: Path) -> None:
    run_dir, data = run("number")
    whole = [data.read_text(), damaged.read_text()]
    (tmp_path / "both.jsonl").write_text("".join(whole))
    command = ["predict", str(run_dir), str(tmp_path / "both.jsonl"), "--on-error=mark", "--batch-size=7"]
    alone = desk.here(*command, f"--out={tmp_path / 'one.jsonl'}")
    assert alone.code == 0, alone.err
    launch = ["launch", "-n", "2", "--", sys.executable, "-m", "unisono"]
    done = desk.process(*launch, *command, f"--out={tmp_path / 'two.jsonl'}")
    assert done.code == 0, done.err
    one, two = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert len(one) == len(two) == 205
    for first, second in zip(map(json.loads, one), map(json.loads, two), strict=True):
        assert first.pop("number", 0.0) == pytest.approx(second.pop("number", 0.0), rel=1e-6)
        assert first == second
    failed = desk.process(*launch, *command[:3], f"--out={tmp_path / 'three.jsonl'}")
    assert failed.code != 0
    assert f"{tmp_path / 'both.jsonl'}:202: " in failed.err
    assert "has no column 'kind'" in failed.err
    assert not (tmp_path / "three.jsonl").exists()


# --- code of one's own -----------------------------------------------------------------------------------------------

SCRIPT = """
import torch

from unisono import PlanOptions, Trainer, TrainOptions

torch.manual_seed(0)
POINTS = torch.randn(32, 2)
ONE = torch.nn.CrossEntropyLoss()
SEVERAL = torch.nn.BCEWithLogitsLoss()


def own(outputs, batch):
    return (outputs ** 2).sum(), torch.tensor(float(len(outputs)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, inputs):
        return self.layer(inputs)


def points(several=False):
    return [(x, (x[0] > 0).repeat(3).float() if several else int(x[0] > 0)) for x in POINTS]


if __name__ == "__main__":
    for name, loss in (("one", ONE), ("several", SEVERAL), ("own", own)):
        with Trainer(
            Net(),
            points(name == "several"),
            PlanOptions(global_batch=8),
            objective=loss,
            options=TrainOptions(steps=2, eval_every_steps=0),
            run_dir=f"script/{name}",
        ) as run:
            run.fit()
"""


@pytest.mark.full
def test_a_run_of_a_script_predicts_for_data_of_its_code(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = desk.process(python=[str(script)])
    assert done.code == 0, done.err
    code = ["--model", f"{script}:Net"]

    def predicted(name: str, *options: str) -> list[dict[str, Any]]:
        return rows_of(desk.here("predict", f"script/{name}", f"{script}:points", *code, *options))

    rows = predicted("own", f"--objective={script}:own", "--batch-size=5")
    assert [(row["file"], row["row"], row["shape"]) for row in rows] == [
        (f"{script}:points", at, [3]) for at in range(32)
    ]
    one = predicted("one", "--top-k=3")
    assert {row["class"] for row in one} <= {"0", "1", "2"}
    assert all(sum(row["top_probabilities"]) == pytest.approx(1) for row in one)
    chances = predicted("several", "--threshold=0")
    assert {tuple(row["labels"]) for row in chances} == {("0", "1", "2")}
    some = predicted("several", "--threshold=0.6")
    for row, every in zip(some, chances, strict=True):
        above = [number for number, chance in enumerate(every["probabilities"]) if chance >= 0.6]
        assert row["label_numbers"] == above
    refused = desk.here("predict", "script/one", str(script), *code)
    assert refused.code == 2
    assert "only its code knows" in refused.err


@pytest.mark.full
def test_a_pretrained_model_says_what_transformers_does(desk: Desk, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "base")
    reviews = write_reviews(tmp_path / "reviews.jsonl")
    settings = [
        f"--set=data.train={reviews}",
        f"--set=model.pretrained={tmp_path / 'base'}",
        "--set=task.kind=text",
        LENGTH,
    ]
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, *settings)
    assert done.code == 0, done.err
    rows = rows_of(desk.here("predict", str(tmp_path / "run"), str(reviews), "--top-k=2"))
    theirs: Any = BertForSequenceClassification.from_pretrained(tmp_path / "run" / "export").eval()
    for line, row in zip(reviews.read_text().splitlines()[:8], rows, strict=False):
        tokens = torch.tensor([[256, *json.loads(line)["text"].encode()]])
        with torch.no_grad():
            chances = torch.softmax(theirs(input_ids=tokens).logits, -1)[0]
        assert row["top_probabilities"] == pytest.approx(chances.sort(descending=True).values.tolist(), rel=1e-4)

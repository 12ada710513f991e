"""Our files read, and appended to, by MindSpore 2.10 itself: UNISONO_MINDSPORE_PYTHON names an interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import make_desk

from unisono.data.mindrecord import MindRecordFile

Write = Callable[..., MindRecordFile]
PYTHON = os.environ.get("UNISONO_MINDSPORE_PYTHON")
SCRIPT = Path(__file__).parents[2] / "peers/make_mindrecord_fixtures.py"
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not PYTHON, reason="set UNISONO_MINDSPORE_PYTHON to an interpreter with mindspore==2.10.0: nothing was compared"
    ),
]
WORDS = ["", "plain", "ünïcode", "数据", "🎼", 'quote " \\', "line\nbreak"]


def cases() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]]:
    """name → (schema, rows, options of the writer)."""
    rng = np.random.default_rng(0)
    scalars = {"i": "int32", "l": "int64", "f": "float32", "d": "float64", "s": "string"}
    every = [
        {
            "i": (-1) ** n * (2**n % (2**31)),
            "l": (-1) ** n * 2 ** (n % 63),
            "f": float(np.float32(rng.standard_normal())),
            "d": float(rng.standard_normal()),
            "s": WORDS[n % len(WORDS)],
        }
        for n in range(40)
    ]
    image = {"label": "int64", "image": "bytes"}
    images = [{"label": n, "image": rng.bytes(int(rng.integers(1, 9000)))} for n in range(80)]
    texts = [{"label": n, "text": "t" * int(rng.integers(0, 9000)), "image": rng.bytes(9)} for n in range(80)]
    full = [{"label": n, "image": rng.bytes(size)} for n, size in enumerate([32760, 1, 32760, 3])]
    arrays = {
        "a": {"type": "int32", "shape": [-1]},
        "b": {"type": "int64", "shape": [2, -1]},
        "c": {"type": "float32", "shape": [3]},
        "d": {"type": "float64", "shape": [-1, 2]},
        "e": "bytes",
        "n": "int32",
    }
    tensors = [
        {
            "a": (rng.integers(-(2**31), 2**31, n + 1, np.int64) >> rng.integers(0, 32, n + 1)).astype(np.int32),
            "b": rng.integers(-(2**63), 2**63 - 1, (2, n + 1), np.int64) >> rng.integers(0, 64, (2, n + 1)),
            "c": rng.standard_normal(3, np.float32),
            "d": rng.standard_normal((n + 1, 2)),
            "e": b"e" * (n % 3),
            "n": n,
        }
        for n in range(20)
    ]
    return {
        "scalars": (scalars, every, {}),
        "onlyindexed": (scalars, every, {"index_fields": ["l", "s"]}),
        "noindex": ({"f": "float32", "e": "bytes"}, [{"f": float("nan"), "e": b"x"}], {"index_fields": []}),
        "images": (image, images, {}),
        "images3shards": (image, images, {"shards": 3}),
        "emptyshard": (image, images[:2], {"shards": 3}),
        "manyshards": (image, images, {"shards": 11}),
        "texts": ({**image, "text": "string"}, texts, {}),
        "fullpages": (image, full, {}),
        "noraw": ({"image": "bytes"}, [{"image": row["image"]} for row in images], {}),
        "arrays": (arrays, tensors, {}),
        "onearray": ({"a": arrays["b"]}, [{"a": row["b"]} for row in tensors], {}),
        "floats": ({"d": arrays["d"], "c": arrays["c"]}, [{"c": row["c"], "d": row["d"]} for row in tensors], {}),
        "defaults": (image, images, {"page_bytes": 32 << 20, "header_bytes": 16 << 20}),
        "zero": ({"x": "float64", "i": "int32"}, [{"x": x, "i": 1} for x in (0.0, 2.0, -0.5)], {}),
    }


def work(tmp_path: Path, tasks: list[dict[str, Any]]) -> Any:
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    command = [str(PYTHON), str(SCRIPT), str(tmp_path / "tasks.json"), str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((tmp_path / "out.json").read_text())


def loose(row: Any) -> Any:
    """FileReader returns floats without a fraction as int."""
    return {
        name: float.fromhex(value["float"]) if isinstance(value, dict) and "float" in value else value
        for name, value in row.items()
    }


def key(row: Any) -> str:
    return json.dumps(row, sort_keys=True)


def without_nan(row: Any) -> Any:
    return {name: "nan" if value != value else value for name, value in loose(row).items()}


def test_mindspore_reads_what_we_write(tmp_path: Path, write: Write, told: Callable[[Any], Any]) -> None:
    made = {name: write(tmp_path / name, schema, rows, **options) for name, (schema, rows, options) in cases().items()}
    tasks = [
        {"read": str(records.paths[0]), "files": [path.name for path in records.paths if len(MindRecordFile([path]))]}
        for records in made.values()
    ]
    for (name, records), theirs in zip(made.items(), work(tmp_path, tasks), strict=True):
        wanted = told(cases()[name][1])
        assert theirs["len"] == len(wanted), name
        assert theirs["schema"] == {
            field: {"type": kind.type, **({"shape": list(kind.shape)} if kind.shape else {})}
            for field, kind in records.schema.items()
        }
        for file, rows in theirs["files"].items():
            ours = told(MindRecordFile([tmp_path / file]))
            assert [without_nan(row) for row in rows] == [without_nan(row) for row in ours], (name, file)
        shards = len(records.paths)
        order = [row for shard in range(shards) for row in wanted[shard::shards]]
        assert told(records) == order, name
        found = sorted(key(without_nan(row)) for row in theirs["dataset"])
        assert found == sorted(key(without_nan(row)) for row in wanted), name
        if shards == 1:
            assert [without_nan(row) for row in theirs["dataset"]] == [without_nan(row) for row in wanted], name


def test_mindspore_appends_to_what_we_write(tmp_path: Path, write: Write, told: Callable[[Any], Any]) -> None:
    rows = [{"label": n, "text": "t" * (97 * n % 2000)} for n in range(60)]
    schema = {"label": "int64", "text": "string"}
    write(tmp_path / "a", schema, rows[:25])
    path = str(tmp_path / "a")
    work(tmp_path, [{"append": path, "rows": rows[25:26]}, {"append": path, "rows": rows[26:]}])
    assert told(MindRecordFile(tmp_path / "a")) == told(rows)
    (tmp_path / "a.db").unlink()
    assert told(MindRecordFile(tmp_path / "a")) == told(rows)


def test_verbs_on_a_file_that_mindspore_writes_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "train"
    rows = [{"label": n, "text": f"text {n}"} for n in range(200)]
    schema = {"label": {"type": "int32"}, "text": {"type": "string"}}
    work(tmp_path, [{"write": str(path), "schema": schema, "rows": rows}])

    desk = make_desk(tmp_path / "desk", tmp_path / "cache")

    def data(*words: str) -> tuple[int, str]:
        done = desk.here("data", *words)
        return done.code, done.out + done.err

    code, text = data("verify", str(path))
    assert (code, text.startswith(f"ok   {path}  200 records, ")) == (0, True), text
    assert "field text: string" in data("inspect", str(path))[1]
    assert json.loads(data("cat", str(path), "--index", "7")[1]) == {"label": 7, "text": "text 7"}
    assert "random rows: " in data("bench", str(path), "--seconds", "0.05")[1]
    assert data("convert", str(path), str(tmp_path / "a.jsonl"))[0] == 0
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
    content = bytearray(path.read_bytes())
    begin = content.index(b"text 150")
    content[begin : begin + 8] = b"\xff" * 8  # no UTF-8
    path.write_bytes(content)
    code, text = data("verify", str(path))
    assert (code, "row 150 at offset" in text) == (1, True), text

"""The comparison itself: what it reads of a checkpoint, and that it names every difference. It runs no training."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tests.equality.__main__ import differences
from tests.equality.cases import BASE, CASES, toml
from tests.equality.results import of_run


def checkpoint(run: Path, values: np.ndarray, cut: int) -> None:
    """A checkpoint of one tensor in two pieces along its second dim."""
    folder = run / "checkpoints/step-00000004"
    folder.mkdir(parents=True)
    pieces, files = [], {}
    for rank, (begin, end) in enumerate(((0, cut), (cut, values.shape[1]))):
        file = f"shard-{rank:05d}-of-00002.safetensors"
        save_file({"a": np.ascontiguousarray(values[:, begin:end]), "b": np.zeros(rank + 1)}, folder / file)
        files[file] = {"bytes": 0, "digest": ""}
        pieces.append({"file": file, "key": "a", "offset": [0, begin], "shape": [len(values), end - begin]})
    manifest = {
        "step": 4,
        "meta": {"state": {"step": 4}, "order": {"seed": 0}},
        "files": files,
        "tensors": {"model.w": {"shape": list(values.shape), "dtype": "F32", "pieces": pieces}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "COMMIT").touch()


def events(run: Path, *lines: dict[str, object]) -> None:
    (run / "events").mkdir(parents=True)
    (run / "events/rank00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_tensors_compare_by_content_and_one_bit_shows(tmp_path: Path) -> None:
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    changed = values.copy()
    changed.view(np.int32)[2, 4] ^= 1
    for name, array, cut in (("a", values, 2), ("b", values, 3), ("c", changed, 2)):
        checkpoint(tmp_path / name, array, cut)
    first, other_cut, other_bit = (of_run(tmp_path / name) for name in "abc")
    assert [line.split(":")[0] for line in differences(first, other_cut)] == ["checkpoint 4 pieces"]
    assert [line.split(":")[0] for line in differences(first, other_bit)] == ["checkpoint 4 tensor model.w"]


def test_a_repeated_step_counts_once_and_times_do_not(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 1, "train/loss": 0.1, "time/forward_frac": 0.5, "t": 1.0}
    events(tmp_path / "a", step | {"train/loss": 0.3}, step, {"kind": "run_end", "step": 1, "reason": "finished"})
    events(tmp_path / "b", step | {"t": 2.0}, {"kind": "run_end", "step": 1, "reason": "finished"})
    events(tmp_path / "c", step | {"train/loss": 0.1 + 2**-56}, {"kind": "eval", "step": 1, "eval/loss": "NaN"})
    first, same, other = (of_run(tmp_path / name) for name in "abc")
    assert first == {"step 1 train/loss": "0.1", "run_end 1 reason": '"finished"'}
    assert not list(differences(first, same))
    assert list(differences(first, other)) == [
        "step 1 train/loss: 0.1 != 0.10000000000000002",
        "run_end 1 reason is missing",
        "eval 1 eval/loss is new",
    ]


def test_an_uncommitted_checkpoint_is_left_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, np.zeros((1, 2), np.float32), 1)
    (tmp_path / "checkpoints/step-00000004/COMMIT").unlink()
    assert of_run(tmp_path) == {}


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_settings_become_toml() -> None:
    read = tomllib.loads(toml(BASE))
    assert {f"{s}.{k}": v for s, section in read.items() for k, v in section.items()} == BASE

"""Suspects: confident learning by hand, outliers of losses, and losses that are of other rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from unisono.cli.data_labels import _labels_lines  # pyright: ignore[reportPrivateUsage]  # what the command prints
from unisono.data.sample_losses import LossesOf, SampleLosses, describe_files, merge_losses, read_losses
from unisono.errors import DataError
from unisono.quality.labels.confident_learning import confident_suspects, loss_suspects
from unisono.quality.labels.label_errors import LabelsResult, find_label_errors
from unisono.quality.options import DuplicateOptions

EXACT = DuplicateOptions(near=0.0)


def test_confident_learning_by_hand() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1] * 2)
    first = np.array([0.9, 0.8, 0.1, 0.2, 0.75, 0.4] * 2, np.float32)  # thresholds: 0.6 of class 0, 0.55 of class 1
    found = confident_suspects(labels, np.stack([first, 1 - first], 1))
    assert found.row.tolist() == [2, 8, 4, 10]  # samples 5 and 11 count as their own class
    assert found.suggested.tolist() == [1, 1, 0, 0]
    assert found.score == pytest.approx([-0.8, -0.8, -0.5, -0.5])


def test_a_sample_below_all_thresholds_is_no_suspect() -> None:
    labels = np.array([0, 0, 1, 1] * 3)
    first = np.array([0.95, 0.45, 0.05, 0.1] * 3, np.float32)  # thresholds 0.7 and 0.925: the second reaches none
    assert len(confident_suspects(labels, np.stack([first, 1 - first], 1)).row) == 0


@pytest.mark.parametrize(("rows", "suspects"), [(0, []), (1, []), (4, []), (5, [0])])
def test_a_class_of_few_samples_is_never_suggested(rows: int, suspects: list[int]) -> None:
    """Its threshold would be that of a model that has hardly seen it: nearly 0, which most samples reach."""
    labels = np.repeat([0, 1, 2], [10, 10, rows])
    probabilities = np.full((len(labels), 3), 0.01, np.float32)
    probabilities[np.arange(len(labels)), labels] = 0.9
    probabilities[20:] = 0.5, 0.48, 0.02
    probabilities[0] = 0.1, 0.1, 0.8
    assert confident_suspects(labels, probabilities).row.tolist() == suspects


def test_a_sample_of_a_class_of_few_samples_is_a_suspect() -> None:
    labels = np.repeat([0, 1], [10, 1])
    probabilities = np.repeat([[0.9, 0.1], [0.95, 0.05]], [10, 1], axis=0).astype(np.float32)
    found = confident_suspects(labels, probabilities)
    assert (found.row.tolist(), found.suggested.tolist()) == ([10], [0])


def test_outliers_of_losses_are_those_of_their_class() -> None:
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(1, 0.1, 100), rng.normal(9, 0.1, 100)])
    labels = np.repeat([0, 1], 100)
    losses[[7, 150, 3]] = 5.0, 12.0, np.nan
    found = loss_suspects(labels, losses)
    assert found.row.tolist() == [7, 150]  # 5 is much for the first class, and the most ordinary losses are 9
    assert (found.suggested == -1).all()
    assert (found.score[:-1] >= found.score[1:]).all()


def losses_of(paths: list[Path], labels: list[str], probabilities: Any, **changes: Any) -> SampleLosses:
    classes = sorted(set(labels))
    target = np.array([classes.index(label) for label in labels])
    array = np.asarray(probabilities, np.float32)
    fields: dict[str, Any] = {
        "version": 1,
        "num_samples": len(labels),
        "target": "label",
        "classes": classes if array.size else [],
        "files": describe_files(paths),
    }
    return SampleLosses(
        about=LossesOf(**{**fields, **changes}),
        sample=np.arange(len(labels)),
        loss=np.arange(len(labels), dtype=np.float64),
        fold=np.arange(len(labels)) % 2,
        target=target if array.size else np.full(len(labels), -1),
        probabilities=array if array.size else np.zeros((len(labels), 0), np.float32),
    )


def data_set(folder: Path, times: int = 1) -> tuple[list[Path], list[str]]:
    labels = ["x", "x", "y", "y", "x", "y"] * times
    paths = [folder / "b.jsonl", folder / "a.jsonl"]
    for path, part in zip(paths, (range(4), range(4, len(labels))), strict=True):
        path.write_text("".join(json.dumps({"text": f"t{n}", "label": labels[n]}) + "\n" for n in part))
    return paths, labels


PROBABILITIES = [[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]


def find(paths: list[Path], out: Path, losses: SampleLosses) -> LabelsResult:
    losses.write(out.with_suffix(".safetensors"))
    return find_label_errors(paths, out, "label", losses=out.with_suffix(".safetensors"), options=EXACT)


def test_losses_are_matched_with_rows_whatever_the_order_of_the_files(tmp_path: Path) -> None:
    paths, labels = data_set(tmp_path, times=2)
    result = find(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", losses_of(paths, labels, PROBABILITIES * 2)
    )
    assert (result.ranked_by, result.suspects) == ("probabilities", 4)
    assert sorted(result.confusions) == [("x", "y", 2), ("y", "x", 2)]
    lines = [json.loads(line) for line in (tmp_path / "out" / "suspects.jsonl").read_text().splitlines()]
    found = [(line["file"], line["row"], line["label"], line["suggested"], line["loss"]) for line in lines]
    assert sorted(found) == [
        ("a.jsonl", 0, "x", "y", 4.0),
        ("a.jsonl", 5, "y", "x", 9.0),
        ("a.jsonl", 6, "x", "y", 10.0),
        ("b.jsonl", 3, "y", "x", 3.0),
    ]
    assert "gives y 0.900, and x 0.100" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("loss", "is_near"), [(0.68, True), (0.3, False)])
def test_models_that_know_nothing_are_told(tmp_path: Path, loss: float, is_near: bool) -> None:
    paths, labels = data_set(tmp_path)
    losses = losses_of(paths, labels, PROBABILITIES)
    losses.loss[:] = loss
    result = find(paths, tmp_path / "out", losses)
    assert (result.mean_loss, result.chance_loss) == (pytest.approx(loss), pytest.approx(np.log(2)))
    assert result.is_near_chance == is_near
    assert any("hardly better than chance" in line for line in _labels_lines(result, tmp_path)) == is_near


@pytest.mark.parametrize(("loss", "is_near"), [(0.33, True), (0.25, False)])
def test_chance_knows_the_shares_of_the_labels(tmp_path: Path, loss: float, is_near: bool) -> None:
    """Guessing 90 % and 10 % has a loss of 0.325, far below log(2)."""
    path, labels = tmp_path / "a.jsonl", ["x"] * 36 + ["y"] * 4
    path.write_text("".join(json.dumps({"text": f"t{n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    losses = losses_of([path], labels, [[0.9, 0.1]] * 40)
    losses.loss[:] = loss
    result = find([path], tmp_path / "out", losses)
    assert result.chance_loss == pytest.approx(-0.9 * np.log(0.9) - 0.1 * np.log(0.1))
    assert result.is_near_chance == is_near


def test_losses_alone_rank_within_a_class(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    labels = ["x", "y"] * 20
    path.write_text("".join(json.dumps({"text": f"t{n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    losses = losses_of([path], labels, [])
    losses.loss[:] = np.random.default_rng(0).normal(1, 0.1, 40)
    losses.loss[12] = 8.0
    result = find([path], tmp_path / "out", losses)
    assert (result.ranked_by, result.suspects, result.confusions) == ("losses", 1, ())
    assert (result.chance_loss, result.is_near_chance) == (None, False)
    (line,) = (tmp_path / "out" / "suspects.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == 12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "other"}, "a model that predicts 'other', for labels 'label'"),
        ({"num_samples": 9}, "a data set of 9 samples, for 6 rows"),
        ({"files": []}, "losses of 0 files"),
    ],
)
def test_losses_of_other_data_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    paths, labels = data_set(tmp_path)
    with pytest.raises(DataError) as raised:
        find(paths, tmp_path / "out", losses_of(paths, labels, PROBABILITIES, **changes))
    assert said in str(raised.value)


def test_losses_of_files_that_have_changed_are_refused(tmp_path: Path) -> None:
    paths, labels = data_set(tmp_path)
    losses = losses_of(paths, labels, PROBABILITIES)
    paths[0].write_text(paths[0].read_text().replace("t1", "changed"))
    with pytest.raises(DataError) as raised:
        find(paths, tmp_path / "out", losses)
    assert "which has changed since" in str(raised.value)
    labels[0] = "y"
    with pytest.raises(DataError) as raised:
        find(paths, tmp_path / "other", losses_of(paths, labels, PROBABILITIES))
    assert "losses of labels other than those in 'label'" in str(raised.value)


def test_a_file_of_losses_that_is_none(tmp_path: Path) -> None:
    paths, labels = data_set(tmp_path)
    losses = losses_of(paths, labels, PROBABILITIES)
    file = tmp_path / "losses.safetensors"
    wrong = replace(losses, about=msgspec.structs.replace(losses.about, classes=["x"]))
    for broken in (wrong, replace(losses, sample=losses.sample[::-1]), replace(losses, target=losses.target + 5)):
        broken.write(file)
        with pytest.raises(DataError):
            read_losses(file)
    losses.write(file)
    assert np.array_equal(read_losses(file).probabilities, losses.probabilities)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError) as raised:
        find_label_errors(paths, tmp_path / "out", "label", losses=file, options=EXACT)
    assert "no losses were read" in str(raised.value)
    with pytest.raises(DataError) as raised:
        find_label_errors(paths, tmp_path / "out", "label", losses=tmp_path / "nothing", options=EXACT)
    assert "where there is no losses.safetensors" in str(raised.value)


def test_parts_of_one_data_set_are_put_together(tmp_path: Path) -> None:
    paths, labels = data_set(tmp_path)
    whole = losses_of(paths, labels, PROBABILITIES)

    def part(rows: list[int]) -> SampleLosses:
        arrays = {name: getattr(whole, name)[rows] for name in ("sample", "loss", "fold", "target", "probabilities")}
        return SampleLosses(about=whole.about, **arrays)

    merged = merge_losses([part([1, 4]), part([0, 2, 3, 5])])
    assert np.array_equal(merged.sample, whole.sample)
    assert np.array_equal(merged.probabilities, whole.probabilities)
    with pytest.raises(DataError) as raised:
        merge_losses([part([1, 4]), part([4, 5])])
    assert "losses of sample 4 in two folds" in str(raised.value)
    other = replace(part([0]), about=msgspec.structs.replace(whole.about, num_samples=7))
    with pytest.raises(DataError):
        merge_losses([part([1]), other])

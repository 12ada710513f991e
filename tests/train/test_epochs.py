"""The length of a run in epochs: the number of steps, what shows it, resuming, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from torch.utils.data import IterableDataset

from unisono import PlanOptions, Trainer, TrainOptions
from unisono.data import mixture
from unisono.data.tokens.packing import PackedWindows, pack_tokens
from unisono.data.tokens.shards import TokenWriter, open_tokens
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import ConfigError, DataError
from unisono.optim import ScheduleOptions


@pytest.mark.parametrize(
    ("last_batch", "epochs", "steps"),
    [
        # 37 samples in batches of 8
        ("rollover", 2, 10),  # 74 samples
        ("rollover", 8, 37),
        ("keep", 2, 10),
        ("pad", 3, 15),
        ("drop", 3, 12),
        ("wrap", 0.5, 3),
    ],
)
def test_the_steps_of_epochs(tmp_path: Path, last_batch: Any, epochs: float, steps: int) -> None:
    with tiny.trainer(tmp_path / "run", steps=300, epochs=epochs, last_batch=last_batch) as run:
        made = [(step.index, step.epoch) for step in run]
    assert run.options == TrainOptions(steps=steps, eval_every_steps=0)
    assert [index for index, _ in made] == list(range(1, steps + 1))
    if last_batch == "rollover":
        assert [epoch for _, epoch in made] == [1 + 8 * step // 37 for step in range(steps)]
    else:
        per_epoch = 4 if last_batch == "drop" else 5
        assert [epoch for _, epoch in made] == [1 + step // per_epoch for step in range(steps)]
    shown = [event for event in tiny.events(tmp_path / "run") if event["kind"] == "step"]
    assert [(event["step"], event["train/epoch"]) for event in shown] == made
    assert {(event["steps_total"], event["epochs_total"]) for event in shown} == {(steps, -int(-epochs // 1))}
    start = next(event for event in tiny.events(tmp_path / "run") if event["kind"] == "run_start")
    assert (start["steps_total"], start["steps_per_epoch"]) == (steps, 4 if last_batch == "drop" else 5)
    written = tomllib.loads((tmp_path / "run/config.toml").read_text())["train"]
    assert (written["steps"], written["epochs"]) == (steps, 0)


def test_a_run_in_epochs_is_the_run_in_steps(tmp_path: Path) -> None:
    in_steps = tiny.complete(tmp_path / "steps", steps=10)
    in_epochs = tiny.complete(tmp_path / "epochs", steps=300, epochs=2)
    assert in_epochs == in_steps
    # and each continues the other: the checkpoints do not differ
    with tiny.trainer(tmp_path / "steps", steps=300, epochs=2, resume="strict") as run:
        assert list(run) == []


def test_more_epochs_continue_the_run(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=300, epochs=1)
    longer = tiny.complete(tmp_path / "run", steps=300, epochs=2)
    assert (len(longer["losses"]), longer["step"]) == (5, 10)
    resumed = next(event for event in tiny.events(tmp_path / "run") if event["kind"] == "resumed")
    assert "train.steps 5 then, 10 now" in resumed["differences"]  # the cosine is longer
    tiny.complete(tmp_path / "other", steps=300, epochs=1)
    with (
        pytest.raises(Exception, match=r"train\.steps 5 then, 10 now"),
        tiny.trainer(tmp_path / "other", steps=300, epochs=2, resume="strict"),
    ):
        pass


def test_windows_documents_and_mixtures_have_epochs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, tiny.VOCAB, int(size)).astype(np.uint16) for size in rng.integers(5, 40, 30)]
    with TokenWriter(tmp_path, "t", vocab_size=tiny.VOCAB, end_of_document=0) as writer:
        for document in documents:
            writer.add(document, np.ones(len(document), np.int64))
    tokens = open_tokens(writer.paths)
    pack_tokens(tokens, 12)
    for number, data in enumerate(
        (
            TokenWindows(tokens, seq_len=12),
            TokenWindows(tokens, seq_len=12, stride=1),
            PackedWindows(tokens, seq_len=12),
            mixture([tiny.RaggedTokens(), tiny.RaggedTokens(11)], [1, 3]),
        )
    ):
        with tiny.trainer(tmp_path / str(number), steps=300, epochs=2.0, data=data) as run:
            assert run.options.steps == -(-2 * len(data) // 8)


def test_steps_with_epochs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny.trainer(tmp_path / "run", steps=20, epochs=1.5)
    assert str(caught.value) == (
        "train.steps 20 with train.epochs 1.5\n"
        "  rule: one of them is the length of the run\n"
        "  so:   it is unclear where the run ends\n"
        "  try:  train.epochs=1.5 without train.steps, or train.steps=20 without train.epochs"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("epochs", [-1, float("nan"), float("inf")])
def test_other_numbers_are_no_epochs(tmp_path: Path, epochs: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs|epochs must be >= 0\.0"):
        tiny.trainer(tmp_path / "run", steps=300, epochs=epochs)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"tokens": np.zeros(12, np.int64), "targets": np.zeros(12, np.int64)}] * 20)


def test_a_stream_has_no_epochs_but_its_steps_tell_theirs(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught, tiny.trainer(tmp_path / "a", steps=300, epochs=2, data=Numbers()):
        pass
    assert str(caught.value) == (
        "train.epochs 2 with a stream (Numbers)\n"
        "  rule: an epoch is a pass over data with a length, and a stream shows its end only when it is read\n"
        "  so:   the number of steps, which the schedule of the learning rate needs, is not known\n"
        "  try:  train.steps, or a data set with a length"
    )
    with tiny.trainer(tmp_path / "b", steps=6, data=Numbers()) as run:
        assert [step.epoch for step in run] == [1, 1, 1, 2, 2, 3]  # the epoch of a step's first sample
    assert all("epochs_total" not in event for event in tiny.events(tmp_path / "b"))


def test_warm_up_beyond_the_epochs_is_refused(tmp_path: Path) -> None:
    run = Trainer(
        tiny.model(),
        tiny.RaggedTokens(),
        PlanOptions(device="cpu", global_batch=8),
        objective="next_token",
        schedule=ScheduleOptions(kind="cosine", warmup_steps=6),
        options=TrainOptions(epochs=1),
        run_dir=tmp_path / "run",
        observe=tiny.QUIET,
    )
    with pytest.raises(ConfigError, match="warmup_steps = 6 in a run of 5 steps"), run:
        pass

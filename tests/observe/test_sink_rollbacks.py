"""Any number of restarts leaves one value of each name at each step, in every tracker that the repository brings."""

from __future__ import annotations

import csv
import importlib.util
import logging
import math
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.observe.events import EventLog, next_attempt, read_events
from unisono.observe.history import read_history
from unisono.observe.sinks.trackers import Trackers
from unisono.observe.tracked import FirstValues

SRC = Path(__file__).parents[2] / "src"
Values = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Attempt:
    """One process of a run: where it resumes (a share of the steps so far), how far it comes, and what it does."""

    resume_frac: float
    steps: int
    read_every: int  # steps are read from the device after so many; what the loop logs comes at once
    log_every: int
    eval_every: int
    evaluates_first: bool  # the state that it resumed from


ATTEMPTS = st.lists(
    st.builds(
        Attempt,
        resume_frac=st.floats(0, 1),
        steps=st.integers(0, 7),
        read_every=st.integers(1, 4),
        log_every=st.integers(1, 3),
        eval_every=st.integers(2, 4),
        evaluates_first=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


class Ledger:
    """What the trackers are to have: ``newest`` values of each (name, step), and the ``first`` that only rise in steps."""

    def __init__(self) -> None:
        self.newest: dict[Any, float] = {}
        self.first: dict[Any, float] = {}
        self._highest: dict[str, int] = {}
        self._resumed = 0

    def go_back(self, step: int) -> None:
        self._resumed = step
        self.newest = {key: value for key, value in self.newest.items() if step and key[1] <= step}

    def write(self, log: EventLog, kind: str, step: int, name: str, value: float) -> None:
        log.emit(kind, step=step, **{name: value})
        self.take(step, name, value)

    def take(self, step: int, name: str, value: float) -> None:
        if step > self._highest.get(name, -1):
            self.first[name, step], self._highest[name] = value, step
        if step > self._resumed:
            self.newest[name, step] = value
        else:
            self.newest.setdefault((name, step), value)


def emit(run_dir: Path, trackers: list[str], attempts: list[Attempt]) -> Ledger:
    """Make the run."""
    ledger, path, step = Ledger(), run_dir / "e.jsonl", 0
    for number, attempt in enumerate(attempts, start=1):
        with (
            EventLog(path, rank=0, run_id="r", attempt=next_attempt(path)) as log,
            Trackers(log, trackers, run_dir),
        ):
            step = int(step * attempt.resume_frac)
            ledger.go_back(step)
            if step:
                log.emit("resumed", step=step)
            elif number > 1:
                log.emit("started_over", step=0)
            if attempt.evaluates_first:
                ledger.write(log, "eval", step, "eval/loss", number)
            unread: list[int] = []
            for _ in range(attempt.steps):
                sample(log, step, number)
                step += 1
                unread.append(step)
                if step % attempt.log_every == 0:
                    ledger.write(log, "log", step, "own/a", number + step / 64)
                    ledger.write(log, "log", step, "own/b", number)
                if len(unread) == attempt.read_every:
                    for each in unread:
                        ledger.write(log, "step", each, "train/loss", number + each / 64)
                    unread = []
                if step % attempt.eval_every == 0:
                    ledger.write(log, "eval", step, "eval/loss", number + step / 64)
            for each in unread:
                ledger.write(log, "step", each, "train/loss", number + each / 64)
            sample(log, step, number)
            # a tracker has the means of the samples of each step, of an attempt that made one
            for each in range(step - attempt.steps, step + 1) if attempt.steps else ():
                ledger.take(each, "sys/process_cpus", number + each / 64)
    return ledger


def sample(log: EventLog, step: int, number: int) -> None:
    """Samples of the monitor while the step after ``step`` goes on, of which one is no number."""
    for difference in (-0.5, math.nan, 0.5):
        log.emit("system", step=step, **{"sys/process_cpus": number + step / 64 + difference})


def by_name(values: dict[Any, float]) -> Values:
    found: Values = {}
    for (name, step), value in sorted(values.items()):
        found.setdefault(name, []).append((step, value))
    return found


def of_csv(run_dir: Path) -> Values:
    found: Values = {}
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell and name not in ("step", "kind", "attempt", "t"):
                    found.setdefault(name, []).append((int(row["step"]), float(cell)))
    return {name: sorted(values) for name, values in found.items()}


def of_tensorboard(run_dir: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each purge
    read = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    found = {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    return {tag: sorted(values) for tag, values in found.items() if values}


@settings(max_examples=60)
@given(attempts=ATTEMPTS)
def test_table_and_tensorboard_have_the_newest_value_of_each_step(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[Attempt]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    newest = emit(run_dir, ["csv", "tensorboard"], attempts).newest
    assert [e for e in read_events(run_dir / "e.jsonl").events if e["kind"] == "sink_failed"] == []
    assert of_csv(run_dir) == by_name(newest)
    assert of_tensorboard(run_dir) == by_name(newest)
    # the report's view of the log has the same steps
    assert sorted(read_history(run_dir / "e.jsonl").steps.tolist()) == [
        at for name, at in newest if name == "train/loss"
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=60))
def test_what_cannot_be_taken_back_is_given_once(drawn: list[tuple[str, int]]) -> None:
    """A name's steps rise, in each attempt and so in all that is given; where it was is kept between attempts."""
    given_steps: list[tuple[str, int]] = []
    kept = FirstValues({})
    for name, step in drawn:
        if kept.is_new(name, step):
            given_steps.append((name, step))
        kept = FirstValues(kept.last_steps)
    assert len(given_steps) == len(set(given_steps))
    for name in "ab":
        steps = [step for each, step in given_steps if each == name]
        assert steps == sorted(steps)
        seen = [step for each, step in drawn if each == name]
        assert max(steps, default=None) == max(seen, default=None)
        assert steps[:1] == seen[:1]


# --- wandb -----------------------------------------------------------------------------------------------------------

ROLLBACKS = [
    Attempt(resume_frac=0, steps=6, read_every=4, log_every=2, eval_every=3, evaluates_first=False),
    Attempt(resume_frac=0.5, steps=5, read_every=1, log_every=1, eval_every=2, evaluates_first=True),
    Attempt(resume_frac=0.0, steps=3, read_every=2, log_every=3, eval_every=2, evaluates_first=True),
    Attempt(resume_frac=1.0, steps=7, read_every=3, log_every=1, eval_every=4, evaluates_first=False),
]

WANDB = """
import sys
from pathlib import Path
from test_sink_rollbacks import ROLLBACKS, emit
print(emit(Path(sys.argv[1]), ["wandb"], ROLLBACKS).first)
"""


def records_of(path: Path) -> list[bytes]:
    """Records of a file of wandb's, which has the layout of a log of LevelDB after seven bytes of its own."""
    data, found, part, place = path.read_bytes(), [], b"", 7
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0:
            break
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            found.append(part)
            part = b""
    return found


def of_wandb(run_dir: Path) -> Values:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Values = {}
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(path):
            record = Record()
            record.ParseFromString(data)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name, text in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((int(items["_step"]), float(text)))
    return {name: sorted(values) for name, values in found.items()}


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed: its sink is NOT tested")
def test_wandb_has_the_first_value_of_each_step(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WANDB, tmp_path],
        env=kept | {"PYTHONPATH": path, "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first = eval(done.stdout.splitlines()[-1])  # noqa: S307 our own child's repr
    assert [e for e in read_events(tmp_path / "e.jsonl").events if e["kind"] == "sink_failed"] == []
    assert of_wandb(tmp_path) == by_name(first)
    assert len({path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}) == 1

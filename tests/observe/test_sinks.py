from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from modes import FILE, left, mode_of
from procs import listening

from unisono.errors import ConfigError, ExtraError
from unisono.observe.events import Event, EventLog, next_attempt, read_events
from unisono.observe.sinks.csv_file import CsvSink
from unisono.observe.sinks.tensorboard_file import TensorBoardSink
from unisono.observe.sinks.trackers import Background, Trackers
from unisono.observe.tracked import event_metrics

SRC = Path(__file__).parents[2] / "src"


def event(kind: str, step: int, attempt: int = 1, **fields: object) -> Event:
    return {
        "kind": kind,
        "t": 1000.0 + step,
        "m": 1.0,
        "rank": 0,
        "run": "r",
        "attempt": attempt,
        "step": step,
        **fields,
    }


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def open_log(run_dir: Path, attempt: int | None = None) -> EventLog:
    path = run_dir / "e.jsonl"
    return EventLog(path, rank=0, run_id="r1", attempt=attempt or next_attempt(path))


def test_numbers_are_the_series_of_an_event() -> None:
    given = event("step", 3, steps_total=9, eta_s=1.0, note="x", flag=True, **{"train/loss": "NaN", "perf/step_s": 0.5})
    found = event_metrics(given)
    assert set(found) == {"train/loss", "perf/step_s"}
    assert math.isnan(found["train/loss"])


# --- csv -------------------------------------------------------------------------------------------------------------


def test_csv_rows_and_growing_columns(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(event("step", 1, **{"train/loss": 2.5}))
    sink.write(event("step", 2, **{"train/loss": math.nan, "perf/step_s": 0.25}))
    sink.write(event("eval", 2, **{"eval/loss": 3.0}))
    sink.write(event("checkpoint_saved", 2, bytes=7))
    sink.write(event("step", 3, **{"train/loss": 1.0, "extra": None}))
    sink.write(event("step", 4, **{"train/loss": 0.5, "extra": 7}))
    sink.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,kind,attempt,t,train/loss,perf/step_s,eval/loss,extra\n"
        "1,step,1,1001.0,2.5,,,\n"
        "2,step,1,1002.0,nan,0.25,,\n"
        "2,eval,1,1002.0,,,3.0,\n"
        "3,step,1,1003.0,1.0,,,\n"
        "4,step,1,1004.0,0.5,,,7\n"
    )
    assert mode_of(tmp_path / "metrics.csv") == left(FILE)
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_trackers_get_the_shares_of_links(tmp_path: Path) -> None:
    with open_log(tmp_path) as log, Trackers(log, ["csv"], tmp_path):
        log.emit("links", step=2, steps=2, wall_s=1.0, axes=[{"axis": "dp"}], **{"comm/dp_used_frac": 0.25})
        for step in (1, 2):
            log.emit("step", step=step, **{"train/loss": 1.0 / step})
        log.emit("links", step=2, steps=2, wall_s=1.0, axes=[])
    assert [(row["kind"], row["step"], row.get("comm/dp_used_frac", "")) for row in rows(tmp_path / "metrics.csv")] == [
        ("step", "1", ""),
        ("step", "2", ""),
        ("links", "2", "0.25"),
    ]
    assert "wall_s" not in (tmp_path / "metrics.csv").read_text()


def test_csv_goes_on_after_a_crash_without_repeating_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for attempt, resumed, steps in ((1, None, range(1, 8)), (2, 5, range(6, 9)), (3, 2, range(3, 5))):
        sink = CsvSink(path)
        if resumed is not None:
            sink.write(event("resumed", resumed, attempt))
        for n in steps:
            sink.write(event("step", n, attempt, **{"train/loss": float(n)}))
        # no close: the process was killed
        if attempt == 2:
            assert [(row["step"], row["attempt"]) for row in rows(path)] == [
                *((str(n), "1") for n in range(1, 6)),
                *((str(n), "2") for n in range(6, 9)),
            ]
        sink.close()
    assert [(row["step"], row["attempt"]) for row in rows(path)] == [("1", "1"), ("2", "1"), ("3", "3"), ("4", "3")]


def test_csv_drops_a_torn_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    for n in (1, 2, 3):
        sink.write(event("step", n, **{"train/loss": 0.5, "train/lr": 0.25}))
    sink.close()
    path.write_bytes(path.read_bytes()[:-6])
    sink = CsvSink(path)
    sink.write(event("resumed", 2, 2))
    sink.write(event("step", 3, 2, **{"train/loss": 0.75, "train/lr": 0.25}))
    sink.close()
    assert [(row["step"], row["train/loss"], row["train/lr"]) for row in rows(path)] == [
        ("1", "0.5", "0.25"),
        ("2", "0.5", "0.25"),
        ("3", "0.75", "0.25"),
    ]


@pytest.mark.parametrize("content", [b"", b"step,ki"])
def test_csv_begins_anew_where_not_even_the_header_is_whole(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    sink = CsvSink(path)
    sink.write(event("step", 1, a=1))
    sink.close()
    assert [row["step"] for row in rows(path)] == ["1"]


def test_csv_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("date,price\n1,2\n")
    with open_log(tmp_path) as log, pytest.raises(ConfigError) as caught:
        Trackers(log, ["csv"], tmp_path)
    (problem,) = caught.value.problems
    assert problem.given == f"{path} exists and starts with the columns date, price"
    assert problem.rule == "the csv tracker continues a file that starts with step, kind, attempt, t"
    assert problem.consequence == "nothing was started, the file is as it was"
    assert problem.nearest == "move that file away, or leave 'csv' out of observe.trackers"
    assert path.read_text() == "date,price\n1,2\n"


FULL_DISK = """
import resource, sys
from pathlib import Path
from unisono.observe.events import EventLog
from unisono.observe.sinks.trackers import Trackers
folder, tracker = Path(sys.argv[1]), sys.argv[2]
heard = []
log = EventLog(folder / "e.jsonl", rank=0, run_id="r", attempt=1)
log.subscribe(heard.append)
log.close()   # the disk is to fill under the tracker alone
with Trackers(log, [tracker], folder):
    log.emit("step", step=1, a=0.5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for step in range(2, 60):
        log.emit("step", step=step, a=0.5)
print([e.get("step", e.get("sink")) for e in heard])
print([e["error"] for e in heard if e["kind"] == "sink_failed"])
"""


@pytest.mark.parametrize("tracker", ["csv", "tensorboard"])
def test_full_disk_detaches_the_tracker_and_the_run_goes_on(tmp_path: Path, tracker: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path, tracker],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    heard, errors = (eval(line) for line in done.stdout.splitlines())  # noqa: S307 our own child's repr
    assert [each for each in heard if each != tracker] == list(range(1, 60))
    assert heard.count(tracker) == 1
    assert len(errors) == 1
    assert errors[0].startswith("OSError: ")
    # what was written before is whole, and the next attempt can go on
    with open_log(tmp_path, attempt=2) as log, Trackers(log, [tracker], tmp_path):
        log.emit("resumed", step=5)
        log.emit("step", step=6, a=0.25)
    if tracker == "csv":
        assert [(row["step"], row["a"]) for row in rows(tmp_path / "metrics.csv")] == [
            *((str(n), "0.5") for n in range(1, 6)),
            ("6", "0.25"),
        ]
    else:
        assert scalars(tmp_path / "tensorboard", "a") == [*((n, 0.5) for n in range(1, 6)), (6, 0.25)]


def test_disk_full_in_the_middle_of_growing_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_log(tmp_path) as log, Trackers(log, ["csv"], tmp_path):
        log.emit("step", step=1, a=1.0)

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(csv.DictWriter, "writerows", full)
            log.emit("step", step=2, a=1.0, b=2.0)
        log.emit("step", step=3, a=1.0)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,kind,attempt,t,a"
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.jsonl", "metrics.csv"]
    kinds = [(each["kind"], each.get("sink")) for each in read_events(log.path).events]
    assert kinds == [("step", None), ("step", None), ("sink_failed", "csv"), ("step", None)]


# --- tensorboard -----------------------------------------------------------------------------------------------------


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(found.step, found.value) for found in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written_and_restarts_do_not_repeat(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    for attempt, resumed, steps in ((1, None, range(1, 8)), (2, 5, range(6, 9)), (3, 2, range(3, 5))):
        sink = TensorBoardSink(tmp_path)  # three within a second: their files must still sort in this order
        if resumed is not None:
            sink.write(event("resumed", resumed, attempt))
        for n in steps:
            sink.write(event("step", n, attempt, steps_total=9, **{"train/loss": n + attempt / 8, "perf/step_s": 0.5}))
            if n == 5:
                sink.write(event("eval", n, attempt, **{"eval/loss": 0.5}))
        if attempt == 1:
            assert scalars(folder, "train/loss") == [
                (n, n + 0.125) for n in range(1, 8)
            ]  # readable before it is closed
            assert scalars(folder, "eval/loss") == [(5, 0.5)]
        sink.close()
    assert scalars(folder, "train/loss") == [(1, 1.125), (2, 2.125), (3, 3.375), (4, 4.375)]
    assert scalars(folder, "perf/step_s") == [(n, 0.5) for n in range(1, 5)]
    files = list(folder.iterdir())
    assert len(files) == 3
    assert {mode_of(path) for path in files} == {left(FILE)}


def test_a_link_in_place_of_the_table_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("without a newline")
    (tmp_path / "metrics.csv").symlink_to(precious)
    with pytest.raises(ConfigError, match="which is a link"):
        CsvSink(tmp_path / "metrics.csv")
    assert precious.read_text() == "without a newline"


def test_trackers_open_no_port(tmp_path: Path) -> None:
    before = listening(os.getpid())
    with open_log(tmp_path) as log, Trackers(log, ["csv", "tensorboard"], tmp_path):
        log.emit("step", step=1, **{"train/loss": 1.0})
        assert listening(os.getpid()) == before
    assert (tmp_path / "metrics.csv").stat().st_size > 40
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 1.0)]


def test_tensorboard_keeps_non_finite_values(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(event("step", 1, **{"train/loss": math.nan}))
    sink.close()
    ((step, value),) = scalars(tmp_path / "tensorboard", "train/loss")
    assert step == 1
    assert math.isnan(value)


# --- choosing and failing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tracker", "extra"), [("tensorboard", "track"), ("wandb", "track"), ("mlflow", "mlflow")])
def test_missing_package_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with open_log(tmp_path) as log, pytest.raises(ExtraError) as caught:
        Trackers(log, ["csv", tracker], tmp_path / "run")
    assert str(caught.value) == (
        f"tracker '{tracker}' needs the package '{tracker}', which is not installed\n"
        f"  rule: it comes with the extra '{extra}'\n"
        "  so:   nothing was started\n"
        f"  try:  pip install 'unisono[{extra}]'"
    )


def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Install a package that offers the sink ``mine``."""
    site = tmp_path / "site"
    (site / "myplug-1.0.dist-info").mkdir(parents=True)
    (site / "myplug-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: myplug\nVersion: 1.0\n")
    (site / "myplug-1.0.dist-info" / "entry_points.txt").write_text("[unisono.sinks]\nmine = myplug_module:make\n")
    (site / "myplug_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "myplug_module", raising=False)


def test_sink_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(
        tmp_path,
        monkeypatch,
        "import json\n"
        "class Mine:\n"
        "    name = 'mine'\n"
        "    def __init__(self, run_dir, run_id, attempt):\n"
        "        self.file = open(run_dir / f'{run_id}-{attempt}.txt', 'w')\n"
        "    def write(self, event):\n"
        "        self.file.write(f\"{event['kind']} {event['step']}\\n\")\n"
        "    def close(self):\n"
        "        self.file.close()\n"
        "make = Mine\n",
    )
    with open_log(tmp_path, attempt=3) as log, Trackers(log, ["mine"], tmp_path):
        for step in range(3):
            log.emit("step", step=step)
    assert (tmp_path / "r1-3.txt").read_text() == "step 0\nstep 1\nstep 2\n"


def test_sink_of_another_package_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path, monkeypatch, "def make(run_dir, run_id, attempt):\n    raise ValueError('no licence')\n")
    with open_log(tmp_path) as log, pytest.raises(ConfigError) as caught:
        Trackers(log, ["mine"], tmp_path)
    (problem,) = caught.value.problems
    assert problem.given == "tracker 'mine' of the package 'myplug' could not be opened: no licence"
    assert problem.rule == "myplug_module:make must return a sink for (run folder, run id, attempt)"
    assert problem.nearest == "update 'myplug', or leave 'mine' out of observe.trackers"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(0)", r"SystemExit\(0\)"),
        ("import sys\ndef make(*_): sys.exit(0)", r"SystemExit\(0\)"),
        ("def make(*_): return None", r"'NoneType' object has no attribute 'name'"),
        ("def make(*_): return object()", r"'object' object has no attribute 'name'"),
        (
            "class make:\n def __init__(self, *_): self.name, self.write, self.close = 3, print, print",
            "make has no name",
        ),
    ],
)
def test_a_factory_that_ends_the_process_or_makes_no_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    plug_in(tmp_path, monkeypatch, code)
    with open_log(tmp_path) as log, pytest.raises(ConfigError, match=f"'myplug' could not be opened: {reason}"):
        Trackers(log, ["mine"], tmp_path)


@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt()"])
def test_a_sink_that_ends_its_thread_is_a_failed_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    plug_in(
        tmp_path,
        monkeypatch,
        "class Mine:\n"
        "    name = 'mine'\n"
        f"    def write(self, event): raise {error}\n"
        "    def close(self): pass\n"
        "def make(run_dir, run_id, attempt): return Mine()\n",
    )
    with open_log(tmp_path) as log:
        with Trackers(log, ["mine"], tmp_path):
            log.emit("step", step=1)
        log.emit("step", step=2)
    failed = [each for each in read_events(log.path).events if each["kind"] == "sink_failed"]
    assert [(each["sink"], each["error"]) for each in failed] == [("mine", f"RuntimeError: the sink raised {error}")]


def test_unknown_tracker(tmp_path: Path) -> None:
    with (
        open_log(tmp_path) as log,
        pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'.*\n.*\n.*\n.*'tensorboard'"),
    ):
        Trackers(log, ["tensorbord"], tmp_path)


class Slow:
    """A sink that hangs until it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.steps: list[int] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.let_go.wait()
        self.steps.append(event["step"])

    def close(self) -> None:
        self.closed = True


def test_background_delivers_in_order_and_drains_on_close() -> None:
    slow = Slow()
    background = Background(slow)
    for step in range(100):
        background.write(event("step", step))
    slow.let_go.set()
    background.close()
    assert slow.steps == list(range(100))
    assert slow.closed


def test_a_sink_that_hangs_is_detached_and_never_waited_for(tmp_path: Path) -> None:
    slow = Slow()
    background = Background(slow, queue_limit=5, close_timeout_s=0.01)
    with open_log(tmp_path) as log:
        log.subscribe(background.write, background.name)
        for step in range(50):
            log.emit("step", step=step)
        background.close()
    slow.let_go.set()
    events = read_events(log.path).events
    assert sum(each["kind"] == "step" for each in events) == 50
    (failed,) = [each for each in events if each["kind"] == "sink_failed"]
    assert failed["sink"] == "slow"
    assert failed["error"] == "TimeoutError: 5 events are waiting; the sink does not keep up or hangs"


def test_a_sink_that_hangs_only_at_the_end_is_reported_at_close() -> None:
    slow = Slow()
    background = Background(slow, close_timeout_s=0.01)
    background.write(event("step", 1))
    with pytest.raises(TimeoutError, match=r"it did not finish within 0\.01 s"):
        background.close()
    slow.let_go.set()


def test_background_failure_reaches_the_next_write_once() -> None:
    class Broken(Slow):
        def write(self, event: Event) -> None:
            raise ValueError("server gone")

    background = Background(Broken())
    background.write(event("step", 1))
    background._thread.join()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match=r"server gone"):
        background.write(event("step", 2))
    background.close()


def test_failure_at_close_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(
        tmp_path,
        monkeypatch,
        "class Mine:\n"
        "    name = 'mine'\n"
        "    def write(self, event): pass\n"
        "    def close(self): raise RuntimeError('flush failed')\n"
        "def make(run_dir, run_id, attempt): return Mine()\n",
    )
    with open_log(tmp_path) as log, Trackers(log, ["mine"], tmp_path):
        log.emit("step", step=1)
    last = read_events(log.path).events[-1]
    assert (last["kind"], last["sink"], last["error"], last["during"]) == (
        "sink_failed",
        "mine",
        "RuntimeError: flush failed",
        "close",
    )


# --- wandb -----------------------------------------------------------------------------------------------------------

WANDB = """
import sys
from pathlib import Path
from unisono.observe.events import EventLog, next_attempt
from unisono.observe.sinks.trackers import Trackers
run_dir = Path(sys.argv[1])
for first, last in ((1, 5), (4, 8)):
    path = run_dir / "e.jsonl"
    attempt = next_attempt(path)
    with EventLog(path, rank=0, run_id="demo/1", attempt=attempt) as log, Trackers(log, ["wandb"], run_dir):
        if attempt > 1:
            log.emit("resumed", step=first - 1)
        for step in range(first, last + 1):
            log.emit("step", step=step, **{"train/loss": 1.0 / step})
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed: its sink is NOT tested")
def test_wandb_offline_keeps_one_run_id(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, tmp_path],
        env=kept | {"PYTHONPATH": str(SRC), "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [each["kind"] for each in read_events(tmp_path / "e.jsonl").events if each["kind"] == "sink_failed"] == []
    runs = sorted(path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run-"))
    assert len(runs) == 2
    stored = [path for folder in runs for path in folder.glob("run-*.wandb")]
    identity = (tmp_path / "tracker_id").read_text().strip()
    assert re.fullmatch(r"demo-1-[0-9a-f]{8}", identity)
    assert [path.name for path in stored] == [f"run-{identity}.wandb"] * 2
    assert all(b"train/loss" in path.read_bytes() for path in stored)


PORTS = """
import os, sys
from pathlib import Path
import psutil
from procs import listening
from unisono.observe.events import EventLog
from unisono.observe.sinks.trackers import Trackers
run_dir = Path(sys.argv[1])
with EventLog(run_dir / "e.jsonl", rank=0, run_id="demo/1", attempt=0) as log, Trackers(log, ["wandb"], run_dir):
    log.emit("step", step=1, **{"train/loss": 1.0})
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert any("wandb" in process.name() for process in processes[1:]), processes
    print([listening(process.pid) for process in processes if process.is_running()])
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed: its sink is NOT tested")
def test_processes_of_wandb_open_no_port(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", PORTS, tmp_path],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[0]) <= set("[], ")
    assert mode_of(tmp_path / "wandb") == 0o700


def test_resumed_run_has_one_history_in_every_sink(tmp_path: Path) -> None:
    """A run killed at 7 and resumed from 5, through the log, as training does it."""
    for resumed, steps in ((None, range(1, 8)), (5, range(6, 11))):
        with open_log(tmp_path) as log, Trackers(log, ["csv", "tensorboard"], tmp_path):
            if resumed is not None:
                log.emit("resumed", step=resumed)
            for n in steps:
                log.emit("step", step=n, **{"train/loss": float(n)})
                if n % 5 == 0:
                    log.emit("eval", step=n, **{"eval/loss": float(n)})
    read = rows(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in read if row["kind"] == "step"] == list(range(1, 11))
    assert [int(row["step"]) for row in read if row["kind"] == "eval"] == [5, 10]
    assert [step for step, _ in scalars(tmp_path / "tensorboard", "train/loss")] == list(range(1, 11))
    assert [step for step, _ in scalars(tmp_path / "tensorboard", "eval/loss")] == [5, 10]
    assert json.loads((tmp_path / "e.jsonl").read_text().splitlines()[-1])["attempt"] == 2

"""Trackers: write the numbers of step, eval and log events to CSV, TensorBoard, Weights & Biases and sinks of other packages.

``csv`` and ``tensorboard`` write synchronously inside the run folder. ``wandb`` (offline unless ``WANDB_MODE`` is set) and
sinks of other packages (entry-point group ``unisono.sinks``) run on a thread of their own behind a queue, because their
calls may be slow or hang. The event log detaches a sink that fails, and training continues. Steps repeated after a crash
appear once. Histograms and images are not tracked.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import io
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast

from unisono.errors import ConfigError, missing_extra, nearest_name
from unisono.observe.events import SERIES, Event, EventLog, RewindFilter, number
from unisono.observe.options import BUILT_IN_SINKS, SINK_GROUP
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file, open_new

_NOT_SERIES: Final = frozenset({"t", "m", "rank", "attempt", "step", "steps_total", "epochs_total", "eta_s"})
_QUEUE_LIMIT: Final = 10_000


class Sink(Protocol):
    """Interface of a tracker."""

    name: str

    def write(self, event: Event) -> None:
        """Take one event, on rank 0. If it raises, it is not called again."""

    def close(self) -> None:
        """Flush and release everything; called once."""


SinkFactory = Callable[[Path, str, int], Sink]
"""Factory of a sink from (run folder, run id, attempt); the type of an entry point of ``unisono.sinks``."""


def event_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of ``event`` (step, eval or log): its numeric fields without envelope, step and ETA."""
    series = ((name, number(value)) for name, value in event.items() if name not in _NOT_SERIES)
    return {name: value for name, value in series if value is not None}


class Trackers:
    """Opens the named sinks and subscribes them to the event log; ``close`` closes them. For rank 0 only.

    Args:
        log: Event log whose events the sinks receive.
        names: ``csv``, ``tensorboard``, ``wandb``, or names of entry points of ``unisono.sinks``.
        run_dir: Folder of the run that the sinks write to.

    Raises:
        ExtraError: The package of a tracker is missing.
        ConfigError: A tracker is unknown or cannot be opened. Nothing was written.
    """

    def __init__(self, log: EventLog, names: Sequence[str], run_dir: Path) -> None:
        self._log = log
        self._sinks: list[Sink] = []
        self._failed: set[str] = set()
        self._feeding = True
        try:
            for name in names:
                self._sinks.append(_open(name, run_dir, log.run_id, log.attempt))
        except BaseException:
            self.close()
            raise
        for sink in self._sinks:
            log.subscribe(self._feed(sink), sink.name)

    def close(self) -> None:
        """Flush and close every sink; a sink that fails is reported by a ``sink_failed`` event. Idempotent."""
        self._feeding = False
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except Exception as error:
                if sink.name not in self._failed:  # an earlier failure was already reported
                    said = f"{type(error).__name__}: {error}"
                    self._log.emit("sink_failed", sink=sink.name, error=said, during="close")

    def _feed(self, sink: Sink) -> Callable[[Event], None]:
        def feed(event: Event) -> None:
            try:
                if self._feeding:
                    sink.write(event)
            except Exception:
                self._failed.add(sink.name)
                raise

        return feed

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open(name: str, run_dir: Path, run_id: str, attempt: int) -> Sink:
    if name == "csv":
        return CsvSink(run_dir / "metrics.csv")
    if name == "tensorboard":
        _need("tensorboard", "tensorboard")
        return TensorBoardSink(run_dir / "tensorboard")
    if name == "wandb":
        _need("wandb", "wandb")
        return Background(WandbSink(run_dir, run_id))
    offered = {entry.name: entry for entry in entry_points(group=SINK_GROUP)}
    if name not in offered:
        raise ConfigError(
            given=f"unknown tracker {name!r}",
            rule=f"a tracker is built in or an installed entry point of the group {SINK_GROUP!r}",
            consequence="nothing was started",
            nearest=nearest_name(name, [*BUILT_IN_SINKS, *offered]),
        )
    return Background(_plugged(offered[name], run_dir, run_id, attempt))


def _need(package: str, tracker: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise missing_extra("track", package, f"tracker {tracker!r}")


def _plugged(entry: EntryPoint, run_dir: Path, run_id: str, attempt: int) -> Sink:
    try:
        factory = cast(SinkFactory, entry.load())
        return factory(run_dir, run_id, attempt)
    except Exception as error:  # a plug-in may raise anything; the error must name its package
        package = entry.dist.name if entry.dist is not None else entry.value
        raise ConfigError(
            given=f"tracker {entry.name!r} of the package {package!r} could not be opened: {error}",
            rule=f"{entry.value} must return a sink for (run folder, run id, attempt)",
            consequence="nothing was started",
            nearest=f"update {package!r}, or leave {entry.name!r} out of observe.trackers",
        ) from error


class CsvSink:
    """Writes ``metrics.csv``: one row per step, eval or log event, and a column for each metric from its first value on.

    Each row is one append. A new column, or a step back after a crash, rewrites the file and replaces it atomically. A row
    truncated by a kill is dropped when the file is opened.

    Raises:
        ConfigError: The file exists and does not start with the columns step, kind, attempt, t.
    """

    name = "csv"
    _FIXED = ("step", "kind", "attempt", "t")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rewind = RewindFilter()
        self._columns: list[str] = list(self._FIXED)
        self._seen: set[str] = set()  # field names seen before: the common row needs no search for new columns
        self._last_step = -1
        make_folder(path.parent)
        if path.is_symlink():
            raise ConfigError(
                given=f"{path}, which is a link",
                rule="the csv tracker writes a file of the run's own folder",
                consequence="nothing was started, and what it leads to is as it was",
                nearest="remove the link, or leave 'csv' out of observe.trackers",
            )
        if path.exists() and path.stat().st_size > 0:
            self._drop_torn_row()
            self._read_existing()
        else:
            self._replace(iter(()))
        self._fd = self._open()

    def write(self, event: Event) -> None:
        back_to = self._rewind.see(event)
        if back_to is not None and back_to <= self._last_step:
            self._rewrite(lambda row: int(row["step"]) < back_to)
            self._last_step = back_to - 1
        if event["kind"] not in SERIES:
            return
        if not self._seen.issuperset(event):
            self._seen.update(name for name, value in event.items() if value is not None)
            new = [name for name in event_metrics(event) if name not in self._columns]
            if new:
                self._columns += new
                self._rewrite(lambda _: True)
        data = (",".join([_cell(event.get(name)) for name in self._columns]) + "\n").encode()
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes of a row could be written to {self._path}")
        self._last_step = max(self._last_step, int(event["step"]))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _rewrite(self, keep: Callable[[Mapping[str, str]], bool]) -> None:
        with open(self._path, encoding="utf-8", newline="") as old:
            self._replace(row for row in csv.DictReader(old) if keep(row))
        self.close()
        self._fd = self._open()

    def _replace(self, rows: Iterable[Mapping[str, str]]) -> None:
        with new_file(self._path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            text.detach()  # flushes, and leaves the file open

    def _drop_torn_row(self) -> None:
        with open(os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 4096)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                end = start
            file.truncate(0)

    def _read_existing(self) -> None:
        with open(self._path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or self._FIXED)
            if tuple(columns[: len(self._FIXED)]) != self._FIXED:
                raise ConfigError(
                    given=f"{self._path} exists and starts with the columns {', '.join(columns[:4])}",
                    rule=f"the csv tracker continues a file that starts with {', '.join(self._FIXED)}",
                    consequence="nothing was started, the file is as it was",
                    nearest="move that file away, or leave 'csv' out of observe.trackers",
                )
            self._columns = columns
            self._last_step = max((int(row["step"]) for row in reader), default=-1)
        if self._path.stat().st_size == 0:  # the file only had a truncated header
            self._replace(iter(()))


def _cell(value: Any) -> str:
    """Format a cell: ``nan`` and ``inf`` as numpy, pandas and spreadsheets read them; other text is left empty."""
    if value is None:
        return ""
    if type(value) in (float, int):
        return repr(value)
    if value in SERIES:
        return value
    encoded = number(value)
    return "" if encoded is None else repr(encoded)


class TensorBoardSink:
    """Writes scalars for TensorBoard, one event file per attempt, with the ``tensorboard`` package alone.

    After a restart, ``SessionLog.START`` at the first repeated step makes readers drop the earlier attempt's values from
    there on. Costs about 0.3 ms per step event, mostly for the checksum.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._continues = bool(earlier)
        self._rewind = RewindFilter()
        path = folder / f"events.out.tfevents.{_later_second(earlier):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = records.RecordWriter(open_new(path))
        self._put(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Event) -> None:
        back_to = self._rewind.see(event)
        if back_to is not None and self._continues:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._put(self._events.Event(wall_time=event["t"], step=back_to, session_log=start))
        if event["kind"] not in SERIES:
            return
        values = [
            self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in event_metrics(event).items()
        ]
        summary = self._summaries.Summary(value=values)
        self._put(self._events.Event(wall_time=event["t"], step=event["step"], summary=summary))
        self._continues = True

    def close(self) -> None:
        self._writer.close()

    def _put(self, record: Any) -> None:
        self._writer.write(record.SerializeToString())
        self._writer.flush()  # a full disk must raise here, not at exit


def _later_second(earlier: Sequence[Path]) -> int:
    """A second after those of earlier files: readers sort files by the second in their name, also after a quick restart."""
    seconds = [int(match.group(1)) for path in earlier if (match := re.search(r"tfevents\.(\d+)\.", path.name))]
    return max([int(time.time()), *(second + 1 for second in seconds)])


class WandbSink:
    """Writes to ``<run folder>/wandb`` for ``wandb sync``; the run id stays the same over restarts.

    Offline unless the environment variable ``WANDB_MODE`` is set. Collects nothing about the machine, the command line or the
    code. Steps are logged with their number, so a synchronised run ignores repeated ones.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, run_id: str) -> None:
        wandb: Any = importlib.import_module("wandb")
        settings = wandb.Settings(
            console="off",
            quiet=True,
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # what wandb makes in it has the permissions that the umask leaves, others' write too
        make_folder(run_dir / "wandb", mode=0o700)
        self._run: Any = wandb.init(
            project="unisono",
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run_id),
            name=run_id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(run_dir),
            settings=settings,
        )

    def write(self, event: Event) -> None:
        if event["kind"] in SERIES:
            self._run.log(event_metrics(event), step=int(event["step"]))

    def close(self) -> None:
        self._run.finish()


class Background:
    """Runs a sink on a daemon thread behind a bounded queue, so that a slow or hanging sink never blocks training.

    ``write`` raises the sink's earlier error, or ``TimeoutError`` if the queue is full. ``close`` raises ``TimeoutError`` if
    the queue is not empty after ``close_timeout_s`` seconds.
    """

    def __init__(self, sink: Sink, *, queue_limit: int = _QUEUE_LIMIT, close_timeout_s: float = 30.0) -> None:
        self.name = sink.name
        self._sink = sink
        self._close_timeout_s = close_timeout_s
        self._queue: queue.Queue[Event | None] = queue.Queue(queue_limit)
        self._failure: Exception | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._work, name=f"unisono-sink-{sink.name}", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        if self._failure is not None:
            self._reported = True
            raise self._failure
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._reported = True
            raise TimeoutError(
                f"{self._queue.maxsize} events are waiting; the sink does not keep up or hangs"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=0 if self._reported or self._failure else self._close_timeout_s)
        self._thread.join(self._close_timeout_s if not self._reported else 0)
        if self._reported:
            return
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it did not finish within {self._close_timeout_s:g} s")

    def _work(self) -> None:
        try:
            while (event := self._queue.get()) is not None:
                self._sink.write(event)
            self._sink.close()
        except Exception as error:  # raised by the next write or by close
            self._failure = error

"""Opens the sinks that a configuration names, and feeds them the events of rank 0."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, Protocol, cast

from unisono.errors import ConfigError, missing_extra, nearest_name
from unisono.observe.events import Event, EventLog
from unisono.observe.options import BUILT_IN_SINKS, SINK_GROUP
from unisono.observe.sinks.csv_file import CsvSink
from unisono.observe.sinks.mlflow_run import TRACKING_URI, MlflowSink
from unisono.observe.sinks.tensorboard_file import TensorBoardSink
from unisono.observe.sinks.wandb_run import WandbSink
from unisono.observe.tracked import TrackedEvents, tracker_id

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


class Trackers:
    """Opens the named sinks and subscribes them to the event log; ``close`` closes them. For rank 0 only.

    Args:
        log: Event log whose events the sinks receive.
        names: ``csv``, ``tensorboard``, ``wandb``, ``mlflow``, or names of entry points of ``unisono.sinks``.
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
                sink = _open(name, run_dir, log.run_id, log.attempt)
                self._sinks.append(_Tracked(sink) if name in BUILT_IN_SINKS else sink)
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
        _need("tensorboard", name, extra="track")
        return TensorBoardSink(run_dir)
    if name == "wandb":
        _need("wandb", name, extra="track")
        return Background(WandbSink(run_dir, run_id, tracker_id(run_dir, run_id)))
    if name == "mlflow":
        _need("mlflow", name, extra="mlflow")
        if not os.environ.get(TRACKING_URI):
            _need("sqlalchemy", name, extra="mlflow")
        # its database is made in the thread, which takes seconds
        return Background(MlflowSink(run_dir, run_id, tracker_id(run_dir, run_id)), close_timeout_s=120.0)
    offered = {entry.name: entry for entry in entry_points(group=SINK_GROUP)}
    if name not in offered:
        raise ConfigError(
            given=f"unknown tracker {name!r}",
            rule=f"a tracker is built in or an installed entry point of the group {SINK_GROUP!r}",
            consequence="nothing was started",
            nearest=nearest_name(name, [*BUILT_IN_SINKS, *offered]),
        )
    return Background(_plugged(offered[name], run_dir, run_id, attempt))


def _need(package: str, tracker: str, *, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise missing_extra(extra, package, f"tracker {tracker!r}")


def _plugged(entry: EntryPoint, run_dir: Path, run_id: str, attempt: int) -> Sink:
    try:
        factory = cast(SinkFactory, entry.load())
        sink = factory(run_dir, run_id, attempt)
        if not (isinstance(sink.name, str) and callable(sink.write) and callable(sink.close)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{type(sink).__name__} has no name, write and close of a sink")
        return sink
    except (Exception, SystemExit) as error:  # a plug-in may raise anything; the error must name its package
        package = entry.dist.name if entry.dist is not None else entry.value
        reason = repr(error) if isinstance(error, SystemExit) else error
        raise ConfigError(
            given=f"tracker {entry.name!r} of the package {package!r} could not be opened: {reason}",
            rule=f"{entry.value} must return a sink for (run folder, run id, attempt)",
            consequence="nothing was started",
            nearest=f"update {package!r}, or leave {entry.name!r} out of observe.trackers",
        ) from error


class _Tracked:
    """Passes a tracker the events that ``TrackedEvents`` makes of a run's."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self._sink = sink
        self._tracked = TrackedEvents()

    def write(self, event: Event) -> None:
        for each in self._tracked.see(event):
            self._sink.write(each)

    def close(self) -> None:
        try:
            for event in self._tracked.rest():
                self._sink.write(event)
        finally:
            self._sink.close()


class Background:
    """Runs a sink on a daemon thread behind a bounded queue, so that a slow or hanging sink never blocks training.

    ``write`` raises the sink's earlier error, or ``TimeoutError`` if the queue is full. ``close`` raises ``TimeoutError`` if
    the queue is not empty after ``close_timeout_s`` seconds. A sink that collects values has a method ``flush()``, which is
    called whenever the queue is empty.
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
            flush: Callable[[], None] = getattr(self._sink, "flush", lambda: None)
            while (event := self._queue.get()) is not None:
                self._sink.write(event)
                if self._queue.empty():
                    flush()
            self._sink.close()
        except Exception as error:  # raised by the next write or by close
            self._failure = error
        except BaseException as error:  # such as SystemExit, which would end training where it is raised again
            self._failure = RuntimeError(f"the sink raised {error!r}")

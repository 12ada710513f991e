"""The console, the trackers and the report of a run, fed from the events of rank 0."""

from __future__ import annotations

import logging
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from unisono.dist.progress import at_work
from unisono.errors import UnisonoError
from unisono.observe.console import Console
from unisono.observe.events import Event, EventLog
from unisono.observe.formatting import RunEndFacts
from unisono.observe.goodput import GoodputLedger, launch_spans
from unisono.observe.history import RankHistory, read_history
from unisono.observe.options import ObserveOptions
from unisono.observe.run_summary import summarise
from unisono.observe.sinks.trackers import Trackers
from unisono.report import write_report
from unisono.storage.files import os_reason

_LOG: Final = logging.getLogger("unisono.observe")


class RunOutputs:
    """Shows the events of a run while it is open; ``summary`` ends it. For rank 0 only.

    Args:
        events: Event log of rank 0.
        options: Console mode, trackers, and whether a report is written.
        run_dir: Folder of the run.

    Raises:
        ExtraError: The package of a tracker is missing.
        ConfigError: A tracker is unknown or cannot be opened.
    """

    def __init__(self, events: EventLog, options: ObserveOptions, run_dir: Path) -> None:
        self._events, self._options, self._run_dir = events, options, run_dir
        with ExitStack() as stack:
            self._console = stack.enter_context(Console(mode=options.console))
            events.subscribe(self._show, self._console.name)
            stack.enter_context(Trackers(events, options.trackers, run_dir))
            self._stack = stack.pop_all()

    def _show(self, event: Event) -> None:
        if not (event["kind"] == "run_end" and event.get("reason") == "failed"):  # its error is printed in full
            self._console(event)

    @at_work("the report", silent=True)
    def write_report(self) -> Path | None:
        """Write the report; returns its path, or None if there is to be none or it cannot be written: the run is finished."""
        if not self._options.report:
            return None
        try:
            return write_report(self._run_dir)
        except Exception as error:  # such as what an earlier attempt, or somebody else, left in the folder
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, UnisonoError):
                reason = error.problems[0].given
            elif isinstance(error, OSError):
                reason = os_reason(error)
            again = f"unisono report {shlex.quote(str(self._run_dir))}"
            _LOG.warning("report.html was not written: %s; %s makes it of the events", reason, again)
            return None

    def summary(self, facts: RunEndFacts) -> RankHistory:
        """Print the summary of the run; returns the history that it is of."""
        history = read_history(self._events.path)
        ledger = GoodputLedger()
        ledger.add(history)
        goodput = ledger.result(launch_spans(self._run_dir))
        self._console.summary(replace(summarise(history), goodput=goodput), facts)
        return history

    def close(self) -> None:
        """Close console and trackers. Idempotent."""
        self._stack.close()

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            self.write_report()
        self.close()

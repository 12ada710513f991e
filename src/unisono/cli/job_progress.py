"""The progress of a job over a data set on standard error: a live line on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from unisono.cli.common import LOG
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.exit_codes import REQUEUE

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from unisono.quality.progress import Progress, Unit

_LOG_EVERY_S: Final = 10.0
_FRAMES_PER_S: Final = 4
_BAR_WIDTH: Final = 24


@contextmanager
def resumable(out: Path | None) -> Generator[Progress]:
    """Show the progress of a job, say where an interrupted one goes on, and exit with 75 after Ctrl-C or SIGTERM."""
    try:
        with sigterm_interrupts(), job_progress() as progress:
            yield progress
    except KeyboardInterrupt:
        more = f"; the same command goes on in {out}" if out is not None else ""
        echo(f"unisono: interrupted{more}", err=True)
        sys.exit(REQUEUE)


@contextmanager
def job_progress() -> Generator[Progress]:
    """Show what a job tells: on a terminal by one line that is redrawn, elsewhere by messages of the level info."""
    stderr: TextIO | None = sys.stderr  # None where it was closed before the start
    is_live = stderr is not None and stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    shown = LiveProgress(stderr) if stderr is not None and is_live else LoggedProgress()
    try:
        yield shown
    finally:
        shown.close()


@dataclass(kw_only=True, slots=True)
class JobStage:
    """A stage of a job, as far as it is.

    Attributes:
        name: What is done.
        total: How much there is to do.
        unit: Of ``total``.
        found: Of this, what an earlier process had done.
        done: How much is done, with that.
        began_s: When the stage began, of a monotonic clock in seconds.
        first: When the first of it was done, and how much that was: finding the place to go on from takes time too.
    """

    name: str
    total: int
    unit: Unit
    found: int
    done: int
    began_s: float
    first: tuple[float, int] | None = None

    def advance(self, count: int, now_s: float) -> None:
        """So much more is done."""
        self.done += count
        if self.first is None and count:
            self.first = (now_s, self.done)

    def words(self, now_s: float) -> str:
        """How far it is, how fast it goes on, and how long it will take."""
        if self.total <= 1:
            return ""
        share = min(self.done / self.total, 1.0)
        words = f"{share:.0%}, {_amount(self.done, self.unit)} of {_amount(self.total, self.unit)}"
        begun_s, begun = (self.began_s, self.found) if self.first is None else self.first
        if now_s > begun_s and self.done > begun:
            rate = (self.done - begun) / (now_s - begun_s)
            words += f", {_amount(rate, self.unit)}/s, {_duration((self.total - self.done) / rate)} left"
        return words

    def result(self, now_s: float) -> str:
        """How much was done in how long."""
        of_all = "" if self.done >= self.total else f" of {_amount(self.total, self.unit)}"
        earlier = f", {_amount(self.found, self.unit)} of this before" if self.found else ""
        return f"{_amount(self.done, self.unit)}{of_all} in {_duration(now_s - self.began_s)}{earlier}"


def _amount(count: float, unit: Unit) -> str:
    from unisono.observe.run_summary import format_gib

    if unit == "bytes":
        return format_gib(count)
    return f"{round(count):,} {unit.removesuffix('s') if round(count) == 1 else unit}"


def _duration(seconds: float) -> str:
    from unisono.observe.run_summary import duration

    return duration(seconds)


class LoggedProgress:
    """A message for each stage once it has ended, and at most every ten seconds one that says how far it is.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage: JobStage | None = None
        self._logged_s = clock()

    def begin(self, stage: str, total: int, unit: Unit, *, done: int = 0) -> None:
        """See ``Progress``."""
        self.close()
        self._logged_s = self._clock()
        self._stage = JobStage(name=stage, total=total, unit=unit, found=done, done=done, began_s=self._logged_s)

    def advance(self, count: int) -> None:
        """See ``Progress``."""
        now_s = self._clock()
        if (stage := self._stage) is not None:
            stage.advance(count, now_s)
            if now_s - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = now_s
                LOG.info("%s: %s", stage.name, stage.words(now_s))

    def close(self) -> None:
        """The stage has ended."""
        if (stage := self._stage) is not None:
            self._stage = None
            LOG.info("%s: %s", stage.name, stage.result(self._clock()))


class LiveProgress:
    """One line at the bottom of a terminal, which vanishes when the job ends. Messages of the log stand above it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage: JobStage | None = None
        self._live: Live | None = None
        self._handlers: list[logging.StreamHandler[Any]] = []

    def begin(self, stage: str, total: int, unit: Unit, *, done: int = 0) -> None:
        """See ``Progress``."""
        now_s = time.monotonic()
        self._stage = JobStage(name=stage, total=total, unit=unit, found=done, done=done, began_s=now_s)
        if self._live is None:
            self._live = self._start()
        else:
            self._live.refresh()

    def advance(self, count: int) -> None:
        """See ``Progress``."""
        if self._stage is not None:
            self._stage.advance(count, time.monotonic())

    def close(self) -> None:
        """Remove the line."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            for handler in self._handlers:
                handler.setStream(self._stream)

    def _start(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        from unisono.observe.console import Stream

        # a terminal that is lost does not end the job
        console = Console(
            file=cast(TextIO, Stream(self._stream)),
            force_terminal=True,
            force_jupyter=False,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,
            vertical_overflow="crop",
        )
        live.start(refresh=True)
        console.show_cursor(True)  # a process that is killed leaves no terminal without a cursor
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler):
                of_text = cast("logging.StreamHandler[Any]", handler)
                if of_text.stream is self._stream:
                    of_text.setStream(sys.stderr)  # which is rich's now, and writes above the line
                    self._handlers.append(of_text)
        return live

    def _draw(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        stage = self._stage
        if stage is None:
            return ""
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(stage.total, 1), completed=min(stage.done, stage.total), width=_BAR_WIDTH)
        words = Text(stage.words(time.monotonic()), no_wrap=True, overflow="ellipsis")
        line.add_row(Text(stage.name, no_wrap=True), bar, words)
        return line

"""The console of rank 0: a live progress bar on a terminal and in a notebook, ``key=value`` lines elsewhere, and the summary.

``Console`` is a listener of the event log. After a closed pipe, a lost terminal or a full disk behind stdout it raises once,
the event log detaches it, and training continues. Text that the stream cannot encode is replaced; control characters never
reach the terminal.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.observe.events import Event
from unisono.observe.formatting import Message, RunEndFacts, event_message, key_value_line, status_lines, summary_lines
from unisono.observe.run_summary import RunSummary

Mode = Literal["auto", "rich", "plain", "off"]
_REFRESH_S: Final = 0.5  # a redraw costs about a millisecond
_FALLBACK_WIDTH: Final = 80
_STYLES: Final = {"info": "", "notice": "cyan", "warning": "yellow"}


class Stream:
    """A text stream that never raises: after a failed write it stores the error in ``failure`` and drops all text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding: str = getattr(stream, "encoding", None) or "ascii"
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        if self.failure is None:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError) as error:  # ValueError: the file object was closed
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self.failure is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def encodes(self, text: str) -> bool:
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def width(self) -> int:
        """Columns of the terminal behind the stream, or 80 without a terminal."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _FALLBACK_WIDTH
        except (OSError, ValueError):
            return _FALLBACK_WIDTH

    def _give_up(self, error: Exception) -> None:
        self.failure = error
        # the interpreter would fail to flush the remaining buffer at exit and return exit code 120: discard it instead
        with contextlib.suppress(OSError, ValueError):
            fd, nowhere = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


class _View(Protocol):
    """Interface of the plain and the rich view."""

    def step(self, event: Event, *, last: bool) -> None: ...
    def say(self, said: Message) -> None: ...
    def row(self, label: str, text: str) -> None: ...
    def close(self) -> None: ...


class Console:
    """Shows the events of rank 0: subscribe it to the event log, and ``close`` it or use it as a context manager.

    Args:
        stream: Output; default stdout at construction.
        mode: ``rich`` redraws a progress bar, ``plain`` writes lines; ``auto`` is ``rich`` in a notebook and on a terminal that
            can move its cursor, else ``plain``.
        plain_every_s: Minimum seconds between two step lines of the plain view; the first and the last step are always shown.
        clock: Monotonic clock in seconds.
    """

    name = "console"

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        mode: Mode = "auto",
        plain_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        out = stream if stream is not None else sys.stdout
        self._stream = Stream(out)
        in_cell = type(out).__module__.startswith("ipykernel.")  # the output of a notebook's cells
        if mode == "auto":
            on_terminal = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            mode = "rich" if on_terminal or in_cell else "plain"
        self.mode: Mode = mode
        self._view: _View | None = None
        if mode == "rich":
            self._view = _RichView(self._stream, clock, _CellDisplay if in_cell else _TerminalDisplay)
        elif mode == "plain":
            self._view = _PlainView(self._stream, plain_every_s, clock)
        self._said_codes: set[str] = set()
        self._skips_said = 0

    def __call__(self, event: Event) -> None:
        """Show one event. Raises the stream's error, once, so that the event log detaches this console."""
        if self._view is None:
            return
        if event["kind"] == "step":
            self._view.step(event, last=event["step"] == event.get("steps_total"))
        elif (said := event_message(event)) is not None and self._first_time(event, said):
            self._view.say(said)
        if event["kind"] in ("run_end", "preempt"):
            self._view.close()
        if self._stream.failure is not None:
            self._view = None
            raise self._stream.failure

    def summary(self, summary: RunSummary, facts: RunEndFacts | None = None) -> None:
        """Print the summary of the run, unless the console is off or its stream failed."""
        if self._view is None:
            return
        self._view.close()
        ascii_only = not self._stream.encodes("▁█")
        shown = ""
        for label, text in summary_lines(summary, facts or RunEndFacts(), self._stream.width(), ascii_only=ascii_only):
            self._view.row("" if label == shown else label, text)
            shown = label

    def close(self) -> None:
        """Stop drawing and restore the terminal. Idempotent."""
        if self._view is not None:
            self._view.close()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _first_time(self, event: Event, said: Message) -> bool:
        """Whether to show a message: once per code, and only the first skipped step; the step line counts later ones."""
        if event["kind"] == "skipped_step":
            self._skips_said += 1
            return self._skips_said == 1
        if not said.code:
            return True
        new = said.code not in self._said_codes
        self._said_codes.add(said.code)
        return new


class _PlainView:
    """One line per message, and a step line at most every ``every_s`` seconds."""

    def __init__(self, stream: Stream, every_s: float, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._shown_at: float | None = None
        self._pending: Event | None = None

    def step(self, event: Event, *, last: bool) -> None:
        now = self._clock()
        if last or self._shown_at is None or now - self._shown_at >= self._every_s:
            self._line(key_value_line(event))
            self._shown_at, self._pending = now, None
        else:
            self._pending = event

    def say(self, said: Message) -> None:
        self._line(said.text if said.level == "info" else f"{said.level}: {said.text}")

    def row(self, label: str, text: str) -> None:
        self._line(f"{label:<9}{text}".rstrip())

    def close(self) -> None:
        if self._pending is not None:  # the last step is always shown
            self._line(key_value_line(self._pending))
            self._pending = None

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class _Display(Protocol):
    """Lines that are redrawn in place, from ``start`` to ``stop``, which leaves them as they are."""

    def start(self) -> None: ...
    def refresh(self) -> None: ...
    def stop(self) -> None: ...


class _TerminalDisplay:
    """Lines at the bottom of a terminal, with a visible cursor."""

    def __init__(self, console: RichConsole, draw: Callable[[], RenderableType]) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, get_renderable=draw, vertical_overflow="crop")

    def start(self) -> None:
        self._live.start()
        self._console.show_cursor(True)  # a process killed here must not leave the terminal without a cursor

    def refresh(self) -> None:
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()  # draws the last state once more and leaves it on the screen


class _CellDisplay:
    """Lines in the output of a notebook's cell. The notebook holds plain text, so nothing is left to be ended."""

    def __init__(self, console: RichConsole, draw: Callable[[], RenderableType]) -> None:
        self._width, self._draw = console.width, draw
        self._handle: Any = None

    def start(self) -> None: ...

    def refresh(self) -> None:
        out = io.StringIO()
        RichConsole(file=out, width=self._width, color_system=None, force_jupyter=False).print(self._draw())
        text = {"text/plain": out.getvalue().rstrip()}
        if self._handle is None:
            display: Any = importlib.import_module("IPython.display").display
            self._handle = display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)

    def stop(self) -> None:
        self.refresh()


class _RichView:
    """A progress bar and status lines that are redrawn in place, with messages scrolling above them."""

    def __init__(
        self, stream: Stream, clock: Callable[[], float], display: Callable[[RichConsole, Callable[[], Any]], _Display]
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._make_display = display
        self._console = RichConsole(
            file=_as_text_io(stream),
            force_terminal=True,
            force_jupyter=False,  # which would display each message by itself, as HTML
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._live: _Display | None = None
        self._drawn_at = -_REFRESH_S
        self._latest: Event | None = None
        self._warnings: list[str] = []

    def step(self, event: Event, *, last: bool) -> None:
        self._latest = event
        if self._live is None:
            self._live = self._make_display(self._console, self._draw)
            self._live.start()
        now = self._clock()
        if last or now - self._drawn_at >= _REFRESH_S:
            self._drawn_at = now
            self._live.refresh()

    def say(self, said: Message) -> None:
        if said.code and said.level == "warning":
            self._warnings.append(said.code)
        prefix = "" if said.level == "info" else f"{said.level}: "
        self._console.print(Text(prefix + said.text, style=_STYLES[said.level]), soft_wrap=True)

    def row(self, label: str, text: str) -> None:
        line = Text(f"{label:<9}", style="bold")
        line.append(text, style="not bold")
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _draw(self) -> RenderableType:
        event = self._latest
        if event is None:
            return ""
        width = max(1, self._stream.width() - 1)
        status = Text("\n".join(status_lines(event, width, warnings=self._warnings)), no_wrap=True, overflow="crop")
        total = event.get("steps_total")
        if not isinstance(total, int) or total <= 0:
            return status
        rows = Table.grid()
        rows.add_row(ProgressBar(total=total, completed=event["step"], width=min(width, 100)))
        rows.add_row(status)
        return rows


def _as_text_io(stream: Stream) -> TextIO:
    """Cast for Rich, which uses only the methods that ``Stream`` has: write, flush, isatty, encoding, fileno."""
    return cast(TextIO, stream)

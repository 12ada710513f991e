"""Text on its way to the terminal: control characters of files, names and messages are shown, not obeyed.

Every text that a command prints passes here, into a pipe too. JSON escapes control characters itself; ``unisono data cat``
writes the bytes of a record as they are, unless standard output is a terminal.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback

import click

# unisono.sanitize is imported when a text needs it: --help must not wait for its patterns


def echo(text: str, *, err: bool = False) -> None:
    """Print ``text`` and a newline on standard output or standard error; control characters appear as ``\\x1b``."""
    click.echo(shown(text), err=err)


def shown(text: str) -> str:
    """``text`` as it is printed, of one line or several."""
    if text.isascii() and text.isprintable():
        return text
    from unisono.sanitize import printable

    return printable(text, newlines=True)


def show_click_error(error: click.ClickException) -> None:
    """Print click's own text of a wrong command line; it quotes arguments, which may be names of files."""
    text = io.StringIO()
    error.show(file=text)
    click.echo(shown(text.getvalue()), nl=False, err=True)


def flush_output() -> None:
    """Write what was printed and is not written yet. Raises OSError."""
    if sys.stdout is not None and not sys.stdout.closed:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout.flush()


def is_of_output(error: OSError) -> bool:
    """Whether it was raised by printing: in click's function, through which all text goes, or by a flush that fails again."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_code is click.echo.__code__:
        return True
    try:
        flush_output()
    except OSError as again:
        return again.errno == error.errno and error.filename is None
    return False


class TextFormatter(logging.Formatter):
    """Log messages for people: without secrets, control characters shown."""

    def format(self, record: logging.LogRecord) -> str:
        from unisono.sanitize import redact_text

        return shown(redact_text(super().format(record)))


def clean_log_messages() -> None:
    """Let messages that no handler takes, which Python prints on standard error, pass through ``TextFormatter``."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TextFormatter())

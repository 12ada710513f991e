"""SIGTERM as an interrupt: what a command has started and made goes away before it ends."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Generator[None]:
    """SIGTERM raises KeyboardInterrupt inside, as Ctrl-C does; a second one ends the process at once."""

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""SIGTERM as an interrupt: what a command has started and made goes away before it ends."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def sigterm_interrupts() -> Generator[None]:
    """SIGTERM ends what is inside as Ctrl-C does; a second one ends the process at once."""

    has_come = False

    def stop(number: int, _frame: object) -> None:
        nonlocal has_come
        has_come = True
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if has_come and not isinstance(interrupt, Terminated):
            raise Terminated from interrupt  # Ray's C++ code raises a KeyboardInterrupt of its own in place of this one
        raise
    finally:
        signal.signal(signal.SIGTERM, before)

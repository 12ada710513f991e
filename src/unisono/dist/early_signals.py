"""SIGTERM and Ctrl-C before a run listens for them: a line says that nothing was saved, the exit code asks for another start.

Standard library and ``exit_codes`` only: it is imported before anything large.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from unisono.exit_codes import REQUEUE

EARLY_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NOTHING_SAVED = b"stopped by %s before the first step: nothing was saved; start the same command again\n"
_has_listened = False


def exit_at_stop_signals() -> None:
    """End this process as preempted at SIGTERM or SIGINT, while no run or launch has handlers: before it, and after its end.

    A launcher starts its ranks with both blocked (``launch/workers.py``): one that has arrived by now takes effect here. SIGINT
    stays ignored where it is, as in the background of a shell, and is KeyboardInterrupt with ``--debug``, for a debugger.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and "--debug" not in sys.argv:
        signal.signal(signal.SIGINT, _exit)
    signal.signal(signal.SIGTERM, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY_SIGNALS)


def note_listener() -> None:
    """A run or a launch listens for signals from now on: what is saved is for it to say, also after its end."""
    global _has_listened
    _has_listened = True


def _exit(number: int, frame: FrameType | None) -> None:
    # a write of a constant and the end: the process may be in the middle of an import
    if not _has_listened:
        with suppress(OSError):  # standard error may be closed
            os.write(2, _NOTHING_SAVED % signal.Signals(number).name.encode())
    os._exit(REQUEUE)

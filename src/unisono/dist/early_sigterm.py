"""SIGTERM before a run listens for it: one line says that nothing was saved, and the exit code asks for another start.

Standard library and ``exit_codes`` only: it is imported before anything large.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

from unisono.exit_codes import REQUEUE

_NOTHING_SAVED = b"stopped by SIGTERM before the first step: nothing was saved; start the same command again\n"
_has_listened = False


def exit_at_sigterm() -> None:
    """End this process as preempted at SIGTERM, while no run or launch has a handler of its own: before it, and after its end.

    A launcher starts its ranks with SIGTERM blocked (``launch/workers.py``): one that has arrived by now takes effect here.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def note_listener() -> None:
    """A run or a launch listens for signals from now on: what is saved is for it to say, also after its end."""
    global _has_listened
    _has_listened = True


def _exit(number: int, frame: FrameType | None) -> None:
    # a write of a constant and the end: the process may be in the middle of an import
    if not _has_listened:
        with suppress(OSError):  # standard error may be closed
            os.write(2, _NOTHING_SAVED)
    os._exit(REQUEUE)

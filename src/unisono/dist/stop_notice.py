"""A stop request that is noticed even while the main thread is blocked in a collective. No torch.

A Python signal handler runs only when the main thread is back in the interpreter. A rank that waits for a hung peer
inside ``all_reduce`` would see its SIGTERM only after the collective's time-out, when the grace period is over. The
interpreter's C-level handler runs immediately and writes one byte to the wakeup descriptor, which a thread reads; the
Python handler only raises KeyboardInterrupt at a second SIGINT. (``sigwait`` in a thread does not work: native threads
do not share the signal mask, and one of them would receive the signal with its default action.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from unisono.dist.early_signals import note_listener
from unisono.dist.notebook import in_notebook

INTERRUPTED = "interrupted: the run ends after this step with its state saved; Ctrl-C again raises KeyboardInterrupt"


class StopNotice:
    """Context manager that turns SIGTERM and SIGINT into ``requested``; enter it on the main thread.

    A process has one. Those that want to hear of the same signals enter that of ``shared``; the last one that leaves it puts
    everything back.

    ``signals`` may include others, such as SIGUSR1 if the batch system warns with it. A second SIGINT raises
    KeyboardInterrupt on the main thread. A third one ends a process whose main thread is blocked, but never a notebook's
    kernel. The caller decides what a stop leads to: a last step, a save, exit code 75.

    Args:
        signals: The signals that request a stop.
        announce: Whether to print one line on standard error if the first signal is SIGINT.

    Attributes: ``signal_name`` and ``at_monotonic_s`` (seconds, ``time.monotonic``) of the first signal, None before it.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        announce: bool = False,
    ) -> None:
        self.signals = tuple(signals)
        self._announce = announce
        # counted by the thread, which sees a signal at once, and by the handler, which may see several as one
        self._num_interrupts = self._num_handled = 0
        self._event = threading.Event()
        self.signal_name: str | None = None
        self.at_monotonic_s: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_fd = -1
        self._reader: threading.Thread | None = None
        self._write_end: socket.socket | None = None
        self._num_holders = 0

    @classmethod
    def shared(cls, *, announce: bool = False) -> StopNotice:
        """The notice that is active in this process, to be entered once more, or a new one."""
        return _active or cls(announce=announce)

    @staticmethod
    def is_requested() -> bool:
        """Whether the notice that is active in this process, if there is one, has been asked for a stop."""
        return _active is not None and _active.requested

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived since the context was entered."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for a stop request; returns ``requested``."""
        return self._event.wait(timeout_s)

    def __enter__(self) -> StopNotice:
        global _active
        if _active is self:
            self._num_holders += 1
            return self
        if _active is not None:
            raise RuntimeError("a StopNotice is already active: one process, one notice")
        read_end, write_end = socket.socketpair()
        write_end.setblocking(False)
        try:
            # both raise ValueError outside the main thread, before anything has been changed
            self._wakeup_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        except ValueError:
            read_end.close()
            write_end.close()
            raise
        self._write_end = write_end
        self._reader = threading.Thread(target=self._read, args=(read_end,), name="unisono-stop-notice", daemon=True)
        self._reader.start()
        self._handlers = {number: signal.signal(number, self._handle) for number in self.signals}
        note_listener()
        _active, self._num_holders = self, 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        self._num_holders -= 1
        if self._num_holders:
            return
        _active = None
        for number, handler in self._handlers.items():
            # None stands for a handler that was not installed from Python; it cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        if self._write_end is not None and self._reader is not None:
            # forked children may hold copies of the descriptor, so closing ours alone would not end the reader
            self._write_end.shutdown(socket.SHUT_RDWR)
            self._write_end.close()
            self._reader.join()
        self._write_end = self._reader = None

    def _read(self, read_end: socket.socket) -> None:
        with read_end:
            while received := read_end.recv(64):
                for number in received:
                    if number not in self.signals:
                        continue
                    self._num_interrupts += number == signal.SIGINT
                    if not self._event.is_set():
                        self.signal_name = signal.Signals(number).name
                        self.at_monotonic_s = time.monotonic()
                        self._event.set()
                        if number == signal.SIGINT and self._announce:
                            print(INTERRUPTED, file=sys.stderr, flush=True)
                    if self._num_interrupts == 3 and not in_notebook():
                        _interrupt_now()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The Python handler. Installing it installs the C-level handler, which writes the wakeup byte."""
        if number == signal.SIGINT:
            self._num_handled += 1
            if max(self._num_handled, self._num_interrupts) > 1:
                raise KeyboardInterrupt


def _interrupt_now() -> None:
    """Raise SIGINT with its default action.

    ``signal.signal`` works only on the main thread, which may be blocked for good.
    """
    ctypes.pythonapi.PyOS_setsig(signal.SIGINT.value, ctypes.c_void_p(0))  # 0 is SIG_DFL
    os.kill(os.getpid(), signal.SIGINT)


_active: StopNotice | None = None
_mask_before_fork: set[Any] = set()


# A forked child shares handlers and the wakeup descriptor: a signal meant for the child would look like one of ours, and
# would not end the child. So stop signals wait while the fork is under way, and the child starts with default actions.
def _before_fork() -> None:
    global _mask_before_fork
    if _active is not None:
        _mask_before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, _active.signals)


def _after_fork_in_parent() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork)


def _after_fork_in_child() -> None:
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        for number in _active.signals:
            signal.signal(number, signal.SIG_DFL)
        _active = None
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

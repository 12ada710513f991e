"""How busy a parameter server is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class LoadMeter:
    """Counts the time in which a server works on requests that read or change values. Thread-safe.

    Requests of several connections are served at once. ``cpu`` gives the processor time of the server's process in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time) -> None:
        self._now, self._cpu = now, cpu
        self._lock = threading.Lock()
        self._num_active = 0
        self._since_s = now()
        self._busy_s = self._served_s = 0.0

    @contextmanager
    def serving(self) -> Generator[None]:
        """Inside, one more request is served."""
        with self._lock:
            self._advance()
            self._num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._num_active -= 1

    def stats(self) -> dict[str, float]:
        """Seconds since the start: ``busy_s`` with at least one request, ``served_s`` summed over requests, and ``cpu_s``."""
        with self._lock:
            self._advance()
            return {"busy_s": self._busy_s, "served_s": self._served_s, "cpu_s": self._cpu()}

    def _advance(self) -> None:
        now_s = self._now()
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._busy_s += passed_s * (self._num_active > 0)
        self._served_s += passed_s * self._num_active

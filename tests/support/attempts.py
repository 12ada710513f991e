"""Events of runs that were started several times, at times that a test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.observe.events import encode, events_path

T0 = 1.8e9
BOOT_S = {1: 100.0, 2: 7.0, 3: 55.0}  # the monotonic clock is not that of the wall, and starts again at a boot


class Stream:
    """Events of one rank, written at times that the test sets."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.path, self.rank, self.now_s, self.attempt = events_path(run_dir, rank), rank, 0.0, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def emit(self, kind: str, **fields: Any) -> None:
        m = self.now_s - BOOT_S.get(self.attempt, 0.0)
        event = {"kind": kind, "t": T0 + self.now_s, "m": m, "rank": self.rank, "run": "r", "attempt": self.attempt}
        with self.path.open("ab") as file:
            file.write(encode({**event, **fields}) + b"\n")

    def start(self, at_s: float, *, loads_s: float, resumed: int | None = None, **fields: Any) -> None:
        """A new attempt whose first step begins ``loads_s`` after its first event."""
        self.now_s, self.attempt = at_s, self.attempt + 1
        self.emit("run_start", **fields)
        self.now_s += loads_s
        if resumed is not None:
            self.emit("resumed", step=resumed)

    def steps(self, first: int, last: int, *, every: int = 1, step_s: float = 1.0, **stalls_s: float) -> None:
        """Steps of ``step_s`` read ``every`` steps, and in each reading stalls of ``ckpt_stall``, ``eval`` and ``other``."""
        for begin in range(first, last + 1, every):
            window_s = every * step_s + sum(stalls_s.values())
            self.now_s += window_s
            shares = {
                f"time/{name}_frac": stalls_s.get(name, 0.0) / window_s for name in ("ckpt_stall", "eval", "other")
            }
            for step in range(begin, begin + every):
                measured = {"time/window_s": window_s, **shares} if step == begin + every - 1 else {}
                self.emit("step", step=step, **measured)

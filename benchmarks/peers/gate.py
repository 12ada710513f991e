"""How a worker is commanded: it trains without end, and stops at this gate after as many steps as it was told.

The parent writes ``run K``; K steps later the worker answers with one line of JSON (wall and CPU seconds of the block, loss
of its last step) and waits. A framework's own loop keeps running: only its per-step hook blocks. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Gate:
    """Takes over stdout for answers; whatever a framework prints goes to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left = 0
        self._wall_s = self._cpu_s = 0.0

    def open(self, **facts: Any) -> None:
        """Say what is running here, then wait for the first block."""
        self._answer(facts)
        self._wait()

    def step_done(self, loss: Callable[[], float]) -> None:
        """Call after each step; ``loss`` is read at the end of a block only, and inside its time."""
        self._left -= 1
        if self._left:
            return
        value = loss()
        now_s, cpu_s = time.perf_counter(), time.process_time()
        self._answer({"wall_s": now_s - self._wall_s, "cpu_s": cpu_s - self._cpu_s, "loss": value})
        self._wait()

    def _answer(self, facts: dict[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def _wait(self) -> None:
        command = sys.stdin.readline().split()
        if not command or command[0] != "run":
            os._exit(0)
        self._left = int(command[1])
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

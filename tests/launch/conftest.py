"""A failed test leaves no launch behind either."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import launching
import pytest
from procs import marked


@pytest.fixture(autouse=True)
def _no_launch_survives() -> Iterator[None]:
    yield
    while launching.STARTED:
        launched = launching.STARTED.pop()
        with suppress(ProcessLookupError):
            launched.process.kill()
        launched.process.communicate()
        for pid in marked(launched.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

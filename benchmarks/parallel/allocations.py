"""Tensor bytes of a process over time, from the profiler's record of what torch's CPU allocator gives out and takes back.

Every tensor's memory comes from there, also what FSDP2 frees and makes again by resizing storages, which a dispatch mode does not
see; a resident set would count allocator caches and libraries too. Gloo's own buffers are no tensors and not in it. Needs torch
only, so that processes of other environments can use it. What is freed while no profiler runs is never taken off, so sizes are
those of a process only if this was entered first and once; differences always hold.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "mark "


class Allocations:
    """``mark`` begins a phase; ``phases`` afterwards says of each (bytes at its mark, most bytes until the next mark)."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Allocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def mark(self, name: str) -> None:
        """A phase of this name begins."""
        with record_function(_MARK + name):
            pass

    def phases(self) -> dict[str, tuple[int, int]]:
        """By name, in order; a name that came twice is its last."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        wanted = [each for each in events if each["name"] == "[memory]" or each["name"].startswith(_MARK)]
        found: dict[str, tuple[int, int]] = {}
        name, live = "", 0
        for event in sorted(wanted, key=lambda each: each["ts"]):
            if event["name"] != "[memory]":
                name = event["name"].removeprefix(_MARK)
                found[name] = (live, live)
                continue
            live = event["args"]["Total Allocated"]
            if name:
                found[name] = (found[name][0], max(found[name][1], live))
        return found

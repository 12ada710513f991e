"""Histories of events that no run has written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.observe.events import encode, events_path
from unisono.observe.history import RankHistory, read_history


def history_of(events: Iterable[Mapping[str, Any]], rank: int = 0) -> RankHistory:
    """The history of a file with these events."""
    with tempfile.TemporaryDirectory() as folder:
        path = events_path(Path(folder), rank)
        path.parent.mkdir()
        path.write_bytes(b"".join(encode(dict(event)) + b"\n" for event in events))
        return read_history(path)

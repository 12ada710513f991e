"""The window of steps to profile, from the configuration or from a request to a running job. Imports no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from unisono.observe.options import MAX_PROFILE_STEPS, parse_profile_steps
from unisono.storage.directory import make_folder
from unisono.storage.files import write_atomically
from unisono.storage.limits import read_json
from unisono.storage.run_folder import PROFILE_FOLDER

DEFAULT_STEPS: Final = 3
_REQUEST_FILE: Final = "request.json"
_MAX_REQUEST_BYTES: Final = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """``num_steps`` steps from step ``first`` on, counted from 1. ``stacks``: also Python's stacks, and the
    source lines that read from tensors or whose allocations stay."""

    first: int
    num_steps: int
    stacks: bool = False


def window_of(text: str) -> Window | None:
    """The window of ``observe.profile_steps``; None for the empty text."""
    if not text:
        return None
    first, end, stacks = parse_profile_steps(text)
    return Window(first=first, num_steps=end - first, stacks=stacks)


def request_path(run_dir: Path) -> Path:
    """The file that asks a run for a profile."""
    return run_dir / PROFILE_FOLDER / _REQUEST_FILE


def write_request(run_dir: Path, num_steps: int, *, stacks: bool) -> None:
    """Ask the run in ``run_dir`` for a profile of its next steps. Raises OSError."""
    path = request_path(run_dir)
    make_folder(path.parent)
    write_atomically(path, json.dumps({"num_steps": num_steps, "stacks": stacks}).encode())


def take_request(run_dir: Path, step: int) -> Window | None:
    """Take the request, if there is one, as a window that begins after the step after ``step`` finished ones.

    A file that is no request is removed too.
    """
    path = request_path(run_dir)
    try:
        found: Any = read_json(path, max_bytes=_MAX_REQUEST_BYTES)
        path.unlink()
    except OSError:
        return None
    except ValueError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    request = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    num_steps = request.get("num_steps")
    if not isinstance(num_steps, int) or not 1 <= num_steps <= MAX_PROFILE_STEPS:
        return None
    return Window(first=step + 2, num_steps=num_steps, stacks=request.get("stacks") is True)


def window_to_json(window: Window | None) -> dict[str, Any] | None:
    """The window as JSON types, for other ranks."""
    return None if window is None else asdict(window)

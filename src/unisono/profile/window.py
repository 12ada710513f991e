"""The window of steps to profile, from the configuration or from a request to a running job. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import as_mapping
from unisono.observe.options import MAX_PROFILE_STEPS, MAX_STACK_STEPS, parse_profile_steps
from unisono.storage.directory import make_folder
from unisono.storage.files import create_file, temporary_name, write_atomically
from unisono.storage.limits import read_json
from unisono.storage.run_folder import PROFILE_FOLDER

DEFAULT_STEPS: Final = 3
_REQUEST_FILE: Final = "request.json"
_ANSWER_FILE: Final = "answer.json"
_REQUEST_NUMBER: Final = re.compile("[0-9a-f]{1,32}")
_MAX_REQUEST_BYTES: Final = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileWindow:
    """Steps to profile.

    Attributes:
        first: The first of them, counted from 1.
        num_steps: Their number.
        stacks: Whether Python's stacks are recorded too, and the source lines that read from tensors or whose allocations stay.
        request: Number of the request that asks for it; empty for that of the configuration.
    """

    first: int
    num_steps: int
    stacks: bool = False
    request: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """What a request asks for: how many steps, and whether with Python's stacks. ``number`` is its own."""

    num_steps: int
    stacks: bool
    number: str


def window_of(text: str, step: int = 0) -> ProfileWindow | None:
    """The window of ``observe.profile_steps`` of a run that goes on after ``step`` steps; None for the empty text."""
    if not text:
        return None
    first, end, is_relative, stacks = parse_profile_steps(text)
    return ProfileWindow(first=first + (step if is_relative else 0), num_steps=end - first, stacks=stacks)


def request_path(run_dir: Path) -> Path:
    """The file that asks a run for a profile."""
    return run_dir / PROFILE_FOLDER / _REQUEST_FILE


def write_request(run_dir: Path, num_steps: int, *, stacks: bool) -> str:
    """Ask the run in ``run_dir`` for a profile of its next steps; returns the number of the request.

    Raises OSError: FileExistsError where another request waits, which is left as it is.
    """
    path, number = request_path(run_dir), secrets.token_hex(8)
    make_folder(path.parent)
    content = json.dumps({"num_steps": num_steps, "stacks": stacks, "request": number}).encode()
    temporary = temporary_name(path)
    try:
        create_file(temporary, content)
        os.link(temporary, path)  # complete at once, and only where there is none
    except FileExistsError:
        raise
    except OSError:  # of a file system without links; another reason comes again
        create_file(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    return number


def withdraw_request(run_dir: Path, number: str) -> bool:
    """Remove the request of this number; returns False where it is not there: the run, or another request, has replaced it."""
    path = request_path(run_dir)
    try:
        if _number_of(read_json(path, max_bytes=_MAX_REQUEST_BYTES)) != number:
            return False
        path.unlink()
    except (OSError, ValueError):
        return False
    return True


def write_answer(run_dir: Path, window: ProfileWindow) -> None:
    """Tell who requested ``window`` which step it begins with. Raises OSError."""
    content = json.dumps({"request": window.request, "first": window.first}).encode()
    write_atomically(run_dir / PROFILE_FOLDER / _ANSWER_FILE, content)


def read_answer(run_dir: Path, request: str) -> tuple[int, float] | None:
    """The first step of the window of a request, and when it was planned, in seconds since 1970; None while it is not planned."""
    path = run_dir / PROFILE_FOLDER / _ANSWER_FILE
    try:
        found: Any = read_json(path, max_bytes=_MAX_REQUEST_BYTES)
        at_s = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    answer = as_mapping(found)
    first = answer.get("first")
    return (first, at_s) if isinstance(first, int) and answer.get("request") == request else None


def take_request(run_dir: Path) -> ProfileRequest | None:
    """Take the request, if there is one. A file that is no request is removed too."""
    path = request_path(run_dir)
    taken = temporary_name(path)
    try:
        path.replace(taken)  # before it is read: who asked may take it back, and another one may ask, at any time
        found: Any = read_json(taken, max_bytes=_MAX_REQUEST_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        with suppress(OSError):
            taken.unlink(missing_ok=True)
    request = as_mapping(found)
    num_steps = request.get("num_steps")
    stacks = request.get("stacks") is True
    if not isinstance(num_steps, int) or not 1 <= num_steps <= (MAX_STACK_STEPS if stacks else MAX_PROFILE_STEPS):
        return None
    # a file that somebody else wrote may have no number
    number = _number_of(request) or secrets.token_hex(8)
    return ProfileRequest(num_steps=num_steps, stacks=stacks, number=number)


def _number_of(request: Any) -> str:
    """The number of a request; empty where it has none."""
    number = as_mapping(request).get("request")
    return number if isinstance(number, str) and _REQUEST_NUMBER.fullmatch(number) else ""

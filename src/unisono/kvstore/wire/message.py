"""Control messages: JSON objects as payload, and errors that arrive as the errors they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from unisono.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DataError,
    LaunchError,
    PlanError,
    Problem,
    UnisonoError,
)
from unisono.kvstore.wire.frame import Frame, Op, payload_views

_KINDS: dict[str, type[UnisonoError]] = {
    kind.__name__: kind for kind in (ConfigError, CommError, LaunchError, PlanError, DataError, CheckpointError)
}
_PARTS = {field.name for field in fields(Problem)}


def json_frame(op: Op, content: Mapping[str, Any]) -> Frame:
    """A frame with ``content`` as its payload."""
    return Frame(op, payload=json.dumps(content, allow_nan=False).encode())


def read_json(frame: Frame) -> dict[str, Any]:
    """The object in a frame. Raises CommError for any other payload."""
    try:
        content = json.loads(b"".join(payload_views(frame)))
    except (ValueError, RecursionError) as error:
        content = error
    if isinstance(content, dict):
        return content
    raise CommError(
        given=f"{frame.op.name} with a payload that is not a JSON object ({type(content).__name__})",
        rule="control messages carry one JSON object",
        consequence="the message was not used",
        nearest="use the same release of unisono on both sides",
    )


def error_frame(error: UnisonoError) -> Frame:
    """A reply that makes the other side raise ``error``."""
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), CommError.__name__)
    return json_frame(Op.ERROR, {"kind": kind, "problems": [asdict(problem) for problem in error.problems]})


def read_error(frame: Frame) -> UnisonoError:
    """The error in an ERROR frame; CommError for an unknown kind."""
    content = read_json(frame)
    problems = content.get("problems")
    if not isinstance(problems, list) or not all(isinstance(each, dict) and set(each) == _PARTS for each in problems):
        problems = [dict.fromkeys(_PARTS, "an error without text")]
    kind = _KINDS.get(str(content.get("kind")), CommError)
    return kind(*(Problem(**{name: str(text) for name, text in each.items()}) for each in problems))

"""Why the last attempt of a run failed, or stands still: from the launcher's record, else from the dumps of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from unisono.dist.hang import read_hang
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import LAUNCH_FILE, LOGS_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Why an attempt failed or stands still.

    Attributes:
        kind: ``hang``, ``collective_mismatch``, or another cause of the launcher's, such as ``out_of_memory``. Of an error that
            only a rank has recorded (its event ``run_end``): ``corruption`` or ``error``.
        ranks: The ranks that caused it.
        sentence: The cause in one sentence.
        evidence: What it follows from.
        words: The kind in plain words; empty for what follows from dumps.
        advice: What to look at or to change; empty if the error says it.
        patch: Options that mend it, by dotted name.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    evidence: tuple[str, ...] = ()
    words: str = ""
    advice: str = ""
    patch: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_ending(run_dir: Path, *, since_s: float) -> tuple[bool, Ending | None]:
    """Whether the launcher has recorded how the run's last attempt ended, and why that attempt failed or hangs; None where it
    does not, or nobody knows. What was written before ``since_s`` (seconds since 1970) is of an earlier attempt.
    """
    is_over, recorded = _recorded(run_dir / LAUNCH_FILE, since_s)
    if is_over:
        return True, recorded
    hang = read_hang(run_dir / LOGS_FOLDER, since_s=since_s)
    if hang is None:
        return False, None
    return False, Ending(kind=hang.kind, ranks=hang.ranks, sentence=hang.sentence, evidence=hang.evidence)


def _recorded(path: Path, since_s: float) -> tuple[bool, Ending | None]:
    """Whether the launcher has recorded how the last attempt ended, and how. A file of another form says nothing."""
    try:
        if path.stat().st_mtime < since_s:
            return False, None
        record = read_own_json(path)
        last = record["attempts"][-1]
        if last["attempt"] != record["attempt"]:
            return False, None
        cause = last["cause"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False, None
    if not isinstance(cause, Mapping):
        return True, None
    fields = cast("Mapping[str, Any]", cause)

    def texts(name: str) -> tuple[str, ...]:
        value = fields.get(name)
        return tuple(str(each) for each in cast("Sequence[Any]", value)) if isinstance(value, list) else ()

    return True, Ending(
        kind=str(fields.get("kind", "")),
        ranks=tuple(int(rank) for rank in texts("ranks") if rank.isdecimal() and len(rank) < 10),
        sentence=str(fields.get("sentence", "")),
        evidence=texts("evidence"),
        words=str(fields.get("words", "")),
        advice=str(fields.get("advice", "")),
    )

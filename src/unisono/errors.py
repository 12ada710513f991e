"""Errors a user can act on.

Every problem has four parts: what was given, the rule it breaks, what follows from that, and the nearest thing that
works. Several problems travel in one exception, because users should see all of them at once. Of unisono this module imports
only ``exit_codes``, and ``sanitize`` for texts that need it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import overload

from unisono.exit_codes import USER_ERROR


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, in four parts; each is a sentence fragment without a final full stop.

    Attributes:
        given: What the user gave, with its value.
        rule: The rule that it breaks.
        consequence: What follows from it, such as what was not done.
        nearest: The nearest thing that works.
    """

    given: str
    rule: str
    consequence: str
    nearest: str

    def __post_init__(self) -> None:
        # names and texts of files, peers and addresses are quoted: neither passwords nor terminal sequences leave with them
        for part in ("given", "rule", "consequence", "nearest"):
            text = getattr(self, part)
            if "://" in text or not (text.isascii() and text.isprintable()):
                object.__setattr__(self, part, _clean(text))

    def __str__(self) -> str:
        return f"{self.given}\n  rule: {self.rule}\n  so:   {self.consequence}\n  try:  {self.nearest}"


def inert_problem(given: str, rule: str, nearest: str) -> Problem:
    """The problem of a setting that nothing reads beside the other settings."""
    return Problem(given=given, rule=rule, consequence="it would change nothing", nearest=nearest)


class UnisonoError(Exception):
    """Base of unisono's errors: raised with any number of problems, or with the four parts of one.

    ``exit_code`` is the status the command line exits with.
    """

    exit_code = 1

    @overload
    def __init__(self, *problems: Problem) -> None: ...

    @overload
    def __init__(self, *, given: str, rule: str, consequence: str, nearest: str) -> None: ...

    def __init__(self, *problems: Problem, **parts: str) -> None:
        self.problems: tuple[Problem, ...] = (*problems, Problem(**parts)) if parts else problems
        super().__init__(*self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join([f"{len(self.problems)} problems", *(f"{i}. {p}" for i, p in enumerate(self.problems, 1))])

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in place of its own traceback: the frames of the user's code, and the problems."""
        whole = traceback.TracebackException.from_exception(self)
        _keep_frames_of_user(whole)
        return "".join(whole.format()).splitlines()


class ConfigError(UnisonoError):
    """The run configuration is wrong."""

    exit_code = USER_ERROR


class PlanError(UnisonoError):
    """The plan cannot be carried out: batch arithmetic, devices, layout."""

    exit_code = USER_ERROR


class DataError(UnisonoError):
    """The data is missing, too short or damaged."""

    exit_code = USER_ERROR


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written, or cannot be loaded as asked."""

    exit_code = USER_ERROR


class ExtraError(UnisonoError):
    """An optional dependency is not installed."""

    exit_code = USER_ERROR


class LaunchError(UnisonoError):
    """The environment that started this process contradicts itself, or processes cannot be started."""

    exit_code = USER_ERROR


class NumericsError(UnisonoError):
    """Training cannot go on: too many steps in a row had non-finite values."""


class CorruptionError(UnisonoError):
    """Bits of the training state changed, or a step gave other bits than before. ``ranks`` are those it may have happened on."""

    ranks: tuple[int, ...] = ()


class CommError(UnisonoError):
    """Ranks lost each other, or disagree."""


def _clean(text: str) -> str:
    from unisono.sanitize import printable, without_credentials  # its patterns take time to compile

    # a list of ours has its items on indented lines; any other end of a line is of a name, or of a library's text
    return "\n    ".join(map(printable, without_credentials(text).split("\n    ")))


def _keep_frames_of_user(error: traceback.TracebackException) -> None:
    """Leave only frames of the user's own code, also in the causes of the error."""
    libraries = (str(Path(__file__).parent), str(Path(traceback.__file__).parent))
    frames: list[traceback.FrameSummary] = []
    for frame in error.stack:
        path = Path(frame.filename)
        if path.parent.name.startswith("ipykernel_"):
            frame.filename = "<cell>"
        elif frame.filename.startswith(libraries) or {"site-packages", "dist-packages"} & set(path.parts):
            continue
        frames.append(frame)
    error.stack[:] = frames
    for cause in (error.__cause__, error.__context__):
        if cause is not None:
            _keep_frames_of_user(cause)


def missing_extra(extra: str, package: str, purpose: str) -> ExtraError:
    """The one-line answer to an optional dependency that is absent."""
    return ExtraError(
        given=f"{purpose} needs the package {package!r}, which is not installed",
        rule=f"it comes with the extra {extra!r}",
        consequence="nothing was started",
        nearest=f"pip install 'unisono[{extra}]'",
    )


def nearest_name(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest of ``known``, or the list of them."""
    from unisono.sanitize import listed

    names: Sequence[str] = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    if not names:
        return "there is none"
    return f"did you mean {close[0]!r}?" if close else "one of: " + listed(names, 2000)

"""What a rank was doing: stacks of its threads and its last collectives, a file in the logs of its run. No torch.

A dump has names of files and functions, and shapes and types of collectives. It has no values of variables.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from unisono.dist.jobspec import JobSpec
from unisono.dist.progress import current_activity
from unisono.sanitize import redact_text
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, write_atomically
from unisono.storage.ownership import read_own_json

# why a dump was written
WORKING: Final = "working"
_MAX_FRAMES: Final = 60
_MAX_THREADS: Final = 64
_MAX_CHAIN: Final = 20
_MAX_DUMP_BYTES: Final = 1 << 24
_DUMP_NAME: Final = re.compile(r"stacks-rank-([0-9]+)\.json")
# documented, in spite of its name
_current_frames: Final = sys._current_frames  # pyright: ignore[reportPrivateUsage]
# of torch.distributed: functions whose caller chooses a root, by the name of the argument
_ROOTED: Final = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}
_PACKAGE: Final = str(Path(__file__).parents[1])


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a group.

    Attributes:
        number: Its number in its group, from 1.
        name: Such as ``all_reduce``.
        sizes: Shape of each input.
        dtypes: Type of each input, as torch's recorder calls it, such as ``Float``.
        state: ``scheduled``, ``started``, ``completed`` or ``failed``.
    """

    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank sees it.

    Attributes:
        name: torch's name of the group, the same on its ranks.
        description: Mesh axis or purpose of the group.
        ranks: Its ranks, ascending; empty if unknown.
        num_entered: Collectives that this rank has issued.
        collectives: The last of them, oldest first.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    num_entered: int
    collectives: tuple[Collective, ...]


class StackFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame of a stack; ``is_users`` is False for frames of torch, of unisono and of installed packages."""

    file: str
    line: int
    function: str
    is_users: bool

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.function}()"


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of a thread, innermost frame first."""

    name: str
    frames: tuple[StackFrame, ...]


class RootedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The collective with a root that a rank was in: its name, and the root's global rank."""

    name: str
    root: int


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank was doing at one time.

    Attributes:
        rank: The rank.
        restart_count: Restarts of the job before.
        reason: Why it was written: ``no progress``, ``working`` (no step ends, and something else gets on), ``stop``, ``abort``,
            or the name of an error.
        step: Steps made; None if unknown.
        at_s: Wall-clock time in seconds since 1970.
        quiet_s: Seconds since the last step or collective; 0 if unknown.
        threads: Stacks, the main thread's first.
        groups: Groups with their last collectives.
        rooted: The collective with a root in which it was; None if it was in none.
        activity: What it was at besides steps, such as ``an evaluation``; empty if nothing is known.
        activity_s: Seconds since that began.
    """

    rank: int
    restart_count: int
    reason: str
    step: int | None
    at_s: float
    quiet_s: float
    threads: tuple[ThreadStack, ...]
    groups: tuple[GroupState, ...]
    rooted: RootedCall | None = None
    activity: str = ""
    activity_s: float = 0.0


# set by ``join_world``: a process without a group has no collectives, and its failures need no dump
_source: Callable[[], list[GroupState]] | None = None
_count: Callable[[], int] | None = None
# of collectives that are not torch's
_own_groups: list[Callable[[], GroupState]] = []
# (name of a group, collectives entered) -> the first that had not completed in the dump before: torch's recorder retires
# a collective that timed out as it does one that completed
_unfinished: dict[tuple[str, int], int] = {}


def use_collectives_of(source: Callable[[], list[GroupState]] | None, count: Callable[[], int] | None) -> None:
    """From now on dumps of this process have the ``count()`` collectives that ``source`` returns; none of torch with None."""
    global _source, _count
    _source, _count = source, count


def add_group(state: Callable[[], GroupState]) -> None:
    """Also put the collectives of a group that is not torch's into dumps of this process."""
    _own_groups.append(state)


def remove_group(state: Callable[[], GroupState]) -> None:
    """Leave out a group of ``add_group``, if it is there."""
    with suppress(ValueError):
        _own_groups.remove(state)


def num_collectives() -> int:
    """Collectives that this process has issued, as far as they are recorded."""
    own = sum(state().num_entered for state in tuple(_own_groups))
    try:
        return own + (0 if _count is None else _count())
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return own


def has_collectives() -> bool:
    """Whether this process has been in a process group."""
    return _source is not None


def dump_path(folder: Path, rank: int) -> Path:
    """Path of the dump of a rank, such as ``stacks-rank-3.json``."""
    return folder / f"stacks-rank-{rank}.json"


def waits_in_collective() -> bool:
    """Whether a collective that this process has issued has not completed; False if that is unknown."""
    return any(not _is_done(group) for group in _states())


def _states() -> tuple[GroupState, ...]:
    try:
        groups = tuple(_source()) if _source is not None else ()
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        groups = ()  # another torch: stacks are worth having without
    return (*groups, *(state() for state in tuple(_own_groups)))


def write_dump(
    folder: Path,
    job: JobSpec,
    reason: str,
    *,
    step: int | None = None,
    quiet_s: float = 0.0,
    error: BaseException | None = None,
    in_collective: bool = False,
) -> None:
    """Write what this rank is doing, atomically, for its owner alone; a file that cannot be written is left out.

    Args:
        folder: Folder of the logs; created if it is missing.
        job: The process's place in the job.
        reason: Why it is written.
        step: Steps made; None if unknown.
        quiet_s: Seconds since the last step or collective.
        error: The error that ends the rank: where it was raised, the rank was before.
        in_collective: Whether the error is that of a collective, the one that was issued last unless an earlier dump has said
            which had not completed.
    """
    groups = _with_unfinished(_states(), failed=in_collective)
    activity = current_activity()
    dump = RankDump(
        rank=job.rank,
        restart_count=job.restart_count,
        reason=reason,
        step=step,
        at_s=time.time(),
        quiet_s=quiet_s,
        threads=tuple(thread_stacks(error)),
        groups=groups,
        rooted=_rooted_call(error),
        activity="" if activity is None else activity.name,
        activity_s=0.0 if activity is None else time.monotonic() - activity.began_s,
    )
    with suppress(OSError):
        make_folder(folder)
        write_atomically(dump_path(folder, job.rank), msgspec.json.encode(dump) + b"\n", mode=PRIVATE_MODE)


def _with_unfinished(groups: tuple[GroupState, ...], *, failed: bool) -> tuple[GroupState, ...]:
    """The groups, with collectives that had not completed in an earlier dump, or are the failed one, as ``failed``."""
    states: list[GroupState] = []
    failed = failed and all(_is_done(group) for group in groups)
    known = {(group.name, group.num_entered) for group in groups} & set(_unfinished)
    for place, group in enumerate(groups, start=1):
        key = (group.name, group.num_entered)
        first = _unfinished.get(key) if failed else None
        if failed and first is None and not known and place == len(groups) and group.collectives:
            first = group.collectives[-1].number
        if first is not None:
            group = structs.replace(
                group,
                collectives=tuple(
                    structs.replace(each, state="failed") if each.number >= first else each
                    for each in group.collectives
                ),
            )
        states.append(group)
    _unfinished.clear()
    for group in states:
        pending = next((each.number for each in group.collectives if each.state != "completed"), None)
        if pending is not None:
            _unfinished[group.name, group.num_entered] = pending
    return tuple(states)


def _is_done(group: GroupState) -> bool:
    return all(each.state == "completed" for each in group.collectives)


def remove_dump(folder: Path, rank: int) -> None:
    """Remove the dump of a rank, if there is one."""
    with suppress(OSError):
        dump_path(folder, rank).unlink()


def read_dumps(folder: Path, restart_count: int | None = None) -> list[RankDump]:
    """The dumps in a folder of logs, by rank; those after ``restart_count`` restarts, or after the most of any.

    Files that cannot be read, or are no dumps, are left out.
    """
    found: list[RankDump] = []
    try:
        ranks = sorted(int(match[1]) for path in folder.iterdir() if (match := _DUMP_NAME.fullmatch(path.name)))
    except OSError:
        return []
    for rank in ranks:
        with suppress(OSError, ValueError, msgspec.MsgspecError, RecursionError):
            dump = read_own_json(
                dump_path(folder, rank),
                lambda raw: msgspec.json.decode(raw, type=RankDump),
                max_bytes=_MAX_DUMP_BYTES,
            )
            if dump.rank == rank:
                found.append(dump)
    newest = max((dump.restart_count for dump in found), default=0) if restart_count is None else restart_count
    return [dump for dump in found if dump.restart_count == newest]


# --- stacks ----------------------------------------------------------------------------------------------------------


def thread_stacks(error: BaseException | None = None) -> list[ThreadStack]:
    """The stacks of all Python threads of this process, the main thread's first; the calling thread's only if it is the main one.

    With ``error``, the main thread's stack is that of its place of origin.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, caller = threading.main_thread().ident, threading.get_ident()
    stacks: list[ThreadStack] = []
    for ident, frame in _current_frames().items():
        if ident == main:
            frames = _frames_of_error(error) if error is not None and caller == main else _frames(frame)
            stacks.insert(0, ThreadStack(name="main", frames=frames))
        elif ident != caller and len(stacks) < _MAX_THREADS:
            stacks.append(ThreadStack(name=names.get(ident, "?"), frames=_frames(frame)))
    return stacks


def parse_stacks(text: str) -> list[ThreadStack]:
    """The stacks that Python's faulthandler wrote, the main thread's (which it writes last) first."""
    stacks: list[list[StackFrame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            stacks.append([])
        elif stacks and (match := re.fullmatch(r'  File "(.+)", line ([0-9]{1,9}) in (.+)', line)):
            stacks[-1].append(_frame(match[1], int(match[2]), match[3]))
    return [ThreadStack(name="?", frames=tuple(frames[:_MAX_FRAMES])) for frames in reversed(stacks[-_MAX_THREADS:])]


def _frames(frame: FrameType | None) -> tuple[StackFrame, ...]:
    found: list[StackFrame] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def _frames_of_error(error: BaseException) -> tuple[StackFrame, ...]:
    """Where the first error of a chain was raised, innermost frame first, then who called it."""
    found = [
        _frame(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        for each in _chain(error)
        for trace in reversed(list(_traces(each)))
    ]
    return (*found, *_frames(inspect.currentframe()))[:_MAX_FRAMES]


def _chain(error: BaseException) -> list[BaseException]:
    """The error with its causes, the first one first."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and len(found) < _MAX_CHAIN:
        found.append(cause)
    return found[::-1]


def _traces(error: BaseException) -> Iterable[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _frame(file: str, line: int, function: str) -> StackFrame:
    return StackFrame(file=redact_text(file), line=line, function=function, is_users=is_users_file(file))


def is_users_file(file: str) -> bool:
    """Whether a file of code is the user's: not of torch, of unisono, of installed packages or of Python."""
    return not file.startswith(("<frozen", *_INSTALLED))


def _installed() -> tuple[str, ...]:
    """Folders whose code is not the user's."""
    names: tuple[Literal["stdlib", "platstdlib", "purelib", "platlib", "scripts"], ...] = (
        *("stdlib", "platstdlib", "purelib", "platlib", "scripts"),
    )
    paths = {sysconfig.get_path(name) for name in names} | {_PACKAGE}
    return tuple({f"{folder}/" for path in paths if path for folder in (path, str(Path(path).resolve()))})


_INSTALLED: Final = _installed()


def _rooted_call(error: BaseException | None) -> RootedCall | None:
    """The collective with a root that the main thread is in, or that ``error`` comes from. Only the root's number is read."""
    if error is not None:
        frames: Iterable[FrameType] = [trace.tb_frame for each in _chain(error) for trace in _traces(each)]
    else:
        frames = _live_frames()
    for frame in frames:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module == "torch.distributed.distributed_c10d" and name in _ROOTED:
            values: Any = frame.f_locals
            root = values.get(_ROOTED[name])
            if isinstance(root, int):
                return RootedCall(name=name, root=root)
    return None


def _live_frames() -> Iterable[FrameType]:
    frame = _current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back

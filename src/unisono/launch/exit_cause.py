"""Names the cause of an attempt's end from what is known: exit codes, signals, kernel counters, records and dumps of the ranks.

killed            a signal of a user, a batch system or another program
out_of_memory     the kernel's out-of-memory killer, or an allocation that failed
crash             SIGSEGV, SIGABRT and the like
disk_full         no space, no quota, or a file at its size limit
hang              a rank has not entered the collective in which the others wait
collective_mismatch  ranks issued different collectives
peer_left         a rank ended while others waited for it, and left no error
communication     a collective failed, and no rank is known to be at fault
corruption        a rank's bits changed, or its computation gave other bits than before
configuration, bad_data, checkpoint, numerics, io, program   the error that the first rank raised
exit              an exit code, and nothing else
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unisono.dist import Failure
from unisono.dist.hang import Hang, explain_hang, read_stuck
from unisono.dist.rank_dump import is_users_file, parse_stacks, read_dumps
from unisono.exit_codes import FATAL, REQUEUE, USER_ERROR
from unisono.launch.resources import oom_kills
from unisono.launch.workers import WorkerProcess

_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS)
_SHELL: Final = 128  # a shell's exit code for a command that was killed is this plus the signal
_LOG_BYTES: Final = 1 << 16
_MISMATCH_TEXT: Final = "doesn't match expected size"  # of Gloo, before it aborts

_WORDS: Final = {
    "killed": "it was killed from outside",
    "out_of_memory": "out of memory",
    "crash": "a crash of native code",
    "disk_full": "the disk is full",
    "hang": "a hang",
    "collective_mismatch": "mismatched collectives",
    "peer_left": "a rank left early",
    "communication": "a failure of communication",
    "configuration": "a wrong setting",
    "bad_data": "bad data",
    "checkpoint": "a checkpoint that cannot be used",
    "numerics": "bad numerics",
    "corruption": "silent corruption",
    "io": "a failed read or write",
    "program": "an error of the program",
    "exit": "an exit code",
}
_ADVICE: Final = {
    "out_of_memory": "a smaller plan.micro_batch, plan.recompute, or fewer processes on a host",
    "disk_full": "free space, or another run.dir; a restart finds the same disk",
    "hang": "the place named above: a branch, a read or a lock that one rank alone waits in",
    "collective_mismatch": "the code before that collective: a branch or a shape that depends on the rank",
    "peer_left": "why that rank ended: an exit, or a loop with fewer steps than the others'",
    "corruption": "the memory and the devices of that host, and leave it out where it comes back",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        kind: One of the causes in this module's documentation.
        ranks: The ranks that caused it; several where they disagree and neither is known to be wrong.
        sentence: The cause in one sentence.
        evidence: What it follows from.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    evidence: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The kind in plain words."""
        return _WORDS[self.kind]

    @property
    def advice(self) -> str:
        """Advice: what to look at or to change; empty where the error says it."""
        return _ADVICE.get(self.kind, "")

    def record(self) -> dict[str, Any]:
        """The cause as JSON types."""
        fields = {**asdict(self), "ranks": list(self.ranks), "evidence": list(self.evidence)}
        return fields | {"words": self.words, "advice": self.advice}


def find_cause(
    workers: Mapping[int, WorkerProcess],
    codes: Mapping[int, int],
    failures: Mapping[int, Failure],
    *,
    root: int | None,
    folder: Path,
    attempt: int,
    oom_kills_before: int | None,
) -> Cause | None:
    """The cause of an attempt's end; None if no rank failed.

    Args:
        workers: The processes, by rank.
        codes: Their exit codes, negative for a signal.
        failures: What ranks recorded.
        root: The rank that failed first.
        folder: Folder of the logs, with the dumps of ranks.
        attempt: Number of the attempt.
        oom_kills_before: The kernel's counter of out-of-memory kills when it began; None if unknown.
    """
    if root is None or root not in codes:
        return None
    failure = failures.get(root)
    number = _signal_of(codes[root])
    if failure is not None and failure.cause not in ("", "communication"):
        return _cause_of_error(failure)
    aborted = [rank for rank, code in codes.items() if _signal_of(code) == signal.SIGABRT]
    if number is not None and number not in _CRASHES and not workers[root].killed_by_us:
        return _cause_of_signal(root, number, oom_kills_before)
    # an abort by C++ may be that of Gloo, when a peer sends more than was expected: the dumps tell
    hang = _hang(workers, codes, failures, folder, attempt)
    if number is not None and not workers[root].killed_by_us:
        is_mismatch = number == signal.SIGABRT and hang is not None and hang.kind == "collective_mismatch"
        if is_mismatch or (root in aborted and _says_mismatch(workers, aborted)):
            return _cause_of_mismatch(hang, aborted)
        return _cause_of_crash(root, number, workers[root])
    if failure is not None:
        return _cause_of_communication(failure, failures, codes, hang)
    code = codes[root]
    kind = "configuration" if code == USER_ERROR else "exit"
    text = f"rank {root} ended with exit code {code}"
    if workers[root].killed_by_us and hang is not None:
        return _cause_of_hang(hang)
    return Cause(kind=kind, ranks=(root,), sentence=text + (", which says not to repeat it" if code == FATAL else ""))


def _signal_of(code: int) -> int | None:
    if code < 0:
        return -code
    number = code - _SHELL
    # a shell reports a command that a signal ended so; codes of programs are lower
    return number if number in (signal.SIGKILL, signal.SIGTERM, *_CRASHES) else None


def _cause_of_error(failure: Failure) -> Cause:
    first = failure.message.partition("\n")[0]
    return Cause(
        kind=failure.cause,
        ranks=failure.blamed or (failure.rank,),
        sentence=f"rank {failure.rank} failed {failure.where}: {failure.type}: {first}",
        evidence=tuple(_last_place(failure.traceback)),
    )


def _last_place(trace: str) -> list[str]:
    """The line that raised a traceback's first error: the user's innermost one, else the innermost one."""
    first = re.split(r"\n(?:The above exception was|During handling of)", trace)[0]
    places = re.findall(r'^  File "(.+)", line ([0-9]+), in (.+)$', first, flags=re.MULTILINE)
    own = [place for place in places if is_users_file(place[0])]
    return [f"{Path(file).name}:{line} {function}()" for file, line, function in (own or places)[-1:]]


def _cause_of_signal(rank: int, number: int, oom_kills_before: int | None) -> Cause:
    name = _signal_name(number)
    text = f"rank {rank} was killed by {name}, which this launcher did not send"
    if number != signal.SIGKILL:
        return Cause(kind="killed", ranks=(rank,), sentence=text)
    now = oom_kills()
    if now is None or oom_kills_before is None:
        evidence = "out of memory is the usual reason (see the kernel's log)"
        return Cause(kind="killed", ranks=(rank,), sentence=text, evidence=(evidence,))
    if now > oom_kills_before:
        evidence = f"the kernel ended {now - oom_kills_before} process(es) for lack of memory meanwhile"
        return Cause(kind="out_of_memory", ranks=(rank,), sentence=text, evidence=(evidence,))
    evidence = "the kernel counted no out-of-memory kill meanwhile, so someone sent it"
    return Cause(kind="killed", ranks=(rank,), sentence=text, evidence=(evidence,))


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _cause_of_crash(rank: int, number: int, worker: WorkerProcess) -> Cause:
    stacks = parse_stacks(
        "Current thread (most recent call first)" + _log_tail(worker).rpartition("Current thread ")[2]
    )
    frames = stacks[-1].frames if stacks else ()  # of the thread that crashed
    places = [str(frame) for frame in frames if frame.is_users] or [str(frame) for frame in frames]
    return Cause(
        kind="crash",
        ranks=(rank,),
        sentence=f"rank {rank} was killed by {_signal_name(number)}, which this launcher did not send",
        evidence=tuple(f"it was in {place}" for place in places[:1]),
    )


def _cause_of_mismatch(hang: Hang | None, aborted: Sequence[int]) -> Cause:
    evidence = f"rank {', '.join(map(str, aborted))} was aborted by Gloo: a peer sent more than it expected"
    if hang is not None and hang.kind == "collective_mismatch":
        return Cause(kind=hang.kind, ranks=hang.ranks, sentence=hang.sentence, evidence=(*hang.evidence, evidence))
    return Cause(
        kind="collective_mismatch",
        ranks=tuple(aborted),
        sentence="ranks issued collectives of different sizes",
        evidence=(evidence,),
    )


def _cause_of_hang(hang: Hang) -> Cause:
    return Cause(kind=hang.kind, ranks=hang.ranks, sentence=hang.sentence, evidence=hang.evidence)


def _cause_of_communication(
    failure: Failure, failures: Mapping[int, Failure], codes: Mapping[int, int], hang: Hang | None
) -> Cause:
    """The cause of a collective's error, which names no culprit itself."""
    text = f"{failure.type} on rank {failure.rank}: {failure.message.partition(chr(10))[0]}"
    if hang is not None:
        left = [rank for rank in hang.ranks if codes.get(rank) in (0, REQUEUE)]
        kind = "peer_left" if hang.kind == "hang" and left == list(hang.ranks) and left else hang.kind
        return Cause(kind=kind, ranks=hang.ranks, sentence=hang.sentence, evidence=hang.evidence)
    absent = tuple(sorted({rank for each in failures.values() for rank in each.absent}))
    left = tuple(rank for rank in absent if codes.get(rank) in (0, REQUEUE))
    if left:
        return Cause(
            kind="peer_left",
            ranks=left,
            sentence=f"rank {', '.join(map(str, left))} ended while others waited for it in a collective",
            evidence=(text,),
        )
    present = tuple(rank for rank in absent if rank not in failures)
    if present:
        stopped = [rank for rank in present if f"rank {rank} (" in failure.message and "is stopped" in failure.message]
        how = "is stopped" if stopped else "did not take part in a collective"
        return Cause(
            kind="hang", ranks=present, sentence=f"rank {', '.join(map(str, present))} {how}", evidence=(text,)
        )
    return Cause(kind="communication", ranks=(failure.rank,), sentence=text)


def _hang(
    workers: Mapping[int, WorkerProcess],
    codes: Mapping[int, int],
    failures: Mapping[int, Failure],
    folder: Path,
    attempt: int,
) -> Hang | None:
    dumps = read_dumps(folder, attempt)
    stuck = read_stuck(folder, attempt)
    _remove_empty(folder, attempt)
    ended: dict[int, str] = {}
    for rank, code in codes.items():
        if rank not in failures and not workers[rank].killed_by_us and _signal_of(code) != signal.SIGABRT:
            ended[rank] = f"had ended (exit code {code})"
    absent = {rank for each in failures.values() for rank in each.absent if "is stopped" in each.message}
    ended |= {rank: "is stopped" for rank in absent if rank not in ended}
    return explain_hang(dumps, ended=ended, stuck=stuck)


def _remove_empty(folder: Path, attempt: int) -> None:
    """Remove the files of stacks that nothing was written to: a rank that is killed leaves one."""
    with suppress(OSError):
        for path in folder.glob(f"stuck-rank-*.attempt-{attempt}.txt"):
            if path.stat().st_size == 0:
                path.unlink()


def _says_mismatch(workers: Mapping[int, WorkerProcess], ranks: Sequence[int]) -> bool:
    return any(_MISMATCH_TEXT in _log_tail(workers[rank]) for rank in ranks)


def _log_tail(worker: WorkerProcess) -> str:
    if worker.log is None:
        return ""
    try:
        with worker.log.open("rb") as file:
            file.seek(max(0, worker.log.stat().st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""

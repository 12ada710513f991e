"""Explains from the dumps of ranks why they do not meet in a collective: one is missing, or they issued different ones.

No torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from unisono.dist.rank_dump import WORKING, Collective, GroupState, RankDump, StackFrame, parse_stacks, read_dumps
from unisono.storage.files import open_regular

_ALL_RANKS: Final = ("", "default_pg", "undefined", "default")
_AXES: Final = ("dp", "dp_shard", "dp_replicate", "cp", "tp", "ep", "pp")
# what ranks may give differently: sizes of parts, and the root's own buffers
_UNEQUAL_SIZES: Final = ("all_to_all", "alltoall", "scatter", "reduce_scatter")
# the innermost frames of a rank that waits for others have one of these in the names of their files
_WAITING_IN: Final = ("/torch/distributed/", "/unisono/dist/")
_WAITING_FRAMES: Final = 6
_MAX_STUCK_BYTES: Final = 1 << 20
# a rank at work says so every 15 s (``watchdog``); one that was stopped does not
_WORKING_VALID_S: Final = 60.0

Signature = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Why ranks do not meet.

    Attributes:
        kind: ``hang``, or ``collective_mismatch`` where ranks issued different collectives.
        ranks: The ranks that cause it; those that disagree where neither is in the majority.
        sentence: Who is missing where, or what ranks issued, in one sentence.
        evidence: Where each of these ranks was, and what else it follows from.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    evidence: tuple[str, ...] = ()


def explain_hang(
    dumps: Sequence[RankDump],
    *,
    ended: Mapping[int, str] | None = None,
    stuck: Mapping[int, StackFrame] | None = None,
    working: Collection[int] = (),
) -> Hang | None:
    """Why the ranks of ``dumps`` do not meet; None if all have met in every collective that they issued.

    Args:
        dumps: The dumps of one attempt, one a rank at most.
        ended: How ranks ended, or that they are stopped, in words. They wait for nobody, whatever their dumps say.
        stuck: Where ranks were whose interpreter was blocked, so that they wrote no dump.
        working: Ranks that get on with something else than steps. Where they wait in no collective, the others wait for them,
            and nothing hangs.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups: dict[str, dict[int, GroupState]] = {}
    for dump in dumps:
        for group in dump.groups:
            groups.setdefault(group.name, {})[dump.rank] = group
    for states in groups.values():
        if (found := _mismatch(states, by_rank)) is not None:
            places = (_rank_place(rank, by_rank.get(rank), {}, stuck or {}) for rank in found.ranks[:2])
            return replace(found, evidence=(*found.evidence, *places))
    waits = _waits(groups, ended or {})
    working = set(working) - {rank for wait in waits for rank in wait.waiting}
    if any(working.issuperset(wait.missing) for wait in waits):
        return None  # those that wait for a rank that waits for these wait for these too
    waits = [replace(wait, missing=[rank for rank in wait.missing if rank not in working]) for wait in waits]
    return _missing(waits, by_rank, ended or {}, stuck or {}) or _nobody_waits(by_rank, stuck or {})


def read_hang(folder: Path, restart_count: int | None = None, *, since_s: float = 0.0) -> Hang | None:
    """The explanation of the dumps in a folder of logs that were written after ``since_s`` (seconds since 1970).

    A rank that said a short time ago that it is at work does not hang.
    """
    dumps = [dump for dump in read_dumps(folder, restart_count) if dump.at_s >= since_s]
    newest = max((dump.restart_count for dump in dumps), default=restart_count)
    stuck = {} if newest is None else read_stuck(folder, newest, since_s=since_s)
    now_s = time.time()
    working = {
        dump.rank
        for dump in dumps
        if dump.reason == WORKING and now_s - dump.at_s < _WORKING_VALID_S and dump.rank not in stuck
    }
    return explain_hang(dumps, stuck=stuck, working=working)


def stuck_path(folder: Path, rank: int, restart_count: int) -> Path:
    """Path of the stacks of a rank whose interpreter is blocked, such as ``stuck-rank-3.attempt-0.txt``."""
    return folder / f"stuck-rank-{rank}.attempt-{restart_count}.txt"


def read_stuck(folder: Path, restart_count: int, *, since_s: float = 0.0) -> dict[int, StackFrame]:
    """By rank: where those whose interpreter was blocked stood, from the stacks that Python's faulthandler wrote."""
    found: dict[int, StackFrame] = {}
    try:
        paths = sorted(folder.glob(f"stuck-rank-*.attempt-{restart_count}.txt"))
    except OSError:
        return found
    for path in paths:
        number = path.name.removeprefix("stuck-rank-").partition(".")[0]
        try:
            if not number.isdecimal() or path.stat().st_mtime < since_s:
                continue
            with open_regular(path) as file:
                text = file.read(_MAX_STUCK_BYTES).decode(errors="replace")
        except OSError:
            continue
        frame = _place(frames for thread in parse_stacks(text) for frames in [thread.frames])
        if frame is not None:
            found[int(number)] = frame
    return found


# --- ranks that issued different collectives ---------------------------------------------------------------------------


def _mismatch(states: Mapping[int, GroupState], dumps: Mapping[int, RankDump]) -> Hang | None:
    """The first collective of a group that its ranks did not issue alike, among those that they still remember."""
    issued = {rank: {each.number: each for each in state.collectives} for rank, state in states.items()}
    for number in sorted(set[int]().union(*issued.values())):
        here = {rank: found[number] for rank, found in issued.items() if number in found}
        if len({_signature(each) for each in here.values()}) > 1:
            return _different(states, issued, number, here)
        if len(roots := _roots(here, states, dumps)) > 1:
            return _different_roots(states, number, here, roots)
    return None


def _signature(collective: Collective) -> Signature:
    if collective.name.startswith(_UNEQUAL_SIZES):
        return (collective.name, collective.dtypes)
    return (collective.name, collective.sizes, collective.dtypes)


def _roots(
    here: Mapping[int, Collective], states: Mapping[int, GroupState], dumps: Mapping[int, RankDump]
) -> dict[int, list[int]]:
    """Ranks by the root that they chose, of those that were in this collective."""
    found: dict[int, list[int]] = {}
    for rank, collective in here.items():
        rooted = dumps[rank].rooted
        is_last = collective.number == states[rank].num_entered
        if rooted is not None and is_last and collective.state != "completed" and rooted.name == collective.name:
            found.setdefault(rooted.root, []).append(rank)
    return found


def _different(
    states: Mapping[int, GroupState],
    issued: Mapping[int, Mapping[int, Collective]],
    number: int,
    here: Mapping[int, Collective],
) -> Hang:
    by_signature: dict[Signature, list[int]] = {}
    for rank, collective in sorted(here.items()):
        by_signature.setdefault(_signature(collective), []).append(rank)
    usual, *others = sorted(by_signature.values(), key=lambda ranks: (-len(ranks), ranks))
    is_tie = any(len(ranks) == len(usual) for ranks in others)
    odd = sorted(rank for ranks in others for rank in ranks)
    where = _where(next(iter(states.values())))
    expected = here[usual[0]]
    if not is_tie and len(others) == 1:
        following, ahead = issued[usual[0]], issued[odd[0]]
        if _follows(ahead, number, following, number + 1):
            return Hang(
                kind="collective_mismatch",
                ranks=tuple(odd),
                sentence=f"{_ranks(odd)} skipped {_named(expected)}{where}, which {_ranks(usual)} issued",
                evidence=(f"the next collectives of {_ranks(odd)} are those of the others after it",),
            )
        if _follows(ahead, number + 1, following, number):
            return Hang(
                kind="collective_mismatch",
                ranks=tuple(odd),
                sentence=f"{_ranks(odd)} issued {_named(here[odd[0]])}{where} in addition, which {_ranks(usual)} did not",
                evidence=(f"the next collectives of {_ranks(odd)} are those of the others before it",),
            )
    texts = [f"{_named(here[ranks[0]])} on {_ranks(ranks)}" for ranks in (*others, usual)]
    return Hang(
        kind="collective_mismatch",
        ranks=tuple(sorted(here) if is_tie else odd),
        sentence=f"ranks issued different collectives{where}: {', '.join(texts[:-1])} and {texts[-1]}",
    )


def _follows(
    ahead: Mapping[int, Collective], start: int, following: Mapping[int, Collective], other_start: int
) -> bool:
    """Whether the collectives of ``ahead`` from ``start`` on are those of ``following`` from ``other_start`` on."""
    pairs = [
        (ahead[start + offset], following[other_start + offset])
        for offset in range(max(len(ahead), len(following)))
        if start + offset in ahead and other_start + offset in following
    ]
    return bool(pairs) and all(_signature(left) == _signature(right) for left, right in pairs)


def _different_roots(
    states: Mapping[int, GroupState], number: int, here: Mapping[int, Collective], roots: Mapping[int, Sequence[int]]
) -> Hang:
    counts = Counter({root: len(ranks) for root, ranks in roots.items()})
    (usual, most), (_, second) = counts.most_common(2)
    odd = sorted(rank for root, ranks in roots.items() for rank in ranks if root != usual or second == most)
    texts = [f"root {root} on {_ranks(sorted(ranks))}" for root, ranks in sorted(roots.items())]
    name = next(iter(here.values())).name
    return Hang(
        kind="collective_mismatch",
        ranks=tuple(odd),
        sentence=f"ranks chose different roots in {name} #{number}{_where(next(iter(states.values())))}: {', '.join(texts)}",
    )


# --- ranks that are missing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wait:
    """Ranks that are missing in the collective in which others of its group wait: no rank is both."""

    missing: list[int]
    waiting: list[int]
    entered: set[int]  # of the missing ones those that had come, and have ended since
    state: GroupState
    collective: Collective


def _waits(groups: Mapping[str, Mapping[int, GroupState]], ended: Mapping[int, str]) -> list[_Wait]:
    waits: list[_Wait] = []
    for states in groups.values():
        pending = {
            rank: each for rank, state in states.items() if rank not in ended and (each := _pending(state)) is not None
        }
        if not pending:
            continue
        number = min(each.number for each in pending.values())
        waiting = sorted(rank for rank, each in pending.items() if each.number == number)
        state = states[waiting[0]]
        members = state.ranks or tuple(sorted(states))
        missing = sorted(
            rank
            for rank in {*members} - {*waiting}
            if rank not in states or states[rank].num_entered < number or rank in ended
        )
        entered = {rank for rank in missing if rank in states and states[rank].num_entered >= number}
        if missing:
            waits.append(_Wait(missing, waiting, entered, state, pending[waiting[0]]))
    return waits


def _missing(
    waits: Sequence[_Wait], dumps: Mapping[int, RankDump], ended: Mapping[int, str], stuck: Mapping[int, StackFrame]
) -> Hang | None:
    """Who has not entered the collective that others wait in; of several, one whose missing ranks wait nowhere themselves."""
    if not waits:
        return None
    all_waiting = {rank for wait in waits for rank in wait.waiting}
    chosen = next((wait for wait in waits if not all_waiting.issuperset(wait.missing)), None)
    if chosen is None:
        texts = [
            f"{_ranks(wait.waiting)} wait{_s(wait.waiting)} in {_named(wait.collective)}{_where(wait.state)} "
            f"for {_ranks(wait.missing)}"
            for wait in waits
        ]
        sides = sorted((wait.waiting for wait in waits), key=len)
        # of ranks that disagree about what comes next for all of them, the fewer are the odd ones
        same_members = len({tuple(sorted({*wait.missing, *wait.waiting})) for wait in waits}) == 1
        odd = sides[0] if same_members and len(sides[0]) < len(sides[1]) else sorted(all_waiting)
        return Hang(
            kind="collective_mismatch",
            ranks=tuple(odd),
            sentence=f"ranks wait for each other in different groups: {'; '.join(texts)}",
        )
    waiting, state, collective = chosen.waiting, chosen.state, chosen.collective
    missing = [rank for rank in chosen.missing if rank not in all_waiting]
    places = [_rank_place(rank, dumps.get(rank), ended, stuck) for rank in missing[:4]]
    did = f"ha{'ve' if len(missing) > 1 else 's'} not entered"
    if chosen.entered.issuperset(missing):
        did = f"no longer take{_s(missing)} part in"
    return Hang(
        kind="hang",
        ranks=tuple(missing),
        sentence=f"{_ranks(missing)} {did} {_named(collective)}{_where(state)}, "
        f"in which {_ranks(waiting)} wait{_s(waiting)}; {'; '.join(places)}",
        evidence=tuple(f"{_ranks([rank])} is in {frame}" for rank in waiting[:1] if (frame := _frame_of(dumps[rank]))),
    )


def _pending(state: GroupState) -> Collective | None:
    return next((each for each in state.collectives if each.state != "completed"), None)


def _nobody_waits(dumps: Mapping[int, RankDump], stuck: Mapping[int, StackFrame]) -> Hang | None:
    """Ranks that stand still without a recorded collective that waits, such as those that others wait for in a receive."""
    quiet = {dump.rank: dump for dump in dumps.values() if dump.reason == "no progress"}
    if not quiet and not stuck:
        return None
    waiting = sorted(rank for rank, dump in dumps.items() if rank not in stuck and _is_waiting(dump))
    missing = sorted(({*quiet, *stuck}) - set(waiting))
    if not missing:
        return None
    longest = max((dump.quiet_s for dump in quiet.values()), default=0.0)
    since = f"for {longest:.0f} s" if longest else "for long"
    places = "; ".join(_rank_place(rank, dumps.get(rank), {}, stuck) for rank in missing[:4])
    wait = f", and {_ranks(waiting)} wait{_s(waiting)} for others" if waiting else ""
    return Hang(kind="hang", ranks=tuple(missing), sentence=f"no step has ended {since}; {places}{wait}")


def _is_waiting(dump: RankDump) -> bool:
    """Whether the main thread was in torch.distributed or in the store of the job."""
    frames = dump.threads[0].frames if dump.threads else ()
    inner = (frame for frame in frames[:_WAITING_FRAMES] if not frame.is_users)
    return any(part in frame.file for frame in inner for part in _WAITING_IN)


def _rank_place(rank: int, dump: RankDump | None, ended: Mapping[int, str], stuck: Mapping[int, StackFrame]) -> str:
    if rank in ended:
        return f"rank {rank} {ended[rank]}"
    if rank in stuck:
        return f"rank {rank} is in {stuck[rank]}, and holds the interpreter"
    frame = None if dump is None else _frame_of(dump)
    if dump is None or frame is None:
        return f"rank {rank} left no stacks"
    return f"rank {rank} is in {frame}" + (
        f", in {dump.activity} since {dump.activity_s:.0f} s" if dump.activity else ""
    )


def _frame_of(dump: RankDump) -> StackFrame | None:
    return _place(thread.frames for thread in dump.threads)


def _place(stacks: Iterable[Sequence[StackFrame]]) -> StackFrame | None:
    """The innermost frame of the user's code: of the main thread, or of another one; else the main thread's innermost."""
    known = [frames for frames in stacks if frames]
    own = (frame for frames in known for frame in frames if frame.is_users)
    return next(own, known[0][0] if known else None)


# --- words -------------------------------------------------------------------------------------------------------------------


def _named(collective: Collective) -> str:
    sizes = " ".join(f"[{', '.join(map(str, size))}]" for size in collective.sizes[:2])
    dtypes = " ".join(dict.fromkeys(dtype.lower() for dtype in collective.dtypes[:2]))
    of = f" of {sizes} {dtypes}" if sizes else ""
    return f"{collective.name} #{collective.number}{of}"


def _where(state: GroupState) -> str:
    if state.description in _ALL_RANKS:
        return " on all ranks"
    return f" {'on axis' if state.description in _AXES else 'in group'} {state.description}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2`` or ``ranks 0, 2``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _s(ranks: Sequence[int]) -> str:
    return "" if len(ranks) > 1 else "s"

"""Decides from the cause of an attempt's end whether the job is started again: ``RULES`` has the decision of each cause.

Exit codes 2, 75 and 76, and attempts that were stopped, are handled elsewhere (``supervise``, ``elastic``). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from unisono.dist import Failure
from unisono.errors import Problem
from unisono.launch.exit_cause import Cause
from unisono.launch.exit_report import Attempt

# an error outside a trainer, of whose steps nothing is known, is one of the script's start for so long
_SCRIPT_START_S = 60.0
# codes above are a shell's for a command that was killed by a signal
_LAST_OWN_CODE = 128
# the same crash this often in a row ends the run
_SAME_CRASH_LIMIT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRule:
    """What follows from a cause, within the restarts that ``launch.max_restarts`` leaves.

    Attributes:
        restarts: ``never``; ``always``; ``once``: not a second time in a row without a new checkpoint; ``until_repeated``: until
            the same error comes twice in a row, or the same crash without a new checkpoint; ``by_error``: as the recorded error
            says, see ``reason_not_to_restart``.
        reason: Why, for the record and the message.
        cure: What to do before the next start; empty if the error says it.
        of_host: Whether it is the matter of one host: an elastic job goes on without it.
    """

    restarts: Literal["never", "always", "once", "until_repeated", "by_error"]
    reason: str
    cure: str = ""
    of_host: bool = False


_BY_ERROR: Final = RestartRule(restarts="by_error", reason="it may pass")
RULES: Final[Mapping[str, RestartRule]] = {
    "disk_full": RestartRule(
        restarts="never",
        reason="a restart finds the same disk",
        cure="free space there, or another run.dir, then start the same command again",
        of_host=True,
    ),
    "out_of_memory": RestartRule(
        restarts="once",
        reason="another program may have used the memory; a run that needs more than there is needs it again",
        cure="a smaller plan.micro_batch, plan.recompute, or fewer processes on a host, then start the same command again",
        of_host=True,
    ),
    "collective_mismatch": RestartRule(
        restarts="once",
        reason="ranks issue the same collectives in the same order, which is a matter of the program",
    ),
    "killed": RestartRule(restarts="always", reason="the signal came from outside"),
    "crash": RestartRule(restarts="until_repeated", reason="it may pass"),
    "hang": RestartRule(restarts="until_repeated", reason="it may pass"),
    "peer_left": RestartRule(restarts="until_repeated", reason="it may pass"),
    "communication": RestartRule(restarts="until_repeated", reason="a connection or a peer may come back"),
    "corruption": RestartRule(
        restarts="until_repeated",
        reason="the newest checkpoint was compared before it was committed, and the run continues from it",
    ),
    **dict.fromkeys(("configuration", "bad_data", "checkpoint", "numerics", "io", "program", "exit"), _BY_ERROR),
}


def _rule_of(cause: Cause | None) -> RestartRule:
    return _BY_ERROR if cause is None else RULES[cause.kind]


def reason_to_restart(attempt: Attempt) -> str:
    """Why a failed attempt that ``reason_not_to_restart`` lets pass is started again."""
    cause, rule = attempt.cause(), _rule_of(attempt.cause())
    return rule.reason if cause is None else f"{cause.words}: {rule.reason}"


def is_fault_of_one_host(attempt: Attempt) -> bool:
    """Whether the failure is the matter of one host, such as a full disk: the others can go on."""
    return _rule_of(attempt.cause()).of_host


def reason_not_to_restart(history: Sequence[Attempt]) -> Problem | None:
    """Why the last failure is not restarted, although restarts are left; None if it may be.

    ``RULES`` decide by its cause. For those that say ``by_error``, an error of the program before its first finished step comes
    back at once, and so does a crash that has already come back: at the same step, or at another one without a new checkpoint,
    which is where a restart begins. Of a script outside a trainer the steps are unknown: its first minute counts as before the
    first one. An exit code without a recorded error (``sys.exit(1)``, a program that is not Python) is restarted once.
    """
    attempt = history[-1]
    failure, cause = attempt.root_failure(), attempt.cause()
    rule = _rule_of(cause)
    if cause is not None and rule.restarts == "never":
        return Problem(
            given=f"{cause.words}: {cause.sentence}",
            rule=rule.reason,
            consequence="the run ends here; the newest checkpoint is kept",
            nearest=rule.cure,
        )
    if (
        cause is not None
        and rule.restarts == "once"
        and (problem := _would_fail_again(history, cause, rule)) is not None
    ):
        return problem
    if cause is not None and cause.kind == "crash" and (problem := _would_crash_again(history, cause)) is not None:
        return problem
    if failure is None:
        return _would_exit_again(history)
    is_script = failure.script_s is not None
    is_early = failure.script_s < _SCRIPT_START_S if failure.script_s is not None else not failure.step
    may_pass = failure.may_pass or rule.restarts in ("always", "until_repeated")
    if len(history) == 1 and is_early and not may_pass:
        when = failure.where if is_script else "before the first finished step"
        begin = f"in its first {_SCRIPT_START_S:g} s" if is_script else "before its first finished step"
        return Problem(
            given=f"{failure.type} on rank {failure.rank} {when}",
            rule=f"an error of the program {begin} would come back, so it is not restarted",
            consequence="the run ends here",
            nearest="repair the cause shown above, then start the same command again",
        )
    repeats = _same_crashes(history)
    if repeats < _SAME_CRASH_LIMIT:
        return None if may_pass else _would_come_back(history, failure)
    return Problem(
        given=f"{failure.type} {failure.where} on rank {failure.rank}, {repeats} times in a row",
        rule="a crash with the same type, message and step as the one before is not restarted again",
        consequence="the run ends here; the newest checkpoint is kept",
        nearest="repair the cause shown above, then start the same command again",
    )


def _would_come_back(history: Sequence[Attempt], failure: Failure) -> Problem | None:
    """Why an error of the program that came back at another step is not restarted again; None if it may be."""
    earlier = history[-2].root_failure() if len(history) > 1 else None
    if earlier is None or not earlier.same_error(failure):
        return None
    if failure.checkpoint != earlier.checkpoint:
        return None
    return Problem(
        given=f"{failure.type} {failure.where} on rank {failure.rank}, after the same error {earlier.where}",
        rule="an error of the program that comes back is restarted again only if a checkpoint was committed in between",
        consequence="the run ends here; the newest checkpoint is kept",
        nearest="repair the cause shown above, then start the same command again",
    )


def _would_fail_again(history: Sequence[Attempt], cause: Cause, rule: RestartRule) -> Problem | None:
    """Why a failure whose cause came back is not restarted again; None if it may be.

    Its errors may differ each time, in seconds, process ids or sizes.
    """
    kinds = [None if (each := attempt.cause()) is None else each.kind for attempt in history[-2:]]
    if kinds != [cause.kind] * 2 or history[-1].checkpoints != history[-2].checkpoints or not history[-1].took_s:
        return None  # 0: a server, which has no checkpoints of its own
    return Problem(
        given=f"{cause.words}, 2 times in a row and without a new checkpoint",
        rule=rule.reason,
        consequence="the run ends here; the newest checkpoint is kept",
        nearest=rule.cure or "repair the cause shown above, then start the same command again",
    )


def _would_crash_again(history: Sequence[Attempt], cause: Cause) -> Problem | None:
    """Why a crash of native code is not restarted again; None if it may be.

    A signal leaves no recorded error: the same one on the same rank, and no checkpoint between, is the same crash.
    """
    last, earlier = history[-1], history[-2] if len(history) > 1 else None
    if (
        earlier is None
        or (before := earlier.cause()) is None
        or (before.kind, before.ranks) != (cause.kind, cause.ranks)
    ):
        return None
    is_same = [earlier.codes[rank] for rank in cause.ranks] == [last.codes[rank] for rank in cause.ranks]
    if not is_same or earlier.checkpoints != last.checkpoints or not last.took_s:
        return None  # 0: a server, which has no checkpoints of its own
    return Problem(
        given=f"{cause.sentence}, 2 times in a row and without a new checkpoint",
        rule="a crash by the same signal on the same rank is restarted again only if a checkpoint was committed in between",
        consequence="the run ends here; the newest checkpoint is kept",
        nearest="repair the cause shown above, then start the same command again",
    )


def _would_exit_again(history: Sequence[Attempt]) -> Problem | None:
    """Why an exit code without a recorded error is not restarted again; None if it may be.

    Nothing is known but the code, the time and the checkpoints: the same code twice in the first minute, and no checkpoint
    between, is the same error. A signal is none, nor is a code above 128, by which a shell says that its command was killed.
    """
    last, earlier = history[-1], history[-2] if len(history) > 1 else None
    rank = last.root()
    if rank is None or earlier is None or not 0 < last.codes[rank] <= _LAST_OWN_CODE:
        return None
    before = earlier.root()
    if before is None or earlier.root_failure() is not None or earlier.codes[before] != last.codes[rank]:
        return None
    is_early = all(
        0 < attempt.took_s < _SCRIPT_START_S for attempt in (earlier, last)
    )  # 0: a server, which has no steps
    if not is_early or earlier.checkpoints != last.checkpoints:
        return None
    return Problem(
        given=f"exit code {last.codes[rank]} of rank {rank}, {last.took_s:.1f} s after its start, 2 times in a row",
        rule=f"the same exit code twice within {_SCRIPT_START_S:g} s and without a new checkpoint is not restarted again",
        consequence="the run ends here",
        nearest=f"the logs in {last.folder}, then start the same command again",
    )


def _same_crashes(history: Sequence[Attempt]) -> int:
    """The number of last attempts that ended in the same crash; 0 if the last one recorded no failure."""
    last = history[-1].root_failure()
    count = 0
    for attempt in reversed(history):
        failure = attempt.root_failure()
        if last is None or failure is None or not failure.same_as(last):
            break
        count += 1
    return count

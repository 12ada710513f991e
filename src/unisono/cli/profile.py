"""``unisono profile``: trains with a window of profiled steps, asks a run that is under way for one, shows the last one."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from unisono.cli.common import (
    ExpandedPath,
    FiniteRange,
    common_options,
    load_run_config,
    print_json,
    print_result,
    takes_config,
)
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import ConfigError, DataError
from unisono.sanitize import printable

_POLL_S = 0.2
_GIVEN = click.core.ParameterSource.COMMANDLINE


@click.command("profile")
@takes_config
@click.option(
    "--steps",
    "steps",
    default="+10:13",
    show_default="+10:13; with --now 3",
    help="Steps A:B, from A to before B; +A:B counts from where the run starts or resumes; with --now, how many.",
)
@click.option("--stacks", is_flag=True, help="Also Python's stacks, and the lines that read from tensors.")
@click.option("--now", is_flag=True, help="Ask the run that is under way in the folder CONFIG.")
@click.option("--timeout-s", default=600.0, type=FiniteRange(min=0), help="With --now, longest wait for the profile.")
@click.option("--plan", "plan_file", type=ExpandedPath(), help="Strategy file; the same as --set plan.file=FILE.")
@common_options
@click.pass_context
def command(
    context: click.Context,
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    steps: str,
    stacks: bool,
    now: bool,
    timeout_s: float,
    plan_file: str | None,
    as_json: bool,
) -> int:
    """Train as CONFIG says, and profile some steps on all ranks; or show the last profile of the run in the folder CONFIG.

    Each rank leaves a summary and its trace in run.dir/profile/step-…; trace.json.gz there has all ranks, for
    https://ui.perfetto.dev.
    """
    folder = Path(config[0]) if len(config) == 1 and os.path.isdir(config[0]) else None
    if len(config) == 1 and config[0].endswith((".json", ".json.gz")) and os.path.isfile(config[0]):
        raise ConfigError(
            given=f"{config[0]}, which is no configuration",
            rule="unisono profile makes a profile, or shows that of a run; unisono diagnose judges a trace",
            consequence="nothing was done",
            nearest=f"unisono diagnose {shlex.quote(config[0])}",
        )
    if folder is None and now:
        raise ConfigError(
            given=f"--now with {f'{config[0]}, which is no folder' if len(config) == 1 else ' '.join(config) or 'no folder'}",
            rule="it asks the run that is under way in a folder",
            consequence="no profile was requested",
            nearest="unisono profile RUN_DIR --now --steps 3",
        )
    _check_unused(context, folder, now=now)
    if folder is not None:
        if now:
            made = _request(folder, _num_steps(context, steps), stacks=stacks, timeout_s=timeout_s)
            time.sleep(_POLL_S)  # the event of the profile follows its last file
            _show(folder, made, as_json=as_json)
        else:
            _show(folder, None, as_json=as_json)
        return 0
    from unisono.cli import train
    from unisono.dist import job_from_environ
    from unisono.profile.rank_profile import newest_profile_folder

    profiled = json.dumps(f"{steps}+stacks" if stacks else steps)
    values: dict[str, Any] = {
        "config": config,
        "overrides": (*overrides, f"observe.profile_steps={profiled}"),
        "plan_file": plan_file,
        "debug": False,
        "as_json": as_json,
    }
    code: int = context.invoke(train.command, **values)
    if code == 0 and not as_json and job_from_environ(os.environ).source == "single":
        run_dir = Path(load_run_config(config, values["overrides"]).value.run.dir)
        if newest_profile_folder(run_dir) is not None:  # a window after the last step leaves none, and says so
            _show(run_dir, None, as_json=False)
    return code


def _check_unused(context: click.Context, folder: Path | None, *, now: bool) -> None:
    """Raise ConfigError for an option that would have no effect."""
    unused = [] if now else ["timeout_s"]
    if folder is not None:
        unused += ["overrides", "plan_file", *([] if now else ["steps", "stacks"])]
    given = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in unused and context.get_parameter_source(parameter.name) is _GIVEN
    ]
    if given:
        raise ConfigError(
            given=f"{' '.join(given)} with {'a configuration' if folder is None else f'the folder {folder}'}"
            + (" and --now" if now else ""),
            rule="a folder is of a run that has its settings: its last profile is shown, or with --now it is asked for one",
            consequence="that would have no effect, so nothing was done",
            nearest="a configuration, which trains, in place of a folder; or --now, while the run is under way",
        )


def _num_steps(context: click.Context, steps: str) -> int:
    """The number of steps that ``--now`` requests. Raises ConfigError."""
    from unisono.observe.options import MAX_PROFILE_STEPS
    from unisono.profile.window import DEFAULT_STEPS

    if context.get_parameter_source("steps") is not _GIVEN:
        return DEFAULT_STEPS
    if not steps.isdecimal() or not 1 <= int(steps[:9]) <= MAX_PROFILE_STEPS:
        raise ConfigError(
            given=f"--steps {steps} with --now",
            rule=f"the next steps of the run are profiled, 1 to {MAX_PROFILE_STEPS} of them",
            consequence="no profile was requested",
            nearest=f"--steps {DEFAULT_STEPS}",
        )
    return int(steps)


def _request(run_dir: Path, num_steps: int, *, stacks: bool, timeout_s: float) -> Path:
    """Request a profile from the run, and wait until it is written; returns its folder. Raises DataError, ConfigError."""
    from unisono.observe.options import MAX_STACK_STEPS
    from unisono.observe.rank_status import rank_statuses
    from unisono.profile.window import request_path, withdraw_request, write_request
    from unisono.storage.files import os_reason
    from unisono.storage.folder_lock import is_abandoned
    from unisono.storage.run_folder import LOCK_FILE

    def has_ended() -> bool:
        return all(status.ended for status in rank_statuses(run_dir)[:1]) or is_abandoned(run_dir / LOCK_FILE)

    if stacks and num_steps > MAX_STACK_STEPS:
        raise ConfigError(
            given=f"--steps {num_steps} with --stacks",
            rule=f"with Python's stacks at most {MAX_STACK_STEPS} steps are profiled: "
            "each takes some 0.4 GB of each rank's memory",
            consequence="no profile was requested",
            nearest=f"--steps {MAX_STACK_STEPS} --stacks",
        )
    if has_ended():
        raise DataError(
            given=f"{run_dir}, in which no run is under way",
            rule="a profile can be requested while a run makes steps",
            consequence="no profile was requested",
            nearest=f"unisono profile CONFIG, which trains; or unisono profile {run_dir}, which shows the last profile",
        )
    deadline_s = time.monotonic() + timeout_s
    try:
        request = ""
        while not request:
            try:
                request = write_request(run_dir, num_steps, stacks=stacks)
            except FileExistsError:  # that of somebody else, which the run takes within a second
                if time.monotonic() > deadline_s or has_ended():
                    raise DataError(
                        given=f"{run_dir}, in which another request waits that the run has not taken",
                        rule="a run takes one request at a time, between its steps",
                        consequence="no profile was requested",
                        nearest=f"unisono top {run_dir}, which shows whether it makes steps; a longer --timeout-s",
                    ) from None
                time.sleep(_POLL_S)
    except OSError as error:
        raise ConfigError(
            given=f"{request_path(run_dir)}, which cannot be written: {os_reason(error)}",
            rule="the run finds the request in its folder",
            consequence="no profile was requested",
            nearest="the user who started the run",
        ) from None
    with sigterm_interrupts():
        try:
            return _await(run_dir, request, deadline_s, has_ended, timeout_s=timeout_s)
        except KeyboardInterrupt:  # else the run makes a profile at its next step, for which nobody waits
            withdraw_request(run_dir, request)
            raise


def _await(run_dir: Path, request: str, deadline_s: float, has_ended: Callable[[], bool], *, timeout_s: float) -> Path:
    """The folder of the profile of a request, once it is written.

    Args:
        request: Its number.
        deadline_s: When to give up, on the monotonic clock.
        has_ended: Whether the run has ended.
        timeout_s: How long the wait was meant to be, for the message.

    Raises:
        DataError: The run has ended, or the time is over.
    """
    from unisono.profile.window import read_answer

    planned: tuple[int, float] | None = None
    while True:
        ended = has_ended()  # before the look for the profile, which a run that has ended may have left
        planned = planned or read_answer(run_dir, request)
        if planned is not None and (folder := _made(run_dir, planned)) is not None:
            return folder
        if ended or time.monotonic() > deadline_s:
            raise DataError(
                given=f"{run_dir}, which made no profile" + (": it has ended" if ended else f" within {timeout_s:g} s"),
                rule="a run looks for requests once a second, between its steps",
                consequence=f"there is nothing to show; {_what_remains(run_dir, request, planned, ended=ended)}",
                nearest=f"unisono top {run_dir}, which shows whether it makes steps; a longer --timeout-s",
            )
        time.sleep(_POLL_S)


def _what_remains(run_dir: Path, request: str, planned: tuple[int, float] | None, *, ended: bool) -> str:
    """What becomes of a request whose profile is not there, in words; one that the run has not taken is withdrawn."""
    from unisono.profile.window import withdraw_request

    if planned is not None and ended:
        return f"step {planned[0]} was planned, and the profile was not written before the end"
    if planned is not None:
        return f"step {planned[0]} is planned; unisono profile {run_dir} shows it later"
    if withdraw_request(run_dir, request):
        return "the request was taken back"
    return "the request is no longer in the folder: the run has taken it, or another one has replaced it"


def _made(run_dir: Path, planned: tuple[int, float]) -> Path | None:
    """The folder of the profile whose first step and time were ``planned``; None while it has no merged trace, written last."""
    from unisono.profile.rank_profile import MERGED_FILE, profile_folder

    first, at_s = planned
    folder = profile_folder(run_dir, first)
    try:
        # an earlier attempt may have made the same steps
        return folder if (folder / MERGED_FILE).stat().st_mtime >= at_s else None
    except OSError:
        return None


def _show(run_dir: Path, folder: Path | None, *, as_json: bool) -> None:
    """Show the profile in ``folder``, by default the last one of the run. Raises DataError where there is none."""
    from unisono.profile import read_profiles
    from unisono.profile.rank_profile import MERGED_FILE, newest_profile_folder
    from unisono.profile.text import profile_text

    folder = newest_profile_folder(run_dir) if folder is None else folder
    profiles, notes = ((), ()) if folder is None else read_profiles(folder)
    if folder is None or not profiles:
        raise DataError(
            given=f"{run_dir} has no profile" + "".join(f"; {note}" for note in notes),
            rule="profiles are in the folder of a run (profile/step-…/rank-N.json)",
            consequence="there is nothing to show",
            nearest=f"unisono profile {run_dir} --now, while the run makes steps; or unisono profile CONFIG",
        )
    stopped_s = _stopped_s(run_dir, folder)
    if as_json:
        ranks = [_plain(profile) for profile in profiles]
        print_json({"run_dir": str(run_dir), "folder": str(folder), "stopped_s": stopped_s, "ranks": ranks})
        return
    trace = folder / MERGED_FILE
    lines = [*(printable(line) for line in profile_text(profiles)), ""]
    lines += [f"the run stood still for {stopped_s:.2g} s while it was written"] if stopped_s is not None else []
    lines += [f"trace of all ranks, for https://ui.perfetto.dev: {trace}"] if trace.is_file() else []
    print_result(False, {}, lines)


def _stopped_s(run_dir: Path, folder: Path) -> float | None:
    """For how long rank 0 stood still to write the profile in ``folder``, by its events; None where these do not tell."""
    from unisono.observe.events import decode_event, event_lines, events_path, number, open_events

    found: float | None = None
    try:
        with open_events(events_path(run_dir, 0)) as file:
            for lines, _ in event_lines(file):
                for line in lines:
                    # few lines have the word, and only these are decoded
                    event = (decode_event(line) or {}) if b'"profile"' in line else {}
                    if event.get("kind") == "profile" and Path(str(event.get("folder"))).name == folder.name:
                        found = number(event.get("stopped_s"))
    except (FileNotFoundError, ConfigError):
        return None
    return found


def _plain(profile: Any) -> dict[str, Any]:
    """The profile as JSON types."""
    fields: dict[str, Any] = json.loads(profile.to_bytes())
    return fields

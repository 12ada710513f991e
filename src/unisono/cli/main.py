"""The command group. A command's module is imported when the command runs or shows its help; none imports torch at module level.

Exit codes are those of ``unisono.exit_codes``; 0 is success.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from unisono.cli.terminal import clean_log_messages, echo, flush_output, is_of_output, show_click_error, shown
from unisono.dist.interpreter import open_standard_descriptors
from unisono.errors import Problem, UnisonoError, nearest_name
from unisono.exit_codes import REQUEUE, USER_ERROR

COMMANDS = {
    "train": "Train a model; without arguments a small GPT on the standard library's source.",
    "launch": "Run any command as one job: here, on other hosts over ssh, by mpirun or srun.",
    "init": "Write a commented starter configuration.",
    "profile": "Profile some steps of a run on all its ranks, and show the result.",
    "diagnose": "Say what makes a run slow or wrong, and which settings to change.",
    "doctor": "Examine this host before a run.",
    "top": "Show where the ranks of a running job stand.",
    "report": "Write the HTML report of a run.",
    "compare": "Compare runs: losses, speed, memory, settings; limits for CI.",
    "tune": "Find settings by search: each trial is a training.",
    "eval": "Evaluate the newest checkpoint of a run on its held-out data.",
    "predict": "Say what a trained model predicts for new data.",
    "quantize": "Write a smaller model with weights of 8 or 4 bits.",
    "prune": "Make a trained model smaller: fewer heads, hidden units, layers, or zeros.",
    "generate": "Let a trained language model write.",
    "config": "Show, explain, compare configurations.",
    "plan": "Show, check, compare, write strategy files.",
    "kvstore": "Measure the stores that synchronise workers.",
    "checkpoint": "List, verify, convert, export checkpoints.",
    "completion": "Print the script that completes commands in bash, zsh or fish.",
    "data": "Look into record files, check, mend, rearrange and convert them.",
}


class _LazyGroup(click.Group):
    """Command group that lists ``COMMANDS`` and imports only the module of the called command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            ctx.fail(f"no command {cmd_name!r}; {nearest_name(cmd_name, COMMANDS)}")
        return import_module(f"unisono.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(context: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        from importlib import metadata  # pulls in the email package: a quarter of the time of --help

        try:
            click.echo(f"unisono {metadata.version('unisono')}")
        except metadata.PackageNotFoundError:
            click.echo("unisono, run from a source tree that is not installed")
        context.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Train PyTorch models on the hardware you have: exact resume, plans as data, honest meters."""


def entry() -> NoReturn:
    """Run the command line and exit with its code; a ``UnisonoError`` prints its four parts without a traceback,
    any other error its traceback from the user's code on."""
    open_standard_descriptors()
    clean_log_messages()
    try:
        sys.exit(_run())
    finally:
        _discard_unwritable()


def _run() -> int:
    """Run the command line; returns its exit code, or raises SystemExit with it."""
    try:
        result: Any = cli.main(standalone_mode=False)
        flush_output()
    except click.ClickException as error:
        show_usage_error(error)
        return USER_ERROR
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # which click takes for an interrupt
            _show_exception(abort.__cause__)
            return 1
        print("unisono: interrupted", file=sys.stderr)
        return REQUEUE
    except UnisonoError as error:
        logging.getLogger("unisono").debug("the error below was raised here", exc_info=error)
        show_error(error)
        return error.exit_code
    except BrokenPipeError:  # the reader closed the pipe
        return 1
    except Exception as error:
        if isinstance(error, OSError) and is_of_output(error):
            reason = error.strerror or str(error)
            with contextlib.suppress(OSError):  # standard error may have the same full disk behind it
                print(f"unisono: the output cannot be written: {reason}", file=sys.stderr)
        else:
            _show_exception(error)
        return 1
    return result if isinstance(result, int) else 0


def _discard_unwritable() -> None:
    """Discard what cannot be written: the interpreter would try again at exit, report it, and exit with 120."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None and not stream.closed:  # pyright: ignore[reportUnnecessaryComparison]
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def show_error(error: UnisonoError) -> None:
    """Print the error on standard error, or with ``--json`` as the one JSON object on standard output."""
    rank = _rank()
    if "--json" in sys.argv and rank == 0:
        _print_error(type(error).__name__, error.problems)
    else:
        echo(f"unisono: {f'rank {rank}: ' if rank else ''}{error}", err=True)


def _show_exception(error: Exception) -> None:
    """Print the traceback of any other error, from the user's code or ours, and record it for the launcher."""
    from unisono.dist import job_from_environ, read_failure, record_failure, user_traceback
    from unisono.dist.failure import TRACEBACKS
    from unisono.errors import LaunchError
    from unisono.sanitize import redact_text

    logs, is_recorded = os.environ.get("UNISONO_LOGS"), False
    if logs is not None:
        with contextlib.suppress(LaunchError, OSError):
            job = job_from_environ(os.environ)
            # the trainer has recorded errors of its own, with their step
            if read_failure(Path(logs), job.rank, job.restart_count) is None:
                record_failure(Path(logs), job, error, step=None)
            is_recorded = True
    if not (is_recorded and os.environ.get(TRACEBACKS) == "record"):
        print(shown(redact_text(user_traceback(error))), end="", file=sys.stderr)


def show_usage_error(error: click.ClickException) -> None:
    """Print click's error about a wrong command line."""
    if "--json" not in sys.argv:
        show_click_error(error)
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    problem = Problem(
        given=error.format_message(),
        rule=context.get_usage() if context else "see --help",
        consequence="nothing was done",
        nearest=f"{context.command_path if context else 'unisono'} --help",
    )
    _print_error(type(error).__name__, (problem,))


def _print_error(kind: str, problems: tuple[Problem, ...]) -> None:
    listed = [{"given": p.given, "rule": p.rule, "consequence": p.consequence, "nearest": p.nearest} for p in problems]
    print(json.dumps({"error": kind, "problems": listed}))


def _rank() -> int:
    """Rank of this process; 0 without a job or if the job's variables are wrong."""
    from unisono.dist import job_from_environ
    from unisono.errors import LaunchError

    try:
        return job_from_environ(os.environ).rank
    except LaunchError:
        return 0

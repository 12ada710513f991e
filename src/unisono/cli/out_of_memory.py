"""What ``unisono train`` says once its job has run out of memory: traced beside measured bytes, and what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unisono.cli.common import trust_arguments
from unisono.dist.interpreter import module_command
from unisono.storage.run_folder import RUN_FILE

_LIMIT_S: Final = 60.0
_TRIED_S: Final = 40.0  # after that no further plan is traced: the last one may take some time


def explain(run_dir: Path, configuration: Sequence[str]) -> None:
    """If the job in ``run_dir``, which has ended, ran out of memory: trace it in a process of its own, for a minute at most.

    ``configuration`` are the arguments it was started with. They are read where it ended before its own files were written.
    That process also keeps what it finds in the run's folder. Nothing that goes wrong there is an error.
    """
    from unisono.diagnose.ending import read_ending
    from unisono.launch.child import error_paragraph, run_child
    from unisono.launch.supervise import print_message

    is_over, ending = read_ending(run_dir, since_s=0.0)
    if not is_over or ending is None or ending.kind != "out_of_memory":
        return
    failed = ["plan", "fit", "--failed", str(run_dir)]
    if not (run_dir / RUN_FILE).exists():
        failed += configuration
    arguments = [*failed, *trust_arguments()]
    again = shlex.join(["unisono", *failed])
    try:
        code, said = run_child(module_command("unisono", *arguments, f"--budget-s={_TRIED_S:g}"), timeout_s=_LIMIT_S)
    except KeyboardInterrupt:
        code, said = None, ""
    except OSError as error:
        code, said = 2, str(error)
    if code in (0, 1):
        print_message(said.rstrip())
    elif code is None:
        print_message(
            "\n".join([*said.splitlines(), f"the search for a plan that fits was cut short; all of it: {again}"])
        )
    else:
        print_message(f"its memory was not traced: {error_paragraph(said)}\nto try again: {again}")

"""Records the exception that ends a worker of a launch, if the worker is a Python script. No record, no change.

The launcher puts this folder first in the module path of every worker. It tells an error of the script, which a restart
would repeat, from a crash, and shows one traceback instead of one for each rank. A trainer has recorded its own errors
with their step; those are kept. Another ``sitecustomize`` of this interpreter is loaded as usual.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import TracebackType

_BEGIN_S = time.monotonic()
_PROGRAM = os.getpid()


def _is_the_worker() -> bool:
    """Whether this process is the worker's program: it leads the session, or a shell started it."""
    leader = os.getsid(0)
    if leader == _PROGRAM:
        return True
    try:
        return os.readlink(f"/proc/{leader}/exe") != os.path.realpath(sys.executable)
    except OSError:
        return False


def _record(error: BaseException | None) -> bool:
    """Record ``error``, unless that was done before; returns whether there is a record of it."""
    if not isinstance(error, Exception) or os.getpid() != _PROGRAM:
        return False
    try:
        from unisono.dist import JobSpec, read_failure, record_failure

        logs = Path(os.environ["UNISONO_LOGS"])
        job = JobSpec(rank=int(os.environ["UNISONO_RANK"]), restart_count=int(os.environ["UNISONO_RESTART_COUNT"]))
        known = read_failure(logs, job.rank, job.restart_count)
        if known is None or (known.type, known.message) != (type(error).__name__, str(error)):
            record_failure(logs, job, error, step=None, script_s=time.monotonic() - _BEGIN_S)
    except Exception:  # a script that changes its environment or its folder keeps its own error
        return False
    return True


def _install() -> None:
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # of a failed collective the launcher says which rank was missing; a traceback for each rank that waited says nothing
        is_shown = os.environ.get("UNISONO_TRACEBACKS") != "record" and kind.__name__ != "CommError"
        if not _record(error) or is_shown:
            show(kind, error, trace)

    sys.excepthook = hook
    # a program may put another hook in our place
    atexit.register(lambda: _record(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)))


def _leave_the_path() -> None:
    """Take this folder out of the module path, and load the ``sitecustomize`` that it hides."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != here]
    if any(others):
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "UNISONO_LOGS" in os.environ and os.environ.get("UNISONO_ROLE") == "worker" and _is_the_worker():
    _install()
_leave_the_path()

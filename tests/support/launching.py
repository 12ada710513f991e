"""A real launch of a small worker script, seen from the outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from procs import is_running, marked, wait_until

DRIVER = Path(__file__).with_name("launch_driver.py")

# every worker script starts with this; ``seen(name)`` leaves a file the test can wait for
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from unisono.dist import JobSpec, StopNotice, job_from_environ, record_failure
job = job_from_environ(os.environ)
run_dir = Path(os.environ["UNISONO_LOGS"]).parent
def seen(name, content=""):
    partial = run_dir / f".{name}.{job.rank}"
    partial.write_text(str(content))
    partial.replace(run_dir / f"{name}.{job.rank}.{job.restart_count}")
"""


@dataclass
class Launch:
    """A running launch; ``mark`` is in the environment of all its processes but the guard."""

    process: subprocess.Popen[str]
    run_dir: Path
    mark: str

    def wait_for(self, *names: str) -> None:
        """Until the workers have left these files; fails at once when the launch ends before."""

        def there() -> bool:
            found = all((self.run_dir / name).exists() for name in names)
            assert found or self.process.poll() is None, f"ended without {names}: {self.process.communicate()[1]}"
            return found

        wait_until(there, f"{names} in {self.run_dir}", 60)

    def finish(self) -> tuple[int, str]:
        """Exit code and stderr once the launch has ended; and nothing of it is left."""
        family = [self.process.pid, *self.children()]
        _, said = self.process.communicate(timeout=120)
        self.assert_gone(family)
        return self.process.returncode, said

    def children(self) -> list[int]:
        """Pids of all descendants, the guard among them."""
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def assert_gone(self, family: list[int]) -> None:
        wait_until(lambda: not marked(self.mark), "no process with the launch's mark is left")
        wait_until(lambda: not any(map(is_running, family)), "the guard is gone too")

    def record(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "launch.json").read_text())


# what the fixture of tests/launch/conftest.py cleans up after a test
STARTED: list[Launch] = []


def start(
    script: str, folder: Path, *, environ: dict[str, str] | None = None, prefix: Sequence[str] = (), **options: Any
) -> Launch:
    """Launches ``script`` in two processes (by default), with the run's folder at ``folder/run``."""
    worker = folder / "worker.py"
    worker.write_text(PRELUDE + script)
    mark = uuid.uuid4().hex
    settings = {"num_processes": 2, "num_threads": 1, "grace_s": 20.0} | options
    process = subprocess.Popen(
        [*prefix, sys.executable, str(DRIVER), json.dumps(settings), str(folder / "run"), sys.executable, str(worker)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MARK": mark} | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(Launch(process, folder / "run", mark))
    return STARTED[-1]


def run(script: str, folder: Path, **options: Any) -> tuple[int, str, Launch]:
    """Exit code, stderr and the ended launch."""
    launched = start(script, folder, **options)
    code, said = launched.finish()
    return code, said, launched


# what scripts of jobs with an agent start with: the agent's own folder is not the run's
JOB_PRELUDE = (
    PRELUDE.replace('Path(os.environ["UNISONO_LOGS"]).parent', 'Path(os.environ["RUN_DIR"])')
    + """
name = job.role if job.role == "worker" else f"{job.role}-{job.server_index}"
"""
)


def start_argv(argv: Sequence[str], run_dir: Path, mark: str, environ: dict[str, str]) -> Launch:
    """Any launching command, to be looked after like the others."""
    process = subprocess.Popen(
        list(argv),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MARK": mark} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(Launch(process, run_dir, mark))
    return STARTED[-1]


def start_job(
    worker: str,
    folder: Path,
    *,
    hosts: Sequence[dict[str, Any]] = ({"name": "this host", "slots": 2, "here": True},),
    server: str = "",
    servers: int = 0,
    environ: dict[str, str] | None = None,
    port: int = 0,
    **options: Any,
) -> Launch:
    """A job with agents, of a worker script and a server script, with its folder at ``folder/run``."""
    (folder / "run").mkdir()
    for file, script in (("worker.py", worker), ("server.py", server)):
        (folder / file).write_text(JOB_PRELUDE + script)
    mark = uuid.uuid4().hex
    asked = {
        "hosts": list(hosts),
        "worker": str(folder / "worker.py"),
        "server": str(folder / "server.py"),
        "servers": servers,
        "options": {"num_threads": 1, "grace_s": 20.0} | options,
        "port": port,
        "environ": {
            "RUN_DIR": str(folder / "run"),
            "MARK": mark,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    }
    driver = DRIVER.with_name("job_driver.py")
    return start_argv(
        [sys.executable, str(driver), json.dumps(asked), str(folder / "run")], folder / "run", mark, environ or {}
    )

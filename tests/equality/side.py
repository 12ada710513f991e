"""One checkout: its processes, the working folders of its cases, and results kept from earlier comparisons."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from . import inputs, results
from .cases import Case, Stage, toml

STAGE_S = 240.0
Results = dict[str, str]


class CaseError(Exception):
    """A command of a case did not end as it should; says how, and the end of its output."""


@dataclass
class _Process:
    """A process that was asked for: ``ended`` is set when ``code`` is known."""

    log: Path
    pid: int = 0
    code: int | None = None
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def output(self) -> str:
        return "".join(
            path.read_text(errors="replace")
            for suffix in (".out", ".err")
            if (path := self.log.with_name(self.log.name + suffix)).exists()
        )


class Side:
    """The checkout at ``root``. Its process for forks starts at first use; ``cpu_s`` is known once it is closed."""

    def __init__(self, root: Path, work: Path, cache: Path, *, name: str, without: frozenset[str]) -> None:
        self.root, self.name = root.resolve(), name
        self.python = self.root / ".venv/bin/python"
        self.work = work / name
        self.cpu_s = 0.0
        self._cache = cache
        self._without = without
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._processes: dict[int, _Process] = {}
        self._forks: subprocess.Popen[bytes] | None = None
        inputs.write(self.work / "inputs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._forks is None or self._forks.stdin is None:
            return
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._forks.stdin.close()
        self._forks.wait(30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # --- identity ---------------------------------------------------------------------------------------------------

    def revision(self) -> str | None:
        """The commit, or None where files of the library differ from it."""
        changed = self._git("status", "--porcelain", "--", "src", "pyproject.toml")
        return None if changed else self._git("rev-parse", "HEAD")

    def key(self, case: Case) -> str | None:
        """Of the cached results: commit, case, this harness and machine; None where they must not be cached."""
        if (revision := self.revision()) is None:
            return None
        digest = hashlib.sha256()
        for module in ("inputs", "results", "side", "forks"):
            digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
        facts = [asdict(case), sorted(self._without), platform.processor(), _cpu(), str(self.python)]
        digest.update(json.dumps(facts, sort_keys=True).encode())
        return f"{revision[:12]}-{case.name}-{digest.hexdigest()[:12]}"

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", self.root, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    # --- cases ------------------------------------------------------------------------------------------------------

    def run(self, case: Case, *, carried: Path | None = None) -> Results:
        """All stages of ``case``, and what they left. ``carried`` takes a copy of the folder after its first ``carry``.

        Raises CaseError where a command ends in another way than it should.
        """
        if case.wire:
            return self.wire(case, server=self)
        folder = self._folder(case.name)
        outputs: Results = {}
        for number, stage in enumerate(case.stages):
            if carried is not None and number == case.carry:
                shutil.copytree(folder, carried, symlinks=True)
            outputs |= self._stage(stage, number, folder)
        return self._collect(case, folder, outputs)

    def resume(self, case: Case, carried: Path) -> Results:
        """The stages after the first ``carry``, in a copy of the folder that another checkout left behind."""
        folder = self.work / f"{case.name}-carried"
        shutil.copytree(carried, folder, symlinks=True)
        (folder / "inputs").unlink()
        (folder / "inputs").symlink_to(self.work / "inputs")
        outputs: Results = {}
        for number, stage in enumerate(case.stages):
            if number >= case.carry:
                outputs |= self._stage(stage, number, folder)
        return self._collect(case, folder, outputs)

    def wire(self, case: Case, *, server: Side) -> Results:
        """The asynchronous run of ``case`` with one parameter server of the checkout ``server``."""
        folder = self._folder(f"{case.name}-server-of-{server.name}")
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
        address = f"127.0.0.1:{_free_port()}"
        common = {
            "UNISONO_SERVER_ADDRESSES": address,
            "UNISONO_RESTART_COUNT": "0",
            "UNISONO_EPOCH": "0",  # its name in earlier versions
            "UNISONO_SECRET_FILE": str(secret),
        }
        serving = server.start(
            [], folder, folder / "server", {**common, "UNISONO_SERVER": "0"}, module="unisono.kvstore.server"
        )
        try:
            _wait_for(address, serving)
            rank = {
                "UNISONO_RUN_ID": "wire",
                "UNISONO_RANK": "0",
                "UNISONO_LOCAL_RANK": "0",
                "UNISONO_WORLD": "1",
                "UNISONO_LOCAL_WORLD": "1",
                "UNISONO_MASTER_ADDR": "127.0.0.1",
                "UNISONO_MASTER_PORT": str(_free_port()),
                "UNISONO_SERVERS": "1",
            }
            stage = case.stages[0]
            outputs = self._stage(stage, 0, folder, environ={**common, **rank})
        finally:
            server.stop(serving)
        return self._collect(case, folder, outputs)

    def _folder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        (folder / "inputs").symlink_to(self.work / "inputs")
        for made in ("out", "back"):
            (folder / made).mkdir()
        return folder

    def _stage(self, stage: Stage, number: int, folder: Path, *, environ: Mapping[str, str] | None = None) -> Results:
        argv = list(stage.argv)
        if stage.settings is not None:
            path = folder / f"stage-{number}.toml"
            path.write_text(toml({k: v for k, v in stage.settings.items() if k not in self._without}))
            argv = [path.name if word == "CONFIG" else word for word in argv]
        port = _free_port()
        processes: list[_Process] = []
        for rank in range(max(1, stage.ranks)):
            own = {**stage.environ, **(environ or {})}
            if stage.ranks:
                own |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(stage.ranks),
                    "LOCAL_WORLD_SIZE": str(stage.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            processes.append(self.start(argv, folder, folder / f"stage-{number}-rank-{rank}", own))
        deadline = time.monotonic() + STAGE_S
        for process in processes:
            if not process.ended.wait(max(0.0, deadline - time.monotonic())):
                for other in processes:
                    self.stop(other, signal.SIGKILL)
                raise CaseError(f"{self.name}: stage {number} ({' '.join(argv)}) ran longer than {STAGE_S:g} s")
        for rank, process in enumerate(processes):
            if process.code != stage.code:
                last = "\n    ".join(process.output().splitlines()[-12:])
                raise CaseError(
                    f"{self.name}: stage {number} ({' '.join(argv)}), rank {rank}: exit code {process.code}\n    {last}"
                )
        if argv[0] == "train":
            return {}
        return {f"stage {number} prints": processes[0].log.with_suffix(".out").read_text()}

    def _collect(self, case: Case, folder: Path, outputs: Results) -> Results:
        found = outputs | results.of_files(folder, case.files)
        for run in case.runs:
            found |= results.of_run(folder / run, label="" if len(case.runs) == 1 else f"{run}: ")
        if not found:
            raise CaseError(f"{self.name}: nothing to compare was left in {folder}")
        return found

    # --- processes --------------------------------------------------------------------------------------------------

    def start(
        self, argv: list[str], cwd: Path, log: Path, environ: Mapping[str, str], *, module: str = "unisono"
    ) -> _Process:
        """``python -m module argv`` of this checkout, in a process group of its own."""
        process = _Process(log)
        with self._lock:
            forks = self._open()
            number = next(self._numbers)
            self._processes[number] = process
            order = {
                "id": number,
                "module": module,
                "argv": argv,
                "environ": {**self._environ(), **environ},
                "cwd": str(cwd),
                "log": str(log),
            }
            assert forks.stdin is not None
            forks.stdin.write(json.dumps(order).encode() + b"\n")
            forks.stdin.flush()
        if not process.began.wait(120):
            raise CaseError(f"{self.name}: {self.python} did not start a process within 120 s")
        return process

    def stop(self, process: _Process, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the process and wait until it has ended; after 20 s its whole group is killed."""
        if not process.ended.is_set():
            os.kill(process.pid, number)
            if not process.ended.wait(20):
                os.killpg(process.pid, signal.SIGKILL)
                process.ended.wait(20)

    def _open(self) -> subprocess.Popen[bytes]:
        if self._forks is None:
            script = Path(__file__).with_name("forks.py")
            self._forks = subprocess.Popen(
                [self.python, script],
                cwd=self.work,
                env=self._environ(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            threading.Thread(target=self._read, args=(self._forks,), daemon=True).start()
        return self._forks

    def _read(self, forks: subprocess.Popen[bytes]) -> None:
        assert forks.stdout is not None
        for line in forks.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "id" not in answer:
                continue
            process = self._processes[answer["id"]]
            if "pid" in answer:
                process.pid = answer["pid"]
                process.began.set()
            else:
                process.code = answer["code"]
                process.ended.set()

    def _environ(self) -> dict[str, str]:
        """What this process has, without what launchers set, and with caches and one thread of its own."""
        launchers = ("UNISONO", "DMLC_", "SLURM_", "OMPI_", "PMI", "TORCH", "MASTER_", "PYTHON", "VIRTUAL_ENV")
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(launchers) and name not in ranks}
        return kept | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": str(self.work / "inputs/plugin"),
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._cache / "inductor"),  # found by generated code: a hit says it is equal
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_for(address: str, serving: _Process) -> None:
    """Until something listens at ``address``."""
    host, _, port = address.partition(":")
    for _ in range(600):
        if serving.ended.is_set():
            raise CaseError(f"the server ended with exit code {serving.code}\n    {serving.output()[-800:]}")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise CaseError(f"no server listened at {address} within 60 s")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith("model name")), platform.machine())

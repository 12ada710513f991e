"""Contestants of a benchmark: processes that keep running, each in an environment of its own that pip makes the first time.

One of them runs a block when told to; the others are stopped by the kernel meanwhile.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# torch first and by itself, so that a CPU wheel of it that the index offers is taken and nothing pulls another
ENVIRONMENTS = {
    # these two compute with unisono's GPT, for which lazy_loader is enough
    "accelerate": ["torch==2.13.0", "accelerate", "lazy_loader"],
    "lightning": ["torch==2.13.0", "lightning", "lazy_loader"],
    # its extension modules are built for numpy 1
    "mindspore": ["mindspore==2.10.0", "numpy<2"],
    "mxnet": ["mxnet==1.9.1", "numpy<1.24", "opencv-python-headless==4.7.0.72"],
    "records": ["lmdb", "pyarrow", "numpy<2.5"],
    # torch's DataLoader with each decoder, the two packages that need little more, and unisono with OpenCV
    "loaders": [
        "torch==2.13.0",
        *("numpy", "pillow", "simplejpeg", "opencv-python-headless", "webdataset", "spdl"),
        *("lazy_loader", "msgspec", "xxhash", "psutil", "click", "rich", "safetensors", "tomli-w"),
    ],
    "grain": ["grain", "array_record", "simplejpeg", "opencv-python-headless"],
    "litdata": ["torch==2.13.0", "litdata", "simplejpeg", "opencv-python-headless"],
    # the last release asks for this numpy
    "streaming": ["torch==2.13.0", "numpy<2.2", "mosaicml-streaming==0.13.0", "simplejpeg", "opencv-python-headless<5"],
    # needs the headers of OpenCV and libturbojpeg and a compiler; OpenCV without windows goes over the one that it asks for
    "ffcv": ["torch==2.13.0", "numpy", "pillow", "ffcv", "opencv-python-headless"],
    "profilers": ["torch==2.13.0", "traceml-ai", "lightning"],
    "text_dedup": ["text-dedup==0.4.0"],
    # newer packages of xxhash take no strings
    "datatrove": ["datatrove[io]==0.10.1", "regex", "tokenizers", "xxhash<4"],
    # imports torchvision, which has no CPU build, for models that are not used here
    "imagededup": ["torch==2.13.0", "imagededup==0.3.3"],
    "megatron": ["torch==2.13.0", "megatron-core"],
    # computes with unisono's GPT
    "estimators": ["torch==2.13.0", "numpy", "lazy_loader", "accelerate==1.15.0", "deepspeed==0.19.8"],
}
LAUNCHER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "GLIBC_TUNABLES")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """``environment`` '' is this interpreter; ``environ`` is added to a clean one."""

    name: str
    module: str
    environment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def interpreter(environment: str, cache: Path) -> str:
    """The python of an environment; installs it if it is not there or its requirements have changed."""
    if not environment:
        return sys.executable
    folder, wanted = cache / environment, ENVIRONMENTS[environment]
    python, marker = folder / "bin" / "python", folder / "requirements.json"
    if not marker.exists() or json.loads(marker.read_text()) != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if "torch==2.13.0" in wanted:
            if not any(requirement.startswith("numpy<") for requirement in wanted):
                pip += ["-c", ROOT / "constraints.txt"]
            for requirement in wanted:
                subprocess.run([*pip, "torch==2.13.0", requirement], check=True, stdout=sys.stderr)
        else:
            subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
        marker.write_text(json.dumps(wanted))
    return str(python)


class Worker:
    """A contestant's process. Stopped (SIGSTOP) but while it runs a block, so that no idle thread of it spins."""

    def __init__(
        self, contestant: Contestant, cache: Path, folder: Path, workload: Path, *, timeout_s: float = 3600.0
    ) -> None:
        self.contestant = contestant
        own = folder / contestant.name
        own.mkdir()
        settings = {"workload": str(workload), "folder": str(own), **contestant.settings}
        clean = {n: v for n, v in os.environ.items() if n not in LAUNCHER_VARIABLES and not n.startswith("MALLOC_")}
        environ = clean | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | dict(contestant.environ)
        self._log = own / "stderr.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [interpreter(contestant.environment, cache), "-m", contestant.module, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
                cwd=own,
                process_group=0,  # loaders' processes are stopped with it; should we be killed, the kernel hangs it up
            )
        self._timeout_s = timeout_s
        self.blocks: list[dict[str, float]] = []
        try:
            self.facts = self._answer()
        except (RuntimeError, TimeoutError):
            self._end()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, steps: int) -> dict[str, float]:
        """Train one block."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"run {steps}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, in steps of a clock tick; of those that ended, if they were waited for."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:  # its process group
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            raise TimeoutError(f"{self.contestant.name}: no answer in {self._timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.contestant.name} ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

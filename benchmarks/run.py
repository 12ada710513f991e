"""Runs benchmarks and appends what they print to ``results/<name>.json``; then writes the tables.

    python -m benchmarks.run [NAME ...] [--quick] [--more ARGUMENT]

Each is a script that prints JSON. ``--quick`` takes a tenth of the repeats to see that they run: its results are not kept.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.reach import files_of
from benchmarks.record import ROOT, Run, digests, load, save
from benchmarks.suite import BENCHMARKS, Benchmark

DISTRIBUTIONS = ("torch", "numpy", "safetensors", "msgspec", "rich", "click", "psutil", "plotly", "xxhash")


def machine() -> dict[str, Any]:
    """The machine that the numbers depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = next((line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "0")
    return {
        "device": "cpu",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Versions of Python and of the distributions in use."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the sources, with -dirty if they differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD") or os.environ.get(
        "SOURCE_COMMIT", "unknown"
    )  # a copy without history
    return head + ("-dirty" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def run_one(benchmark: Benchmark, *, quick: bool, more: tuple[str, ...]) -> Run:
    """Run a script. Raises CalledProcessError, and JSONDecodeError where it printed something else."""
    arguments = [*benchmark.arguments, *(benchmark.quick if quick else ()), *more]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    sources, revision = digests(files_of(benchmark.module)), commit()
    # as pip does when it installs one of the others: otherwise each start of a command would compile its sources again
    compileall.compile_dir(ROOT / "src", quiet=1)
    before, begin = os.getloadavg()[0], datetime.now(UTC)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}", *arguments]
    answer = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(answer.stdout)
    device = {"device": result["device"]} if "device" in result else {}
    return {
        "command": " ".join(["python", *command[1:]]),
        "date": begin.isoformat(timespec="seconds"),
        "wall_s": round((datetime.now(UTC) - begin).total_seconds(), 1),
        "commit": revision,
        "sources": sources,
        "machine": machine() | device,
        "versions": versions(),
        "load_average": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        "result": result,
    }


def main() -> int:
    """The exit code."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repeats, and nothing is kept")
    parser.add_argument("--more", action="append", default=[], help="an argument to hand on to the script")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(names)}")
    failed = False
    for benchmark in BENCHMARKS:
        if arguments.names and benchmark.name not in arguments.names:
            continue
        print(f"{benchmark.name} …", file=sys.stderr, flush=True)
        try:
            run = run_one(benchmark, quick=arguments.quick, more=tuple(arguments.more))
        except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
            print(f"{benchmark.name}: {error}", file=sys.stderr)
            failed = True
            continue
        if arguments.quick:
            print(json.dumps(run["result"], indent=1))
            continue
        results = load(benchmark.name)
        results.add(run)
        save(results)
    if not arguments.quick:
        tables.write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

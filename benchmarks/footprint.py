"""What unisono costs before it trains: start-up times, size of the install, and the demo from end to end. Prints JSON.

    python -m benchmarks.footprint [--repeats 11] [--no-demo] [--no-install]

Start-up times are of whole processes, interleaved, after one round that is not counted; CPU time is the process's own user and
system time. The install is what pip would add to an environment that has torch: those distributions, into an empty folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import spread

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "python": ["-c", "pass"],
    "import_unisono": ["-c", "import unisono"],
    "help": ["-m", "unisono", "--help"],
    "train_help": ["-m", "unisono", "train", "--help"],
    "config_show": ["-m", "unisono", "config", "show"],
    "import_torch": ["-c", "import torch"],
}


def run_once(arguments: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return wall_s, usage.ru_utime + usage.ru_stime


def start_times(repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` rounds, each with one process of every kind."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(repeats + 1):
        for name, arguments in COMMANDS.items():
            measured = run_once(arguments)
            if number:
                times[name].append(measured)
    return {
        name: {
            "wall_s": spread([wall for wall, _ in values]),
            "cpu_s": spread([cpu for _, cpu in values]),
        }
        for name, values in times.items()
    }


def install_size(scratch: Path) -> dict[str, Any]:
    """Bytes that an install of unisono adds to one of torch, by distribution."""
    source = scratch / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    torch_needs = _resolve("torch")
    ours = _resolve(str(source)) - torch_needs - {("unisono", "")}
    target = scratch / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    pinned = [f"{name}=={version}" for name, version in sorted(ours) if name != "unisono"]
    subprocess.run([*pip, str(source), *pinned], check=True, stdout=sys.stderr)
    parts = {each.name: _bytes_of(each) for each in sorted(target.iterdir()) if not each.name.endswith(".dist-info")}
    return {
        "added_bytes": _bytes_of(target),
        "unisono_bytes": parts["unisono"],
        "largest_parts_bytes": dict(sorted(parts.items(), key=lambda item: -item[1])[:8]),
        "added": pinned,
        "torch_bytes": _torch_bytes(),
    }


def _resolve(requirement: str) -> set[tuple[str, str]]:
    """(name, version) of everything pip would install for it into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["-c", str(ROOT / "constraints.txt"), requirement]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {(each["metadata"]["name"].lower(), each["metadata"]["version"]) for each in report["install"]}


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _torch_bytes() -> int:
    import torch

    return _bytes_of(Path(torch.__file__).parent)


def demo(scratch: Path) -> dict[str, Any]:
    """``unisono train`` as it is: nothing prepared, then a new run on prepared data, then the finished run again."""
    train = ["-m", "unisono", "train", "--set", f"data.cache_dir={scratch / 'cache'}"]
    seconds = {
        name: run_once([*train, "--set", f"run.dir={scratch / folder}"])[0]
        for name, folder in (("first_s", "a"), ("prepared_data_s", "b"), ("finished_run_again_s", "b"))
    }
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--no-install", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"start": start_times(arguments.repeats)}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        if not arguments.no_install:
            result["install"] = install_size(Path(folder))
        if not arguments.no_demo:
            result["demo"] = demo(Path(folder))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

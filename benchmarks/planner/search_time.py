"""Seconds and peak memory of ``unisono plan`` for large clusters, and its plans beside published ones. Prints JSON.

python -m benchmarks.planner.search_time [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.planner.search_choice import choices

# cluster, model, sequences of a step, other options, aim in seconds
JOBS = {
    "7B on 8 devices": ("h100x8", "llama-2-7b", "256", (), 2),
    "405B on 16,384 devices": ("h100x16384", "llama-3-405b", "2048", (), 5),
    "671B with experts on 65,536 devices": ("gb200x65536", "deepseek-v3", "16384", ("--precision", "fp8"), 20),
    "1T with experts on 65,536 devices": ("gb200x65536", "kimi-k2", "16384", (), 20),
    "405B on 16,384 devices, finalists traced": ("h100x16384", "llama-3-405b", "2048", ("--trace",), 30),
}


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    jobs: dict[str, Any] = {}
    for name, (cluster, model, batch, more, aim_s) in JOBS.items():
        command = [
            sys.executable,
            "-m",
            "unisono",
            "plan",
            "--cluster",
            cluster,
            "--model",
            model,
            "--global-batch",
            batch,
        ]
        seconds: list[float] = []
        cpu: list[float] = []
        found: dict[str, Any] = {}
        for _ in range(rounds):
            begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
            done = subprocess.run([*command, *more, "--json"], capture_output=True, check=True, text=True)
            seconds.append(time.perf_counter() - begin_s)
            cpu.append(_cpu_s() - begin_cpu_s)
            found = json.loads(done.stdout)
        # of the largest child until now: jobs are in the order of their size
        peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        jobs[name] = {
            "wall_s": statistics.median(seconds),
            "cpu_s": statistics.median(cpu),
            "aim_s": aim_s,
            "peak_mib": peak_mib,
            "layouts": found["num_layouts"],
            "traced": len(found["traced"]["finalists"]) if "traced" in found else 0,
        }
    print(json.dumps({"jobs": jobs, "choices": choices()}))


def _cpu_s() -> float:
    """Seconds of CPU of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()

"""Contestants in processes of their own, in turns; what one of them cannot do is a line of the result, not the end of it.

As ``benchmarks.rivals.race``, for data: a contestant that cannot be installed, started or finished is listed in ``not_run`` with
the reason. A round is one block of each; ratios are taken within a round. All processes of a contestant are stopped between its
blocks, so that no loader works ahead while its clock stands.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.contestants import ROOT, Contestant, Worker, interpreter
from benchmarks.paired import ratio

Problems = dict[str, str]

_SHORTEST_CPU_S = 0.2  # twenty clock ticks: below it CPU times are too coarse to be told


def contest(
    contestants: Sequence[Contestant],
    baseline: str,
    *,
    rounds: int,
    steps: int,
    cache: Path,
    block_s: float = 0.0,
    warmup: int = 1,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Seconds per block of ``steps`` steps after ``warmup`` blocks, facts, and times over ``baseline``'s, if that runs.

    CPU time is that of all of a contestant's processes. A contestant whose ``steps`` steps took less than ``block_s`` in the
    last block of the warm-up takes as many times more in its blocks, and its times are still of ``steps`` steps.
    """
    not_run: Problems = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
        workers: list[Worker] = []
        for each in contestants:
            try:
                workers.append(stack.enter_context(Worker(each, cache, folder, Path(), timeout_s=timeout_s)))
            except (RuntimeError, TimeoutError, subprocess.CalledProcessError) as error:
                not_run[each.name] = reason(error)
        times: dict[str, int] = {}
        coarse: set[str] = set()
        for number in range(-warmup, rounds):
            shift = number % max(1, len(workers))
            for worker in workers[shift:] + workers[:shift]:
                begin_s = worker.cpu_s()
                many = times.get(worker.contestant.name, 1) if number >= 0 else 1
                try:
                    block = worker.run(steps * many)
                except (RuntimeError, TimeoutError, BrokenPipeError) as error:
                    not_run[worker.contestant.name] = f"block {number}: {reason(error)}"
                    worker.__exit__(None, None, None)
                    workers = [each for each in workers if each is not worker]
                    continue
                if number < 0:
                    times[worker.contestant.name] = max(1, math.ceil(block_s / block["wall_s"]))
                    continue
                cpu_s = worker.cpu_s() - begin_s
                if cpu_s < _SHORTEST_CPU_S:
                    coarse.add(worker.contestant.name)
                worker.blocks.append(block | {"wall_s": block["wall_s"] / many, "cpu_s": cpu_s / many})
    walls = {worker.contestant.name: [block["wall_s"] for block in worker.blocks] for worker in workers}
    cpus = {worker.contestant.name: [block["cpu_s"] for block in worker.blocks] for worker in workers}
    rows: dict[str, Any] = {}
    for worker in workers:
        name = worker.contestant.name
        rows[name] = {
            "block_s": statistics.median(walls[name]),
            "block_cpu_s": round(statistics.median(cpus[name]), 3),
            "least_and_most_s": [min(walls[name]), max(walls[name])],
            "round_s": [round(seconds, 6) for seconds in walls[name]],
            "values": sorted({block["loss"] for block in worker.blocks})[:4],
            **worker.facts,
        }
        if name != baseline and baseline in walls:
            rows[name]["time_over_baseline"] = ratio(walls[name], walls[baseline])
            if not {name, baseline} & coarse:
                rows[name]["cpu_over_baseline"] = ratio(cpus[name], cpus[baseline])
    return {"baseline": baseline, "contestants": rows, "not_run": not_run}


def ask(module: str, settings: dict[str, Any], *, environment: str, cache: Path, timeout_s: float = 180.0) -> Any:
    """The last line that ``module`` prints, JSON, from one run of it. Raises as a Worker does."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [interpreter(environment, cache), "-m", module, json.dumps(settings)]
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        try:
            done = subprocess.run(
                command, env=environ, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{module}: no answer in {timeout_s:g} s") from error
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ask_all(jobs: dict[str, tuple[str, str, dict[str, Any]]], cache: Path) -> tuple[dict[str, Any], Problems]:
    """``jobs[name]`` is (environment, module, settings); answers, and the reasons of those that gave none."""
    found: dict[str, Any] = {}
    not_run: Problems = {}
    for name, (environment, module, settings) in jobs.items():
        try:
            found[name] = ask(module, settings, environment=environment, cache=cache)
        except (RuntimeError, TimeoutError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
            not_run[name] = reason(error)
    return found, not_run


def reason(error: Exception) -> str:
    """The last line of what went wrong that says anything."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def chosen(contestants: Sequence[Contestant], only: str) -> list[Contestant]:
    """Those whose names have one of the comma-separated words of ``only`` in them; all if it is empty."""
    words = [word for word in only.split(",") if word]
    return [each for each in contestants if not words or any(word in each.name for word in words)]

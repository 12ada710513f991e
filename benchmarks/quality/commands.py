"""Contestants that are whole commands: time, peak memory, and which planted copies each one found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import ROOT, interpreter
from benchmarks.paired import ratio, spread

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a command took and found: seconds, MiB of its largest process, names of the rows that it drops."""

    wall_s: float
    peak_mib: float
    dropped: Collection[Any]


Command = Callable[[Path, Path], Outcome]  # of the data set and of a new folder


def of_unisono(source: Path, out: Path, *options: str) -> Outcome:
    """``unisono data dedup``; rows of a file are their numbers, files of a folder their names."""
    command = [sys.executable, "-m", "unisono", "data", "dedup"]
    wall_s, peak_mib = _run([*command, str(source), f"--out={out}", "--workers=0", *options])
    lines = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    dropped = {Path(line["file"]).name if source.is_dir() else line["row"] for line in lines}
    return Outcome(wall_s=wall_s, peak_mib=peak_mib, dropped=dropped)


def of_script(environment: str, module: str, cache: Path) -> Command:
    """A module of this folder, which writes OUT/dropped.json."""
    python = interpreter(environment, cache)

    def command(source: Path, out: Path) -> Outcome:
        wall_s, peak_mib = _run([python, "-m", module, str(source), str(out)])
        return Outcome(wall_s=wall_s, peak_mib=peak_mib, dropped=set(json.loads((out / "dropped.json").read_text())))

    return command


def side_by_side(
    commands: Mapping[str, Command],
    source: Path,
    folder: Path,
    planted: Mapping[str, Sequence[tuple[Any, Any]]],
    *,
    rounds: int,
    count: int,
) -> dict[str, Any]:
    """Run all commands in each round, another one first each time; the first of ``commands`` is ours.

    Args:
        commands: By name.
        source: The data set.
        folder: A folder for what they write.
        planted: Pairs of a row and its copy, by kind. A pair is found if one of both is dropped: some contestants keep the copy.
        rounds: Number of rounds.
        count: Rows in the data set.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in commands}
    names = list(commands)
    near = {name for pairs in planted.values() for pair in pairs for name in pair}
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            outcome = commands[name](source, folder / f"{name}-{index}")
            outcomes[name].append(outcome)
            print(f"round {index}, {name}: {outcome.wall_s:.1f} s, {outcome.peak_mib:.0f} MiB", file=sys.stderr)
    seconds = {name: [outcome.wall_s for outcome in values] for name, values in outcomes.items()}
    ours = names[0]
    rows: dict[str, Any] = {}
    for name, values in outcomes.items():
        dropped = values[-1].dropped
        rows[name] = {
            "per_s": spread([count / each.wall_s for each in values]),
            "peak_mib": spread([each.peak_mib for each in values]),
            "recall": {
                kind: sum(a in dropped or b in dropped for a, b in pairs) / len(pairs)
                for kind, pairs in planted.items()
            },
            "precision": sum(each in near for each in dropped) / len(dropped) if dropped else 1.0,
        }
    others = {name: ratio(seconds[name], seconds[ours]) for name in names[1:]}
    return {
        "rows": count,
        "planted": {kind: len(each) for kind, each in planted.items()},
        "contestants": rows,
        "over": others,
    }


# A process keeps the peak memory of the one that started it, so commands are started by a small one, which measures them.
_MEASURE = """
import json, resource, subprocess, sys, time
begin_s = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
took_s = time.perf_counter() - begin_s
print(json.dumps([code, took_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def _run(command: Sequence[str]) -> tuple[float, float]:
    """(seconds, peak memory of the largest process in MiB) of a command."""
    environ = os.environ | ONE_THREAD | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    measure = [sys.executable, "-S", "-c", _MEASURE, *command]
    done = subprocess.run(measure, env=environ, capture_output=True, text=True, errors="replace", check=True)
    code, wall_s, peak_mib = json.loads(done.stdout)
    if code:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return wall_s, peak_mib

"""What unisono and other profilers say of the same faulty runs. Prints JSON.

    python -m benchmarks.observe.profilers [--only FAULT,FAULT] [--tools unisono,traceml,torch,lightning] [--cache DIR]

The model, data, loss and faults are those of ``benchmarks.observe.faulty``. unisono trains it by ``unisono train``, with a
profile of three steps and statistics of gradients, and ``unisono diagnose`` judges the run. The others watch a plain loop with
DDP (TraceML, torch.profiler) or Lightning's Trainer (its three profilers), in an environment of their own below ``--cache``.

Two tools give verdicts. The cause is right where one of them names it, the rank where that one names this rank alone. Of a
healthy run every verdict is wrong. The others print tables, of each rank. The cause is right where the row with the most time
of its own is the function, operator or phase of the fault, and is not the top row of the healthy run as well; the rank, where
only this rank's top row is. Rows of whole steps are left out. For the leak the table is sorted by memory. A table says nothing
wrong of a healthy run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.contestants import LAUNCHER_VARIABLES, interpreter
from benchmarks.observe.faulty import BATCH, FAULTS, SAVE_EVERY, Fault
from benchmarks.observe.profiler_tables import advanced_rows, simple_rows, torch_rows

from unisono.diagnose import diagnose, read_run

ROOT = Path(__file__).resolve().parents[2]
UNISONO_RUN, LOOP = "benchmarks.observe.faulty_run", "benchmarks.observe.faulty_loop"
LIGHTNING = "benchmarks.observe.faulty_lightning"
TABLES = {
    "torch.profiler": ("torch-{rank}.txt", torch_rows),
    "Lightning, simple": ("fit-simple-{rank}.txt", simple_rows),
    "Lightning, advanced": ("fit-advanced-{rank}.txt", advanced_rows),
    "Lightning, PyTorchProfiler": ("fit-pytorch-{rank}.txt", torch_rows),
}
TOOLS = {
    "unisono": ["unisono"],
    "traceml": ["TraceML"],
    "torch": ["torch.profiler"],
    "lightning": [name for name in TABLES if name.startswith("Lightning")],
}
WHOLE_STEP = ("ProfilerStep", "run_training_epoch", "run_training_batch", "optimizer_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a fault is called: ids of unisono's rules, kinds of TraceML's diagnoses, and parts of the names of rows in tables."""

    unisono: str
    traceml: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


NAMES: Mapping[str, Names] = {
    "slow loader": Names(
        unisono="DATA01", traceml=("INPUT_BOUND",), rows=("DataLoader", "dataloader_next", "__getitem__")
    ),
    "slow loader of rank 1": Names(
        unisono="DATA02", traceml=("INPUT_STRAGGLER",), rows=("DataLoader", "dataloader_next", "__getitem__")
    ),
    "slow compute of rank 1": Names(
        unisono="BAL01",
        traceml=("COMPUTE_STRAGGLER",),
        rows=("slow_compute", "training_step", "DistributedDataParallel.forward", "[pl][module]"),
    ),
    "slow link": Names(unisono="COMM01", rows=("all_reduce", "allreduce", "c10d")),
    "synchronous saves": Names(unisono="CKPT01", traceml=("RESIDUAL_HEAVY",), rows=("save", "Checkpoint", "fsync")),
    "reads by .item()": Names(
        unisono="SYNC01", traceml=("RESIDUAL_HEAVY",), rows=("item", "_local_scalar_dense", "read_often")
    ),
    "tiny products": Names(unisono="LAUNCH01", rows=("bmm", "tiny_products")),
    "attention by hand": Names(unisono="FUSE01", rows=("bmm", "softmax", "masked_fill", "matmul", "attention_by_hand")),
    "recompiles": Names(unisono="COMP01", rows=("dynamo", "compile", "Compiled")),
    "memory leak": Names(
        unisono="MEM03", traceml=("CREEP_EARLY", "CREEP_CONFIRMED", "HIGH_PROCESS_RSS"), rows=("ones", "fill_")
    ),
    "NaN in a sample of rank 1": Names(unisono="NUM01"),
    "dead layer": Names(unisono="NUM04"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a tool complains about: the cause by its own name, ranks, and its words."""

    cause: str
    ranks: tuple[int, ...]
    text: str


def judged(fault: str, verdicts: Sequence[Verdict], causes: Sequence[str], nothing: str) -> dict[str, Any]:
    """Whether a tool that gives verdicts is right; ``nothing`` is what it says without one."""
    rank, right = FAULTS[fault].rank, [verdict for verdict in verdicts if verdict.cause in causes]
    return {
        "says": _short("; ".join(verdict.text for verdict in verdicts) or nothing),
        "cause_right": bool(right) if fault in NAMES else not verdicts,
        "rank_right": None if rank is None else any(verdict.ranks == (rank,) for verdict in right),
    }


def read_tables(fault: str, tops: Sequence[tuple[str, float]], healthy: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Whether a table is right: ``tops`` has the top row of each rank, ``healthy`` those of the healthy run."""
    rank, rows = FAULTS[fault].rank, NAMES[fault].rows if fault in NAMES else ()
    if fault in NAMES and not rows:
        return {"says": "not reported", "cause_right": False, "rank_right": None if rank is None else False}
    usual = {name for name, _ in healthy}
    named = [any(part in name for part in rows) and name not in usual for name, _ in tops]
    texts = [f"`{name}` {share:.0%}" for name, share in tops]
    return {
        "says": _short(
            "; ".join(texts if len(texts) == 1 else (f"rank {each}: {text}" for each, text in enumerate(texts)))
        ),
        "cause_right": any(named) if fault in NAMES else True,
        "rank_right": None if rank is None else named == [each == rank for each in range(len(tops))],
    }


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


# --- the tools -------------------------------------------------------------------------------------------------------


def start(fault: str, command: Sequence[str | Path], folder: Path) -> str:
    """Run a command for a fault in ``folder``; what it printed. Raises RuntimeError with the end of its errors."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ = clean | {"FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        list(map(str, command)), env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(
            f"{Path(command[0]).name} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def _path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def with_unisono(fault: str, folder: Path) -> dict[str, Any]:
    """``unisono train``, and what ``unisono diagnose`` finds."""
    what = FAULTS[fault]
    saves = SAVE_EVERY if fault == "synchronous saves" else 0
    settings = {
        "run.dir": folder / "run",
        "train.steps": what.steps,
        "train.eval_every_steps": 0,
        "train.gradient_stats_every_steps": 5,
        "plan.device": "cpu",
        "plan.precision": "fp32",
        "plan.global_batch": BATCH * what.processes,
        "plan.micro_batch": BATCH,
        "loader.num_workers": 0,
        "checkpoint.every_steps": saves,
        "checkpoint.asynchronous": "false",
        "observe.console": "off",
        "observe.report": "false",
        "observe.profile_steps": f"{what.steps // 2}:{what.steps // 2 + 3}",
        "launch.num_processes": what.processes,
        "launch.num_threads": 1,
    }
    command = [sys.executable, "-m", "unisono", "train", _path(UNISONO_RUN)]
    start(fault, [*command, *(f"--set={name}={value}" for name, value in settings.items())], folder)
    verdicts = [
        Verdict(
            cause=finding.id,
            ranks=finding.ranks,
            text=f"{finding.id} {finding.title}{_ranks(finding.ranks)} ({finding.cost_frac:.0%})",
        )
        for finding in diagnose(read_run(folder / "run"))
    ]
    causes = [NAMES[fault].unisono] if fault in NAMES else []
    return {"unisono": judged(fault, verdicts, causes, "no finding")}


def _ranks(ranks: Sequence[int]) -> str:
    return f", rank {', '.join(map(str, ranks))}" if ranks else ""


def with_traceml(fault: str, folder: Path, python: str) -> dict[str, Any]:
    """``traceml run`` and its final summary."""
    traceml = Path(python).with_name("traceml")
    command = [traceml, "run", _path(LOOP), "--nproc-per-node", str(FAULTS[fault].processes), "--logs-dir", "logs"]
    start(fault, [*command, "--run-name", "faulty", "--args", "traceml", folder], folder)
    summary = json.loads((folder / "logs" / "faulty" / "final_summary.json").read_text())
    primary = summary["primary_diagnosis"]
    issues = [summary[part]["diagnosis"] or {} for part in ("step_time", "step_memory", "process")]
    verdicts = [
        Verdict(
            cause=issue["kind"],
            ranks=tuple(issue.get("ranks") or ()),
            text=f"{issue['status']}: {issue['summary']}",
        )
        for issue in issues
        if issue.get("severity") in ("warn", "crit")
    ]
    causes = NAMES[fault].traceml if fault in NAMES else ()
    part = summary["step_memory"]["diagnosis"] if fault == "memory leak" else primary
    return {"TraceML": judged(fault, verdicts, causes, f"{part['status']}: {part['summary']}")}


def tables_of(tool: str, fault: str, folder: Path) -> list[tuple[str, float]]:
    """The top row of each rank's table, and its share of all rows."""
    name, rows_of = TABLES[tool]
    tops: list[tuple[str, float]] = []
    for rank in range(FAULTS[fault].processes):
        path = folder / name.format(rank=rank)
        if not path.exists():  # Lightning's name for the only process
            path = folder / name.replace("-{rank}", "")
        text = path.read_text()
        column = "Self CPU Mem" if fault == "memory leak" else "Self CPU"
        rows = rows_of(text, column)
        inner = {row: value for row, value in rows.items() if not any(part in row for part in WHOLE_STEP)}
        top = max(inner, key=lambda row: inner[row])
        tops.append((top, inner[top] / sum(value for value in inner.values() if value > 0)))
    return tops


def with_torch(fault: str, folder: Path, python: str) -> dict[str, list[tuple[str, float]]]:
    """The tables of torch.profiler."""
    start(fault, [*_torchrun(python, FAULTS[fault]), "-m", LOOP, "torch", folder], folder)
    return {"torch.profiler": tables_of("torch.profiler", fault, folder)}


def with_lightning(fault: str, folder: Path, python: str) -> dict[str, list[tuple[str, float]]]:
    """The tables of Lightning's profilers."""
    start(fault, [*_torchrun(python, FAULTS[fault]), "-m", LIGHTNING, folder], folder)
    return {tool: tables_of(tool, fault, folder) for tool in TOOLS["lightning"]}


def _torchrun(python: str, fault: Fault) -> list[str]:
    if fault.processes == 1:
        return [python]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={fault.processes}"]


def compared(faults: Sequence[str], tools: Sequence[str], python: str) -> dict[str, Any]:
    """By fault and tool what it says, and whether that is right."""

    @cache
    def tops(tool: str, fault: str) -> dict[str, list[tuple[str, float]]]:
        run: Callable[..., dict[str, list[tuple[str, float]]]] = with_torch if tool == "torch" else with_lightning
        with tempfile.TemporaryDirectory() as folder:
            return run(fault, Path(folder), python)

    def answers(tool: str, fault: str) -> dict[str, Any]:
        if tool in ("torch", "lightning"):
            usual = tops(tool, f"healthy, {FAULTS[fault].processes} process{'es' * (FAULTS[fault].processes > 1)}")
            return {name: read_tables(fault, rows, usual[name]) for name, rows in tops(tool, fault).items()}
        with tempfile.TemporaryDirectory() as folder:
            if tool == "unisono":
                return with_unisono(fault, Path(folder))
            return with_traceml(fault, Path(folder), python)

    result: dict[str, Any] = {}
    for fault in faults:
        said: dict[str, Any] = {}
        for tool in tools:
            try:
                said |= answers(tool, fault)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                print(f"{fault}: {tool}: {error}", file=sys.stderr)
                failed = {"says": _short(f"did not run: {error}"), "cause_right": None, "rank_right": None}
                said |= dict.fromkeys(TOOLS[tool], failed)
        result[fault] = said
        print(f"{fault}: {json.dumps(said, indent=1)}", file=sys.stderr)
    return result


def versions(python: str) -> dict[str, str]:
    """Versions of the tools."""
    code = "import importlib.metadata, json, sys; print(json.dumps({n: importlib.metadata.version(n) for n in sys.argv[1:]}))"
    command = [python, "-c", code, "traceml-ai", "lightning", "torch"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=";".join(FAULTS), help="faults, separated by ;")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    python = interpreter("profilers", arguments.cache)
    faults = compared(arguments.only.split(";"), arguments.tools.split(","), python)
    right: dict[str, dict[str, int]] = {}
    for said in faults.values():
        for tool, answer in said.items():
            score = right.setdefault(tool, {"right": 0, "total": 0})
            if answer["cause_right"] is not None:  # it ran
                score["right"] += answer["cause_right"] and answer["rank_right"] is not False
                score["total"] += 1
    print(json.dumps({"faults": faults, "tools": right, "versions": versions(python)}, indent=1))


if __name__ == "__main__":
    main()

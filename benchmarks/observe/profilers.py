"""What unisono and other profilers say of the same faulty runs. Prints JSON.

    python -m benchmarks.observe.profilers [--only FAULT,FAULT] [--tools unisono,traceml,torch,lightning] [--cache DIR]

The model, data, loss and faults are those of ``benchmarks.observe.faulty``. unisono trains it by ``unisono train``, with a
profile of three steps and statistics of gradients, and ``unisono diagnose`` judges the run. The others watch a plain loop with
DDP (TraceML, torch.profiler) or Lightning's Trainer (its three profilers), in an environment of their own below ``--cache``.

Two tools give verdicts. The cause is right where one of them names it, the rank where that one names this rank alone. Verdicts
that neither name the cause nor follow from it are counted as false findings, and of a healthy run all are. The others print
tables, of each rank. The cause is right where the row with the most time of its own is the function, operator or phase of the
fault, and is not the top row of the healthy run as well; the rank, where only this rank's top row is. Rows of whole steps are
left out. For the leak the table is sorted by memory. A table says nothing wrong of a healthy run.

A run that hangs is killed after HANG_S seconds: ``unisono diagnose`` judges the folder that it leaves, and the others have
written nothing. The run with pipeline stages trains the demo's GPT, under unisono alone.
"""

from __future__ import annotations

import argparse
import contextlib
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

import psutil
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
LIMIT_S, HANG_S = 600.0, 60.0  # of a run, and of one that hangs
WHOLE_STEP = ("ProfilerStep", "run_training_epoch", "run_training_batch", "optimizer_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a fault is called.

    Attributes:
        unisono: Ids of unisono's rules that name it.
        traceml: Kinds of TraceML's diagnoses that do.
        rows: Parts of the names of rows in tables that do.
        effects: Ids and kinds that name what follows from it, of both.
    """

    unisono: tuple[str, ...]
    traceml: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()


NAMES: Mapping[str, Names] = {
    "slow loader": Names(
        unisono=("DATA01",), traceml=("INPUT_BOUND",), rows=("DataLoader", "dataloader_next", "__getitem__")
    ),
    "slow loader of rank 1": Names(
        unisono=("DATA02",), traceml=("INPUT_STRAGGLER",), rows=("DataLoader", "dataloader_next", "__getitem__")
    ),
    "slow compute of rank 1": Names(
        unisono=("BAL01",),
        traceml=("COMPUTE_STRAGGLER",),
        rows=("slow_compute", "training_step", "DistributedDataParallel.forward", "[pl][module]"),
    ),
    # sums that take longer are hidden less
    "slow link": Names(unisono=("COMM01",), rows=("all_reduce", "allreduce", "c10d"), effects=("COMM02",)),
    "synchronous saves": Names(unisono=("CKPT01",), traceml=("RESIDUAL_HEAVY",), rows=("save", "Checkpoint", "fsync")),
    # each read is the call of a small operator
    "reads by .item()": Names(
        unisono=("SYNC01",),
        traceml=("RESIDUAL_HEAVY",),
        rows=("item", "_local_scalar_dense", "read_often"),
        effects=("LAUNCH01",),
    ),
    "tiny products": Names(unisono=("LAUNCH01",), rows=("bmm", "tiny_products")),
    "attention by hand": Names(
        unisono=("FUSE01",), rows=("bmm", "softmax", "masked_fill", "matmul", "attention_by_hand")
    ),
    # the compiler is no operator, so that a step is mostly outside of them
    "recompiles": Names(unisono=("COMP01",), rows=("dynamo", "compile", "Compiled"), effects=("LAUNCH01",)),
    "memory leak": Names(
        unisono=("MEM03",), traceml=("CREEP_EARLY", "CREEP_CONFIRMED", "HIGH_PROCESS_RSS"), rows=("ones", "fill_")
    ),
    "NaN in a sample of rank 1": Names(unisono=("NUM01",)),
    "dead layer": Names(unisono=("NUM04",)),
    "exploding layer": Names(unisono=("NUM03",)),
    # a step is mostly outside of operators here too
    "garbage collections": Names(unisono=("GC01",), rows=("make_lists",), effects=("LAUNCH01",)),
    "needless recompute": Names(unisono=("RECOMP01",), rows=("checkpoint", "Checkpoint", "recompute")),
    # the others wait for the long stage
    "uneven pipeline stages": Names(unisono=("BAL01",), effects=("PP01",)),
    "skipped collective of rank 1": Names(unisono=("HANG01", "HANG02")),
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
    effects = NAMES[fault].effects if fault in NAMES else ()
    return {
        "says": _short("; ".join(verdict.text for verdict in verdicts) or nothing),
        "cause_right": bool(right) if fault in NAMES else not verdicts,
        "rank_right": None if rank is None else any(verdict.ranks == (rank,) for verdict in right),
        "false_findings": sum(verdict.cause not in (*causes, *effects) for verdict in verdicts),
    }


def read_tables(fault: str, tops: Sequence[tuple[str, float]], healthy: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Whether a table is right: ``tops`` has the top row of each rank, ``healthy`` those of the healthy run."""
    rank, rows = FAULTS[fault].rank, NAMES[fault].rows if fault in NAMES else ()
    if fault in NAMES and not rows:
        return _unjudged("not reported") | {"cause_right": False, "rank_right": None if rank is None else False}
    usual = {name for name, _ in healthy}
    named = [any(part in name for part in rows) and name not in usual for name, _ in tops]
    texts = [f"`{name}` {share:.0%}" for name, share in tops]
    return {
        "says": _short(
            "; ".join(texts if len(texts) == 1 else (f"rank {each}: {text}" for each, text in enumerate(texts)))
        ),
        "cause_right": any(named) if fault in NAMES else True,
        "rank_right": None if rank is None else named == [each == rank for each in range(len(tops))],
        "false_findings": None,
    }


def _unjudged(says: str) -> dict[str, Any]:
    return {"says": _short(says), "cause_right": None, "rank_right": None, "false_findings": None}


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


# --- the tools -------------------------------------------------------------------------------------------------------


def start(fault: str, command: Sequence[str | Path], folder: Path) -> None:
    """Run a command for a fault in ``folder``.

    Raises RuntimeError with the end of its errors, and TimeoutExpired for one that was killed.
    """
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ = clean | {"FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        list(map(str, command)), env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=HANG_S if FAULTS[fault].hangs else LIMIT_S)
    except subprocess.TimeoutExpired:
        # launchers give their ranks sessions of their own, so no signal to a group would reach all
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {process.returncode}: {output[-1000:]}{errors[-3000:]}")


def _path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def with_unisono(fault: str, folder: Path) -> dict[str, Any]:
    """``unisono train``, and what ``unisono diagnose`` finds."""
    what = FAULTS[fault]
    saves = SAVE_EVERY if fault == "synchronous saves" else 0
    settings: dict[str, Any] = {
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
    command: list[Any] = [sys.executable, "-m", "unisono", "train"]
    if fault == "uneven pipeline stages":
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"pipeline": {"layers_per_stage": [7, 1]}}))
        settings |= {"plan.file": plan, "plan.pp": 2, "plan.micro_batch": 1, "model.num_layers": 8}
    else:
        command.append(_path(UNISONO_RUN))
    ends_by_itself = contextlib.nullcontext()
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired) if what.hangs else ends_by_itself:
        start(fault, [*command, *(f"--set={name}={value}" for name, value in settings.items())], folder)
    verdicts = [
        Verdict(
            cause=finding.id,
            ranks=finding.ranks,
            text=f"{finding.id} {finding.title}{_ranks(finding.ranks)} ({finding.cost_frac:.0%})",
        )
        for finding in diagnose(read_run(folder / "run"))
    ]
    causes = NAMES[fault].unisono if fault in NAMES else ()
    return {"unisono": judged(fault, verdicts, causes, "no finding")}


def _ranks(ranks: Sequence[int]) -> str:
    return f", rank {', '.join(map(str, ranks))}" if ranks else ""


def with_traceml(fault: str, folder: Path, python: str) -> dict[str, Any]:
    """``traceml run`` and its final summary."""
    traceml = Path(python).with_name("traceml")
    command = [traceml, "run", _path(LOOP), "--nproc-per-node", str(FAULTS[fault].processes), "--logs-dir", "logs"]
    path = folder / "logs" / "faulty" / "final_summary.json"
    try:
        start(fault, [*command, "--run-name", "faulty", "--args", "traceml", folder], folder)
    except RuntimeError:
        if not (FAULTS[fault].hangs and path.exists()):  # of a run that gloo ended, it has a summary too
            raise
    summary = json.loads(path.read_text())
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
            found = tops(tool, fault)  # a run that hangs has none, and no healthy one beside it
            usual = tops(tool, f"healthy, {FAULTS[fault].processes} process{'es' * (FAULTS[fault].processes > 1)}")
            return {name: read_tables(fault, rows, usual[name]) for name, rows in found.items()}
        with tempfile.TemporaryDirectory() as folder:
            if tool == "unisono":
                return with_unisono(fault, Path(folder))
            return with_traceml(fault, Path(folder), python)

    result: dict[str, Any] = {}
    for fault in faults:
        said: dict[str, Any] = {}
        for tool in tools:
            if tool != "unisono" and FAULTS[fault].not_in_torch:
                said |= dict.fromkeys(TOOLS[tool], _unjudged(f"not run: {FAULTS[fault].not_in_torch}"))
                continue
            try:
                said |= answers(tool, fault)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                print(f"{fault}: {tool}: {error}", file=sys.stderr)
                said |= dict.fromkeys(TOOLS[tool], without_verdict(fault, error))
        result[fault] = said
        print(f"{fault}: {json.dumps(said, indent=1)}", file=sys.stderr)
    return result


def without_verdict(fault: str, error: Exception) -> dict[str, Any]:
    """The answer of a tool whose run did not end as it should: wrong where that is the fault."""
    if not FAULTS[fault].hangs:
        return _unjudged(f"did not run: {error}")
    how = f"killed after {HANG_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else "the run failed"
    return _unjudged(f"no verdict ({how})") | {"cause_right": False, "rank_right": False}


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
    right: dict[str, dict[str, Any]] = {}
    for said in faults.values():
        for tool, answer in said.items():
            score = right.setdefault(tool, {"right": 0, "total": 0, "false_findings": None})
            if answer["cause_right"] is not None:  # it ran
                score["right"] += answer["cause_right"] and answer["rank_right"] is not False
                score["total"] += 1
            if answer["false_findings"] is not None:
                score["false_findings"] = (score["false_findings"] or 0) + answer["false_findings"]
    print(json.dumps({"faults": faults, "tools": right, "versions": versions(python)}, indent=1))


if __name__ == "__main__":
    main()

"""The same GPT on the same batches under unisono and its rivals: a plain script, Accelerate, Lightning, MindSpore.

    python -m benchmarks.rivals [--rounds 9] [--steps 1] [--threads 2] [--cache DIR] [--sizes demo,wide]

Each contestant is a process that keeps running, in an environment of its own under ``--cache`` (made by pip the first time), and
trains one block of steps when told to; the others are stopped by the kernel meanwhile. A round is one block of each, in an order
that rotates; ratios are taken within a round. Two sizes: ``demo`` is the demo's GPT, 128 wide, whose step is half small
operators; ``wide`` is 768 wide, where matrix products decide; ``wider``, 1024, is run on request. Three parts:

    same      fp32, one optimizer kernel and number of threads for all; ours with what its launcher adds, as users start it
    default   what each gives when nobody sets anything; ours is what ``unisono train`` does in its launcher's environment
    launcher  the plain script with each thing that unisono sets by itself turned on alone

Losses of all contestants are compared at the end of every block: that they agree shows that they compute the same. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.contestants import LAUNCHER_VARIABLES, Contestant, Worker
from benchmarks.paired import ratio
from benchmarks.workload import prepare

from unisono.launch.options import LaunchOptions
from unisono.launch.resources import divide_host
from unisono.parallel.device import computes_bf16

# compilation and first touch of memory
WARMUP_STEPS = 4
SIZES: dict[str, list[str]] = {
    "demo": [],
    "wide": ["model.dim=768", "model.num_heads=12", "model.num_kv_heads=6", "model.num_layers=4"],
    "wider": ["model.dim=1024", "model.num_heads=16", "model.num_kv_heads=8", "model.num_layers=4"],
}


def race(
    contestants: Sequence[Contestant], baseline: str, arguments: argparse.Namespace, workload: Path
) -> dict[str, Any]:
    """Rounds of blocks; speeds relative to ``baseline`` as time of the other / time of the baseline."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
        workers = [stack.enter_context(Worker(each, arguments.cache, folder, workload)) for each in contestants]
        for worker in workers:
            for _ in range(WARMUP_STEPS):
                worker.run(1)
        for number in range(arguments.rounds):
            shift = number % len(workers)
            for worker in workers[shift:] + workers[:shift]:
                worker.blocks.append(worker.run(arguments.steps))
    by_name = {worker.contestant.name: worker for worker in workers}
    base = by_name[baseline]
    others: dict[str, Any] = {}
    for name, worker in by_name.items():
        mine = {kind: [block[kind] / arguments.steps for block in worker.blocks] for kind in ("wall_s", "cpu_s")}
        theirs = {kind: [block[kind] / arguments.steps for block in base.blocks] for kind in ("wall_s", "cpu_s")}
        losses = [(a["loss"], b["loss"]) for a, b in zip(worker.blocks, base.blocks, strict=True)]
        others[name] = {
            "step_s": statistics.median(mine["wall_s"]),
            "step_cpu_s": statistics.median(mine["cpu_s"]),
            "largest_relative_loss_difference": max(abs(a / b - 1) for a, b in losses),
            **worker.facts,
        }
        if worker is not base:
            others[name]["time_over_baseline"] = ratio(mine["wall_s"], theirs["wall_s"])
            others[name]["cpu_over_baseline"] = ratio(mine["cpu_s"], theirs["cpu_s"])
    return {"baseline": baseline, "contestants": others}


def against_best(outcome: dict[str, Any]) -> dict[str, Any]:
    """``outcome`` with the fastest rival named: the one with the smallest median of paired ratios."""
    rivals = {name: row for name, row in outcome["contestants"].items() if name != outcome["baseline"]}
    for kind, over in (("wall", "time_over_baseline"), ("cpu", "cpu_over_baseline")):
        best = min(rivals, key=lambda name: rivals[name][over]["ratio"])
        outcome[f"best_rival_by_{kind}"] = {"name": best, **rivals[best][over]}
    return outcome


def rivals(arguments: argparse.Namespace, settings_of_size: list[str], *, same: bool) -> list[Contestant]:
    """All frameworks, on one footing or by default."""
    torch_settings = {"threads": arguments.threads if same else 0, "fused": True if same else None, "quiet": same}
    threads = {name: str(arguments.threads) for name in LAUNCHER_VARIABLES[:2]}
    # each in the environment its own way of starting gives; ours is the launcher's, whose parts are shown line by line
    environ = threads if same else {}
    ours = divide_host(LaunchOptions(), {}, busy_frac=0.0).environ()
    settings = {"threads": torch_settings["threads"], "synchronous": same}
    made = [
        Contestant(
            name="unisono",
            module="benchmarks.peers.with_unisono",
            settings={
                "threads": torch_settings["threads"],
                "whole": not same,
                "set": [*settings_of_size, *(["plan.precision=fp32"] if same else [])],
            },
            environ=ours,
        ),
        Contestant(name="plain", module="benchmarks.peers.plain", settings=torch_settings, environ=environ),
    ]
    for name in ("accelerate", "lightning"):
        module = f"benchmarks.peers.with_{name}"
        made.append(Contestant(name=name, module=module, environment=name, settings=torch_settings, environ=environ))
    for name, graph in (("mindspore eager", False), ("mindspore graph", True)):
        made.append(
            Contestant(
                name=name,
                module="benchmarks.peers.with_mindspore",
                environment="mindspore",
                settings=settings | {"graph": graph},
                environ=environ,
            )
        )
    return made


def launcher_lines() -> list[Contestant]:
    """The plain script with torch's defaults, and with one thing more each."""
    share = divide_host(LaunchOptions(), {}, busy_frac=0.0)
    base: dict[str, Any] = {"threads": 0, "fused": None}
    lines: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("plain", base, {}),
        ("threads", base, {name: str(share.threads) for name in LAUNCHER_VARIABLES[:2]}),
        ("short spin (set on busy hosts)", base, divide_host(LaunchOptions(), {}, busy_frac=1.0).waiting),
        ("allocator", base, dict(share.allocator)),
        ("fused optimizer", base | {"fused": True}, {}),
        ("compile", base | {"compile": True}, {}),
        ("bf16", base | {"bf16": True}, {}),
    ]
    return [
        Contestant(name=name, module="benchmarks.peers.plain", settings=settings, environ=environ)
        for name, settings, environ in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contestant where all have the same")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    parser.add_argument("--sizes", default="demo,wide")
    parser.add_argument("--parts", default="same,default,launcher")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"sizes": {}}
    for size in arguments.sizes.split(","):
        found = result["sizes"][size] = {"settings": SIZES[size]}
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            workload = Path(folder)
            prepare(workload, SIZES[size], arguments.rounds * arguments.steps + WARMUP_STEPS + 1)
            for part in arguments.parts.split(","):
                if part == "launcher":
                    found[part] = race(launcher_lines(), "plain", arguments, workload)
                else:
                    contestants = rivals(arguments, SIZES[size], same=part == "same")
                    found[part] = against_best(race(contestants, "unisono", arguments, workload))
    result["bf16_native"] = computes_bf16(torch.device("cpu"))
    if not result["bf16_native"]:
        result["not_shown"] = (
            "This CPU has neither avx512_bf16 nor amx, so plan.precision=auto is fp32 and the >= 2x by default, which rests"
            " on native bf16, cannot be shown on it. The bf16 line of 'launcher' is what bf16 costs where it is emulated."
        )
    result |= {"threads_same": arguments.threads, "rounds": arguments.rounds, "steps_per_block": arguments.steps}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

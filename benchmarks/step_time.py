"""Step time of ``Trainer`` and of a hand-written PyTorch loop doing the same arithmetic, and its host time per step.

    python -m benchmarks.step_time [--blocks 40] [--steps 1] [--precision fp32] [--set model.num_layers=2 ...]

One process holds both contestants, each with its own copy of the same model; blocks of steps alternate, and each pair of
blocks gives one ratio. The hand loop finds its batches ready in memory, the Trainer reads them through its loader. With two
processes the other side is torch's DistributedDataParallel, and for ``plan.dp_shard=2`` its FSDP2. One thread per process. Prints
JSON.

Both run under the launcher's allocator settings: with glibc's own, freed memory at the top of the heap goes back to the kernel
or not by luck of the heap's layout, and up to 3 % of a step are page faults on one side or the other. ``--allocator system``
shows it without.

CPU ratios count all threads of the process, so work of the Trainer's other threads is in them; they are what to read when
the machine is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hand import build_adamw, build_gpt, hand_step, ranks_step, set_lr, torch_batches
from benchmarks.paired import ratio, spread
from benchmarks.workload import Workload, prepare, run_config
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono import CheckpointOptions, OptimOptions, PlanOptions, Trainer, TrainOptions
from unisono.dist import World, job_from_environ, join_world
from unisono.launch.resources import TUNED_ALLOCATOR
from unisono.observe.events import EventLog
from unisono.plan.plan import Plan
from unisono.train.build import build_data, build_trainer
from unisono.train.setup import open_events, resolve_plan

WARMUP_STEPS = 3
# a model of no arithmetic has the demo's number of parameters, so that its optimizer has as many tensors to visit
IDLE_PARAMETERS, IDLE_WIDTH = 38, 4

StepOnce = Callable[[], Any]


def timed(step: StepOnce, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of a block."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def alternate(
    mine: StepOnce, other: StepOnce, blocks: int, steps: int, before: Callable[[], object] = lambda: None
) -> dict[str, np.ndarray]:
    """Blocks of both in turns, the leader changing with each pair; arrays [blocks, 2] of (wall, CPU) seconds per step."""
    times: dict[str, list[tuple[float, float]]] = {"mine": [], "other": []}
    sides = [("mine", mine), ("other", other)]
    for number in range(blocks):
        for name, step in sides if number % 2 == 0 else sides[::-1]:
            before()
            times[name].append(timed(step, steps))
    return {name: np.array(values) / steps for name, values in times.items()}


def compare(times: dict[str, np.ndarray]) -> dict[str, Any]:
    """Ratios and medians of what ``alternate`` returned."""
    mine, other = times["mine"], times["other"]
    return {
        "wall": ratio(mine[:, 0].tolist(), other[:, 0].tolist()),
        "cpu": ratio(mine[:, 1].tolist(), other[:, 1].tolist()),
        "trainer_step_s": spread(mine[:, 0].tolist()),
        "hand_step_s": spread(other[:, 0].tolist()),
        "trainer_step_cpu_s": float(np.median(mine[:, 1])),
        "hand_step_cpu_s": float(np.median(other[:, 1])),
    }


def gpt_pair(arguments: argparse.Namespace, folder: Path, world: World) -> dict[str, Any]:
    """The demo's GPT: one process against the bare loop, several against DDP, or FSDP2 where the state is sharded."""
    workload = Workload.read(arguments.workload)
    steps = len(workload.lrs)
    config = run_config(
        [
            *arguments.set,
            f"plan.precision={arguments.precision}",
            f"train.steps={steps}",
            f"run.dir={folder}",
            "checkpoint.every_steps=0",
            "train.eval_every_steps=0",
        ]
    )
    data = build_data(config)
    model = build_gpt(workload)
    sharded = config.plan.dp_shard != 1
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = build_adamw(model, workload.optim, fused=True)
    clip = workload.optim["clip_norm"]
    batches = zip(torch_batches(workload), workload.lrs, strict=True)
    losses: dict[str, list[float]] = {"mine": [], "other": []}
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(open_events(folder, world))
        trainer = build_trainer(
            config, data, resolve_plan(config.plan, world.job)[1], world=world, events=events, provenance={}
        )
        run = stack.enter_context(trainer)
        ours = iter(run)
        wrapped = DistributedDataParallel(model) if world.world_size > 1 and not sharded else model

        def mine() -> None:
            losses["mine"].append(float(next(ours).stats[0]))

        def other() -> None:
            batch, lr = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16"):
                if world.world_size == 1:
                    losses["other"].append(hand_step(model, optimizer, batch, lr, clip).item())
                else:
                    part = {name: tensor.chunk(world.world_size)[world.rank] for name, tensor in batch.items()}
                    losses["other"].append(ranks_step(wrapped, optimizer, part, lr, clip).item())

        for _ in range(WARMUP_STEPS):
            mine()
            other()
        times = alternate(mine, other, arguments.blocks, arguments.steps, world.barrier)
        if world.world_size > 1:
            # a step is as long as its slowest rank; CPU time is everybody's
            gathered = np.array(
                world.all_gather_json({name: value.tolist() for name, value in times.items()}), dtype=object
            )
            for name in times:
                ranks = np.array([each[name] for each in gathered])  # [ranks, blocks, 2]
                times[name] = np.stack([ranks[..., 0].max(0), ranks[..., 1].sum(0)], axis=-1)
        ours.close()
    difference = np.abs(np.array(losses["mine"]) / np.array(losses["other"]) - 1).max()
    return {
        **compare(times),
        "largest_relative_loss_difference": float(difference),
        "steps_compared": len(losses["mine"]),
    }


class Idle(nn.Module):
    """Almost no arithmetic over as many parameters as the demo's GPT has."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(IDLE_WIDTH, 1)) for _ in range(IDLE_PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*self.parts]).sum() + x


class IdleData:
    """One number per sample."""

    fingerprint = "idle"

    def __len__(self) -> int:
        return 1 << 20

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.ones(len(indices), np.float32), "weights": np.ones(len(indices), np.float32)}


def idle_objective(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return (outputs * batch["weights"]).sum(), batch["weights"].sum()


def host_time(blocks: int, steps: int, folder: Path, world: World) -> dict[str, Any]:
    """Trainer minus bare loop on the idle model: microseconds of one step that are not the model's."""
    torch.manual_seed(0)
    plan = PlanOptions(device="cpu", global_batch=4, precision="fp32")
    _, derived = resolve_plan(plan, world.job)
    model = Idle()
    optimizer = build_adamw(model, {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, fused=True)
    batch = {name: torch.from_numpy(array) for name, array in IdleData().read(np.arange(4)).items()}
    losses: list[float] = []

    def other() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_sum, weight = idle_objective(model(batch["x"]), batch)
        loss = loss_sum / weight
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, 1e-3)
        optimizer.step()
        losses.append(loss.item())

    with contextlib.ExitStack() as stack:
        events: EventLog = stack.enter_context(open_events(folder, world))
        ours = _idle_steps(stack, derived, folder, world, events)

        def mine() -> None:
            losses.append(float(next(ours).stats[0]))

        for _ in range(50):
            mine()
            other()
        times = alternate(mine, other, blocks, steps)
        ours.close()
    extra_us = (times["mine"] - times["other"]) * 1e6  # [blocks, 2]
    return {
        "wall_us": spread(extra_us[:, 0].tolist()),
        "cpu_us": spread(extra_us[:, 1].tolist()),
        "trainer_us": float(np.median(times["mine"][:, 0]) * 1e6),
        "bare_loop_us": float(np.median(times["other"][:, 0]) * 1e6),
        "parameters": IDLE_PARAMETERS,
    }


def _idle_steps(stack: contextlib.ExitStack, plan: Plan, folder: Path, world: World, events: EventLog) -> Iterator[Any]:
    run = stack.enter_context(
        Trainer(
            Idle(),
            IdleData(),
            plan,
            objective=idle_objective,
            optimizer=OptimOptions(),
            options=TrainOptions(steps=1 << 24, eval_every_steps=0),
            checkpoint=CheckpointOptions(every_steps=0),
            run_dir=folder,
            world=world,
            events=events,
        )
    )
    return iter(run)


def one_rank(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """This process's part; rank 0 returns the result."""
    torch.set_num_threads(1)
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            path = Path(world.broadcast_json(folder))
            result = gpt_pair(arguments, path / "gpt", world)
            if world.world_size == 1:
                result = {"one_process": result}
                result["host_time_per_step"] = host_time(arguments.blocks, 50, path / "idle", world)
            world.barrier()
        return result if world.rank == 0 else None
    finally:
        world.close()


def two_processes(arguments: argparse.Namespace, *settings: str) -> dict[str, Any]:
    """Start this script again under torchrun with two ranks and more settings."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.step_time", "--rank", "--workload", str(arguments.workload)]
    command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
    command += ["--precision", arguments.precision]
    command += [part for override in [*arguments.set, *settings] for part in ("--set", override)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of both sides")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    parser.add_argument("--allocator", choices=("tuned", "system"), default="tuned")
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.allocator == "tuned" and not TUNED_ALLOCATOR.items() <= os.environ.items():
        # the C library reads them when a process starts
        again = [sys.executable, "-m", "benchmarks.step_time", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | TUNED_ALLOCATOR)
    if arguments.rank:
        result = one_rank(arguments)
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        arguments.workload = Path(folder)
        prepare(arguments.workload, arguments.set, arguments.blocks * arguments.steps + WARMUP_STEPS + 1)
        result = one_rank(arguments)
        assert result is not None
        result["two_processes"] = two_processes(arguments)
        result["two_processes_sharded"] = two_processes(arguments, "plan.dp_shard=2")
    host, step_s = result["host_time_per_step"], result["one_process"]["hand_step_cpu_s"]
    host["cpu_share_of_step"] = host["cpu_us"]["median"] / 1e6 / step_s
    result |= {
        "allocator": arguments.allocator,
        "precision": arguments.precision,
        "settings": arguments.set,
        "blocks": arguments.blocks,
        "steps_per_block": arguments.steps,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""What each axis of a plan costs on two processes, compared with the same torch primitives used by hand. Prints JSON.

    python -m benchmarks.parallel.axes [--axes tp,pp] [--blocks 24] [--steps 1] [--set KEY=VALUE] [--check]

Both sides train the same GPT (512 wide) on the same batches in fp32, in the same two processes of one thread, block by block in
turns. A step is as long as its slowest rank takes; CPU time is that of both. An axis whose losses differ by more than 1e-4 from
the other side's has failed and is listed under ``not_run`` with the reason, like one that could not start.
``--check`` runs the hand-written sides alone against one process instead, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hand import build_adamw, build_gpt, hand_step, torch_batches
from benchmarks.parallel.ranks import RANKS
from benchmarks.parallel.sides import AXES, LARGEST_DIFFERENCE, SIZE, Axis, by_hand, by_trainer
from benchmarks.step_time import WARMUP_STEPS, alternate, compare
from benchmarks.workload import Workload, prepare

from unisono import Trainer
from unisono.dist import World, job_from_environ, join_world

# an axis that cuts the model over two leaves a rank less than this
LARGEST_PART = 0.8


def largest_relative_difference(mine: list[float], others: list[float]) -> float:
    """The largest relative difference of the losses. Raises ValueError where it is too large."""
    found = float(np.abs(np.array(mine) / np.array(others) - 1).max())
    if not found <= LARGEST_DIFFERENCE:
        raise ValueError(f"losses differ by {found:.1e}, relatively: {mine} against {others}")
    return found


def pair(axis: Axis, arguments: argparse.Namespace, folder: Path, world: World) -> dict[str, Any]:
    """The trainer and the hand-written step."""
    workload = Workload.read(arguments.workload)
    losses: dict[str, list[float]] = {"mine": [], "other": []}
    step, batches = by_hand(axis, workload), zip(torch_batches(workload), workload.lrs, strict=True)
    with by_trainer([*arguments.set, *axis.settings], folder, world, len(workload.lrs)) as (run, ours):

        def mine() -> None:
            losses["mine"].append(float(next(ours).stats[0]))

        def other() -> None:
            losses["other"].append(step(*next(batches)))

        for _ in range(WARMUP_STEPS):
            mine()
            other()
        times = alternate(mine, other, arguments.blocks, arguments.steps, world.barrier)
        held_frac = held(run, world)
        if axis.cuts and held_frac > LARGEST_PART:
            raise ValueError(f"a rank of the trainer's holds {held_frac:.2f} of the parameters: nothing was cut")
    gathered = world.all_gather_json({name: value.tolist() for name, value in times.items()})
    for name in times:
        ranks = np.array([each[name] for each in gathered])  # [ranks, blocks, 2]
        times[name] = np.stack([ranks[..., 0].max(0), ranks[..., 1].sum(0)], axis=-1)
    return {
        **compare(times),
        "largest_relative_loss_difference": largest_relative_difference(losses["mine"], losses["other"]),
        "steps_compared": len(losses["mine"]),
        "held_frac": round(held_frac, 4),
    }


def held(run: Trainer, world: World) -> float:
    """The largest share of the parameters that a rank of the trainer's has."""
    pieces = run.state.sharded
    return max(world.all_gather_json(sum(p.numel() for p in pieces.parameters.values()) / pieces.num_parameters))


def check(axis: Axis, arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """The hand-written step against one process that computes the whole batch."""
    workload = Workload.read(arguments.workload)
    if axis.module == "expert":
        from benchmarks.parallel.hand.expert import mixture_gpt

        model = mixture_gpt(workload, 0, 1)
    else:
        model = build_gpt(workload)
    optimizer = build_adamw(model, workload.optim, fused=True)
    batches, clip = list(zip(torch_batches(workload), workload.lrs, strict=True)), workload.optim["clip_norm"]
    alone = [hand_step(model, optimizer, batch, lr, clip).item() for batch, lr in batches]
    step = by_hand(axis, workload)
    together = [step(batch, lr) for batch, lr in batches]
    world.barrier()
    return {
        "largest_relative_loss_difference": largest_relative_difference(together, alone),
        "steps_compared": len(alone),
    }


def one_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """This process's part."""
    torch.set_num_threads(1)
    (name,) = arguments.axes
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-"))
            shared = Path(world.broadcast_json(folder))
            if arguments.check:
                return check(AXES[name], arguments, world)
            result = pair(AXES[name], arguments, shared, world)
            world.barrier()
            return result
    finally:
        world.close()


def two_ranks(name: str, arguments: argparse.Namespace, workload: Path) -> dict[str, Any]:
    """One axis in two processes. Raises CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.parallel.axes", "--rank", "--axes", name, "--workload", str(workload)]
    command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
    command += ["--check"] if arguments.check else []
    command += [part for setting in arguments.set for part in ("--set", setting)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.strip().splitlines()[-1])


def reason(error: subprocess.CalledProcessError) -> str:
    """The last line of an exception in what the ranks wrote."""
    named = [line for line in error.stderr.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return named[-1].strip() if named else error.stderr[-500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", type=lambda text: text.split(","), default=list(AXES), help=f"of {', '.join(AXES)}")
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    parser.add_argument("--check", action="store_true", help="the hand-written sides against one process")
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        result = one_rank(arguments)
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        return
    arguments.set = [*SIZE, *arguments.set]
    found: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for name in arguments.axes:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            steps = arguments.blocks * arguments.steps + WARMUP_STEPS
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                settings = [each for each in AXES[name].settings if not each.startswith("plan.")]
                prepare(Path(folder), [*arguments.set, *settings], steps)
                found[name] = {"what": AXES[name].what, **two_ranks(name, arguments, Path(folder))}
            except subprocess.CalledProcessError as error:
                not_run[name] = reason(error)
    print(
        json.dumps(
            {
                "axes": found,
                "not_run": not_run,
                "settings": arguments.set,
                "blocks": arguments.blocks,
                "steps_per_block": arguments.steps,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

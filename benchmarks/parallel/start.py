"""From the start of two processes to the end of their first step, by axis, compared with a hand-written script. Prints JSON.

    python -m benchmarks.parallel.start [--axes tp,pp] [--rounds 3] [--set KEY=VALUE]

Whole processes without a launcher on either side, in turns, after one round that is not counted. The hand-written script reads
its batches and initial weights from a file; the trainer reads its configuration and prepared data and draws its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio, spread
from benchmarks.parallel.ranks import run_ranks
from benchmarks.parallel.sides import AXES, LARGEST_DIFFERENCE, SIZE, by_hand, by_trainer
from benchmarks.workload import Workload

SIDES = ("mine", "hand")


def first_step(side: str, name: str, workload: Path, settings: list[str]) -> None:
    """This rank's first step; writes the loss."""
    axis = AXES[name]
    if side == "hand":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        given = Workload.read(workload)
        step = by_hand(axis, given)
        batch = {name: torch.from_numpy(array) for name, array in given.batches[0].items()}
        print(step(batch, given.lrs[0]), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        return
    from unisono.dist import job_from_environ, join_world

    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            shared = Path(world.broadcast_json(folder))
            with by_trainer([*settings, *axis.settings], shared, world, 2) as (_, steps):
                print(float(next(steps).stats[0]), flush=True)
            world.barrier()
    finally:
        world.close()


def race(name: str, rounds: int, workload: Path, settings: list[str]) -> dict[str, Any]:
    """Both sides of an axis in turns, the leader changing. Raises RuntimeError."""
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            command = ["-m", "benchmarks.parallel.start", "--rank", side, "--axes", name, "--workload", str(workload)]
            ranks = run_ranks([*command, *(part for each in settings for part in ("--set", each))])
            losses[side] = float(ranks[0][1][-1])
            if number:
                taken[side].append(max(seconds for seconds, _ in ranks))
    difference = abs(losses["mine"] / losses["hand"] - 1)
    if not difference <= LARGEST_DIFFERENCE:
        raise RuntimeError(f"losses differ by {difference:.1e}, relatively: {losses}")
    return {
        "over_hand": ratio(taken["mine"], taken["hand"]),
        "trainer_s": spread(taken["mine"]),
        "hand_s": spread(taken["hand"]),
        "relative_loss_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", type=lambda text: text.split(","), default=list(AXES), help=f"of {', '.join(AXES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    parser.add_argument("--rank", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        first_step(arguments.rank, arguments.axes[0], arguments.workload, arguments.set)
        return
    from benchmarks.workload import prepare

    settings = [*SIZE, *arguments.set]
    found: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for name in arguments.axes:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            model = [each for each in AXES[name].settings if not each.startswith("plan.")]
            prepare(Path(folder), [*settings, *model], 2)
            try:
                found[name] = {"what": AXES[name].what, **race(name, arguments.rounds, Path(folder), settings)}
            except RuntimeError as error:
                not_run[name] = str(error).strip().splitlines()[-1]
    print(json.dumps({"axes": found, "not_run": not_run, "settings": settings, "rounds": arguments.rounds}, indent=1))


if __name__ == "__main__":
    main()

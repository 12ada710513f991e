"""What a checkpoint costs a training run: extra wall time until it is committed, compared with torch.distributed.checkpoint.

    python -m benchmarks.checkpoint_stall [--rounds 15] [--kinds async,dcp] [--folder DIR]

One process trains a small transformer on two threads; its state is fp32 parameters and Adam moments, about 390 MB. A
window is a fixed number of steps, with a save before the first, and ends when the checkpoint is durable and the one
before is deleted. It is long enough for the background thread, which runs at the lowest priority, to be done by
itself, and no longer: what other machines' work adds to a window grows with its length. Kinds of windows, with a plain
one between any two, in another order each round; a kind that is named more often gets more windows:

    async        Checkpointer.save as the Trainer calls it: copies, and writes while the steps go on
    sync         Checkpointer.save with asynchronous=False
    dcp          torch.distributed.checkpoint.save
    dcp_async    torch.distributed.checkpoint.async_save

A window's extra time is the difference to the mean of the plain ones before and behind it. The three count only if other
processes took less than 5 % of the machine meanwhile. Medians and their 95 % intervals from order statistics.
``extra_cpu_s`` is processor time of this process, all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from benchmarks.paired import median_interval
from torch import Tensor, nn

from unisono.checkpoint import Checkpointer, CheckpointOptions
from unisono.dist import JobSpec, World

WIDTH, DEPTH, VOCABULARY, SEQ_LEN, NUM_HEADS = 512, 10, 1024, 256, 8
STEPS_PER_WINDOW = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, position, width]
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Training:
    """A model, its optimizer, and one step."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, VOCABULARY)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (batch, SEQ_LEN + 1))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            state[f"model/{name}"] = parameter.detach()
            state[f"optim/{name}/exp_avg"] = moments["exp_avg"]
            state[f"optim/{name}/exp_avg_sq"] = moments["exp_avg_sq"]
        return state


class Saves:
    """The ways to save; ``begin`` returns what to call at the end of the window."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.events: list[dict[str, Any]] = []
        self.step = 0
        self.checkpointers = {
            kind: Checkpointer(
                folder / kind,
                world=World(JobSpec()),
                options=CheckpointOptions(keep_last=1, keep_best=0, asynchronous=kind != "sync"),
                attempt=1,
                emit=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            )
            for kind in ("async", "sync")
        }

    def begin(self, kind: str) -> Callable[[], Any]:
        self.step += 1
        state = self.training.state()
        if kind == "plain":
            return lambda: None
        if kind in self.checkpointers:
            checkpointer = self.checkpointers[kind]
            checkpointer.save(self.step, state, {"rng": torch.get_rng_state()}, {"step": self.step})
            return checkpointer.wait
        target = self.folder / kind / f"step-{self.step}"
        before = list((self.folder / kind).glob("*"))
        if kind == "dcp":
            dcp.save(state, checkpoint_id=target)
            future = None
        else:
            future = dcp.async_save(state, checkpoint_id=target)

        def end() -> None:
            if future is not None:
                future.result()
            for old in before:
                shutil.rmtree(old)

        return end

    def close(self) -> None:
        for checkpointer in self.checkpointers.values():
            checkpointer.close()


def window(training: Training, saves: Saves, kind: str) -> dict[str, float]:
    os.sync()  # what an earlier window left to the kernel is not this one's cost
    own_s, machine_s = _own_cpu_s(), _machine_cpu_s()
    started = time.perf_counter()
    end = saves.begin(kind)
    called = time.perf_counter()
    for _ in range(STEPS_PER_WINDOW):
        training.step()
    stepped = time.perf_counter()
    end()
    finished = time.perf_counter()
    own_s, machine_s = _own_cpu_s() - own_s, _machine_cpu_s() - machine_s
    return {
        "wall_s": finished - started,
        "cpu_s": own_s,
        "call_s": called - started,
        "end_s": finished - stepped,
        "others_frac": max(0.0, machine_s - own_s) / (finished - started) / (os.cpu_count() or 1),
    }


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _machine_cpu_s() -> float:
    """Processor seconds anyone used since boot: everything but idle and waiting for disks."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def extra_of_windows(
    training: Training, saves: Saves, kinds: list[str], *, rounds: int, others_frac: float
) -> dict[str, list[dict[str, float]]]:
    """Windows of each kind that nobody disturbed, with what they took beyond their plain neighbours."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    before = window(training, saves, "plain")
    for number in range(rounds):
        shift = number % len(kinds)
        for kind in kinds[shift:] + kinds[:shift]:
            found, behind = window(training, saves, kind), window(training, saves, "plain")
            if max(each["others_frac"] for each in (before, found, behind)) <= others_frac:
                plain = {key: (before[key] + behind[key]) / 2 for key in before}
                runs[kind].append(
                    found
                    | {
                        "extra_s": found["wall_s"] - plain["wall_s"],
                        "extra_cpu_s": found["cpu_s"] - plain["cpu_s"],
                        "plain_step_s": plain["wall_s"] / STEPS_PER_WINDOW,
                    }
                )
            before = behind
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--others-frac", type=float, default=0.05, help="share of the machine others may take")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--kinds", default="async,async,async,async,async,dcp")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.batch)
    training.step()
    state_bytes = sum(tensor.nbytes for tensor in training.state().values())
    kinds = arguments.kinds.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="unisono-bench-") as folder:
        saves = Saves(training, Path(folder))
        for kind in dict.fromkeys(kinds):
            window(training, saves, kind)  # first touch of buffers and files
        runs = extra_of_windows(training, saves, kinds, rounds=arguments.rounds, others_frac=arguments.others_frac)
        saves.close()
        failed = [event for event in saves.events if event["kind"] != "checkpoint_saved"]
        assert not failed, failed
        written = max(event["bytes"] for event in saves.events)
    print(json.dumps(_report(runs, state_bytes, written, arguments), indent=1))


def _report(
    runs: dict[str, list[dict[str, float]]], state_bytes: int, written: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    dcp_s = statistics.median(run["call_s"] for run in runs["dcp"]) if runs.get("dcp") else float("nan")
    kinds: dict[str, Any] = {}
    for kind, found in runs.items():
        if len(found) >= 2:
            low, high, _ = median_interval([run["extra_s"] for run in found])
            medians = {key: statistics.median(run[key] for run in found) for key in found[0]}
            kinds[kind] = {
                "windows": len(found),
                "extra_over_dcp_sync": round(medians["extra_s"] / dcp_s, 4),
                "interval_over_dcp_sync": [round(low / dcp_s, 4), round(high / dcp_s, 4)],
                **{key: round(value, 4) for key, value in medians.items()},
            }
    return {
        "state_bytes": state_bytes,
        "written_over_state_bytes": round(written / state_bytes, 6),
        "dcp_sync_s": round(dcp_s, 4),
        "kinds": kinds,
        "rounds": arguments.rounds,
        "steps_per_window": STEPS_PER_WINDOW,
        "others_frac": arguments.others_frac,
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()

"""A plain loop with DDP around the model of ``faulty``, under TraceML, or under torch.profiler with the path of its tables."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.observe.faulty import (
    BATCH,
    FAULTS,
    SAVE_EVERY,
    Network,
    Rows,
    fault_here,
    mean_loss,
    rank_here,
    slow_link,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader


def main(tool: str, folder: Path) -> None:
    """Train, watched by ``traceml`` or by ``torch``."""
    fault, name = FAULTS[os.environ["FAULT"]], fault_here()
    if tool == "traceml":
        import traceml_ai

        traceml_ai.init(mode="auto")
        traced: Any = traceml_ai.trace_step
        profiler: Any = contextlib.nullcontext()
    else:
        traced = contextlib.nullcontext
        window = schedule(wait=fault.steps // 2, warmup=2, active=5, repeat=1)
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, schedule=window)
    if fault.processes > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    network: Any = Network()
    if fault.processes > 1:
        network = DistributedDataParallel(network)
    if name == "slow link":
        slow_link(network)
    optimizer = torch.optim.AdamW(network.parameters())
    with profiler:
        for number, batch in enumerate(DataLoader(Rows(fault.steps * BATCH), batch_size=BATCH), 1):  # pyright: ignore[reportArgumentType]
            with traced(network):
                optimizer.zero_grad()
                mean_loss(network(batch["inputs"]), batch).backward()
                optimizer.step()
                if name == "synchronous saves" and number % SAVE_EVERY == 0:
                    save({"model": network.state_dict(), "optim": optimizer.state_dict()}, folder / f"{number}.pt")
            if tool == "torch":
                profiler.step()
    if tool == "torch":
        key = "self_cpu_memory_usage" if name == "memory leak" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=20)
        (folder / f"torch-{rank_here()}.txt").write_text(table)
    if fault.processes > 1:
        dist.destroy_process_group()


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, and wait until the disk has it."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

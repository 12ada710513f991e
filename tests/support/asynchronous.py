"""Workers of dist_async in the pool, and one process to compare them with."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from parameter_servers import ParameterServers
from pool import Pool

from unisono import PlanOptions, Trainer, TrainOptions
from unisono.checkpoint import find_latest, open_checkpoint
from unisono.data.order.permutation import Permutation
from unisono.dist import JobSpec, World

STEPS = 6
# adamw's kernels on the servers are those of one process
SHARED = {"steps": STEPS, "every_steps": 2, "dropout": 0.0}


def place(job: JobSpec, addresses: list[str], secret: str, ranks: int = 0) -> World:
    os.environ["UNISONO_SECRET_FILE"] = secret
    if job.listen_fd is not None:
        os.close(job.listen_fd)  # for a rendezvous that does not take place
    world = ranks or job.world_size
    return World.alone(
        replace(
            job, server_addresses=tuple(addresses), world_size=world, local_world=world, listen_fd=None, restart_count=0
        )
    )


def worker(job: JobSpec, addresses: list[str], secret: str, run_dir: str, ranks: int, **changes: Any) -> dict[str, Any]:
    changes = {**SHARED, "sync": "dist_async", "world": place(job, addresses, secret, ranks), **changes}
    stop_at, at_step = changes.pop("stop_at", None), changes.pop("at_step", None)
    samples: list[list[int]] = []
    losses: list[float] = []
    with tiny.trainer(run_dir, **changes) as run:
        for step in run:
            samples.append(step.sample_ids.tolist())
            losses.append(step.loss)
            if at_step is not None:
                at_step()
            if step.index == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
    values = digests(run)
    return {
        "samples": samples,
        "losses": losses,
        "values": values,
        "bytes": sum(p.nbytes for p in run.state.sharded.parameters.values()),
        "step": run.state.step,
        "weight": float(run.state.weight_total),
        "preempted": run.preempted,
    }


def digests(run: Trainer) -> dict[str, str]:
    parameters = run.state.sharded.parameters.items()
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in parameters}


def together(
    pool: Pool, servers: ParameterServers, run_dir: Path, ranks: int, does: Callable[..., Any] = worker, **changes: Any
) -> list[dict[str, Any]]:
    addresses = [f"{host}:{port}" for host, port in servers.addresses]
    return pool.run(
        does,
        addresses,
        str(servers.secret_file),
        str(run_dir),
        ranks,
        ranks=ranks,
        joined=False,
        timeout_s=90,
        **changes,
    )


def one_process(world: World, run_dir: str, **changes: Any) -> dict[str, Any]:
    samples: list[list[int]] = []
    losses: list[float] = []
    with tiny.trainer(run_dir, world=world, **{**SHARED, **changes}) as run:
        for step in run:
            samples.append(step.sample_ids.tolist())
            losses.append(step.loss)
    values = digests(run)
    return {"samples": samples, "losses": losses, "values": values, "weight": float(run.state.weight_total)}


def worker_statistics(
    job: JobSpec, addresses: list[str], secret: str, run_dir: str, ranks: int
) -> dict[str, list[float]]:
    return statistics(place(job, addresses, secret, ranks), run_dir, sync="dist_async")


def statistics(world: World, run_dir: str, sync: str = "auto") -> dict[str, list[float]]:
    """Buffers of a batch norm after six steps, as a checkpoint has them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    inputs = torch.rand(48, 4, generator=torch.Generator().manual_seed(1))
    plan = PlanOptions(global_batch=8, precision="fp32", sync=sync)
    options = TrainOptions(steps=6, eval_every_steps=0)
    data = [(x, x.sum()[None]) for x in inputs]
    with Trainer(model, data, plan, objective=torch.nn.MSELoss(), options=options, world=world, run_dir=run_dir) as run:
        run.fit()
    reader = open_checkpoint(find_latest(Path(run_dir) / "checkpoints", World.alone(JobSpec())))
    return {
        name: reader.tensor(name).flatten().tolist()
        for name in reader.names()
        if "running" in name or "num_batches" in name
    }


def samples_of(first: int, last: int) -> list[int]:
    return sorted(Permutation(tiny.SAMPLES, seed=0)(torch.arange(8 * first, 8 * last).numpy()).tolist())

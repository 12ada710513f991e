"""Memory of ranks that are really executed on this host: their states, and the peak of a step.

    python -m benchmarks.planner.executed_memory --layouts one|two

As a process of ``benchmarks.planner.estimators``: prints one line of JSON for each layout. Bytes are those of live tensors, at
every operator of a step (``LiveStorages``). Buffers that are made before the steps are left out: their size is fixed, and in
small models they would hide errors.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.planner.measured_layouts import trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

RANKS = 2
STEPS = 5
# the optimizer's state is made in the first step, and a peak varies upwards: threads of Gloo let go of tensors late
_FIRST_COUNTED = 2
SIZE = ("model.dim=512", "model.num_heads=8", "model.num_kv_heads=4", "model.num_layers=4", "model.tied=false")
_JOB = ("plan.precision=bf16", "plan.global_batch=8", "plan.micro_batch=2")
# by number of ranks; the settings of each
LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "one": {
        "one device": (),
        "one device, full recompute": ("plan.recompute=full",),
    },
    "two": {
        "dp_shard, zero 3": ("plan.dp_shard=2",),
        "dp_shard, zero 3, full recompute": ("plan.dp_shard=2", "plan.recompute=full"),
        "dp_shard, zero 2": ("plan.dp_shard=2", "plan.zero=2"),
        "tp": ("plan.tp=2",),
        "pp, 1f1b": ("plan.pp=2", "plan.schedule=1f1b"),
    },
}


def settings_of(layout: str) -> list[str]:
    """The settings of a layout's run."""
    (own,) = (layouts[layout] for layouts in LAYOUTS.values() if layout in layouts)
    return [*SIZE, *_JOB, *own]


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """What this rank holds of ``tensors``."""
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        for tensor in tensors
        if tensor is not None
    )


@dataclass(slots=True)
class _Before:
    """A phase of a step before which ``call`` is called."""

    phase: AbstractContextManager[None]
    call: Callable[[], None]

    def __enter__(self) -> None:
        self.call()
        self.phase.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.phase.__exit__(*error)


def execute(layout: str, world: Any) -> dict[str, int]:
    """Bytes of the states before an update, and at the lowest peak of several steps, of this rank."""
    from unisono.data.loading.loader import to_device
    from unisono.measure.live_storages import LiveStorages
    from unisono.train.dry_run import begin_step

    live = LiveStorages()
    live.kind = "buffers"
    states, peaks = list[int](), list[int]()
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        run = trainer(settings_of(layout), Path(world.broadcast_json(folder)), world)
        with ThreadPoolExecutor(1) as other_thread, live, run:
            runner, state = run._loop.runner, run.state
            parameters = state.sharded.parameters

            def count_states() -> None:
                held = [*parameters.values(), *state.optimizer.state_tensors(parameters).values()]
                states.append(num_bytes([*held, *(parameter.grad for parameter in parameters.values())]))

            counted = runner.timers.wrapped(
                lambda name, phase: _Before(phase, count_states) if name == "optimizer" else phase
            )
            with counted:
                batches = run._loop.loader.iterate(0, STEPS)
                for _ in range(STEPS):
                    live.kind = "step"
                    # nothing is counted in another thread: what the loader has is no memory of the step
                    batch = other_thread.submit(next, batches).result()
                    batch = replace(batch, micro_batches=[to_device(part, run.device) for part in batch.micro_batches])
                    begin_step(live, run.model, state, batch.micro_batches)
                    runner.train_step.run(batch)
                    del batch
                    peaks.append(without_buffers(live.peak.by_kind))
            world.barrier()
    return {"states": states[-1], "peak": min(peaks[_FIRST_COUNTED:])}


def without_buffers(by_kind: Mapping[str, int]) -> int:
    """The bytes of a peak, without buffers that were made before the steps."""
    return sum(size for kind, size in by_kind.items() if kind != "buffers")


def trace(layout: str, ranks: int) -> dict[str, int]:
    """What a dry run says of the same, of the rank that needs most."""
    from unisono.dist import JobSpec, World

    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        run = trainer(settings_of(layout), Path(folder), World.alone(JobSpec()))
        traced = run.dry_run(ranks, range(ranks))
    ledgers = [rank.ledger for rank in traced]
    return {
        "states": max(each.parameter_bytes + each.gradient_bytes + each.state_bytes for each in ledgers),
        "peak": max(without_buffers(rank.peak.by_kind) for rank in traced),
    }


def _execute_all(layouts: Mapping[str, object]) -> Iterator[dict[str, int]]:
    from unisono.dist import JobSpec, World, job_from_environ, join_world

    if "RANK" not in os.environ:
        world = World.alone(JobSpec())
    else:
        world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        for layout in layouts:
            yield execute(layout, world)
    finally:
        world.close()


def main() -> None:
    """Print what each layout of this rank takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", choices=list(LAYOUTS), required=True)
    torch.set_num_threads(1)
    for found in _execute_all(LAYOUTS[parser.parse_args().layouts]):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Traced memory beside that of really executed ranks: the same counter of live storages in both, at every operator of a step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import matrix
import pytest
import tiny
import torch
import value_model
from pool import Pool
from torch import nn

from unisono.data.loading.loader import to_device
from unisono.dist import JobSpec, World
from unisono.measure.live_storages import LiveStorages, Peak
from unisono.models.moe import Router
from unisono.train.dry_run import STEPS, RankMemory, begin_step, phases_as_kinds, plan_of_ranks, ranks_to_trace
from unisono.train.trainer import Trainer

EXECUTED_STEPS = 8
MOST_ABOVE = 1.005  # of the traced bytes
EXECUTIONS = 4  # where the lowest peak is still above the trace: on a busy host a step without a late thread is rare


def trainer_of(folder: str, world: Any, model: str, settings: dict[str, Any]) -> Trainer:
    layers, settings = settings["layers"], {name: value for name, value in settings.items() if name != "layers"}
    network, data, objective = (value_model.build if model == "choosing" else matrix.MODELS[model])(layers)
    return tiny.trainer(folder, world=world, network=network, data=data, objective=objective, **settings)


def executed(
    world: World,
    model: str,
    settings: dict[str, Any],
    *,
    routes_equally: bool = True,
    traced_bytes: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """Bytes by kind at this rank's peak in a step that is really made.

    With real routing, which differs from step to step, the highest peak of several steps. Else the lowest: Gloo's threads let go
    of tensors at some moment after a collective has returned, so that a peak varies from step to step, upwards.

    Args:
        traced_bytes: Bytes of ranks without the buffers of collectives; no further step is made once none of these holds more.
    """
    live = LiveStorages()
    live.kind = "buffers"
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(str(world.broadcast_json(folder)), world, model, settings)
        with ThreadPoolExecutor(1) as other_thread, live, run:
            if routes_equally:
                route_equally(run.model)
            runner = run._loop.runner
            with phases_as_kinds(live, runner.timers):
                batches, peaks = run._loop.loader.iterate(0, EXECUTED_STEPS), list[Peak]()
                for _ in range(EXECUTED_STEPS):
                    live.kind = "between phases"
                    # nothing is counted in another thread: what the host of an accelerator has is no memory of the step
                    batch = other_thread.submit(next, batches).result()
                    batch = replace(batch, micro_batches=[to_device(part, run.device) for part in batch.micro_batches])
                    begin_step(live, run.model, run.state, batch.micro_batches)
                    runner.train_step.run(batch)
                    del batch
                    peaks.append(live.peak)
                    if traced_bytes is None or len(peaks) < STEPS:
                        continue
                    lowest = min(without_buffers(peak.by_kind) for peak in peaks[STEPS - 1 :])
                    is_above = lowest > MOST_ABOVE * traced_bytes.get(world.rank, lowest)
                    if not any(other_thread.submit(world.all_gather_json, is_above).result()):
                        break
            chosen = min if routes_equally else max
            by_kind = chosen(peaks[STEPS - 1 :], key=lambda peak: peak.bytes).by_kind
            world.barrier()
    return dict(by_kind)


def without_buffers(by_kind: dict[str, int]) -> int:
    """The buffers of collectives have a fixed size, beside which errors would not show in tiny models."""
    return sum(size for kind, size in by_kind.items() if kind != "buffers")


def route_equally(model: nn.Module) -> None:
    """Let routers send equally many tokens to each expert, as traces take it."""

    def chosen(
        router: Router, _args: object, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, choice = output
        return weights, torch.arange(choice.numel()).view_as(choice) % router.weight.shape[0]

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(chosen)


def compare(
    pool: Pool, folder: Path, model: str, settings: dict[str, Any], num_ranks: int, *, once_a_stage: bool = False
) -> list[RankMemory]:
    """The traced memory of ranks, once it is held to what executed ranks hold.

    Args:
        once_a_stage: Of the last pipeline stage the last rank alone, which has the fewest rows of parameters that ranks do not
            divide evenly; else also its first rank.
    """
    run = trainer_of(str(folder), World(JobSpec(world_size=num_ranks)), model, settings)
    first_ranks = ranks_to_trace(plan_of_ranks(run._given_plan, num_ranks, ()))
    ranks = run.dry_run(num_ranks, sorted({*(first_ranks[:-1] if once_a_stage else first_ranks), num_ranks - 1}))
    traced_bytes = {rank.rank: without_buffers(rank.peak.by_kind) for rank in ranks}
    real: list[dict[str, int]] = []
    for _ in range(EXECUTIONS):
        more = pool.run(executed, model, settings, traced_bytes=traced_bytes, ranks=num_ranks, timeout_s=240)
        real = [min(each, key=without_buffers) for each in zip(real or more, more, strict=True)]
        if not any(without_buffers(real[rank]) > MOST_ABOVE * size for rank, size in traced_bytes.items()):
            break
    for rank in ranks:
        by_kind = real[rank.rank]
        assert without_buffers(rank.peak.by_kind) == pytest.approx(without_buffers(by_kind), rel=0.005), (
            f"rank {rank.rank}: {rank.peak.by_kind} against {by_kind}"
        )
    return ranks

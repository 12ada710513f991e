"""The parts of a run on one rank of a job whose other ranks do not exist: its own code, in a process group that is simulated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unisono.dist.simulated_world import simulated_world
from unisono.observe.events import EventLog
from unisono.parallel.pipeline.executor import HiddenStates
from unisono.plan.plan import Plan
from unisono.storage.scratch import scratch_folder
from unisono.train.assembly import RunInputs, RunParts, agree_on_run, assemble
from unisono.train.objectives import as_objective
from unisono.train.setup import resolve_plan


@contextmanager
def assembled_rank(
    given: RunInputs,
    plan: Plan,
    rank: int,
    hidden: HiddenStates,
    modes: Sequence[AbstractContextManager[Any]] = (),
    *,
    copied: Callable[[nn.Module, torch.device], nn.Module],
) -> Generator[RunParts]:
    """The parts of ``rank``; nothing of ``given`` is changed, and no file is left.

    Args:
        given: What the run is made of.
        plan: The plan of the job.
        rank: The rank that this process is.
        hidden: The hidden states that stages are known to receive; those that this one passes on are added at the end.
        modes: Modes of torch that are entered before anything is made, such as a ``FakeTensorMode``.
        copied: Makes a copy of a model on a device. What builds a model is called as in a run.
    """
    resources: list[Any] = []
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("unisono-dry-run-"))
        world = stack.enter_context(simulated_world(rank, plan.mesh.world_size))
        device, plan = resolve_plan(plan, world.job)
        events = stack.enter_context(EventLog(folder / "events.jsonl", rank=rank, run_id="dry-run", attempt=1))
        inputs = replace(
            given,
            run_dir=folder,
            objective=as_objective(given.given_objective, lambda: None),
            input=replace(given.input, options=replace(given.input.options, num_workers=0)),
        )
        teacher = None if inputs.distill is None else inputs.distill.build()
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            if isinstance(inputs.model, nn.Module):
                inputs = replace(inputs, model=copied(inputs.model, device))
            if inputs.distill is not None and teacher is not None:
                inputs = replace(inputs, distill=replace(inputs.distill, teacher=copied(teacher, device)))
        inputs = inputs.with_steps(plan)
        stack.callback(lambda: [resource.close() for resource in resources])
        for mode in modes:
            stack.enter_context(mode)
        store = agree_on_run(inputs, plan, world)
        stack.callback(store.close)
        parts = assemble(
            inputs,
            plan,
            world=world,
            store=store,
            device=device,
            events=events,
            stop_notice=None,
            resources=resources,
        )
        pipeline = parts.sharded.pipeline
        if pipeline is not None:
            pipeline.hidden_states.update(hidden)
        try:
            yield parts
        finally:
            if pipeline is not None:
                hidden.update(pipeline.hidden_states)

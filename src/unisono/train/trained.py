"""A trained model with the data of its run, outside of training: what evaluation and compression work on."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.data.dataset import Dataset, collated
from unisono.data.loading.loader import Loader, Tensors, eval_batches, to_device
from unisono.data.options import LoaderOptions
from unisono.dist import World, job_from_environ, join_world
from unisono.plan.plan import Plan
from unisono.train.build import RunData, build_data, build_metrics, build_model, find_objective
from unisono.train.config import RunConfig
from unisono.train.evaluate import evaluate
from unisono.train.load import open_run_checkpoint, read_model
from unisono.train.objectives import Objective, as_objective
from unisono.train.setup import resolve_whole_model
from unisono.train.step import ForwardBackward, input_selector


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """The model of a run, which every process has whole, and its data.

    Attributes:
        config: Configuration of the run.
        step: Step of the checkpoint; 0 for a model without one.
        meta: What the checkpoint records of its run: ``order``, ``environment``, ``settings`` and ``provenance``.
        model: The model in evaluation mode, on ``device``.
        sources: The data sets as the run opens them.
        held_out: The held-out samples, made into batches as in training.
        objective: The run's objective.
        device: Device of this process.
        plan: A plan of data parallelism alone, with the precision and the micro-batch of the run.
        world: The processes that evaluate together.
    """

    config: RunConfig
    step: int
    meta: Mapping[str, Any]
    model: nn.Module
    sources: RunData
    held_out: Dataset
    objective: Objective
    device: torch.device
    plan: Plan
    world: World

    def forward_backward(self, model: nn.Module) -> ForwardBackward:
        """What computes the passes of ``model``, which takes the inputs that the run's model takes."""
        return ForwardBackward(model=model, inputs=input_selector(model), plan=self.plan, world=self.world)

    def evaluate(self, model: nn.Module, samples: int) -> dict[str, float]:
        """Held-out loss and metrics of ``model``, of ``samples`` spread evenly over the data (0 = all). A collective."""
        return evaluate(
            self.forward_backward(model),
            self.held_out,
            objective=self.objective,
            metrics=build_metrics(self.config, self.sources),
            device=self.device,
            data_rank=self.world.rank,
            limit=samples,
        )

    @property
    def trains_on_held_out(self) -> bool:
        """Whether ``training_batches`` are held-out samples: the code of a Python script's run names no others."""
        return self.sources.train is self.sources.held_out

    def training_batches(self, samples: int) -> Iterator[Tensors]:
        """Micro-batches of at least ``samples`` training samples on the device, in the run's order; at most one epoch.

        The run was opened with its training data. Samples are transformed as in training, but not mixed.
        """
        size = self.plan.batch.micro_batch
        loader = Loader(
            self.sources.train,
            seed=self.config.run.seed,
            global_batch=size,
            options=LoaderOptions(num_workers=0),
            prefetch_depth=0,
            transform=self.sources.transform,
            collate_fn=self.sources.collate_fn,
        )
        for step in range(min(-(-samples // size), loader.schedule.steps_per_epoch)):
            for batch in loader.batch(step).micro_batches:
                yield to_device(batch, self.device)

    def held_out_batch(self) -> Tensors:
        """The first micro-batch of the held-out samples, on the device."""
        return to_device(next(eval_batches(self.held_out, self.plan.batch.micro_batch, 0, 1)), self.device)


@contextmanager
def trained_run(
    config: RunConfig, checkpoint: str | None, *, held_out_only: bool = True, untrained: bool = False
) -> Generator[TrainedRun]:
    """The trained model of a run and its data. All processes of the job enter and leave together.

    Args:
        config: Configuration of the run; ``run.dir`` is its folder.
        checkpoint: Path of a checkpoint; None is the newest good one.
        held_out_only: Open the held-out data alone where the task allows it.
        untrained: Take the model as the configuration builds it, such as that of ``model.pretrained``, and no checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it holds another model.
        DataError: The data cannot be read.
    """
    job = job_from_environ(os.environ)
    device, plan = resolve_whole_model(config.plan, job)
    launch = config.launch
    world = join_world(job, device_type=device.type, timeout_s=launch.timeout_s, backend=launch.collective_backend)
    try:
        sources = build_data(config, held_out_only=held_out_only)
        meta: Mapping[str, Any] = {}
        if untrained:
            model, step = build_model(config, sources.tokenizer).eval(), 0
        else:
            snapshot = open_run_checkpoint(config, world, checkpoint)
            model, step, meta = read_model(config, sources.tokenizer, snapshot), snapshot.step, snapshot.meta
        held_out = sources.held_out
        if sources.collate_fn is not None:
            held_out = collated(held_out, sources.collate_fn)
        yield TrainedRun(
            config=config,
            step=step,
            meta=meta,
            model=model.to(device),
            sources=sources,
            held_out=held_out,
            objective=as_objective(find_objective(config)),
            device=device,
            plan=plan,
            world=world,
        )
    finally:
        world.close()

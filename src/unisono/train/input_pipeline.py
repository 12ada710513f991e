"""The data of a run: the forms that a trainer takes, and the loader of this rank's part of each batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from unisono.data.dataset import TYPE_AND_LENGTH, CollateFn, Dataset, as_dataset, collated
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.loading.loader import Loader
from unisono.data.loading.stream_loader import StreamLoader, is_stream
from unisono.data.loading.torch_loader import read_torch_loader
from unisono.data.options import LastBatch, LoaderOptions
from unisono.data.order.step_schedule import StepSchedule
from unisono.dist import job_from_environ
from unisono.errors import DataError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import with_strategy_file
from unisono.sanitize import printable
from unisono.train.options import TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPipeline:
    """A data set or stream, and how the trainer makes batches of it (see ``Loader``)."""

    data: Dataset | Iterable[Any]
    options: LoaderOptions
    transform: Transform | None
    pair_transform: PairTransform | None
    batch_transform: BatchTransform | None
    shuffle_block: int
    shuffle: bool = True
    collate_fn: CollateFn | None = None

    @property
    def functions(self) -> dict[str, Any]:
        """The functions that change samples and batches, by name; None where there is none."""
        names = ("transform", "pair_transform", "batch_transform", "collate_fn")
        return {name: getattr(self, name) for name in names}

    @property
    def data_without_fingerprint(self) -> Dataset | None:
        """The data, if only its type and length tell it from other data."""
        data = self.data
        return data if isinstance(data, Dataset) and data.fingerprint.startswith(TYPE_AND_LENGTH) else None

    def order(self, seed: int, plan: Plan) -> dict[str, Any]:
        """Everything that decides the samples of every step."""
        return {
            "data": str(getattr(self.data, "fingerprint", type(self.data).__qualname__)),
            "samples": len(self.data) if isinstance(self.data, Dataset) else 0,
            "seed": seed,
            "global_batch": plan.batch.global_batch,
            "shuffle_block": self.shuffle_block,
            "last_batch": self.options.last_batch,
            **({} if self.shuffle else {"shuffle": False}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Training data in one of the forms that the trainer takes, and the settings that come with it."""

    data: Dataset | Iterable[Any]
    plan: Plan | PlanOptions
    loader: LoaderOptions
    collate_fn: CollateFn | None
    shuffle: bool


def read_source(
    data: Any, *, plan: Plan | PlanOptions | None, loader: LoaderOptions | None, collate_fn: CollateFn | None
) -> Source:
    """``data`` as data set or stream. Of a torch ``DataLoader`` it takes over what is not given here, and prints it.

    Raises DataError for a ``DataLoader`` whose order cannot be kept, and for data of another kind.
    """
    if isinstance(data, DataLoader):
        job = job_from_environ(os.environ)
        source, lines = _take_over(cast("DataLoader[Any]", data), plan, loader, collate_fn, world_size=job.world_size)
        if job.rank == 0:
            print("\n  ".join(["Loader replaces DataLoader:", *map(printable, lines)]), flush=True)
        return source
    return Source(
        data=data if is_stream(data) else _sized(data, "data"),
        plan=plan or PlanOptions(),
        loader=loader or LoaderOptions(),
        collate_fn=collate_fn,
        shuffle=True,
    )


def _take_over(
    loader: DataLoader[Any],
    plan: Plan | PlanOptions | None,
    options: LoaderOptions | None,
    collate_fn: CollateFn | None,
    *,
    world_size: int,
) -> tuple[Source, list[str]]:
    """``loader`` as a source, with what is given here in place of its own; and a line about each of its settings."""
    parts = read_torch_loader(loader)
    is_stream = not isinstance(parts.data, Dataset)
    plan, batch_line = _batch_sizes(parts.batch_size, plan, world_size)
    workers_line = f"num_workers {parts.num_workers}, from the DataLoader"
    last_line = (
        "drop_last, as last_batch=drop"
        if parts.last_batch == "drop"
        else "an epoch's incomplete batch is completed from the next epoch (last_batch=keep makes it smaller)"
    )
    taken = LoaderOptions(num_workers=parts.num_workers, last_batch=parts.last_batch)
    if options is not None:
        given_here = "of the loader given here"
        workers_line = f"num_workers {parts.num_workers}, replaced by num_workers={options.num_workers} {given_here}"
        last_line = f"drop_last={loader.drop_last}, replaced by last_batch={options.last_batch} {given_here}"
    elif is_stream:
        threads = "one thread" if parts.num_workers else "no thread"
        workers_line = f"num_workers {parts.num_workers}: {threads} reads the stream ahead"
        last_line = "an epoch's incomplete batch is completed from the next epoch"
        taken = LoaderOptions(num_workers=-1 if parts.num_workers else 0)
    if collate_fn is not None:
        collate_line = "collate_fn, replaced by the one given here"
    elif parts.collate_fn is not None:
        collate_line = "collate_fn, from the DataLoader"
    else:
        collate_line = "samples are stacked, Python floats as float32"
    order_line = parts.order if is_stream else f"{parts.order}, keyed by the run's seed instead of torch's generators"
    source = Source(
        data=parts.data,
        plan=plan,
        loader=options or taken,
        collate_fn=collate_fn or parts.collate_fn,
        shuffle=parts.shuffle,
    )
    return source, [order_line, batch_line, workers_line, collate_line, last_line]


def _batch_sizes(batch_size: int, plan: Plan | PlanOptions | None, world_size: int) -> tuple[Plan | PlanOptions, str]:
    """The plan with the batch size of a ``DataLoader`` where it leaves ``global_batch`` at its default; and a line about it."""
    given = plan or PlanOptions()
    if isinstance(given, Plan):
        return (
            given,
            f"batch_size {batch_size}, replaced by global_batch {given.batch.global_batch} of the plan given here",
        )
    effective, in_file = with_strategy_file(given)
    if "batch.global_batch" in in_file or given.global_batch != PlanOptions().global_batch:
        return (
            given,
            f"batch_size {batch_size}, replaced by global_batch {effective.global_batch} of the plan given here",
        )
    data_ranks = max(1, world_size // (effective.tp * effective.cp * effective.pp))
    micro_batch = given.micro_batch or (0 if "batch.micro_batch" in in_file else batch_size)
    taken = replace(given, global_batch=batch_size * data_ranks, micro_batch=micro_batch)
    share = (
        "" if data_ranks == 1 else f", the share of each of {data_ranks} ranks: global_batch {batch_size * data_ranks}"
    )
    return taken, f"batch_size {batch_size}, from the DataLoader{share}"


def read_eval_source(data: Any, collate_fn: CollateFn | None) -> Dataset | None:
    """``eval_data`` as a data set whose batches ``collate_fn`` makes; None stays None. Raises DataError without a length."""
    if data is None:
        return None
    if isinstance(data, DataLoader):
        loader = cast("DataLoader[Any]", data)
        if collate_fn is None and loader.collate_fn is not default_collate:
            collate_fn = loader.collate_fn
        data = loader.dataset
    dataset = _sized(data, "eval_data")
    return dataset if collate_fn is None else collated(dataset, collate_fn)


def _sized(data: Any, name: str) -> Dataset:
    has_items = isinstance(data, Dataset) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
    if isinstance(data, str | bytes) or not has_items or (isinstance(data, Mapping) and 0 not in data):
        raise DataError(
            given=f"{name} of type {type(data).__name__}",
            rule="samples come from a Dataset, a torch.utils.data.Dataset, a list, or anything with __len__ and __getitem__",
            consequence="no sample can be read by its number",
            nearest="list(…) of it, where it fits into memory",
        )
    if not len(data):
        raise DataError(
            given=f"{name} with 0 samples ({type(data).__name__})",
            rule="there is at least one sample",
            consequence="nothing was started",
            nearest="see whether its files were found" if name == "data" else "leave eval_data out",
        )
    return as_dataset(data)


def with_steps(
    options: TrainOptions, data: Dataset | Iterable[Any], last_batch: LastBatch, global_batch: int
) -> TrainOptions:
    """``options`` with the number of steps that its epochs of ``data`` have, and without the epochs.

    Raises DataError for a stream, whose length is not known.
    """
    if not options.epochs:
        return options
    if not isinstance(data, Dataset):
        raise DataError(
            given=f"train.epochs {options.epochs:g} with a stream ({type(data).__name__})",
            rule="an epoch is a pass over data with a length, and a stream shows its end only when it is read",
            consequence="the number of steps, which the schedule of the learning rate needs, is not known",
            nearest="train.steps, or a data set with a length",
        )
    steps = StepSchedule(len(data), global_batch, last_batch).steps_of(options.epochs)
    return replace(options, steps=steps, epochs=0.0)


def build_loader(
    pipeline: InputPipeline, plan: Plan, *, data_rank: int, seed: int, device: torch.device, batch_statistics: bool
) -> Loader | StreamLoader:
    """The loader of part ``data_rank`` of each batch; ``batch_statistics``: the model computes some (batch norm).

    Raises DataError for an end of an epoch that ranks would not reach together, and for settings that a stream does not have.
    """
    data, options = pipeline.data, pipeline.options
    together = "dp_shard" if plan.uses_fsdp else "pp" if plan.mesh.pp > 1 else ""
    if not together and plan.mesh.dp_world_size > 1 and batch_statistics:
        together = "batch norm"
    if together and options.last_batch == "keep":
        raise DataError(
            given=f"{together} on {plan.mesh.world_size} ranks with loader.last_batch=keep",
            rule="ranks that share the state, stages or batch statistics run the same number of passes in every step",
            consequence="an epoch's last step could leave some ranks without samples, and the others waiting",
            nearest="loader.last_batch=pad, which fills it up with weight 0",
        )
    common: dict[str, Any] = {
        "seed": seed,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "rank": data_rank,
        "world_size": plan.mesh.dp_world_size,
        "transform": pipeline.transform,
        "collate_fn": pipeline.collate_fn,
        "device": None if device.type == "cpu" else device,
    }
    if isinstance(data, Dataset):
        return Loader(
            data,
            options=options,
            shuffle=pipeline.shuffle,
            shuffle_block=pipeline.shuffle_block,
            pair_transform=pipeline.pair_transform,
            batch_transform=pipeline.batch_transform,
            **common,
        )
    defaults = LoaderOptions(num_workers=min(options.num_workers, 0))  # 0: no thread, which a stream can do
    transforms = pipeline.pair_transform, pipeline.batch_transform
    if (options, *transforms, pipeline.shuffle_block) != (defaults, None, None, 0):
        raise DataError(
            given=f"a stream ({type(data).__name__}) with loader settings, pair_transform, batch_transform or shuffle_block",
            rule="a stream is read from its beginning by one thread, in its own order",
            consequence="they would have no effect",
            nearest="leave them out, or a data set with a length",
        )
    return StreamLoader(data, prefetch_depth=0 if options.num_workers == 0 else 2, **common)

"""The loader of a run: what the plan asks of it, and which settings a kind of data has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.data.dataset import Dataset
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.loading.loader import Loader
from unisono.data.loading.stream_loader import StreamLoader
from unisono.data.options import LoaderOptions
from unisono.errors import DataError
from unisono.plan.plan import Plan


def build_loader(
    data: Dataset | Iterable[Any],
    options: LoaderOptions,
    plan: Plan,
    *,
    data_rank: int,
    seed: int,
    device: torch.device,
    transform: Transform | None,
    pair: PairTransform | None,
    finish: BatchTransform | None,
    shuffle_block: int,
    batch_statistics: bool,
) -> Loader | StreamLoader:
    """Reads ``data`` for the rank that computes part ``data_rank`` of each batch; ``batch_statistics``: the model takes some.

    Raises DataError for an epoch's end that ranks would not reach together, and for settings that a stream does not have.
    """
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
        "world": plan.mesh.dp_world_size,
        "transform": transform,
        "device": None if device.type == "cpu" else device,
    }
    if isinstance(data, Dataset):
        return Loader(data, options=options, shuffle_block=shuffle_block, pair=pair, finish=finish, **common)
    defaults = LoaderOptions(num_workers=min(options.num_workers, 0))  # 0: no thread, which a stream can do
    if (options, pair, finish, shuffle_block) != (defaults, None, None, 0):
        raise DataError(
            given=f"a stream ({type(data).__name__}) with loader settings, pair, finish or shuffle_block",
            rule="a stream is read from its beginning by one thread, in its own order",
            consequence="they would act on nothing",
            nearest="leave them out, or a data set with a length",
        )
    return StreamLoader(data, prefetch_depth=0 if options.num_workers == 0 else 2, **common)

"""Vocabulary parallelism (Shoeybi et al. 2019): the embedding and the output matrix, sharded by rows.

A rank looks up the tokens in its rows and zeros for the others; an all-reduce gives every rank all embeddings. Each rank
computes the logits of its rows. The chunked loss (``models.loss``) exchanges only their maximum and sum; a model that returns
logits gathers them. Shards differ by one row at most, so that any vocabulary size works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from unisono.parallel.hooks import wrap_forward
from unisono.parallel.sharding import ParameterSharder, even_sizes
from unisono.parallel.tensor.collectives import copy_to_tp_region, gather_from_tp_region, reduce_from_tp_region
from unisono.parallel.timed_collectives import all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """This rank's rows of a vocabulary, for ``models.loss``; ``sizes`` has the number of rows on each rank."""

    sizes: Sequence[int]
    group: ProcessGroup

    def enter(self, hidden: Tensor) -> Tensor:
        """The identity on ``hidden``; its gradient is summed over the ranks."""
        return copy_to_tp_region(hidden, self.group)

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Local row of each token, 0 for a token of another rank, and whether the row is local."""
        index = self.group.rank()
        places = tokens - list(accumulate(self.sizes, initial=0))[index]
        is_local = (places >= 0) & (places < self.sizes[index])
        return places.where(is_local, 0), is_local

    def combine(self, log_norm: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Combine over the ranks: the logsumexp of the local ``log_norm``, and the sum of ``chosen``."""
        largest = log_norm.clone()
        all_reduce(largest, self.group, ReduceOp.MAX)
        sums = torch.stack([(log_norm - largest).exp(), chosen])
        all_reduce(sums, self.group)
        return largest + sums[0].log(), sums[1]

    def gather(self, logits: Tensor) -> Tensor:
        """Gather local logits into all logits [..., vocab]."""
        return gather_from_tp_region(logits, -1, self.group, self.sizes)


def shard_embedding(layer: Any, sharder: ParameterSharder) -> VocabShard:
    """Shard an ``nn.Embedding`` by rows, in place."""
    part = VocabShard(sizes=even_sizes(layer.num_embeddings, sharder.num_ranks), group=sharder.group)
    padding = layer.padding_idx
    if padding is not None:  # the row whose gradient stays zero
        place, here = part.place(torch.tensor(padding, device="cpu"))
        padding = int(place) if here else None
    sharder.shard(layer, "weight", 0)

    def look_up(forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        places, here = part.place(tokens)
        # a subclass may scale the rows
        return reduce_from_tp_region(forward(places).where(here[..., None], 0), part.group)

    wrap_forward(layer, look_up)
    layer.num_embeddings, layer.padding_idx = part.sizes[sharder.rank], padding
    return part


def shard_output_layer(layer: Any, sharder: ParameterSharder) -> VocabShard:
    """Shard an ``nn.Linear`` by rows, in place; when called it gathers all logits on every rank."""
    part = VocabShard(sizes=even_sizes(layer.out_features, sharder.num_ranks), group=sharder.group)
    sharder.shard(layer, "weight", 0)
    sharder.shard(layer, "bias", 0)
    layer.out_features = part.sizes[sharder.rank]

    def gathered(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return part.gather(forward(copy_to_tp_region(x, part.group)))

    wrap_forward(layer, gathered)
    return part

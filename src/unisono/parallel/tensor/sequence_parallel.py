"""Sequence parallelism (Korthikanti et al. 2022): between tensor-parallel layers, activations are split along the sequence.

From the first to the last module that the rule names, each rank has T/tp tokens: x [B, T/tp, D]. A column-wise and row-wise pair
gathers its input and reduce-scatters its output, at the cost of the all-reduces that these replace. Replicated parameters in
between, such as norms, see a part of the tokens, so their gradients are summed over the ranks (``ShardTable.sum_grad``).
Activations outside are replicated. Attention masks and positions are made outside and cover the whole sequence.

Dropout between pairs draws the mask of the whole sequence on every rank and uses its own part: the generators of the ranks stay
equal, and a layer drops what it would without sequence parallelism. (Draws cost tp times as much, and one mask of memory.)
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError
from unisono.parallel.hooks import map_input, map_output, wrap_forward
from unisono.parallel.sharding import ParameterSharder
from unisono.parallel.tensor.collectives import gather_from_tp_region, scatter_to_sp_region
from unisono.parallel.tensor.tp_validation import RuleMatch
from unisono.plan.rules import ColwiseRowwise, SequenceRule

SEQUENCE_DIM = -2  # the dim of tokens in activations [..., T, D]


def apply_sequence_parallel(matched: list[RuleMatch], sharder: ParameterSharder) -> None:
    """Split activations along the sequence from the input of the first module that the rule matches to the output of the last."""
    group = sharder.group
    between = [match.module for match in matched if isinstance(match.rule, SequenceRule)]
    map_input(between[0], lambda x: scatter_to_sp_region(_divisible(x, group), SEQUENCE_DIM, group))
    map_output(between[-1], lambda x: gather_from_tp_region(x, SEQUENCE_DIM, group))
    entered = {
        module
        for match in matched
        if isinstance(match.rule, ColwiseRowwise)
        for name in match.rule.input_modules
        for module in match.module.get_submodule(name).modules()
    }
    for module in {inner: None for outer in between for inner in outer.modules()}:
        for name, _ in module.named_parameters(recurse=False):
            if not sharder.is_sharded(module, name):
                sharder.sum_grad(module, name, group)
        if isinstance(module, nn.Dropout) and module not in entered:
            _draw_for_whole(module, group)


def _divisible(x: Tensor, group: ProcessGroup) -> Tensor:
    tokens, count = x.shape[SEQUENCE_DIM], group.size()
    if tokens % count:
        raise PlanError(
            given=f"a batch with T = {tokens} tokens per sequence, with sequence_parallel and tp {count}",
            rule="every rank has equally many tokens of a sequence: tp divides T",
            consequence="the sequence cannot be sharded",
            nearest=f"sequences of {-(-tokens // count) * count} tokens (padding with weight 0), or sequence_parallel=False",
        )
    return x


def _draw_for_whole(layer: Any, group: ProcessGroup) -> None:
    count, index = group.size(), group.rank()

    def masked(_forward: Any, x: Tensor) -> Tensor:
        if not layer.training or not layer.p:
            return x
        tokens = x.shape[SEQUENCE_DIM]
        ones = x.new_ones(*x.shape[:SEQUENCE_DIM], tokens * count, *x.shape[SEQUENCE_DIM + 1 :])
        return x * F.dropout(ones, layer.p).narrow(SEQUENCE_DIM, index * tokens, tokens)

    wrap_forward(layer, masked)

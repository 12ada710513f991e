"""Sequence parallelism (Korthikanti et al. 2022): between pairs of cut layers, activations are cut along the sequence.

From the first to the last module that the rule names, each rank has its part of the tokens: x [B, T/tp, D]. A pair gathers its
input and reduce-scatters its output, which costs what the all-reduces did. Norms and what else is whole in between see a part of
the tokens, so their gradients are summed over the ranks (``SharedGradients``). Outside everything is as without: whole, and equal
on all ranks. Attention masks and positions are made outside and stay those of the whole sequence.

Dropout between pairs draws the mask of the whole sequence on every rank and uses its own part: the generators of the ranks stay
equal, and a layer drops what it would without sequence parallelism. (Draws cost tp times as much, and one mask of memory.)
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError, Problem
from unisono.parallel.blocks import blocks, note_summed
from unisono.parallel.collectives import join, split
from unisono.parallel.cutter import Cutter
from unisono.parallel.hooks import before, behind
from unisono.parallel.matched import Matched
from unisono.plan.rules import Pair, Sequence

TOKENS = -2  # the dim of tokens in activations [..., T, D]


def cut_sequence(matched: list[Matched], cutter: Cutter) -> None:
    """Cut activations from before the first to behind the last module that the rule names."""
    group = cutter.group
    between = [each.module for each in matched if isinstance(each.rule, Sequence)]
    before(between[0], lambda x: split(_divisible(x, group), TOKENS, group))
    behind(between[-1], lambda x: join(x, TOKENS, group))
    entered = {
        module
        for each in matched
        if isinstance(each.rule, Pair)
        for name in each.rule.input_modules
        for module in each.module.get_submodule(name).modules()
    }
    for module in {inner: None for outer in between for inner in outer.modules()}:
        cut = blocks(module)
        for name, _ in module.named_parameters(recurse=False):
            if name not in cut:
                note_summed(module, name, group)
        if isinstance(module, nn.Dropout) and module not in entered:
            _draw_for_whole(module, group)


def _divisible(x: Tensor, group: ProcessGroup) -> Tensor:
    tokens, count = x.shape[TOKENS], group.size()
    if tokens % count:
        raise PlanError(
            Problem(
                given=f"a batch with T = {tokens} tokens per sequence, with sequence_parallel and tp {count}",
                rule="every rank has equally many tokens of a sequence: tp divides T",
                consequence="the sequence cannot be cut",
                nearest=f"sequences of {-(-tokens // count) * count} tokens (padding with weight 0), or sequence_parallel=False",
            )
        )
    return x


def _draw_for_whole(layer: Any, group: ProcessGroup) -> None:
    count, index = group.size(), group.rank()

    def forward(x: Tensor) -> Tensor:
        if not layer.training or not layer.p:
            return x
        tokens = x.shape[TOKENS]
        ones = x.new_ones(*x.shape[:TOKENS], tokens * count, *x.shape[TOKENS + 1 :])
        return x * F.dropout(ones, layer.p).narrow(TOKENS, index * tokens, tokens)

    layer.forward = forward

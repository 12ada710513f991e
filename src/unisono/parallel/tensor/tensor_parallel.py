"""Tensor parallelism: shards the layers that the rules of ``plan.tensor_parallel`` name; local tensors replace global ones.

In a pair (Shoeybi et al. 2019, Megatron-LM) the first layers are split column-wise (by output features: whole attention heads, or
hidden units of a feed-forward layer) and the last row-wise (by input features). Everything in between is computed on the local
part, with one all-reduce after the row-wise layer forward and one before the column-wise layers backward.

    pair        input x, replicated                    ∂x summed over ranks
    column      y_r = x W_rᵀ + b_r
    row         z = Σ_r y_r V_rᵀ + c                    ∂z replicated

Experts are split along their hidden units. Where a layer has fewer key/value heads than there are ranks, several ranks hold the
same head and their gradients are summed (``ShardTable.sum_grad``). So are the gradients of replicated parameters between the
layers of a pair, such as norms of single heads. Modules matched by no rule are replicated. Dropout outside of pairs drops
the same elements on every rank; between the layers of a pair each rank draws random numbers of its own (``rng``).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.parallel.expert import shard_expert_hidden
from unisono.parallel.hooks import map_input, replace_in_logits, wrap_forward
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ParameterSharder, ShardTable
from unisono.parallel.tensor.collectives import (
    copy_to_tp_region,
    gather_from_sp_region,
    reduce_from_tp_region,
    reduce_scatter_to_sp_region,
)
from unisono.parallel.tensor.rng import TensorParallelRNG
from unisono.parallel.tensor.sequence_parallel import SEQUENCE_DIM, apply_sequence_parallel
from unisono.parallel.tensor.tp_validation import RuleMatch, attribute_value, resolve_rules, weight_dims
from unisono.parallel.tensor.vocab_parallel import VocabShard, shard_embedding, shard_output_layer
from unisono.plan.rules import ColwiseRowwise, EmbeddingRule, ExpertRule, OutputRule, local_sizes


def apply_tensor_parallel(model: nn.Module, dims: ParallelDims, table: ShardTable) -> None:
    """Shard every layer that a rule matches, in place, and record the shards in ``table``. All ranks call it, with equal models.

    Raises PlanError, before anything is changed, with all problems of the rules.
    """
    matched = resolve_rules(model, dims.plan)
    replicas = _replica_groups(matched, dims)
    sharder = ParameterSharder(model, dims, table)
    vocab_shards: dict[nn.Module, VocabShard] = {}
    generators: dict[nn.Module, TensorParallelRNG] = {}
    sequence_parallel = dims.plan.tensor_parallel.sequence_parallel
    for rule_match in matched:
        match rule_match.rule:
            case ColwiseRowwise() as pair:
                _shard_pair(rule_match.module, pair, sharder, replicas, sequence_parallel=sequence_parallel)
                region = _called_module(model, rule_match.path)
                generators[region] = generators.get(region) or TensorParallelRNG(region, sharder.rank)
                *first, last = map(rule_match.module.get_submodule, pair.layers)
                generators[region].add_pair(first, last)
            case ExpertRule():
                shard_expert_hidden(rule_match.module, sharder, sequence_parallel=sequence_parallel)
            case EmbeddingRule():
                vocab_shards[rule_match.module] = shard_embedding(rule_match.module, sharder)
            case OutputRule():
                vocab_shards[rule_match.module] = shard_output_layer(rule_match.module, sharder)
            case _:
                pass
    replace_in_logits(model, "vocab_sharding", vocab_shards)
    if sequence_parallel:
        apply_sequence_parallel(matched, sharder)


def _called_module(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, or the nearest one around it that has a forward pass."""
    module = model.get_submodule(path)
    while isinstance(module, nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return module


def _replica_groups(matched: list[RuleMatch], dims: ParallelDims) -> dict[int, ProcessGroup]:
    """This rank's groups of neighbouring ranks that hold the same key/value heads, by number of ranks."""
    tp = dims.plan.mesh.tp
    pairs = [
        (rule_match, rule_match.rule.num_kv_heads_attr)
        for rule_match in matched
        if isinstance(rule_match.rule, ColwiseRowwise)
    ]
    sizes = {tp // min(tp, attribute_value(rule_match, name)) for rule_match, name in pairs if name}
    # the ranks along tp are neighbours
    ranks = {str(n): np.arange(dims.plan.mesh.world_size).reshape(-1, n).tolist() for n in sorted(sizes) if 1 < n < tp}
    groups = {int(n): group for n, group in dims.world.groups(ranks).items()} if ranks else {}
    return {**groups, tp: dims.group("tp")}


def _shard_pair(
    module: nn.Module,
    pair: ColwiseRowwise,
    sharder: ParameterSharder,
    replicas: dict[int, ProcessGroup],
    *,
    sequence_parallel: bool,
) -> None:
    group = sharder.group
    kv_heads = int(attrgetter(pair.num_kv_heads_attr)(module)) if pair.num_kv_heads_attr else 0
    for name in (*pair.colwise, *pair.kv_colwise, *pair.fused_colwise):
        layer = module.get_submodule(name)
        max_shards = kv_heads if name in pair.kv_colwise else 0
        fused = 3 if name in pair.fused_colwise else 1
        sharder.shard(layer, "weight", weight_dims(layer)[0], max_shards=max_shards, fused=fused)
        sharder.shard(layer, "bias", 0, max_shards=max_shards, fused=fused)
        if 0 < max_shards < sharder.num_ranks:
            for parameter, _ in layer.named_parameters(recurse=False):
                sharder.sum_grad(layer, parameter, replicas[sharder.num_ranks // max_shards])
    last = module.get_submodule(pair.rowwise)
    sharder.shard(last, "weight", weight_dims(last)[1])
    for layer in map(module.get_submodule, pair.layers):
        _set_features(layer)
    for name, size in local_sizes(pair, module, sharder.num_ranks).items():
        path, _, attribute = name.rpartition(".")
        owner = attrgetter(path)(module) if path else module
        if isinstance(owner, nn.Module):  # a configuration belongs to the whole model
            setattr(owner, attribute, size)
    for first in map(module.get_submodule, pair.input_modules):
        _sum_grads_between(first, sharder, [module.get_submodule(name) for name in pair.layers])
        map_input(
            first,
            lambda x: (
                gather_from_sp_region(x, SEQUENCE_DIM, group) if sequence_parallel else copy_to_tp_region(x, group)
            ),
        )
    _make_rowwise(last, group, sequence_parallel=sequence_parallel)


def _set_features(layer: Any) -> None:
    """Set the sizes that the layer reports to those of its local weight."""
    out, into = (layer.weight.shape[dim] for dim in weight_dims(layer))
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = out, into
    else:
        layer.nf, layer.nx = out, into


def _sum_grads_between(first: nn.Module, sharder: ParameterSharder, layers: list[nn.Module]) -> None:
    """Sum the gradients of replicated parameters between the layers of a pair, which see this rank's heads only."""
    for module in first.modules():
        if module not in layers:
            for name, _ in module.named_parameters(recurse=False):
                sharder.sum_grad(module, name, sharder.group)


def _make_rowwise(layer: Any, group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Sum the layer's products over the ranks; its bias is added once, to the sum."""
    out, _ = weight_dims(layer)

    def row_parallel(_forward: Any, x: Tensor) -> Tensor:
        part = F.linear(x, layer.weight if out == 0 else layer.weight.T)
        product = (
            reduce_scatter_to_sp_region(part, SEQUENCE_DIM, group)
            if sequence_parallel
            else reduce_from_tp_region(part, group)
        )
        return product if layer.bias is None else product + layer.bias.to(product.dtype)

    wrap_forward(layer, row_parallel)

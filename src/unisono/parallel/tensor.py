"""Tensor parallelism by pairs of linear layers (Shoeybi et al. 2019, Megatron-LM).

In a pair the first layers are cut by columns (output features: whole attention heads, or some of the hidden units of a
feed-forward layer) and the last by rows, so that what lies between is computed by parts and one sum over the ranks ends it.
Forward that is one all-reduce behind the last layer, backward one before the first. Embeddings, norms, the output head and what
no rule names stay whole on every rank, and are computed by each. Layers of a pair have no bias.

    pair        input x, the same on all ranks         ∂x summed over ranks
    column      y_r = x W_rᵀ
    row         z = Σ_r y_r V_rᵀ                        ∂z the same on all ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError, Problem
from unisono.parallel.grid import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A module, by name pattern, whose forward goes through ``column`` layers and ends in ``row``; ``units`` are its attributes
    that say into how many equal parts the columns may be cut."""

    module: str
    column: tuple[str, ...]
    row: str
    units: tuple[str, ...] = ()


RULES = (
    Pair(module="blocks.*.attention", column=("q", "k", "v"), row="out", units=("heads", "kv_heads")),
    Pair(module="blocks.*.ffn", column=("gate", "up"), row="down"),
)


def cut_dims(model: nn.Module) -> dict[str, int]:
    """The dimension that the rules cut, by parameter name."""
    found: dict[str, int] = {}
    for path, pair, _ in _pairs(model):
        found |= {f"{path}.{name}.weight": 0 for name in pair.column} | {f"{path}.{pair.row}.weight": 1}
    return found


def cut(model: nn.Module, grid: Grid) -> None:
    """Keep this rank's part of every layer that a rule names, in place. Raises PlanError before anything is changed."""
    count, index, group = grid.plan.tp, grid.index("tp"), grid.group("tp")
    pairs = _pairs(model)
    _check(model, pairs, count)
    for _, pair, module in pairs:
        for name in pair.column:
            _keep(module.get_submodule(name), 0, index, count)
        last = module.get_submodule(pair.row)
        _keep(last, 1, index, count)
        _sum_behind(last, group)
        module.register_forward_pre_hook(_sum_gradients_before(group), with_kwargs=True)


def _pairs(model: nn.Module) -> list[tuple[str, Pair, nn.Module]]:
    return [(p, pair, m) for p, m in model.named_modules() for pair in RULES if fnmatchcase(p, pair.module)]


def _check(model: nn.Module, pairs: list[tuple[str, Pair, nn.Module]], count: int) -> None:
    problems: dict[str, Problem] = {}
    if not pairs:
        problems[""] = Problem(
            given=f"plan.tp={count} for {type(model).__name__}",
            rule="layers are cut by rules, which name " + ", ".join(pair.module for pair in RULES),
            consequence="every rank would compute the same",
            nearest="plan.tp=1, with plan.dp_shard to spread the state",
        )
    for path, pair, module in pairs:
        sizes = {name: int(getattr(module, name)) for name in pair.units}
        sizes |= {f"width of {pair.row}": int(module.get_submodule(pair.row).weight.shape[1])}  # pyright: ignore[reportArgumentType, reportIndexIssue, reportCallIssue]
        for name, size in sizes.items():
            if size % count:
                near = max(n for n in range(1, count + 1) if size % n == 0)
                problems.setdefault(
                    f"{pair.module} {name}",
                    Problem(
                        given=f"plan.tp={count} for {path}, whose {name} is {size}",
                        rule="each rank has equally many heads and hidden units",
                        consequence="the layer cannot be cut",
                        nearest=f"plan.tp={near}",
                    ),
                )
    if problems:
        raise PlanError(*problems.values())


def _keep(layer: nn.Module, dim: int, index: int, count: int) -> None:
    weight: Any = layer.weight
    part = weight.detach().chunk(count, dim)[index].clone(memory_format=torch.contiguous_format)
    layer.weight = nn.Parameter(part, requires_grad=weight.requires_grad)


def _sum_behind(layer: nn.Module, group: ProcessGroup) -> None:
    inner = layer.forward

    def forward(x: Tensor) -> Tensor:
        return _Sum.apply(inner(x), group)  # pyright: ignore[reportReturnType]

    layer.forward = forward


def _sum_gradients_before(group: ProcessGroup) -> Any:
    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_SumGradient.apply(args[0], group), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: _SumGradient.apply(kwargs[name], group)}

    return hook


class _Sum(torch.autograd.Function):
    """Forward the sum over ranks, backward the identity."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumGradient(torch.autograd.Function):
    """Forward the identity, backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None

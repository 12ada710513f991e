"""Builds the optimizer of a model from its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, nearest_name
from unisono.optim import kernels
from unisono.optim.groups import Role, parameter_roles
from unisono.optim.layerwise import GlobalNorms, Lamb, Lars
from unisono.optim.options import OPTIMIZER_FIELDS, OptimOptions
from unisono.optim.run_optimizer import empty_pattern
from unisono.optim.skippable import make_skippable
from unisono.optim.state import ADAM_STATE, MOMENTUM_STATE, create_state


def param_groups(
    model: nn.Module,
    options: OptimOptions,
    sharded_params: Mapping[str, nn.Parameter] | None = None,
    named_roles: Mapping[str, Role] | None = None,
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups ``decay``, ``no_decay`` and ``plain`` with the parameters in the order of their names.

    The module ``groups`` has the rule. Each table of ``options.groups`` has up to three such groups of its own, with its
    pattern in their names; so has each factor of ``lr_scales`` other than 1. An empty group is left out.

    Args:
        model: The model whose trainable parameters are grouped, or a part of it.
        options: Its ``effective_weight_decay`` is the decay of group ``decay`` and its ``decay_exclude`` extends ``no_decay``.
        sharded_params: This rank's shards of the parameters, by name, which are updated; default the model's parameters.
        named_roles: Roles by parameter name; default those of ``parameter_roles(model)``.
        lr_scales: Factors of the learning rate, by which the weight decay is divided, by parameter name; see ``width_scaling``.

    Returns:
        One dict per group with ``name``, ``params``, ``weight_decay`` and ``adapt`` (whether LAMB and LARS use their layer-wise
        rate), for the constructor of an optimizer; and ``frozen_until_step``, where a table has it, for ``RunOptimizer``.

    Raises:
        ConfigError: The model has no trainable parameter, or a pattern of ``decay_exclude`` or ``groups`` matches none.
    """
    by_name = sharded_params if sharded_params is not None else dict(model.named_parameters(remove_duplicate=False))
    roles = parameter_roles(model, options.decay_exclude) if named_roles is None else named_roles
    table_of = _match_groups(roles, options.groups)
    scale_of = lr_scales or {}
    scales = sorted({1.0, *scale_of.values()}, reverse=True)
    members: dict[tuple[int, Role, float], list[nn.Parameter]] = {
        (table, role, scale): []
        for table in (len(options.groups), *range(len(options.groups)))
        for role in Role
        for scale in scales
    }
    for name, role in roles.items():
        if name in by_name:
            members[table_of[name], role, scale_of.get(name, 1.0)].append(by_name[name])
    groups: list[dict[str, Any]] = []
    for (number, role, scale), params in members.items():
        if not params:
            continue
        table: Mapping[str, Any] = options.groups[number] if number < len(options.groups) else {}
        decay = table.get("weight_decay", options.effective_weight_decay if role is Role.DECAY else 0.0)
        group = {
            "name": role.name.lower()
            + (f" {table['match']}" if table else "")
            + (f" x{scale:g}" if scale != 1 else ""),
            "params": params,
            "weight_decay": float(decay) / scale if scale != 1 else decay,
            "adapt": role is not Role.PLAIN,
        }
        if "lr_scale" in table or scale != 1:
            group["lr"] = options.lr * float(table.get("lr_scale", 1.0)) * scale
        if "frozen_until_step" in table:
            group["frozen_until_step"] = int(table["frozen_until_step"])
        groups.append(group)
    if not groups:
        raise ConfigError(
            given=f"{type(model).__name__} has no parameter that requires a gradient",
            rule="an optimizer needs something to train",
            consequence="training would change nothing",
            nearest="requires_grad_(True) on the layers to train",
        )
    return groups


def _match_groups(names: Iterable[str], tables: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """For each name the index of the first table whose pattern matches it; ``len(tables)`` where none does.

    Raises ConfigError for a table that gets no parameter.
    """
    names, patterns = list(names), [str(table["match"]) for table in tables]
    matches = {
        name: next((n for n, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), len(tables))
        for name in names
    }
    problems = [
        empty_pattern(pattern, patterns, names, "optim.groups")
        for number, pattern in enumerate(patterns)
        if number not in matches.values()
    ]
    if problems:
        raise ConfigError(*problems)
    return matches


def state_names(options: OptimOptions) -> tuple[str, ...]:
    """Names of the state tensors of each parameter; ``step`` is 0-dim, the others have the parameter's shape."""
    if options.kind in ("sgd", "lars"):
        return MOMENTUM_STATE if options.momentum else ()
    return ADAM_STATE


def build_optimizer(
    model: nn.Module,
    options: OptimOptions,
    *,
    sharded_params: Mapping[str, nn.Parameter] | None = None,
    named_roles: Mapping[str, Role] | None = None,
    lr_scales: Mapping[str, float] | None = None,
    global_norms: GlobalNorms | None = None,
) -> Optimizer:
    """Build the optimizer of a model, with all state allocated and steps that can be skipped on the device.

    ``adam`` adds ``weight_decay * w`` to the gradient before the moments (L2); ``adamw`` multiplies the weight by
    ``1 - lr * weight_decay`` (decoupled). torch's fused kernels are used if they support the device, dtype and layout of all
    parameters; without them a skippable step costs a copy of the state. See ``make_skippable``.

    Args:
        model: The model whose trainable parameters are updated, or a part of it.
        options: Kind of optimizer and its constants. Clipping and freezing are left to the caller: ``clip_norm``, ``freeze`` and
            ``frozen_until_step`` are not read.
        sharded_params: This rank's shards of the parameters, by name, which are updated; default the model's parameters.
        named_roles: Roles of the global model's parameters, if ``model`` is only a part of it.
        lr_scales: Factors of the learning rate by parameter name; see ``param_groups``.
        global_norms: For LAMB and LARS: maps shards and their norms [n] to the norms [n] of the global parameters.

    Raises:
        ConfigError: The kind is unknown, or the model has no trainable parameter.

    Source:
        Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (AdamW), You et al. 2017 and 2020 (LARS, LAMB).
    """
    groups = param_groups(model, options, sharded_params, named_roles, lr_scales)
    betas = (options.beta1, options.beta2)
    params = [p for group in groups for p in group["params"]]
    fused = kernels.fused_supported(params, momentum_kernel=options.kind == "sgd")
    # fused=None lets torch choose between foreach and a loop, by device
    match options.kind:
        case "lamb":
            return Lamb(groups, lr=options.lr, betas=betas, eps=options.eps, global_norms=global_norms)
        case "lars":
            trust = options.trust_coefficient
            return Lars(
                groups, lr=options.lr, momentum=options.momentum, trust_coefficient=trust, global_norms=global_norms
            )
        case "sgd":
            optimizer = torch.optim.SGD(
                groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov, fused=fused or None
            )
        case "adam":
            optimizer = torch.optim.Adam(groups, lr=options.lr, betas=betas, eps=options.eps, fused=fused or None)
        case "adamw":
            optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, fused=fused or None)
        case _:
            raise ConfigError(
                given=f"optimizer kind {options.kind!r}",
                rule="the kind is one of " + ", ".join(OPTIMIZER_FIELDS),
                consequence="there is no optimizer",
                nearest=nearest_name(options.kind, OPTIMIZER_FIELDS),
            )
    for group in optimizer.param_groups:
        group["state"] = state_names(options)
        for parameter in group["params"]:
            create_state(optimizer, group, parameter)
    return make_skippable(optimizer)

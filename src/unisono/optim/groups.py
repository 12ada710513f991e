"""Roles of parameters in weight decay and layer-wise rates.

* ``PLAIN``, no decay and no layer-wise rate (LAMB, LARS): parameters with fewer than two dims, those named ``bias``,
  ``*_bias`` or ``bias_*``, and all that belong directly to a norm: a module whose class, or a base of it, is named
  ``*Norm``, ``*Norm2d`` and the like.
* ``NO_DECAY``: parameters that belong directly to an embedding (a class named ``*Embedding`` or ``*EmbeddingBag``) or
  match a pattern of ``decay_exclude``. An output head tied to an embedding is that embedding.
* ``DECAY``: all others, which are the matrices and convolution kernels.

A parameter used in several places counts once, under its first name, with the highest role of its places. Parameters that do
not require gradients are left out. Positions or class tokens that are a bare ``nn.Parameter`` of two or more dims look like
matrices: name them in ``decay_exclude``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from unisono.errors import ConfigError, Problem, nearest_name

_NORM = re.compile(r"Norm(\dd)?$", re.IGNORECASE)
_EMBEDDING = re.compile(r"Embedding(Bag)?$")
_BIAS = re.compile(r"(^|_)bias(_|$)")


class Role(IntEnum):
    """Treatment of a parameter; the highest role of its places counts."""

    DECAY = 0
    NO_DECAY = 1
    PLAIN = 2  # neither decay nor a layer-wise rate


def parameter_roles(model: nn.Module, decay_exclude: Sequence[str] = ()) -> dict[str, Role]:
    """Role of every trainable parameter by its first name, sorted by name.

    Args:
        decay_exclude: Patterns (``fnmatch``) of names of further parameters without decay.

    Raises:
        ConfigError: A pattern matches no parameter.

    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    >>> {name: role.name for name, role in parameter_roles(model).items()}
    {'0.weight': 'NO_DECAY', '1.bias': 'PLAIN', '1.weight': 'DECAY', '2.bias': 'PLAIN', '2.weight': 'PLAIN'}
    """
    first_name: dict[nn.Parameter, str] = {}
    roles: dict[str, Role] = {}
    matched: set[str] = set()
    all_names: list[str] = []
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    for path, module in modules:
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            all_names.append(name)
            hits = {pattern for pattern in decay_exclude if fnmatchcase(name, pattern)}
            matched |= hits
            if parameter.requires_grad:
                role = max(_role(module, leaf, parameter), Role.NO_DECAY if hits else Role.DECAY)
                first = first_name.setdefault(parameter, name)
                roles[first] = max(role, roles.get(first, role))
    unmatched = [
        Problem(
            given=f"decay_exclude has {pattern!r}",
            rule="each pattern names at least one parameter",
            consequence="it would exclude nothing",
            nearest=nearest_name(pattern, all_names),
        )
        for pattern in decay_exclude
        if pattern not in matched
    ]
    if unmatched:
        raise ConfigError(*unmatched)
    return dict(sorted(roles.items()))


def is_norm(module: nn.Module) -> bool:
    """Whether the name of the module's class, or of a base class, ends in ``Norm``, ``Norm2d`` and the like."""
    return any(_NORM.search(base.__name__) for base in type(module).__mro__)


def _role(module: nn.Module, leaf: str, parameter: nn.Parameter) -> Role:
    classes = [base.__name__ for base in type(module).__mro__]
    if parameter.ndim < 2 or _BIAS.search(leaf) or is_norm(module):
        return Role.PLAIN
    return Role.NO_DECAY if any(_EMBEDDING.search(name) for name in classes) else Role.DECAY

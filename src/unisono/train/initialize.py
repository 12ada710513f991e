"""Initial values of parameters by name, the same whatever the number of ranks and the order of the modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import xxhash
from torch import Tensor, nn

from unisono.errors import ConfigError, Problem
from unisono.models.init_rules import KINDS, InitRule, rule_problems
from unisono.optim.run_optimizer import empty_pattern

# kinds that need the fans of a weight
_OF_MATRICES = ("xavier", "msra_prelu", "orthogonal")


@torch.no_grad()
def initialize(module: nn.Module, rules: Sequence[InitRule], *, seed: int) -> nn.Module:
    """Set parameters of ``module`` by rules, of which the first match wins, and return the module.

    The values of a parameter depend on its first name, its shape, its rule and ``seed`` alone. Parameters that no rule matches
    keep theirs. Of the kinds that need fans (``xavier``, ``msra_prelu``, ``orthogonal``) biases get zeros, as in MXNet, and other
    weights with fewer than two dims, such as those of norms, keep their values. Draws happen on the CPU in float32.

    Args:
        module: A module with values, or one that is being built by a function that the ``Trainer`` was given. Before it is
            wrapped or sharded.
        rules: Tables of ``match`` (``fnmatch`` on the names of ``named_parameters``), ``kind`` and constants; see
            ``models.init_rules``.
        seed: Any integer.

    Raises:
        ConfigError: A rule is wrong, changes no parameter, or would set a parameter on the meta device.

    Source: ``mxnet.initializer`` of Apache MXNet 1.9.

    >>> net = initialize(nn.Linear(3, 2), [{"match": "*", "kind": "xavier", "factor": "in", "magnitude": 2.34}], seed=0)
    >>> float(net.bias.abs().sum()), bool(net.weight.abs().max() < (2.34 / 3) ** 0.5)
    (0.0, True)
    """
    problems = list(rule_problems(rules))
    if problems:
        raise ConfigError(*problems)
    parameters = dict(module.named_parameters())
    patterns = [str(rule["match"]) for rule in rules]
    unused = set(range(len(rules)))
    generator = torch.Generator()
    for name, parameter in parameters.items():
        number = next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), None)
        if number is None:
            continue
        if parameter.is_meta:
            raise _without_storage(name)
        values = _values(name, parameter, rules[number], generator, seed)
        if values is not None:
            parameter.copy_(values)
            unused.discard(number)
    for number in sorted(unused):
        matching = [name for name in parameters if fnmatchcase(name, patterns[number])]
        mine = [name for name in matching if not any(fnmatchcase(name, pattern) for pattern in patterns[:number])]
        problems.append(
            _only_vectors(mine[0], parameters[mine[0]], rules[number])
            if mine
            else empty_pattern(patterns[number], patterns[:number], list(parameters), "the table of initial values")
        )
    if problems:
        raise ConfigError(*problems)
    return module


def _values(name: str, parameter: Tensor, rule: InitRule, generator: torch.Generator, seed: int) -> Tensor | None:
    """The new values of a parameter in float32 on the CPU; None where it keeps its own."""
    kind = str(rule["kind"])
    constants = {**KINDS[kind], **rule}
    shape = parameter.shape
    if kind in _OF_MATRICES and len(shape) < 2:
        leaf = name.rpartition(".")[2]
        return (
            torch.zeros(shape, device="cpu")
            if leaf == "bias" or leaf.endswith("_bias") or leaf.startswith("bias_")
            else None
        )

    def number(key: str) -> float:
        value = constants[key]
        assert isinstance(value, int | float)  # rule_problems
        return float(value)

    if kind in ("constant", "zeros", "ones"):
        return torch.full(shape, number("value") if kind == "constant" else float(kind == "ones"), device="cpu")
    generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed % 2**64) >> 1)
    values = torch.empty(shape, device="cpu")
    if kind == "normal":
        return values.normal_(0.0, number("std"), generator=generator)
    if kind == "uniform":
        return values.uniform_(-number("scale"), number("scale"), generator=generator)
    gaussian = kind == "msra_prelu" or constants["distribution"] == "gaussian"
    if kind == "orthogonal":
        flat = values.reshape(shape[0], -1)
        flat = flat.normal_(generator=generator) if gaussian else flat.uniform_(-1.0, 1.0, generator=generator)
        left, _, right = torch.linalg.svd(flat, full_matrices=False)
        return number("scale") * (left if left.shape == flat.shape else right).reshape(shape)
    receptive = math.prod(shape[2:])
    fans = {"in": shape[1] * receptive, "out": shape[0] * receptive}
    fan = fans.get(str(constants["factor"]), sum(fans.values()) / 2)
    magnitude = 2.0 / (1.0 + number("slope") ** 2) if kind == "msra_prelu" else number("magnitude")
    scale = math.sqrt(magnitude / fan)
    if gaussian:
        return values.normal_(0.0, scale, generator=generator)
    return values.uniform_(-scale, scale, generator=generator)


def _only_vectors(name: str, parameter: Tensor, rule: InitRule) -> Problem:
    return Problem(
        given=f"initial values of kind {rule['kind']!r} for {rule['match']!r}, which matches only {name} {list(parameter.shape)}",
        rule="their scale comes from the two dims of a matrix or a convolution kernel",
        consequence="it would change nothing",
        nearest="kind = 'normal', 'constant', 'zeros' or 'ones'",
    )


def _without_storage(name: str) -> ConfigError:
    return ConfigError(
        given=f"initial values for {name}, which is on the meta device",
        rule="a parameter that gets values has memory for them",
        consequence="they would be lost, so nothing was set",
        nearest="module.to_empty(device=...) before, or a function that builds the module on the CPU, for the Trainer",
    )

"""The optimizer of ``unisono.optim`` on a server, one per chunk.

Workers send its options and each key's role as JSON, no code (MXNet's servers unpickle an optimizer). State and kernels
of a chunk are those of one process: elementwise optimizers give the same bits for chunks as for whole keys, and for
LAMB and LARS keys stay whole. Workers clip, because they see whole gradients; ``clip_norm`` is ignored here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import load_config
from unisono.errors import CommError, ConfigError, nearest_name
from unisono.optim import OptimOptions, build_optimizer, state_tensors
from unisono.optim.groups import Role

LAYERWISE_OPTIMIZERS = ("lamb", "lars")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptimizerSpec:
    """The optimizer, the role of each trained key, and whether stale gradients make smaller steps.

    ``staleness_lr_decay``: a gradient computed before tau pushes of other workers is applied with lr / (1 + tau)
    (staleness-aware SGD, Zhang et al. 2016, arXiv:1511.05950).
    """

    options: OptimOptions
    roles: Mapping[str, Role]
    staleness_lr_decay: bool = False

    def to_json(self) -> dict[str, Any]:
        options = {name: value for name, value in asdict(self.options).items() if value is not None}
        return {  # sent and stored names of the first release
            "options": options | {"decay_exclude": list(self.options.decay_exclude)},
            "roles": {key: role.name for key, role in self.roles.items()},
            "damped": self.staleness_lr_decay,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> ServerOptimizerSpec:
        """The inverse of ``to_json``. Raises ConfigError with all problems."""
        try:
            options, named, damped = given["options"], given["roles"], given["damped"]
            roles = {str(key): Role[role] for key, role in named.items()}
            planned = {str(name): value for name, value in options.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                given=f"an optimizer for the servers that cannot be read: {error!r}",
                rule="it is an object of options, roles (DECAY, NO_DECAY or PLAIN by key) and damped (staleness_lr_decay)",
                consequence="the servers have no optimizer",
                nearest="set_optimizer of the store makes it",
            ) from error
        return cls(
            options=load_config(OptimOptions, planned=planned).value, roles=roles, staleness_lr_decay=bool(damped)
        )


class ChunkOptimizer:
    """The optimizer of one chunk; ``value`` [elements] is updated in place. Not thread-safe."""

    def __init__(self, spec: ServerOptimizerSpec, key: str, value: nn.Parameter) -> None:
        if key not in spec.roles:
            nearest = nearest_name(key, spec.roles) if spec.roles else "name keys in set_optimizer"
            raise refused(f"a gradient of {key!r}", "the optimizer names every key that is trained", nearest)
        self.spec, self._key, self._value = spec, key, value
        self._optimizer = self._build(value)
        self.state: dict[str, Tensor] = self._state_of(value, self._optimizer)

    def step(self, gradient: Tensor, lr: float, rows: Tensor | None = None) -> None:
        """Apply ``gradient`` [elements], or of ``rows`` [n] only [n, row elements]: other rows keep value and moments."""
        if rows is None:
            self._advance(self._optimizer, self._value, gradient, lr)
            return
        table = self._value.detach().view(-1, gradient.shape[1])
        part = nn.Parameter(table[rows].flatten())
        optimizer = self._build(part)
        mine = self._state_of(part, optimizer)
        for name, whole in self.state.items():
            mine[name].copy_(whole.view(table.shape)[rows].flatten() if whole.ndim else whole)
        self._advance(optimizer, part, gradient.flatten(), lr)
        table[rows] = part.detach().view_as(gradient)
        for name, whole in self.state.items():
            if whole.ndim:
                whole.view(table.shape)[rows] = mine[name].view_as(gradient)
            else:
                whole.copy_(mine[name])

    def _build(self, value: nn.Parameter) -> torch.optim.Optimizer:
        roles = {self._key: self.spec.roles[self._key]}
        return build_optimizer(nn.Module(), self.spec.options, sharded_params={self._key: value}, named_roles=roles)

    def _state_of(self, value: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimizer's tensors by state name."""
        return {name.split("/")[1]: tensor for name, tensor in state_tensors({self._key: value}, optimizer).items()}

    def _advance(self, optimizer: torch.optim.Optimizer, value: nn.Parameter, gradient: Tensor, lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        value.grad = gradient
        optimizer.step()
        value.grad = None


def effective_learning_rate(spec: ServerOptimizerSpec, lr: float, lag: int) -> float:
    """The learning rate of a push. ``lr``: its own, NaN for the spec's. Raises CommError for a negative or infinite
    rate."""
    rate = spec.options.lr if math.isnan(lr) else lr
    if not 0.0 <= rate < math.inf:
        rule = "a learning rate is finite and at least 0; NaN asks for the optimizer's own"
        raise refused(f"a push with learning rate {lr}", rule, "the schedule's value at this step")
    return rate / (1 + lag) if spec.staleness_lr_decay else rate


def refused(given: str, rule: str, nearest: str) -> CommError:
    """The error of a request that changed nothing."""
    return CommError(given=given, rule=rule, consequence="nothing was changed", nearest=nearest)

"""The values of one process and the optimizer that updates them.

Every key has its own optimizer, so keys may be updated in any order. A store knows names and shapes but no modules:
tensors of two or more dims decay; others, and those whose name ends in ``bias``, do not. List embeddings in
``decay_exclude``. The gradient norm over all keys is unknown here, so ``clip_norm`` has to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.config import load_config
from unisono.errors import CheckpointError, ConfigError, Problem
from unisono.kvstore.keys import Future, PushValue, SparseRows, as_sparse_rows, to_dense
from unisono.optim import build_optimizer, load_state_tensors, state_tensors
from unisono.optim.groups import Role
from unisono.optim.options import OPTIMIZER_FIELDS, OptimOptions

Updater = Callable[[str, Tensor, Tensor], object]
"""``updater(key, sum, stored)`` changes the stored tensor in place."""


class ValueStore:
    """Tensors by key. A sum replaces the tensor under its key or, with an optimizer, updates it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._options: OptimOptions | None = None
        self._lr: float | None = None
        self._optimizers: dict[str, tuple[nn.Parameter, Optimizer]] = {}
        self._updater: Updater | None = None

    @property
    def has_optimizer(self) -> bool:
        return self._options is not None

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Take ownership of these tensors."""
        self.tensors |= values
        if self._options is not None:
            self._build(self._options, values)

    @torch.no_grad()
    def apply(self, key: str, total: PushValue) -> None:
        """Apply ``total``, the sum over devices and workers. It is read, not stored."""
        stored = self.tensors[key]
        if not isinstance(total, Tensor):
            total = to_dense(as_sparse_rows(key, total, stored.shape), stored.shape)
        if self._updater is not None:
            self._updater(key, total.to(stored.device).view(stored.shape), stored)
            return
        if self._options is None:
            stored.copy_(total)
            return
        parameter, optimizer = self._optimizers[key]
        parameter.grad = total.to(stored.device).view(stored.shape)
        optimizer.step()
        parameter.grad = None

    def copy_to(self, items: Sequence[tuple[str, list[Tensor]]]) -> Future[None]:
        """Write each key's tensor into its targets."""
        for key, targets in items:
            for target in targets:
                target.copy_(self.tensors[key])
        return Future(lambda: None)

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        """Copies of the rows ``ids``."""
        stored = self.tensors[key]
        rows = SparseRows(ids, stored.index_select(0, ids.to(stored.device)))
        return Future(lambda: rows)

    def set_optimizer(self, options: OptimOptions) -> None:
        """Treat later sums as gradients; the state of a previous optimizer is dropped."""
        self._options, self._lr, self._optimizers, self._updater = options, None, {}, None
        self._build(options, self.tensors)

    def set_updater(self, updater: Updater) -> None:
        """Let ``updater`` change the stored tensor in place; a previous optimizer and its state are dropped."""
        self._options, self._lr, self._optimizers, self._updater = None, None, {}, updater

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all later updates. Raises ConfigError without an optimizer."""
        if self._options is None:
            raise learning_rate_without_optimizer(lr)
        self._lr = lr
        for _, optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Tensor]:
        """``value/<key>`` and ``optim/<state>/<key>``: the live tensors, not copies."""
        state = {f"value/{key}": value for key, value in self.tensors.items()}
        for key, (parameter, optimizer) in self._optimizers.items():
            state |= state_tensors({key: parameter}, optimizer)
        return dict(sorted(state.items()))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of the same keys and optimizer into the live tensors. Raises CheckpointError for any difference."""
        current = self.state_dict()
        differing = sorted(
            name
            for name in current.keys() | state.keys()
            if name not in current
            or name not in state
            or (current[name].shape, current[name].dtype) != (state[name].shape, state[name].dtype)
        )
        if differing:
            raise CheckpointError(
                given=f"the saved state and this store differ in {', '.join(map(repr, differing[:5]))}"
                + (f" and {len(differing) - 5} more" if len(differing) > 5 else ""),
                rule="names, shapes and dtypes of values and optimizer state are those of the store that was saved",
                consequence="nothing was loaded",
                nearest="init the same keys and set the same optimizer before load_state_dict",
            )
        for key, value in self.tensors.items():
            value.copy_(state[f"value/{key}"])
        for key, (parameter, optimizer) in self._optimizers.items():
            names = state_tensors({key: parameter}, optimizer)
            load_state_tensors({key: parameter}, optimizer, {name: state[name] for name in names})

    def _build(self, options: OptimOptions, values: Mapping[str, Tensor]) -> None:
        require_floating(values)
        for key, value in values.items():
            parameter = nn.Parameter(value)
            with torch.enable_grad():
                optimizer = build_optimizer(
                    nn.Module(),
                    options,
                    sharded_params={key: parameter},
                    named_roles={key: role_of(key, value.shape, options)},
                )
            self._optimizers[key] = parameter, optimizer
        if self._lr is not None:
            self.set_learning_rate(self._lr)


def role_of(key: str, shape: Sequence[int], options: OptimOptions) -> Role:
    """Whether a key decays, from its name and shape."""
    if len(shape) < 2 or key.endswith("bias"):
        return Role.PLAIN
    return Role.NO_DECAY if any(fnmatchcase(key, pattern) for pattern in options.decay_exclude) else Role.DECAY


def require_floating(values: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a key that no optimizer can update."""
    for key, value in values.items():
        if not value.is_floating_point():
            raise ConfigError(
                given=f"an optimizer for key {key!r} of dtype {value.dtype}",
                rule="an optimizer updates floating point values",
                consequence="no optimizer was set for it",
                nearest="keep whole numbers in a store without an optimizer",
            )


def learning_rate_without_optimizer(lr: float) -> ConfigError:
    return ConfigError(
        given=f"set_learning_rate({lr:g}) on a store without an optimizer",
        rule="a learning rate belongs to the store's optimizer",
        consequence="it would change no update",
        nearest="set_optimizer('sgd', lr=...) first",
    )


def optimizer_options(optimizer: Any, hyper: Mapping[str, Any]) -> OptimOptions:
    """Validated options. Raises ConfigError for unknown names, values out of range, options without effect, and anything but
    a name or options."""
    if not isinstance(optimizer, OptimOptions | str):
        raise ConfigError(
            given=f"set_optimizer of {_described(optimizer)}",
            rule="a store builds an optimizer of its own for each key, on each worker or server, from options",
            consequence="no optimizer was set",
            nearest=_nearest_options(optimizer),
        )
    if isinstance(optimizer, str):
        optimizer = load_config(OptimOptions, planned={"kind": optimizer, "clip_norm": 0.0, **hyper}).value
    elif hyper:
        raise ConfigError(
            given=f"OptimOptions together with {', '.join(sorted(hyper))}",
            rule="hyper-parameters are given in the options, or with an optimizer's name",
            consequence="no optimizer was set",
            nearest=f"set_optimizer({optimizer.kind!r}, ...)",
        )
    problems = [problem for _, problem in optimizer.problems()]
    if optimizer.clip_norm:
        problems.append(
            Problem(
                given=f"clip_norm = {optimizer.clip_norm:g} for a store's optimizer",
                rule="a store updates key by key and never knows the norm of the whole gradient",
                consequence="it would clip nothing",
                nearest="clip_norm = 0, and clip before push",
            )
        )
    if problems:
        raise ConfigError(*problems)
    return optimizer


def _described(optimizer: object) -> str:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" + (", a class" if isinstance(optimizer, type) else "")


def _nearest_options(optimizer: object) -> str:
    """The call with options like those of torch's optimizer."""
    kind = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__.lower()
    if kind not in OPTIMIZER_FIELDS:
        return f"OptimOptions(kind=..., clip_norm=0.0) with {', '.join(OPTIMIZER_FIELDS)}; or set_updater, where a worker updates"
    group = optimizer.param_groups[0] if isinstance(optimizer, Optimizer) else {}
    values: dict[str, Any] = {name: group[name] for name in ("lr", "momentum", "weight_decay") if name in group}
    if "betas" in group:
        values |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
    shown = "".join(f", {name}={value!r}" for name, value in values.items())
    return f"set_optimizer({kind!r}{shown or ', lr=...'})"

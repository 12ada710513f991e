"""The optimizer of a model in a loop of your own: gradients summed over ranks, guarded steps, clipping, and a loss scale.

These are the parts that the ``Trainer`` works with (``kvstore.GradientSync``, ``StepGuard``, ``LossScaler``, ``optim``), put
together for programs that no trainer is: several models, several optimizers, several losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.dist import World
from unisono.errors import ConfigError, Problem
from unisono.kvstore import create_kvstore
from unisono.optim import clip_coefficient, global_norm, make_skippable
from unisono.optim.run_optimizer import RunOptimizer, try_optimizer
from unisono.train.guard import StepGuard
from unisono.train.loss_scaler import LossScaler


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step of a ``GuardedOptimizer`` did.

    ``stats`` [5] is on the device: loss, gradient norm, 1 if the step counted, weight, number of backward passes. The properties
    wait for it.
    """

    stats: Tensor

    def __repr__(self) -> str:
        return f"StepResult(loss={float(self.stats[0]):.4g}, grad_norm={self.grad_norm:.4g}, skipped={self.skipped})"

    @property
    def loss(self) -> float:
        """Sum of the losses over the sum of the weights, over all ranks. Raises ConfigError if no rank had a backward pass."""
        stats = self.stats.tolist()
        if not stats[4]:
            raise _no_backward("of any rank")
        return stats[0]

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient of that loss, before clipping."""
        return float(self.stats[1])

    @property
    def skipped(self) -> bool:
        """Whether the guard refused the step, which then changed nothing."""
        return not bool(self.stats[2])


class GuardedOptimizer:
    """Makes the steps of ``optimizer``, the same on all ranks.

    A step uses the gradient of (sum of losses) / (sum of weights) over all backward passes and ranks, so neither micro-batches
    nor ranks change it. A step whose loss or gradient norm is not finite leaves parameters and optimizer state unchanged bit for
    bit on every rank. Nothing waits for the device. Constructor and ``step`` are collectives.

    Example::

        optimizer = GuardedOptimizer(net, torch.optim.Adam(net.parameters()), world, clip_norm=1.0)
        for batch in loader.iterate(0, 100):
            for part in batch.micro_batches:
                losses = torch.nn.functional.cross_entropy(net(part["inputs"]), part["targets"], reduction="none")
                optimizer.backward(losses.sum(), len(losses))
            optimizer.step()

    Args:
        model: The module whose parameters the optimizer has, on its device; several as an ``nn.ModuleDict``. Rank 0's parameters
            and buffers are copied to all ranks.
        optimizer: A ``torch.optim`` optimizer of these parameters. Its learning rates may change between steps.
        world: The ranks.
        clip_norm: Largest global gradient norm; 0: no clipping.
        guard: Decides which steps count. Default: a ``StepGuard`` that refuses non-finite losses and norms.
        scaler: The loss scale, for fp16. Default: none.
        expected_weight: About the weight of a whole step, by which summed losses are divided before the backward pass. It changes
            nothing but the range of the scaled gradients, which fp16 is short of.

    Attributes:
        guard: The guard in use.
        scaler: The loss scale in use.

    Raises:
        ConfigError: The optimizer has other parameters than those of the model that require gradients, or cannot be used with
            dense gradients and without a closure; or the model is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        *,
        clip_norm: float = 0.0,
        guard: StepGuard | None = None,
        scaler: LossScaler | None = None,
        expected_weight: float = 1.0,
    ) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _require_whole(parameters)
        _require_same_parameters(optimizer, parameters)
        try_optimizer(optimizer)
        device = next(iter(parameters.values())).device
        self.guard = guard or StepGuard(device)
        self.scaler = scaler or LossScaler(device, init_scale=1.0, dynamic=False)
        self._model, self._torch_optimizer, self._world = model, optimizer, world
        self._optimizer = RunOptimizer([make_skippable(optimizer)])
        self._parameters = list(parameters.values())
        self._clip_norm, self._expected_weight = clip_norm, expected_weight
        self._store = create_kvstore("dist_sync", world)
        self._store.broadcast(model.state_dict())
        self._sync = self._store.gradients(parameters)
        # loss sum, weight, backward passes
        self._totals = torch.zeros(3, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._sent = self._has_part = False

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._parameters)
        parts = f"{type(self._model).__name__}, {type(self._torch_optimizer).__name__}, {count} parameters"
        return f"GuardedOptimizer({parts}, clip_norm={self._clip_norm:g}, {self._world})"

    def backward(self, loss_sum: Tensor, weight: Tensor | float, *, last: bool = False) -> None:
        """Add the gradient of ``loss_sum`` to this step. Gradients of other parameters than the optimizer's do not change.

        Args:
            loss_sum: 0-dim, the sum of losses of this rank's samples.
            weight: The number of samples (or tokens, or the sum of their weights) in it.
            last: Whether no other backward pass of this step follows. Then gradients are sent while it runs.

        Raises:
            ConfigError: A backward pass of this step was the last.
        """
        if self._sent:
            raise ConfigError(
                given="backward after backward(last=True) of the same step",
                rule="gradients are sent during the last backward pass of a step",
                consequence="some would be summed over the ranks without the new part, so nothing was added",
                nearest="step() before, or last=True in the last call only",
            )
        self._has_part = True
        parts = (loss_sum.detach(), torch.as_tensor(weight), torch.ones((), device=self._totals.device))
        self._totals += torch.stack([part.to(self._totals) for part in parts])
        if last:
            self._sent = True
            self._sync.prepare_last_backward()
        self.scaler.scale(loss_sum / self._expected_weight).backward(inputs=self._parameters)

    @torch.no_grad()
    def step(self) -> StepResult:
        """Sum gradients over the ranks and update the parameters, or skip the step on all of them. Gradients are then zero.

        A rank without samples calls it too.

        Raises:
            ConfigError: There is one rank, and ``backward`` was not called since the last step. With several ranks, reading
                ``StepResult.loss`` raises it if none called it.
            CommError: A rank is lost.
        """
        if self._world.world_size == 1 and not self._has_part:
            raise _no_backward("of this step")
        totals, self._sent, self._has_part = self._totals, False, False
        self._sync.wait(totals)
        loss, weight = totals[0] / totals[1], totals[1]
        divisor = (self.scaler.value * weight / self._expected_weight).float()
        norm = global_norm(self._sync.gradients()) / divisor
        good = self.guard.accept(loss, norm)
        self._optimizer.step(divisor / clip_coefficient(norm, self._clip_norm), (~good).float())
        self.scaler.update(~norm.isfinite())
        self._sync.zero_grad()
        stats = torch.stack([value.to(totals.dtype) for value in (loss, norm, good, weight, totals[2])])
        totals.zero_()
        self._share_buffers()
        return StepResult(stats)

    def state_dict(self) -> dict[str, Any]:
        """The live state of the model, the optimizer, the guard and the loss scale."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._torch_optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the values of a ``state_dict``."""
        self._model.load_state_dict(state["model"])
        self._torch_optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Drop the gradients. Not a collective."""
        self._sync.close()
        self._store.close()

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, such as the running statistics of batch norm: each rank saw other samples."""
        if self._world.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = self._world.broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]))
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))


def _require_whole(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError for shards."""
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                given=f"parameter {name!r}, which is a DTensor",
                rule="a guarded optimizer sums gradients of whole parameters over all ranks",
                consequence="the gradients of shards would be summed twice or not at all",
                nearest="a Trainer with plan.dp_shard or plan.tp, or a model that is not sharded",
            )


def _require_same_parameters(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError unless the optimizer has these parameters."""
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    kind = type(optimizer).__name__
    problems = [
        Problem(
            given=f"parameter {name!r}, which {kind} does not have",
            rule="a guarded optimizer has all parameters of its model that require gradients",
            consequence="it would never change",
            nearest="requires_grad_(False) on it, or an optimizer that was made of it too",
        )
        for name, parameter in parameters.items()
        if parameter not in owned
    ]
    foreign = len(owned - set(parameters.values()))
    if foreign:
        problems.append(
            Problem(
                given=f"{kind} with {foreign} parameters that the model does not have, or that require no gradient",
                rule="a guarded optimizer has all parameters of its model that require gradients",
                consequence="their gradients would not be summed over the ranks",
                nearest="the model itself; several models as torch.nn.ModuleDict",
            )
        )
    if problems or not parameters:
        raise ConfigError(*problems or [_nothing_to_train(kind)])


def _no_backward(whose: str) -> ConfigError:
    return ConfigError(
        given=f"step() without a backward pass {whose}",
        rule="the gradients of a step are those of GuardedOptimizer.backward(loss_sum, weight)",
        consequence="there is no gradient of this step, so nothing was changed",
        nearest="optimizer.backward(losses.sum(), len(losses)) in place of loss.backward()",
    )


def _nothing_to_train(kind: str) -> Problem:
    return Problem(
        given=f"{kind} for a model without parameters that require gradients",
        rule="a guarded optimizer has something to change",
        consequence="its steps would do nothing",
        nearest="requires_grad_(True) on what is to be trained",
    )

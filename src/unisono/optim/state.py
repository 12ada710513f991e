"""Optimizer state as named tensors, so that a checkpoint stores it like parameters.

State exists from the start instead of from the first step: a fresh process can load into it, and a first step that is
skipped leaves it alone. For torch's optimizers this writes down what their first step would create; zero is the same
start (momentum ``0 * m + g`` is ``g``), and tests hold the two equal bit for bit. Every group of ``build_optimizer``
says in ``"state"`` which tensors its parameters have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import CheckpointError, Problem, nearest_name
from unisono.optim.skippable import non_tensor_state

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
MOMENTUM_STATE = ("momentum_buffer",)


def create_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """The parameter's state, made of zeros if it was not there."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    for name in group["state"]:
        if name not in state:
            state[name] = _zero(name, group, parameter)
    return state


def _zero(name: str, group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
    if name == "step":
        return torch.zeros((), dtype=torch.float32, device=_state_device(name, group, parameter))
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype, memory_format=torch.preserve_format)


NamedParameters = nn.Module | Mapping[str, nn.Parameter]


def state_tensors(model: NamedParameters, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything in the optimizer that changes while training, as ``optim/<state>/<parameter name>``, sorted.

    The tensors are the optimizer's own, not copies. Hyper-parameters come from the configuration and the learning rate
    from the schedule. ``model`` may be its parameters, or a rank's pieces of them, by name. An optimizer made elsewhere has
    what its steps created so far. Raises ``CheckpointError`` for
    parameters that are not the model's and for state that is no tensor.
    """
    found: dict[str, Tensor] = {}
    for name, (group, parameter) in _owners(model, optimizer).items():
        if "state" in group:
            create_state(optimizer, group, parameter)
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(non_tensor_state(optimizer, state, value))
            found[f"optim/{state}/{name}"] = value
    return dict(sorted(found.items()))


@torch.no_grad()
def load_state_tensors(model: NamedParameters, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved state into the optimizer; names, shapes and dtypes must be exactly those of ``state_tensors``.

    An optimizer made elsewhere that has no state yet takes what was saved for its parameters. Raises
    ``CheckpointError`` with every mismatch, before anything is changed.
    """
    owners = _owners(model, optimizer)
    own = state_tensors(model, optimizer)
    fresh: dict[str, Tensor] = {}
    for name in tensors.keys() - own.keys():
        _, _, rest = name.partition("/")
        state, _, of = rest.partition("/")
        group, parameter = owners.get(of, ({"state": ()}, None))
        if parameter is not None and "state" not in group and not optimizer.state.get(parameter):
            fresh[name] = torch.empty_like(tensors[name], device=_state_device(state, group, parameter))
    known = own | fresh
    problems = [_missing(name) for name in own if name not in tensors]
    problems += [_unexpected(name, known) for name in tensors if name not in known]
    problems += [
        _different(name, tensors[name], tensor)
        for name, tensor in own.items()
        if name in tensors and (tensors[name].shape, tensors[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if problems:
        raise CheckpointError(*problems)
    for name, tensor in fresh.items():
        _, state, of = name.split("/", 2)
        optimizer.state[owners[of][1]][state] = tensor
    for name, tensor in known.items():
        tensor.copy_(tensors[name])


def _owners(model: NamedParameters, optimizer: Optimizer) -> dict[str, tuple[Mapping[str, Any], nn.Parameter]]:
    """Group and parameter by parameter name."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    first_name = {parameter: name for name, parameter in named}
    owners: dict[str, tuple[Mapping[str, Any], nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in first_name:
                raise CheckpointError(_of_another_model(optimizer, model))
            owners[first_name[parameter]] = group, parameter
    return owners


def _state_device(state: str, group: Mapping[str, Any], parameter: nn.Parameter) -> torch.device:
    """Where torch keeps it: step counts beside the parameter for fused and capturable groups, else on the host."""
    on_host = state == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


_CONSEQUENCE = "continuing would not be the same run, so nothing was loaded"


def _of_another_model(optimizer: Optimizer, model: NamedParameters) -> Problem:
    return Problem(
        given=f"optimizer {type(optimizer).__name__} has a parameter that {type(model).__name__} has not",
        rule="state is named after the model's parameters",
        consequence="the optimizer cannot be saved or loaded",
        nearest="make the optimizer from this model's parameters, after moving or replacing them",
    )


def _missing(name: str) -> Problem:
    return Problem(
        given=f"the saved state has no {name!r}",
        rule="every tensor of the optimizer's state is loaded",
        consequence=_CONSEQUENCE,
        nearest="resume with the optimizer and the model that wrote it, or start a new run from the weights alone",
    )


def _unexpected(name: str, own: Mapping[str, Tensor]) -> Problem:
    return Problem(
        given=f"the saved state has {name!r}",
        rule="every saved tensor belongs to this optimizer and model",
        consequence=_CONSEQUENCE,
        nearest=nearest_name(name, own) if own else "an optimizer that keeps state; this one has none (momentum = 0?)",
    )


def _different(name: str, saved: Tensor, own: Tensor) -> Problem:
    return Problem(
        given=f"saved {name!r} is {saved.dtype} {list(saved.shape)}, here it is {own.dtype} {list(own.shape)}",
        rule="shape and dtype are those of the run that wrote it",
        consequence=_CONSEQUENCE,
        nearest="the model sizes and the precision the checkpoint was written with",
    )

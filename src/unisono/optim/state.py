"""Optimizer state as named tensors, so that a checkpoint stores it like parameters.

State is created with the optimizer instead of in the first step, so that a new process can load into it, and a skipped first
step does not change it. It equals the state that the first step of torch's optimizers would create, bit for bit: a momentum of
zero gives ``0 * m + g = g``. Every group of ``build_optimizer`` lists in ``"state"`` the tensors of its parameters.
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
    """Return the parameter's state; missing tensors of ``group["state"]`` are created as zeros."""
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
    """The optimizer's state tensors as ``optim/<state>/<parameter name>``, sorted by name; not copies.

    Hyper-parameters are not included: they come from the configuration, the learning rate from the schedule. An optimizer that
    ``build_optimizer`` did not build has the state that its steps created so far.

    Args:
        model: The model, or its parameters or a rank's shards of them by name.

    Raises:
        CheckpointError: The optimizer has a parameter that is not the model's, or state that is no tensor.
    """
    named_state: dict[str, Tensor] = {}
    for name, (group, parameter) in _owners(model, optimizer).items():
        if "state" in group:
            create_state(optimizer, group, parameter)
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(non_tensor_state(optimizer, state, value))
            named_state[f"optim/{state}/{name}"] = value
    return dict(sorted(named_state.items()))


@torch.no_grad()
def load_state_tensors(model: NamedParameters, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved state into the optimizer; names, shapes and dtypes must be exactly those of ``state_tensors``.

    An optimizer that ``build_optimizer`` did not build and that has no state yet gets all saved state of its parameters.

    Args:
        model: The model, or its parameters or a rank's shards of them by name.
        tensors: Saved state by name.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of another shape or dtype. Nothing was changed.
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
    no_state = "an optimizer that keeps state; this one has none (momentum = 0?)"
    problems = [
        _not_loaded(
            f"the saved state has no {name!r}",
            "every tensor of the optimizer's state is loaded",
            "resume with the optimizer and the model that wrote it, or start a new run from the weights alone",
        )
        for name in own
        if name not in tensors
    ]
    problems += [
        _not_loaded(
            f"the saved state has {name!r}",
            "every saved tensor belongs to this optimizer and model",
            nearest_name(name, known) if known else no_state,
        )
        for name in tensors
        if name not in known
    ]
    problems += [
        _not_loaded(
            f"saved {name!r} is {saved.dtype} {list(saved.shape)}, here it is {tensor.dtype} {list(tensor.shape)}",
            "shape and dtype are those of the run that wrote it",
            "the model sizes and the precision the checkpoint was written with",
        )
        for name, tensor in own.items()
        if (saved := tensors.get(name)) is not None and (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype)
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
                raise CheckpointError(
                    given=f"optimizer {type(optimizer).__name__} has a parameter that {type(model).__name__} has not",
                    rule="state is named after the model's parameters",
                    consequence="the optimizer cannot be saved or loaded",
                    nearest="make the optimizer from this model's parameters, after moving or replacing them",
                )
            owners[first_name[parameter]] = group, parameter
    return owners


def _state_device(state: str, group: Mapping[str, Any], parameter: nn.Parameter) -> torch.device:
    """Device of a state tensor: the parameter's, except step counts of groups neither fused nor capturable (CPU)."""
    on_host = state == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


def _not_loaded(given: str, rule: str, nearest: str) -> Problem:
    consequence = "continuing would not be the same run, so nothing was loaded"
    return Problem(given=given, rule=rule, consequence=consequence, nearest=nearest)

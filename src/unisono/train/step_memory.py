"""Whether a step with values can be tried here: what it holds at least, against the memory that is free."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
from torch import nn

from unisono.device.torch_adapters import adapter_of
from unisono.dist import JobSpec
from unisono.errors import ConfigError
from unisono.observe.host_memory import (
    address_space_limit_bytes,
    host_memory_limit_bytes,
    process_memory,
    tensor_budget_bytes,
)
from unisono.parallel.memory_ledger import build_ledger
from unisono.parallel.sharding import GlobalParameterSpec
from unisono.plan.plan import Plan
from unisono.train.assembly import RunInputs
from unisono.train.setup import resolve_plan
from unisono.units import GIB


def check_real_step_fits(
    model: nn.Module, given: RunInputs, plan: Plan, ranks: Sequence[int], needs_values: str
) -> None:
    """Raise ConfigError if a rank's parameters, gradients and optimizer state are more than the memory that is free here.

    Activations are not counted: their size is what is asked for. Layers that ``tp`` or ``pp`` divide count as whole ones.

    Args:
        model: The model of the run, perhaps on the meta device.
        given: What the run is made of.
        plan: The plan of the job.
        ranks: Ranks that would make a step, one after the other.
        needs_values: What in the step needs values.
    """
    whole = GlobalParameterSpec.from_model(model)
    ledgers = [build_ledger(plan, whole, rank, state=given.optim.state_names) for rank in ranks]
    needed = max(ledger.parameter_bytes + ledger.gradient_bytes + ledger.state_bytes for ledger in ledgers)
    if plan.is_model_sharded and isinstance(given.model, nn.Module):  # shards are cut from a copy of it
        needed += sum(parameter.numel * parameter.dtype.itemsize for parameter in whole.parameters.values())
    if given.distill is not None:
        needed += sum(parameter.nbytes for parameter in given.distill.build().parameters()) // plan.mesh.shard_degree
    free = _free_bytes(plan)
    if needed > free:
        raise ConfigError(
            given=f"a model, objective or optimizer that calls {needs_values}, whose parameters, gradients and optimizer state "
            f"take {needed / GIB:.4g} GiB",
            rule="a dry run has shapes and no values: where how it goes on depends on the value of a tensor, a step is made with "
            f"values, in the memory that is free here ({free / GIB:.4g} GiB)",
            consequence="nothing was traced",
            nearest="a machine with more memory, or code that must not depend on the value of a tensor",
        )


def _free_bytes(plan: Plan) -> int:
    """Memory of the device of a rank, or of the host, that no process has taken."""
    device, _ = resolve_plan(plan, JobSpec(world_size=plan.mesh.world_size))
    adapter, index = adapter_of(device)
    if (memory := adapter.memory(index)) is not None:
        return memory.free_bytes
    budget = tensor_budget_bytes(
        1,
        process_memory(),
        limit_bytes=host_memory_limit_bytes(),
        address_space_limit_bytes=address_space_limit_bytes(),
    )
    return min(budget, psutil.virtual_memory().available)

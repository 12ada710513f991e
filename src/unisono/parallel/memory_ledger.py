"""Expected memory of a rank, computed from a plan and the specification of the global model, before anything is built.

    parameters   those of the rank's stages, sharded by rules (tp, ep), then over the ranks that share the state, by rows or
                 (stacks of experts) along dim 1, if not below the threshold; equal for all ZeRO stages
    gradients    sharded like the parameters from stage 2 on; in stage 1 not sharded by rows until the end of the step
    state        the optimizer's tensors of the parameters' shape, and its step counts of 4 bytes per parameter

``check_ledger`` compares it with the built model: a rule that shards nothing, or shards twice, does not show in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.errors import PlanError
from unisono.optim.run_optimizer import RunOptimizer
from unisono.parallel.mesh import AXES
from unisono.parallel.pipeline.partition import PipelinePartition
from unisono.parallel.sharding import GlobalParameterSpec, TensorShard
from unisono.plan.pipeline_schedule import stage_index
from unisono.plan.plan import Plan

_COUNTERS = ("step",)  # state that is one number per parameter
_COUNTER_BYTES = 4
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterMemory:
    """Shape and bytes of a rank's shard of one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLedger:
    """Expected memory of a rank, by parameter name."""

    parameters: Mapping[str, ParameterMemory]

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.parameter_bytes for parameter in self.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        return sum(parameter.gradient_bytes for parameter in self.parameters.values())

    @property
    def state_bytes(self) -> int:
        return sum(parameter.state_bytes for parameter in self.parameters.values())

    @property
    def numel(self) -> int:
        """Number of elements of all shards."""
        return sum(parameter.numel for parameter in self.parameters.values())


def coordinates_of(plan: Plan, rank: int) -> dict[str, int]:
    """Index of ``rank`` along each axis of ``ParallelDims``, without a process group."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, int(getattr(plan.mesh, axis)))
    place["shard"] = place["dp_shard"] * plan.mesh.cp + place["cp"]
    place["experts"], place["ep"] = divmod(place["shard"], plan.mesh.ep)
    return place


def build_ledger(
    plan: Plan,
    whole: GlobalParameterSpec,
    rank: int,
    *,
    state: Collection[str],
    shards: Mapping[str, TensorShard] | None = None,
    shard_dims: Mapping[str, int] | None = None,
    stacks: Collection[str] = (),
    layout: PipelinePartition | None = None,
) -> MemoryLedger:
    """The ledger of ``rank`` for the global model ``whole``.

    Args:
        state: Names of the optimizer's tensors per parameter (``optim.state_names``).
        shards: This rank's shards along ``tp``, by first name.
        shard_dims: Dims along which FSDP2 splits, by first name, where they are pinned.
        stacks: Names of the parameters that are stacks of experts.
        layout: Partition of the model into pipeline stages.
    """
    place = coordinates_of(plan, rank)
    stages = {
        stage_index(plan.pipeline.schedule, plan.mesh.pp, place["pp"], chunk) for chunk in range(plan.stages_per_rank)
    }
    held: dict[str, ParameterMemory] = {}
    for name, entry in whole.parameters.items():
        if layout is not None and stages.isdisjoint(layout.stages_of_parameter[name]):
            continue
        shape, block, expert = list(entry.shape), (shards or {}).get(name), name in stacks
        if block is not None:
            shape[block.dim] = sum(length for _, length in block.runs)
        if expert:
            shape[0] //= plan.mesh.ep
        before_rows = math.prod(shape)
        if plan.uses_fsdp:
            line, ranks = "experts" if expert else "shard", plan.shard_degree_of(name, entry.numel, expert=expert)
            usual = int(expert and shape[0] % ranks != 0 and shape[1] % ranks == 0)
            dim = (shard_dims or {}).get(name, usual)
            size = -(-shape[dim] // ranks)
            shape[dim] = max(0, min(shape[dim] - (place[line] if ranks > 1 else 0) * size, size))
        numel, size = math.prod(shape), entry.dtype.itemsize
        # gradients and moments of parameters that rules convert to bf16 stay in fp32
        wide = max(size, 4) if plan.precision.dtype_rules and entry.dtype == torch.bfloat16 else size
        moments = [moment for moment in state if moment not in _COUNTERS] if entry.trained else []
        counters = len(state) - len(moments) if entry.trained else 0
        held[name] = ParameterMemory(
            shape=tuple(shape),
            dtype=entry.dtype,
            parameter_bytes=numel * size,
            gradient_bytes=(before_rows if plan.fsdp.zero == 1 else numel) * wide if entry.trained else 0,
            state_bytes=numel * len(moments) * wide + counters * _COUNTER_BYTES,
        )
    return MemoryLedger(parameters=held)


def check_ledger(expected: MemoryLedger, parameters: Mapping[str, nn.Parameter], optimizer: RunOptimizer) -> None:
    """Compare a rank's parameters, and optimizer state if it exists yet, with the ledger.

    Raises PlanError with the first differences.
    """
    held = expected.parameters
    states: dict[str, list[Tensor]] = {}
    for path, tensor in optimizer.state_tensors(parameters).items():
        states.setdefault(path.split("/", 2)[2], []).append(tensor)
    wrong: list[str] = []
    for name in [*held, *(name for name in parameters if name not in held)]:
        if name not in parameters or name not in held:
            wrong.append(f"{name} is {'not held' if name in held else 'held, and of another stage'}")
            continue
        want, shard, state = held[name], parameters[name], states.get(name, [])
        if (tuple(shard.shape), shard.dtype) != (want.shape, want.dtype):
            wrong.append(f"{name} is {list(shard.shape)} {shard.dtype}, and should be {list(want.shape)} {want.dtype}")
        elif optimizer.eager_state and (have := sum(state_tensor.nbytes for state_tensor in state)) != want.state_bytes:
            wrong.append(f"the optimizer holds {have} bytes for {name}, and should hold {want.state_bytes}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise PlanError(
            given="; ".join(wrong[:_SHOWN]) + more,
            rule=f"a rank holds what follows from the plan: {expected.numel} elements, "
            f"{expected.parameter_bytes} bytes of parameters, {expected.state_bytes} of optimizer state",
            consequence="another model than the plan's would be trained, or memory would not be what was planned",
            nearest="parameters that one rule shards once, and an optimizer built from the shards",
        )

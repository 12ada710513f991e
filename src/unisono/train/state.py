"""The whole mutable state of a run in one object; nothing else survives a step.

Global state is the same on every rank, or split over ranks; a checkpoint holds it once. Rank state belongs to one rank: its
random generators, and the state of its gradient synchronisation. Step and best score are plain JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint import CheckpointReader
from unisono.device.torch_adapters import present_adapter
from unisono.errors import CheckpointError
from unisono.optim.learning_rate import LearningRates
from unisono.optim.run_optimizer import RunOptimizer
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters, TensorShard
from unisono.storage.limits import decode_json
from unisono.train.ema import WeightAverage
from unisono.train.guard import StepGuard
from unisono.train.loss_scaler import LossScaler

# tensors of one rank; tensors of DiLoCo's outer optimizer, which a checkpoint of another plan.sync lacks
_RANK_PREFIXES, _OUTER_PREFIX = ("rng/", "sync/"), "outer/"


class SyncState(Protocol):
    """State that a gradient synchronisation keeps from step to step; by default none."""

    # whether each rank has its own parameters and optimizer state, which are averaged periodically
    params_diverge: bool = False

    def after_step(self, step: int, good: Tensor) -> None:
        """Called after step ``step`` (from 1); ``good`` [] bool: whether the guard accepted it."""
        ...

    def global_state(self) -> dict[str, Tensor]:
        """Live tensors replicated on all ranks, by checkpoint path; ``model/...`` replaces the rank's own parameters."""
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """Tensors of this rank alone, by name."""
        return {}

    def load_rank_state(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Load ``rank_state`` after ``global_state``; None: none was saved for this rank, which starts from the global state."""
        ...

    def consensus_parameters(self) -> AbstractContextManager[Any]:
        """A context in which the model has parameters that all ranks agree on, also where ranks diverge between averages."""
        return nullcontext()


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Model, optimizer, and everything else a step changes.

    ``step`` counts finished optimizer steps, ``weight_total`` [] float64 the tokens (or samples) counted in them. ``sharded`` are
    this rank's shards of the model's parameters.
    """

    model: nn.Module
    sharded: ShardedParameters
    optimizer: RunOptimizer
    learning_rates: LearningRates
    loss_scaler: LossScaler
    guard: StepGuard
    average: WeightAverage | None
    weight_total: Tensor
    stage_tensors: StageTensors | None = None
    sync_state: SyncState | None = None
    step: int = 0
    best_loss: float | None = None
    evaluations_without_gain: int = 0

    def averaged_weights(self) -> AbstractContextManager[Any]:
        """Inside, the model has the weights that evaluation and export use: a moving average, or the consensus of all ranks."""
        if self.sync_state is not None and self.sync_state.params_diverge:
            return self.sync_state.consensus_parameters()
        return self.average.swapped_in() if self.average is not None else torch.no_grad()

    def global_state(self) -> dict[str, Tensor]:
        """Parameters, buffers, optimizer state, moving average, loss scale, guard, and token count, by checkpoint path.

        A tensor is the same on every rank, or this rank's part of one that is split over them, which ``shards`` describes.
        """
        tensors = self.local_state()
        if self.stage_tensors is not None:
            if not self.optimizer.eager_state:  # it may have state now that it had not before
                self.stage_tensors = StageTensors(self, self.stage_tensors.dims)
            tensors |= self.stage_tensors.of_other_stages()
        if self.sync_state is not None:
            tensors |= self.sync_state.global_state()
        return tensors | self._step_statistics()

    def _step_statistics(self) -> dict[str, Tensor]:
        """Statistics of losses and weights of the steps so far."""
        scaler = {f"scaler/{name}": tensor for name, tensor in self.loss_scaler.state_dict().items()}
        guard = {f"guard/{name}": tensor for name, tensor in self.guard.state_dict().items()}
        return scaler | guard | {"meter/weight_total": self.weight_total}

    def shards(self) -> dict[str, TensorShard]:
        """This rank's shard of each tensor of ``global_state`` that is sharded over ranks, by path."""
        shards = self.local_shards()
        return shards if self.stage_tensors is None else self.stage_tensors.shards(shards)

    def local_shards(self) -> dict[str, TensorShard]:
        """``shards`` of the tensors of ``local_state`` alone."""
        shards: dict[str, TensorShard] = {}
        for path, tensor in self.local_state().items():
            # model/NAME, optim/STATE/NAME, ema/NAME
            name = path.split("/", 2 if path.startswith("optim/") else 1)[-1]
            shard = self.sharded.shard_of(name, tensor) if name in self.sharded.parameters else None
            if shard is not None:
                shards[path] = shard
        return shards

    def local_state(self) -> dict[str, Tensor]:
        """This rank's parameters, buffers, optimizer state and moving average, by checkpoint path."""
        parameters = self.sharded.parameters
        # a parameter with several names is saved under its first one
        named = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.model.state_dict().items() if name not in named}
        tensors = {f"model/{name}": tensor.detach() for name, tensor in {**buffers, **parameters}.items()}
        tensors |= self.optimizer.state_tensors(parameters)
        if self.average is not None:
            tensors |= self.average.state()
        return tensors

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """State of this rank alone, by path under ``rank``, its ``ParallelDims.rng_rank``.

        It has the generators of torch, Python and numpy as byte tensors, and the rank state of ``sync_state``.
        """
        return generator_states(rank) | self._sync_rank_state(rank)

    def _sync_rank_state(self, rank: int) -> dict[str, Tensor]:
        """State of the gradient synchronisation on this rank, by path."""
        if self.sync_state is None:
            return {}
        tensors = self.sync_state.rank_state() | (self.mutable_state() if self.sync_state.params_diverge else {})
        return {f"sync/rank-{rank:05d}/{name}": tensor for name, tensor in tensors.items()}

    def mutable_state(self) -> dict[str, Tensor]:
        """The live tensors of this rank that a step changes: ``local_state`` and statistics, by checkpoint path."""
        return self.local_state() | self._step_statistics()

    def meta(self) -> dict[str, Any]:
        """State that is no tensor."""
        values = {name: getattr(self, name) for name in ("step", "best_loss", "evaluations_without_gain")}
        schedule = self.learning_rates.state()
        return values | ({"schedule": schedule} if schedule else {})

    def restore(self, reader: CheckpointReader, *, rank: int, seed: int) -> list[str]:
        """Load the whole state, bit for bit; returns the differences: tensors that are new or not used.

        Raises CheckpointError if names, shapes or dtypes are those of another model.
        """
        self._create_optimizer_state(reader, rank)
        current, shards = self.global_state(), self.shards()
        saved = _saved_global_names(reader, current, shards)
        differences = [f"{name} is not used" for name in sorted(saved - current.keys())]
        for name, tensor in sorted(current.items()):
            if name not in saved:  # only outer/ tensors: _saved_global_names refuses the others
                differences.append(f"{name} is new")
                continue
            if name not in shards:
                reader.read_into(name, tensor)
                continue
            for index, offset in shards[name].blocks():
                if tensor[index].numel():
                    reader.read_part(name, tensor[index], offset)
        meta = reader.meta["state"]
        self.step = int(meta["step"])
        self.best_loss = meta["best_loss"]
        self.learning_rates.load_state(meta.get("schedule", {}))
        self.evaluations_without_gain = int(meta["evaluations_without_gain"])
        restore_generators(reader, rank=rank, seed=seed, step=self.step)
        return differences + self._restore_sync_state(reader, rank)

    def _create_optimizer_state(self, reader: CheckpointReader, rank: int) -> None:
        """Create the state of optimizers that have none before their first step, as the checkpoint lists it."""
        saved: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name in reader.names():
            path = name.removeprefix(f"sync/rank-{rank:05d}/")
            if path.startswith("optim/"):
                spec = reader.spec(name)
                saved[path] = torch.Size(spec.shape), spec.dtype
        self.optimizer.create_state(self.sharded.parameters, saved)

    def _restore_sync_state(self, reader: CheckpointReader, rank: int) -> list[str]:
        rank_local = [name for name in reader.names() if name.startswith("sync/")]
        prefix = f"sync/rank-{rank:05d}/"
        saved_names = {name.removeprefix(prefix): name for name in rank_local if name.startswith(prefix)}
        if self.sync_state is None:
            return [f"{len(rank_local)} rank-local tensors are not used"] if rank_local else []
        diverged = self.mutable_state() if self.sync_state.params_diverge else {}
        if not saved_names or not diverged.keys() <= saved_names.keys():
            self.sync_state.load_rank_state(None)
            return [f"no rank-local state for rank {rank}: using the global state"]
        for path, tensor in diverged.items():
            reader.read_into(saved_names[path], tensor)
        self.sync_state.load_rank_state(
            {name: reader.tensor(path) for name, path in saved_names.items() if name not in diverged}
        )
        return []


class StageTensors:
    """Shape and dtype of the tensors of all pipeline stages, of which no rank holds all."""

    def __init__(self, state: TrainState, dims: ParallelDims) -> None:
        """Gather the tables of all stages. A collective."""
        self.dims, shards = dims, state.local_shards()
        table = {
            path: [list(shards[path].global_shape if path in shards else t.shape), str(t.dtype).removeprefix("torch.")]
            for path, t in state.local_state().items()
        }
        tables: list[dict[str, Any]] = dims.world.all_gather_json(table)
        self._table = {path: spec for stage in reversed(tables) for path, spec in stage.items()}
        self._first = {path: rank for rank in reversed(range(len(tables))) for path in tables[rank]}
        self._here = table.keys()

    def of_other_stages(self) -> dict[str, Tensor]:
        """An empty tensor for each that only other stages have, by path."""
        return {
            path: torch.zeros([0] * len(shape), dtype=getattr(torch, dtype), device="cpu")
            for path, (shape, dtype) in sorted(self._table.items())
            if path not in self._here
        }

    def shards(self, mine: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """All tensors of all stages as shards. Of one that several stages have (a tied embedding) the first stage's counts."""
        rank, ranks_per_stage = self.dims.world.rank, self.dims.world.world_size // self.dims.plan.mesh.pp
        shards: dict[str, TensorShard] = {}
        for path, (shape, _) in sorted(self._table.items()):
            first = self._first[path]
            if path in mine:
                again = first // ranks_per_stage != rank // ranks_per_stage
                shards[path] = replace(mine[path], replica_id=max(mine[path].replica_id, 1)) if again else mine[path]
            else:
                shards[path] = replace(TensorShard.whole(shape), replica_id=int(rank != first))
        return shards


def generator_states(rank: int) -> dict[str, Tensor]:
    """The states of torch's, Python's and numpy's generators as byte tensors, by path under ``rank``."""
    states = {"torch": torch.get_rng_state(), "python": _to_bytes(random.getstate())}
    name, keys, *rest = np.random.get_state(legacy=True)
    states["numpy"] = _to_bytes([name, np.asarray(keys).tolist(), *rest])
    accelerator = present_adapter().random
    if accelerator is not None:
        states["accelerator"] = accelerator.state()
    return {f"rng/rank-{rank:05d}/{kind}": state for kind, state in states.items()}


def restore_generators(reader: CheckpointReader, *, rank: int, seed: int, step: int) -> None:
    """Load the generators of ``rank``; a rank that the checkpoint lacks gets new ones by seed and step.

    Raises CheckpointError if what is saved is no state of them.
    """
    prefix = f"rng/rank-{rank:05d}/"
    if f"{prefix}torch" not in set(reader.names()):
        # more ranks than before: this one has no generators to restore, and gets reproducible new ones
        seed_generators(seed, rank, step)
        return
    try:
        torch.set_rng_state(reader.tensor(f"{prefix}torch"))
        version, keys, gauss = _from_bytes(reader.tensor(f"{prefix}python"))
        random.setstate((version, tuple(keys), gauss))
        name, numbers, *rest = _from_bytes(reader.tensor(f"{prefix}numpy"))
        np.random.set_state((name, np.asarray(numbers, dtype=np.uint32), *rest))
        accelerator = present_adapter().random
        if accelerator is not None and f"{prefix}accelerator" in set(reader.names()):
            accelerator.set_state(reader.tensor(f"{prefix}accelerator"))
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            given=f"{reader.path}: {prefix}*, which is no state of random generators ({error})",
            rule="a run goes on with the random numbers that it would have drawn without an interruption",
            consequence="nothing was trained",
            nearest="an earlier checkpoint, or one whose files nobody has changed",
        ) from error


def seed_generators(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch (all devices), Python and numpy for dropout and user code: a function of (seed, rank, step)."""
    words = np.random.SeedSequence([seed, rank, step]).generate_state(2, dtype=np.uint64)
    torch.manual_seed(int(words[0] >> np.uint64(1)))
    random.seed(int(words[1]))
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))


def _saved_global_names(
    reader: CheckpointReader, mine: dict[str, Tensor], shards: Mapping[str, TensorShard]
) -> set[str]:
    """The names of the saved global state. Raises CheckpointError with the first differences in names, shapes and dtypes."""
    saved = {name for name in reader.names() if not name.startswith(_RANK_PREFIXES)}
    differences = [
        f"{name} is only in {where}"
        for where, names in (("the checkpoint", saved - mine.keys()), ("this run", mine.keys() - saved))
        for name in sorted(names)
        if not name.startswith(_OUTER_PREFIX)
    ]
    num_names = len(differences)
    for name in sorted(saved & mine.keys()):
        saved_spec, tensor = reader.spec(name), mine[name]
        shape, dtype = shards[name].global_shape if name in shards else tuple(tensor.shape), tensor.dtype
        if (saved_spec.shape, saved_spec.dtype) != (shape, dtype):
            differences.append(
                f"{name} is {list(saved_spec.shape)} {saved_spec.dtype} there, {list(shape)} {dtype} here"
            )
    if differences:
        if len(differences) == num_names:
            _refuse_other_frozen(reader, saved, mine.keys())
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise CheckpointError(
            given=f"the checkpoint {reader.path} for this run: {shown}",
            rule="a resumed run has the model, optimizer and options the checkpoint was saved with",
            consequence="nothing was loaded and nothing was changed",
            nearest="use the configuration saved in the run's folder, or another run.dir for a new run",
        )
    return saved


def _refuse_other_frozen(reader: CheckpointReader, saved: Set[str], mine: Set[str]) -> None:
    """Raise CheckpointError where the names differ only by which parameters are trained: those have optimizer state."""
    then, now = _trained(saved), _trained(mine)
    changed = then ^ now
    others = [
        name for name in saved ^ mine if not name.startswith(_OUTER_PREFIX) and _trained_name(name) not in changed
    ]
    if others or not then & now:
        return  # another model, or another optimizer
    sides = ((now - then, "frozen", "trained"), (then - now, "trained", "frozen"))
    counts = [f"{was} then and {is_} now: {len(names)}, the first {min(names)!r}" for names, was, is_ in sides if names]
    raise CheckpointError(
        given=f"the checkpoint {reader.path} for this run: parameters {'; '.join(counts)}",
        rule="a run trains the same parameters to its end (optim.freeze, lora, requires_grad)",
        consequence="optimizer state would be missing or without use; nothing was loaded and nothing was changed",
        nearest="the optim.freeze of the saved run; frozen_until_step in optim.groups from the start of a run, for parameters "
        f"that are trained later; or another run.dir with model.pretrained={reader.path.parent.parent / 'export'}",
    )


def _trained(names: Iterable[str]) -> set[str]:
    """The parameters that have optimizer state."""
    return {name.split("/", 2)[2] for name in names if name.startswith("optim/")}


def _trained_name(path: str) -> str | None:
    """The parameter whose optimizer state or average has this path; None for other tensors."""
    if path.startswith("optim/"):
        return path.split("/", 2)[2]
    return path.removeprefix("ema/") if path.startswith("ema/") else None


def _to_bytes(value: Iterable[Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return decode_json(tensor.numpy().tobytes())

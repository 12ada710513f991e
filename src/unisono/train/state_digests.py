"""Digests of the state of a run, compared over time while nothing may change it, and over the ranks that hold copies of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.dist import World
from unisono.train.state import TrainState
from unisono.train.tensor_digest import tensor_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class UnequalCopies:
    """A tensor whose copies on several ranks are not equal.

    Attributes:
        path: Its path in a checkpoint.
        ranks: The ranks whose copies are in the minority; all that hold one where there is no majority.
        holders: The ranks that hold a copy.
    """

    path: str
    ranks: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def is_certain(self) -> bool:
        """Whether a majority of the copies says which are wrong."""
        return self.ranks != self.holders


@dataclass(frozen=True, slots=True)
class _Recorded:
    address: int
    version: int  # torch's count of the operations that have written to it
    digest: Tensor


class StateDigests:
    """Digests of parameters, buffers, optimizer state, moving average and statistics of this rank, by checkpoint path."""

    def __init__(self, state: TrainState, world: World, device: torch.device) -> None:
        self._state, self._world, self._device = state, world, device
        self._recorded: dict[str, _Recorded] = {}
        self._recorded_step = -1
        self._layout = ""
        self._holders: dict[str, tuple[int, ...]] = {}

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """Digests [] of all tensors. Does not wait for the device."""
        return {path: tensor_digest(tensor) for path, tensor in self._state.mutable_state().items()}

    # --- over time ---------------------------------------------------------------------------------------------------

    def record(self, digests: Mapping[str, Tensor]) -> None:
        """Remember ``digests`` as those of the present state."""
        self._recorded = {
            path: _Recorded(tensor.data_ptr(), tensor._version, digests[path])
            for path, tensor in self._state.mutable_state().items()
        }
        self._recorded_step = self._state.step

    def changed(self, now: Mapping[str, Tensor], *, with_buffers: bool = True) -> list[str]:
        """Paths of the tensors whose digests changed since ``record``, though no operation has written to them.

        Waits for the device. Empty where nothing was recorded after this step.
        """
        if self._recorded_step != self._state.step:
            return []
        parameters = self._state.sharded.parameters
        paths: list[str] = []
        for path, tensor in self._state.mutable_state().items():
            recorded = self._recorded.get(path)
            if recorded is None or (recorded.address, recorded.version) != (tensor.data_ptr(), tensor._version):
                continue
            if with_buffers or not path.startswith("model/") or path.removeprefix("model/") in parameters:
                paths.append(path)
        if not paths:
            return []
        flags = torch.stack([(self._recorded[path].digest != now[path]).to(self._device) for path in paths])
        return [path for path, differs in zip(paths, flags.tolist(), strict=True) if differs]

    # --- over ranks --------------------------------------------------------------------------------------------------

    def unequal_copies(self, digests: Mapping[str, int]) -> list[UnequalCopies]:
        """The tensors that several ranks hold, and whose copies are not equal. A collective.

        Left out are buffers, which may depend on a rank's samples, and shards that one rank alone holds.
        """
        if self._world.world_size == 1:
            return []
        self._find_holders()
        of_group: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
        for path, ranks in self._holders.items():
            of_group[ranks][path] = digests[path]
        hashes = {json.dumps(ranks): _hash(list(paths.items())) for ranks, paths in of_group.items()}
        answers: list[dict[str, str]] = self._world.all_gather_json(hashes)
        unequal = {
            group
            for answer in answers
            for group, value in answer.items()
            if any(other.get(group, value) != value for other in answers)
        }
        if not unequal:
            return []
        suspects = {
            path: v for ranks, paths in of_group.items() if json.dumps(ranks) in unequal for path, v in paths.items()
        }
        tables: list[dict[str, int]] = self._world.all_gather_json(suspects)
        holders: list[dict[str, list[int]]] = self._world.all_gather_json(
            {path: self._holders[path] for path in suspects}
        )
        found: dict[tuple[str, tuple[int, ...]], UnequalCopies] = {}
        for path, ranks in ((path, tuple(ranks)) for each in holders for path, ranks in each.items()):
            difference = _compare_copies(path, ranks, [tables[rank][path] for rank in ranks])
            if difference is not None:
                found[path, ranks] = difference
        return list(found.values())

    def _find_holders(self) -> None:
        """Find which ranks hold the same part of each tensor; does nothing while the tensors are the same. A collective."""
        shards, parameters = self._state.local_shards(), self._state.sharded.parameters
        parts: dict[str, str] = {}  # shape and position in the global tensor, as JSON
        for path, tensor in self._state.mutable_state().items():
            if not path.startswith("model/") or path.removeprefix("model/") in parameters:
                shard = shards.get(path)
                position = [] if shard is None else [shard.offset, shard.dim, shard.runs]
                parts[path] = json.dumps([list(tensor.shape), position])
        layout = _hash(parts)
        if all(self._world.all_gather_json(layout == self._layout)):
            return
        tables: list[dict[str, str]] = self._world.all_gather_json(parts)
        holders = {
            path: tuple(rank for rank, table in enumerate(tables) if table.get(path) == part)
            for path, part in parts.items()
        }
        self._holders = {path: ranks for path, ranks in holders.items() if len(ranks) > 1}
        self._layout = layout


def _compare_copies(path: str, ranks: tuple[int, ...], digests: Sequence[int]) -> UnequalCopies | None:
    (value, count), *others = Counter(digests).most_common()
    if not others:
        return None
    wrong = tuple(rank for rank, digest in zip(ranks, digests, strict=True) if digest != value)
    return UnequalCopies(path=path, ranks=wrong if 2 * count > len(ranks) else ranks, holders=ranks)


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()

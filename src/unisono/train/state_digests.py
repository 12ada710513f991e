"""Digests of the state of a run: over time, where nothing may change it, and over the ranks that hold equal parts of it."""

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
class Difference:
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
class _Noted:
    place: int  # address
    version: int  # torch's count of the operations that have written to it
    digest: Tensor


class StateDigests:
    """Digests of parameters, buffers, optimizer state, moving average and statistics of this rank, by checkpoint path."""

    def __init__(self, state: TrainState, world: World, device: torch.device) -> None:
        self._state, self._world, self._device = state, world, device
        self._noted: dict[str, _Noted] = {}
        self._noted_step = -1
        self._layout = ""
        self._holders: dict[str, tuple[int, ...]] = {}

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """Digests [] of all tensors. Does not wait for the device."""
        return {path: tensor_digest(tensor) for path, tensor in self._state.own_state().items()}

    # --- over time ---------------------------------------------------------------------------------------------------

    def note(self, digests: Mapping[str, Tensor]) -> None:
        """Take ``digests`` as those of the state as it is."""
        self._noted = {
            path: _Noted(tensor.data_ptr(), tensor._version, digests[path])
            for path, tensor in self._state.own_state().items()
        }
        self._noted_step = self._state.step

    def changed(self, now: Mapping[str, Tensor], *, with_buffers: bool = True) -> list[str]:
        """Paths of the tensors that no operation has written to since they were noted after this step, and that differ.

        Waits for the device. Without a note after this step there are none.
        """
        if self._noted_step != self._state.step:
            return []
        parameters = self._state.sharded.parameters
        paths: list[str] = []
        for path, tensor in self._state.own_state().items():
            noted = self._noted.get(path)
            if noted is None or (noted.place, noted.version) != (tensor.data_ptr(), tensor._version):
                continue
            if with_buffers or not path.startswith("model/") or path.removeprefix("model/") in parameters:
                paths.append(path)
        if not paths:
            return []
        flags = torch.stack([(self._noted[path].digest != now[path]).to(self._device) for path in paths])
        return [path for path, differs in zip(paths, flags.tolist(), strict=True) if differs]

    # --- over ranks --------------------------------------------------------------------------------------------------

    def different_copies(self, digests: Mapping[str, int]) -> list[Difference]:
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
        found: dict[tuple[str, tuple[int, ...]], Difference] = {}
        for path, ranks in ((path, tuple(ranks)) for each in holders for path, ranks in each.items()):
            difference = _difference(path, ranks, [tables[rank][path] for rank in ranks])
            if difference is not None:
                found[path, ranks] = difference
        return list(found.values())

    def _find_holders(self) -> None:
        """Learn which ranks hold an equal part of each tensor, again where the tensors have changed. A collective."""
        shards, parameters = self._state.own_shards(), self._state.sharded.parameters
        places: dict[str, str] = {}
        for path, tensor in self._state.own_state().items():
            if not path.startswith("model/") or path.removeprefix("model/") in parameters:
                shard = shards.get(path)
                part = [] if shard is None else [shard.offset, shard.dim, shard.runs]
                places[path] = json.dumps([list(tensor.shape), part])
        layout = _hash(places)
        if all(self._world.all_gather_json(layout == self._layout)):
            return
        tables: list[dict[str, str]] = self._world.all_gather_json(places)
        holders = {
            path: tuple(rank for rank, table in enumerate(tables) if table.get(path) == place)
            for path, place in places.items()
        }
        self._holders = {path: ranks for path, ranks in holders.items() if len(ranks) > 1}
        self._layout = layout


def _difference(path: str, ranks: tuple[int, ...], digests: Sequence[int]) -> Difference | None:
    (value, count), *others = Counter(digests).most_common()
    if not others:
        return None
    wrong = tuple(rank for rank, digest in zip(ranks, digests, strict=True) if digest != value)
    return Difference(path=path, ranks=wrong if 2 * count > len(ranks) else ranks, holders=ranks)


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()

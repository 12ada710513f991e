"""Layout of a tensor on a grid of ranks, as plain data: MindSpore's ``Layout``, with uneven dims too.

    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    placed = layout("mp", ("sp", "dp"))        # dim 0 is sharded by mp, dim 1 by sp and then dp
    placed.tensor_map                          # (0, (1, 2)): axes counted from the right; -1 is not sharded
    placed.slices((4, 8))[5]                   # the slices of rank 5 of a tensor of that shape

The grid is row-major: place p belongs to ``rank_list[p]``, or to rank p. Several axes on one dim act as one axis of their
product, the first of them slowest. Of a dim of n in k parts each rank gets ⌈n/k⌉ elements; the last ranks may have fewer or
none, as with torch's ``chunk``. MindSpore itself requires even dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from unisono.errors import PlanError, Problem, nearest_name

UNSHARDED = "None"
DimAliases = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid of ranks with named axes. Raises PlanError if sizes, names and ranks do not fit together."""

    device_matrix: tuple[int, ...]
    aliases: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if not self.device_matrix or min(self.device_matrix) < 1 or len(self.device_matrix) != len(self.aliases):
            problems.append(
                Problem(
                    given=f"a device matrix {self.device_matrix} with aliases {self.aliases}",
                    rule="every axis has a size of at least 1 and a name",
                    consequence="there is no grid of ranks",
                    nearest='Layout((2, 4), ("dp", "mp"))',
                )
            )
        foreign = {UNSHARDED: "stands for a dim that is not cut", "interleaved_parallel": "is a cut inside one device"}
        for alias in sorted(set(self.aliases)):
            if self.aliases.count(alias) > 1 or alias in foreign:
                problems.append(
                    Problem(
                        given=f"the alias {alias!r}" + (f", which {foreign[alias]}" if alias in foreign else " twice"),
                        rule="an alias names one axis of ranks",
                        consequence="it would be unclear what is cut",
                        nearest="another name",
                    )
                )
        if self.rank_list is not None and sorted(self.rank_list) != list(range(self.ranks)):
            problems.append(
                Problem(
                    given=f"rank_list {self.rank_list} for a device matrix {self.device_matrix}",
                    rule=f"it has each of the ranks 0..{self.ranks - 1} once",
                    consequence="a part of a tensor would have no place",
                    nearest="a permutation of them, or none",
                )
            )
        if problems:
            raise PlanError(*problems)

    @property
    def ranks(self) -> int:
        """Number of ranks on the grid."""
        return prod(self.device_matrix)

    def __call__(self, *dims: DimAliases) -> TensorLayout:
        """A tensor whose dims are sharded along the given aliases; "None" does not shard a dim. Raises PlanError."""
        used = [alias for dim in dims for alias in _aliases(dim)]
        problems = [
            Problem(
                given=f"the alias {alias!r} in {dims}",
                rule=f"a dim is cut along aliases of the layout, {', '.join(self.aliases)}, or is 'None'",
                consequence="the dim would not be cut",
                nearest=nearest_name(alias, self.aliases),
            )
            for alias in dict.fromkeys(used)
            if alias not in self.aliases
        ]
        problems += [
            Problem(
                given=f"the alias {alias!r} {used.count(alias)} times in {dims}",
                rule="an axis cuts one dim at most",
                consequence="ranks would hold the diagonal blocks only",
                nearest="'None' for one of them, or another alias",
            )
            for alias in dict.fromkeys(used)
            if used.count(alias) > 1 and alias in self.aliases
        ]
        if problems:
            raise PlanError(*problems)
        return TensorLayout(layout=self, dims=dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """A tensor on a layout; created by calling a ``Layout``."""

    layout: Layout
    dims: tuple[DimAliases, ...]

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """For each dim the axes that shard it, counted from the right (0 is the last); -1 if it is not sharded."""
        names = self.layout.aliases

        def axis(alias: str) -> int:
            return len(names) - 1 - names.index(alias)

        return tuple(
            tuple(map(axis, dim)) if isinstance(dim, tuple) else -1 if dim == UNSHARDED else axis(dim)
            for dim in self.dims
        )

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts of each dim."""
        sizes = dict(zip(self.layout.aliases, self.layout.device_matrix, strict=True))
        return tuple(prod(sizes[alias] for alias in _aliases(dim)) for dim in self.dims)

    def slices(self, shape: tuple[int, ...], *, even: bool = False) -> list[tuple[slice, ...]]:
        """The slices of a tensor of ``shape`` that each rank holds, in rank order.

        Raises PlanError for another number of dims and, with ``even``, for a dim that its axes do not divide.
        """
        self._check(shape, even)
        held: list[tuple[slice, ...]] = [()] * self.layout.ranks
        for place, coordinates in enumerate(product(*map(range, self.layout.device_matrix))):
            at = dict(zip(self.layout.aliases, coordinates, strict=True))
            rank = place if self.layout.rank_list is None else self.layout.rank_list[place]
            held[rank] = tuple(self._slice(dim, size, at) for dim, size in zip(self.dims, shape, strict=True))
        return held

    def _slice(self, dim: DimAliases, size: int, at: dict[str, int]) -> slice:
        sizes = dict(zip(self.layout.aliases, self.layout.device_matrix, strict=True))
        part, parts = 0, 1
        for alias in _aliases(dim):
            part, parts = part * sizes[alias] + at[alias], parts * sizes[alias]
        step = -(-size // parts)
        return slice(min(part * step, size), min((part + 1) * step, size))

    def _check(self, shape: tuple[int, ...], even: bool) -> None:
        if len(shape) != len(self.dims):
            raise PlanError(
                given=f"a tensor of shape {list(shape)} for a layout {self.dims}",
                rule="a layout says for each dim how it is cut",
                consequence="it is unclear which dim is meant",
                nearest=f"{len(shape)} aliases, or 'None' for dims that stay whole",
            )
        uneven = [
            Problem(
                given=f"dim {number} of {size} cut along {' x '.join(_aliases(self.dims[number]))} into {parts} parts",
                rule="parts are equal here",
                consequence="the last ranks would hold less",
                nearest=f"a size of {-(-size // parts) * parts}",
            )
            for number, (size, parts) in enumerate(zip(shape, self.parts, strict=True))
            if even and size % parts
        ]
        if uneven:
            raise PlanError(*uneven)


def _aliases(dim: DimAliases) -> tuple[str, ...]:
    return dim if isinstance(dim, tuple) else () if dim == UNSHARDED else (dim,)

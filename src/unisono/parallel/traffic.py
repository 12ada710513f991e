"""Bytes and numbers of the collectives and messages of a rank, by group of ranks. Counted by the host where they are issued.

The payload of a collective is what NCCL's tests call its size: the tensor that is summed, gathered (the result), scattered or
exchanged (the input). On the wire a rank puts, of n ranks,

    sum                                          2 (n - 1) / n of it       reduce-scatter and all-gather around a ring
    gather, reduce-scatter, exchange of parts      (n - 1) / n             all parts but its own
    message                                        1

(Thakur et al. 2005). A library may choose an algorithm that sends more: Gloo of torch 2.13 makes a reduce-scatter of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from unisono.dist import World
from unisono.measure.calibration import Operation
from unisono.observe.meters import axis_of_group

ALL_RANKS: Final = "all"


def axis_of(name: str) -> str:
    """The axis (``COMM_AXES``) of the group with this description; groups of other libraries reduce over data ranks."""
    return axis_of_group(name) or "dp"


def all_reduce_wire_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank puts on the wire in a ring all-reduce of ``nbytes``."""
    return 2 * nbytes * (ranks - 1) // ranks


def all_gather_wire_bytes(nbytes: int, ranks: int) -> int:
    """The same of an all-gather or reduce-scatter, or of an all-to-all with equal parts, of ``nbytes``."""
    return nbytes * (ranks - 1) // ranks


@dataclass(slots=True)
class Messages:
    """Messages of about one size: their number, and the bytes of all of them.

    Attributes:
        count: Their number.
        payload_bytes: Bytes of the payload.
        wire_bytes: Bytes that this rank puts on the wire.
        all_reduce_bytes: Bytes of the all-reduces that take about as long; for messages to one rank, their own.
    """

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    all_reduce_bytes: int = 0

    def add(self, more: Messages) -> None:
        """Add ``more`` to these."""
        self.count += more.count
        self.payload_bytes += more.payload_bytes
        self.wire_bytes += more.wire_bytes
        self.all_reduce_bytes += more.all_reduce_bytes


@dataclass(kw_only=True, slots=True)
class GroupTraffic:
    """What this rank exchanged in one group of ranks, or in several of one kind.

    Attributes:
        axis: Axis of the mesh, one of ``COMM_AXES``.
        group: The ranks: ``shard``, ``dp_replicate``, ``tp`` …; ``all`` of the job; neighbouring ``stages``; stages with
            ``shared parameters``.
        transport: torch's backend, or what else sends.
        ranks: Number of ranks in the group.
        hosts: Number of their hosts.
        operation: ``send`` for messages, ``all_reduce`` for collectives of any kind.
        wait_is_for_link: False where some traffic of the group is not counted, or where a wait also has other work, such as
            decoding.
        messages: By the number of bits of their size on the wire, so that a few entries hold any number of sizes.
    """

    axis: str
    group: str
    transport: str
    ranks: int
    hosts: int
    operation: Operation = "all_reduce"
    wait_is_for_link: bool = True
    messages: dict[int, Messages] = field(default_factory=dict[int, Messages])

    def add(self, payload_bytes: int, wire_bytes: int, all_reduce_bytes: int, count: int = 1) -> None:
        """Count ``count`` messages of these bytes each, see ``Messages``."""
        size = wire_bytes.bit_length()
        known = self.messages.get(size)
        if known is None:
            known = self.messages[size] = Messages()
        known.count += count
        known.payload_bytes += count * payload_bytes
        known.wire_bytes += count * wire_bytes
        known.all_reduce_bytes += count * all_reduce_bytes

    def times(self, factor: int) -> GroupTraffic:
        """The traffic of ``factor`` times as long."""
        messages = {
            size: Messages(
                factor * each.count,
                factor * each.payload_bytes,
                factor * each.wire_bytes,
                factor * each.all_reduce_bytes,
            )
            for size, each in self.messages.items()
        }
        return replace(self, messages=messages)


def merged(groups: Iterable[GroupTraffic]) -> list[GroupTraffic]:
    """One entry for each kind of group that exchanged anything."""
    kinds: dict[tuple[str, str, str, int, int], GroupTraffic] = {}
    for group in groups:
        key = group.axis, group.group, group.transport, group.ranks, group.hosts
        if key not in kinds:
            kinds[key] = replace(group, messages={})
        first = kinds[key]
        first.wait_is_for_link &= group.wait_is_for_link
        for size, each in group.messages.items():
            first.messages.setdefault(size, Messages()).add(each)
    return [group for group in kinds.values() if group.messages]


class Traffic:
    """Counts the collectives of this rank by group. Not thread-safe; a collective costs some look-ups.

    ``compiled``: layers are compiled. Their collectives run inside graphs and are not counted.
    """

    def __init__(self, world: World, *, compiled: bool = False) -> None:
        self._world, self._compiled = world, compiled
        self._groups: dict[str, GroupTraffic] = {}

    def count_all_reduce(self, group: ProcessGroup | None, nbytes: int) -> None:
        """Count an all-reduce of ``nbytes``, with any reduction."""
        if (row := self._row(group)) is not None:
            row.add(nbytes, all_reduce_wire_bytes(nbytes, row.ranks), nbytes)

    def count_reduce_scatter(self, group: ProcessGroup | None, nbytes: int) -> None:
        """Count a reduce-scatter of ``nbytes``."""
        if (row := self._row(group)) is not None:
            row.add(
                nbytes, all_gather_wire_bytes(nbytes, row.ranks), nbytes if row.transport == "gloo" else nbytes // 2
            )

    def count_all_gather(self, group: ProcessGroup | None, nbytes: int, own_bytes: int | None = None) -> None:
        """Count an all-gather or all-to-all of ``nbytes``, of which ``own_bytes`` stay here; equal parts without."""
        if (row := self._row(group)) is not None:
            wire_bytes = all_gather_wire_bytes(nbytes, row.ranks) if own_bytes is None else nbytes - own_bytes
            row.add(nbytes, wire_bytes, nbytes // 2)  # half of what an all-reduce has on the wire

    def count_send(self, group: ProcessGroup, nbytes: int) -> None:
        """Count a message that this rank sends."""
        if (row := self._row(group)) is not None:
            row.add(nbytes, nbytes, nbytes)

    def take(self) -> list[GroupTraffic]:
        """What was counted since the last call, one entry for each kind of group."""
        groups, self._groups = self._groups, {}
        return merged(groups.values())

    def _row(self, group: ProcessGroup | None) -> GroupTraffic | None:
        """The entry of a group; None for one of this rank alone."""
        name = "" if group is None else group.group_desc
        row = self._groups.get(name)
        if row is None:
            # by name, and without the group itself: it would keep sockets open
            row = self._groups[name] = self._describe(group, name)
        return row if row.ranks > 1 else None

    def _describe(self, group: ProcessGroup | None, name: str) -> GroupTraffic:
        ranks = dist.get_process_group_ranks(group)
        axis = axis_of(name)
        label = ALL_RANKS if axis_of_group(name) is None else name
        if axis == "pp" and name != "pp":
            label = "stages" if name.startswith("stage ") else "shared parameters"
        return GroupTraffic(
            axis=axis,
            group=label,
            transport=dist.get_backend(group),
            ranks=len(ranks),
            hosts=len({rank // self._world.job.local_world for rank in ranks}),
            operation="send" if label == "stages" else "all_reduce",
            wait_is_for_link=not (self._compiled and axis in ("tp", "cp", "ep")),
        )

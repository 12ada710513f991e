"""Offsets between the clocks of ranks, so that their traces share one time.

All ranks exchange the time several times. A rank has its answer only after every other has sent its time, so each exchange bounds
the offset of two clocks from both sides, as in NTP's exchange of two messages (Mills, RFC 5905, section 8) but through any
collective. Ranks of one host have one clock, and no offset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unisono.dist import World
from unisono.dist.roll_call import host_id
from unisono.profile.rank_profile import Clock

_ROUNDS = 8


def measure_clocks(world: World, now_ns: Callable[[], int] = time.time_ns) -> list[Clock]:
    """The clock of each rank compared with that of rank 0. A collective."""
    if world.world_size == 1:
        return [Clock()]
    hosts: list[str] = world.all_gather_json(host_id())
    before: list[list[int]] = []  # [rounds, ranks]
    after: list[int] = []
    for _ in range(_ROUNDS):
        before.append(world.all_gather_json(now_ns()))
        after.append(now_ns())
    all_after: list[list[int]] = world.all_gather_json(after)  # [ranks, rounds]
    times = list(zip(*before, strict=True))  # [ranks, rounds]
    return [
        Clock() if hosts[rank] == hosts[0] else clock_between(times[0], all_after[0], times[rank], all_after[rank])
        for rank in range(world.world_size)
    ]


def clock_between(
    sent: Sequence[int], received: Sequence[int], other_sent: Sequence[int], other_received: Sequence[int]
) -> Clock:
    """The clock of another rank by the times [rounds], in ns of its own clock, at which each sent and had all answers."""
    # what one sends arrives after it was sent: received >= other_sent - offset, and other_received - offset >= sent
    lowest = max(theirs - mine for theirs, mine in zip(other_sent, received, strict=True))
    highest = min(theirs - mine for theirs, mine in zip(other_received, sent, strict=True))
    return Clock(offset_s=(lowest + highest) / 2e9, error_s=max(0, highest - lowest) / 2e9)

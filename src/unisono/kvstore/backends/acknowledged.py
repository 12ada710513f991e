"""The pushes that servers have acknowledged to a worker, so that it can say what a restarted server has lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from unisono.kvstore.server.chunk_payload import REFUSED
from unisono.kvstore.server.range_set import RangeSet
from unisono.kvstore.wire.frame import Frame


class AcknowledgedPushes:
    """Of each of ``num_servers``: which pushes of the worker's own stream, and which batch shards."""

    def __init__(self, num_servers: int) -> None:
        self._pushes = [RangeSet() for _ in range(num_servers)]
        self._shards = [RangeSet() for _ in range(num_servers)]
        self._lock = threading.Lock()

    def watch(self, answers: Sequence[tuple[int, Future[Frame]]], seq: int, batch_shard: int | None) -> None:
        """Count a push, number ``seq`` of the stream or ``batch_shard``, at each server that has answered all its frames.

        ``answers``: (server, answer of one frame). Counted in the thread that receives them, so before a loss of the
        connection is noticed, whether or not anybody waits for the push.
        """
        missing = Counter(server for server, _ in answers)
        for server, answer in answers:
            answer.add_done_callback(partial(self._count, server, seq, batch_shard, missing))

    def take_lost(self, server: int, hello: Mapping[str, Any]) -> int:
        """How many acknowledged pushes a restarted server does not have, by the answer to its ``hello``. Each is counted once."""
        with self._lock:
            applied = [RangeSet(spans) for spans in hello["units"]]
            self._pushes[server], lost_pushes = _split(self._pushes[server], lambda seq: seq < int(hello["seq"]))
            self._shards[server], lost_shards = _split(
                self._shards[server], lambda shard: all(shard in numbers for numbers in applied)
            )
        return lost_pushes + lost_shards

    def _count(
        self, server: int, seq: int, batch_shard: int | None, missing: Counter[int], answer: Future[Frame]
    ) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        with self._lock:
            if answer.result().flags & REFUSED:  # applied nothing, so nothing of it can be lost
                missing[server] = 0
            missing[server] -= 1
            if missing[server] != 0:
                return
            (self._pushes if batch_shard is None else self._shards)[server].add(seq)


def _split(numbers: RangeSet, is_present: Callable[[int], bool]) -> tuple[RangeSet, int]:
    """Those of ``numbers`` that are present, and how many are not."""
    present, lost = RangeSet(), 0
    for number in (number for first, end in numbers.to_json() for number in range(first, end)):
        if is_present(number):
            present.add(number)
        else:
            lost += 1
    return present, lost

"""The pushes that servers have acknowledged to a worker, so that it can say what a restarted server has lost."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from unisono.kvstore.server.chunk_payload import REFUSED
from unisono.kvstore.server.range_set import RangeSet
from unisono.kvstore.wire.frame import Frame

# the names of a server's answer to ``hello``
_Stream = Literal["applied_pushes", "applied_batch_shards"]


class AcknowledgedPushes:
    """By chunk: which pushes of the worker's own stream are acknowledged, and which batch shards.

    By chunk, because a push need not reach every chunk of a server (frozen parameters, buffers, rows of a table), and
    because a snapshot copies one chunk after the other: a push that arrives meanwhile is in some of them.
    """

    def __init__(self) -> None:
        self._acknowledged: dict[_Stream, dict[int, RangeSet]] = {
            "applied_pushes": defaultdict(RangeSet),
            "applied_batch_shards": defaultdict(RangeSet),
        }
        self._lock = threading.Lock()

    def watch(self, answer: Future[Frame], chunks: Sequence[int], seq: int, batch_shard: int | None) -> None:
        """Count the part of a push, number ``seq`` of the stream or ``batch_shard``, that one frame sends to ``chunks``.

        Counted in the thread that receives the answer, so before a loss of the connection is noticed, whether or not
        anybody waits for the push.
        """
        stream = "applied_pushes" if batch_shard is None else "applied_batch_shards"
        answer.add_done_callback(partial(self._count, stream, chunks, seq))

    def take_lost(self, hello: Mapping[str, Any]) -> int:
        """How many acknowledged pushes a restarted server does not have, or not whole, by its answer to ``hello``. Each is
        counted once."""
        with self._lock:
            return sum(self._take_lost(stream, hello[stream]) for stream in self._acknowledged)

    def _take_lost(self, stream: _Stream, applied: Sequence[tuple[list[list[int]], list[list[int]]]]) -> int:
        lost_numbers: set[int] = set()
        acknowledged = self._acknowledged[stream]
        for chunk_spans, spans in applied:
            for chunk in [number for first, end in chunk_spans for number in range(first, end)]:
                lost = acknowledged[chunk].without(RangeSet(spans))
                acknowledged[chunk] = acknowledged[chunk].without(lost)
                lost_numbers.update(number for first, end in lost.to_json() for number in range(first, end))
        return len(lost_numbers)

    def _count(self, stream: _Stream, chunks: Sequence[int], number: int, answer: Future[Frame]) -> None:
        # a refused push has applied nothing, so nothing of it can be lost
        if answer.cancelled() or answer.exception() is not None or answer.result().flags & REFUSED:
            return
        with self._lock:
            for chunk in chunks:
                self._acknowledged[stream][chunk].add(number)

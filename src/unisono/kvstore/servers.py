"""A worker's side of ``dist_async``: everything that is said to the servers that hold the parameters.

Each server has a connection for values. Server 0, the coordinator, has a second one for what may wait (a unit of work, a
fence, a barrier, a clock), so that waiting holds up neither values nor signs of life. All of it survives a server's restart:
the wire sends again what was not answered, and every request may come twice.

Values are in host memory while they travel; copying them from and to an accelerator is the caller's business.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as Answer
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.codecs import Codec, Feedback
from unisono.kvstore.keys import Future
from unisono.kvstore.server.agreed import Agreed
from unisono.kvstore.server.image import cut, decode, encode, join
from unisono.kvstore.server.payload import CODED, REFUSED, UNIT, WRITE, raw, write
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.server.ranges import RangeSet
from unisono.kvstore.server.updates import Recipe
from unisono.kvstore.wire.auth import Peer
from unisono.kvstore.wire.connection import Connection, Traffic
from unisono.kvstore.wire.frame import LARGE, Frame, Op, buffers
from unisono.kvstore.wire.message import json_frame, read_json

HEARTBEAT_S = 2.0
_FIRST = 1 << 30
_GOODBYE_S = 2.0
_WAIT_S = 5.0  # of one claim or fence: who waits longer asks again, which also finds out that the server has gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What became of a push: chunks that had it already, whether it was refused as not finite, the oldest version there was."""

    duplicates: int
    refused: bool


class Servers:
    """Connections to all servers of a run, as ``worker`` in its ``incarnation`` (one higher at each restart of it).

    ``agreed`` is what all workers say alike; a server refuses one who says otherwise, naming the first difference. ``say`` is
    told of what was lost with a server. Raises CommError when a server cannot be reached within ``deadline_s``, AuthError
    when it, or this worker, does not hold ``secret``.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        agreed: Agreed,
        *,
        worker: int,
        incarnation: int = 0,
        codec: Codec | None = None,
        deadline_s: float = 60.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.placement = agreed.placement()
        self.worker = worker
        self._codec, self._say = codec, say
        self._feedback: Feedback | None = None
        self._groups = cache(self._grouped)
        me = Peer("worker", worker, incarnation, agreed.job, "")
        facts = agreed.json()
        self._links: list[Connection] = []
        self._versions = [0] * len(addresses)
        self._acknowledged = [0] * len(addresses)  # one more than the last push of this worker's own stream
        self._units = [RangeSet() for _ in addresses]  # acknowledged too
        self._noting = threading.Lock()
        self._beats = threading.Event()
        try:
            for server, address in enumerate(addresses):
                self._links.append(
                    Connection(
                        address, secret, me, facts, limits=LARGE, deadline_s=deadline_s, on_reconnect=self._back(server)
                    )
                )
            self._talk = Connection(addresses[0], secret, me, facts, limits=LARGE, deadline_s=deadline_s)
        except BaseException:
            for link in self._links:
                link.close()
            raise
        self._numbers = itertools.count(max(int(link.hello["seq"]) for link in self._links))
        self._asked = itertools.count(1)
        self._heart = threading.Thread(target=self._beat, name="unisono-heartbeat", daemon=True)
        self._heart.start()

    # --- values ----------------------------------------------------------------------------------------------------

    @property
    def initialised(self) -> bool:
        """Whether the servers had all values when this worker came."""
        here = [set(link.hello["initialised"]) for link in self._links]
        return all({c.number for c in self.placement.on(s)} <= found for s, found in enumerate(here))

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Give the servers values where they have none. Returns when all have theirs."""
        parts = {key: raw(value.detach().cpu().contiguous()) for key, value in values.items()}
        _all(
            [self._request(server, self._write(Op.INIT, group, parts)) for server, group in self._groups(tuple(values))]
        )

    def push(
        self, values: Mapping[str, Tensor], *, lr: float = float("nan"), unit: int | None = None, priority: int = 0
    ) -> Future[Sent]:
        """Have the servers apply gradients, each key's once. ``values`` are on the CPU and stay as they are until the future is
        done. ``unit``: the unit of work they belong to, which counts in place of this worker's own pushes. ``lr``: NaN for the
        servers' own rate."""
        return self._pushed(Op.PUSH, values, {}, lr, unit, priority)

    def pushpull(
        self,
        values: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        *,
        lr: float = float("nan"),
        unit: int | None = None,
        priority: int = 0,
    ) -> Future[Sent]:
        """``push``, and the values that came of it straight into the memory of ``into`` (same keys, contiguous, on the CPU)."""
        return self._pushed(Op.PUSHPULL, values, into, lr, unit, priority)

    def pull(self, into: Mapping[str, Tensor], *, priority: int = 0) -> Future[None]:
        """The values of now, into the memory of ``into`` (contiguous, on the CPU)."""
        targets = {key: raw(tensor) for key, tensor in into.items()}
        answers: list[tuple[int, Answer[Frame]]] = []
        for server, group in self._groups(tuple(into)):
            frame = write(Op.PULL, [(chunk.number, memoryview(b"")) for chunk in group], dtype="float32")
            places = [_of(targets[chunk.key], chunk) for chunk in group]
            answers.append((server, self._links[server].request(frame, priority, places)))

        def finish() -> None:
            for server, answer in answers:
                self._versions[server] = answer.result().clock

        return Future(finish, lambda: all(answer.done() for _, answer in answers))

    def commit(self) -> None:
        """What the pushes since the last call left out is added to the next ones; with a codec only."""
        if self._feedback is not None:
            self._feedback.commit(True)

    def residuals(self) -> dict[str, Tensor]:
        """What this worker's codec holds back, to be given to ``load_residuals``."""
        return {} if self._feedback is None else self._feedback.state_dict()

    # --- the optimizer ---------------------------------------------------------------------------------------------

    def set_recipe(self, recipe: Recipe) -> None:
        """How the servers apply gradients. Raises CommError where they were told otherwise."""
        _all([link.request(json_frame(Op.OPTIMIZER, recipe.json())) for link in self._links])

    def state(self) -> dict[str, Tensor]:
        """Values and the optimizer's tensors, whole, as ``<key>`` and ``optim/<state>/<key>``; of a key without pushes its value
        alone."""
        tensors: dict[str, Tensor] = {}
        for server, group in self._groups(tuple(self.placement.shapes)):
            frame = json_frame(Op.STATE, {"chunks": [chunk.number for chunk in group]})
            tensors |= decode(b"".join(buffers(self._links[server].request(frame).result())))[1]
        return join(self.placement, tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace values and optimizer state (as ``state`` gives them), as if nothing had been pushed yet."""
        pieces = cut(self.placement, tensors)
        for server, group in self._groups(tuple(self.placement.shapes)):
            facts = {str(chunk.number): {"version": 0, "applied": {}} for chunk in group}
            own = {name: piece for name, piece in pieces.items() if name.partition("/")[0] in facts}
            image = encode({"recipe": None, "chunks": facts}, own)
            self._links[server].request(Frame(Op.STATE, flags=WRITE, payload=image)).result()

    # --- work, clocks, meetings ------------------------------------------------------------------------------------

    def claim(self, *, wait: bool) -> int | Literal["wait", "end"]:
        """The next unit of work; ``"wait"`` where there is none now (with ``wait`` after a while), ``"end"`` when all are
        done."""
        content = {"wait_s": _WAIT_S if wait else 0.0}
        return read_json(self._say_to_coordinator(replace(json_frame(Op.CLAIM, content), seq=next(self._asked))))[
            "unit"
        ]

    def done(self, unit: int) -> None:
        """All pushes of ``unit`` are acknowledged."""
        self._say_to_coordinator(json_frame(Op.DONE, {"unit": unit}))

    def fence(self, unit: int | None, *, wait: bool = False) -> bool:
        """Have no unit from ``unit`` on dealt, None: release; whether all before are done (with ``wait`` after a while)."""
        content = {"fence": unit, "wait_s": _WAIT_S if wait else 0.0}
        return bool(read_json(self._say_to_coordinator(json_frame(Op.BARRIER, content)))["quiet"])

    def tick(self, clock: int) -> None:
        """This worker has made ``clock`` steps; returns when the slowest live one is at most the agreed staleness behind."""
        self._say_to_coordinator(Frame(Op.TICK, clock=clock))

    def barrier(self, number: int) -> None:
        """Return when all live workers have called it with ``number``, which rises from call to call."""
        self._say_to_coordinator(json_frame(Op.BARRIER, {"number": number}))

    def snapshot(self) -> None:
        """Have every server save itself now."""
        _all([link.request(Frame(Op.SNAPSHOT)) for link in self._links])

    def stats(self) -> list[dict[str, Any]]:
        """What each server has counted."""
        return [read_json(link.request(Frame(Op.STATS)).result()) for link in self._links]

    def traffic(self) -> list[Traffic]:
        """Bytes and requests of each connection for values."""
        return [link.traffic() for link in self._links]

    def close(self) -> None:
        """Leave: what this worker had claimed and not done is dealt to others at once."""
        self._beats.set()
        self._heart.join()
        with suppress(CommError, TimeoutError):  # a coordinator that is away notices by itself
            self._talk.request(Frame(Op.BYE)).result(_GOODBYE_S)
        for link in [self._talk, *self._links]:
            link.close()

    # --- how -------------------------------------------------------------------------------------------------------

    def _pushed(
        self,
        op: Op,
        values: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        lr: float,
        unit: int | None,
        priority: int,
    ) -> Future[Sent]:
        seq = next(self._numbers) if unit is None else unit
        sources = self._coded(values) if self._codec is not None else {key: raw(each) for key, each in values.items()}
        targets = {key: raw(each) for key, each in into.items()}
        answers: list[tuple[int, int, Answer[Frame]]] = []
        for server, group in self._groups(tuple(values)):
            frame = replace(
                self._write(op, group, sources, prefix=(lr, self._versions[server])),
                seq=seq,
                flags=0 if unit is None else UNIT,
                codec=CODED if self._codec is not None else 0,
            )
            places = [_of(targets[chunk.key], chunk) for chunk in group] if into else None
            answers.append((server, len(group), self._links[server].request(frame, priority, places)))

        def finish() -> Sent:
            duplicates, refused = 0, False
            for server, chunks, answer in answers:
                reply = answer.result()
                refused |= bool(reply.flags & REFUSED)
                duplicates += chunks - reply.entries if reply.op is Op.ACK and not reply.flags & REFUSED else 0
                with self._noting:
                    if unit is None:
                        self._acknowledged[server] = max(self._acknowledged[server], seq + 1)
                    elif reply.flags & REFUSED == 0:
                        self._units[server].add(unit)
                if into:
                    self._versions[server] = reply.clock
            return Sent(duplicates=duplicates, refused=refused)

        return Future(finish, lambda: all(answer.done() for *_, answer in answers))

    def _coded(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Every chunk's code, by key and start."""
        assert self._codec is not None
        parts = {
            _name(chunk): (chunk, value.reshape(-1)[chunk.start : chunk.start + chunk.elements])
            for key, value in values.items()
            for chunk in self.placement.of(key)
        }
        if self._feedback is None:
            whole = {
                _name(chunk): torch.empty(chunk.elements, dtype=chunk.dtype)
                for chunk in self.placement.chunks
                if chunk.dtype.is_floating_point
            }
            self._feedback = Feedback(whole, worker=self.worker)
        return {name: raw(self._feedback.encode(self._codec, name, value)) for name, (_, value) in parts.items()}

    def _write(
        self, op: Op, group: Sequence[Chunk], sources: Mapping[str, memoryview], prefix: tuple[float, int] | None = None
    ) -> Frame:
        parts = [
            (chunk.number, sources[_name(chunk)] if _name(chunk) in sources else _of(sources[chunk.key], chunk))
            for chunk in group
        ]
        return write(op, parts, dtype=str(group[0].dtype).removeprefix("torch."), prefix=prefix)

    def _grouped(self, keys: tuple[str, ...]) -> list[tuple[int, list[Chunk]]]:
        """(server, chunks that travel in one frame), in the order of sending: servers take turns."""
        lines = [[(s, group) for group in self.placement.groups(keys, s)] for s in range(self.placement.servers)]
        turns = itertools.zip_longest(*lines)
        return [each for turn in turns for each in turn if each is not None]

    def _request(self, server: int, frame: Frame) -> Answer[Frame]:
        return self._links[server].request(frame)

    def _say_to_coordinator(self, frame: Frame) -> Frame:
        return self._talk.request(frame).result()

    def _back(self, server: int) -> Callable[[dict[str, Any]], None]:
        def told(hello: dict[str, Any]) -> None:
            with self._noting:
                lost = max(self._acknowledged[server] - int(hello["seq"]), 0)
                self._acknowledged[server] -= lost  # said once
                kept = [RangeSet(spans) for spans in hello["units"]]
                units = [unit for first, end in self._units[server].json() for unit in range(first, end)]
                there = [unit for unit in units if all(unit in each for each in kept)]
                if len(there) < len(units):
                    lost += len(units) - len(there)
                    self._units[server] = RangeSet()
                    for unit in there:
                        self._units[server].add(unit)
            if lost > 0:
                self._say(
                    f"server {server} was restarted and has lost {lost} acknowledged pushes of worker {self.worker}"
                )

        return told

    def _beat(self) -> None:
        while not self._beats.wait(HEARTBEAT_S):
            for link in self._links:
                with suppress(CommError):  # a connection that was given up: whoever uses it next is told
                    link.request(Frame(Op.HEARTBEAT), priority=_FIRST)


def _name(chunk: Chunk) -> str:
    return f"{chunk.key}@{chunk.start}"


def _of(data: memoryview, chunk: Chunk) -> memoryview:
    """A chunk's bytes among those of its key."""
    start = chunk.start * chunk.dtype.itemsize
    return data[start : start + chunk.nbytes]


def _all(answers: Sequence[Answer[Frame]]) -> None:
    for answer in answers:
        answer.result()

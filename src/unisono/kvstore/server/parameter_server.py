"""One parameter server: its answer to each request. The wire calls it from one thread per connection.

Requests may come twice, because an answer was lost: each is idempotent. Server 0 is also the coordinator: it alone
keeps clocks, the work queue and barriers, and workers send their heartbeats to it.

With replicas, a push is forwarded to the next server before it is acknowledged, while its chunks are still locked, so
the replica applies pushes in the same order. A replica that does not know a chunk, because it has just started,
refuses; it then gets the chunk's full state. Replicas answer to servers only. Finished work is told to the replica before
it is acknowledged too: a work queue behind the chunks would repeat saves, of values that have later shards in them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unisono.errors import CommError, ConfigError, UnisonoError
from unisono.kvstore.compression import Codec, PowerSGD, find_codec
from unisono.kvstore.compression.codec import accumulation_dtype, can_compress_values
from unisono.kvstore.server import snapshot
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.chunk_payload import (
    BATCH_SHARD,
    CODED,
    REFUSED,
    WRITE,
    Decoder,
    answer_views,
    chunk_rows,
    chunk_tensor,
    chunk_values_frame,
    common_dtype,
    raw_bytes,
    read_bases,
    read_chunks,
    read_requested_chunks,
    write_chunks,
)
from unisono.kvstore.server.chunk_state import decode_chunk_state, encode_chunk_state
from unisono.kvstore.server.chunk_store import ChunkGradient, ChunkStore, PushHeader
from unisono.kvstore.server.load_meter import LoadMeter
from unisono.kvstore.server.membership import Clocks, NumberedBarriers, PeerTable
from unisono.kvstore.server.placement import ChunkPlacement
from unisono.kvstore.server.pull_compression import PullEncoder, RequestedChunk
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.work_queue import WorkItem, WorkQueue
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.frame import Frame, Op, json_frame, payload_views, protocol_error, read_json

_CHECK_S = 0.25  # interval between checks of leases
_STALL_S = 1.0  # a longer gap between checks means that this process stood still
_LONGEST_WAIT_S = 60.0  # of one CLAIM; a client that waits longer asks again
_NEEDS_LEASE = frozenset({Op.TICK, Op.HEARTBEAT, Op.CLAIM, Op.BARRIER})


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunState:
    """State that exists once the first hello, or a snapshot, has described the run."""

    run_spec: RunSpec
    placement: ChunkPlacement
    stores: Mapping[str, ChunkStore]  # by the peer's role: the server's own chunks for workers, the replica for servers
    clocks: Clocks
    work_queue: WorkQueue
    barriers: NumberedBarriers
    decoders: Mapping[int, Decoder]  # by a codec's number in frames
    pull_encoder: PullEncoder | None  # None where the run's codec cannot compress values


class ParameterServer:
    """Server number ``server``.

    ``forward`` sends a frame to the next server and returns its answer; None without replicas. ``held``: workers wait
    in their hello until ``admit_workers``; servers do not. ``snapshots``: a folder, None for no snapshots; the first is
    written once all values are there, then every ``snapshot_every_s``. ``on_stale`` is called when another server
    writes there: this one was replaced. ``say`` gets messages for the user. An existing snapshot is loaded in the
    constructor; raises CommError if none is intact.
    """

    def __init__(
        self,
        server: int,
        *,
        forward: Callable[[RunSpec, Frame], Frame] | None = None,
        held: bool = False,
        snapshots: Path | None = None,
        snapshot_every_s: float = 60.0,
        on_stale: Callable[[str], None] = print,
        say: Callable[[str], None] = print,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._forward, self._on_stale = server, forward, on_stale
        self._admission_open = threading.Event()
        if not held:
            self._admission_open.set()
        self._snapshots, self._snapshot_every_s, self._say, self._now = snapshots, snapshot_every_s, say, now
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._run: _RunState | None = None
        self._peers = {"worker": PeerTable(), "server": PeerTable()}
        self._claims: dict[int, tuple[int, int, WorkItem]] = {}  # by worker: restart count, CLAIM, item
        self._claiming: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._counts: Counter[str] = Counter()
        self._replica_queue: Mapping[str, Any] | None = None  # state of the work queue of the server before this one
        self._largest_lag = 0
        self._lag_square_total = 0  # over all pushes; of the lags themselves the mean is fixed (``rms_lag``)
        self._load = LoadMeter()
        self._stop = threading.Event()
        self._saved = 0  # the newest snapshot that this server knows
        newest = snapshot.read_newest_snapshot(snapshots) if snapshots is not None else None
        if newest is not None:
            for reason in newest.set_aside:
                say(f"server {server}: a snapshot is damaged and was quarantined: {reason}")
            self._saved = newest.number
            self._restore(newest.facts, newest.tensors)
            say(
                f"server {server}: continues from snapshot {newest.number}; pushes since then are lost without a replica"
            )
        self._maintenance = threading.Thread(target=self._maintain, name="unisono-server-keeper", daemon=True)
        self._maintenance.start()

    # --- called by the wire

    def hello(self, peer: Identity, facts: dict[str, Any]) -> dict[str, Any]:
        """Admit a peer whose run spec equals the others'; returns the dictionary below, in which ``seq`` is the first
        free number of the worker's stream.

        A server that has lost its state sends no facts, and gets the run spec.
        """
        peers = self._peers[peer.role]
        if peer.role == "server" and not facts:
            peers.connect(peer)
            return {"agreed": self._run.run_spec.to_json() if self._run is not None else None}
        if peer.role == "worker":
            self._admission_open.wait()
        run_spec = RunSpec.from_json(facts)
        run = self._ensure_run(run_spec)
        run.run_spec.require_equal(run_spec, f"{peer.role} {peer.index}")
        peers.check(peer)
        clock = run.clocks.join(peer.index, peer.worker_restart_count) if peer.role == "worker" else 0
        peers.connect(peer)
        run.barriers.recheck()
        store = run.stores[peer.role]
        return {
            "server": self._server,
            "placement": run.placement.hash,
            "clock": clock,
            "initialised": store.initialised_chunks,
            "optimizer": store.optimizer_spec is not None,
            "seq": store.next_seq(peer.index + 1),
            "applied_pushes": store.applied_ranges(peer.index + 1),
            "applied_batch_shards": store.applied_ranges(0),
        }

    def gone(self, peer: Identity) -> None:
        """A connection has closed."""
        if self._peers[peer.role].disconnect(peer) and peer.role == "worker":
            self._require_run().clocks.connection_closed(peer.index, peer.worker_restart_count)

    def handle(self, peer: Identity, frame: Frame) -> Frame:
        """Answer a request. Raises UnisonoError for an invalid one, which changes nothing."""
        run = self._require_run()
        self._peers[peer.role].check(peer)
        if peer.role == "worker" and frame.op in _NEEDS_LEASE:
            run.clocks.join(peer.index, peer.worker_restart_count)  # a worker whose lease had ended is back
        with self._lock:
            self._counts[frame.op.name.lower()] += 1
            self._counts["bytes_in"] += sum(part.nbytes for part in payload_views(frame))
        match frame.op:
            case Op.INIT:
                answer = self._init(run, peer, frame)
            case Op.PUSH | Op.PULL | Op.PUSHPULL | Op.ROWS:
                with self._load.serving():
                    answer = self._exchange(run, peer, frame)
            case Op.OPTIMIZER:
                run.stores[peer.role].set_optimizer_spec(ServerOptimizerSpec.from_json(read_json(frame)))
                answer = Frame(Op.ACK)
            case Op.STATE:
                answer = self._state(run, peer, frame)
            case Op.SNAPSHOT:
                answer = json_frame(Op.JSON, {"number": self.save() if self._snapshots is not None else None})
            case Op.STATS:
                answer = json_frame(Op.JSON, self.stats())
            case Op.TICK | Op.HEARTBEAT | Op.CLAIM | Op.DONE | Op.BARRIER | Op.BYE:
                answer = self._coordinate(run, peer, frame)
            case _:
                rule = "servers answer requests; HELLO, ACK, DATA, JSON and ERROR are none"
                raise protocol_error(f"{frame.op.name} as a request", rule)
        with self._lock:
            self._counts["bytes_out"] += sum(part.nbytes for part in payload_views(answer))
        return replace(answer, seq=frame.seq)

    def _exchange(self, run: _RunState, peer: Identity, frame: Frame) -> Frame:
        """Change values, or read them."""
        if frame.op is Op.ROWS:
            return self._rows(run, peer, frame)
        if frame.op is Op.PULL:
            return self._pull(run, peer, frame, read_requested_chunks(frame))
        pushed = self._push(run, peer, frame)
        if frame.op is Op.PUSH:
            return pushed
        pulled = self._pull(run, peer, frame, [number for number, _ in read_chunks(frame, prefix=True)[0]])
        return replace(pulled, flags=pulled.flags | pushed.flags)

    # --- called by the process

    def adopt_replica_state(self, image: bytes) -> None:
        """Load chunks that a replica kept for this server (the answer to STATE), before workers connect."""
        facts, tensors = decode_chunk_state(image)
        run = self._ensure_run(RunSpec.from_json(facts["agreed"]))
        self._load_state(run.stores["worker"], facts, tensors)
        if facts["deal"] is not None:
            with self._lock:
                self._run = replace(run, work_queue=self._work_queue(run.run_spec, facts["deal"]))

    def admit_workers(self) -> None:
        self._admission_open.set()

    @property
    def num_live_workers(self) -> int:
        """Workers with a running lease."""
        return len(self._run.clocks.live_clocks) if self._run is not None else 0

    @property
    def run_spec(self) -> RunSpec | None:
        """The run's spec from a hello or a snapshot; None before."""
        return self._run.run_spec if self._run is not None else None

    def save(self) -> int:
        """Write a snapshot now; returns its number. Raises CommError without a folder or state, and for disk errors."""
        with self._saving:
            if self._snapshots is None or self._run is None:
                why = "it has no folder for them" if self._snapshots is None else "there is no run yet"
                raise _snapshot_not_written(why)
            try:
                store = self._run.stores["worker"]
                image = self._full_state(self._run, store, store.initialised_chunks)
                self._saved = snapshot.write_snapshot(self._snapshots, *image, after=self._saved)
                return self._saved
            except OSError as error:
                raise _snapshot_not_written(str(error)) from error

    def stats(self) -> dict[str, Any]:
        """Requests by kind, bytes, the largest lag so far and the sum of the squares of all, the load (``LoadMeter``), live
        workers with their clocks, workers ever connected, chunks with a value, batch shards done."""
        with self._lock:
            run, counts = self._run, dict(sorted(self._counts.items()))
            lags = {"largest_lag": self._largest_lag, "lag_square_total": self._lag_square_total}
        counters = {"server": self._server, "counts": counts, "load": self._load.stats(), **lags}
        if run is None:
            return counters
        workers = {str(worker): clock for worker, clock in run.clocks.live_clocks.items()}
        return counters | {
            "workers": workers,
            "workers_ever": self._peers["worker"].num_ever_connected,
            "chunks": len(run.stores["worker"].initialised_chunks),
            "units_done": run.work_queue.num_done,
        }

    def close(self) -> None:
        """Wake all waiting requests. State that was not saved is lost."""
        self._stop.set()
        self._admission_open.set()
        self._maintenance.join()
        if self._run is not None:
            self._run.clocks.close()
            self._run.work_queue.close()
            self._run.barriers.close()

    # --- requests

    def _init(self, run: _RunState, peer: Identity, frame: Frame) -> Frame:
        store, (parts, _, _) = run.stores[peer.role], read_chunks(frame, prefix=False)
        values = [(chunk, chunk_tensor(replace(frame, codec=0), data, store.chunk(chunk), {})) for chunk, data in parts]
        num_new = sum(store.init(chunk, value) for chunk, value in values)
        if peer.role == "worker":
            self._replicate(run, frame, [chunk for chunk, _ in values])
        return Frame(Op.ACK, entries=num_new)

    def _push(self, run: _RunState, peer: Identity, frame: Frame, entries: list[ChunkGradient] | None = None) -> Frame:
        store, (parts, lr, base_version) = run.stores[peer.role], read_chunks(frame, prefix=True)
        if entries is None:
            entries = [
                ChunkGradient(chunk, chunk_tensor(frame, data, store.chunk(chunk), run.decoders))
                for chunk, data in parts
            ]
        # a server forwards for a worker, and says in ``clock`` for which
        worker = frame.clock if peer.role == "server" else peer.index
        stream = 0 if frame.flags & BATCH_SHARD else worker + 1
        push = PushHeader(worker=worker, stream=stream, sequence_number=frame.seq, lr=lr, base_version=base_version)
        chunks = [entry.chunk for entry in entries]
        forwarded = replace(frame, op=Op.PUSH if frame.op is Op.PUSHPULL else frame.op, clock=worker)
        replicate = (lambda: self._replicate(run, forwarded, chunks)) if peer.role == "worker" else None
        outcome = store.push(entries, push, replicate)
        with self._lock:
            self._counts["applied"] += outcome.applied
            self._counts["duplicates"] += outcome.duplicates
            self._counts["refused"] += bool(outcome.refused)
            self._largest_lag = max(self._largest_lag, outcome.lag)
            self._lag_square_total += outcome.lag**2
        return Frame(Op.ACK, entries=outcome.applied, clock=outcome.version, flags=REFUSED if outcome.refused else 0)

    def _pull(self, run: _RunState, peer: Identity, frame: Frame, chunks: list[int]) -> Frame:
        store, based = run.stores[peer.role], read_bases(frame, prefix=frame.op is Op.PUSHPULL)
        if based and run.pull_encoder is not None and all(store.chunk(n).dtype.is_floating_point for n in chunks):
            return self._pull_compressed(run.pull_encoder, store, peer, list(zip(chunks, based, strict=True)))
        places = answer_views(frame, [store.chunk(number) for number in chunks])
        pulled = [(number, *store.pull(number, into=into)) for number, into in zip(chunks, places, strict=True)]
        return chunk_values_frame(pulled)

    def _pull_compressed(
        self, pull_encoder: PullEncoder, store: ChunkStore, peer: Identity, requested: list[tuple[int, int]]
    ) -> Frame:
        """The compressed deltas of a worker that names bases, or exact values."""
        current = [(chunk, base, *store.pull(chunk)) for chunk, base in requested]
        pulled = [RequestedChunk(chunk=chunk, base=base, value=value, version=at) for chunk, base, value, at in current]
        answer = pull_encoder.answer(peer.index, pulled)
        parts = [(chunk, raw_bytes(data)) for (chunk, _), data in zip(requested, answer.data, strict=True)]
        frame = write_chunks(Op.DATA, parts, dtype=common_dtype(chunk.value for chunk in pulled), based=answer.numbers)
        return replace(frame, codec=CODED if answer.coded else 0, clock=answer.version)

    def _rows(self, run: _RunState, peer: Identity, frame: Frame) -> Frame:
        store, writes = run.stores[peer.role], bool(frame.flags & WRITE)
        parts, _, _ = read_chunks(frame, prefix=writes)
        entries = [chunk_rows(frame, data, store.chunk(chunk)) for chunk, data in parts]
        if writes:
            return self._push(run, peer, frame, entries)
        return chunk_values_frame([(entry.chunk, *store.pull(entry.chunk, entry.rows)) for entry in entries])

    def _state(self, run: _RunState, peer: Identity, frame: Frame) -> Frame:
        store = run.stores[peer.role]
        if frame.flags & WRITE:
            facts, tensors = decode_chunk_state(b"".join(payload_views(frame)))
            self._load_state(store, facts, tensors)
            if peer.role == "server" and "deal" in facts:
                self._work_queue(run.run_spec, facts["deal"])  # refused here if it is none
                self._replica_queue = facts["deal"]
            if peer.role == "worker" and run.pull_encoder is not None:
                run.pull_encoder.clear()
            return Frame(Op.ACK)
        chunks = read_json(frame).get("chunks")
        if not isinstance(chunks, list) or not all(type(number) is int for number in chunks):
            raise _wrong(frame, "chunks", chunks, "chunks is a list of the numbers of chunks")
        facts, tensors = self._full_state(run, store, sorted(set(chunks)))
        if peer.role == "server":  # of which this is the replica
            facts["deal"] = self._replica_queue
        return Frame(Op.DATA, payload=encode_chunk_state(facts, tensors))

    def _coordinate(self, run: _RunState, peer: Identity, frame: Frame) -> Frame:
        worker, restart_count = peer.index, peer.worker_restart_count
        match frame.op:
            case Op.TICK:
                return Frame(Op.ACK, clock=run.clocks.tick(worker, restart_count, frame.clock))
            case Op.CLAIM:
                work = self._claim(run, peer, frame)
                more = {"weight": run.work_queue.total_weight, "last": work.number >= run.work_queue.end_shard}
                return json_frame(Op.JSON, work._asdict() | more | {"history_id": run.work_queue.history_id})
            case Op.DONE:
                return self._done(run, frame)
            case Op.BARRIER:
                run.barriers.arrive(worker, _integer(frame, "number"))
                return Frame(Op.ACK)
            case Op.BYE:
                run.clocks.leave(worker, restart_count)
                return Frame(Op.ACK)
            case _:
                return Frame(Op.ACK, clock=run.clocks.slowest_clock)

    def _claim(self, run: _RunState, peer: Identity, frame: Frame) -> WorkItem:
        """A work item. The same CLAIM, by its number, gets the same item; an item whose answer was lost would otherwise
        be held for ever."""
        content = read_json(frame)
        with self._lock:
            claiming = self._claiming[peer.index]
        with claiming:  # the first request may still wait, on a lost connection
            earlier = self._claims.get(peer.index)
            if earlier is not None and earlier[:2] == (peer.worker_restart_count, frame.seq):
                return earlier[2]
            leads = lambda: peer.index == min(run.clocks.live_clocks, default=peer.index)  # noqa: E731
            work = run.work_queue.claim(peer.index, _wait_s(content), leads)
            if work.kind in ("begin", "unit", "save"):
                try:
                    run.clocks.seen(peer.index, peer.worker_restart_count)
                except CommError:
                    # it died while it waited; its newer process, if any, holds no item before this returns
                    run.work_queue.give_back(peer.index)
                    raise
                self._claims[peer.index] = peer.worker_restart_count, frame.seq, work
            return work

    def _done(self, run: _RunState, frame: Frame) -> Frame:
        content = read_json(frame)
        kind, weight, history_id = content.get("kind"), content.get("weight", 0.0), content.get("history_id")
        if kind in ("stop", "finish"):
            run.work_queue.stop(finished=kind == "finish")
            return Frame(Op.ACK)
        if kind not in ("begin", "unit", "save"):
            raise _wrong(frame, "kind", kind, "kind is begin, unit, save, stop or finish")
        if not isinstance(weight, (int, float)):
            raise _wrong(frame, "weight", weight, "weight is a number")
        new = run.work_queue.mark_done(WorkItem(kind, _integer(frame, "number")), float(weight), history_id)
        if new and kind == "begin" and self._snapshots is not None:
            self.save()  # a restarted server must not have a worker begin again in the middle of the run
        return json_frame(Op.JSON, {"new": new})

    # --- state

    def _ensure_run(self, run_spec: RunSpec) -> _RunState:
        with self._lock:
            if self._run is None:
                self._run = self._new_run(run_spec)
            return self._run

    def _new_run(self, run_spec: RunSpec) -> _RunState:
        placement = run_spec.placement()
        if self._server >= run_spec.num_servers:
            raise CommError(
                given=f"a worker that knows of {run_spec.num_servers} servers, at server {self._server}",
                rule="servers are numbered from 0",
                consequence="the worker was refused",
                nearest="start as many servers as the configuration says",
            )
        before = (self._server - 1) % run_spec.num_servers
        codec = None if run_spec.codec == "none" else server_codec(run_spec.codec)
        clocks = Clocks(run_spec.staleness, on_end=self._lease_ended, now=self._now)
        return _RunState(
            run_spec=run_spec,
            placement=placement,
            stores={
                "worker": ChunkStore(placement.chunks_on(self._server)),
                "server": ChunkStore(placement.chunks_on(before)),
            },
            clocks=clocks,
            work_queue=self._work_queue(run_spec),
            barriers=NumberedBarriers(lambda: clocks.live_clocks.keys()),
            decoders={} if codec is None else {CODED: _decoder(codec)},
            pull_encoder=PullEncoder(codec) if codec is not None and can_compress_values(codec) else None,
        )

    def _work_queue(self, run_spec: RunSpec, state: Mapping[str, Any] | None = None) -> WorkQueue:
        """A new one, or one that continues from ``state``; a server with a replica tells it of all that is finished."""

        def tell(state: Mapping[str, Any]) -> None:
            assert self._forward is not None
            image = encode_chunk_state({"recipe": None, "chunks": {}, "deal": state}, {})
            self._forward(run_spec, Frame(Op.STATE, flags=WRITE, payload=image))

        before_unlock = tell if self._forward is not None else None
        if state is not None:
            try:
                return WorkQueue.from_json(state, before_unlock=before_unlock)
            except (KeyError, TypeError, ValueError) as error:
                given = f"a work queue that cannot be read: {error!r}"
                raise protocol_error(given, "it is as WorkQueue.to_json returns it", "it was not loaded") from error
        return WorkQueue(
            run_spec.num_batch_shards,
            batch_shards_per_save=run_spec.batch_shards_per_save,
            batch_shards_per_step=run_spec.batch_shards_per_step,
            staleness=run_spec.staleness,
            before_unlock=before_unlock,
        )

    def _full_state(
        self, run: _RunState, store: ChunkStore, numbers: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The full state. The work queue is read first: a batch shard that is done in it was applied before, so it is
        in the chunks read after."""
        work_queue, clock = run.work_queue.to_json(), run.clocks.slowest_clock
        facts, tensors = store.state(numbers)
        # stored names of the first release
        return {"agreed": run.run_spec.to_json(), "deal": work_queue, "clock": clock, **facts}, tensors

    def _restore(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        run = self._new_run(RunSpec.from_json(facts["agreed"]))
        self._load_state(run.stores["worker"], facts, tensors)
        run.clocks.start_at(facts["clock"])
        with self._lock:
            self._run = replace(run, work_queue=self._work_queue(run.run_spec, facts["deal"] | {"history_id": None}))

    def _load_state(self, store: ChunkStore, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            store.load_state(facts, tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            given = f"a state whose facts cannot be read: {error!r}"
            rule = "they name recipe and chunks, and of each chunk version and applied"
            raise protocol_error(given, rule, "nothing was loaded") from error

    def _replicate(self, run: _RunState, frame: Frame, chunks: list[int]) -> None:
        """Forward a frame to the next server or, where that fails, the full state of its chunks."""
        if self._forward is None:
            return
        try:
            self._forward(run.run_spec, frame)
        except UnisonoError:
            image = encode_chunk_state(*run.stores["worker"].state(chunks))
            self._forward(run.run_spec, Frame(Op.STATE, flags=WRITE, payload=image))
            with self._lock:
                self._counts["mirrored_whole"] += 1

    def _require_run(self) -> _RunState:
        if self._run is None:
            raise CommError(
                given="a request to a server that knows no run",
                rule="a worker says hello first",
                consequence="nothing was done",
                nearest="open a connection: its hello sends the run spec",
            )
        return self._run

    def _lease_ended(self, worker: int) -> None:
        """A lease has ended, or a worker has left: return its items and stop waiting for it."""
        if self._run is not None:
            self._run.work_queue.give_back(worker)
            self._run.barriers.recheck()
            if self._run.pull_encoder is not None:
                self._run.pull_encoder.drop_worker(worker)

    def _maintain(self) -> None:
        """End expired leases, write periodic snapshots, and detect that another server has taken this one's place."""
        saved_s, looked_s = -math.inf, time.monotonic()
        while not self._stop.wait(_CHECK_S):
            gap_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            if (run := self._run) is None or not self._admission_open.is_set():
                continue
            if gap_s > _STALL_S:
                run.clocks.extend_leases(gap_s)
            for worker in run.clocks.end_expired_leases():
                self._say(
                    f"server {self._server}: worker {worker} sent no heartbeat, and no worker waits for it any more"
                )
            if self._snapshots is None or len(run.stores["worker"].initialised_chunks) < len(
                run.placement.chunks_on(self._server)
            ):
                continue
            with self._saving:
                newer = snapshot.latest_snapshot_number(self._snapshots)
                stale = newer > self._saved
            if stale:
                self._on_stale(str(snapshot.newer_snapshot_error(self._snapshots, newer, self._saved)))
                return
            if time.monotonic() - saved_s >= self._snapshot_every_s:
                try:
                    self.save()
                except CommError as error:
                    self._say(f"server {self._server}: {error}")
                saved_s = time.monotonic()


def _decoder(codec: Codec) -> Decoder:
    def decode(data: memoryview, elements: int, dtype: torch.dtype) -> torch.Tensor:
        code = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
        return codec.decode(code, elements, accumulation_dtype(dtype)).to(dtype)

    return decode


def server_codec(text: str) -> Codec:
    """The codec for pushes to servers. Raises ConfigError for PowerSGD, which needs all workers at once."""
    parsed = find_codec(text)
    if isinstance(parsed, PowerSGD):
        raise ConfigError(
            given=f"compression {text!r} with 'dist_async'",
            rule="its factors are summed over all workers at once, and servers see one worker at a time",
            consequence="no server could tell what a push means",
            nearest="int8, topk:0.01 or 2bit:0.5, or dist_sync",
        )
    return parsed


def _integer(frame: Frame, name: str) -> int:
    value = read_json(frame).get(name)
    if type(value) is int and value >= 0:
        return value
    raise _wrong(frame, name, value, f"{name} is a whole number from 0")


def _wrong(frame: Frame, name: str, value: object, rule: str) -> CommError:
    return protocol_error(f"{frame.op.name} with {name} = {value!r}", rule)


def _wait_s(content: Mapping[str, Any]) -> float:
    value = content.get("wait_s", 0)
    return min(float(value), _LONGEST_WAIT_S) if isinstance(value, (int, float)) else 0.0


def _snapshot_not_written(reason: str) -> CommError:
    return CommError(
        given=f"a snapshot that was not written: {reason}",
        rule="a server saves itself to its own folder",
        consequence="earlier snapshots are as they were, and training continues",
        nearest="remove the cause above; the next snapshot is tried in time",
    )

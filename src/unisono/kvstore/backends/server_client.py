"""A worker's client of the parameter servers.

Each server has one connection for values. Server 0, the coordinator, has a second one for requests that may block
(claims, barriers, clocks), so that waiting delays neither values nor heartbeats. All connections survive a server's
restart: unanswered requests are sent again, and every request is idempotent.

Values are sent from host memory and received in it: pulls copy them to tensors elsewhere; pushes take host tensors
(``host_copy``).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from unisono.dist import job_from_environ
from unisono.dist.dmlc import require_credentials
from unisono.dist.dmlc import server_addresses as dmlc_servers
from unisono.dist.secret import SECRET_BYTES, read_or_create_secret
from unisono.errors import CommError, ConfigError
from unisono.kvstore.backends.acknowledged import AcknowledgedPushes
from unisono.kvstore.compression import Codec, ErrorFeedback
from unisono.kvstore.compression.codec import can_compress_values
from unisono.kvstore.keys import Future, nothing_sent
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.chunk_payload import BATCH_SHARD, CODED, REFUSED, SLOT_BYTES, WRITE, raw_bytes, write_chunks
from unisono.kvstore.server.chunk_state import decode_chunk_state, encode_chunk_state, merge_chunks, split_into_chunks
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.server.process import server_addresses
from unisono.kvstore.server.pull_compression import PullDecoder
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.work_queue import WorkItem
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.connection import Connection, Endpoint, Traffic
from unisono.kvstore.wire.frame import PEER_LIMITS, Frame, Op, json_frame, payload_views, read_json
from unisono.kvstore.wire.tls import TLSContexts, read_tls

HEARTBEAT_S = 2.0
_HEARTBEAT_PRIORITY = 1 << 30
_WAIT_S = 5.0  # of one claim; asking again also detects a lost server
_GOODBYE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PushResult:
    """The result of a push: how many chunks had it already, and whether it was refused as non-finite."""

    num_duplicates: int
    refused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claimed item. ``weight``: total weight of the finished batch shards. ``is_last``: no work follows this save, as
    far as is known."""

    item: WorkItem
    weight: float
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Addresses and credentials with which a worker reaches the parameter servers.

    Attributes:
        addresses: Host and port of each server.
        secret: The job's secret of 32 bytes; both sides prove that they know it.
        tls: Certificates to encrypt and to check the servers with; None: unencrypted.
        worker_restart_count: One higher at each restart of this worker.

    Raises:
        ConfigError: An address or the secret is invalid.
    """

    addresses: Sequence[tuple[str, int]]
    secret: bytes = field(repr=False)
    tls: TLSContexts | None = None
    worker_restart_count: int = 0

    def __post_init__(self) -> None:
        if not self.addresses:
            raise _invalid_config("no servers", "servers that know the secret hold a store's values")
        for address in self.addresses:
            if not _is_address(address):
                raise _invalid_config(
                    f"server {address!r}", "each server is a pair of its host and its port, 1 to 65535"
                )
        if len(self.secret) != SECRET_BYTES:
            raise _invalid_config(f"a secret of {len(self.secret)} bytes", f"it has {SECRET_BYTES}")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, worker_restart_count: int = 0) -> ServerConfig:
        """The servers of UNISONO_SERVER_ADDRESSES, or of MXNet's tracker, with the job's secret (``read_or_create_secret``) and,
        if UNISONO_TLS is set, TLS.

        Raises LaunchError and ConfigError for variables that are missing or wrong.
        """
        addresses: Sequence[tuple[str, int]]
        if (
            "UNISONO_SERVER_ADDRESSES" not in environ
            and (job := job_from_environ(environ)).source == "dmlc"
            and job.servers
        ):
            require_credentials(environ)
            addresses = dmlc_servers(job)
        else:
            addresses = server_addresses(environ)
        return cls(
            addresses=addresses,
            secret=read_or_create_secret(environ),
            tls=read_tls(environ),
            worker_restart_count=worker_restart_count,
        )

    @property
    def endpoints(self) -> list[Endpoint]:
        """The address and credentials of each server, in order."""
        return [Endpoint(address, self.secret, self.tls) for address in self.addresses]


class ServerClient:
    """Connections of one ``worker`` to all servers of a run.

    Every worker sends the same ``run_spec``; a server refuses a worker whose spec differs, naming the first difference.
    ``report`` gets a line about pushes that a restarted server has lost. ``shared_memory``: exchange values with
    servers on this host through it. Raises CommError when a server cannot be reached within ``deadline_s``, AuthError
    when either side lacks the secret or, under TLS, a valid certificate.
    """

    def __init__(
        self,
        config: ServerConfig,
        run_spec: RunSpec,
        *,
        worker: int,
        codec: Codec | None = None,
        deadline_s: float = 60.0,
        shared_memory: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        self.placement = run_spec.placement()
        self.worker = worker
        self._codec, self._report = codec, report
        self._feedback = None if codec is None else self._residuals()
        self._pull_decoder = PullDecoder(codec) if codec is not None and can_compress_values(codec) else None
        self._groups = cache(self._grouped)
        self._versions = [0] * len(config.addresses)
        self._acknowledged = AcknowledgedPushes()
        me = Identity("worker", worker, config.worker_restart_count, run_spec.job, "")
        connect = partial(Connection, me=me, facts=run_spec.to_json(), limits=PEER_LIMITS, deadline_s=deadline_s)
        slot_bytes = SLOT_BYTES if shared_memory else 0
        with ExitStack() as opened:
            self._connections: list[Connection] = []
            for server, endpoint in enumerate(config.endpoints):
                on_reconnect = partial(self._report_losses, server)
                self._connections.append(connect(endpoint, slot_bytes=slot_bytes, on_reconnect=on_reconnect))
                opened.callback(self._connections[-1].close)
            self._coordinator = connect(config.endpoints[0])
            opened.pop_all()
        self._sequence = itertools.count(max(int(connection.hello["seq"]) for connection in self._connections))
        self._claims = itertools.count(1)
        # by batch shard: of its claims that are not done yet, the histories of the queue (``WorkQueue.history_id``)
        self._histories: dict[int, deque[str]] = {}
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, name="unisono-heartbeat", daemon=True)
        self._heart.start()

    # --- values ----------------------------------------------------------------------------------------------------

    @property
    def is_initialised(self) -> bool:
        """Whether the servers had all values when this worker connected."""
        numbers = [set(connection.hello["initialised"]) for connection in self._connections]
        return all({c.number for c in self.placement.chunks_on(s)} <= known for s, known in enumerate(numbers))

    @property
    def clock(self) -> int:
        """This worker's step count at connection: that of the slowest worker."""
        return int(self._connections[0].hello["clock"])

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Give the servers initial values where they have none. Returns when all servers have theirs."""
        parts = {key: raw_bytes(value.detach().cpu().contiguous()) for key, value in values.items()}
        requests = [(server, self._write(Op.INIT, group, parts)) for server, group in self._groups(tuple(values))]
        _wait_all([self._connections[server].request(frame) for server, frame in requests])

    def push(
        self,
        values: Mapping[str, Tensor],
        into: Mapping[str, Tensor] | None = None,
        *,
        lr: float = float("nan"),
        batch_shard: int | None = None,
        priority: int = 0,
    ) -> Future[PushResult]:
        """Have the servers apply gradients, each key's exactly once; with ``into``, also receive the updated values there.

        ``values`` are contiguous, on the CPU, and stay unchanged until the future is done. ``into``: tensors for the
        same keys, as for ``pull``. ``batch_shard``: the shard whose gradients these are, which identifies the push
        instead of this worker's own count. ``lr``: NaN for the optimizer's own rate.
        """
        seq = next(self._sequence) if batch_shard is None else batch_shard
        shard_flag = 0 if batch_shard is None else BATCH_SHARD
        sources = self._encoded(values) if self._codec is not None else {k: raw_bytes(v) for k, v in values.items()}
        targets = _PullTargets(into or {})
        answers: list[tuple[int, Sequence[Chunk], concurrent.futures.Future[Frame]]] = []
        for server, group in self._groups(tuple(values)):
            based = self._bases(group) if into else ()
            op, prefix = Op.PUSHPULL if into else Op.PUSH, (lr, self._versions[server])
            frame = self._write(op, group, sources, prefix=prefix, based=based)
            codec = CODED if self._codec is not None else 0
            frame = replace(frame, seq=seq, flags=frame.flags | shard_flag, codec=codec)
            answers.append((server, group, self._send(server, frame, priority, group, based, targets)))
        return self._push_result(answers, seq, batch_shard, targets)

    def pull(self, into: Mapping[str, Tensor], *, exact: bool = False, priority: int = 0) -> Future[None]:
        """Receive the current values into ``into``: straight into contiguous CPU tensors, through host memory into
        others. With compressed pulls, the approximation received so far, unless ``exact``."""
        targets = _PullTargets(into)
        answers: list[tuple[int, concurrent.futures.Future[Frame]]] = []
        for server, group in self._groups(tuple(into)):
            based = () if exact else self._bases(group)
            parts = [(chunk.number, memoryview(b"")) for chunk in group]
            frame = write_chunks(Op.PULL, parts, dtype="float32", based=based)
            answers.append((server, self._send(server, frame, priority, group, based, targets)))

        def finish() -> None:
            for server, answer in answers:
                self._versions[server] = answer.result().clock
            targets.copy_to_devices()

        return Future(finish, lambda: all(answer.done() for _, answer in answers))

    def push_rows(
        self, key: str, ids: Tensor, rows: Tensor, *, lr: float = float("nan"), priority: int = 0
    ) -> Future[PushResult]:
        """Have the servers apply gradients of some rows: ``ids`` [n] int64, ascending, and ``rows`` [n, ...], on the
        CPU. Other rows keep value and moments. Sent uncompressed. Raises ConfigError for a key whose chunks are not
        whole rows."""
        seq = next(self._sequence)
        answers: list[tuple[int, Sequence[Chunk], concurrent.futures.Future[Frame]]] = []
        for chunk, local, place in self._row_parts(key, ids):
            data = memoryview(raw_bytes(local).tobytes() + raw_bytes(rows[place].contiguous()).tobytes())
            prefix = (lr, self._versions[chunk.server])
            frame = write_chunks(Op.ROWS, [(chunk.number, data)], dtype=_dtype(chunk), prefix=prefix)
            frame = replace(frame, seq=seq, flags=WRITE)
            answers.append((chunk.server, [chunk], self._connections[chunk.server].request(frame, priority)))
        return self._push_result(answers, seq)

    def pull_rows(self, key: str, ids: Tensor, *, priority: int = 0) -> Future[Tensor]:
        """The current rows ``ids`` [n] int64, ascending: [n, ...]. Raises ConfigError as ``push_rows``."""
        parts, chunks = self._row_parts(key, ids), self.placement.chunks_of(key)
        dtype = chunks[0].dtype if chunks else torch.float32
        rows = torch.empty(len(ids), *self.placement.shapes[key][1:], dtype=dtype, device="cpu")
        answers: list[concurrent.futures.Future[Frame]] = []
        for chunk, local, place in parts:
            frame = write_chunks(Op.ROWS, [(chunk.number, raw_bytes(local))], dtype=_dtype(chunk))
            answers.append(self._connections[chunk.server].request(frame, priority, raw_bytes(rows[place])))

        def finish() -> Tensor:
            _wait_all(answers)
            return rows

        return Future(finish, lambda: all(answer.done() for answer in answers))

    def commit(self, good: bool = True) -> None:
        """Keep the residuals of the pushes since the last call, or drop them if not ``good``; without a codec there are none."""
        if self._feedback is not None:
            self._feedback.commit(good)

    def residuals(self) -> dict[str, Tensor]:
        """This worker's residuals, for ``load_residuals``."""
        return {} if self._feedback is None else self._feedback.state_dict()

    def load_residuals(self, state: Mapping[str, Tensor]) -> None:
        """Continue with the residuals of an earlier process of this worker. Raises CheckpointError for another codec."""
        if self._feedback is not None:
            self._feedback.load_state_dict(state)

    def compression_stats(self) -> dict[str, dict[str, float]]:
        """``bytes_in`` and ``bytes_out`` of a push, and ``residual``, the largest of its chunks, by key (see
        ``ErrorFeedback.stats``). With compressed pulls also ``pull_bytes_in``, the values' own size, and
        ``pull_bytes_out``, the bytes of the last pull."""
        keys: dict[str, dict[str, float]] = {}
        for name, stats in ({} if self._feedback is None else self._feedback.stats()).items():
            of = keys.setdefault(name.rpartition("@")[0], {"bytes_in": 0, "bytes_out": 0, "residual": 0.0})
            of["bytes_in"] += stats["bytes_in"]
            of["bytes_out"] += stats["bytes_out"]
            of["residual"] = max(of["residual"], stats["residual"])
        for key, (whole, came) in ({} if self._pull_decoder is None else self._pull_decoder.stats()).items():
            keys.setdefault(key, {}).update(pull_bytes_in=whole, pull_bytes_out=came)
        return keys

    # --- the optimizer ---------------------------------------------------------------------------------------------

    def set_optimizer(self, spec: ServerOptimizerSpec) -> None:
        """Set the servers' optimizer. Raises CommError where another one is set."""
        _wait_all([connection.request(json_frame(Op.OPTIMIZER, spec.to_json())) for connection in self._connections])

    def state(self) -> dict[str, Tensor]:
        """Values and optimizer state, whole, as ``<key>`` and ``optim/<state>/<key>``; only the value of a key without
        pushes. The next pulls are exact, as they are for a worker that continues from this state."""
        if self._pull_decoder is not None:
            self._pull_decoder.forget()
        tensors: dict[str, Tensor] = {}
        for server, group in self._groups(tuple(self.placement.shapes)):
            frame = json_frame(Op.STATE, {"chunks": [chunk.number for chunk in group]})
            tensors |= decode_chunk_state(b"".join(payload_views(self._connections[server].request(frame).result())))[1]
        return merge_chunks(self.placement, tensors)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace values and optimizer state (as ``state`` returns them), as if nothing had been pushed."""
        pieces = split_into_chunks(self.placement, tensors)
        for server, group in self._groups(tuple(self.placement.shapes)):
            facts = {str(chunk.number): {"version": 0, "applied": {}} for chunk in group}
            group_pieces = {name: piece for name, piece in pieces.items() if name.partition("/")[0] in facts}
            image = encode_chunk_state({"recipe": None, "chunks": facts}, group_pieces)
            self._connections[server].request(Frame(Op.STATE, flags=WRITE, payload=image)).result()

    # --- work, clocks, meetings ------------------------------------------------------------------------------------

    def claim(self, *, wait: bool) -> Claim:
        """The next work item; ``WAIT`` where there is none now (with ``wait``, after a while)."""
        content = {"wait_s": _WAIT_S if wait else 0.0}
        answer = read_json(self._ask_coordinator(replace(json_frame(Op.CLAIM, content), seq=next(self._claims))))
        work = WorkItem(answer["kind"], answer["number"])
        if work.kind == "unit":
            self._histories.setdefault(work.number, deque()).append(answer["history_id"])
        return Claim(item=work, weight=float(answer["weight"]), is_last=bool(answer["last"]))

    def mark_done(self, work: WorkItem, weight: float = 0.0) -> None:
        """Report an item as done: all pushes of a batch shard are acknowledged, and its samples weigh ``weight``.

        A shard that was claimed before the coordinator went back to an older snapshot stays to be done: its pushes may be lost.
        """
        content = {**work._asdict(), "weight": weight}
        if work.kind == "unit" and (histories := self._histories.get(work.number)):
            content["history_id"] = histories.popleft()
            if not histories:
                del self._histories[work.number]
        self._ask_coordinator(json_frame(Op.DONE, content))

    def stop(self, *, finished: bool = False) -> None:
        """End the run, with a save, at the next step that no worker has begun. ``finished``: the run is complete."""
        self._ask_coordinator(json_frame(Op.DONE, {"kind": "finish" if finished else "stop"}))

    def tick(self, clock: int) -> None:
        """Report ``clock`` finished steps; return when the slowest live worker is at most the agreed staleness behind."""
        self._ask_coordinator(Frame(Op.TICK, clock=clock))

    def barrier(self, number: int) -> None:
        """Return when all live workers have called it with ``number``, which increases from call to call."""
        self._ask_coordinator(json_frame(Op.BARRIER, {"number": number}))

    def snapshot(self) -> None:
        """Have every server write a snapshot now."""
        _wait_all([connection.request(Frame(Op.SNAPSHOT)) for connection in self._connections])

    def stats(self) -> list[dict[str, Any]]:
        """The counters of each server, in order (``ParameterServer.stats``)."""
        return [read_json(connection.request(Frame(Op.STATS)).result()) for connection in self._connections]

    def traffic(self) -> list[Traffic]:
        """Bytes and requests of each value connection."""
        return [connection.traffic() for connection in self._connections]

    def close(self) -> None:
        """Disconnect: items that this worker claimed and did not finish go to other workers at once."""
        self._closing.set()
        self._heart.join()
        # at a server that does not answer the lease ends by itself
        with suppress(CommError, TimeoutError):
            for answer in [connection.request(Frame(Op.BYE)) for connection in self._connections]:
                answer.result(_GOODBYE_S)
        for connection in [self._coordinator, *self._connections]:
            connection.close()

    # --- frames ----------------------------------------------------------------------------------------------------

    def _push_result(
        self,
        answers: Sequence[tuple[int, Sequence[Chunk], concurrent.futures.Future[Frame]]],
        seq: int,
        batch_shard: int | None = None,
        targets: _PullTargets | None = None,
    ) -> Future[PushResult]:
        """The answers (server, chunks, answer) to a push: number ``seq`` of this worker's stream, or ``batch_shard``.
        ``targets``: where the answers' values go."""

        for _, chunks, answer in answers:
            self._acknowledged.watch(answer, [chunk.number for chunk in chunks], seq, batch_shard)

        def finish() -> PushResult:
            duplicates, refused = 0, False
            for server, chunks, answer in answers:
                reply = answer.result()
                refused |= bool(reply.flags & REFUSED)
                duplicates += len(chunks) - reply.entries if reply.op is Op.ACK and not reply.flags & REFUSED else 0
                if targets:
                    self._versions[server] = reply.clock
            if targets:
                targets.copy_to_devices()
            return PushResult(num_duplicates=duplicates, refused=refused)

        return Future(finish, lambda: all(answer.done() for *_, answer in answers))

    def _bases(self, group: Sequence[Chunk]) -> Sequence[int]:
        """For compressed pulls, the number of the last decoded answer of each chunk (``pull_compression``); none for an
        exact pull."""
        if self._pull_decoder is None or not group[0].dtype.is_floating_point:
            return ()
        return self._pull_decoder.bases(group)

    def _send(
        self,
        server: int,
        frame: Frame,
        priority: int,
        group: Sequence[Chunk],
        based: Sequence[int],
        targets: _PullTargets,
    ) -> concurrent.futures.Future[Frame]:
        """Send a request whose answer's values go to ``targets``, if there are any."""
        places = [_chunk_bytes(targets.memory[chunk.key], chunk) for chunk in group] if targets else None
        if self._pull_decoder is None or places is None or not based:
            return self._connections[server].request(frame, priority, places)
        return self._pull_decoder.decode_when_received(
            self._connections[server].request(frame, priority), group, based, places
        )

    def _encoded(self, values: Mapping[str, Tensor]) -> dict[str, memoryview]:
        """Each chunk's compressed gradient, by key and start."""
        assert self._codec is not None
        assert self._feedback is not None
        codes: dict[str, memoryview] = {}
        for key, value in values.items():
            for chunk in self.placement.chunks_of(key):
                part = value.reshape(-1)[chunk.start : chunk.start + chunk.num_elements]
                codes[_name(chunk)] = raw_bytes(self._feedback.encode(self._codec, _name(chunk), part))
        return codes

    def _residuals(self) -> ErrorFeedback:
        chunks = [chunk for chunk in self.placement.chunks if chunk.dtype.is_floating_point]
        templates = {_name(chunk): torch.empty(chunk.num_elements, dtype=chunk.dtype, device="cpu") for chunk in chunks}
        return ErrorFeedback(templates, worker=self.worker)

    def _row_parts(self, key: str, ids: Tensor) -> list[tuple[Chunk, Tensor, slice]]:
        """The chunks that hold some of these rows: row numbers within the chunk, and their slice of ``ids``."""
        parts: list[tuple[Chunk, Tensor, slice]] = []
        for chunk in self.placement.chunks_of(key):
            if not chunk.row_elements:
                raise nothing_sent(
                    f"rows of {key!r}, whose chunks are no whole rows",
                    "rows are sent alone where a chunk holds a multiple of 1024 elements that is whole rows",
                    "push and pull all of it, or choose a row length with more factors of 2",
                )
            first, count = chunk.start // chunk.row_elements, chunk.num_elements // chunk.row_elements
            low, high = torch.searchsorted(ids, torch.tensor([first, first + count], device="cpu")).tolist()
            if low < high:
                parts.append((chunk, ids[low:high] - first, slice(low, high)))
        return parts

    def _write(
        self,
        op: Op,
        group: Sequence[Chunk],
        sources: Mapping[str, memoryview],
        prefix: tuple[float, int] | None = None,
        based: Sequence[int] = (),
    ) -> Frame:
        parts = [
            (
                chunk.number,
                sources[_name(chunk)] if _name(chunk) in sources else _chunk_bytes(sources[chunk.key], chunk),
            )
            for chunk in group
        ]
        return write_chunks(op, parts, dtype=_dtype(group[0]), prefix=prefix, based=based)

    def _grouped(self, keys: tuple[str, ...]) -> list[tuple[int, list[Chunk]]]:
        """(server, chunks of one frame) in send order: servers alternate."""
        queues = [[(s, group) for group in self.placement.groups(keys, s)] for s in range(self.placement.num_servers)]
        return [frame for turn in itertools.zip_longest(*queues) for frame in turn if frame is not None]

    def _ask_coordinator(self, frame: Frame) -> Frame:
        return self._coordinator.request(frame).result()

    def _report_losses(self, server: int, hello: dict[str, Any]) -> None:
        """Compare what a restarted server has applied with what it had acknowledged."""
        num_lost = self._acknowledged.take_lost(hello)
        if num_lost > 0:
            self._report(
                f"server {server} was restarted and has lost {num_lost} acknowledged pushes of worker {self.worker}"
            )

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            for connection in self._connections:
                with suppress(CommError):  # a connection that was given up: its next user gets the error
                    connection.request(Frame(Op.HEARTBEAT), priority=_HEARTBEAT_PRIORITY)


class _PullTargets:
    """The tensors that values are received into, and host memory for each."""

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        self._tensors = into
        self._host = {key: tensor if _is_host_memory(tensor) else _host_buffer(tensor) for key, tensor in into.items()}
        self.memory = {key: raw_bytes(tensor.detach()) for key, tensor in self._host.items()}

    def __bool__(self) -> bool:
        return bool(self.memory)

    @torch.no_grad()
    def copy_to_devices(self) -> None:
        """Copy received values from host memory to the tensors that are elsewhere."""
        for key, tensor in self._tensors.items():
            if self._host[key] is not tensor:
                tensor.copy_(self._host[key])


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory, pinned where copies from and to the tensor's device are faster then."""
    return _host_buffer(tensor).copy_(tensor)


def as_host_memory(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and on the CPU, else a copy that is."""
    return tensor if _is_host_memory(tensor) else host_copy(tensor)


def _host_buffer(like: Tensor) -> Tensor:
    pin = like.device.type not in ("cpu", "mps", "meta")
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pin, device="cpu")


def _is_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _name(chunk: Chunk) -> str:
    return f"{chunk.key}@{chunk.start}"


def _dtype(chunk: Chunk) -> str:
    return str(chunk.dtype).removeprefix("torch.")


def _chunk_bytes(data: memoryview, chunk: Chunk) -> memoryview:
    """A chunk's bytes among those of its key."""
    start = chunk.start * chunk.dtype.itemsize
    return data[start : start + chunk.nbytes]


def _wait_all(answers: Sequence[concurrent.futures.Future[Frame]]) -> None:
    for answer in answers:
        answer.result()


def _is_address(given: Any) -> bool:
    """Whether it is a pair of host and port. A text such as "host:1" is not, though it may have two characters too."""
    match given:
        case (str(host), int(port)) if host and not isinstance(port, bool):
            return 1 <= port <= 65535
        case _:
            return False


def _invalid_config(given: str, rule: str) -> ConfigError:
    return ConfigError(
        given=f"parameter servers with {given}",
        rule=rule,
        consequence="no connection was made",
        nearest='ServerConfig.from_environ(os.environ), or addresses=[("127.0.0.1", 4000)] and 32 bytes of secret',
    )

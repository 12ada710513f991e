"""Frames: a header of 64 bytes, little endian, then the payload; and the JSON payloads of control messages and errors.

    magic u32, version u8, op u8, codec u8, dtype u8, flags u8, slot u8, entries u16,
    server_restart_count u32, job u64, worker u32, worker_restart_count u32, seq u64, clock u64, payload bytes u32,
    ticket u32, digest u64

The digest is xxh3_64 of the payload, seeded with the xxh3_64 of the header before it. It detects damage, not attacks,
which ``auth`` keeps out. A reply carries the ticket of its request, so several requests can be in flight on one
connection. With a slot other than 0 the payload does not follow: it is in that slot of the memory that both sides map
(``shared_slots``), and is not digested. Nothing is allocated before ``unpack`` has checked every field against the
limits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

import xxhash

from unisono.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DataError,
    LaunchError,
    PlanError,
    Problem,
    UnisonoError,
)

HEADER_BYTES = 64
MAGIC = 0x4F53_4E55
VERSION = 1
# frames carry the index; append new ones
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
CODECS = 32

_HEADER = struct.Struct("<IBBBBBBHIQIIQQIIQ")
_DIGEST = struct.Struct("<Q")
_LARGEST_U32 = 2**32 - 1


class Op(IntEnum):
    """The kinds of frames: requests, then from 32 on replies."""

    HELLO = 1
    INIT = 2
    PUSH = 3
    PULL = 4
    PUSHPULL = 5
    ROWS = 6
    TICK = 7
    HEARTBEAT = 8
    CLAIM = 9
    DONE = 10
    OPTIMIZER = 11
    STATE = 12
    SNAPSHOT = 13
    STATS = 14
    BARRIER = 15
    BYE = 16
    MEMORY = 17
    ACK = 32
    DATA = 33
    JSON = 34
    ERROR = 35


_OPS = frozenset(int(op) for op in Op)


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory that both sides of a connection map, for one request and its answer."""

    number: int  # from 1
    view: memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. A payload to send may be several contiguous buffers; a received one is a single buffer.

    The payload of a request that came in a ``slot`` is a view of it. The answer's payload may be written there once the
    request was read; otherwise it is copied there, and holds no views of the request.
    """

    op: Op
    codec: int = 0
    dtype: int = 0
    flags: int = 0
    entries: int = 0
    server_restart_count: int = 0
    job: int = 0
    worker: int = 0
    worker_restart_count: int = 0
    seq: int = 0
    clock: int = 0
    payload: Sequence[memoryview] | memoryview | bytes = b""
    ticket: int = 0
    slot: Slot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes and times that one side accepts.

    A message that has begun must be complete in ``message_s`` plus its size at ``min_bytes_per_s``, without a pause of
    ``stall_s``.
    """

    max_payload_bytes: int = 64 << 20
    max_entries: int = 8192
    message_s: float = 20.0
    min_bytes_per_s: int = 64 << 10
    stall_s: float = 10.0
    handshake_s: float = 5.0

    def time_for(self, nbytes: int) -> float:
        """Seconds that a message of ``nbytes`` may take once it has begun."""
        return self.message_s + nbytes / self.min_bytes_per_s


# for authenticated peers: a key that is not cut is one chunk
PEER_LIMITS = Limits(max_payload_bytes=1 << 30)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A parsed header: the frame without its payload, the payload's size, digest and digest seed.

    ``slot_number``: the payload's slot, 0 where it follows the header.
    """

    frame: Frame
    slot_number: int
    nbytes: int
    digest: int
    seed: int


def payload_views(frame: Frame) -> list[memoryview]:
    """The payload as flat byte views without empty ones."""
    parts = [frame.payload] if isinstance(frame.payload, (bytes, memoryview)) else frame.payload
    views = [memoryview(part) for part in parts]
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes]


def pack(frame: Frame, parts: Sequence[memoryview]) -> bytes:
    """The header of ``frame`` with the payload ``parts``. Raises CommError when the payload is over 4 GiB."""
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > _LARGEST_U32:
        raise _refused("payload", f"{nbytes} bytes", f"a frame carries at most {_LARGEST_U32} bytes", "send chunks")
    slot = frame.slot.number if frame.slot is not None else 0
    kind = frame.op, frame.codec, frame.dtype, frame.flags, slot, frame.entries
    sender = frame.server_restart_count, frame.job, frame.worker, frame.worker_restart_count, frame.seq, frame.clock
    header = _HEADER.pack(MAGIC, VERSION, *kind, *sender, nbytes, frame.ticket, 0)[: -_DIGEST.size]
    digest = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(header))
    if frame.slot is None:
        for part in parts:
            digest.update(part)
    return header + _DIGEST.pack(digest.intdigest())


def unpack(header: bytes | bytearray | memoryview, limits: Limits) -> FrameHeader:
    """Parse 64 bytes. Raises CommError naming the first field that is out of bounds."""
    magic, version, op, codec, dtype, flags, slot, entries, *rest = _HEADER.unpack(header)
    server_restart_count, job, worker, worker_restart_count, seq, clock, nbytes, ticket, digest = rest
    if magic != MAGIC:
        raise _refused("magic", f"{magic:#010x}", f"a frame begins with {MAGIC:#010x}", "see what else uses this port")
    if version != VERSION:
        rule = f"this side speaks version {VERSION}"
        raise _refused("version", str(version), rule, "use the same release of unisono on both sides")
    if op not in _OPS:
        raise _refused("op", str(op), f"op {op} is unknown to this release", "use one release on both sides")
    if codec >= CODECS:
        raise _refused("codec", str(codec), f"codecs are below {CODECS}", "use one release on both sides")
    if dtype >= len(DTYPES):
        raise _refused("dtype", str(dtype), f"dtypes are below {len(DTYPES)}", "use one release on both sides")
    if entries > limits.max_entries:
        raise _refused(
            "entries", str(entries), f"at most {limits.max_entries} are taken", "send fewer chunks in a frame"
        )
    if nbytes > limits.max_payload_bytes:
        rule = f"at most {limits.max_payload_bytes} bytes are taken"
        raise _refused("payload", f"{nbytes} bytes", rule, "send smaller chunks")
    sender = server_restart_count, job, worker, worker_restart_count
    frame = Frame(Op(op), codec, dtype, flags, entries, *sender, seq, clock, ticket=ticket)
    return FrameHeader(frame, slot, nbytes, digest, xxhash.xxh3_64_intdigest(memoryview(header)[: -_DIGEST.size]))


def digest_mismatch(announced: FrameHeader, digest: int) -> CommError:
    return _refused(
        "digest",
        f"{digest:016x} for {announced.nbytes} bytes of {announced.frame.op.name}",
        f"its header says {announced.digest:016x}",
        "if this happens again, check the network between these hosts and their memory",
    )


def _refused(field: str, value: str, rule: str, nearest: str) -> CommError:
    return CommError(
        given=f"a frame whose {field} is {value}",
        rule=rule,
        consequence="the frame was not taken, and the connection it came on is closed",
        nearest=nearest,
    )


_KINDS: dict[str, type[UnisonoError]] = {
    kind.__name__: kind for kind in (ConfigError, CommError, LaunchError, PlanError, DataError, CheckpointError)
}
_PARTS = {field.name for field in fields(Problem)}


def json_frame(op: Op, content: Mapping[str, Any]) -> Frame:
    """A frame with ``content`` as its payload."""
    return Frame(op, payload=json.dumps(content, allow_nan=False).encode())


def read_json(frame: Frame) -> dict[str, Any]:
    """The object in a frame. Raises CommError for any other payload."""
    try:
        content = json.loads(b"".join(payload_views(frame)))
    except (ValueError, RecursionError) as error:
        content = error
    if isinstance(content, dict):
        return content
    given = f"{frame.op.name} with a payload that is not a JSON object ({type(content).__name__})"
    raise protocol_error(given, "control messages carry one JSON object", "the message was not used")


def protocol_error(given: str, rule: str, consequence: str = "nothing was done") -> CommError:
    """A message that no other process of this release sends."""
    nearest = "use the same release of unisono everywhere"
    return CommError(given=given, rule=rule, consequence=consequence, nearest=nearest)


def error_frame(error: UnisonoError) -> Frame:
    """A reply that makes the other side raise ``error``."""
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), CommError.__name__)
    return json_frame(Op.ERROR, {"kind": kind, "problems": [asdict(problem) for problem in error.problems]})


def read_error(frame: Frame) -> UnisonoError:
    """The error in an ERROR frame; CommError for an unknown kind."""
    content = read_json(frame)
    problems = content.get("problems")
    if not isinstance(problems, list) or not all(
        isinstance(problem, dict) and set(problem) == _PARTS for problem in problems
    ):
        problems = [dict.fromkeys(_PARTS, "an error without text")]
    kind = _KINDS.get(str(content.get("kind")), CommError)
    return kind(*(Problem(**{name: str(text) for name, text in problem.items()}) for problem in problems))

"""Reads a trace of PyTorch's profiler (Chrome's JSON, plain or gzip) piece by piece, into arrays. No torch.

The file is never held whole: pieces of 4 MiB are scanned for the objects of ``traceEvents``, each of which is decoded and added
to columns of some 40 bytes an event. A trace of 1 GiB takes about 300 MiB. Times are in microseconds since an origin of the file.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU and, for what ``args`` hold,
``torch/csrc/profiler`` and Kineto's ``output_json.cpp``, of torch 2.11 to 2.13.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.dist.progress import note_progress
from unisono.errors import DataError
from unisono.profile.intervals import Counts, Floats
from unisono.storage.files import open_regular, os_reason
from unisono.storage.limits import (
    MAX_TRACE_BYTES,
    MAX_TRACE_EVENT_BYTES,
    MAX_TRACE_EVENTS,
    MAX_TRACE_NAMES,
    MAX_TRACE_TEXT_BYTES,
    LimitError,
    num_elements,
)

# kinds of events that are kept
OPERATOR, ANNOTATION, PYTHON, KERNEL, COPY, RUNTIME = range(6)
_CATEGORIES: Final = {
    "cpu_op": OPERATOR,
    "Operator": OPERATOR,  # of torch 1
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "xpu_runtime": RUNTIME,
}
_PIECE_BYTES: Final = 4 << 20
_HEAD_BYTES: Final = 1 << 20
_COLLECTIVE_BYTES: Final = 256  # that one takes in memory
_NO_TIME: Final = -1.0
_QUOTE: Final = ord('"')
_IS_STRUCTURE: Final = np.zeros(256, bool)
_IS_STRUCTURE[[ord(c) for c in '"{}[]']] = True
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)


_Int = Annotated[int, msgspec.Meta(ge=-(1 << 61), le=1 << 61)]  # what a column has room for


class _Event(msgspec.Struct, gc=False):
    """The fields of all events."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = _NO_TIME
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw()


class _Args(msgspec.Struct, gc=False):
    """The arguments that are read of operators, kernels and calls of the runtime."""

    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    sequence: _Int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: _Int | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: _Int | None = None
    device: int | str | None = None
    stream: int | str | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    elements_in: _Int | None = msgspec.field(name="In msg nelems", default=None)
    elements_out: _Int | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: _Int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group: str | None = msgspec.field(name="Process Group Description", default=None)


class _Memory(msgspec.Struct, gc=False):
    """The arguments of a ``[memory]`` event."""

    address: _Int = msgspec.field(name="Addr")
    num_bytes: _Int = msgspec.field(name="Bytes")
    total: _Int = msgspec.field(name="Total Allocated", default=0)
    device_type: int = msgspec.field(name="Device Type", default=0)


_decode_event: Final = msgspec.json.Decoder(_Event, strict=False).decode
_decode_args: Final = msgspec.json.Decoder(_Args, strict=False).decode
_decode_memory: Final = msgspec.json.Decoder(_Memory, strict=False).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveEvent:
    """A collective as the trace describes it.

    Attributes:
        name: Such as ``all_reduce``.
        start_us: When it began.
        duration_us: How long it took.
        elements_in: Elements of the input of this rank; -1 where the trace has none.
        elements_out: Elements of its output; -1 where the trace has none.
        dtype: Their type, as torch names it.
        group_size: Ranks of the group; 0 where the trace has none.
        group: Description of the group, empty where the trace has none.
    """

    name: str
    start_us: float
    duration_us: float
    elements_in: int
    elements_out: int
    dtype: str
    group_size: int
    group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvents:
    """Allocations and, with negative sizes, what was freed [events].

    Attributes:
        at_us: When.
        address: Where.
        num_bytes: How much.
        total_bytes: Bytes in use on the device afterwards, as its allocator counts them; of the host since the trace began.
        is_device: Whether it is memory of an accelerator.
    """

    at_us: Floats
    address: Counts
    num_bytes: Counts
    total_bytes: Counts
    is_device: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of a trace that have a length [events], in no order; and its memory events and collectives.

    Attributes:
        meta: What the file says before its events, such as ``distributedInfo``.
        names: Distinct names of events; ``name`` has indices into it.
        shapes: Distinct shapes of inputs, as JSON texts; ``shape`` has indices into it.
        threads: Distinct (pid, tid); ``thread`` has indices into it.
        kind: ``OPERATOR`` …
        name: Index into ``names``.
        thread: Index into ``threads``.
        start_us: When the event began.
        duration_us: How long it took.
        shape: Index into ``shapes``; -1 for none.
        sequence: Sequence number of autograd: positive and even for operators of forward passes, odd for those of backward
            passes (2 n + 1 for number n), -1 for none.
        correlation: Number that a kernel shares with the call that launched it; -1 for none.
        memory: Allocations.
        collectives: Collectives.
        num_events: Events in the file, also those that are left out.
        num_damaged: Events that could not be decoded.
    """

    meta: Mapping[str, Any]
    names: list[str]
    shapes: list[str]
    threads: list[tuple[int | str, int | str]]
    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    thread: NDArray[np.int32]
    start_us: Floats
    duration_us: Floats
    shape: NDArray[np.int32]
    sequence: Counts
    correlation: Counts
    memory: MemoryEvents
    collectives: list[CollectiveEvent]
    num_events: int
    num_damaged: int

    @property
    def end_us(self) -> Floats:
        """When the event ended [events]."""
        return self.start_us + self.duration_us

    def of_kind(self, *kinds: int) -> Counts:
        """Indices of the events of ``kinds``."""
        return np.flatnonzero(np.isin(self.kind, kinds))

    def named(self, matches: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a name that ``matches`` [events]."""
        return np.array([matches(name) for name in self.names] or [False], bool)[self.name]


def read_trace(path: Path) -> Trace:
    """Read the trace at ``path``.

    Raises:
        DataError: The file cannot be read, is no trace, or exceeds a limit of ``storage.limits``.
    """
    columns = _Columns()
    head = bytearray()
    try:
        with open_trace(path) as file:
            for text in event_objects(file, head):
                columns.add(text)
    except (OSError, EOFError, zlib.error) as error:
        reason = os_reason(error) if isinstance(error, OSError) and error.errno else str(error)
        raise not_a_trace(path, f"cannot be read: {reason}") from error
    except ValueError as error:
        raise not_a_trace(path, str(error)) from error
    if not columns.num_events:
        raise not_a_trace(path, "has no events")
    if columns.num_damaged > columns.num_events // 2:
        raise not_a_trace(path, f"has {columns.num_damaged:,} unreadable events of {columns.num_events:,}")
    return columns.finish(_meta(bytes(head)))


def not_a_trace(path: Path, reason: str) -> DataError:
    """The error for a file that is no trace."""
    return DataError(
        given=f"{path} {reason}",
        rule="a trace is the JSON file of torch.profiler's export_chrome_trace, plain or gzip",
        consequence="nothing was summarised",
        nearest="profile again: unisono profile RUN.toml; or torch.profiler.profile(…).export_chrome_trace('trace.json')",
    )


@contextmanager
def open_trace(path: Path) -> Generator[BinaryIO]:
    """Open a trace to read; a gzip file is decompressed. Raises OSError."""
    with open_regular(path) as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if is_gzip:
            with gzip.GzipFile(fileobj=file) as plain:
                yield cast(BinaryIO, plain)
        else:
            yield file


def event_objects(file: BinaryIO, head: bytearray | None = None) -> Iterator[bytes | memoryview]:
    """The texts of the objects in the file's lists of events, in their order; ``head`` gets the first MiB of the file.

    A trace is an object with lists of objects, or a list of objects. Raises ValueError for a text that is no such JSON, or that
    exceeds a limit.
    """
    rest, total, depth = b"", 0, 0  # text of an event that has begun, all bytes, depth at the begin of the next piece
    event_depth, in_string, events = 0, False, 0
    while piece := file.read(_PIECE_BYTES):
        note_progress()  # a run reads its own traces while no step ends
        total += len(piece)
        if total > MAX_TRACE_BYTES:
            raise ValueError(f"has more than {MAX_TRACE_BYTES:,} bytes")
        while (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character is in the next piece
            piece += file.read(1) or b" "
        plain = _ESCAPE.sub(b"  ", piece) if b"\\" in piece else piece
        codes = np.frombuffer(plain, np.uint8)
        places = np.flatnonzero(_IS_STRUCTURE[codes])
        marks = codes[places]
        quotes = np.cumsum(marks == _QUOTE) + in_string
        outside = (quotes % 2 == 0) & (marks != _QUOTE)
        places, marks = places[outside], marks[outside]
        in_string = bool(quotes[-1] % 2) if len(quotes) else in_string
        changes = _STEPS[marks].astype(np.int64)
        depths = np.cumsum(changes) + depth
        if not event_depth:
            first = bytes(piece.lstrip()[:1])
            if first not in (b"{", b"["):
                raise ValueError("is no JSON object or list")
            event_depth = 3 if first == b"{" else 2
        if len(depths) and int(depths.min()) < 0:
            raise ValueError("is no JSON: it closes more than it opens")
        opens = places[(marks == ord("{")) & (depths == event_depth)]
        closes = places[(marks == ord("}")) & (depths == event_depth - 1)]
        depth = int(depths[-1]) if len(depths) else depth
        if head is not None and len(head) < _HEAD_BYTES:
            head += piece[: _HEAD_BYTES - len(head)]
        view, begin = memoryview(piece), 0
        if rest:
            if not len(closes):
                rest += piece
                _check_length(len(rest))
                continue
            end = int(closes[0]) + 1
            _check_length(len(rest) + end)
            events += 1
            yield rest + piece[:end]
            rest, closes = b"", closes[1:]
        if len(opens) > len(closes):
            begin = int(opens[len(closes)])
            rest = piece[begin:]
        events += len(closes)
        if events > MAX_TRACE_EVENTS:
            raise ValueError(f"has more than {MAX_TRACE_EVENTS:,} events")
        for start, end in zip(opens.tolist(), closes.tolist(), strict=False):
            yield view[start : end + 1]
    if depth or in_string:
        raise ValueError("is cut short: its last list or text does not end")


def _check_length(size: int) -> None:
    if size > MAX_TRACE_EVENT_BYTES:
        raise ValueError(f"has an event of more than {MAX_TRACE_EVENT_BYTES:,} bytes")


def _meta(head: bytes) -> Mapping[str, Any]:
    """The fields of the file before its list of events; empty where they cannot be read."""
    text, found, _ = head.partition(b'"traceEvents"')
    try:
        meta = json.loads(text + b'"traceEvents": []}') if found else {}
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", meta) if isinstance(meta, dict) else {}


def json_list(text: str | bytes) -> list[Any]:
    """Decode a JSON list; empty for any other text."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Columns:
    """Collects events."""

    def __init__(self) -> None:
        self.num_events = self.num_damaged = 0
        self._names: dict[str, int] = {}
        self._shapes: dict[bytes, int] = {}
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._kind, self._name, self._thread = array("B"), array("i"), array("i")
        self._start, self._duration = array("d"), array("d")
        self._shape, self._sequence, self._correlation = array("i"), array("q"), array("q")
        self._memory = array("d"), array("q"), array("q"), array("q"), array("b")
        self._collectives: list[CollectiveEvent] = []
        self._text_bytes = 0

    def add(self, text: bytes | memoryview) -> None:
        """Add the event of this text, if it is one that is kept."""
        self.num_events += 1
        try:
            event = _decode_event(text)
            if event.ph == "X":
                self._add(event)
            elif event.name == "[memory]":
                memory = _decode_memory(event.args)
                at_us, address, num_bytes, total, is_device = self._memory
                address.append(memory.address)
                num_bytes.append(memory.num_bytes)
                total.append(memory.total)
                at_us.append(event.ts)
                is_device.append(memory.device_type not in (0, -1))
        except (msgspec.DecodeError, LimitError, RecursionError, UnicodeDecodeError, OverflowError):
            self.num_damaged += 1

    def _add(self, event: _Event) -> None:
        kind = _CATEGORIES.get(event.cat)
        if kind is None or not (event.ts >= 0 and 0 <= event.dur < 1e15):
            return
        shape = sequence = correlation = -1
        if kind != PYTHON and len(bytes(event.args)) > 2:
            args = _decode_args(event.args)
            if dims := bytes(args.dims):
                if len(self._shapes) > MAX_TRACE_NAMES:
                    raise ValueError(f"has more than {MAX_TRACE_NAMES:,} shapes")
                shape = self._place(self._shapes, dims, len(dims))
            if args.sequence is not None:
                sequence = 2 * args.sequence + (args.forward_thread not in (None, 0))
            correlation = -1 if args.correlation is None else args.correlation
            if kind == KERNEL and args.collective is not None:
                self._add_collective(event, args)
            elif kind == ANNOTATION and event.name.startswith("gloo:"):
                self._add_gloo(event, args)
        name = self._place(self._names, event.name, len(event.name))
        if len(self._names) > MAX_TRACE_NAMES:
            raise ValueError(f"has more than {MAX_TRACE_NAMES:,} names")
        whose = (event.pid, event.tid)
        thread = self._place(self._threads, whose, sum(len(each) for each in whose if isinstance(each, str)))
        self._shape.append(shape)
        self._sequence.append(sequence)
        self._correlation.append(correlation)
        self._kind.append(kind)
        self._name.append(name)
        self._thread.append(thread)
        self._start.append(event.ts)
        self._duration.append(event.dur)

    def _place(self, known: dict[Any, int], key: Any, num_bytes: int) -> int:
        """The place of ``key`` among ``known``, where it is added if it is new."""
        place = known.get(key)
        if place is None:
            self._count_text(num_bytes)
            place = known[key] = len(known)
        return place

    def _count_text(self, num_bytes: int) -> None:
        self._text_bytes += num_bytes
        if self._text_bytes > MAX_TRACE_TEXT_BYTES:
            raise ValueError(f"has more than {MAX_TRACE_TEXT_BYTES:,} bytes of names, shapes and collectives")

    def _add_collective(self, event: _Event, args: _Args) -> None:
        self._count_text(_COLLECTIVE_BYTES + sum(map(len, (args.collective or "", args.dtype or "", args.group or ""))))
        self._collectives.append(
            CollectiveEvent(
                name=args.collective or "",
                start_us=event.ts,
                duration_us=event.dur,
                elements_in=-1 if args.elements_in is None else args.elements_in,
                elements_out=-1 if args.elements_out is None else args.elements_out,
                dtype=args.dtype or "",
                group_size=args.group_size or 0,
                group=args.group or "",
            )
        )

    def _add_gloo(self, event: _Event, args: _Args) -> None:
        self._count_text(_COLLECTIVE_BYTES + len(event.name) + len(bytes(args.types)))
        dims, types = json_list(bytes(args.dims)), json_list(bytes(args.types))
        sizes = [num_elements(dim) for dim in dims if isinstance(dim, list) and all(isinstance(n, int) for n in dim)]
        self._collectives.append(
            CollectiveEvent(
                name=event.name.partition(":")[2],
                start_us=event.ts,
                duration_us=event.dur,
                elements_in=sum(sizes) if sizes else -1,
                elements_out=-1,
                dtype=str(types[0]) if types else "",
                group_size=0,
                group="",
            )
        )

    def finish(self, meta: Mapping[str, Any]) -> Trace:
        """The trace of all events so far."""
        at_us, address, num_bytes, total, is_device = self._memory
        return Trace(
            meta=meta,
            names=list(self._names),
            shapes=[json.dumps(json_list(shape)) for shape in self._shapes],
            threads=list(self._threads),
            kind=np.array(self._kind, np.uint8),
            name=np.array(self._name, np.int32),
            thread=np.array(self._thread, np.int32),
            start_us=np.array(self._start, np.float64),
            duration_us=np.array(self._duration, np.float64),
            shape=np.array(self._shape, np.int32),
            sequence=np.array(self._sequence, np.int64),
            correlation=np.array(self._correlation, np.int64),
            memory=MemoryEvents(
                at_us=np.array(at_us, np.float64),
                address=np.array(address, np.int64),
                num_bytes=np.array(num_bytes, np.int64),
                total_bytes=np.array(total, np.int64),
                is_device=np.array(is_device, bool),
            ),
            collectives=self._collectives,
            num_events=self.num_events,
            num_damaged=self.num_damaged,
        )

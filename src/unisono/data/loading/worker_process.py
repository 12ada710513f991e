"""A worker process for transforms that hold the interpreter lock: specs go in over a pipe, arrays come back in shared memory.

The memory is one anonymous file per process (``memfd_create``): it has no name, does not count against /dev/shm's limit, and
disappears with its processes, however they end. Only the builder (data set and transforms) is pickled, from the parent to its
own child, once at the start; specs and answers are plain bytes. The child imports modules and never runs the parent's program.
It forks the other workers where it can (``worker_start``). A child that dies is started again with the same spec.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle  # noqa: TID251 - only to our own child, see docs/adr/0005
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.config.python_file import PythonFile, execute_again, executed_files
from unisono.data.loading.batch_builder import BatchBuilder, BuiltBatch, MicroBatchSpec, StageTimes, not_numbers_error
from unisono.data.loading.subprocess_map import serve_requests
from unisono.data.loading.worker_pool import PoolWorker
from unisono.data.loading.worker_start import (
    HEADER_BYTES,
    WorkerChild,
    WorkerStarter,
    cannot_start,
    fork_workers,
    forked_share,
    open_descriptors,
)
from unisono.data.nested import decode, encode, leaves
from unisono.errors import DataError, Problem, UnisonoError

Delivered = TypeVar("Delivered")

_MAX_RESTARTS = 2  # for one spec
_ALIGN = 64
_SPEC_ARRAYS = {
    "sample_ids": np.int64,
    "occurrences": np.int64,
    "is_filler": np.bool_,
    "partner_rows": np.int64,
    "pair_ids": np.int64,
    "is_first": np.bool_,
}
_BOOT = "import sys; from unisono.data.loading.worker_process import main; main(*map(int, sys.argv[1:]))"


class ProcessWorker(PoolWorker[MicroBatchSpec, Delivered]):
    """Builds micro-batches in a process of its own, started with the first spec. Raises DataError."""

    def __init__(self, starter: WorkerStarter, deliver: Callable[[BuiltBatch], Delivered]) -> None:
        self._starter, self._deliver = starter, deliver
        self._lock = threading.Lock()  # interrupt() comes from the consumer's thread
        self._child: WorkerChild | None = None
        self._interrupted = False
        self._map = mmap.mmap(-1, HEADER_BYTES)
        self.progress = _SharedProgress(self._map)

    def __call__(self, request: MicroBatchSpec, /) -> Delivered:
        return self._deliver(self._build(request))

    def _build(self, spec: MicroBatchSpec) -> BuiltBatch:
        for attempt in range(1, 2 + _MAX_RESTARTS):
            try:
                return self._ask(spec)
            except (EOFError, OSError) as error:
                how = self._end_child()
                if self._interrupted or attempt > _MAX_RESTARTS:
                    raise DataError(_died(spec, self.progress.sample, how, attempt)) from error
        raise AssertionError("not reached")

    def interrupt(self) -> None:
        """Kill the child; a call waiting for it raises."""
        with self._lock:
            self._interrupted = True
            if self._child is not None:
                self._child.process.kill()

    def close(self) -> None:
        """End the child and release the memory."""
        self.interrupt()
        self._end_child()

    def _ask(self, spec: MicroBatchSpec) -> BuiltBatch:
        child = self._child or self._start()
        answer = json.loads(child.process.ask(_encode_spec(spec)))
        if "error" in answer:
            raise _decode_error(answer["error"])
        if answer["bytes"] > len(self._map):
            self._map = mmap.mmap(child.memory, answer["bytes"])
        arrays: list[NDArray[Any]] = []
        for dtype, shape, offset in answer["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(self._map, dtype, count, offset).reshape(shape).copy())  # the child reuses it
        batch = decode(answer["batch"], arrays.__getitem__)
        return BuiltBatch(arrays=batch, skipped_ids=answer["skipped"], stages=StageTimes(*answer["stages"]))

    def _start(self) -> WorkerChild:
        def adopt(child: WorkerChild) -> None:
            with self._lock:
                self._child = child
                if self._interrupted:
                    child.process.kill()

        try:
            child = self._starter.start(adopt)
        except DataError:
            self._end_child()
            raise
        self._map = mmap.mmap(child.memory, HEADER_BYTES)
        self.progress = _SharedProgress(self._map)
        return child

    def _end_child(self) -> str:
        """How the child ended, in words."""
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return "did not start"
        code = child.close()
        if code is None:
            return "ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# Pickle, because a user's data set and transforms are arbitrary objects and a fork after threads may hang. It writes only for our
# own child, over a socket pair that nobody else has; nothing from a file or another machine comes this way (docs/adr/0005).
class _ImportablePickler(pickle.Pickler):  # writes for our own child only (docs/adr/0005)
    """Refuses what is defined in the parent's program, which the child never runs."""

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise cannot_start(
                f"{obj.__qualname__}, which is defined in the program or notebook itself",
                "a worker process imports modules and never runs the program or its cells again",
            )
        return NotImplemented


def pickle_builder(builder: BatchBuilder) -> bytes:
    """``builder`` as another process can load it. Raises DataError for objects that cannot be found there.

    Pickle, because a data set and its transforms are arbitrary Python objects of the user's: they reach another process by pickle
    or by a fork, and a fork after threads may hang (docs/adr/0005). Nothing from a file or another machine comes this way.
    """
    raw = BytesIO()
    try:
        _ImportablePickler(raw).dump(builder)  # the user's own objects, for our own child only
    except DataError:
        raise
    except Exception as error:  # pickle raises what the objects' own code raises
        raise cannot_start(f"data set or transform: {error}", "they are pickled to reach a process") from error
    return raw.getvalue()


def _unpickle_builder(raw: bytes) -> BatchBuilder:
    """The inverse of ``pickle_builder``, in the child.

    Unpickling runs code of the sender's choosing. Here the sender can only be the parent, which started this process: the other
    end of the socket pair was made by it and given to nobody, and it has no name or address.
    """
    return pickle.loads(raw)  # noqa: S301 - raw comes from our own parent only, over a socket pair nobody else has


def worker_starter(builder: BatchBuilder) -> WorkerStarter:
    """What starts the processes for ``builder``. Raises DataError where there can be none."""
    if sys.platform != "linux":
        raise cannot_start("worker processes on this system", "their shared memory needs Linux")
    return WorkerStarter(_BOOT, lambda: _load_request(builder))


def _load_request(builder: BatchBuilder) -> bytes:
    """The builder with what its classes are imported from: the parent's path, and the configuration files that it executed."""
    raw = pickle_builder(builder)
    executed = executed_files()
    folders = list(dict.fromkeys(str(file.path.parent) for file in executed.values()))
    needed = [[str(file.path), file.digest] for name, file in executed.items() if name.encode() in raw]
    return json.dumps([[*folders, *sys.path], needed]).encode() + b"\n" + raw


def main(*arguments: int) -> None:
    """The child: load the data set, fork the other workers, build one micro-batch after the other until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as serve_requests has it, from the first import on
    memory, descriptor, others = forked_share(arguments)
    known = open_descriptors()
    pipe = Connection(descriptor)
    try:
        request = pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return
    try:
        builder = _load(request)
    except Exception as error:  # an import that fails, say: what it raises is the user's code's
        pipe.send_bytes(json.dumps({"error": _encode_error(error)}).encode())
        return
    del request
    forked, own = fork_workers(others, known)
    if own is None:
        with suppress(ConnectionError):  # the next read finds that the parent is gone
            pipe.send_bytes(json.dumps({"forked": forked}).encode())
    else:
        pipe.close()
        os.close(memory)
        memory, pipe = own[0], Connection(own[1])
    serve_requests(pipe, _BatchServer(memory, builder))


def _load(request: bytes) -> BatchBuilder:
    head, _, builder = request.partition(b"\n")
    sys.path[:], files = json.loads(head)
    for path, digest in files:
        execute_again(PythonFile(path=Path(path), digest=digest))
    loaded = _unpickle_builder(builder)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the cores are for the workers, one each
    return loaded


class _BatchServer:
    """Answers the child's requests, each of which is a spec."""

    def __init__(self, memory: int, builder: BatchBuilder) -> None:
        self._memory = memory
        self._map = mmap.mmap(memory, HEADER_BYTES)
        self._progress = _SharedProgress(self._map)
        self._builder = builder

    def __call__(self, request: bytes) -> bytes:
        try:
            answer = self._build(self._builder, _decode_spec(request))
        except Exception as error:  # what it raises is the user's code's
            answer = {"error": _encode_error(error)}
        return json.dumps(answer).encode()

    def _build(self, builder: BatchBuilder, spec: MicroBatchSpec) -> dict[str, Any]:
        built = builder.build(spec, self._progress)
        arrays: list[NDArray[Any]] = []

        def number(array: NDArray[Any]) -> int:
            arrays.append(array)
            return len(arrays) - 1

        for name, leaf in leaves(built.arrays, ""):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc":
                raise not_numbers_error(name, leaf)
        batch = encode(built.arrays, number)
        table, total = _layout(arrays)
        if total > len(self._map):
            if os.fstat(self._memory).st_size < total:
                os.ftruncate(self._memory, total)
            self._map = mmap.mmap(self._memory, total)
        for (dtype, shape, offset), array in zip(table, arrays, strict=True):
            np.frombuffer(self._map, dtype, array.size, offset).reshape(shape)[...] = array
        stages = [built.stages.read_s, built.stages.transform_s, built.stages.collate_s]
        return {"batch": batch, "arrays": table, "bytes": total, "skipped": built.skipped_ids, "stages": stages}


class _SharedProgress:
    """A ``ProgressMarker`` in memory that two processes share."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cell = np.frombuffer(memory, np.int64, 1)

    @property
    def sample(self) -> int:
        return int(self._cell[0])

    def mark(self, sample: int) -> None:
        self._cell[0] = sample


def _layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[tuple[str, list[int], int]], int]:
    """(dtype, shape, offset) of each array in the shared memory, and the end of the last one."""
    table: list[tuple[str, list[int], int]] = []
    end = HEADER_BYTES
    for array in arrays:
        table.append((array.dtype.str, list(array.shape), end))
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    return table, end


def _encode_spec(spec: MicroBatchSpec) -> bytes:
    return msgspec.json.encode([spec.step, spec.num_rows, *(getattr(spec, name).tolist() for name in _SPEC_ARRAYS)])


def _decode_spec(raw: bytes) -> MicroBatchSpec:
    step, num_rows, *columns = msgspec.json.decode(raw)
    arrays: dict[str, Any] = {
        name: np.array(column, dtype) for (name, dtype), column in zip(_SPEC_ARRAYS.items(), columns, strict=True)
    }
    return MicroBatchSpec(step=step, num_rows=num_rows, **arrays)


def _encode_error(error: Exception) -> dict[str, Any]:
    problems = error.problems if isinstance(error, UnisonoError) else ()
    return {
        "what": f"{type(error).__name__}: {error}",
        "problems": [[p.given, p.rule, p.consequence, p.nearest] for p in problems],
        "traceback": traceback.format_exc(),
    }


def _decode_error(fields: Mapping[str, Any]) -> Exception:
    problems = [Problem(given=a, rule=b, consequence=c, nearest=d) for a, b, c, d in fields["problems"]]
    error: Exception = DataError(*problems) if problems else RuntimeError(fields["what"])
    error.add_note(f"In the worker process:\n{fields['traceback']}")
    return error


def _died(spec: MicroBatchSpec, sample: int, how: str, times: int) -> Problem:
    return Problem(
        given=f"the worker process that read sample {sample} of step {spec.step} {how}"
        + (f", {times} times" if times > 1 else ""),
        rule="a worker that dies is started again with the same samples, twice at most",
        consequence=f"step {spec.step} cannot run",
        nearest="SIGKILL often means no memory: fewer loader.num_workers; or loader.worker_kind thread to see it happen",
    )

"""A worker process for transforms that hold the interpreter lock: parts go in over a pipe, arrays come back in shared memory.

The memory is one anonymous file per process (``memfd_create``): it has no name, does not count against /dev/shm's limit, and
is gone when the processes are, however they end. Only the data set and the transforms are pickled, from parent to its own child,
once at its start; parts and answers are plain bytes. The child imports modules but never runs the parent's program, and one that
dies is started again and given the same part.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle  # noqa: TID251 - only to our own child, see docs/adr/0005
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from io import BytesIO
from multiprocessing.connection import Connection, Pipe
from types import FunctionType
from typing import Any

import numpy as np

from unisono.data.dataset import Batch
from unisono.data.loading.batch_builder import BatchBuilder, BuiltBatch, MicroBatchSpec
from unisono.errors import DataError, Problem, UnisonoError

_DEATHS = 2  # of one part's workers, after which the part is given up
_HEADER_BYTES = 64  # the sample the child is at, int64, alone on a cache line
_ALIGN = 64
_BOOT = "import sys; from unisono.data.loading.worker_process import serve; serve(*map(int, sys.argv[1:]))"


class ProcessWorker:
    """Makes parts in a process of its own, which is started with the first part. Raises DataError."""

    def __init__(self, recipe: BatchBuilder) -> None:
        if sys.platform != "linux":
            raise _cannot_start("worker processes on this system", "their shared memory needs Linux")
        self._recipe = recipe
        self._memory = os.memfd_create("unisono-loader")
        os.ftruncate(self._memory, _HEADER_BYTES)
        self._map = mmap.mmap(self._memory, _HEADER_BYTES)
        self.progress = _SharedProgress(self._map)
        self._lock = threading.Lock()  # the consumer's thread may interrupt
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._interrupted = False

    def __call__(self, part: MicroBatchSpec) -> BuiltBatch:
        for death in range(1, 2 + _DEATHS):
            try:
                return self._ask(part)
            except (EOFError, OSError) as error:
                how = self._end_child()
                if self._interrupted or death > _DEATHS:
                    raise DataError(_died(part, self.progress.sample, how, death)) from error
        raise AssertionError("not reached")

    def interrupt(self) -> None:
        """Kill the child; a call waiting for it raises."""
        with self._lock:
            self._interrupted = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        self.interrupt()
        self._end_child()
        os.close(self._memory)  # the mappings go when nothing refers to them

    def _ask(self, part: MicroBatchSpec) -> BuiltBatch:
        pipe = self._pipe or self._start()
        pipe.send_bytes(_packed(part))
        answer = json.loads(pipe.recv_bytes())
        if "error" in answer:
            raise _as_raised(answer["error"])
        if answer["bytes"] > len(self._map):
            self._map = mmap.mmap(self._memory, answer["bytes"])
        arrays: Batch = {}
        for name, dtype, shape, offset in answer["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = (
                np.frombuffer(self._map, dtype, count, offset).reshape(shape).copy()
            )  # its memory is used again
        return BuiltBatch(arrays=arrays, skipped_ids=answer["skipped"])

    def _start(self) -> Connection:
        recipe = pickle_builder(self._recipe)
        ours, theirs = Pipe()
        with theirs:
            handles = (theirs.fileno(), self._memory)
            command = [sys.executable, "-c", _BOOT, *map(str, handles)]
            child = subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL)
        with self._lock:
            self._child, self._pipe = child, ours
            if self._interrupted:
                child.kill()
        ours.send_bytes(json.dumps(sys.path).encode())
        ours.send_bytes(recipe)
        answer = json.loads(ours.recv_bytes())
        if "error" in answer:
            self._end_child()
            raise _cannot_start(
                f"data set or transform: {answer['error']['what']}", "a worker process must be able to load them"
            )
        return ours

    def _end_child(self) -> str:
        """How it ended, in words."""
        with self._lock:
            child, pipe, self._child, self._pipe = self._child, self._pipe, None, None
        if child is None or pipe is None:
            return "did not start"
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
        code = child.wait()
        pipe.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class _ImportablePickler(pickle.Pickler):
    """Refuses what is defined in the parent's program, which the child never runs."""

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise _cannot_start(
                f"{obj.__qualname__}, which is defined in the program itself",
                "a worker process imports modules and never runs the program again",
            )
        return NotImplemented


def pickle_builder(recipe: BatchBuilder) -> bytes:
    """``recipe`` as another process can read it. Raises DataError for what it cannot find there.

    Pickle, because a data set and its transforms are arbitrary Python objects of the user's: they reach another process by pickle
    or by a fork, and a fork after threads may hang (docs/adr/0005). Nothing from a file or another machine comes this way.
    """
    raw = BytesIO()
    try:
        _ImportablePickler(raw).dump(recipe)  # the user's own objects, for our own child only
    except DataError:
        raise
    except Exception as error:  # pickle raises what the objects' own code raises
        raise _cannot_start(f"data set or transform: {error}", "they are pickled to reach a process") from error
    return raw.getvalue()


def _unpickle_builder(raw: bytes) -> BatchBuilder:
    """The inverse of ``pickled``, in the child.

    Unpickling runs code of the sender's choosing. Here the sender can only be the parent, which started this process: the other
    end of the socket pair was made by it and given to nobody, and it has no name or address.
    """
    return pickle.loads(raw)  # noqa: S301 - raw comes from our own parent only, over a pipe nobody else has


def serve_worker(pipe_handle: int, memory: int) -> None:
    """The child: one part after the other until the parent is gone. Its first answer says whether it has the recipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    pipe = Connection(pipe_handle)
    try:
        sys.path[:] = json.loads(pipe.recv_bytes())
        raw = pipe.recv_bytes()
    except EOFError:
        return
    try:
        recipe = _unpickle_builder(raw)
    except Exception as error:  # an import that fails, say: what it raises is the user's code's
        pipe.send_bytes(json.dumps({"error": _as_text(error)}).encode())
        return
    pipe.send_bytes(json.dumps({}).encode())
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the cores are for the workers, one each
    watch = _SharedProgress(mmap.mmap(memory, _HEADER_BYTES))
    mapped = mmap.mmap(memory, _HEADER_BYTES)
    while True:
        try:
            part = _unpacked(pipe.recv_bytes())
        except EOFError:
            return
        try:
            built = recipe.build(part, watch)
            table, total = _layout(built.arrays)
            if total > len(mapped):
                if os.fstat(memory).st_size < total:
                    os.ftruncate(memory, total)
                mapped = mmap.mmap(memory, total)
            for (_, dtype, shape, offset), array in zip(table, built.arrays.values(), strict=True):
                np.frombuffer(mapped, dtype, array.size, offset).reshape(shape)[...] = array
            answer: Mapping[str, Any] = {"arrays": table, "bytes": total, "skipped": built.skipped_ids}
        except Exception as error:
            answer = {"error": _as_text(error)}
        pipe.send_bytes(json.dumps(answer).encode())


class _SharedProgress:
    """A ``Watch`` that two processes see."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cell = np.frombuffer(memory, np.int64, 1)

    @property
    def sample(self) -> int:
        return int(self._cell[0])

    def mark(self, sample: int) -> None:
        self._cell[0] = sample


def _layout(arrays: Batch) -> tuple[list[tuple[str, str, list[int], int]], int]:
    """(name, dtype, shape, offset) of each array in the memory, and its end."""
    table: list[tuple[str, str, list[int], int]] = []
    end = _HEADER_BYTES
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{name!r} is of dtype {array.dtype}; batches hold numbers")
        table.append((name, array.dtype.str, list(array.shape), end))
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    return table, end


def _packed(part: MicroBatchSpec) -> bytes:
    numbers = [
        np.array([part.step, part.num_rows, part.sample_ids.size, part.partner_rows.size], np.int64),
        *(
            part.sample_ids,
            part.occurrences,
            part.is_filler.astype(np.int64),
            part.partner_rows,
            part.pair_ids,
            part.is_first.astype(np.int64),
        ),
    ]
    return np.concatenate(numbers).astype(np.int64).tobytes()


def _unpacked(raw: bytes) -> MicroBatchSpec:
    words = np.frombuffer(raw, np.int64)
    step, count, rows, paired = words[:4].tolist()
    ids, visits, filler, partners, pairs, leads = np.split(
        words[4:], np.cumsum([rows, rows, count, paired, paired]).tolist()
    )
    return MicroBatchSpec(
        step=step,
        num_rows=count,
        sample_ids=ids,
        occurrences=visits,
        is_filler=filler.astype(bool),
        partner_rows=partners,
        pair_ids=pairs,
        is_first=leads.astype(bool),
    )


def _as_text(error: Exception) -> dict[str, Any]:
    problems = error.problems if isinstance(error, UnisonoError) else ()
    return {
        "what": f"{type(error).__name__}: {error}",
        "problems": [[p.given, p.rule, p.consequence, p.nearest] for p in problems],
        "traceback": traceback.format_exc(),
    }


def _as_raised(told: Mapping[str, Any]) -> Exception:
    problems = [Problem(given=a, rule=b, consequence=c, nearest=d) for a, b, c, d in told["problems"]]
    error: Exception = DataError(*problems) if problems else RuntimeError(told["what"])
    error.add_note(f"In the worker process:\n{told['traceback']}")
    return error


def _died(part: MicroBatchSpec, sample: int, how: str, times: int) -> Problem:
    return Problem(
        given=f"the worker process that read sample {sample} of step {part.step} {how}"
        + (f", {times} times" if times > 1 else ""),
        rule="a worker that dies is started again with the same samples, twice at most",
        consequence=f"step {part.step} cannot run",
        nearest="SIGKILL often means no memory: fewer loader.num_workers; or loader.worker_kind thread to see it happen",
    )


def _cannot_start(given: str, rule: str) -> DataError:
    return DataError(
        given=given,
        rule=rule,
        consequence="no worker process was started",
        nearest="define what is passed at the top of a module, not in a function; or loader.worker_kind thread",
    )

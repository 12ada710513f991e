"""Worker threads that compute results ahead of their consumer, each alone or in front of a process of its own.

Used by the loader, by streams, and by whatever sends work to subprocesses (``subprocess_map``). A result depends on its
request only, so neither the number of workers nor the restart of one that died changes anything but time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from typing import Generic, Literal, Protocol, TypeVar

from unisono.errors import DataError

WorkerKind = Literal["thread", "process"]
Request = TypeVar("Request")
Result = TypeVar("Result")
Request_contra = TypeVar("Request_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class PoolWorker(Protocol[Request_contra, Result_co]):
    """Computes results for one thread of a pool, which creates it, calls it and closes it."""

    def __call__(self, request: Request_contra, /) -> Result_co: ...

    def interrupt(self) -> None:
        """Called by another thread: make a call in progress raise, if the worker can."""

    def close(self) -> None:
        """Release what the worker holds."""


class FunctionWorker(PoolWorker[Request, Result]):
    """Runs a function in the pool's thread."""

    def __init__(self, function: Callable[[Request], Result]) -> None:
        self._function = function

    def __call__(self, request: Request, /) -> Result:
        return self._function(request)


class Job(Generic[Request, Result]):
    """A submitted request. ``future`` is its outcome; ``worker`` is None until a worker takes it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.worker: PoolWorker[Request, Result] | None = None
        self.future: Future[Result] = Future()


class WorkerPool(Generic[Request, Result]):
    """Threads that take jobs in the order of submission. ``resize`` sets their number, which is 0 at first.

    Each thread calls ``initialize``, then ``make_worker`` with its first job. Threads are daemons: a consumer that dies of
    an exception may never close the pool, and must not hang at exit.
    """

    def __init__(
        self,
        make_worker: Callable[[], PoolWorker[Request, Result]],
        *,
        name: str,
        initialize: Callable[[], None] | None = None,
    ) -> None:
        self._make_worker, self._name, self._initialize = make_worker, name, initialize
        self._initialized = threading.Semaphore(0)
        self._jobs: queue.SimpleQueue[Job[Request, Result] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: set[PoolWorker[Request, Result]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self.size = 0

    def resize(self, size: int) -> None:
        """Have ``size`` threads, all initialized; superfluous ones end after their current job.

        Raises DataError if the system starts no more threads; the pool is then closed.
        """
        for _ in range(size, self.size):
            self._jobs.put(None)
        for _ in range(self.size, size):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                started, self.size = len(self._threads), len(self._threads)
                self.close()
                raise DataError(
                    given=f"{size} workers ({self._name}): {error} after {started}",
                    rule="the system has a limit of threads for each user and container",
                    consequence="the workers that had been started were ended",
                    nearest="a smaller loader.num_workers, or -1, which finds the number that helps",
                ) from error
            self._threads.append(thread)
            self._initialized.acquire()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self.size = size

    @property
    def owned_by_this_process(self) -> bool:
        """Whether the threads are in this process; a fork has none of them."""
        return self._pid == os.getpid()

    def submit(self, request: Request) -> Job[Request, Result]:
        """Queue a request for the next free worker."""
        job: Job[Request, Result] = Job(request)
        self._jobs.put(job)
        return job

    def map_in_order(self, requests: Iterable[Request], *, ahead: int) -> Generator[tuple[Request, Result]]:
        """(request, result) of each request, in order; at most ``ahead`` are submitted and not yet consumed."""
        pending: deque[Job[Request, Result]] = deque()
        for request in requests:
            pending.append(self.submit(request))
            if len(pending) >= ahead:
                job = pending.popleft()
                yield job.request, job.future.result()
        for job in pending:
            yield job.request, job.future.result()

    def close(self, *, patience_s: float = 5.0) -> None:
        """Interrupt the workers and wait for each thread up to ``patience_s``; a thread stuck in a read is abandoned."""
        if not self.owned_by_this_process:
            return
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.interrupt()
        self.resize(0)
        for thread in self._threads:
            thread.join(patience_s)
        self._threads = []

    def _run(self) -> None:
        worker: PoolWorker[Request, Result] | None = None
        if self._initialize is not None:
            self._initialize()
        self._initialized.release()
        try:
            while (job := self._jobs.get()) is not None:
                if self._closed or not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    if worker is None:
                        worker = self._make_worker()
                        with self._lock:
                            self._workers.add(worker)
                            if self._closed:  # close() has not seen this worker
                                worker.interrupt()
                    job.worker = worker
                    job.future.set_result(worker(job.request))
                except BaseException as error:  # the consumer waits for the outcome, whatever it is
                    job.future.set_exception(error)
        finally:
            if worker is not None:
                worker.close()
                with self._lock:
                    self._workers.discard(worker)


def allowed_cores() -> int:
    """Processor cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(environ: Mapping[str, str]) -> int:
    """Cores for this process among others of its run: the launcher's share if it set one, else all it may run on."""
    share = environ.get("OMP_NUM_THREADS", "")
    return int(share) if share.isdecimal() and int(share) > 0 else allowed_cores()

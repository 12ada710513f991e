"""Workers that make parts of batches ahead of time: threads, each alone or in front of a process of its own.

Parts are pure, so which worker makes one, how many there are and whether one died and was started again changes nothing but time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from unisono.data.loading.batch_builder import BatchBuilder, BuiltBatch, MicroBatchSpec, ProgressMarker, ThreadProgress

WorkerKind = Literal["thread", "process"]


class MicroBatchWorker(Protocol):
    """One worker's way to make parts; ``watch`` tells the sample it is at."""

    @property
    def progress(self) -> ProgressMarker: ...

    def __call__(self, part: MicroBatchSpec) -> BuiltBatch: ...

    def interrupt(self) -> None:
        """End a call that another thread is in, where that can be done."""
        ...

    def close(self) -> None:
        """Free what belongs to it; called by the thread that used it."""
        ...


class ThreadWorker:
    """Makes parts in the worker's thread itself: right where decoding and reading release the interpreter lock."""

    def __init__(self, recipe: BatchBuilder) -> None:
        self._recipe = recipe
        self.progress = ThreadProgress()

    def __call__(self, part: MicroBatchSpec) -> BuiltBatch:
        return self._recipe.build(part, self.progress)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class MicroBatchJob:
    """A part under way: ``future`` is its outcome, ``watch`` the sample its worker is at, once it has one."""

    def __init__(self, part: MicroBatchSpec) -> None:
        self.spec = part
        self.progress: ProgressMarker = ThreadProgress()
        self.future: Future[Any] = Future()


class WorkerPool:
    """``resize(n)`` workers that take jobs in the order they were submitted; ``deliver`` is the last thing they do to a part.

    ``begin`` is the first. Threads are daemons: none can hold up an exit.
    """

    def __init__(
        self,
        make_maker: Callable[[], MicroBatchWorker],
        begin: Callable[[], None],
        deliver: Callable[[BuiltBatch], Any],
    ) -> None:
        self._make_maker, self._begin, self._deliver = make_maker, begin, deliver
        self._begun = threading.Semaphore(0)
        self._jobs: queue.SimpleQueue[MicroBatchJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._makers: set[MicroBatchWorker] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self.size = 0

    def resize(self, size: int) -> None:
        """Have ``size`` workers, all begun; those too many end after the job they are at."""
        for _ in range(size, self.size):
            self._jobs.put(None)
        for _ in range(self.size, size):
            # A daemon, because a consumer that dies with an exception may never close us, and must not hang at exit.
            thread = threading.Thread(target=self._work, name="unisono-loader", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._begun.acquire()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self.size = size

    @property
    def owned_by_this_process(self) -> bool:
        """False in a fork of the process that has the workers."""
        return self._process == os.getpid()

    def submit(self, part: MicroBatchSpec) -> MicroBatchJob:
        """Have it made by the next free worker."""
        job = MicroBatchJob(part)
        self._jobs.put(job)
        return job

    def close(self, *, patience_s: float = 5.0) -> None:
        """End all workers and wait for them so long; one that is stuck in a read of its own thread is left behind."""
        if not self.owned_by_this_process:
            return
        self._closed = True
        with self._lock:
            makers = list(self._makers)
        for maker in makers:
            maker.interrupt()
        self.resize(0)
        for thread in self._threads:
            thread.join(patience_s)
        self._threads = []

    def _work(self) -> None:
        maker: MicroBatchWorker | None = None
        self._begin()
        self._begun.release()
        try:
            while (job := self._jobs.get()) is not None:
                if self._closed or not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    if maker is None:
                        maker = self._make_maker()
                        with self._lock:
                            self._makers.add(maker)
                    job.progress = maker.progress
                    job.future.set_result(self._deliver(maker(job.spec)))
                except BaseException as error:  # whatever it is, the consumer waits for it
                    job.future.set_exception(error)
        finally:
            if maker is not None:
                maker.close()
                with self._lock:
                    self._makers.discard(maker)

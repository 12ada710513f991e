"""Find the number and kind of workers during the run, and remember the result for the next one.

While the consumer waits for data, another setting is tried, and kept if steps become faster. Batches do not depend on the
setting, so a trial costs only time. Windows in which torch's profiler records are not judged.

One of the settings is no worker: the consumer's own thread builds the batches. It saves the changes of threads, which take longer
than a batch that is a copy of memory, but nothing is read ahead. It is therefore only tried while a step takes less than a
millisecond, and left for good as soon as batches take longer than that and steps wait for them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import xxhash

from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.worker_pool import WorkerKind
from unisono.data.loading.worker_process import pickle_builder
from unisono.data.options import LoaderOptions, default_cache_dir
from unisono.dist.notebook import in_notebook
from unisono.errors import DataError
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, write_atomically
from unisono.storage.ownership import read_own_json

_WINDOW_STEPS, _WINDOW_S = 8, 0.5  # a window has at least this many steps and seconds
_SETTLING_STEPS = 3  # not counted after a change: batches built before it are still arriving
_MAX_WAIT_FRAC = 0.03  # fraction of the time spent waiting above which another setting is tried
_MIN_SPEEDUP = 1.05  # in steps per second, for a setting to be kept
_THREADS_PER_CORE = 2  # of which each number is tried
_WAITING_PER_CORE = (4, 8)  # tried if all of these made steps faster: such threads wait for storage and use no core
_MAX_INLINE_S = 0.001  # mean time of a batch above which workers build it ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetting:
    """Kind and number of a loader's workers; 0 workers: the consumer's own thread."""

    kind: WorkerKind
    workers: int


class WorkerTuner:
    """``setting`` is the setting to use now. Call ``record_wait`` once per step."""

    def __init__(
        self, options: LoaderOptions, *, limit: int, about: BatchBuilder, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._builder = about
        self._memory = _memory_path(about, limit)
        limit = max(1, limit)
        self._clock = clock
        self._tunes = options.num_workers == -1 or (options.num_workers > 0 and options.worker_kind == "auto")
        # a notebook's cells define most data sets, and no process starts there that was not asked for
        tried: tuple[WorkerKind, ...] = ("thread",) if in_notebook() else ("thread", "process")
        self._processes_only = options.worker_kind == "process"
        kinds = tried if options.worker_kind == "auto" else (options.worker_kind,)
        self._start = WorkerSetting(kind=kinds[0], workers=1 if options.num_workers == -1 else options.num_workers)
        counts = {kind: [options.num_workers] if options.num_workers > 0 else _counts(kind, limit) for kind in kinds}
        self._settings = [WorkerSetting(kind=kind, workers=count) for kind in kinds for count in counts[kind]]
        if options.num_workers == -1 and options.worker_kind == "auto":
            self._settings.insert(0, WorkerSetting(kind="thread", workers=0))
        remembered = _remembered(self._memory) if self._tunes else None
        self._restart(remembered if remembered in self._settings else self._start)
        self._begin_window(settling=0)

    def record_wait(self, seconds: float) -> None:
        """Record how long the consumer waited for a step's data."""
        if not self._tunes or (self._done and self.setting.workers > 0):
            return
        now = self._clock()
        if self._settling > 0:
            self._settling -= 1
            self._began_s, self._steps, self._waited_s = now, 0, 0.0
            return
        self._steps += 1
        self._waited_s += seconds
        elapsed = now - self._began_s
        if self._steps < _WINDOW_STEPS or elapsed < _WINDOW_S:
            return
        if not _profiling():
            slow_s = max(_MAX_INLINE_S * self._steps, _MAX_WAIT_FRAC * elapsed)
            if self.setting.workers == 0 and self._waited_s > slow_s:
                self._settings.remove(self.setting)
                self._settling = _SETTLING_STEPS
                self._restart(self._start)
            elif not self._done:
                self._judge(self._steps / elapsed, self._waited_s / elapsed)
        self._begin_window(settling=self._settling)

    def leave_processes_out(self) -> bool:
        """Go on with threads, as processes cannot be started. False where processes were asked for."""
        if self._processes_only:
            return False
        self._settings = [setting for setting in self._settings if setting.kind != "process"]
        self._restart(self._start)
        self._begin_window(settling=_SETTLING_STEPS)
        return True

    def _restart(self, setting: WorkerSetting) -> None:
        """Use ``setting``, and judge the others against it."""
        self.setting = setting
        self._untried = [other for other in self._settings if other != setting]
        self._best: tuple[WorkerSetting, float] | None = None
        self._done = False

    def _judge(self, rate: float, waiting: float) -> None:
        if self._best is None:  # the first window with the initial setting
            if waiting < _MAX_WAIT_FRAC:
                return
            self._best = (self.setting, rate)
            if rate * _MAX_INLINE_S < 1:
                self._untried = [setting for setting in self._untried if setting.workers > 0]
            elif self.setting.workers == 0:  # the others were tried in an earlier run
                self._untried = []
        elif self.setting != self._best[0]:
            better = rate > self._best[1] * _MIN_SPEEDUP
            if better:
                self._best = (self.setting, rate)
            elif self.setting.workers > 0:  # more workers of the same kind will not help either
                kind = self.setting.kind
                self._untried = [setting for setting in self._untried if setting.kind != kind]
            if better and waiting < _MAX_WAIT_FRAC:
                self._untried = []
        elif waiting < _MAX_WAIT_FRAC:
            return
        if (
            self._untried
            and self._untried[0].kind == "process"
            and self.setting.kind != "process"
            and (self._best[0].workers == 0 or not self._reachable())  # a process takes longer to bring such a batch
        ):
            self._untried = [setting for setting in self._untried if setting.kind != "process"]
        if self._untried:
            self._change(self._untried.pop(0))
        elif self.setting != self._best[0]:
            self._change(self._best[0])
        if not self._untried and self.setting == self._best[0]:
            self._done = True
            _remember(self._memory, self.setting)

    def _reachable(self) -> bool:
        try:
            pickle_builder(self._builder)
        except DataError:
            return False
        return True

    def _change(self, setting: WorkerSetting) -> None:
        self.setting = setting
        self._settling = _SETTLING_STEPS + setting.workers

    def _begin_window(self, *, settling: int) -> None:
        self._settling = settling
        self._began_s, self._steps, self._waited_s = self._clock(), 0, 0.0


def _counts(kind: WorkerKind, cores: int) -> list[int]:
    """Numbers of workers to try. Processes are tried with one per core only: a single one gains nothing over a thread."""
    if kind == "process":
        return [cores]
    return [*range(1, _THREADS_PER_CORE * cores + 1), *(each * cores for each in _WAITING_PER_CORE)]


def _profiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch._C._autograd._profiler_enabled())


def _memory_path(builder: BatchBuilder, limit: int) -> Path:
    """File of the setting for this data set, these transforms and this number of cores."""
    transforms = [
        getattr(transform, "__qualname__", type(transform).__qualname__)
        for transform in (builder.transform, builder.pair_transform, builder.batch_transform)
    ]
    about = "\n".join([builder.dataset.fingerprint, *transforms, str(limit)])
    return default_cache_dir(os.environ) / "loader" / f"{xxhash.xxh3_64_hexdigest(about.encode())}.json"


def _remembered(path: Path) -> WorkerSetting | None:
    try:
        return read_own_json(path, msgspec.json.Decoder(WorkerSetting).decode)
    except (OSError, ValueError):  # never tuned, or by another version
        return None


def _remember(path: Path, setting: WorkerSetting) -> None:
    try:
        make_folder(path.parent)
        write_atomically(path, msgspec.json.encode(asdict(setting)), mode=PRIVATE_MODE)
    except OSError:  # a read-only home: the next run tunes again
        return

"""Data sets and transforms that a worker process can import."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

from unisono.data.dataset import Batch


class Rows:
    """Sample i is {"x": i, "row": [i] * 3}; some are rotten, some kill the process that reads them, once per file named."""

    def __init__(
        self, size: int, *, rotten: tuple[int, ...] = (), deadly: int = -1, sleepy: int = -1, once: Path | None = None
    ):
        self.fingerprint = f"rows:{size}"
        self._size, self._rotten, self._deadly, self._sleepy, self._once = size, rotten, deadly, sleepy, once

    def __len__(self) -> int:
        return self._size

    def read(self, indices: np.ndarray) -> Batch:
        for index in indices.tolist():
            if index in self._rotten:
                raise ValueError(f"sample {index} is rotten")
            if index == self._sleepy:
                time.sleep(8)
            if index == self._deadly and (self._once is None or not self._once.exists()):
                if self._once is not None:
                    self._once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"x": indices.copy(), "row": np.repeat(indices[:, None], 3, axis=1).astype(np.float32)}


def noise(sample: Batch, rng: np.random.Generator) -> Batch:
    """Draws, and tells which process drew."""
    return {**sample, "noise": rng.random(4)}


def blend(first: Batch, second: Batch, rng: np.random.Generator) -> tuple[Batch, Batch]:
    """Both become the same mixture of the two, told apart by who leads."""
    share = np.float32(rng.random())
    row = share * first["row"] + (1 - share) * second["row"]
    return {"x": first["x"], "row": row}, {"x": second["x"], "row": -row}


def doubled(batch: Batch) -> Batch:
    """All rows at once."""
    return {**batch, "row": batch["row"] * 2}


def as_text(batch: Batch) -> Batch:
    """No numbers."""
    return {**batch, "x": batch["x"].astype(str)}


def process_id(sample: Batch, rng: np.random.Generator) -> Batch:
    """Which process made it."""
    return {**sample, "process": np.array(os.getpid())}


def process_tree(sample: Batch, rng: np.random.Generator) -> Batch:
    """Which process made it, that process' parent, and a draw of each global generator of numpy and Python."""
    seen = np.array([os.getppid(), _DRAWS[0], _DRAWS[1]] if _DRAWS else [os.getppid(), *_draw()])
    time.sleep(0.002)  # so that every worker gets some
    return {**sample, "process": np.array(os.getpid()), "seen": seen}


_DRAWS: list[int] = []


def _draw() -> list[int]:
    _DRAWS[:] = int(np.random.randint(2**31)), random.randrange(2**31)
    return _DRAWS


class WithOpenFile(Rows):
    """Has a file open in each process that loads it."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.file = open(__file__, "rb")  # noqa: SIM115


class WithThread(Rows):
    """Has a thread in each process that loads it."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Unloadable(Rows):
    """Pickled without complaint, and not to be had on the other side."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _fail, ("no such file there",)


def _fail(why: str) -> object:
    raise FileNotFoundError(why)


class SlowRows(Rows):
    """Rows that take 20 ms to read."""

    def read(self, indices: np.ndarray) -> Batch:
        time.sleep(0.02)
        return super().read(indices)


def slow_transform(sample: Batch, rng: np.random.Generator) -> Batch:
    """Takes 20 ms."""
    time.sleep(0.02)
    return sample


def slow_collate(samples: list[Batch]) -> Batch:
    """Takes 20 ms."""
    time.sleep(0.02)
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

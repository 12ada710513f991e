"""Tokens per second of the token loader beside its floor and the loops people write. Prints JSON.

Every contender delivers batches of B sequences of T inputs and T targets as int64. Rounds are interleaved; each
number is the median over rounds. ``mask`` adds weights, positions and document numbers. Times are of one process with
the file in the page cache.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from unisono.data import Loader, LoaderOptions, TokenSet, TokenWindows, TokenWriter, open_tokens

BATCH, LENGTH = 16, 1024
TOKENS = 50_000_000
ROUNDS, BATCHES = 9, 200


def write(folder: Path) -> TokenSet:
    rng = np.random.default_rng(0)
    writer = TokenWriter(folder, "bench", vocab_size=50_257, end_of_document=50_256)
    with writer:
        written = 0
        while written < TOKENS:
            size = int(rng.integers(100, 4000))
            writer.add(rng.integers(0, 50_000, size), np.ones(size))
            written += size + 1
    return open_tokens(writer.paths)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, path: Path) -> None:
        self.data = np.memmap(path, np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(self.data[index * LENGTH : (index + 1) * LENGTH + 1].astype(np.int64))
        return row[:-1], row[1:]


def floor(tokens: np.ndarray) -> Iterator[object]:
    rows = tokens[: tokens.size // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    raw = np.empty((BATCH, LENGTH + 1), np.uint16)
    out = np.empty((BATCH, LENGTH + 1), np.int64)
    rng = np.random.default_rng(1)
    while True:
        np.take(rows, rng.integers(0, len(rows), BATCH), axis=0, out=raw, mode="clip")
        out[:] = raw
        yield out[:, :-1], out[:, 1:]


def get_batch(path: Path) -> Iterator[object]:
    while True:
        data = np.memmap(path, np.uint16, mode="r")
        starts = torch.randint(len(data) - LENGTH, (BATCH,))
        yield (
            torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in starts]),
            torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in starts]),
        )


def forever(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[object]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def windows(dataset: TokenWindows) -> Iterator[object]:
    rng = np.random.default_rng(1)
    while True:
        yield dataset.read(rng.integers(0, len(dataset), BATCH))


def ours(dataset: TokenWindows, depth: int) -> Iterator[object]:
    loader = Loader(
        dataset, seed=1, global_batch=BATCH, micro_batch=BATCH, options=LoaderOptions(workers=1 if depth else 0)
    )
    return loader.iterate(0, 10**9)


def measure(makers: dict[str, Callable[[], Iterator[object]]]) -> dict[str, list[float]]:
    streams = {name: make() for name, make in makers.items()}
    for stream in streams.values():
        for _ in range(20):
            next(stream)
    rates: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(ROUNDS):
        for name, stream in streams.items():
            next(stream)
            begin = time.perf_counter()
            for _ in range(BATCHES):
                next(stream)
            rates[name].append(BATCHES * BATCH * LENGTH / (time.perf_counter() - begin) / 1e6)
    return rates


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokens = write(Path(folder))
        (shard,) = tokens.shards
        path = shard.sidecar.path.with_suffix(".bin")
        ignore = TokenWindows(tokens, seq_len=LENGTH, boundaries="ignore")
        mask = TokenWindows(tokens, seq_len=LENGTH)
        rows = Rows(path)
        rates = measure(
            {
                "floor: np.take into a reused buffer": lambda: floor(shard.tokens),
                "unisono TokenWindows, ignore": lambda: windows(ignore),
                "unisono TokenWindows, mask": lambda: windows(mask),
                "unisono Loader, ignore, prefetch 0": lambda: ours(ignore, 0),
                "unisono Loader, ignore, prefetch 2": lambda: ours(ignore, 2),
                "unisono Loader, mask, prefetch 0": lambda: ours(mask, 0),
                "unisono Loader, mask, prefetch 2": lambda: ours(mask, 2),
                "torch DataLoader over memmap, 0 workers": lambda: forever(
                    DataLoader(rows, batch_size=BATCH, shuffle=True)
                ),
                "torch DataLoader over memmap, 2 workers": lambda: forever(
                    DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
                ),
                "get_batch as in nanoGPT": lambda: get_batch(path),
            }
        )
        result = {
            "what": f"million tokens per second, batches of {BATCH} x {LENGTH}, {TOKENS // 10**6}M uint16 tokens",
            "rounds": ROUNDS,
            "median": {name: round(statistics.median(r), 1) for name, r in rates.items()},
            "least and most": {name: [round(min(r), 1), round(max(r), 1)] for name, r in rates.items()},
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        }
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

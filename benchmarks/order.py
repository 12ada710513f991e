"""Positions per second of the keyed order and of numpy's stored permutation. Prints JSON."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from unisono.data.order.permutation import Permutation

REPEATS = 7
CALL = 1_000_000


def median_s(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rate(work: Callable[[], object], count: int) -> float:
    return round(count / median_s(work) / 1e6, 2)


def main() -> None:
    million = np.arange(CALL)
    step = np.arange(512)
    orders = {
        "1e6": Permutation(10**6, seed=1),
        "2^20 + 1": Permutation(2**20 + 1, seed=1),
        "1e9": Permutation(10**9, seed=1),
        "1e12": Permutation(10**12, seed=1),
        "1e12, blocks of 4096": Permutation(10**12, seed=1, block_size=4096),
    }
    generator = np.random.default_rng(1)
    result = {
        "what": "million positions per second, one thread, median",
        "repeats": REPEATS,
        "order, calls of 1e6 positions": {name: rate(lambda o=o: o(million), CALL) for name, o in orders.items()},
        "order, calls of 512 positions": {
            name: rate(lambda o=o: [o(step) for _ in range(50)], 50 * 512) for name, o in orders.items()
        },
        "numpy Generator.permutation": {
            "1e6 (8 MB)": rate(lambda: generator.permutation(10**6), 10**6),
            "1e7 (80 MB)": rate(lambda: generator.permutation(10**7), 10**7),
        },
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Push and pull of our stores, MXNet's and torch's all-reduce. Prints JSON.

    python -m benchmarks.kvstore.pushpull [--layouts 2x1,1x1] [--sizes 1KB,100MB] [--more-sizes 100MB] [--rounds 3] [--repeats 3]

A layout is workers x servers, all on this host, one thread each; the first has all sizes, the others fewer. A round starts every
job anew, in an order that rotates, and each job times its repeats; a job's number is their median, a ratio is that of two jobs of
one round. MXNet runs in an environment of its own under --cache. The limits: a memcpy, and as many bytes through a
bare socket, there and back.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contestants import interpreter
from benchmarks.data.contest import reason
from benchmarks.paired import ratio, spread

from unisono.errors import CommError
from unisono.kvstore.bench.processes import measure_on_this_host
from unisono.kvstore.bench.settings import ITEM_BYTES, BenchSettings, nbytes_of, shapes_of

SIZES = "1KB,100KB,1MB,10MB,100MB,400MB,resnet50,bert-base"
MORE_SIZES = "100MB,resnet50"
# (slower, faster): how many times faster
PAIRS = (
    ("mxnet dist_sync", "dist_sync"),
    ("mxnet dist_sync", "dist_sync_shm"),
    ("mxnet dist_sync 2bit", "dist_sync 2bit"),
    ("mxnet dist_async", "dist_async"),
    ("mxnet dist_async 2bit", "dist_async 2bit"),
    ("mxnet dist_async", "dist_async_shm"),
    ("dist_sync", "all_reduce"),
    ("dist_sync_shm", "all_reduce"),
    ("dist_async", "limit: socket there and back"),
    ("dist_async_shm", "limit: memcpy"),
)
_PIECE_BYTES = 4 << 20
_MXNET_TIMEOUT_S = 600.0

Times = dict[tuple[str, str], float]  # by (contestant, size)


def ours(workers: int, servers: int, sizes: tuple[str, ...], repeats: int, notes: dict[str, str]) -> Times:
    """One job of ours, with all-reduce first; adds to ``notes`` what ``auto`` says of compression. Raises CommError."""
    settings = BenchSettings(sizes=sizes, servers=servers, rounds=repeats, codecs=("none", "2bit"))
    found = measure_on_this_host(settings, workers)
    notes["auto"] = found["auto"]
    return {(_name(row["kind"], row["codec"]), row["size"]): row["median_s"] for row in found["rows"]}


def _name(kind: str, codec: str) -> str:
    return kind if codec == "none" else f"{kind} {codec}"


def mxnet(
    kind: str, codec: str, cache: Path, workers: int, servers: int, sizes: tuple[str, ...], repeats: int
) -> Times:
    """One job of MXNet: scheduler, servers, workers. Raises RuntimeError with what a worker said, and TimeoutError."""
    shapes = {
        size: "+".join(str(ITEM_BYTES * math.prod(shape)) for shape in shapes_of(size).values()) for size in sizes
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(__file__).parent / "peers" / "with_mxnet.py"
    command = [interpreter("mxnet", cache), str(script), kind, ",".join(shapes.values()), str(repeats), codec]
    numbers = {"DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": workers, "DMLC_NUM_SERVER": servers, "OMP_NUM_THREADS": 1}
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "DMLC_PS_ROOT_URI": "127.0.0.1"}
    environ |= {name: str(number) for name, number in numbers.items()}
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    processes = [
        subprocess.Popen(
            command,
            env=environ | {"DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if role == "worker" else subprocess.DEVNULL,
            text=True,
        )
        for role in roles
    ]
    try:
        ends = time.monotonic() + _MXNET_TIMEOUT_S
        answers: list[Any] = []
        for process in processes[1 + servers :]:
            out, err = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            if process.returncode or not out.strip():
                raise RuntimeError(f"mxnet {kind} {codec}: {err[-2000:]}")
            answers.append(json.loads(out.strip().splitlines()[-1])["times"])
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"mxnet {kind} {codec}: no answer in {_MXNET_TIMEOUT_S:g} s") from error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    name = f"mxnet {_name(kind, codec)}"
    return {
        (name, size): statistics.median(map(max, zip(*(each[given] for each in answers), strict=True)))
        for size, given in shapes.items()
    }


def limits(size: str) -> Times:
    """Seconds of one memcpy, and of the bytes through a loopback socket to another thread and back."""
    nbytes = nbytes_of(shapes_of(size))
    one, other = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def through_socket() -> None:
        left, right = _pair()
        with left, right:
            back = threading.Thread(target=_echo, args=(right, nbytes))
            back.start()
            _send(left, one)
            _receive(left, other)
            back.join()

    return {
        ("limit: memcpy", size): _median_s(lambda: np.copyto(other, one)),
        ("limit: socket there and back", size): _median_s(through_socket),
    }


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def _echo(sock: socket.socket, nbytes: int) -> None:
    data = np.empty(nbytes, np.uint8)
    _receive(sock, data)
    _send(sock, data)


def _send(sock: socket.socket, data: np.ndarray) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        sock.sendall(data[start : start + _PIECE_BYTES])


def _receive(sock: socket.socket, data: np.ndarray) -> None:
    view = memoryview(data)
    while view:
        view = view[sock.recv_into(view) :]


def _median_s(work: Callable[[], object], repeats: int = 5) -> float:
    seconds: list[float] = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:])


def race(
    layout: str, sizes: tuple[str, ...], rounds: int, repeats: int, cache: Path, only: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What was found of one layout, and why what did not run did not."""
    workers, servers = map(int, layout.split("x"))
    notes: dict[str, str] = {}
    jobs: dict[str, Callable[[], Times]] = {
        "unisono": lambda: ours(workers, servers, sizes, repeats, notes),
        "mxnet dist_sync": lambda: mxnet("dist_sync", "none", cache, workers, servers, sizes, repeats),
        "mxnet dist_sync 2bit": lambda: mxnet("dist_sync", "2bit", cache, workers, servers, sizes, repeats),
        "mxnet dist_async": lambda: mxnet("dist_async", "none", cache, workers, servers, sizes, repeats),
        "mxnet dist_async 2bit": lambda: mxnet("dist_async", "2bit", cache, workers, servers, sizes, repeats),
        "limits": lambda: {name: seconds for size in sizes for name, seconds in limits(size).items()},
    }
    names = [name for name in jobs if only in name]
    found: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    not_run: dict[str, str] = {}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if name in not_run:
                continue
            print(f"{layout}, round {number + 1} of {rounds}: {name} …", file=sys.stderr, flush=True)
            try:
                for key, seconds in jobs[name]().items():
                    found[key][number] = seconds
            except (CommError, RuntimeError, TimeoutError, OSError, subprocess.CalledProcessError) as error:
                not_run[name] = reason(error)
    rows: dict[str, Any] = {}
    for size in sizes:
        times = {name: each for (name, its), each in found.items() if its == size}
        rows[size] = {
            "bytes": nbytes_of(shapes_of(size)),
            "seconds": {name: spread(list(each.values())) for name, each in times.items()},
            "times_faster": {
                f"{fast} than {slow}": ratio([times[slow][n] for n in both], [times[fast][n] for n in both])
                for slow, fast in PAIRS
                if slow in times and fast in times and (both := sorted(times[slow].keys() & times[fast].keys()))
            },
        }
    return {"sizes": rows, **notes}, {f"{layout}: {name}": why for name, why in not_run.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default="2x1,1x1,4x1,4x4", help="workers x servers")
    parser.add_argument("--sizes", default=SIZES, help="of the first layout")
    parser.add_argument("--more-sizes", default=MORE_SIZES, help="of the others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each size in a job")
    parser.add_argument("--only", default="", help="jobs with this in their names")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "unisono-bench")
    arguments = parser.parse_args()
    layouts: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for number, layout in enumerate(arguments.layouts.split(",")):
        sizes = tuple((arguments.more_sizes if number else arguments.sizes).split(","))
        layouts[layout], missing = race(
            layout, sizes, arguments.rounds, arguments.repeats, arguments.cache, arguments.only
        )
        not_run |= missing
    print(json.dumps({"layouts": layouts, "not_run": not_run, "repeats": arguments.repeats}, indent=1))


if __name__ == "__main__":
    main()

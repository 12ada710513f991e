"""A worker of dist_async for fault tests: pushes whole numbers, so that applying exactly once is an exact sum.

Says what it does in lines of JSON, one object each. ``main`` takes what to do as ``facts``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from parameter_servers import recipe
from torch import Tensor

from unisono.kvstore.backends.server_client import ServerClient, ServerConfig
from unisono.kvstore.server import __main__ as server
from unisono.kvstore.server.run_spec import RunSpec

COUNT, SQUARES = "count", "squares"
DAY_S = 86400.0


def table(elements: int = 3000) -> dict[str, Tensor]:
    """Two keys of zeros: in one each push counts, in the other its square (modulo 97) does."""
    return {COUNT: torch.zeros(elements), SQUARES: torch.zeros(elements // 2)}


def gradients(number: int, elements: int = 3000) -> dict[str, Tensor]:
    """Of push or unit ``number``; SGD with rate 1 subtracts, so that they are negative."""
    return {
        COUNT: torch.full((elements,), -1.0),
        SQUARES: torch.full((elements // 2,), -float(number * number % 97)),
    }


def sums(numbers: range, workers: int = 1) -> tuple[float, float]:
    """What every element of the two keys is when ``workers`` each pushed ``numbers`` once."""
    return float(workers * len(numbers)), float(workers * sum(each * each % 97 for each in numbers))


def main(facts: Mapping[str, Any]) -> int:
    """``facts``: servers, secret (a file), worker, incarnation, and ``do``, one of the functions below."""
    secret = Path(facts["secret"]).read_bytes()
    if "jump" in facts:
        jump(Path(facts["jump"]), -DAY_S)
    here = table(facts.get("elements", 3000))
    agreed = RunSpec(
        table={key: (tuple(value.shape), value.dtype) for key, value in here.items()},
        num_servers=len(facts["servers"]),
        **facts.get("agreed", {}),
    )
    addresses = [(host, port) for host, port in facts["servers"]]
    restart_count = facts.get("incarnation", 0)
    worker = ServerClient(
        ServerConfig(addresses=addresses, secret=secret, worker_restart_count=restart_count),
        agreed,
        worker=facts["worker"],
        deadline_s=facts.get("deadline_s", 60.0),
        shared_memory=False,  # faults of the network are to be felt
        report=lambda text: tell(said=text),
    )
    if not worker.is_initialised:
        worker.init(here)
    worker.set_optimizer(recipe(here))
    tell(joined=facts["worker"])
    {"pushes": pushes, "units": units, "clocks": clocks, "pulls": pulls}[facts["do"]](worker, facts)
    into = table(facts.get("elements", 3000))
    worker.pull(into).wait()
    tell(found=[into[key].unique().tolist() for key in (COUNT, SQUARES)])
    tell(reconnects=sum(each.num_reconnects for each in worker.traffic()))
    worker.close()
    tell(left=[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])
    return 0


def pushes(worker: ServerClient, facts: Mapping[str, Any]) -> None:
    """``pushes`` of its own stream, ``pause_s`` after each."""
    for number in range(facts["pushes"]):
        sent = worker.push(gradients(number, facts.get("elements", 3000))).wait()
        tell(acknowledged=number, duplicates=sent.num_duplicates, at=time.monotonic())
        time.sleep(facts.get("pause_s", 0.0))


def units(worker: ServerClient, facts: Mapping[str, Any]) -> None:
    """Units of work until there are none; beginning and saving are work too."""
    while (work := worker.claim(wait=True).item).kind not in ("end", "stopped"):
        if work.kind == "unit":
            tell(claimed=work.number)
            time.sleep(facts.get("pause_s", 0.0))
            sent = worker.push(gradients(work.number, facts.get("elements", 3000)), batch_shard=work.number).wait()
            tell(acknowledged=work.number, duplicates=sent.num_duplicates)
        if work.kind == "save":
            tell(saves=work.number)
        if work.kind != "wait":
            worker.mark_done(work)


def clocks(worker: ServerClient, facts: Mapping[str, Any]) -> None:
    """``clocks`` steps; the lines tell when each began to wait and was let go (monotonic, the same for all processes)."""
    for clock in range(1, facts["clocks"] + 1):
        time.sleep(facts.get("pause_s", 0.0))
        tell(reached=clock, at=time.monotonic())
        worker.tick(clock)
        tell(clock=clock, at=time.monotonic())


def pulls(worker: ServerClient, facts: Mapping[str, Any]) -> None:
    """Ask for everything, many times over, without waiting: to be stopped in the middle of it."""
    into = [table(facts["elements"]) for _ in range(facts["pulls"])]
    waiting = [worker.pull(each) for each in into]
    tell(asked=len(waiting))
    for each in waiting:
        each.wait()


def jump(when: Path, by_s: float) -> None:
    """From when that file is there, the wall clock of this process is wrong by so much."""
    real = time.time
    time.time = lambda: real() + (by_s if when.exists() else 0.0)


def jumping_server() -> int:
    """A server whose wall clock jumps when the file FAULTS_JUMP appears."""
    jump(Path(os.environ["FAULTS_JUMP"]), DAY_S)
    return server.main()


def cramped_server() -> int:
    """A server after ``ulimit -n 64``."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    return server.main()


def crowded_server() -> int:
    """A server that can start no thread for a connection while the file FAULTS_CROWD is there, as after ``ulimit -u``."""
    start = threading.Thread.start

    def start_unless_crowded(thread: threading.Thread) -> None:
        if thread.name == "unisono-wire-peer" and Path(os.environ["FAULTS_CROWD"]).exists():
            print("no thread", flush=True)
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_unless_crowded  # type: ignore[method-assign]
    return server.main()


def tell(**what: Any) -> None:
    """A line."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)

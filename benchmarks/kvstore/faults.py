"""How long a killed process holds up the others: a worker or a server of dist_async, a rank of dist_sync. Prints JSON.

    python -m benchmarks.kvstore.faults [--rounds 5]

Each is killed with SIGKILL, and the clock starts there. A server is started again at once, as a launcher would, with its
newest snapshot: most of that time its replacement imports torch. Two seconds after a worker's last connection closed its lease
ends: that is the floor of the first two rows.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.paired import spread

from unisono.kvstore.backends.server_client import ServerClient, ServerConfig
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.work_queue import WorkItem
from unisono.optim import OptimOptions
from unisono.optim.groups import Role

TABLE = {"value": ((250_000,), torch.float32)}
BATCH_SHARDS = 4
_MODULE = "benchmarks.kvstore.faults"


class _Server:
    """One server process at an address that stays; ``again`` after ``kill`` starts its successor."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.secret, self.file, self._folder, self._epoch = secrets.token_bytes(32), folder / "secret", folder, 0
        self.file.touch(mode=0o600)
        self.file.write_bytes(self.secret)
        self.process = self._start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port

    def _start(self) -> subprocess.Popen[bytes]:
        given = {
            "SERVER": "0",
            "SERVER_ADDRESSES": "{}:{}".format(*self.address),
            "RESTART_COUNT": str(self._epoch),
            "LISTEN_FD": str(self.listener.fileno()),
            "SECRET_FILE": str(self.file),
            "SNAPSHOTS": str(self._folder / "snapshots"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "unisono.kvstore.server"],
            env=os.environ | {f"UNISONO_{name}": value for name, value in given.items()},
            pass_fds=[self.listener.fileno()],
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def again(self) -> None:
        self._epoch += 1
        self.process = self._start()


@contextmanager
def _server() -> Generator[_Server]:
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        server = _Server(Path(folder))
        try:
            yield server
        finally:
            server.kill()
            server.listener.close()


def _worker(address: tuple[str, int], secret: bytes, number: int) -> ServerClient:
    agreed = RunSpec(table=TABLE, num_servers=1, num_batch_shards=BATCH_SHARDS, labels={"run": "bench"})
    config = ServerConfig(addresses=[address], secret=secret)
    worker = ServerClient(config, agreed, worker=number, report=lambda text: None)
    worker.init({"value": torch.zeros(TABLE["value"][0])})
    options = OptimOptions(kind="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    worker.set_optimizer(ServerOptimizerSpec(options=options, roles={"value": Role.NO_DECAY}))
    return worker


def claims_and_waits(address: str, secret_file: str) -> None:
    """A worker that claims a batch shard, says so, and never computes it."""
    host, _, port = address.rpartition(":")
    worker = _worker((host, int(port)), Path(secret_file).read_bytes(), 1)
    print(worker.claim(wait=True).item.number, flush=True)
    time.sleep(600)


def killed_worker() -> dict[str, float]:
    """Seconds until a barrier that it missed is over for the others, and until its batch shard is assigned to another worker."""
    with _server() as server:
        other = _worker(server.address, server.secret, 0)
        try:
            other.mark_done(other.claim(wait=True).item)  # the beginning, before there are batch shards
            command = [sys.executable, "-m", _MODULE, "--holder", "{}:{}".format(*server.address), str(server.file)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
                assert holder.stdout is not None
                claimed = int(holder.stdout.readline())
                holder.send_signal(signal.SIGKILL)
                begin_s = time.monotonic()
            for batch_shard in set(range(BATCH_SHARDS)) - {claimed}:
                assert other.claim(wait=True).item == WorkItem("unit", batch_shard)
                other.mark_done(WorkItem("unit", batch_shard))
            other.barrier(1)
            past_s = time.monotonic() - begin_s
            while other.claim(wait=True).item != WorkItem("unit", claimed):
                pass
            return {
                "others pass the barrier": past_s,
                "its batch shard is another worker's": time.monotonic() - begin_s,
            }
        finally:
            other.close()


def killed_server() -> dict[str, float]:
    """Seconds until whoever started it sees its end, and until a push is acknowledged again."""
    with _server() as server:
        worker = _worker(server.address, server.secret, 0)
        try:
            values = {"value": torch.ones(TABLE["value"][0])}
            worker.push(values).wait()
            worker.snapshot()
            begin_s = time.monotonic()
            server.kill()
            noticed_s = time.monotonic() - begin_s
            server.again()
            worker.push(values).wait()
            return {
                "its end is seen by who started it": noticed_s,
                "a push is acknowledged again": time.monotonic() - begin_s,
            }
        finally:
            worker.close()


def waits_for_a_peer() -> None:
    """A rank that sums with the other one; told to, rank 1 is killed by rank 0, which says when it knew."""
    from unisono.dist import job_from_environ, join_world
    from unisono.errors import CommError

    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=60)
    pids = world.all_gather_json(os.getpid())
    if world.rank == 1:
        print("waits", flush=True)
        time.sleep(600)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    begin_s = time.monotonic()
    try:
        world.all_reduce(torch.ones(250_000))
    except CommError:
        print(json.dumps({"the others' sum ends with an error": time.monotonic() - begin_s}), flush=True)
    os._exit(0)  # there is no peer to say goodbye to


def killed_rank() -> dict[str, float]:
    """Seconds until an all-reduce of the other rank ends with an error that names the rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, "--rank"],
            env=os.environ
            | {name: str(number) for name, number in numbers.items()}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answer, _ = ranks[0].communicate(timeout=120)
        return json.loads(answer)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--holder", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.holder:
        claims_and_waits(*arguments.holder)
    elif arguments.rank:
        waits_for_a_peer()
    else:
        found: dict[str, Any] = {}
        for what in (killed_worker, killed_server, killed_rank):
            print(f"{what.__name__} …", file=sys.stderr, flush=True)
            rounds = [what() for _ in range(arguments.rounds)]
            found[what.__name__] = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
        print(json.dumps({"killed": found}, indent=1))


if __name__ == "__main__":
    main()

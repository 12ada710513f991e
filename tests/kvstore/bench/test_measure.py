"""Every kind at two sizes: rows are complete, sums were checked, bytes are those of theory; and nothing stays behind."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from pool import Pool, WorkersFailed

from unisono.dist import World
from unisono.kvstore.bench import measure as module
from unisono.kvstore.bench.processes import measure_on_this_host
from unisono.kvstore.bench.settings import KINDS, BenchSettings, nbytes_of, shapes_of


def measured(world: World, settings: BenchSettings) -> dict[str, Any]:
    return module.measure(world, settings)


@pytest.mark.full
def test_every_kind_between_two_workers(pool: Pool) -> None:
    settings = BenchSettings(
        kinds=tuple(kind for kind in KINDS if not kind.startswith("dist_async")),
        sizes=("1KB", "1MB"),
        codecs=("none", "2bit"),
        rounds=2,
    )
    found, other = pool.run(measured, settings, ranks=2)
    rows = {(row["kind"], row["codec"], row["size"]): row for row in found["rows"]}
    lossless = [kind for kind in KINDS if not kind.startswith("dist_async")]
    assert set(rows) == {(k, "none", s) for k in lossless for s in settings.sizes} | {
        ("dist_sync", "2bit", s) for s in settings.sizes
    }
    for (kind, codec, size), row in rows.items():
        assert row["bytes"] == nbytes_of(shapes_of(size))
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["median_s"] <= max(row["seconds"])
        assert row["checked"] == ("alike" if codec != "none" or kind == "dist_local" else "exact")
    assert rows["dist_sync", "none", "1MB"]["theory_bytes"] == 1e6  # a ring of two sends everything once
    assert (
        rows["dist_sync", "2bit", "1MB"]["theory_bytes"] == 62_508
    )  # two bits for each of 250,000, and a head of 8 bytes
    assert rows["dist_sync_shm", "none", "1MB"]["theory_bytes"] == 0
    assert rows["dist_sync", "none", "1MB"]["sent_bytes"] >= 1e6
    assert set(found["codecs"]) == {"2bit"}
    assert found["auto"] == other["auto"]


def one_wrong(world: World) -> None:
    plain = module._pushed
    module._pushed = lambda size, rank: {key: value + (rank == 1) for key, value in plain(size, rank).items()}  # pyright: ignore[reportPrivateUsage]
    module.measure(world, BenchSettings(kinds=("dist_sync",), sizes=("1KB",), rounds=1))


def test_a_wrong_sum_is_an_error(pool: Pool) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(one_wrong, ranks=2)
    assert "all_reduce, none, 1KB: wrong values of 'value'" in caught.value.outcomes[0]


@pytest.mark.full
def test_servers_and_whole_processes() -> None:
    settings = BenchSettings(kinds=("dist_async", "dist_async_shm"), sizes=("1KB", "5MB"), servers=2, rounds=1)
    found = measure_on_this_host(settings, 2)
    rows = {(row["kind"], row["size"]): row for row in found["rows"]}
    assert set(rows) == {(kind, size) for kind in ("all_reduce", *settings.kinds) for size in settings.sizes}
    for (kind, size), row in rows.items():
        assert row["checked"] == "exact"
        if kind == "dist_async":
            nbytes = nbytes_of(shapes_of(size))
            assert row["theory_bytes"] == nbytes
            assert nbytes < row["sent_bytes"] < nbytes + 2000  # two frames, and perhaps a sign of life
        if kind == "dist_async_shm" and size == "5MB":
            assert row["theory_bytes"] == 0
            assert row["sent_bytes"] < 5000  # heads alone


LEAVES_WITHOUT_A_WORD = """
import os
from unisono.dist import JobSpec, World
from unisono.kvstore.server.child_servers import child_servers

with child_servers(World(JobSpec()), 1) as (addresses, _):
    print(addresses[0][1], flush=True)
    os.kill(os.getpid(), 9)
"""


CANNOT_BEGIN = """
import sys
from unisono.dist import JobSpec, World
from unisono.errors import LaunchError
from unisono.kvstore.server.child_servers import child_servers

try:
    with child_servers(World(JobSpec()), 1, restarts=3, more={"UNISONO_REPLICAS": "2"}):
        sys.exit("it began")
except LaunchError as error:
    sys.exit(str(error))
"""


@pytest.mark.full
def test_a_server_that_cannot_begin_is_said_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CANNOT_BEGIN], capture_output=True, text=True, check=False, timeout=50)
    assert "UNISONO_REPLICAS is 2 with 1 servers" in done.stderr
    assert "server 0 with exit code 2 ended before it listened" in done.stderr
    assert "is started again" not in done.stderr


@pytest.mark.full
def test_servers_end_with_who_started_them() -> None:
    command = [sys.executable, "-c", LEAVES_WITHOUT_A_WORD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9
    port = int(done.stdout)
    ends = time.monotonic() + 20
    while time.monotonic() < ends and listens(port):
        time.sleep(0.1)
    assert not listens(port)


def listens(port: int) -> bool:
    with open("/proc/net/tcp") as table:
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in list(table)[1:])


@pytest.mark.full
def test_values_that_came_coded_are_compared_in_full() -> None:
    found = measure_on_this_host(
        BenchSettings(kinds=("dist_async",), sizes=("1MB",), codecs=("bf16",), servers=1, rounds=1), 2
    )
    (row,) = [row for row in found["rows"] if row["kind"] == "dist_async"]
    assert row["checked"] == "alike"
    assert row["theory_bytes"] == nbytes_of(shapes_of("1MB")) / 2
    assert row["theory_bytes"] < row["sent_bytes"] < row["theory_bytes"] + 2000

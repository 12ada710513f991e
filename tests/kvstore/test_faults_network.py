"""Servers and workers on two hosts, which are network namespaces with a cable of 100 Mbit/s between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from faults import Worker
from faults_worker import sums
from netns import Cable, cable
from nursery import Child, Nursery
from procs import wait_until

PORTS = (5611, 5612)


def serve(nursery: Nursery, line: Cable, folder: Path) -> tuple[list[Child], list[list[Any]]]:
    """Two servers at one end."""
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_bytes(bytes(range(32)))
    addresses = [[line.here_address, port] for port in PORTS]
    children = []
    for server in range(len(PORTS)):
        environ = {
            "UNISONO_SERVER": str(server),
            "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in addresses),
            "UNISONO_RESTART_COUNT": "0",
            "UNISONO_SECRET_FILE": str(folder / "secret"),
        }
        log = folder / f"server-{server}.log"
        program = "unisono.kvstore.server.__main__:main"
        children.append(nursery.start(program, log=log, environ=environ, namespace=line.here))
        wait_until(lambda log=log: log.exists() and "listens at 10." in log.read_text(), f"{log} says it listens")
    return children, addresses


def work(nursery: Nursery, line: Cable, folder: Path, addresses: list[list[Any]], **facts: Any) -> Worker:
    """A worker at the other end."""
    given = {"servers": addresses, "secret": str(folder / "secret"), "worker": 0, "do": "pushes"}
    log = folder / "worker.log"
    return Worker(nursery.start("faults_worker:main", given | facts, log=log, namespace=line.there), log)


@pytest.mark.full
def test_two_hosts_exchange_what_they_must_and_no_more(nursery: Nursery, tmp_path: Path) -> None:
    elements, pushes = 600_000, 4
    with cable(100) as line:
        children, addresses = serve(nursery, line, tmp_path)
        before = line.received_bytes()
        worker = work(nursery, line, tmp_path, addresses, elements=elements, pushes=pushes)
        worker.finish()
        payload = (
            (pushes + 1) * elements * 6
        )  # the values at the start, then gradients: 4 bytes of one key, 2 of the other
        assert payload <= line.received_bytes() - before <= 1.03 * payload
        assert worker.said("reconnects") == [0]
        assert worker.said("found")[0] == [[value] for value in sums(range(pushes))]
        for child in children:
            child.kill()


@pytest.mark.full
def test_a_cable_that_is_pulled_for_a_while_loses_nothing(nursery: Nursery, tmp_path: Path) -> None:
    elements, pushes = 100_000, 40
    with cable(100) as line:
        children, addresses = serve(nursery, line, tmp_path)
        worker = work(nursery, line, tmp_path, addresses, elements=elements, pushes=pushes)
        worker.until("acknowledged", 10)
        line.pull()
        time.sleep(3)
        before = len(worker.said("acknowledged"))
        assert before < pushes
        line.plug()
        worker.finish()
        assert worker.said("found")[0] == [[value] for value in sums(range(pushes))]
        for child in children:
            child.kill()

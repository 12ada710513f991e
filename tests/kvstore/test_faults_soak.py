"""Workers and a server are killed at random times, for a while: each unit of work counts once, on every chunk."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from faults import found, worker
from faults_worker import sums
from nursery import Nursery
from parameter_servers import parameter_servers


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_is_killed_each_unit_counts_once(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    draw, units, server = random.Random(seed), 250, 1 - seed
    facts: dict[str, Any] = {"do": "units", "agreed": {"num_batch_shards": units}, "pause_s": 0.05}
    with parameter_servers(tmp_path, 2, nursery=nursery, replicas=2) as servers:
        incarnations = [0, 0, 0]
        workers = [worker(nursery, servers, tmp_path, n, **facts) for n in range(3)]
        workers[0].until("acknowledged", 5)
        for event in range(12):
            time.sleep(draw.uniform(0.1, 1.0))
            if event % 4 == 3:
                servers.kill(server)
                time.sleep(draw.uniform(0, 0.3))
                servers.restart(server)
                continue
            victim = draw.randrange(3)
            workers[victim].child.kill()
            workers[victim].child.wait()
            incarnations[victim] += 1
            incarnation = incarnations[victim]
            workers[victim] = worker(nursery, servers, tmp_path, victim, incarnation=incarnation, **facts)
        for each in workers:
            each.finish()
        assert found(servers, num_batch_shards=units) == sums(range(units))

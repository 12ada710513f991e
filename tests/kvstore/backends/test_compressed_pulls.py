"""Values that travel coded from real servers: how many bytes, how near they come, and that nothing breaks what they add up to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chaos import Chaos
from nursery import Nursery
from parameter_servers import numbers, parameter_servers, recipe
from torch import Tensor

from unisono.kvstore.backends.server_client import ServerClient
from unisono.kvstore.compression import Codec, PowerSGD, find_codec

HARM = {"drop": 0.02, "duplicate": 0.1, "reorder": 0.05, "corrupt": 0.02}


def codec_of(name: str) -> Codec:
    codec = find_codec(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def pulled(worker: ServerClient, table: dict[str, Tensor], *, exact: bool = False) -> dict[str, Tensor]:
    into = {key: torch.empty_like(value) for key, value in table.items()}
    worker.pull(into, exact=exact).wait()
    return into


def received(worker: ServerClient) -> int:
    return sum(link.received_bytes for link in worker.traffic())


@pytest.mark.parametrize(
    ("name", "coded"), [("int8", True), ("2bit:0.5", False), pytest.param("bf16", True, marks=pytest.mark.full)]
)
def test_a_pull_is_as_small_as_its_codes(nursery: Nursery, tmp_path: Path, name: str, coded: bool) -> None:
    codec = codec_of(name)
    table = numbers((1500, 1024), (5, 7)) | {"double": torch.randn(40, dtype=torch.float64), "ids": torch.arange(9)}
    trained = {key: value for key, value in table.items() if key != "ids"}
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        worker = servers.connect(table, codec=codec, shared_memory=False)
        worker.init(table)
        worker.set_optimizer(recipe(table))
        first = pulled(worker, table)
        assert all(torch.equal(first[key], table[key]) for key in table)
        whole = sum(value.nbytes for value in table.values())
        chunks = [chunk for key in trained for chunk in worker.placement.chunks_of(key)]
        codes = table["ids"].nbytes + sum(codec.encoded_bytes(chunk.num_elements) for chunk in chunks)
        gradients = {key: torch.randn_like(value) for key, value in trained.items()}
        for ask in (
            lambda: worker.push(gradients, {key: torch.empty_like(each) for key, each in trained.items()}).wait(),
            lambda: pulled(worker, table),
        ):
            before = received(worker)
            ask()
            assert 0 <= received(worker) - before - (codes if coded else whole) + table["ids"].nbytes < 2000
            worker.commit()
        told = worker.compression_stats()["w0"]
        assert told["bytes_in"] == table["w0"].nbytes
        if coded:
            assert told["pull_bytes_in"] == table["w0"].nbytes
            assert told["pull_bytes_out"] == told["bytes_out"]
        else:
            assert "pull_bytes_out" not in told
        for _ in range(6):
            last = pulled(worker, table)
        there = pulled(worker, table, exact=True)
        state = worker.state()
        assert all(torch.equal(there[key], state[key]) for key in table)
        assert torch.equal(there["ids"], last["ids"])
        assert all(torch.allclose(last[key], there[key], rtol=1e-6, atol=1e-6) for key in trained)
        assert not any(torch.equal(first[key], there[key]) for key in trained)
        after_a_state = pulled(worker, table)
        assert all(torch.equal(after_a_state[key], there[key]) for key in table)
        worker.close()


def test_many_pulls_under_way_and_through_memory(nursery: Nursery, tmp_path: Path) -> None:
    """Differences are small whole numbers, so codes are exact; what a caller does to what it pulled is its own business."""
    table = {"a": torch.zeros(3000), "b": torch.zeros(50, dtype=torch.bfloat16)}
    with parameter_servers(tmp_path, 2, nursery=nursery) as servers:
        near = servers.connect(table, codec=codec_of("bf16"), chunk_bytes=8192)
        far = servers.connect(table, worker=1, codec=codec_of("bf16"), chunk_bytes=8192, shared_memory=False)
        near.init(table)
        near.set_optimizer(recipe(table))
        gradients = {key: torch.full_like(value, -1.0) for key, value in table.items()}
        for step in range(1, 6):
            for worker in (near, far):
                worker.push(gradients).wait()
                worker.commit()
            for worker in (near, far):
                intos = [{key: torch.full_like(value, torch.nan) for key, value in table.items()} for _ in range(7)]
                waiting = [worker.pull(into, priority=n % 2) for n, into in enumerate(intos)]
                waiting += [worker.pull({"a": intos[0]["a"]})]
                for each in reversed(waiting):
                    each.wait()
                for into in intos:
                    assert all(value.unique().tolist() == [2.0 * step] for value in into.values())
                    into["a"].zero_()
        assert all(
            traffic.no_shared_memory_reason == "" and traffic.shared_sent_bytes > 0 for traffic in near.traffic()
        )
        near.close()
        far.close()


@pytest.mark.full
@pytest.mark.parametrize(("steps", "kills"), [(8, ()), (60, (15, 30, 45))], ids=["network", "kills"])
def test_codes_add_up_over_a_bad_network_and_killed_servers(
    nursery: Nursery, tmp_path: Path, steps: int, kills: tuple[int, ...]
) -> None:
    table = {"a": torch.zeros(3000), "b": torch.zeros(700, dtype=torch.float64)}
    gradients = {key: torch.full_like(value, -1.0) for key, value in table.items()}
    with (
        parameter_servers(tmp_path, 2, nursery=nursery, replicas=2) as servers,
        Chaos(servers.addresses[0], seed=1, **HARM) as first,
        Chaos(servers.addresses[1], seed=2, **HARM) as second,
    ):
        straight, servers.addresses = servers.addresses, [first.address, second.address]
        common = {"codec": codec_of("bf16"), "chunk_bytes": 8192, "shared_memory": False}
        workers = [servers.connect(table, worker=number, **common) for number in range(2)]
        servers.addresses = straight
        workers[0].init(table)
        workers[0].set_optimizer(recipe(table))
        for step in range(steps):
            if step in kills:
                servers.kill(step % 2)
                servers.restart(step % 2)
            for number, worker in enumerate(workers):
                into = {key: torch.empty_like(value) for key, value in table.items()}
                if step % 3:
                    worker.push(gradients, into).wait()
                else:
                    worker.push(gradients).wait()
                    worker.pull(into).wait()
                worker.commit()
                assert {float(each) for value in into.values() for each in value.unique()} == {2.0 * step + number + 1}
        assert sum(traffic.num_reconnects for worker in workers for traffic in worker.traffic()) > 0
        # most came coded all the same: in full it is 8 bytes for each of 700, and 4 for each of 3000
        if kills:
            assert sum(map(received, workers)) < 2 * steps * (700 * 8 + 3000 * 4) * 0.8
        for worker in workers:
            worker.close()

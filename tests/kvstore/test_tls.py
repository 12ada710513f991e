"""Under TLS: a store, its servers, their second copies and a measurement, through the settings that a user has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from certificates import Authority
from nursery import Nursery
from parameter_servers import parameter_servers

from unisono.dist import JobSpec, World
from unisono.errors import ConfigError
from unisono.kvstore import KVStore, ServerConfig, create_kvstore
from unisono.kvstore.bench.processes import measure_on_this_host
from unisono.kvstore.bench.settings import BenchSettings
from unisono.kvstore.wire.auth import AuthError
from unisono.kvstore.wire.tls import TLSContexts, read_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority(tmp_path_factory.mktemp("tls") / "jobs").host("n1")


def test_a_store_and_second_copies_under_tls(tmp_path: Path, nursery: Nursery, folder: Path) -> None:
    environ = {"UNISONO_TLS": str(folder)}
    world = World.alone(JobSpec(run_id="tls"))
    with parameter_servers(tmp_path, 2, replicas=2, nursery=nursery, environ=environ) as servers:

        def store(tls: TLSContexts | None, restart_count: int = 0) -> KVStore:
            config = ServerConfig(
                addresses=servers.addresses, secret=servers.secret, tls=tls, worker_restart_count=restart_count
            )
            return create_kvstore("dist_async", world, servers=config)

        mine = store(read_tls(environ))
        mine.set_optimizer("sgd", lr=1.0, momentum=0.0)
        values = {f"w{n}": torch.zeros(1000) for n in range(4)}
        mine.init(values)
        mine.push({key: torch.ones(1000) for key in values}).wait()
        mine.pushpull({key: torch.ones(1000) for key in values}, out=list(values.values())).wait()
        mine.close()
        assert all(value.eq(-2).all() for value in values.values())
        # each push was acknowledged when the next server had it too, over a connection of theirs
        assert all(" under TLS\n" in servers.log(server) for server in (0, 1))
        other = read_tls({"UNISONO_TLS": str(Authority(tmp_path / "others").host("n1"))})
        with pytest.raises(AuthError, match=r"the certificate of the server at .* is not accepted here"):
            store(other, restart_count=1).init(values)


def test_a_server_whose_folder_is_no_good_says_so_and_leaves(tmp_path: Path, nursery: Nursery) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery, environ={"UNISONO_TLS": str(tmp_path)}) as servers:
        servers.processes[0].wait(30)
        assert "has no certificate.pem and no key.pem and no authority.pem" in servers.log(0)


def test_tls_is_for_stores_with_servers(folder: Path) -> None:
    config = ServerConfig(addresses=[("127.0.0.1", 1)], secret=bytes(32), tls=read_tls({"UNISONO_TLS": str(folder)}))
    with pytest.raises(ConfigError, match="a store of kind 'local' with servers"):
        create_kvstore("local", World.alone(JobSpec()), servers=config)
    with pytest.raises(ConfigError, match="TLS for dist_sync"):
        BenchSettings(kinds=("dist_sync",), tls=str(folder))


@pytest.mark.full
def test_a_measurement_under_tls(folder: Path) -> None:
    settings = BenchSettings(kinds=("dist_async",), sizes=("1MB",), rounds=2, tls=str(folder))
    found = measure_on_this_host(settings, 1, timeout_s=60)
    assert [row["checked"] for row in found["rows"] if row["kind"] == "dist_async"] == ["exact"], json.dumps(found)

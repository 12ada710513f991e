"""Servers that workers start: whose secret they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.dist import JobSpec, World
from unisono.errors import LaunchError
from unisono.kvstore.server.child_servers import child_servers


def test_on_several_hosts_without_a_secret_and_without_tls_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNISONO_SECRET_FILE", "UNISONO_SECRET_FD"):
        monkeypatch.delenv(name, raising=False)
    world = World(JobSpec(world_size=2, local_world=1, source="torchrun"))
    with pytest.raises(LaunchError) as caught, child_servers(world, 1):
        raise AssertionError("they were started")
    (problem,) = caught.value.problems
    assert problem.given == (
        "parameter servers on several hosts in a job that torchrun started, and neither UNISONO_SECRET_FILE nor launch.tls"
    )
    assert problem.rule == "servers and workers prove to each other that they belong to one job"
    assert problem.consequence.endswith("so nothing was started")
    assert "UNISONO_SECRET_FILE=secret" in problem.nearest


@pytest.mark.full
def test_they_have_the_secret_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    monkeypatch.setenv("UNISONO_SECRET_FILE", str(secret))
    with child_servers(World(JobSpec()), 1) as (_, given):
        assert given == secret.read_bytes()

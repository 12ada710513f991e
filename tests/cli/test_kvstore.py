"""``unisono kvstore bench`` alone, inside a job, and with what it cannot use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from unisono.cli.main import cli
from unisono.errors import ConfigError

SMALL = ("--kind", "dist_sync", "--size", "1KB", "--rounds", "1")


@pytest.mark.full
def test_a_table_and_the_verdict() -> None:
    result = CliRunner().invoke(cli, ["kvstore", "bench", *SMALL, "--codec", "none,int8"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("2 workers, 1 servers; median of rounds")
    assert lines[1].split()[:4] == ["kind", "codec", "size", "keys"]
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["all_reduce", "none", "1KB", "1"],
        ["dist_sync", "none", "1KB", "1"],
        ["dist_sync", "int8", "1KB", "1"],
    ]
    assert lines[5].startswith("int8: 3.98 times smaller, encodes ")
    assert lines[6].startswith("auto: ")


@pytest.mark.full
def test_inside_a_job_its_processes_are_the_workers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "unisono", "kvstore", "bench", *SMALL, "--kind", "dist_async", "--json"],
            env=os.environ
            | {name: str(value) for name, value in numbers.items()}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert told[1] == ""
    assert [row["kind"] for row in json.loads(told[0])["rows"]] == ["all_reduce", "dist_sync", "dist_async"]


def test_workers_of_a_job_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    result = CliRunner().invoke(cli, ["kvstore", "bench", *SMALL, "--workers", "3"])
    assert isinstance(result.exception, ConfigError)
    assert "--workers 3 in a job of 2 processes" in str(result.exception)

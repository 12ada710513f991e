"""A server process finds its place, and leaves with what it acknowledged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import LaunchError
from unisono.kvstore.server import snapshot
from unisono.kvstore.server.process import ServerSettings, server_settings

ENVIRON = {
    "UNISONO_SERVER": "1",
    "UNISONO_SERVER_ADDRESSES": "10.0.0.1:5000,fe80::1:5001",
    "UNISONO_RESTART_COUNT": "4",
}
ADDRESSES = (("10.0.0.1", 5000), ("fe80::1", 5001))


def test_reads_its_seat() -> None:
    assert server_settings(ENVIRON) == ServerSettings(server_index=1, addresses=ADDRESSES, server_restart_count=4)
    named = ENVIRON | {
        "UNISONO_LISTEN_FD": "7",
        "UNISONO_REPLICAS": "2",
        "UNISONO_SNAPSHOTS": "/somewhere",
        "UNISONO_SNAPSHOT_EVERY_S": "2.5",
    }
    found = server_settings(named)
    assert found == ServerSettings(
        server_index=1,
        addresses=ADDRESSES,
        server_restart_count=4,
        listen_fd=7,
        num_copies=2,
        snapshots=Path("/somewhere/server-1"),
        snapshot_every_s=2.5,
    )
    assert found.next_address == ADDRESSES[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"UNISONO_SERVER": "2"}, "UNISONO_SERVER is 2\n.*servers, 0 to 1"),
        ({"UNISONO_SERVER": "-1"}, "UNISONO_SERVER is '-1'"),
        ({"UNISONO_RESTART_COUNT": None}, "UNISONO_RESTART_COUNT is unset"),
        ({"UNISONO_SERVER_ADDRESSES": None}, "UNISONO_SERVER_ADDRESSES is unset"),
        ({"UNISONO_SERVER_ADDRESSES": "h:1,host"}, "each server is host:port"),
        ({"UNISONO_SERVER_ADDRESSES": "h:1,h:70000"}, "each server is host:port"),
        ({"UNISONO_REPLICAS": "3"}, "UNISONO_REPLICAS is 3 with 2 servers"),
        ({"UNISONO_SNAPSHOT_EVERY_S": "0"}, "UNISONO_SNAPSHOT_EVERY_S is '0'"),
        ({"UNISONO_SNAPSHOT_EVERY_S": "soon"}, "a number of seconds above 0"),
    ],
)
def test_a_wrong_environment_is_named(change: dict[str, str | None], text: str) -> None:
    environ = {name: value for name, value in (ENVIRON | change).items() if value is not None}
    with pytest.raises(LaunchError, match=text):
        server_settings(environ)


PROGRAM = """
import sys, torch
from pathlib import Path
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.process import ServerSettings, run_until_stopped
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.wire.auth import Identity

class Open:
    def close(self):
        print("closed", flush=True)

def serve():
    server.hello(Identity("worker", 0, 1, 0, ""), RunSpec(table={"a": ((2,), torch.float32)}, num_servers=1).to_json())
    print("serving", flush=True)
    return Open()

folder = Path(sys.argv[1])
settings = ServerSettings(server_index=0, addresses=(("h", 1),), server_restart_count=0, snapshots=folder)
server = ParameterServer(0, snapshots=folder)
run_until_stopped(settings, server, serve)
"""


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_ends(tmp_path: Path, stop: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ, text=True
    )
    assert process.stdout.readline() == "serving\n"
    process.send_signal(stop)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "closed\n")
    assert snapshot.read_newest_snapshot(tmp_path).facts["agreed"]["table"] == {"a": [[2], "float32"]}

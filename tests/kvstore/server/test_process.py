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
from unisono.kvstore.server.process import Seat, seat_from_environ

ENVIRON = {"UNISONO_SERVER": "1", "UNISONO_SERVERS": "2", "UNISONO_EPOCH": "4", "UNISONO_LISTEN_FD": "7"}


def test_reads_its_seat() -> None:
    assert seat_from_environ(ENVIRON) == Seat(server=1, servers=2, epoch=4, listen_fd=7)
    named = {name: value for name, value in ENVIRON.items() if name != "UNISONO_LISTEN_FD"} | {
        "UNISONO_SERVER_ADDRESS": "fe80::1:5000",
        "UNISONO_SNAPSHOTS": "/somewhere",
        "UNISONO_SNAPSHOT_EVERY_S": "2.5",
    }
    assert seat_from_environ(named) == Seat(
        server=1,
        servers=2,
        epoch=4,
        address=("fe80::1", 5000),
        snapshots=Path("/somewhere/server-1"),
        snapshot_every_s=2.5,
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"UNISONO_SERVER": "2"}, "UNISONO_SERVER is 2\n.*servers are 0 to 1"),
        ({"UNISONO_SERVER": "-1"}, "UNISONO_SERVER is '-1'"),
        ({"UNISONO_EPOCH": None}, "UNISONO_EPOCH is unset"),
        ({"UNISONO_LISTEN_FD": None}, "neither of UNISONO_LISTEN_FD and UNISONO_SERVER_ADDRESS is set"),
        ({"UNISONO_SERVER_ADDRESS": "h:1"}, "UNISONO_LISTEN_FD and UNISONO_SERVER_ADDRESS is set"),
        ({"UNISONO_LISTEN_FD": None, "UNISONO_SERVER_ADDRESS": "host"}, "it is host:port"),
        ({"UNISONO_LISTEN_FD": None, "UNISONO_SERVER_ADDRESS": "h:70000"}, "it is host:port"),
        ({"UNISONO_SNAPSHOT_EVERY_S": "0"}, "UNISONO_SNAPSHOT_EVERY_S is '0'"),
        ({"UNISONO_SNAPSHOT_EVERY_S": "soon"}, "a number of seconds above 0"),
    ],
)
def test_a_wrong_environment_is_named(change: dict[str, str | None], text: str) -> None:
    environ = {name: value for name, value in (ENVIRON | change).items() if value is not None}
    with pytest.raises(LaunchError, match=text):
        seat_from_environ(environ)


PROGRAM = """
import sys, torch
from pathlib import Path
from unisono.kvstore.server.agreed import Agreed
from unisono.kvstore.server.process import Seat, run
from unisono.kvstore.server.service import Service
from unisono.kvstore.wire.auth import Peer

class Open:
    def close(self):
        print("closed", flush=True)

def serve(seat, service):
    service.hello(Peer("worker", 0, 1, 0, ""), Agreed(table={"a": ((2,), torch.float32)}, servers=1).json())
    print("serving", flush=True)
    return Open()

folder = Path(sys.argv[1])
run(Seat(server=0, servers=1, epoch=0, listen_fd=0, snapshots=folder), Service(0, snapshots=folder), serve)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_ends(tmp_path: Path, stop: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ, text=True
    )
    assert process.stdout.readline() == "serving\n"
    process.send_signal(stop)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "closed\n")
    assert snapshot.newest(tmp_path).facts["agreed"]["table"] == {"a": [[2], "float32"]}

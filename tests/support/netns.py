"""Two hosts on one machine: network namespaces joined by a cable of limited speed, for tests of what a real one does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tools import missing, skip_without


@dataclass(frozen=True, kw_only=True, slots=True)
class Cable:
    """Namespaces and addresses of its two ends; each end is an interface of the name ``end``."""

    here: str
    there: str
    here_address: str = "10.213.7.1"
    there_address: str = "10.213.7.2"

    def pull(self) -> None:
        """No carrier from now on."""
        _run("ip", "-n", self.there, "link", "set", "end", "down")

    def plug(self) -> None:
        """And again."""
        _run("ip", "-n", self.there, "link", "set", "end", "up")

    def received_bytes(self) -> int:
        """By the interface ``here``, headers of packets included."""
        text = _run("ip", "-n", self.here, "-s", "-j", "link", "show", "dev", "end")
        return int(json.loads(text)[0]["stats64"]["rx"]["bytes"])


@contextlib.contextmanager
def cable(mbit: int) -> Iterator[Cable]:
    """Skips the test where namespaces are not permitted, unless CI has found that they are (.ci/run)."""
    if absent := missing("ip", "tc"):
        pytest.skip(f"iproute2 is not installed: no {' and no '.join(absent)}")
    if os.geteuid():
        skip_without("netns", "network namespaces need root")
    made = Cable(here=f"unisono-{os.getpid()}-a", there=f"unisono-{os.getpid()}-b")
    with contextlib.ExitStack() as stack:
        for name in (made.here, made.there):
            try:
                _run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                skip_without("netns", f"network namespaces are not permitted here: {error.stderr}")
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", made.here, "link", "add", "end", "type", "veth", "peer", "name", "end", "netns", made.there)
        for name, address in ((made.here, made.here_address), (made.there, made.there_address)):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "end")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "end", "up")
            limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "end", "root", "tbf", *limit)
        yield made


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
